"""Further rounds of a run from its last checkpoint, in memory only: nothing in the run's folder changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedet import config as configuration
from fedet import experiment as experiments
from fedet.core import ClientTask, Delivery, Round, seed_of
from fedet.engine import defences, gate, loop, rounds
from fedet.engine.exchange import InProcess, RoundExchange
from fedet.engine.rounds import Snapshot
from fedet.errors import FedetError
from fedet.experiment import Experiment, Progress
from fedet.storage.run_folder import RunFolder, cache_folder

Send = Callable[[int, Mapping[int, ClientTask]], Delivery]


@dataclass(frozen=True)
class Replay:
    """A run as its last checkpoint has it."""

    folder: RunFolder
    experiment: Experiment
    snapshot: Snapshot

    def round(self, number: int, send: Send | None = None) -> tuple[Round, RoundExchange]:
        """The round of this number, ready for the method, and its exchange, which knows who was refused.

        Every round starts from the clients' states in the checkpoint, with the defences and bans of the run.
        """
        self.folder.store.rollback()
        ready, s = self.experiment, self.snapshot
        settings = ready.config.run
        banned = gate.banned(s.set_aside, settings.ban_after)
        cohort, draws = rounds.select(ready, gate.credible(ready.clients, settings.robust), number, banned)
        send, memory = send or InProcess(ready).send, (s.replies, s.directions, s.bodies)
        exchange = RoundExchange(ready, ready.clients, self.folder.store, number, send, None, lambda: None, *memory)
        seed = seed_of(ready.seed, "round", number)
        return Round(number, cohort, exchange, seed, draws, **defences.combining(settings.robust)), exchange


def of_run(run_dir: Path, progress: Progress | None = None) -> Replay:
    """Read a run and its last checkpoint."""
    folder = RunFolder.existing(run_dir)
    config = configuration.load(folder.path / "config.toml")
    stored = folder.checkpoints.load(config.digest())
    if stored is None:
        raise FedetError(f"{run_dir} has no checkpoint yet: continue the run with `fedet resume {run_dir}`")
    experiment = experiments.build(config, cache_folder(folder.path.parent), progress)
    return Replay(folder, experiment, loop.snapshot(experiment, stored, folder.checkpoint))
