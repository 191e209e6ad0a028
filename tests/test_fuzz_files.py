"""Mutated checkpoints, client states, model folders and data files: refused with a sentence, or recovered, never believed.

A case that fails is named by its number, which seeds it. `pytest -m slow` runs 2,000 of the first two kinds together.
"""

import io
import json
import os
import random
import shutil
import zipfile

import mutations
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedet
from fedet import check
from fedet.config import TextConfig
from fedet.data import decode, text, vision
from fedet.errors import DataError, FedetError
from fedet.reporting import run_data
from fedet.storage import checkpoint, model_folder
from fedet.storage.run_folder import RunFolder

HEADER_WORDS = (
    b"0", b"9", b"-1", b"[", b"]", b"{", b"}", b'"', b"\\", b"$tensor", b"$dict", b"F32", b"F64", b"I64", b"BOOL", b"F8_E4M3",
    b"BF16",
    b"data_offsets", b"shape", b"[18446744073709551615]", b"[4294967296,4294967296]", b"__metadata__", b"null",
    b"1e999", b" ", b"\t",
)  # fmt: skip
SIZES = (0, 1, 65 << 20, 99 << 20, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
"""Of a header, as its first bytes may say."""
VARINTS = (b"\x16" + b"\x80" * 8 + b"\x01", b"\x16" + b"\xff" * 9 + b"\x01", b"\x15" + b"\xfe" * 4 + b"\x0f")
"""Absurd sizes, as a parquet file's footer and the heads of its pages have them."""
CHECKPOINTS = [range(80), pytest.param(range(80, 1000), marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
FOLDERS = [range(60), pytest.param(range(60, 1000), marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
DATA = [range(60), pytest.param(range(60, 1000), marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run of SCAFFOLD, whose clients keep state."""
    small = check.SMALL | {"method": {"name": "scaffold", "client": {"steps": 1, "batch": 8}}}
    return fedet.run(small, out=tmp_path_factory.mktemp("run"), rounds=3, run__cohort=2).run_dir


def mutated(data, rng, others):
    """A safetensors file with its bytes or its header changed, or other content altogether."""
    kind = rng.randrange(8)
    if kind < 3:
        return mutations.change_bytes(data, rng, HEADER_WORDS)
    header, rest = mutations.safetensors_header(data)
    if kind < 6:
        header = mutations.change_bytes(header, rng, HEADER_WORDS)
        return mutations.with_header(header, rest)
    if kind == 6:
        table = json.loads(header)
        mutations.change_table(table, rng)
        return mutations.with_header(json.dumps(table).encode("utf-8", "surrogatepass"), rest)
    return rng.choice(
        (
            *others,
            *(size.to_bytes(8, "little") + data[8:] for size in SIZES),
            b"",
            b"\0" * 8,
            b"\xff" * 64,
            data + data,
            data[::-1],
            mutations.with_header(b"[" * 90_000, b""),
        )
    )


@pytest.mark.parametrize("cases", CHECKPOINTS)
def test_mutated_checkpoints_are_refused_and_the_one_before_is_used(finished, tmp_path, cases):
    run = shutil.copytree(finished, tmp_path / "run")
    last = RunFolder(run).checkpoints
    good, before = last.newest.read_bytes(), last.previous.read_bytes()
    states = sorted((run / "clients").glob("*-r3.safetensors"))
    others = [(run / "best" / "model.safetensors").read_bytes(), states[0].read_bytes()]
    for number in cases:
        rng = random.Random(f"checkpoint {number}")
        bad = mutated(good, rng, others)
        if bad == good:
            continue
        last.newest.write_bytes(bad)
        assert isinstance(mutations.attempt(checkpoint.load, last.newest), FedetError) or bad in others, f"case {number}"
        folder = RunFolder(run)
        (text,) = mutations.attempt(folder.repair)
        assert "after round 2" in text, f"case {number}"
        assert folder.checkpoints.load(folder.digest())["round"] == 2
        assert last.damaged.read_bytes() == bad
        last.newest.unlink()  # it is the same file as the one before
        assert last.previous.read_bytes() == before


@pytest.mark.parametrize("cases", [range(30)])
def test_mutated_client_states_are_refused(finished, tmp_path, cases):
    run = shutil.copytree(finished, tmp_path / "run")
    state = sorted((run / "clients").glob("*-r3.safetensors"))[0]
    good = state.read_bytes()
    for number in cases:
        bad = mutated(good, random.Random(f"state {number}"), [(run / "best" / "model.safetensors").read_bytes()])
        if bad != good:
            state.write_bytes(bad)
            store = RunFolder(run).store
            store.restore({state.name.partition("-")[0]: state.name})
            assert isinstance(mutations.attempt(store.verify), FedetError), f"case {number}"


@pytest.mark.parametrize("cases", FOLDERS)
def test_mutated_model_folders_are_a_model_or_a_sentence(finished, tmp_path, cases):
    """A model folder has no checksum: other numbers are another model, but nothing else may come of it."""
    folder = shutil.copytree(finished / "best", tmp_path / "model")
    good = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}
    right = load_file(folder / "model.safetensors")
    mutations.attempt(model_folder.load_model, folder)
    for number in cases:
        rng = random.Random(f"folder {number}")
        for name, content in good.items():
            (folder / name).write_bytes(content)
        if rng.random() < 0.5:
            (folder / "model.safetensors").write_bytes(mutated(good["model.safetensors"], rng, [good["config.json"]]))
        elif rng.random() < 0.3:
            (folder / "config.json").write_bytes(mutations.change_bytes(good["config.json"], rng))
        else:
            about = json.loads(good["config.json"])
            mutations.change_table(about, rng)
            (folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
        found = mutations.attempt(model_folder.load_model, folder)
        if not isinstance(found, FedetError):
            shapes = {name: tensor.shape for name, tensor in found.state_dict().items()}
            assert shapes == {name: tensor.shape for name, tensor in right.items()}, f"case {number}"


def test_weights_of_another_type_or_place_are_not_a_model(finished, tmp_path):
    folder = shutil.copytree(finished / "best", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    first = next(name for name, tensor in weights.items() if tensor.ndim > 1)
    for change in ({first: torch.zeros(2, 3)}, {"__class__": torch.zeros(1)}, {first: weights[first].flatten()}):
        save_file(weights | change, folder / "model.safetensors")
        assert isinstance(mutations.attempt(model_folder.load_model, folder), FedetError)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")  # opening it would wait for ever
    assert "no model.safetensors" in str(mutations.attempt(model_folder.load_model, folder))
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in str(mutations.attempt(checkpoint.load, tmp_path / "pipe"))


def test_a_list_of_a_million_tensors_is_not_read(finished, tmp_path):
    folder = shutil.copytree(finished / "best", tmp_path / "model")
    empty = {f"t{k}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for k in range(100_000)}
    (folder / "model.safetensors").write_bytes(mutations.with_header(json.dumps(empty).encode(), b""))
    assert "its header is larger than 4 MB" in str(mutations.attempt(model_folder.load_model, folder))


def test_a_checkpoint_that_says_its_header_is_huge_is_not_read(finished, tmp_path):
    """The parser's own limit is 100 MB, which take gigabytes as a list of tensors."""
    good = RunFolder(finished).checkpoints.newest.read_bytes()
    path = tmp_path / "checkpoint.safetensors"
    for size in (65 << 20, 99 << 20, 1 << 40, (1 << 64) - 1):
        with path.open("wb") as file:
            file.write(size.to_bytes(8, "little") + good[8:])
            file.truncate(min(size + 4096, 100 << 20))  # without blocks on the disk
        assert "its header is larger than 64 MB" in str(mutations.attempt(checkpoint.load, path))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.toml", b"#" * (2 << 20), "larger than 1 MB"),
        ("config.toml", b"a." * 200_000 + b"b = 1", "nested"),
        ("metrics.jsonl", 2 << 30, "a line of more than 64 MB"),
    ],
)
def test_the_files_of_a_run_have_a_largest_size(finished, tmp_path, name, content, words):
    run = shutil.copytree(finished, tmp_path / "run")
    with (run / name).open("wb") as file:
        file.truncate(content) if isinstance(content, int) else file.write(content)
    assert words in str(mutations.attempt(run_data.read_run, run))


def test_an_archive_that_claims_any_size_is_not_unpacked(finished, tmp_path, monkeypatch):
    run = shutil.copytree(finished, tmp_path / "run")
    assert run_data.read_run(run).split
    monkeypatch.setattr(run_data, "MAX_SPLIT", 1 << 20)
    content = io.BytesIO()
    np.save(content, np.zeros(1 << 21, dtype=np.uint8))
    with zipfile.ZipFile(run / "split.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archs.npy", content.getvalue())
    assert (run / "split.npz").stat().st_size < 1 << 16
    assert "more than 1 MB" in str(mutations.attempt(run_data.read_run, run))


# Data


def rows(number):
    return {
        "text": [f"words {k}" for k in range(number)],
        "label": [k % 3 for k in range(number)],
        "user": ["a", "b"] * (number // 2),
    }


@pytest.mark.parametrize("cases", DATA)
def test_mutated_tables_are_texts_or_a_sentence(tmp_path, cases):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(rows(40)), tmp_path / "good.parquet")
    lines = ["text,label,user", *(f'"words, {k}",{k % 3},u{k % 5}' for k in range(40))]
    leaf = {"user_data": {"a": {"x": [["1", "2", "3", "4", "words"]] * 3, "y": [0, 1, 0]}}}
    good = {
        "case.parquet": (tmp_path / "good.parquet").read_bytes(),
        "case.csv": "\n".join(lines).encode(),
        "case.tsv": "\n".join(lines).replace(",", "\t").encode(),
        "case.json": json.dumps(leaf).encode(),
    }
    for number in cases:
        rng = random.Random(f"table {number}")
        name = rng.choice(list(good))
        (tmp_path / name).write_bytes(
            mutations.change_bytes(good[name], rng, (*mutations.TOKENS, b",,,", b'"' * 9, b"\r", b"PAR1", *VARINTS))
        )
        found = mutations.attempt(labelled, tmp_path / name)
        assert isinstance(found, DataError | np.ndarray), f"case {number}: {found!r}"


def labelled(path):
    table = text.read(path, TextConfig(), False)
    assert all(isinstance(one, str | None) for one in table.texts)
    return text._encode_labels(table.labels, path)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ({"text": [1, 2]}, "where a text should be"),
        ({"text": [{"a": 1}, None]}, "where a text should be"),
        ({"label": [None, 1]}, "label"),
        ({"label": [0.5, 1.0]}, "label"),
    ],
)
def test_columns_of_other_types_are_told(tmp_path, column, words):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(rows(2) | column), tmp_path / "t.parquet")
    assert words in str(mutations.attempt(labelled, tmp_path / "t.parquet"))


def test_labels_of_any_length_are_words(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(f"text,label\na,{10**30}\nb,1\n", encoding="utf-8")
    assert labelled(path).tolist() == [1, 0]


def test_a_small_file_with_many_rows_is_refused_before_memory_is_full(tmp_path, monkeypatch):
    """Two strings, a hundred thousand times: some kilobytes on disk."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": ["x" * 10_000, "y" * 10_000] * 50_000, "label": [0, 1] * 50_000})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "t.parquet")
    del table
    assert (tmp_path / "t.parquet").stat().st_size < 1 << 20
    monkeypatch.setattr(decode, "MEMORY_SHARE", decode.psutil.virtual_memory().total // (16 << 20))
    with mutations.limits(memory=300 << 20), pytest.raises(DataError, match="of this machine's memory"):
        text.read(tmp_path / "t.parquet", TextConfig(), False)


def test_a_value_that_many_rows_share_is_counted_before_they_are_decoded(tmp_path, monkeypatch):
    """A block of 256 rows with a string of 8 MB would take 2 GB before anybody looks at its size; the file has a kilobyte."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    long = pyarrow.DictionaryArray.from_arrays(np.zeros(256, np.int32), pyarrow.array(["x" * (8 << 20)]))
    table = pyarrow.table({"text": long, "label": [0, 1] * 128})
    parquet.write_table(table, tmp_path / "t.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "t.parquet").stat().st_size < 1 << 13
    monkeypatch.setattr(decode, "MEMORY_SHARE", decode.psutil.virtual_memory().total // (128 << 20))
    with mutations.limits(memory=600 << 20), pytest.raises(DataError, match="of this machine's memory"):
        text.read(tmp_path / "t.parquet", TextConfig(), False)
    small = pyarrow.table({"text": ["a", "b"] * 600, "label": [0, 1] * 600, "x.y": [1] * 1200})
    parquet.write_table(small, tmp_path / "s.parquet")
    assert len(text.read(tmp_path / "s.parquet", TextConfig(label="x.y"), False).labels) == 1200
    stated = decode._stated_sizes(parquet.ParquetFile(tmp_path / "s.parquet").metadata, ["text"])
    assert decode._rows_at_a_time(stated) == 256


def test_a_table_that_says_it_is_too_large_is_not_read(tmp_path, monkeypatch):
    """As it is written, with 40 MB in a few kilobytes, and with a size in its footer that no machine has."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["a" * (20 << 20), "b" * (20 << 20)], "label": [0, 1]})
    parquet.write_table(table, tmp_path / "t.parquet", compression="zstd")
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("it was read"))
    with monkeypatch.context() as smaller:
        smaller.setattr(decode, "MEMORY_SHARE", decode.psutil.virtual_memory().total // (16 << 20))
        assert "of this machine's memory" in str(mutations.attempt(decode.read_parquet, tmp_path / "t.parquet", ["text"]))
    parquet.write_table(pyarrow.table(rows(2)), tmp_path / "s.parquet", compression="none")
    about = parquet.ParquetFile(tmp_path / "s.parquet").metadata.row_group(0).column(0)
    size = _varint(2 * about.total_uncompressed_size)
    whole = (tmp_path / "s.parquet").read_bytes()
    assert about.total_uncompressed_size < 1 << 12
    start = whole.index(b"\x16" + size + b"\x16", about.total_compressed_size)  # two fields of 64 bits: both sizes
    footer = whole[start + 1 + len(size) :]
    length = int.from_bytes(whole[-8:-4], "little") + 9 - len(size)
    absurd = whole[: start + 1] + _varint(2 * (1 << 60)) + footer[:-8] + length.to_bytes(4, "little") + b"PAR1"
    (tmp_path / "s.parquet").write_bytes(absurd)
    assert "of this machine's memory" in str(mutations.attempt(decode.read_parquet, tmp_path / "s.parquet", ["text"]))


def _varint(number):
    """As in a parquet file's footer."""
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("one-line.csv", b"text,label\n" + b"ab," * 300_000 + b"\n"),
        ("many-rows.csv", b"text,label\n" + b"a,b\n" * 100_000),
        ("long-line.csv", b"text,label\na," + b"x" * (4 << 20) + b"\n"),
        ("lists.json", b'{"user_data": {"a": {"x": [' + b"[]," * 200_000 + b'[]], "y": []}}}'),
        ("objects.json", b'{"user_data": {"a": {"x": [' + b'{"":[]},' * 50_000 + b'[]], "y": []}}}'),
        ("large.json", b" " * (20 << 20)),
    ],
)
def test_a_small_file_that_becomes_many_objects_is_refused_before_memory_is_full(tmp_path, monkeypatch, name, content):
    (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(decode, "MEMORY_SHARE", decode.psutil.virtual_memory().total // (16 << 20))
    with mutations.limits(memory=64 << 20), pytest.raises(DataError, match="of this machine's memory"):
        text.read(tmp_path / name, TextConfig(), False)


def test_one_long_label_or_user_makes_the_others_no_longer(tmp_path):
    """NumPy's arrays of strings have the length of the longest in every row: 5,000 rows took 20 GB."""
    path = tmp_path / "t.csv"
    path.write_text("text,label,user\n" + "a,x,u\n" * 5000 + f"b,{'y' * 1_000_000},{'v' * 1_000_000}\n", encoding="utf-8")
    found = mutations.attempt(labelled, path)
    assert found.tolist() == [0] * 5000 + [1]
    table = mutations.attempt(text._drop_rare_users, text.read(path, TextConfig(), True), 2, path)
    assert len(table.texts) == 5000
    assert text._numbered(["b", "a", "é", "b"])[1].tolist() == [1, 0, 2, 1]


def test_a_line_of_a_table_ends_where_a_line_of_a_file_does(tmp_path):
    """Not at one of the other characters that Unicode calls the end of a line, which texts contain."""
    path = tmp_path / "t.csv"
    rows = ["a\u2028b,0", "c\x85d,1", "e\x1cf,0", '"g\r\nh",1']
    path.write_bytes("\r\n".join(["text,label", *rows, ""]).encode())
    assert text.read(path, TextConfig(), False).texts == ["a\u2028b", "c\x85d", "e\x1cf", "g\r\nh"]


def test_pipes_and_devices_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    for name in ("pipe.csv", "zero.csv"):
        assert "is not a file" in str(mutations.attempt(text.tokens.fingerprint, [tmp_path / name], ()))


def test_images_of_any_size_and_format_are_refused_before_they_are_decoded(tmp_path):
    image = pytest.importorskip("PIL.Image")
    huge, page = io.BytesIO(), b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    image.new("L", (1 << 13, 1 << 12)).save(huge, "PNG")
    assert len(huge.getvalue()) < 1 << 16
    for data, words in (
        (huge.getvalue(), "pixels"),
        (page, "can't be decoded"),
        (b"", "can't be decoded"),
        (b"\x89PNG", "decoded"),
    ):
        assert words in str(mutations.attempt(decode._pixels, ("it", data), 1))
        (tmp_path / "it.png").write_bytes(data)
        assert isinstance(mutations.attempt(vision.read_images, [tmp_path / "it.png"], (1, 8, 8)), DataError)


@pytest.mark.parametrize("cases", [range(40)])
def test_mutated_image_files_are_images_or_a_sentence(tmp_path, cases):
    pyarrow, image = pytest.importorskip("pyarrow"), pytest.importorskip("PIL.Image")
    content = io.BytesIO()
    image.new("L", (8, 8), 7).save(content, "PNG")
    table = pyarrow.table({"image": [{"bytes": content.getvalue(), "path": None}] * 12, "label": list(range(12))})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "good.parquet")
    good, layout = (tmp_path / "good.parquet").read_bytes(), vision.LAYOUTS["fashion-mnist"]
    for number in cases:
        (tmp_path / "bad.parquet").write_bytes(mutations.change_bytes(good, random.Random(f"images {number}")))
        found = mutations.attempt(decode.read, tmp_path / "bad.parquet", layout)
        assert isinstance(found, DataError) or found[0].dtype == np.uint8, f"case {number}"
