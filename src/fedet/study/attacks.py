"""What attackers do to the methods of a plan: accuracy by attack, share and defence, and whether it stays in bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from fedet.errors import ConfigError
from fedet.reporting import panels
from fedet.reporting.curves import Curve
from fedet.reporting.panels import Panel
from fedet.reporting.statistics import spread
from fedet.study.cells import Cell, Grid
from fedet.study.plan import BASE, METHOD, VARIANT, Plan
from fedet.study.tables import NONE, NOT_RUN, Table, label, listed_as_not_run, percent, to_markdown

KIND, SHARE = "run.attack.kind", "run.attack.share"
NO_ATTACK = "none"
ROUNDING = 1e-9


@dataclass(frozen=True)
class Setting:
    """The cells of one base and method: `clean` by defence, `attacked` by attack, share and defence."""

    title: str
    clean: dict[str, Cell] = field(default_factory=dict)
    attacked: dict[tuple[str, float, str], Cell] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """The attacks, in the plan's order."""
        return list(dict.fromkeys(kind for kind, _, _ in self.attacked))

    @property
    def shares(self) -> list[float]:
        """The shares of attackers, ascending."""
        return sorted({share for _, share, _ in self.attacked})

    @property
    def defences(self) -> list[str]:
        """The plan's variants, in its order."""
        return list(dict.fromkeys([*self.clean, *(defence for _, _, defence in self.attacked)]))

    @property
    def reference(self) -> Cell | None:
        """The runs without attackers and, where the plan has them, without defences: what the others are compared with."""
        return next(iter(sorted(self.clean.values(), key=_defended)), None)

    @property
    def measured(self) -> bool:
        """Whether any of the runs has a record."""
        return any(cell.records for cell in (*self.clean.values(), *self.attacked.values()))


@dataclass(frozen=True)
class Bound:
    """What defences should reach at a share of attackers: `points` lost at most on average, or a `ratio` in every run."""

    words: str
    points: float | None = None
    ratio: float = 0.0


BOUNDS = {
    0.0: Bound("without attackers, at most 1 point is lost", points=1),
    0.2: Bound("with 20 % attackers, within 3 points of the clean run", points=3),
    0.4: Bound("with 40 % attackers, no run ends, and none is below half of the clean run", ratio=0.5),
}
"""By the share of attackers; other shares have none."""


@dataclass(frozen=True)
class Verdict:
    """Whether a bound holds, and the number that decides it."""

    holds: bool
    number: str


def settings(grid: Grid) -> list[Setting]:
    """The bases and methods of a plan whose axes are the kind of attack and the share of attackers."""
    axes = {axis for part in grid.plan.grids for axis in part.axes}
    if axes != {KIND, SHARE}:
        raise ConfigError(f"this view needs a plan whose axes are {KIND} and {SHARE}, and no others")
    found: dict[tuple[str, str], Setting] = {}
    for cell in grid.cells.values():
        at, attack = cell.example.coordinates, cell.example.config.run.attack
        title = f"{label(grid.plan, METHOD, at[METHOD])}, {label(grid.plan, BASE, at[BASE])}"
        setting = found.setdefault((at[BASE], at[METHOD]), Setting(title))
        defence = str(at.get(VARIANT, ""))
        if attack is None:
            setting.clean.setdefault(defence, cell)  # the same runs at every share
        else:
            setting.attacked[attack.kind, attack.share, defence] = cell
    return list(found.values())


def verdict(setting: Setting, cell: Cell) -> Verdict | None:
    """Whether a cell is within its bound; None if it has none, or if there is nothing to compare."""
    bound = BOUNDS.get(_share(cell)) if _defended(cell) else None
    if bound is None:
        return None
    if cell.failed:
        return Verdict(False, _ended(cell))
    own, clean = _late(cell), _late(setting.reference)
    pairs = [(own[seed], clean[seed]) for seed in sorted(own.keys() & clean.keys())]
    if not pairs:
        return None
    if bound.points is None:
        ratio = min(a / c if c else 1.0 for a, c in pairs)
        return Verdict(ratio >= bound.ratio - ROUNDING, f"{100 * ratio:.0f} %")
    points = 100 * sum(a - c for a, c in pairs) / len(pairs)
    return Verdict(points >= -bound.points - ROUNDING, f"{points:+.2f}")


def tables(grid: Grid) -> str:
    """A table per base and method that has records, in Markdown: attacks by defence and share, after the clean run."""
    found = settings(grid)
    parts = [f"**{s.title}**\n\n{to_markdown(table(s, grid.plan))}" for s in found if s.measured]
    missing = [s.title for s in found if not s.measured]
    return "\n\n".join(filter(None, [*parts, listed_as_not_run(missing)]))


def table(setting: Setting, plan: Plan) -> Table:
    """Late and best accuracy of one base and method: a row per attack, the clean run first."""
    places = [(defence, share) for defence in setting.defences for share in setting.shares]
    head = [label(plan, KIND, None), *(f"{defence}, {100 * share:g} %" for defence, share in places)]
    clean = [_text(setting, setting.clean.get(defence)) for defence, _ in places]
    body = [[plan.labels.get(NO_ATTACK, NO_ATTACK), *clean]]
    for kind in setting.kinds:
        row = [_text(setting, setting.attacked.get((kind, share, defence))) for defence, share in places]
        body.append([plan.labels.get(kind, kind), *row])
    return Table(head, body)


def bounds(grid: Grid) -> Table:
    """For each bound, in how many of the measured cells it holds, and the others with their numbers."""
    found = settings(grid)
    body = []
    for share, bound in BOUNDS.items():
        judged = {name: verdict(setting, cell) for setting in found for name, cell in _at(setting, share)}
        known = {name: judgement for name, judgement in judged.items() if judgement is not None}
        broken = [f"{name} {judgement.number}" for name, judgement in known.items() if not judgement.holds]
        holds = f"{len(known) - len(broken)} of {len(known)}" if known else "–"
        body.append([bound.words, f"{len(known)} of {len(judged)}", holds, "; ".join(broken) or "–"])
    return Table(["bound", "measured", "holds", "not reached"], body)


def figures(grid: Grid) -> list[tuple[str, Figure]]:
    """Late accuracy against the share of attackers, a figure per base and method and a panel per attack that was run."""
    out = []
    for setting in settings(grid):
        found = [panel for kind in setting.kinds if (panel := _panel(setting, kind, grid.plan)) is not None]
        if found:
            title = f"{setting.title}: late accuracy against the share of attackers"
            out.append((title, panels.by_share(found, setting.defences)))
    return out


def _panel(setting: Setting, kind: str, plan: Plan) -> Panel | None:
    if not any(cell.records for (other, _, _), cell in setting.attacked.items() if other == kind):
        return None
    lines = {defence: _line(setting, kind, defence) for defence in setting.defences}
    curves = [_curve(defence, line) for defence, line in lines.items()]
    ended = {defence: [share for share, cell in line if cell.failed] for defence, line in lines.items()}
    return Panel(plan.labels.get(kind, kind), curves, ended)


def _line(setting: Setting, kind: str, defence: str) -> list[tuple[float, Cell]]:
    """The cells of one attack and defence by the share of attackers, the clean runs at zero."""
    clean = [(0.0, setting.clean[defence])] if defence in setting.clean else []
    places = [(share, setting.attacked.get((kind, share, defence))) for share in setting.shares]
    return [*clean, *((share, cell) for share, cell in places if cell is not None)]


def _curve(name: str, line: Sequence[tuple[float, Cell]]) -> Curve:
    points = [(share, found) for share, cell in line if (found := spread(list(_late(cell).values()))) is not None]
    shares, means = [share for share, _ in points], [found.mean for _, found in points]
    if all(found.std is None for _, found in points):
        return Curve(name, shares, means)
    low, high = ([found.mean + sign * (found.std or 0.0) for _, found in points] for sign in (-1, 1))
    return Curve(name, shares, means, low, high)


def _at(setting: Setting, share: float) -> Iterator[tuple[str, Cell]]:
    """The cells with defences at a share of attackers, with a name for each."""
    several = sum(_defended(cell) for cell in setting.clean.values()) > 1
    clean = {(NO_ATTACK, 0.0, defence): cell for defence, cell in setting.clean.items()}
    for (kind, at, defence), cell in (clean | setting.attacked).items():
        if at == share and _defended(cell):
            words = [setting.title, *([kind] if kind != NO_ATTACK else []), *([defence] if several else [])]
            yield ", ".join(words), cell


def _text(setting: Setting, cell: Cell | None) -> str:
    """A cell as text: late accuracy, the best in parentheses, what went wrong, and the verdict on its bound."""
    if cell is None:
        return NONE
    if not cell.records:
        return NOT_RUN
    found = list(cell.scored.values())
    late, best = percent([r.result["late"] for r in found]), percent([r.result["best"] for r in found])
    parts = [f"{late} ({best})"] if found else []
    if cell.missing:
        parts.append(f"n = {len(cell.records)}")
    if cell.failed:
        parts.append(_ended(cell))
    if lost := sum(record.result["lost_rounds"] for record in found):
        parts.append(f"{lost} of {sum(record.result['rounds'] for record in found)} rounds lost")
    if works := [record.result["backdoor"] for record in found if record.result.get("backdoor") is not None]:
        parts.append(f"back door {percent(works)}")
    judged = verdict(setting, cell)
    mark = "" if judged is None else " ✓" if judged.holds else " ✗"
    return ", ".join([*parts, *([judged.number] if judged and not cell.failed else [])]) + mark


def _ended(cell: Cell) -> str:
    """When the failed runs ended; a record has the rounds before that."""
    rounds = [record.result["rounds"] + 1 for record in cell.records.values() if record.failed is not None]
    return f"ended in round {', '.join(map(str, sorted(rounds)))}"


def _late(cell: Cell | None) -> dict[int, float]:
    scores = {seed: record.result["late"] for seed, record in cell.scored.items()} if cell else {}
    return {seed: float(score) for seed, score in scores.items() if score is not None}


def _share(cell: Cell) -> float:
    attack = cell.example.config.run.attack
    return attack.share if attack else 0.0


def _defended(cell: Cell) -> bool:
    return cell.example.config.run.robust is not None
