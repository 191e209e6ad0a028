"""Documents whose tables, figures and numbers come from records: what stands between two markers is generated.

The markers are `<!-- results: PLAN VIEW NAME=VALUE ... -->` and `<!-- end -->`; instead of a plan,
`measurements/NAME` is what a benchmark wrote.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedet.config.sources import nearest
from fedet.errors import ConfigError, FedetError
from fedet.reporting import figure_files
from fedet.storage.files import replacing
from fedet.study import attacks, ceilings, cells, claims, effects, measurements, pages, setups, tables
from fedet.study import plan as planning
from fedet.study.cells import Cell, Grid
from fedet.study.plan import Plan, PlannedRun, Scale
from fedet.study.records import Record, Store
from fedet.study.tables import Table

BEGIN = "<!-- results:"
BLOCK = re.compile(r"(?P<begin><!-- results: (?P<words>[^>]*?) -->)(?P<content>.*?)(?P<end><!-- end -->)", flags=re.S)
FENCED = re.compile(r"(^```.*?^```$)", flags=re.S | re.M)
IMAGES = Path("docs/img")
MEASURED = "measurements/"
"""Before the name of a measurement where otherwise a plan is named."""


@dataclass(frozen=True)
class Study:
    """A plan with its runs and the records they have."""

    plan: Plan
    runs: list[PlannedRun]
    store: Store

    @functools.cached_property
    def grid(self) -> Grid:
        """The cells of its table."""
        return cells.arrange(self.plan, self.runs, self.store.get)


class Documents:
    """The documents of a repository: README.md and everything in docs/."""

    def __init__(self, root: Path, records: Path) -> None:
        self.root, self.store = root, Store(records)
        self._studies: dict[tuple[str, str], Study] = {}

    def generate(self) -> dict[Path, bytes]:
        """What the documents and figures with results must contain, according to the records."""
        out: dict[Path, bytes] = {}
        for page in [*sorted(self.root.glob("*.md")), *sorted((self.root / "docs").rglob("*.md"))]:
            text = page.read_text(encoding="utf-8")
            parts = FENCED.split(text)  # an example of a marker is not a marker
            for part in parts[::2]:
                _check_markers(part, page)
            parts[::2] = [BLOCK.sub(functools.partial(self._block, page=page, out=out), part) for part in parts[::2]]
            if BLOCK.search("".join(parts[::2])):
                out[page] = "".join(parts).encode()
        return out

    def write(self) -> list[Path]:
        """Write what differs; returns those files."""
        changed = self.differing()
        for path, content in changed.items():
            with replacing(path) as draft:
                draft.write_bytes(content)
        return list(changed)

    def differing(self) -> dict[Path, bytes]:
        """The files that differ from the records, with what they should contain."""
        expected = self.generate()
        return {path: content for path, content in expected.items() if not path.is_file() or path.read_bytes() != content}

    def _block(self, found: re.Match[str], page: Path, out: dict[Path, bytes]) -> str:
        name, *words = found["words"].split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        views = [word for word in words if "=" not in word] or ["table"]
        try:
            content = self._view(name, views[0], options, page, out)
        except FedetError as error:
            raise ConfigError(f"{page}: <!-- results: {found['words']} -->: {error}") from None
        around = "" if views[0] in INLINE else "\n\n"
        return "".join([found["begin"], around, content, around, found["end"]])

    def _view(self, name: str, view: str, options: dict[str, str], page: Path, out: dict[Path, bytes]) -> str:
        if name.startswith(MEASURED):
            return _measured(self.root / measurements.FOLDER / f"{name.removeprefix(MEASURED)}.json", view, options)
        study = self._study(name, options.pop("scale", "desk"))
        if view in FIGURES:
            lines = []
            for number, (title, figure) in enumerate(FIGURES[view](study), start=1):
                if options.get("only", str(number)) != str(number):
                    continue
                path = self.root / IMAGES / f"{study.plan.name}-{view}-{number}.svg"
                out[path] = figure_files.svg(figure).encode()
                lines.append(f"![{title}]({_relative(path, page)})")
            return "\n\n".join(lines) or "Not run yet."
        known: Mapping[str, Callable[[Study, dict[str, str]], str]] = VIEWS | INLINE
        if view not in known:
            raise ConfigError(f"'{view}' is not a view{nearest(view, known)}: {', '.join([*known, *FIGURES])}")
        return known[view](study, options)

    def _study(self, name: str, scale: str) -> Study:
        if (name, scale) not in self._studies:
            own = self.root / name
            loaded = planning.load(str(own) if own.is_file() else name, _scale(scale))
            self._studies[name, scale] = Study(loaded, planning.expand(loaded), self.store)
        return self._studies[name, scale]


def _check_markers(text: str, page: Path) -> None:
    """Refuse a block without its end: it would never be checked, or would swallow what follows."""
    whole = [found for found in BLOCK.finditer(text) if BEGIN not in found["content"]]
    if len(whole) != text.count(BEGIN):
        raise ConfigError(f"{page}: a block that begins with `{BEGIN}` has no `<!-- end -->` before the next one")


def _measured(path: Path, view: str, options: Mapping[str, str]) -> str:
    found = measurements.read(path)
    if view == "source":
        return measurements.source(found)
    if view != "table":
        raise ConfigError(f"a measurement has no view '{view}': table, source")
    return measurements.tables(found, int(options["only"]) if options.get("only", "").isdecimal() else None)


def _scale(text: str) -> Scale:
    if text not in ("desk", "paper"):
        raise ConfigError(f"scale={text}: it is desk or paper")
    return "paper" if text == "paper" else "desk"


def _table(study: Study, options: dict[str, str]) -> str:
    if study.plan.kind == "sizes":
        return tables.to_markdown(setups.sizes(study.plan, study.runs, study.store.folder))
    return _with_not_run(study, tables.main)


def _with_not_run(study: Study, make: Callable[[Grid], Table]) -> str:
    """A table of the rows and columns that have records, and a sentence on the others."""
    found = study.grid.measured()
    return "\n\n".join(filter(None, [tables.to_markdown(make(found)) if found.rows else "", tables.not_run(study.grid)]))


def _details(study: Study, options: dict[str, str]) -> str:
    """All numbers of the cells with these coordinates."""
    kept = {place: cell for place, cell in study.grid.cells.items() if _matches(cell, options)}
    if not kept:
        raise ConfigError("no cell has these coordinates")
    found = tables.details(Grid(study.plan, study.grid.rows, study.grid.columns, kept))
    return tables.to_markdown(found) if found.body else "Not run yet."


def _claim(study: Study, options: dict[str, str]) -> str:
    return tables.to_markdown(claims.table(claims.judge(options.get("name", ""), study.grid)))


def _verdict(study: Study, options: dict[str, str]) -> str:
    return claims.verdict(claims.judge(options.get("name", ""), study.grid))


def _differences(study: Study, options: dict[str, str]) -> str:
    return tables.to_markdown(tables.differences(study.grid))


def _effects(study: Study, options: dict[str, str]) -> str:
    return _with_not_run(study, effects.table)


def _ceilings(study: Study, options: dict[str, str]) -> str:
    return tables.to_markdown(ceilings.ceilings(study.grid.measured(), options.get("method", "fedet-plus")))


def _goals(study: Study, options: dict[str, str]) -> str:
    return tables.to_markdown(ceilings.goals(study.grid.measured(), options.get("method", "fedet-plus")))


def _attacks(study: Study, options: dict[str, str]) -> str:
    return attacks.tables(study.grid)


def _bounds(study: Study, options: dict[str, str]) -> str:
    return tables.to_markdown(attacks.bounds(study.grid))


def _source(study: Study, options: dict[str, str]) -> str:
    """Where the numbers come from: the command, how many runs, their time, machine and versions."""
    found = _records(study)
    seeds = sorted({run.config.run.seed for run in study.runs})
    hours = sum(record.result["seconds"]["total"] for record in found) / 3600
    lines = [
        f"`fedet study {study.plan.name}`: {len(found)} of {len({run.key for run in study.runs})} runs, "
        f"seeds {', '.join(map(str, seeds))}, {hours:.1f} core-hours.",
        _listed("Processor", [f"{r.machine.get('cpu', '?')} ({r.machine.get('cpu_capability', '?')})" for r in found]),
        _listed("torch", [str(r.versions.get("torch", "?")) for r in found]),
        _listed("Commit of fedet", [str(r.versions.get("commit", "not known")) for r in found]),
    ]
    return "\n".join(textwrap.fill(f"- {line}", tables.LINE, subsequent_indent="  ") for line in lines if line)


def _listed(what: str, names: list[str]) -> str:
    return f"{what}: {', '.join(dict.fromkeys(sorted(names)))}." if names else ""


def _cell(study: Study, options: dict[str, str]) -> str:
    return tables.text(_found(study, options), study.plan)


def _hours(study: Study, options: dict[str, str]) -> str:
    return f"{sum(record.result['seconds']['total'] for record in _records(study)) / 3600:.1f}"


def _runs(study: Study, options: dict[str, str]) -> str:
    return str(len(_records(study)))


def _records(study: Study) -> list[Record]:
    unique = {run.key: study.store.get(run.key) for run in study.runs}
    return [record for record in unique.values() if record is not None]


def _found(study: Study, options: Mapping[str, str]) -> Cell:
    """The only cell with these coordinates."""
    found = [cell for cell in study.grid.cells.values() if _matches(cell, options)]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} cells have these coordinates, not one")
    return found[0]


def _matches(cell: Cell, options: Mapping[str, str]) -> bool:
    """Whether a cell has these coordinates; several values of one are separated by commas."""
    return all(_word(cell.example.coordinates.get(name)) in value.split(",") for name, value in options.items())


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "-")


def _curves(study: Study) -> list[tuple[str, Figure]]:
    return [(title, figure) for _, title, figure in pages.figures(study.grid)]


def _traffic(study: Study) -> list[tuple[str, Figure]]:
    return [(f"{title}: against parameters sent", figure) for _, title, figure in pages.figures(study.grid, "params")]


def _shares(study: Study) -> list[tuple[str, Figure]]:
    return attacks.figures(study.grid)


def _changes(study: Study) -> list[tuple[str, Figure]]:
    return effects.figures(study.grid)


def _data(study: Study) -> list[tuple[str, Figure]]:
    return setups.distributions(study.plan, study.runs, study.store.folder)


def _relative(path: Path, page: Path) -> str:
    up = len(page.parent.relative_to(_common(path, page)).parts)
    return "/".join([*[".."] * up, *path.relative_to(_common(path, page)).parts])


def _common(path: Path, page: Path) -> Path:
    return next(parent for parent in page.parents if parent in path.parents)


VIEWS: dict[str, Callable[[Study, dict[str, str]], str]] = {
    "table": _table, "details": _details, "differences": _differences, "effects": _effects, "source": _source,
    "ceilings": _ceilings, "goals": _goals, "attacks": _attacks, "bounds": _bounds, "claim": _claim,
}  # fmt: skip
INLINE: dict[str, Callable[[Study, dict[str, str]], str]] = {
    "cell": _cell, "hours": _hours, "runs": _runs, "verdict": _verdict,
}  # fmt: skip
"""Views within a line of text."""
FIGURES: dict[str, Callable[[Study], list[tuple[str, Figure]]]] = {
    "curves": _curves, "traffic": _traffic, "data": _data, "shares": _shares, "changes": _changes,
}  # fmt: skip
