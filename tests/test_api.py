"""The package from Python: what it exports, and that calls mean what the command line means."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import fedet
from fedet import check, runtime
from fedet.config import sources
from fedet.engine import session
from fedet.errors import ConfigError, FedetError, Interrupted
from fedet.storage.run_folder import RunFolder

SMALL = check.SMALL | {
    "method": {
        "name": "fedet",
        "lam": 0.2,
        "client": {"steps": 2, "batch": 16},
        "server": {"steps": 2, "batch": 16, "lr": 0.01},
    }
}
PUBLIC = [
    "Callbacks",
    "Comparison",
    "ConfigError",
    "DataError",
    "Diverged",
    "FedetError",
    "FedetWarning",
    "Interrupted",
    "Method",
    "Result",
    "StopRun",
    "compare",
    "load_model",
    "resume",
    "run",
]


def resolved(result):
    return session.configuration.load(result.run_dir / "config.toml")


def python(code, cwd):
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_exports_exactly_its_names(tmp_path):
    assert sorted(fedet.__all__) == PUBLIC
    code = "names = set(dir())\nfrom fedet import *\nprint(*sorted(set(dir()) - names - {'names'}))"
    assert python(code, tmp_path).split() == PUBLIC
    assert fedet.__version__ == runtime.package_version()
    assert dir(fedet) == sorted([*PUBLIC, "__version__", "config", "core", "data", "maths", "methods", "models", "train"])
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        fedet.trian  # noqa: B018


def test_importing_the_package_is_light(tmp_path):
    heavy = "{'torch', 'numpy', 'pydantic', 'typer', 'matplotlib', 'sklearn'}"
    assert python(f"import sys, fedet; print({heavy} & set(sys.modules))", tmp_path).strip() == "set()"


def test_all_errors_are_fedet_errors_with_the_documented_codes():
    codes = {
        cls.__name__: cls.exit_code for cls in (fedet.FedetError, *fedet.FedetError.__subclasses__()) if cls.__name__ in PUBLIC
    }
    assert codes == {"FedetError": 1, "ConfigError": 2, "DataError": 3, "Diverged": 4, "Interrupted": 130}


def test_run_with_short_names_double_underscores_and_tables(tmp_path):
    result = fedet.run(
        SMALL, out=tmp_path, method="fedavg", rounds=2, seed=5, data__alpha=0.7, run={"cohort": 2}, method__client__lr=0.05
    )
    config = resolved(result)
    assert (config.method["name"], config.run.rounds, config.run.seed, config.data.alpha) == ("fedavg", 2, 5, 0.7)
    assert (config.run.cohort, config.run.threads) == (2, 1)
    assert config.method["client"]["lr"] == 0.05
    assert config.method["client"]["steps"] == 2
    assert (result.summary["method"], result.summary["seed"]) == ("fedavg", 5)


def test_a_method_may_be_a_table_and_none_changes_nothing():
    changes = sources.overrides({"method": {"name": "fedavg", "client": {"lr": 0.3}}, "rounds": None, "seed": 0})
    config = session.configuration.load(SMALL, changes)
    assert (config.method["name"], config.method["client"]["lr"], config.run.rounds, config.run.seed) == ("fedavg", 0.3, 3, 0)


def test_result_and_resume(tmp_path):
    seen, stages = [], set()
    callbacks = fedet.Callbacks(round=seen.append, stage=lambda stage, done, total: stages.add(stage))
    result = fedet.run(SMALL, out=str(tmp_path), rounds=2, callbacks=callbacks)
    assert [entry["round"] for entry in result.metrics] == [entry["round"] for entry in seen] == [1, 2]
    assert {"clients", "distil", "evaluate"} <= stages
    assert result.accuracy == result.metrics[-1]["accuracy"]
    assert result.best_accuracy == max(entry["accuracy"] for entry in result.metrics)
    assert result.traffic == {key: sum(entry[key] for entry in result.metrics) for key in result.traffic}
    assert set(result.traffic) == {"params_up", "params_down", "bytes_up", "bytes_down"}
    assert result.report.is_file()
    x = torch.zeros(3, 1, 8, 8)
    assert result.model(x).shape == (3, 10)
    assert torch.equal(result.model(x), fedet.load_model(result.run_dir)(x))
    assert fedet.resume(str(result.run_dir), rounds=3).summary["rounds"] == 3
    with pytest.raises(FedetError, match="is not a run folder"):
        fedet.resume(tmp_path)


def test_a_run_that_was_not_evaluated_yet_has_no_accuracy(tmp_path):
    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        fedet.run(SMALL, out=tmp_path, run__eval_every=5, rounds=9, callbacks=fedet.Callbacks(round=stop))
    (run_dir,) = (path for path in tmp_path.iterdir() if path.name != ".cache")
    result = fedet.Result(run_dir, RunFolder(run_dir).result())
    assert result.summary["rounds"] == 1
    assert result.summary["accuracy"] is None
    assert math.isnan(result.accuracy)
    assert math.isnan(result.best_accuracy)
    with pytest.raises(FedetError, match="is not a model folder"):
        result.model  # noqa: B018


def test_a_run_from_python_names_no_command_and_is_repeated_by_its_configuration(tmp_path):
    result = fedet.run(SMALL, out=tmp_path, rounds=1)
    assert json.loads((result.run_dir / "env.json").read_text(encoding="utf-8"))["command"] is None
    assert "fedet run config.toml" in result.report.read_text(encoding="utf-8")


def test_a_resolved_file_gives_the_same_run(tmp_path):
    first = fedet.run(SMALL, out=tmp_path / "a", data__alpha=0.4, rounds=2)
    again = fedet.run(first.run_dir / "config.toml", out=tmp_path / "b")
    of_folder = fedet.run(first.run_dir, out=tmp_path / "c")
    assert first.run_dir.name == again.run_dir.name == of_folder.run_dir.name  # so the digest is the same
    for other in (again, of_folder):
        assert [e | {"seconds": 0} for e in first.metrics] == [e | {"seconds": 0} for e in other.metrics]


def test_compare(tmp_path):
    table = fedet.compare(
        SMALL, methods=["fedet", "fedavg"], seeds=np.arange(2), out=tmp_path, rounds=1, method={"client": {"steps": 1}}
    )
    assert [(row["label"], row["n"]) for row in table.rows] == [("fedet", 2), ("fedavg", 2)]
    assert [result.summary["method"] for result in table.results] == ["fedet", "fedavg"] * 2
    assert all(resolved(result).method["client"]["steps"] == 1 for result in table.results)
    assert table.report == table.folder / "report.html"
    assert {"report.html", "table.csv", "table.tex", "comparison.json"} <= {path.name for path in table.folder.iterdir()}
    firsts = [result.metrics[0]["cohort"] for result in table.results]
    assert firsts[0] == firsts[1]
    assert firsts[2] == firsts[3]
    with pytest.raises(ConfigError, match="without duplicates"):
        fedet.compare(SMALL, seeds=[1, 1], out=tmp_path)


@pytest.mark.parametrize("start", [fedet.run, fedet.compare])
def test_what_a_method_cant_do_with_the_data_is_said_before_there_is_a_folder(start, tmp_path):
    with pytest.raises(ConfigError, match=r"method\.validate_every needs labelled validation data"):
        start(SMALL, method={"name": "feddf", "validate_every": 5}, seed=np.int64(1), out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] in ([], [".cache"])


def test_runs_of_a_comparison_share_the_cache_beside_it(tmp_path):
    from fedet.storage.run_folder import cache_folder

    assert cache_folder(tmp_path / "compare-digits-0123abcd") == cache_folder(tmp_path) == tmp_path / ".cache"


def test_modules_are_there_after_importing_the_package_alone():
    code = "import fedet; print(fedet.models.build('cnn').num_params(), fedet.maths.consensus.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["431548", "consensus"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fedet.nothing
