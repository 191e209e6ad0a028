"""The paper's claims, judged by the records: what each comparison says, and a verdict by rules that were fixed before.

A claim is *reproduced* if every comparison says so, *not reproduced* if one of them says the opposite, and *undecided*
otherwise: a run of the comparison is missing, there is only one seed, or the paired t test over the seeds has p > 5 %, with
Holm's correction for all of the claim's tests. A run that diverged is below one that did not; seeds that say so and seeds
that say the opposite decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from fedet.config.sources import nearest
from fedet.data.source import TEXTS
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
LEVEL = 0.05
"""The largest p-value, after Holm's correction, of a comparison that decides something."""


@dataclass(frozen=True)
class Comparison:
    """One comparison of a claim: where, with what, what was measured, and whether it says what the paper says."""

    base: str
    against: str
    measured: str
    holds: bool | None
    p: float | None = None
    """The p-value, as adjusted in `judge`; None if there is no test, because runs are missing or diverged."""


def verdict(found: list[Comparison]) -> str:
    """The verdict on a claim with these comparisons."""
    if any(c.holds is False for c in found):
        return NO
    return YES if found and all(c.holds for c in found) else UNDECIDED


def table(found: list[Comparison]) -> Table:
    """The comparisons of a claim."""
    words = {True: "yes", False: "no", None: UNDECIDED}
    return Table(
        ["testbed", "against", "measured", "p (Holm)", "as claimed"],
        [[c.base, c.against, c.measured, _p(c.p), words[c.holds]] for c in found],
    )


def _p(value: float | None) -> str:
    return "–" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def judge(name: str, grid: Grid) -> list[Comparison]:
    """The comparisons of a claim by its letter, from the plan that measures it."""
    if name not in CLAIMS:
        raise ConfigError(f"'{name}' is not a claim{nearest(name, CLAIMS)}: {', '.join(CLAIMS)}")
    return adjusted(list(CLAIMS[name](grid)))


def adjusted(found: list[Comparison]) -> list[Comparison]:
    """The comparisons with p-values for this many tests at once; one whose p-value is too large then decides nothing."""
    tested = iter(statistics.holm([c.p for c in found if c.p is not None]))
    wider = [c if c.p is None else replace(c, p=next(tested)) for c in found]
    return [replace(c, holds=None) if c.p is not None and c.p > LEVEL else c for c in wider]


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
        found = _where(grid, {BASE: base})
        ours = 0.5 if found[0].example.config.data.name in TEXTS else 0.05
        cells = {float(c.example.coordinates[LAMBDA]): c for c in found}
        for lam, other in cells.items():
            if lam != ours:
                yield Comparison(base, f"λ = {lam:g}, with {ours:g}", *_higher(cells.get(ours), other, grid))


def skew(grid: Grid) -> Iterator[Comparison]:
    """(d): from alpha 0.5 to 0.1 Fed-ET loses less than the others."""
    even = dict(_bases(grid, {ALPHA: EVEN}))
    for base, cells in _bases(grid, {ALPHA: SKEWED}):
        pairs = {method: (even.get(base, {}).get(method), cell) for method, cell in cells.items()}
        for method, theirs in pairs.items():
            if method in OTHERS:
                yield Comparison(base, label(grid.plan, METHOD, method), *_less(pairs.get("fedet"), theirs, grid))


def breakdown(grid: Grid) -> Iterator[Comparison]:
    """(e): at alpha 0.1 FedGKT falls below Fed-ET, which it is close to at 0.5, with partial participation."""
    even = dict(_bases(grid, {ALPHA: EVEN}))
    for base, cells in _bases(grid, {ALPHA: SKEWED}):
        ours, other = cells.get("fedet"), cells.get("fedgkt")
        if other is None:
            continue
        yield Comparison(base, "FedGKT's accuracy at alpha 0.1", *_higher(ours, other, grid))
        mine, theirs = ((even.get(base, {}).get(method), cells.get(method)) for method in ("fedet", "fedgkt"))
        yield Comparison(base, "FedGKT's loss from alpha 0.5 to 0.1", *_less(mine, theirs, grid))


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


Pair = tuple[Cell | None, Cell | None]
"""A method's cells at alpha 0.5 and at 0.1."""
Saying = tuple[bool | None, float | None]
"""Whether something is as claimed, and the p-value of its test if there is one."""


@dataclass
class Evidence:
    """What the seeds say, one by one: a difference that is above zero if it is as claimed, or that one side has no value."""

    differences: dict[int, float] = field(default_factory=dict)
    won: int = 0
    """Seeds in which only the other has no value."""
    lost: int = 0
    """Seeds in which only we have none."""
    open: int = 0
    """Seeds that say nothing."""

    @property
    def seeds(self) -> int:
        """How many seeds there are."""
        return len(self.differences) + self.won + self.lost + self.open

    def says(self, cells: Iterable[Cell]) -> Saying:
        """Whether all seeds that are planned in these cells say the same, and how surely where there are differences."""
        if any(cell.missing for cell in cells) or self.seeds < 2 or self.open:
            return None, None
        said: list[bool | None] = [side for side, count in ((True, self.won), (False, self.lost)) if count]
        found = statistics.paired(self.differences, dict.fromkeys(self.differences, 0.0))
        if found is not None:
            said.append(None if found.p is None else found.mean > 0)
        return said[0] if len(set(said)) == 1 else None, found.p if found else None

    def of(self, cells: Iterable[Cell]) -> str:
        """A note on how many seeds there are if these are not all that are planned."""
        planned = max(len(cell.runs) for cell in cells)
        return "" if 1 < planned == self.seeds else ONE_SEED if self.seeds == 1 else f" ({self.seeds} of {planned} seeds)"

    def without(self, what: str) -> str:
        """A note on the seeds in which a side has no value, because it did `what`."""
        sides = {"the other": self.won, "Fed-ET": self.lost, "both": self.open}
        return "".join(f"; {side} {what} with {count} of {self.seeds} seeds" for side, count in sides.items() if count)


def _cost(ours: Cell, other: Cell, grid: Grid) -> tuple[str, bool | None, float | None]:
    """Whether we send at most `COST` of what the other sends until the target; a run that diverged never reaches it."""
    pair, level = (ours, other), f"{100 * target(ours, grid.plan):g}%"
    mine, theirs = values(ours, grid.plan), values(other, grid.plan)
    found, sent = Evidence(), []
    for seed in sorted(ours.records.keys() & other.records.keys()):
        if seed not in other.scored:
            found.won, found.open = found.won + (seed in mine), found.open + (seed not in mine)
            continue
        if seed not in ours.scored:
            found.lost += 1
            continue
        cost, at_least = mine.get(seed), theirs.get(seed, float(other.scored[seed].params_total))
        sent.append(at_least)
        if cost is None:
            found.lost, found.open = found.lost + (seed in theirs), found.open + (seed not in theirs)
        elif seed in theirs:
            found.differences[seed] = COST * at_least - cost
        else:  # the other has sent all that it was allowed to
            found.won, found.open = found.won + (cost <= COST * at_least), found.open + (cost > COST * at_least)
    if not found.seeds:
        return NOT_RUN, None, None
    reached = [cost for seed, cost in mine.items() if seed in other.records]
    if found.differences:
        costs = [fmean(side[seed] for seed in found.differences) for side in (mine, theirs)]
        words = f"{si(costs[0])} of {si(costs[1])}: {costs[0] / costs[1]:.2f}"
        if len(found.differences) < found.seeds:
            words += f"; both reach it with {len(found.differences)} of {found.seeds} seeds"
    elif not reached:
        words = f"{'Fed-ET never reaches' if found.lost else 'neither reaches'} {level}"
    elif found.lost:
        words = f"no seed with which both reach {level}"
    else:
        words = f"{si(fmean(reached))}; the other " + (f"not within {si(fmean(sent))}" if sent else "diverged")
    return words + found.of(pair), *found.says(pair)


def _higher(ours: Cell | None, other: Cell, grid: Grid) -> tuple[str, bool | None, float | None]:
    """Whether our accuracy is higher; a run that diverged is below one that did not."""
    if ours is None:
        return NOT_RUN, None, None
    found = _evidence(ours, other, values(ours, grid.plan), values(other, grid.plan))
    return _words(found, [ours, other]), *found.says([ours, other])


def _less(ours: Pair | None, theirs: Pair, grid: Grid) -> tuple[str, bool | None, float | None]:
    """Whether we lose less accuracy from the first to the second cell of a pair; a run that diverged loses all."""
    cells = [cell for cell in (*(ours or ()), *theirs) if cell is not None]
    if ours is None or len(cells) < 4:
        return NOT_RUN, None, None
    sides = [_lost(pair, grid) for pair in (ours, theirs)]
    before = cells[0].scored.keys() & cells[2].scored.keys()  # what diverged there has nothing to lose
    after = [replace(cell, records={s: r for s, r in cell.records.items() if s in before}) for cell in (cells[1], cells[3])]
    found = _evidence(*after, *({seed: -lost for seed, lost in side.items()} for side in sides))
    words = _words(found, cells)
    if found.differences:
        means = [100 * fmean(side[seed] for seed in found.differences) for side in sides]
        words = f"loses {means[0]:.2f}, the other {means[1]:.2f}: {words}"
    return words, *found.says(cells)


def _lost(pair: Pair, grid: Grid) -> dict[int, float]:
    """What accuracy falls by, by seed."""
    before, after = (values(cell, grid.plan) if cell else {} for cell in pair)
    return {seed: before[seed] - after[seed] for seed in before.keys() & after.keys()}


def _evidence(ours: Cell, other: Cell, mine: Mapping[int, float], theirs: Mapping[int, float]) -> Evidence:
    """Our values minus the other's, by the seeds that both cells have records of."""
    found = Evidence()
    for seed in sorted(ours.records.keys() & other.records.keys()):
        if seed in mine and seed in theirs:
            found.differences[seed] = mine[seed] - theirs[seed]
        elif seed in mine and seed not in other.scored:
            found.won += 1
        elif seed in theirs and seed not in ours.scored:
            found.lost += 1
        elif seed not in ours.scored and seed not in other.scored:
            found.open += 1
    return found


def _words(found: Evidence, cells: list[Cell]) -> str:
    """The mean difference, with its interval if there are several seeds, and which runs diverged."""
    if not found.seeds:
        return NOT_RUN
    pairs = statistics.paired(found.differences, dict.fromkeys(found.differences, 0.0))
    if pairs is None:
        sides = {"the other": found.won, "Fed-ET": found.lost, "both": found.open}
        if max(sides.values()) == found.seeds:
            return f"{max(sides, key=lambda side: sides[side])} diverged{found.of(cells)}"
        return found.without("diverged").removeprefix("; ")
    words = f"{100 * pairs.mean:+.2f}"
    if pairs.half_width is not None:
        words += f" ± {100 * pairs.half_width:.2f}"
    words += found.of(cells) or f" ({found.seeds} seeds)"
    return words + found.without("diverged")
