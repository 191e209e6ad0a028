"""The paper's claims, judged by the records: what each comparison says, and a verdict by rules that were fixed before.

A claim is *reproduced* if every comparison says so, *not reproduced* if one of them says the opposite, and *undecided*
otherwise: a run is missing, there is only one seed, or the 95 % interval over the seeds includes zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fedet.config.sources import nearest
from fedet.errors import ConfigError
from fedet.reporting import statistics
from fedet.reporting.results import si
from fedet.study.cells import Cell, Grid, target, values
from fedet.study.plan import BASE, METHOD, column_names
from fedet.study.tables import NOT_RUN, Table, label

ALPHA, LAMBDA = "data.alpha", "method.lam"
SKEWED, EVEN = 0.1, 0.5
"""The paper's high and low heterogeneity."""
LARGE = ("fedavg", "fedprox", "scaffold", "moon")
"""The methods whose clients train the server's large model."""
COST = 26 / 68
"""The largest share of another method's communication cost that the paper's Table 3 has for Fed-ET on CIFAR-10."""
YES, NO = "reproduced", "not reproduced"
UNDECIDED = "undecided"
ONE_SEED = " (one seed)"


@dataclass(frozen=True)
class Comparison:
    """One comparison of a claim: where, with what, what was measured, and whether it says what the paper says."""

    base: str
    against: str
    measured: str
    holds: bool | None


def verdict(found: list[Comparison]) -> str:
    """The verdict on a claim with these comparisons."""
    if any(c.holds is False for c in found):
        return NO
    return YES if found and all(c.holds for c in found) else UNDECIDED


def table(found: list[Comparison]) -> Table:
    """The comparisons of a claim."""
    words = {True: "yes", False: "no", None: UNDECIDED}
    return Table(
        ["testbed", "against", "measured", "as claimed"], [[c.base, c.against, c.measured, words[c.holds]] for c in found]
    )


def judge(name: str, grid: Grid) -> list[Comparison]:
    """The comparisons of a claim by its letter, from the plan that measures it."""
    if name not in CLAIMS:
        raise ConfigError(f"'{name}' is not a claim{nearest(name, CLAIMS)}: {', '.join(CLAIMS)}")
    return list(CLAIMS[name](grid))


def cost(grid: Grid) -> Iterator[Comparison]:
    """(a): Fed-ET reaches the target with about a third of what the others send."""
    for base, cells in _bases(grid, {}):
        ours = cells.get("fedet")
        for method in LARGE:
            other = cells.get(method)
            if ours is None or other is None:
                continue
            yield Comparison(base, label(grid.plan, METHOD, method), *_cost(ours, other, grid))


def best(grid: Grid) -> Iterator[Comparison]:
    """(b): at alpha 0.1 Fed-ET has a higher accuracy than every other method of the paper."""
    for base, cells in _bases(grid, {ALPHA: SKEWED}):
        for method, other in cells.items():
            if method in OTHERS:
                yield Comparison(base, label(grid.plan, METHOD, method), *_higher(cells.get("fedet"), other, grid))


def regularisation(grid: Grid) -> Iterator[Comparison]:
    """(c): lambda 0.05 beats 0 and 0.5 on images, 0.5 beats both on text."""
    for base in _values(grid, BASE):
        ours = 0.5 if base.startswith("text") else 0.05
        cells = {float(c.example.coordinates[LAMBDA]): c for c in _where(grid, {BASE: base})}
        for lam, other in cells.items():
            if lam != ours:
                yield Comparison(base, f"λ = {lam:g}, with {ours:g}", *_higher(cells.get(ours), other, grid))


def skew(grid: Grid) -> Iterator[Comparison]:
    """(d): from alpha 0.5 to 0.1 Fed-ET loses less than the others."""
    even = dict(_bases(grid, {ALPHA: EVEN}))
    for base, cells in _bases(grid, {ALPHA: SKEWED}):
        lost = {method: _lost(even[base].get(method), cell, grid) for method, cell in cells.items() if base in even}
        for method, theirs in lost.items():
            if method in OTHERS:
                yield Comparison(base, label(grid.plan, METHOD, method), *_less(lost.get("fedet", {}), theirs))


def breakdown(grid: Grid) -> Iterator[Comparison]:
    """(e): at alpha 0.1 FedGKT falls below Fed-ET, which it is close to at 0.5, with partial participation."""
    even = dict(_bases(grid, {ALPHA: EVEN}))
    for base, cells in _bases(grid, {ALPHA: SKEWED}):
        ours, other = cells.get("fedet"), cells.get("fedgkt")
        if other is None:
            continue
        yield Comparison(base, "FedGKT's accuracy at alpha 0.1", *_higher(ours, other, grid))
        losses = [_lost(even.get(base, {}).get(m), cells.get(m), grid) for m in ("fedet", "fedgkt")]
        yield Comparison(base, "FedGKT's loss from alpha 0.5 to 0.1", *_less(*losses))


CLAIMS: dict[str, Callable[[Grid], Iterator[Comparison]]] = {
    "a": cost, "b": best, "c": regularisation, "d": skew, "e": breakdown,
}  # fmt: skip
OTHERS = (*LARGE, "feddf", "dsfl")
"""The methods that the paper's Table 2 compares with Fed-ET."""


def _where(grid: Grid, at: Mapping[str, object]) -> list[Cell]:
    return [c for c in grid.cells.values() if all(c.example.coordinates.get(n) == v for n, v in at.items())]


def _values(grid: Grid, name: str) -> list[str]:
    return list(dict.fromkeys(str(cell.example.coordinates[name]) for cell in grid.cells.values()))


def _bases(grid: Grid, at: Mapping[str, object]) -> Iterator[tuple[str, dict[str, Cell]]]:
    """The cells at these coordinates by testbed and method."""
    if any(name not in column_names(grid.plan) for name in at):
        raise ConfigError(f"this claim needs a plan with the coordinates {', '.join(at)}")
    for base in _values(grid, BASE):
        yield base, {str(c.example.coordinates[METHOD]): c for c in _where(grid, {BASE: base, **at})}


def _cost(ours: Cell, other: Cell, grid: Grid) -> tuple[str, bool | None]:
    if not ours.scored or not other.scored:
        return NOT_RUN, None
    level = f"{100 * target(ours, grid.plan):g}%"
    mine, theirs = (statistics.spread(list(values(cell, grid.plan).values())) for cell in (ours, other))
    if mine is None:
        return f"Fed-ET never reaches {level}", False
    if theirs is None:  # it has sent all that it was allowed to
        sent = statistics.spread([float(record.params_total) for record in other.scored.values()])
        share = mine.mean / sent.mean if sent else 1.0
        return f"{si(mine.mean)}; the other not within {si(sent.mean if sent else 0)}", True if share <= COST else None
    share, single = mine.mean / theirs.mean, min(mine.n, theirs.n) == 1
    return f"{si(mine.mean)} of {si(theirs.mean)}: {share:.2f}{ONE_SEED if single else ''}", None if single else share <= COST


def _higher(ours: Cell | None, other: Cell, grid: Grid) -> tuple[str, bool | None]:
    """Whether our accuracy is higher; a run that diverged is below one that did not."""
    if ours is None or not ours.scored or not other.records:
        return NOT_RUN, None
    if not other.scored:
        return "the other diverged", True
    return _decided(statistics.paired(values(ours, grid.plan), values(other, grid.plan)))


def _lost(even: Cell | None, skewed: Cell | None, grid: Grid) -> dict[int, float]:
    """What accuracy falls by, by seed."""
    if even is None or skewed is None:
        return {}
    before, after = values(even, grid.plan), values(skewed, grid.plan)
    return {seed: before[seed] - after[seed] for seed in before.keys() & after.keys()}


def _less(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[str, bool | None]:
    """Whether we lose less."""
    words, holds = _decided(statistics.paired(theirs, ours))
    means = [statistics.spread(list(lost.values())) for lost in (ours, theirs)]
    if means[0] is None or means[1] is None:
        return NOT_RUN, None
    return f"loses {100 * means[0].mean:.2f}, the other {100 * means[1].mean:.2f}: {words}", holds


def _decided(found: statistics.Difference | None) -> tuple[str, bool | None]:
    """A difference in words, and whether it is above zero beyond the interval; one seed decides nothing."""
    if found is None:
        return NOT_RUN, None
    if found.half_width is None:
        return f"{100 * found.mean:+.2f}{ONE_SEED}", None
    words = f"{100 * found.mean:+.2f} ± {100 * found.half_width:.2f} ({found.n} seeds)"
    return words, found.mean > 0 if found.certain else None
