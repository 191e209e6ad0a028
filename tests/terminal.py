"""The command line, called in this process as the shell would."""

import json
import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedet import check, config

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer reads names that click is about to drop
    from fedet import cli

SMALL = check.SMALL | {
    "method": {"name": "fedet", "client": {"steps": 2, "batch": 16}, "server": {"steps": 2, "batch": 16, "lr": 0.01}}
}
TOML = config.load(SMALL, {"name": "small", "run.rounds": 2}).to_toml()


@dataclass
class Said:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def sentence(self, code):
        """The one sentence of a failure."""
        assert self.code == code, self
        assert "Traceback" not in self.err
        assert "(unexpected" not in self.err
        line = self.err.removesuffix("\n").split("\n")[-1]
        assert line.startswith("fedet: "), self
        return line

    @property
    def json(self):
        assert self.code == 0, self
        assert self.out.count("\n") == 1
        return json.loads(self.out)


def caller(tmp_path, monkeypatch, capsys):
    """A function that calls the command line in a folder that holds small.toml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDET_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    Path("small.toml").write_text(TOML, encoding="utf-8")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["fedet", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return Said(stop.value.code, *capsys.readouterr())

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)
