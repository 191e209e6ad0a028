"""Errors of the command line: only those of standard output are taken for it, and none ends in silence."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedet import check, config
from fedet.cli import output, program
from fedet.engine import comparison

ENV = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"} | {"OMP_NUM_THREADS": "1"}
BUFFERED = pytest.mark.parametrize("env", [ENV, ENV | {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])


def fedet(*args, **kwargs):
    command = [sys.executable, "-m", "fedet", *map(str, args)]
    kwargs = {"env": ENV, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | kwargs
    return subprocess.run(command, text=True, timeout=100, check=False, **kwargs)


def closed_pipe():
    """The writing end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(errno.EPIPE, "Broken pipe"),  # of a worker that died
        OSError(errno.ENOSPC, "No space left on device"),  # of a file object: it has no name
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    ],
    ids=lambda error: error.strerror,
)
def test_an_error_of_something_else_is_not_taken_for_standard_output(error, capsys, monkeypatch):
    def fail(run_dir):
        raise error

    monkeypatch.setattr(comparison, "write_report", fail)
    monkeypatch.setattr(sys, "argv", ["fedet", "report", "somewhere"])
    with pytest.raises(SystemExit) as stop:
        program.main()
    assert stop.value.code == 1
    message = capsys.readouterr().err.splitlines()[-1]  # after the lines of the code that failed, this file's
    assert message == f"fedet: the system reports: {error.strerror} (FEDET_DEBUG=1 shows the whole traceback)"


def test_an_error_with_a_file_name_names_it(capsys):
    @program.report_errors
    def fail():
        raise PermissionError(errno.EACCES, "Permission denied", "some/file")

    with pytest.raises(SystemExit, match="1"):
        fail()
    assert capsys.readouterr().err.splitlines()[-1].startswith("fedet: can't use some/file: Permission denied")


def test_what_strangers_wrote_does_not_control_the_terminal(capsys):
    hostile = "\x1b]0;title\x07 \x1b[2J \x9b2J \u202egnp \ud800 a\tb"
    output.write(hostile)
    output.log(hostile)
    for text in capsys.readouterr():
        assert text == "\\x1b]0;title\\x07 \\x1b[2J \\x9b2J \\u202egnp \\ud800 a\tb\n"
    output.write("\x1b[1mbold\x1b[0m")
    assert capsys.readouterr().out == "\x1b[1mbold\x1b[0m\n"
    with pytest.raises(SystemExit):
        output.fail("x" * 1_000_000, 1)
    assert len(capsys.readouterr().err) < 5000


@BUFFERED
@pytest.mark.parametrize("command", [("config", "list"), ("config", "show"), ("methods",)], ids=lambda words: " ".join(words))
def test_a_reader_that_left_ends_the_program_in_silence(command, env):
    pipe = closed_pipe()
    said = fedet(*command, stdout=pipe, env=env)
    os.close(pipe)
    assert (said.returncode, said.stderr) == (0, "")


@BUFFERED
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_reported(env):
    with open("/dev/full", "w", encoding="utf-8") as full:
        said = fedet("config", "list", stdout=full, env=env)
    assert (said.returncode, said.stderr) == (1, "fedet: can't write to standard output: No space left on device\n")


def test_a_closed_standard_output_is_no_error():
    command = f"{sys.executable} -m fedet config list >&-"
    said = subprocess.run(["sh", "-c", command], env=ENV, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert (said.returncode, said.stderr) == (0, "")


def test_a_run_continues_when_nobody_reads_its_progress(tmp_path):
    (tmp_path / "small.toml").write_text(config.load(check.SMALL, {"run.rounds": 2}).to_toml(), encoding="utf-8")
    pipe = closed_pipe()
    said = fedet("run", "small.toml", "--method", "fedavg", "--json", stderr=pipe, cwd=tmp_path)
    os.close(pipe)
    assert said.returncode == 0
    assert '"rounds": 2' in said.stdout


def test_output_errors_are_not_os_errors():
    assert not issubclass(output.OutputError, OSError)  # or a handler for files would take them for its own
