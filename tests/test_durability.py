"""The last two checkpoints are kept: whatever happens to the newest, the run goes on from the one before, to the same bits."""

import os
import shutil

import pytest

import fedet
from fedet import check
from fedet.engine import session
from fedet.errors import FedetError
from fedet.storage import checkpoint, files, metrics
from fedet.storage.run_folder import RunFolder

QUICK = check.SMALL | {"method": {"name": "scaffold", "client": {"steps": 2, "batch": 16}}}


def facts(run_dir):
    """All that must be equal of two runs: weights, metrics without times, ledger."""
    entries = [{k: v for k, v in entry.items() if k != "seconds"} for entry in metrics.read(run_dir / "metrics.jsonl")]
    fields, meta = checkpoint.load(run_dir / "last" / "checkpoint.safetensors")
    fields.pop("seconds")
    states = {name: checkpoint.load(run_dir / "clients" / name)[0] for name in meta["clients"].values()}
    models = {path.name: path.read_bytes() for path in (run_dir / "best").glob("*.safetensors")}
    return entries, (run_dir / "ledger.jsonl").read_bytes(), models, {"fields": fields, "states": states}


def assert_same(a, b):
    first, second = facts(a), facts(b)
    assert first[:3] == second[:3]
    assert check.same(first[3], second[3])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of SCAFFOLD, whose clients keep state, of three rounds, and the same run of five."""
    out = tmp_path_factory.mktemp("whole")
    return tuple(fedet.run(QUICK, out=out / str(rounds), rounds=rounds).run_dir for rounds in (3, 5))


@pytest.fixture
def run_dir(whole, tmp_path):
    """A copy of the run of three rounds; its checkpoints are of rounds 2 and 3."""
    return shutil.copytree(whole[0], tmp_path / "run")


def torn(path):
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def resumed(run_dir, rounds=5):
    said = []
    result = session.resume(run_dir, rounds=rounds, callbacks=fedet.Callbacks(warning=said.append))
    return result, [text for text in said if "the run continues from the checkpoint before it" in text]


def test_two_checkpoints_and_their_client_states_are_kept(run_dir):
    folder = RunFolder(run_dir)
    newest, previous = (checkpoint.load(path) for path in (folder.checkpoint, folder.checkpoints.previous))
    assert (newest[0]["round"], previous[0]["round"]) == (3, 2)
    listed = {*newest[1]["clients"].values(), *previous[1]["clients"].values()}
    assert {path.name for path in (run_dir / "clients").iterdir()} == listed
    assert sorted(path.name for path in (run_dir / "last").glob("*checkpoint*")) == [
        "checkpoint.safetensors",
        "previous-checkpoint.safetensors",
    ]


@pytest.mark.parametrize("damage", [flipped, os.unlink])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(run_dir, whole, damage):
    damage(run_dir / "last" / "checkpoint.safetensors")
    result, said = resumed(run_dir)
    assert len(said) == 1
    assert "checkpoint.safetensors is " in said[0]
    assert "after round 2" in said[0]
    assert "start again" not in said[0]
    assert said[0] in result.summary["warnings"]
    assert_same(run_dir, whole[1])


def test_a_damaged_client_state_is_told_and_the_checkpoint_before_is_used(run_dir, whole):
    states = sorted((run_dir / "clients").glob("*-r3.safetensors"))
    for state, damage in ((states[0], flipped), (states[1], os.unlink)):
        good = state.read_bytes()
        damage(state)
        text = RunFolder(run_dir).repair()[0]
        assert state.name in text
        assert "after round 2" in text
        state.write_bytes(good)
        os.replace(run_dir / "last" / "damaged-checkpoint.safetensors", run_dir / "last" / "checkpoint.safetensors")
        assert RunFolder(run_dir).repair() == []
    flipped(states[0])
    assert len(resumed(run_dir)[1]) == 1
    assert_same(run_dir, whole[1])


def test_a_repaired_run_keeps_a_good_checkpoint_at_every_moment(run_dir, whole, monkeypatch):
    """Killed after the repair, and killed between the two renames of the next checkpoint."""
    torn(run_dir / "last" / "checkpoint.safetensors")
    assert RunFolder(run_dir).repair()
    folder = RunFolder(run_dir)
    assert folder.repair() == []
    assert folder.restore()["round"] == 2
    real = os.replace

    def killed(source, target):
        if str(target) == str(folder.checkpoint):
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(files.os, "replace", killed)
    with pytest.raises(BaseException):  # noqa: B017, PT011 - whatever becomes of the interrupt
        session.resume(run_dir, rounds=5)
    monkeypatch.setattr(files.os, "replace", real)
    assert checkpoint.load(folder.checkpoint)[0]["round"] == 2
    assert checkpoint.load(folder.checkpoints.previous)[0]["round"] == 2
    assert resumed(run_dir)[1] == []
    assert_same(run_dir, whole[1])


def test_if_both_are_damaged_the_run_is_refused_and_nothing_is_touched(run_dir):
    folder = RunFolder(run_dir)
    for path in (folder.checkpoint, folder.checkpoints.previous):
        torn(path)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != ".pid"}
    with pytest.raises(FedetError, match=r"last/checkpoint.safetensors is damaged .* start again"):
        session.resume(run_dir, rounds=5)
    assert {path: path.read_bytes() for path in before} == before


def test_a_disk_without_hard_links_keeps_two_checkpoints_too(tmp_path, monkeypatch, whole):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(files.os, "link", refuse)
    run = fedet.run(QUICK, out=tmp_path, rounds=3).run_dir
    assert checkpoint.load(run / "last" / "previous-checkpoint.safetensors")[0]["round"] == 2
    os.replace(run / "last" / "checkpoint.safetensors", tmp_path / "half a moment")  # killed between the two renames
    assert "is missing" in resumed(run)[1][0]
    assert_same(run, whole[1])


def test_what_a_killed_process_had_not_finished_is_removed(run_dir):
    left = [run_dir / "last" / ".checkpoint.safetensors.123.tmp", run_dir / "clients" / ".3-r4.safetensors.123.tmp"]
    for path in left:
        path.write_bytes(b"half")
    assert RunFolder(run_dir).repair() == []
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_a_log_that_lacks_a_finished_round_is_not_continued(run_dir, name):
    lines = (run_dir / name).read_text(encoding="utf-8").splitlines(keepends=True)
    for content in ("", lines[0], lines[0] + lines[2]):
        (run_dir / name).write_text(content, encoding="utf-8")
        with pytest.raises(FedetError, match=rf"{name} has \d of the 3 rounds that are finished"):
            session.resume(run_dir, rounds=5)
    os.unlink(run_dir / name)
    with pytest.raises(FedetError, match=rf"{name} has 0 of the 3 rounds"):
        session.resume(run_dir, rounds=5)
