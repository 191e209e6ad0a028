"""A checkpoint comes back as it was written; a file that was changed in any way is refused with a sentence."""

import contextlib
import json
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedet.errors import FedetError
from fedet.storage import checkpoint, files, metrics
from fedet.storage.client_store import ClientStore
from fedet.storage.records import ComparisonRecord, ModelRecord, ResultRecord
from fedet.storage.run_folder import RunFolder


@dataclass(frozen=True)
class State:
    weights: dict[str, Tensor]
    rounds: list[int]


def value() -> dict[str, Any]:
    shared = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    tensors = {"a": shared, "b": torch.tensor([True, False]), "empty": torch.zeros(0, 4), "scalar": torch.tensor(3.5)}
    return {"state": State(tensors, [1, 2]), "round": 10, "again": shared, "none": None, 7: ["x", 0.1, {"deep": [[]]}]}


def written(folder: Path) -> Path:
    path = folder / "c.safetensors"
    checkpoint.save(path, value(), {"config": "0123abcd", "clients": {"3": "3-r10.safetensors"}})
    return path


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path: Path) -> None:
    found, meta = checkpoint.load(written(tmp_path))
    assert meta == {"config": "0123abcd", "clients": {"3": "3-r10.safetensors"}}
    assert list(found) == ["state", "round", "again", "none", 7]
    assert (found["round"], found["none"], found[7]) == (10, None, ["x", 0.1, {"deep": [[]]}])
    for name, tensor in value()["state"].weights.items():
        assert found["state"]["weights"][name].dtype == tensor.dtype
        assert torch.equal(found["state"]["weights"][name], tensor)
    assert found["again"] is found["state"]["weights"]["a"]  # stored once


def test_a_changed_round_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = path.read_bytes()
    for before, after in ((b'\\"round\\", 10', b'\\"round\\", 99'), (b"0123abcd", b"0123abce")):
        assert data.count(before) == 1
        path.write_bytes(data.replace(before, after))
        with pytest.raises(FedetError, match="is damaged"):
            checkpoint.load(path)


def test_every_single_byte_counts(tmp_path: Path) -> None:
    """Several hundred seeded flips all over the file, each of them refused with a sentence."""
    path = written(tmp_path)
    data, rng = path.read_bytes(), random.Random(0)
    for position in [*range(16), *rng.sample(range(len(data)), 600)]:
        bad = bytearray(data)
        bad[position] ^= 1 << rng.randrange(8)
        refused(path, bytes(bad))
    for position in range(len(data)):
        if data[position : position + 1] == b" ":  # a tab is a space to a parser, and still a change
            refused(path, data[:position] + b"\t" + data[position + 1 :])


def test_cut_and_lengthened_files_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    data, rng = path.read_bytes(), random.Random(1)
    for length in [0, 1, 7, 8, 9, len(data) - 1, *rng.sample(range(len(data)), 100)]:
        refused(path, data[:length])
    for more in (b"\0", b" " * 8, data):
        refused(path, data + more)
    refused(path, struct.pack("<Q", 1 << 62) + data[8:])


def test_edited_headers_are_refused(tmp_path: Path) -> None:
    """Values of another type, missing and doubled entries; nothing but a sentence comes of it."""
    path = tmp_path / "c.safetensors"
    deep = "[" * 100_000
    trees: list[Any] = [
        {"$tensor": "9"}, {"$tensor": 0}, {"$tensor": None}, {"$tensor": "0", "x": 1}, {"$dict": {}}, {"$dict": [1]},
        {"$dict": [["a"]]}, {"$dict": [[["a"], 1]]}, {"$dict": [[{}, 1]]}, {"x": 1}, {}, [{"$dict": "ab"}], nested(200),
        nested(500),
    ]  # fmt: skip
    for tree in trees:
        new_format(path, json.dumps(tree), "{}")
        refused(path)
    for tree_text, meta_text in ((deep, "{}"), ("1", deep), ("1", "[]"), ("1", "3"), ("", "{}"), ("1", "{"), ("NaN1", "{}")):
        new_format(path, tree_text, meta_text)
        refused(path)
    for header in ({}, {"format": "fedet-2"}, {"format": "fedet-3", "tree": "1", "meta": "{}"}):
        save_file({"0": torch.ones(3)}, path, metadata=header)
        refused(path)


def test_a_header_of_random_edits_is_refused_or_the_same(tmp_path: Path) -> None:
    """With a checksum that fits, it may still only ever end in data or in a sentence."""
    path, rng = tmp_path / "c.safetensors", random.Random(2)
    good = '{"$dict": [["state", {"$tensor": "0"}], ["round", 4]]}'
    for _ in range(400):
        bad = list(good)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(len(good))] = rng.choice('{}[]",:0129ae$ \x00\xff')
        new_format(path, "".join(bad), '{"clients": {}}')
        with contextlib.suppress(FedetError):
            checkpoint.load(path)


def test_what_can_not_be_stored_is_said(tmp_path: Path) -> None:
    itself: list[Any] = []
    itself.append(itself)
    for bad, words in ((itself, "contains itself"), ({(1, 2): 3}, "keys"), ({"a": object()}, "may contain tensors")):
        with pytest.raises(FedetError, match=words):
            checkpoint.save(tmp_path / "c.safetensors", bad)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FedetError, match="does not exist"):
        checkpoint.load(tmp_path / "c.safetensors")


def test_client_states_are_checked(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "clients")
    store.stage(3, {"own": {"w": torch.ones(2)}})
    store.commit(1)
    files_of = store.flush(1)
    path = store.folder / files_of["3"]
    good = path.read_bytes()
    for bad in (good[:-1], bytes([*good[:-1], good[-1] ^ 1]), b""):
        path.write_bytes(bad)
        with pytest.raises(FedetError, match="is damaged"):
            restored(store.folder, files_of).get(3)
    for content in ([1], {"own": 1}, {"own": {"w": 1}}, None):
        checkpoint.save(path, content)
        with pytest.raises(FedetError, match="does not contain the state of a client"):
            restored(store.folder, files_of).get(3)
    outside: list[Any] = [
        {"3": "../secret"}, {"x": "x-r1.safetensors"}, {"3": 1}, {"3": "4-r1.safetensors"}, [], None, "x", {"3": "3-r1/../../x"}
    ]  # fmt: skip
    for listing in outside:
        with pytest.raises(FedetError, match="list of files"):
            restored(store.folder, listing)


def test_fields_of_a_checkpoint_have_their_types(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder._digest = "x"
    good = {"round": 1, "state": {}, "totals": {"params_up": 1}, "accuracy": 0.5}
    for change in ({"round": "1"}, {"round": -1}, {"round": None}, {"totals": []}, {"totals": {"a": "b"}}, {"accuracy": "x"}):
        checkpoint.save(folder.checkpoint, good | change, {"config": "x", "clients": {}})
        with pytest.raises(FedetError, match="is damaged"):
            folder.restore()
    checkpoint.save(folder.checkpoint, [1], {"config": "x", "clients": {}})
    with pytest.raises(FedetError, match="is damaged"):
        folder.restore()
    checkpoint.save(folder.checkpoint, good, {"config": "x"})
    with pytest.raises(FedetError, match="list of files"):
        folder.restore()


JUNK = (None, True, -1, 1 << 70, 1e308, "x", [], [[]], {}, {"a": {}}, [1, "a"])


def test_json_files_of_any_content_end_in_a_sentence_or_in_data(tmp_path: Path) -> None:
    rng = random.Random(3)
    entry = {"round": 1, "params_total": 5, "cohort": [1], "models": {"server": 0.5}, "accuracy": 0.5, "failures": []}
    counts = dict.fromkeys(("rounds", "best_round", "params_up", "params_down", "bytes_up", "bytes_down"), 1)
    result = counts | {"stopped": "rounds", "accuracy": 0.5, "best_accuracy": None, "seconds": 1.5, "c_acc": {"0.5": None}}
    assert files.conform(result, ResultRecord, "it") == result
    listing = {"runs": ["a-s0"], "seeds": [0], "threads": 1}
    about = {"model_type": "fedet", "architecture": {}, "training": None}
    for good, schema in ((result, ResultRecord), (listing, ComparisonRecord), (about, ModelRecord)):
        for _ in range(100):
            path = tmp_path / "file.json"
            path.write_bytes(spoilt(good, rng))
            told(lambda path=path, schema=schema: files.read_json(path, schema))
    for _ in range(100):
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(spoilt(entry, rng) + b"\n" + json.dumps(entry).encode() + b"\n")
        told(lambda path=path: metrics.truncate(path, 1))


def test_a_cut_last_line_is_left_out_and_any_other_is_damage(tmp_path: Path) -> None:
    path, line = tmp_path / "metrics.jsonl", '{"round": 1, "params_total": 5}\n'
    path.write_text(line + line + '{"round": 2, "par', encoding="utf-8")
    assert len(metrics.read(path)) == 2
    for bad in ("[]", "3", "{}", '{"round": "1", "params_total": 5}', "x", "[" * 100_000):
        path.write_text(line + bad + "\n" + line, encoding="utf-8")
        with pytest.raises(FedetError, match=r"metrics.jsonl, line 2, is damaged"):
            metrics.read(path)
    path.write_bytes(b"\xff\n" + line.encode())
    with pytest.raises(FedetError, match="is damaged"):
        metrics.read(path)


def refused(path: Path, content: bytes | None = None) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FedetError) as found:
        checkpoint.load(path)
    assert "damaged" in str(found.value) or "not a checkpoint" in str(found.value)


def told(read: Any) -> None:
    with contextlib.suppress(FedetError):  # anything else is a traceback
        read()


def spoilt(good: dict[str, Any], rng: random.Random) -> bytes:
    """The record with one value replaced by junk, or its text with a byte replaced, or cut off."""
    kind = rng.randrange(3)
    if kind == 0:
        return json.dumps(good | {rng.choice(list(good)): rng.choice(JUNK)}).encode()
    text = bytearray(json.dumps(good).encode())
    if kind == 1:
        text[rng.randrange(len(text))] = rng.randrange(256)
        return bytes(text)
    return bytes(text[: rng.randrange(len(text))])


def nested(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def new_format(path: Path, tree: str, meta: str) -> None:
    """A file with any text for tree and metadata, under a digest that is right."""
    header = {"format": "fedet-2", "tree": tree, "meta": meta, "digest": "0" * 32}
    save_file({"0": torch.ones(3)}, path, metadata=header)
    with path.open("r+b") as file:
        digest, position = checkpoint._file_digest(file, "0" * 32)
        file.seek(position)
        file.write(digest.encode())
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["digest"] == digest


def restored(folder: Path, listing: Any) -> ClientStore:
    store = ClientStore(folder)
    store.restore(listing)
    return store
