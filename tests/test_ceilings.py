"""A method beside its teachers and the references, and what it should reach, from records."""

import pytest
import tomli_w
from made_up import record

from fedet.study import ceilings, cells, plan

PLAN = {
    "title": "T", "bases": ["digits"], "methods": ["fedet-plus", "fedavg"], "references": ["public-labels"],
    "seeds": [0, 1], "columns": ["data.alpha"], "axes": {"data.alpha": [0.1]},
}  # fmt: skip


ARCHS = {"arch_params": {"cnn": 1, "cnn-w2": 2, "cnn-w4": 4}, "server": "cnn-w4"}


def arranged(tmp_path, figures):
    """The cells with these figures by method and seed: best, late, accuracies of other models."""
    path = tmp_path / "plan.toml"
    path.write_text(tomli_w.dumps(PLAN), encoding="utf-8")
    loaded = plan.load(str(path))
    runs = plan.expand(loaded)
    found = {(run.coordinates["method"], run.coordinates["seed"]): run for run in runs}
    records = {
        found[at].key: record(found[at], late, {"models": models}, best=best, **ARCHS)
        for at, (best, late, models) in figures.items()
    }
    return cells.arrange(loaded, runs, records.get)


OWN = {
    ("fedet-plus", 0): (0.90, 0.88, {"consensus": [0.90], "cnn": [0.80], "cnn-w2": [0.89], "cnn-w4": [0.99]}),
    ("fedet-plus", 1): (0.92, 0.90, {"consensus": [0.90], "cnn": [0.84], "cnn-w2": [0.83], "cnn-w4": [0.99]}),
}


def test_goals_are_paired_by_seed_and_the_server_is_no_small_model(tmp_path):
    others = {("public-labels", 0): (0.91, 0.9, {}), ("fedavg", 0): (0.85, 0.8, {}), ("fedavg", 1): (0.86, 0.8, {})}
    table = ceilings.goals(arranged(tmp_path, OWN | others), "fedet-plus")
    assert table.body == [["α = 0.1", "+1.70 ✓ (2 of 2)", "+2.50 ✓ (1 of 2)", "-1.00 ✗ (0 of 1)", "+5.50 ✓ (2 of 2)"]]
    assert table.head[3:] == ["best: public-labels", "best: FedAvg"]


def test_goals_without_runs_say_so(tmp_path):
    assert ceilings.goals(arranged(tmp_path, {}), "fedet-plus").body == [["α = 0.1", *["not run"] * 4]]


@pytest.mark.parametrize(("seeds", "small"), [((0, 1), "86.50 ± 3.54"), ((0,), "89.00 (1 run)"), ((), "–")])
def test_the_method_beside_its_teachers(tmp_path, seeds, small):
    table = ceilings.ceilings(arranged(tmp_path, {at: OWN[at] for at in OWN if at[1] in seeds}), "fedet-plus")
    row = dict(zip(table.head, table.body[0], strict=True))
    assert row["seeds"] == str(len(seeds))
    assert row["best small model, late"].split(" (")[0] == small.split(" (")[0]
    assert row["public-labels, best"] == "not run"
