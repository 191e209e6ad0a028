"""A worker process of a pool: builds the experiment once, then plays clients as it is told.

It reads one JSON line per job from standard input and answers with one on standard output; tensors go through mailboxes.
When its parent is gone, input ends, and so does it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve until input ends."""
    jobs, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a user's code prints must not mix with the answers
    setup = json.loads(jobs.readline())

    import torch

    from fedet import config, experiment
    from fedet.errors import FedetError
    from fedet.mailbox import Mailbox

    torch.set_num_threads(1)
    ready = experiment.build(config.Config.model_validate(setup["config"]), Path(setup["cache"]))
    inbox, outbox = (Mailbox(Path(setup["mail"]) / name) for name in ("in", "out"))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in jobs:
        try:
            answer = _play(ready, json.loads(line), inbox, outbox)
        except FedetError as error:
            answer = {"error": [type(error).__name__, str(error)]}
        except Exception as error:  # reported in the parent, where someone can see it
            answer = {"error": [type(error).__name__, f"{error}"]}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)
    _clean_up(Path(setup["mail"]))


def _clean_up(mail: Path) -> None:
    """A parent that was killed leaves its mail in memory: whoever sees that it is gone takes it away."""
    shutil.rmtree(mail, ignore_errors=True)
    with contextlib.suppress(OSError):
        mail.parent.rmdir()  # the last of the workers finds it empty


def _play(ready: Any, job: dict[str, Any], inbox: Any, outbox: Any) -> dict[str, Any]:
    from fedet.core import Payload

    mail = inbox.read(job["mail"], copy=False)  # the next message comes after the answer to this one
    down = Payload({name: mail[f"down/{name}"] for name in job["down"]}, job["scalars"])
    client = ready.client(job["client"], job["round"], {name: mail[f"state/{name}"] for name in job["state"]})
    up = ready.method.local(down, client)
    groups = {f"up/{name}": group for name, group in up.tensors.items()}
    groups |= {f"state/{name}": group for name, group in client.state.items()}
    mailed = outbox.write(groups)
    return {"mail": mailed, "up": list(up.tensors), "scalars": dict(up.scalars), "state": list(client.state)}


if __name__ == "__main__":
    main()
