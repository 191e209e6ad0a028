"""Results show themselves in notebooks, and `fedet runs` lists what is there."""

import json
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from terminal import SMALL

from fedet import api
from fedet.errors import FedetError
from fedet.reporting import notebook


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return api.run(SMALL, out=tmp_path_factory.mktemp("runs"), name="small", rounds=2)


def test_a_result_shows_its_models(result):
    text = result._repr_html_()
    assert text.startswith("<table><caption>fedet on digits, seed 0, 2 rounds</caption>")
    for name in result.metrics[-1]["models"]:
        assert f"<td>{name}</td>" in text
    assert notebook.html_table("a<b", ["<"], [["&"]]).count("&lt;") == 2


def test_a_result_as_a_data_frame(result):
    pandas = pytest.importorskip("pandas")
    frame = result.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == [1, 2]
    assert frame.loc[2, "accuracy"] == result.accuracy == frame.loc[2, "models.server"]
    assert (frame["seconds.round"] > 0).all()


def test_without_pandas_the_way_to_get_it_is_named(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FedetError, match="to_pandas needs pandas: pip install 'fedet"):
        result.to_pandas()


def test_a_result_as_a_figure(result):
    figure = result.plot()
    assert isinstance(figure, Figure)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert {line.get_label() for line in figure.axes[0].lines} >= set(result.metrics[-1]["models"])


def test_runs_are_listed(fedet, result):
    rows = fedet("runs", "--out", result.run_dir.parent, "--json").json
    assert [(row["run"], row["state"], row["rounds"]) for row in rows] == [(result.run_dir.name, "finished", 2)]
    assert rows[0]["best accuracy"] == result.best_accuracy
    listed = fedet("runs", "--out", result.run_dir.parent).out.splitlines()
    wanted = ["finished", "fedet", "digits", "0", "2", f"{result.accuracy:.2%}", f"{result.best_accuracy:.2%}"]
    assert [result.run_dir.name, *wanted] in [line.split() for line in listed]
    assert fedet("runs").out == "no runs in runs\n"
    assert json.loads(fedet("runs", "--json").out) == []
    Path("runs/compare-x/broken").mkdir(parents=True)
    Path("runs/compare-x/broken/config.toml").write_text("[data", encoding="utf-8")
    (row,) = fedet("runs", "--json").json
    assert (row["run"], row["state"], row["accuracy"]) == ("compare-x/broken", "damaged", None)
