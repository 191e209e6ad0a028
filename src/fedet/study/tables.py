"""The tables of a study as text: for the terminal and HTML, Markdown, CSV, and LaTeX in the paper's layout."""

from __future__ import annotations

import csv
import io
import itertools
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedet.reporting import statistics
from fedet.reporting.references import HEADING
from fedet.reporting.results import si
from fedet.reporting.statistics import Spread, spread
from fedet.reporting.words import METHODS
from fedet.study.cells import Cell, Grid, Place, complete, is_reference, papers, summary, target, values
from fedet.study.plan import BASE, METHOD, VARIANT, Plan, across, column_names

NAMES = METHODS | {
    "data.alpha": "α",
    "method.lam": "λ",
    "methods.fedet.lam": "λ",
}
"""How methods and keys are written in tables."""
NOT_RUN, NONE = "not run", ""
LINE = 100
"""The length of a line of text in documents."""


@dataclass(frozen=True)
class Table:
    """A table as text; `bold` has the positions (row, column) of the best cells, and the last rows may be references."""

    head: list[str]
    body: list[list[str]]
    bold: frozenset[tuple[int, int]] = frozenset()
    references: int = 0

    @property
    def heading_before(self) -> int | None:
        """The first row that is a reference, where there are others before it."""
        return len(self.body) - self.references if 0 < self.references < len(self.body) else None


def main(grid: Grid) -> Table:
    """The plan's table: its metric in every cell, with the paper's value beside it where there is one."""
    plan = grid.plan
    head, columns, places = [" / ".join(name.rpartition(".")[2] for name in plan.rows)], [], {}
    for column in grid.columns:
        cells = {cell.row: cell for cell in grid.column(column)}
        head.append(column_label(plan, column) or plan.metric)
        if plan.metric == "c_acc":
            head[-1] += f", C_acc({_target(cells.values(), plan)})"
        columns.append([text(cells[row], plan) if row in cells else NONE for row in grid.rows])
        places[column] = len(columns)
        if any(papers(cell, plan) for cell in cells.values()):
            head.append("paper")
            columns.append([_papers(cells.get(row), plan) for row in grid.rows])
    firsts = [row_label(plan, row) for row in grid.rows]
    groups = map(grid.row, grid.rows) if across(plan) else map(grid.column, grid.columns)
    bold = frozenset((grid.rows.index(cell.row), places[cell.column]) for group in groups for cell in _best(group, plan))
    return Table(head, [[first, *cells] for first, *cells in zip(firsts, *columns, strict=True)], bold, grid.references)


def details(grid: Grid) -> Table:
    """One row per cell that has a record: all accuracies, costs, traffic, time and convergence."""
    plan, names = grid.plan, column_names(grid.plan)
    levels = sorted({float(x) for cell in grid.cells.values() if cell.records for x in _levels(cell)})
    head = [*(name.rpartition(".")[2] for name in [*names, *plan.rows]), "best, %", "late, %", "final, %", "n", "rounds"]
    head += ["converged", "parameters", *(f"C_acc({100 * level:g}%)" for level in levels), "minutes"]
    body = []
    for column in grid.columns:
        for cell in grid.column(column):
            if not cell.records:
                continue
            places = [*zip(names, column, strict=True), *zip(plan.rows, cell.row, strict=True)]
            costs = [] if is_reference(cell, plan) else _levels(cell)  # references send nothing
            body.append([_bare(plan, name, value) for name, value in places] + _details(cell, levels, costs))
    return Table(head, body)


def not_run(grid: Grid) -> str:
    """A sentence on the rows and columns in which there is no record, empty if there are none."""
    plan, found = grid.plan, grid.measured()
    missing = [row_label(plan, row) for row in grid.rows if row not in found.rows]
    missing += [column_label(plan, column) for column in grid.columns if column not in found.columns]
    return listed_as_not_run(missing) if found.rows else "Not run yet."


def listed_as_not_run(names: Sequence[str]) -> str:
    """The sentence that lists these, empty if there are none."""
    return textwrap.fill(f"Not run yet: {'; '.join(names)}.", LINE, break_on_hyphens=False) if names else ""


def differences(grid: Grid) -> Table:
    """What the plan compares, each against one of them, paired by seed, with a confidence interval of 95 %.

    Nothing is decided where a seed has no value, because the means then are of those that went well.
    """
    plan, names = grid.plan, column_names(grid.plan)
    inside = across(plan)
    places, listed, around = (grid.columns, grid.rows, plan.rows) if inside else (grid.rows, grid.columns, names)
    own = _against(grid)
    head = ["against", *(label(plan, name, None) for name in around), "difference", "95 % interval", "n", "verdict"]
    body = []
    for where, place in itertools.product(listed, places):
        ours, other = (grid.cells.get((where, side) if inside else (side, where)) for side in (own, place))
        if ours is None or other is None or place == own:
            continue
        found = statistics.paired(values(ours, plan), values(other, plan))
        if found is None:
            continue
        known = found.half_width is not None
        ends = (found.mean - (found.half_width or 0), found.mean + (found.half_width or 0))
        decided = found.certain and complete(ours, plan) and complete(other, plan)
        verdict = ("better" if (found.mean > 0) != (plan.metric == "c_acc") else "worse") if decided else "undecided"
        cells = [_bare(plan, name, value) for name, value in zip(around, where, strict=True)]
        interval = f"{_amount(ends[0], plan)} to {_amount(ends[1], plan)}" if known else "needs two seeds"
        first = column_label(plan, place) if inside else row_label(plan, place)
        body.append([first, *cells, _amount(found.mean, plan), interval, str(found.n), verdict])
    return Table(head, body)


def against(grid: Grid) -> str:
    """What the others are compared with, as a heading."""
    label_of = column_label if across(grid.plan) else row_label
    return label_of(grid.plan, _against(grid))


def _against(grid: Grid) -> Place:
    """The row (or column) that the others are compared with; by default the last one that is not a reference."""
    places = grid.columns if across(grid.plan) else grid.rows[: len(grid.rows) - grid.references] or grid.rows
    return next((place for place in places if str(place[0]) == grid.plan.against), places[-1])


def text(cell: Cell, plan: Plan, plus_minus: str = " ± ") -> str:
    """A cell's mean and deviation, with a note on runs that are missing, failed or never reached the target."""
    found, planned = summary(cell, plan), len(cell.runs)
    notes = []
    if cell.missing and cell.records:
        notes.append(f"{len(cell.records)} of {planned} runs")
    if cell.failed and cell.failed < len(cell.records):
        notes.append(f"{cell.failed} diverged")
    if not cell.records:
        return NOT_RUN
    words = "diverged" if not cell.scored else "not reached" if plan.metric == "c_acc" else "–"
    if found is not None:
        words = shown(found, plan, plus_minus)
        if found.n < len(cell.scored):
            notes.append(f"{found.n} of {len(cell.scored)} reached it")
    return words + (f" ({', '.join(notes)})" if notes else "")


def shown(value: Spread, plan: Plan, plus_minus: str = " ± ") -> str:
    """A mean and its deviation: accuracies in percent, costs as counts."""
    if plan.metric == "c_acc":
        return si(value.mean) + (f"{plus_minus}{si(value.std)}" if value.std is not None else "")
    return f"{100 * value.mean:.2f}" + (f"{plus_minus}{100 * value.std:.2f}" if value.std is not None else "")


def label(plan: Plan, name: str, value: Any) -> str:
    """A coordinate and its value as a heading; without a value, the coordinate alone."""
    known = NAMES | plan.labels
    short = known.get(name, name.rpartition(".")[2])
    if value is None:
        return short
    return _bare(plan, name, value) if name in (BASE, METHOD, VARIANT, "data") else f"{short} = {_bare(plan, name, value)}"


def row_label(plan: Plan, row: Place) -> str:
    """The heading of a row."""
    return _heading(plan, plan.rows, row)


def column_label(plan: Plan, column: Place) -> str:
    """The heading of a column."""
    return _heading(plan, column_names(plan), column)


def _heading(plan: Plan, names: Sequence[str], place: Place) -> str:
    """The values of the coordinates; one that these runs do not have is left out."""
    return ", ".join(label(plan, name, value) for name, value in zip(names, place, strict=True) if value not in (None, ""))


def to_markdown(table: Table) -> str:
    """The table in Markdown."""
    body = [
        [f"**{cell}**" if (i, j) in table.bold else cell for j, cell in enumerate(cells)] for i, cells in enumerate(table.body)
    ]
    if table.heading_before is not None:
        body.insert(table.heading_before, [f"*{HEADING}*", *[""] * (len(table.head) - 1)])
    rows = [table.head, ["---"] * len(table.head), *body]
    return "\n".join("| " + " | ".join(map(_markdown, row)) + " |" for row in rows)


def to_csv(grid: Grid) -> str:
    """Every run of the plan with all digits, one per line; accuracies are fractions."""
    names = list(dict.fromkeys(name for cell in grid.cells.values() for name in cell.example.coordinates))
    numbers = ("rounds", "best", "best_round", "late", "final", "converged", "params_up", "params_down")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "key", "state", *numbers, "seconds", "c_acc"])
    for cell in grid.cells.values():
        for seed, run in cell.runs.items():
            record, at = cell.records.get(seed), [run.coordinates.get(name) for name in names]
            if record is None:
                writer.writerow([*at, run.key, NOT_RUN])
                continue
            costs = " ".join(f"{level}:{cost}" for level, cost in record.result["c_acc"].items())
            row = [record.result[name] for name in numbers]
            writer.writerow([*at, run.key, record.failed or "finished", *row, record.result["seconds"]["total"], costs])
    return out.getvalue()


def to_tex(grid: Grid) -> str:
    """The main table as a tabular for booktabs: the first coordinate of the columns spans the others, as in the paper."""
    plan, names, table = grid.plan, column_names(grid.plan), main(grid)
    spans: list[list[Any]] = []
    inner = [""]
    for column in grid.columns:
        width = 2 if any(papers(cell, plan) for cell in grid.column(column)) else 1
        outer, below = (_tex(_heading(plan, *part)) for part in ((names[:1], column[:1]), (names[1:], column[1:])))
        if plan.metric == "c_acc":
            below += f"{', ' if below else ''}$C_{{\\text{{acc}}}}({_target(grid.column(column), plan)[:-1]}\\%)$"
        inner += [below, *["paper"] * (width - 1)]
        if spans and spans[-1][0] == outer:
            spans[-1][1] += width
        else:
            spans.append([outer, width])
    top = " & ".join(["", *(rf"\multicolumn{{{width}}}{{c}}{{{outer}}}" for outer, width in spans)])
    ends = list(itertools.accumulate((width for _, width in spans), initial=1))
    rules = " ".join(rf"\cmidrule(lr){{{start + 1}-{end}}}" for start, end in itertools.pairwise(ends))
    lines = [
        r"% needs \usepackage{amsmath,booktabs}",
        rf"\begin{{tabular}}{{@{{}}l{'c' * (len(table.head) - 1)}@{{}}}}",
        r"\toprule",
        rf"{top} \\",
        *([rules, rf"{' & '.join(inner)} \\"] if any(inner) else []),
        r"\midrule",
    ]
    for i, cells in enumerate(table.body):
        if i == table.heading_before:
            lines += [r"\midrule", rf"\multicolumn{{{len(table.head)}}}{{l}}{{\emph{{{HEADING}}}}} \\"]
        written = [_tex(cells[0])]
        written += [rf"\textbf{{{_tex(cell)}}}" if (i, j) in table.bold else _tex(cell) for j, cell in enumerate(cells[1:], 1)]
        lines.append(rf"{' & '.join(written)} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _best(cells: Sequence[Cell], plan: Plan) -> list[Cell]:
    """The cell with the best mean over all of its seeds; references do not count, nor one cell that is alone."""
    found = [(cell, summary(cell, plan)) for cell in cells if not is_reference(cell, plan) and complete(cell, plan)]
    means = [(cell, value.mean) for cell, value in found if value is not None]
    if len(means) < 2:
        return []
    choose = min if plan.metric == "c_acc" else max
    return [choose(means, key=lambda each: each[1])[0]]


def _target(cells: Iterable[Cell], plan: Plan) -> str:
    return f"{100 * target(next(iter(cells)), plan):g}%"


def _markdown(words: str) -> str:
    """Text in a cell of a Markdown table."""
    return words.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _papers(cell: Cell | None, plan: Plan) -> str:
    found = papers(cell, plan) if cell else None
    if not found:
        return "–"
    if plan.metric == "c_acc":
        return si(found[0])
    return f"{found[0]:.2f}" + (f" ± {found[1]:.2f}" if len(found) > 1 else "")


def _details(cell: Cell, levels: Sequence[float], own: Sequence[float]) -> list[str]:
    """The cell's numbers, with the cost of those of the levels that are its own."""
    scored = list(cell.scored.values())
    if not scored:
        return ["diverged", *["–"] * (7 + len(levels))]
    flags = [record.result["converged"] for record in scored]
    out = [percent([record.result[name] for record in scored]) for name in ("best", "late", "final")]
    out += [f"{len(scored)} of {len(cell.runs)}" if len(scored) < len(cell.runs) else str(len(scored))]
    out += [f"{_mean([record.result['rounds'] for record in scored]):g}"]
    out += [f"{sum(flag is True for flag in flags)} of {len(flags)}" if any(flag is not None for flag in flags) else "–"]
    out += [si(_mean([record.params_total for record in scored]))]
    for level in levels:
        if level not in own:
            out.append("–")
            continue
        costs = [cost for record in scored if (cost := record.c_acc(level)) is not None]
        part = f" ({len(costs)} of {len(scored)})" if 0 < len(costs) < len(scored) else ""
        out.append(f"{si(_mean(costs))}{part}" if costs else "not reached")
    return [*out, f"{_mean([record.result['seconds']['total'] for record in scored]) / 60:.1f}"]


def _levels(cell: Cell) -> list[float]:
    return cell.example.config.run.report_accuracy


def percent(scores: Sequence[float | None]) -> str:
    """The mean and deviation of accuracies, in percent."""
    found = spread([score for score in scores if score is not None])
    if found is None:
        return "–"
    return f"{100 * found.mean:.2f}" + (f" ± {100 * found.std:.2f}" if found.std is not None else "")


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _amount(value: float, plan: Plan) -> str:
    if plan.metric == "c_acc":
        return ("+" if value > 0 else "") + si(value)
    return f"{100 * value:+.2f}"


def _bare(plan: Plan, name: str, value: Any) -> str:
    known = NAMES | plan.labels
    if isinstance(value, bool):
        return "yes" if value else "no"
    return known.get(str(value), f"{value:g}" if isinstance(value, float) else "–" if value is None else str(value))


def _tex(words: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}
    special |= {"α": r"$\alpha$", "λ": r"$\lambda$", "<": "$<$", ">": "$>$", "|": "$|$", "\n": " "}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in words)
