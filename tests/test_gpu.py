"""On a GPU, where there is one: every method runs, reruns give the same bits, and the processor's results are near."""

import pytest
import torch

from fedet import check, config, experiment
from fedet.engine import session
from fedet.errors import ConfigError
from fedet.methods import METHODS

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def small(method, **changes):
    short = check.quick(config.method_class(method))
    return config.load(check.SMALL, {"method.name": method, **short, **changes})


@needs_gpu
@pytest.mark.parametrize("method", [cls.name for cls in METHODS])
def test_every_method_runs_on_a_gpu_and_repeats_itself(tmp_path, method):
    first, again = (session.run_config(small(method, **{"run.device": "cuda"}), tmp_path / name) for name in "ab")
    weights = [(r.run_dir / "best" / "model.safetensors").read_bytes() for r in (first, again)]
    assert weights[0] == weights[1]
    there = session.run_config(small(method, **{"run.device": "cpu"}), tmp_path / "c")
    assert first.metrics[0]["loss"] == pytest.approx(there.metrics[0]["loss"], rel=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_auto_takes_the_processor_and_cuda_is_refused(tmp_path):
    assert experiment.device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"run\.device = 'cuda' is not available"):
        session.run_config(small("fedavg", **{"run.device": "cuda"}), tmp_path)
