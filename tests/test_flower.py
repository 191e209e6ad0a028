"""On Flower the methods are the same, the bits are the same, and what goes wrong out there is named and survived."""

import pytest
import tomli_w

pytest.importorskip("flwr")

from fakegrid import FakeGrid

from fedet import config, conformance, engine, experiment
from fedet.flower import client_app, server
from fedet.methods import METHODS
from fedet.runfolder import RunFolder

FAST = {"poll": 0.001, "wait": 5.0, "round_timeout": 5.0}


class Bench:
    """An app folder, a fake grid of nodes with one client each, and the run on it."""

    def __init__(self, place, method, nodes=None, **changes):
        self.place, self.app_folder = place, place / "app"
        self.app_folder.mkdir(parents=True, exist_ok=True)
        asked = {"method.name": method, **conformance.quick(config.method_class(method)), **changes}
        asked |= {f"flower.{key}": value for key, value in FAST.items() if f"flower.{key}" not in changes}
        self.config = config.load(conformance.SMALL, asked)
        plain = self.config.model_dump(mode="json", exclude_none=True)
        (self.app_folder / "fedet.toml").write_text(tomli_w.dumps(plain), encoding="utf-8")
        self.run_config = {"config": "fedet.toml", "set": "", "out": str(place / "runs")}
        self.nodes = nodes or [{"client-id": k} for k in range(self.config.data.clients)]
        self.grid = self.new_grid()

    def new_grid(self, seed=0):
        nodes = [{"folder": str(self.place / "nodes" / str(i)), **node} for i, node in enumerate(self.nodes)]
        return FakeGrid(client_app(str(self.app_folder / "apps.py")), nodes, self.run_config, seed)

    def run(self):
        return server.run(self.grid, self.run_config, self.app_folder)

    @property
    def folder(self):
        (folder,) = (p for p in (self.place / "runs").iterdir() if p.name != ".cache")
        return RunFolder(folder)

    def state(self):
        return self.folder.restore()["state"]

    def metrics(self):
        return [{key: value for key, value in e.items() if key != "seconds"} for e in self.folder.metrics()]

    def simulated(self):
        """The same configuration in the simulator."""
        ready = experiment.build(self.config, self.place / "cache")
        folder = RunFolder(self.place / "simulated")
        folder.path.mkdir()
        folder.begin(ready, "")
        engine.run(ready, folder)
        entries = [{key: value for key, value in e.items() if key != "seconds"} for e in folder.metrics()]
        return folder.restore()["state"], entries


@pytest.fixture
def bench(tmp_path):
    return lambda method, nodes=None, **changes: Bench(tmp_path, method, nodes, **changes)


@pytest.mark.parametrize("method", [cls.name for cls in METHODS])
def test_every_method_gives_the_bits_of_the_simulator(bench, method):
    flower = bench(method)
    state, entries = flower.simulated()
    flower.run()
    assert conformance.same(flower.state(), state)
    for ours, theirs in zip(flower.metrics(), entries, strict=True):
        assert ours["failures"] == []
        same = set(ours) - {"models"} - ({"accuracy", "loss"} if method == "fedgkt" else set())
        assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
        if method != "fedgkt":  # its evaluated model is the server's on a client's extractor, which stays at the client
            assert ours["models"] == {name: score for name, score in theirs["models"].items() if name != "clients"}
