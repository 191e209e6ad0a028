"""The tables and figures of attacks say what the records say: accuracies, runs that ended, and which bounds hold."""

import re

import pytest
import tomli_w
from made_up import record

from fedet.errors import ConfigError
from fedet.study import attacks, cells, docs, plan
from fedet.study.records import Store

OFF, ON = "robust off", "robust on"
PLAN = {
    "title": "Attacks",
    "bases": ["digits"],
    "methods": ["fedet", "fedavg"],
    "seeds": [0, 1],
    "rows": ["method", "run.attack.kind"],
    "columns": ["variant", "run.attack.share"],
    "order": ["seed", "method", "run.attack.share"],
    "metric": "late",
    "variants": {OFF: {"run": {"robust": "off", "diverged": "drop"}}, ON: {"run": {"robust": "on"}}},
    "axes": {"run.attack.kind": ["none", "sign", "scale"], "run.attack.share": [0.2, 0.4, 0.1]},
    "labels": {"none": "no attack"},
}
LATE = {
    (OFF, "none", 0): 0.90, (OFF, "none", 1): 0.92, (ON, "none", 0): 0.90, (ON, "none", 1): 0.90,
    (OFF, "sign", 0.2): 0.30, (ON, "sign", 0.2): 0.88, (ON, "scale", 0.2): 0.86, (ON, "sign", 0.4): 0.45,
    (ON, "sign", 0.1): 0.9,
}  # fmt: skip
"""Late accuracies of Fed-ET: without attackers by seed, else by share with seed 0 alone."""


def late_of(run, late):
    at, seed = run.coordinates, run.coordinates["seed"]
    if at["run.attack.kind"] == "none":
        return late.get((at["variant"], "none", seed))
    return late.get((at["variant"], at["run.attack.kind"], at["run.attack.share"])) if seed == 0 else None


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A folder with a plan, the plan and its runs."""
    folder = tmp_path_factory.mktemp("attacks")
    (folder / "plan.toml").write_text(tomli_w.dumps(PLAN), encoding="utf-8")
    loaded = plan.load(str(folder / "plan.toml"))
    return folder, loaded, plan.expand(loaded)


def made(runs, late, results=None):
    """The records of Fed-ET's runs that have a late accuracy; `results` changes some of them."""
    out = {}
    for run in runs:
        at, value = run.coordinates, late_of(run, late)
        if value is not None and at["method"] == "fedet":
            own = (results or {}).get((at["variant"], at["run.attack.kind"], at["run.attack.share"]), {})
            out[run.key] = record(run, value, **{"best": value + 0.01} | own)
    return out


def study(planned, late, results=None):
    _, loaded, runs = planned
    return cells.arrange(loaded, runs, made(runs, late, results).get)


def fedet(grid):
    (setting,) = [setting for setting in attacks.settings(grid) if setting.title == "Fed-ET, digits"]
    table = attacks.table(setting, grid.plan)
    return {(row[0], place): cell for row in table.body for place, cell in zip(table.head[1:], row[1:], strict=True)}


def test_a_cell_has_late_and_best_accuracy_and_the_bound_that_it_keeps_or_breaks(planned):
    found = fedet(study(planned, LATE))
    assert list(found)[:7] == [
        *(("no attack", f"{defence}, {share} %") for defence in (OFF, ON) for share in (10, 20, 40)),
        ("sign", "robust off, 10 %"),
    ]
    assert found["no attack", "robust off, 20 %"] == "91.00 ± 1.41 (92.00 ± 1.41)"
    assert found["no attack", "robust on, 20 %"] == "90.00 ± 0.00 (91.00 ± 0.00), -1.00 ✓"  # a point exactly
    worked = fedet(study(planned, LATE, {(ON, "sign", 0.2): {"backdoor": 0.125}}))
    assert worked["sign", "robust on, 20 %"] == "88.00 (89.00), n = 1, back door 12.50, -2.00 ✓"
    assert found["sign", "robust off, 20 %"] == "30.00 (31.00), n = 1"  # without defences there is no bound
    assert found["sign", "robust on, 20 %"] == "88.00 (89.00), n = 1, -2.00 ✓"  # against seed 0's clean run, not the mean
    assert found["scale", "robust on, 20 %"] == "86.00 (87.00), n = 1, -4.00 ✗"
    assert found["sign", "robust on, 40 %"] == "45.00 (46.00), n = 1, 50 % ✓"
    assert found["sign", "robust on, 10 %"] == "90.00 (91.00), n = 1"  # no bound at this share
    assert found["scale", "robust off, 20 %"] == "not run"


def test_less_than_the_bound_breaks_it(planned):
    late = LATE | {(ON, "none", 1): 0.899, (ON, "sign", 0.2): 0.869, (ON, "sign", 0.4): 0.449}
    found = fedet(study(planned, late))
    assert all(found[place].endswith("✗") for place in [("no attack", "robust on, 20 %"), ("sign", "robust on, 20 %")])
    assert found["sign", "robust on, 40 %"].endswith("50 % ✗")


def test_a_run_that_ended_says_when_and_breaks_its_bound(planned):
    ended, lost = {"failed": "round 5: no longer finite", "rounds": 4}, {"lost_rounds": 12}
    grid = study(planned, LATE, {(ON, "sign", 0.4): ended, (OFF, "sign", 0.2): lost})
    found = fedet(grid)
    assert found["sign", "robust on, 40 %"] == "n = 1, ended in round 5 ✗"
    assert found["sign", "robust off, 20 %"] == "30.00 (31.00), n = 1, 12 of 40 rounds lost"
    assert attacks.bounds(grid).body[2][1:] == ["1 of 4", "0 of 1", "Fed-ET, digits, sign ended in round 5"]


def test_the_bounds_that_are_not_reached_are_listed_with_their_numbers(planned):
    assert [row[1:] for row in attacks.bounds(study(planned, LATE)).body] == [
        ["1 of 2", "1 of 1", "–"],
        ["2 of 4", "1 of 2", "Fed-ET, digits, scale -4.00"],
        ["1 of 4", "1 of 1", "–"],
    ]


def test_nothing_is_judged_without_a_clean_run_of_the_same_seed(planned):
    found = fedet(study(planned, {place: value for place, value in LATE.items() if place != (OFF, "none", 0)}))
    assert found["sign", "robust on, 20 %"] == "88.00 (89.00), n = 1"


def test_the_figure_has_what_has_records(planned):
    ended = {(OFF, "scale", 0.4): {"failed": "round 1: no longer finite", "rounds": 0}}
    ((title, figure),) = attacks.figures(study(planned, LATE | {(OFF, "scale", 0.4): 0.1}, ended))
    assert title.startswith("Fed-ET, digits")
    sign, scale = figure.axes
    assert [axes.get_title("left") for axes in figure.axes] == ["sign", "scale"]
    off, on = sign.lines
    assert off.get_xydata().tolist() == [[0, pytest.approx(0.91)], [0.2, 0.3]]
    assert on.get_xydata().tolist() == [[0, 0.9], [0.1, 0.9], [0.2, 0.88], [0.4, 0.45]]
    assert off.get_color() == scale.lines[0].get_color() != on.get_color()
    assert scale.lines[1].get_xydata().tolist() == [[0.4, 0]]  # the cross
    assert [text.get_text() for text in figure.legends[0].texts] == [OFF, ON]


PAGE = "<!-- results: plan.toml {} -->\n<!-- end -->\n"


def test_a_document_has_the_tables_the_bounds_and_the_same_figure_each_time(planned):
    folder, _, runs = planned
    for kept in made(runs, LATE).values():
        Store(folder / "records").put(kept)
    (folder / "docs").mkdir()
    page = folder / "docs" / "page.md"
    page.write_text("".join(PAGE.format(view) for view in ("bounds", "attacks", "shares")), encoding="utf-8")

    def documents():
        return docs.Documents(folder, folder / "records")

    figure = folder / "docs" / "img" / "plan-shares-1.svg"
    assert set(documents().write()) == {page, figure}
    text = page.read_text(encoding="utf-8")
    assert "| with 20 % attackers, within 3 points of the clean run | 2 of 4 | 1 of 2 | Fed-ET, digits, scale -4.00 |" in text
    assert "**Fed-ET, digits**\n\n| kind |" in text
    assert "Not run yet: FedAvg, digits." in text
    assert re.search(r"!\[Fed-ET, digits: [^]]*\]\(img/plan-shares-1\.svg\)", text)
    assert not documents().differing()


def test_without_records_there_is_nothing_but_words(planned):
    grid = study(planned, {})
    assert attacks.tables(grid) == "Not run yet: Fed-ET, digits; FedAvg, digits."
    assert attacks.figures(grid) == []
    assert [row[2] for row in attacks.bounds(grid).body] == ["–"] * 3


def test_a_plan_with_other_axes_is_refused(planned):
    _, loaded, _ = planned
    grids = [grid.model_copy(update={"axes": grid.axes | {"data.alpha": [0.1]}}) for grid in loaded.grids]
    with pytest.raises(ConfigError, match="and no others"):
        attacks.settings(cells.arrange(loaded.model_copy(update={"grids": grids}), [], lambda key: None))


def test_the_plan_does_the_most_telling_runs_first():
    runs = list({run.key: run for run in plan.expand(plan.load("robustness"))}.values())
    where = [tuple(run.coordinates[name] for name in ("seed", "base", "method")) for run in runs]
    assert where == sorted(where, key=list(dict.fromkeys(where)).index)  # one method after the other
    assert [seed for seed, _, _ in where] == sorted(seed for seed, _, _ in where)
    assert list(dict.fromkeys(where))[:3] == [(0, "digits", method) for method in ("fedet", "fedet-plus", "fedavg")]
    of_fedet = [run.config.run for run, place in zip(runs, where, strict=True) if place == (0, "digits", "fedet")]
    assert list(dict.fromkeys(settings.attack.share if settings.attack else None for settings in of_fedet)) == [
        None,
        0.2,
        0.4,
        0.1,
    ]
    assert [settings.robust is None for settings in of_fedet[:4]] == [True, False] * 2


def test_the_plan_covers_every_bound():
    runs = {run.key: run for run in plan.expand(plan.load("robustness"))}.values()
    for base, fewest in {"digits": 10, "fashion-desk": 6}.items():
        defended = [run for run in runs if run.coordinates["base"] == base and run.config.run.robust]
        for share in (None, 0.2, 0.4):
            seen = {
                run.coordinates["method"]
                for run in defended
                if (a := run.config.run.attack) is share or (a and a.share == share)
            }
            assert len(seen) == fewest, (base, share)
