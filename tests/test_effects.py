"""What each change of a plan's variants gives, from records."""

import pytest
import tomli_w
from made_up import record

from fedet.study import cells, effects, pages, plan, tables

PLAN = {
    "title": "T", "bases": ["digits"], "methods": ["fedet-plus"], "seeds": [0, 1, 2], "rows": ["variant"],
    "columns": ["data.alpha"], "axes": {"data.alpha": [0.1]}, "metric": "late",
    "grids": [
        {"variants": {"A": {}, "A and a cap": {"method": {"cap": 2.0}}, "A and no heads": {"method": {"heads": "none"}}}},
        {"settings": {"method": {"lam": 0.05}}, "variants": {"B": {}, "B and a cap": {"method": {"cap": 2.0}}}},
    ],
}  # fmt: skip
FIGURES = {
    "A": [0.90, 0.91, 0.92],
    "A and a cap": [0.92, 0.93, 0.95],
    "A and no heads": [0.89],
    "B": [0.50, 0.60, 0.40],
    "B and a cap": [0.45, 0.62, 0.44],
}


def arranged(tmp_path, figures=FIGURES, **changed):
    path = tmp_path / "plan.toml"
    path.write_text(tomli_w.dumps(PLAN | changed), encoding="utf-8")
    loaded = plan.load(str(path))
    runs = plan.expand(loaded)
    found = {(run.coordinates["variant"], run.coordinates["seed"]): run for run in runs}
    return cells.arrange(
        loaded,
        runs,
        {
            found[name, seed].key: record(found[name, seed], late)
            for name, lates in figures.items()
            for seed, late in enumerate(lates)
        }.get,
    )


def test_a_change_is_compared_with_the_setting_that_it_changes_seed_by_seed(tmp_path):
    assert effects.table(arranged(tmp_path)).body == [
        ["A", "91.00 ± 1.00", "–"],
        ["A and a cap", "93.33 ± 1.53", "+2.33 ± 1.43 ▲"],  # 2, 2 and 3 points; t = 4.303, deviation 0.577
        ["A and no heads", "89.00 (1 of 3 runs)", "-1.00"],
        ["B", "50.00 ± 10.00", "–"],
        ["B and a cap", "50.33 ± 10.12", "+0.33 ± 11.74"],  # -5, 2 and 4 points; deviation 4.726
    ]


def test_a_plan_can_name_what_all_changes_are_compared_with(tmp_path):
    table = effects.table(arranged(tmp_path, against="A"))
    assert {row[0]: row[2].split(" ")[0] for row in table.body} == {
        "A": "–", "A and a cap": "+2.33", "A and no heads": "-1.00", "B": "-41.00", "B and a cap": "-40.67",
    }  # fmt: skip


@pytest.mark.parametrize("missing", ["A", "B"])
def test_changes_of_a_setting_that_was_not_run_have_no_difference(tmp_path, missing):
    table = effects.table(arranged(tmp_path, {name: lates for name, lates in FIGURES.items() if name != missing}))
    assert {row[0] for row in table.body if row[0].startswith(missing) and row[2]} == set()
    assert any(row[2] for row in table.body)


def test_the_figure_has_a_panel_for_each_setting_and_the_largest_gain_at_the_top(tmp_path):
    ((title, figure),) = effects.figures(arranged(tmp_path))
    assert title == "α = 0.1: what each change gives"
    assert [axes.get_title("left") for axes in figure.axes] == ["A: 91.00 ± 1.00", "B: 50.00 ± 10.00"]
    labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert labels == ["A and a cap", "A and no heads"]
    first, last = figure.axes[0].get_ylim()
    assert first > last  # the first label is at the top


def test_the_page_shows_it_instead_of_curves_that_nobody_can_tell_apart(tmp_path):
    many = {f"change {i}": {"method": {"lam": 0.01 * (i + 1)}} for i in range(pages.MOST_CURVES + 1)}
    grid = arranged(tmp_path, {"change 0": [0.5], "change 1": [0.6]}, grids=[{"variants": many}])
    page = pages.write(grid, tmp_path / "page").read_text(encoding="utf-8")
    assert 'id="effects"' in page
    assert 'id="curves"' not in page
    assert 'id="differences"' not in page
    few = pages.write(arranged(tmp_path), tmp_path / "page").read_text(encoding="utf-8")
    assert 'id="effects"' in few
    assert 'id="curves"' in few


def test_other_plans_have_their_paired_differences(tmp_path):
    grid = arranged(tmp_path, rows=["method"], columns=["variant"], against="fedet-plus")
    assert not effects.applies(grid)
    assert 'id="effects"' not in pages.write(grid, tmp_path / "page").read_text(encoding="utf-8")
    assert tables.main(grid).body
