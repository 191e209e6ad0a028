"""Run what the README shows with an installed fedet, each with few rounds, then the notebook and `fedet ui`.

python .ci/readme.py FEDET README NOTEBOOK, in an empty folder; python and fedet are those of the same environment.
"""

import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import nbclient
import nbformat
import numpy as np

SHORTER = {"fedet study table2": "fedet study table2 --dry-run", "--seeds 0,1,2": "--seeds 0"}
FEWER = {"run": "--rounds 1", "compare": "--rounds 1", "sweep": "--rounds 1", "resume": "--rounds 2"}


def main(fedet: str, readme: Path, notebook: Path) -> None:
    """Do everything; the first thing that fails is an error."""
    text = readme.read_text(encoding="utf-8")
    images, labels = np.random.default_rng(0).integers(0, 256, (600, 8, 8), dtype=np.uint8), np.arange(600) % 10
    np.save("images.npy", images)
    np.save("labels.npy", labels)
    own, api = sorted(blocks(text, "python"), key=lambda code: "import fedet" in code)
    Path("mine.py").write_text(own, encoding="utf-8")
    (found,) = re.findall(r"rounds=\d+", api)
    say(api)
    subprocess.run([sys.executable, "-c", api.replace(found, "rounds=1")], check=True)
    for command in commands(text):
        say(command)
        subprocess.run([fedet, *shlex.split(command)[1:]], check=True)
    say(notebook.name)
    nbclient.NotebookClient(nbformat.read(notebook, as_version=4), timeout=600).execute()
    say("fedet ui")
    look_at_page(fedet)


def blocks(text: str, language: str) -> list[str]:
    """The contents of the fenced blocks in this language."""
    return [code for name, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.S | re.M) if name == language]


def commands(text: str) -> list[str]:
    """The README's commands, made shorter; those that download something or start an environment are left out."""
    lines = [line for block in blocks(text, "") for line in block.splitlines()]
    shown = [line.split("  #")[0].strip() for line in lines if line.startswith("fedet ")]
    assert len(shown) >= 7, shown
    for long, short in SHORTER.items():
        assert any(long in command for command in shown), long
        shown = [command.replace(long, short) for command in shown]
    newest = f"runs/{max(Path('runs').glob('*/result.json'), key=lambda path: path.stat().st_mtime).parent.name}"
    return [f"{c} {FEWER.get(c.split()[1], '')}".replace("runs/NAME", newest) for c in shown]


def look_at_page(fedet: str) -> None:
    """Start `fedet ui`, read the page at the address that it prints, and end it as Ctrl-C would, where that can be sent."""
    with subprocess.Popen([fedet, "ui", "--no-open"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(address, timeout=60) as reply:
            page = reply.read().decode()
        process.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGINT)
    assert "digits" in page, page
    assert process.returncode in (0, 130) or sys.platform == "win32", process.returncode


def say(what: str) -> None:
    """Print a line before it is done."""
    print(f"--- {what}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
