import os

import pytest
import terminal
import torch

os.environ["FEDET_EARLY"] = (
    "0"  # hundreds of short runs and programs would each start a worker before it is known if they need one
)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Small models only lose by more threads, and so does a machine that others use too."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_figures(request, monkeypatch):
    """Drawing takes far longer than small runs, and tests with "report" in their name look at the figures."""
    monkeypatch.setenv("FEDET_PLOTS", "on" if "report" in request.node.nodeid else "off")


@pytest.fixture
def fedet(tmp_path, monkeypatch, capsys):
    """Calls the command line in this process, in a folder that holds small.toml."""
    yield from terminal.caller(tmp_path, monkeypatch, capsys)


@pytest.fixture
def real_data():
    """The folder of real data sets, where there is one."""
    place = os.environ.get("FEDET_DATA")
    if not place:
        pytest.skip("FEDET_DATA is not set: it names the folder with cifar10/, cifar100/ and fashion_mnist/ parquet files")
    return place


@pytest.fixture
def real_texts(real_data):
    """The same, where it has texts."""
    if not os.path.isdir(os.path.join(real_data, "text")):
        pytest.skip("FEDET_DATA holds no folder text/ with sent140_pool.parquet and rt_critics.parquet")
    return real_data
