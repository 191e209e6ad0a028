"""Data come from the seed alone, in the promised amounts, from every promised source, or with a sentence that helps."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import SHAPES, pixels, write_images

from fedet import data, runtime
from fedet.config import AugmentConfig, DataConfig
from fedet.data import decode, partition, source, vision
from fedet.data.fetch import parquet
from fedet.errors import ConfigError, DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")

needs_data = pytest.mark.skipif(
    not os.environ.get("FEDET_DATA"), reason="set FEDET_DATA to the folder with cifar10/, cifar100/ and fashion_mnist/"
)
PLAIN = AugmentConfig(crop=0, flip=False, color=0, gray=0)


def load(tmp_path: Path, seed: int = 0, **values: Any) -> data.FederatedData:
    return data.load(DataConfig(**values), seed, tmp_path / "cache")


def own(tmp_path: Path, body: str, name: str = "own") -> str:
    """A user's file with a function `make`, as a reference."""
    path = tmp_path / f"{name}.py"
    path.write_text(f"import numpy as np\nimport torch\nfrom fedet.data import Dataset\n{body}\n")
    return f"{path}:make"


# ---- the federation -------------------------------------------------------------------------------------------------


def test_digits_are_split_seven_one_two_and_dealt_out(tmp_path: Path) -> None:
    fed = load(tmp_path)
    arrays = fed.split_arrays()
    parts = [arrays[key] for key in ("client_rows", "public", "test")]
    assert [len(p) for p in parts] == [1258, 180, 359]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1797))
    assert fed.input_shape == (1, 8, 8)
    assert fed.num_classes == 10
    assert len(fed.sizes) == 30
    share = np.bincount(fed.test.labels) / np.bincount(fed.dataset.labels)
    assert share == pytest.approx([0.2] * 10, abs=0.01)


def test_label_counts_are_those_of_the_clients(tmp_path: Path) -> None:
    fed = load(tmp_path, alpha=0.1)
    counts = fed.label_counts()
    assert counts.shape == (30, 10)
    for k in (0, 7, 29):
        assert len(fed.client(k)) == fed.sizes[k]
        assert np.array_equal(counts[k], np.bincount(fed.client(k).labels, minlength=10))
    with pytest.raises(IndexError):
        fed.client(30)


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    first, again, other = (load(tmp_path, seed) for seed in (3, 3, 4))
    for key, value in first.split_arrays().items():
        assert np.array_equal(value, again.split_arrays()[key]), key
    assert not np.array_equal(first.split_arrays()["test"], other.split_arrays()["test"])
    assert first.public is not None
    assert again.public is not None
    assert torch.equal(first.public.view(1).data, again.public.view(1).data)


def test_the_split_does_not_depend_on_how_it_is_used(tmp_path: Path) -> None:
    usual = load(tmp_path).split_arrays()
    other = load(tmp_path, alpha=5, clients=3, public="none", partition="iid").split_arrays()
    assert np.array_equal(usual["test"], other["test"])
    assert np.array_equal(np.sort(usual["client_rows"]), np.sort(other["client_rows"]))


def test_batches_are_normalised_and_match_their_rows(tmp_path: Path) -> None:
    fed = load(tmp_path)
    inputs, labels = fed.test.batch(torch.tensor([5, 2]))
    row = int(fed.test.rows[5])
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs[0], (fed.dataset.inputs[row].float() / 255 - 0.5) / 0.5)
    assert labels.tolist() == fed.test.labels[[5, 2]].tolist()
    assert torch.equal(fed.test.inputs(torch.tensor([5, 2])), inputs)


def test_digits_are_those_of_scikit_learn_wherever_it_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    read = source.load_dataset("digits", None, Path())
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    loaded = source.load_dataset("digits", None, Path())
    assert torch.equal(read.inputs, loaded.inputs)
    assert torch.equal(read.labels, loaded.labels)
    assert read.inputs.dtype == torch.uint8
    assert (len(read.labels), int(read.inputs.max())) == (1797, 255)


def test_validation_is_taken_from_the_training_part(tmp_path: Path) -> None:
    usual, held = load(tmp_path).split_arrays(), load(tmp_path, val_fraction=0.1).split_arrays()
    assert len(held["val"]) == 126
    assert np.array_equal(usual["test"], held["test"])
    assert np.array_equal(np.sort(usual["client_rows"]), np.sort(np.r_[held["val"], held["client_rows"]]))


def test_official_test_rows_can_stay_out(tmp_path: Path) -> None:
    make = "def make():\n return Dataset('x', torch.rand(100, 2), torch.arange(100) % 2, 2, None, np.arange(100) >= 80)"
    fed = load(tmp_path, name=own(tmp_path, make), pool_official_test=False, clients=3)
    rows = np.concatenate([fed.split_arrays()[key] for key in ("client_rows", "public", "test")])
    assert sorted(rows) == list(range(80))
    assert [len(fed.test), fed.sizes.sum()] == [16, 56]


def test_a_hundred_thousand_clients_are_cheap(tmp_path: Path) -> None:
    load(tmp_path)
    start = time.process_time()
    fed = load(tmp_path, clients=100_000)
    arrays = fed.split_arrays()
    assert sum(len(fed.client(k)) for k in range(0, 100_000, 100)) <= 1258
    assert time.process_time() - start < 4
    assert arrays["label_counts"].shape == (100_000, 10)
    assert arrays["label_counts"].sum() == 1258


# ---- public inputs --------------------------------------------------------------------------------------------------


def test_a_fixed_view_is_the_same_every_round(tmp_path: Path) -> None:
    public = load(tmp_path).public
    assert public is not None
    assert public.view(1) is public.view(9)
    assert len(public.view(1)) == len(public) == 180
    index = torch.tensor([4, 170])
    assert torch.equal(public.view(2).inputs(index), public.view(1).data[index])


def test_a_view_per_round_is_a_function_of_the_round(tmp_path: Path) -> None:
    first, again = (load(tmp_path, public_view="per_round").public for _ in range(2))
    assert first is not None
    assert again is not None
    one, two = first.view(1).data, first.view(2).data
    assert not torch.equal(one, two)
    assert torch.equal(again.view(2).data, two)
    assert torch.equal(first.view(1).data, one)


@pytest.mark.parametrize("mode", ["fixed", "per_round"])
def test_a_part_of_a_view_has_the_views_numbers(tmp_path: Path, mode: str) -> None:
    whole, some = (load(tmp_path, public_view=mode).public for _ in range(2))
    assert whole is not None
    assert some is not None
    rows = torch.tensor([0, 3, 4, 90, 179])
    part = some.subset(2, rows)
    assert len(part) == 180
    for index in (rows, rows.flip(0), rows[:2]):
        assert torch.equal(part.inputs(index), whole.view(2).inputs(index))


def test_public_labels_are_kept_apart(tmp_path: Path) -> None:
    fed = load(tmp_path, public_size=40)
    assert fed.public is not None
    assert len(fed.public) == 40
    assert torch.equal(fed.public.labels, fed.dataset.labels[fed.public.rows])
    assert not hasattr(fed.public.view(0), "labels")


def test_large_public_data_are_transformed_in_chunks_without_losing_order(tmp_path: Path) -> None:
    make = "def make(n, input_shape):\n return (np.arange(n * 64) // 64 % 256).astype(np.uint8).reshape(n, *input_shape)"
    public = load(tmp_path, public=own(tmp_path, make), public_size=2500, augment=PLAIN).public
    assert public is not None
    level = (public.view(0).data[:, 0, 0, 0] * 0.5 + 0.5) * 255
    assert level.round().tolist() == (np.arange(2500) % 256).tolist()


@pytest.mark.parametrize("values", [{"public": "none"}, {"split": (8, 0, 2)}])
def test_there_may_be_no_public_part(tmp_path: Path, values: dict[str, Any]) -> None:
    fed = load(tmp_path, **values)
    assert fed.public is None
    assert len(fed.split_arrays()["public"]) == 0


def test_a_generator_gets_what_it_names(tmp_path: Path) -> None:
    make = (
        "def make(n, seed, input_shape, level=0):\n"
        " assert isinstance(seed, int) and input_shape == (1, 8, 8)\n"
        " return np.full((n, 8, 8), level, np.uint8)"
    )
    public = load(tmp_path, public=own(tmp_path, make), options={"level": 255}, augment=PLAIN).public
    assert public is not None
    assert public.labels is None
    assert len(public) == 180
    assert (public.view(0).data == 1).all()


def test_a_generator_may_return_labels(tmp_path: Path) -> None:
    make = "def make(n):\n return np.zeros((n, 8, 8), np.uint8), np.arange(n) % 10"
    public = load(tmp_path, public=own(tmp_path, make), public_size=30).public
    assert public is not None
    assert public.labels is not None
    assert torch.equal(public.labels, torch.as_tensor(public.rows) % 10)
    make = "def make(n):\n return np.zeros((n, 8, 8), np.uint8), np.arange(n - 1)"
    with pytest.raises(DataError, match="180 inputs but 179 labels"):
        load(tmp_path, public=own(tmp_path, make, "short"))


def test_an_option_nobody_takes_is_an_error(tmp_path: Path) -> None:
    make = "def make(n):\n return np.zeros((n, 8, 8), np.uint8)"
    with pytest.raises(ConfigError, match="level"):
        load(tmp_path, public=own(tmp_path, make), options={"level": 1})
    with pytest.raises(ConfigError, match="digits takes none"):
        load(tmp_path, options={"level": 1})


def test_public_images_from_a_folder_are_fitted(tmp_path: Path) -> None:
    (tmp_path / "pics" / "deep").mkdir(parents=True)
    Image.new("RGB", (40, 20), (255, 0, 0)).save(tmp_path / "pics" / "a.png")
    Image.new("L", (8, 8), 100).save(tmp_path / "pics" / "deep" / "b.png")
    (tmp_path / "pics" / "notes.txt").write_text("no image")
    public = load(tmp_path, public=f"folder:{tmp_path / 'pics'}", augment=PLAIN).public
    assert public is not None
    found = (public.view(0).data * 0.5 + 0.5) * 255
    assert found.shape == (2, 1, 8, 8)
    assert found[0].unique().round().tolist() == [76]  # red's luma
    assert found[1].unique().round().tolist() == [100]


def test_public_images_of_another_size_are_resized(tmp_path: Path) -> None:
    make = "def make():\n return np.tile(np.array([0, 0, 200, 200], np.uint8), (3, 4, 1))[..., None].repeat(3, axis=3)"
    public = load(tmp_path, public=own(tmp_path, make), augment=PLAIN).public
    assert public is not None
    row = ((public.view(0).data[0, 0, 3] * 0.5 + 0.5) * 255).round().tolist()
    assert row == [0, 0, 0, 50, 150, 200, 200, 200]


@pytest.mark.parametrize(
    ("public", "message"),
    [
        ("folder:/no/such/folder", "does not exist"),
        ("cifar11", "did you mean 'cifar10'"),
        ("own:def make():\n return np.zeros((4, 7), np.uint8)", r"have shape \(7,\), but the models take \(1, 8, 8\)"),
        ("own:def make():\n return np.zeros((4, 5, 8, 8), np.uint8)", "the models take"),
        ("own:def make():\n return np.zeros((4, 3), int)", "make them the same type"),
        ("own:def make():\n raise OSError('no gpu')", "failed: OSError: no gpu"),
        ("own:def make():\n return np.zeros((0, 8, 8), np.uint8)", "no inputs"),
    ],
)
def test_public_inputs_that_do_not_fit_are_explained(tmp_path: Path, public: str, message: str) -> None:
    if public.startswith("own:"):
        public = own(tmp_path, public.removeprefix("own:"))
    with pytest.raises((ConfigError, DataError), match=message):
        load(tmp_path, public=public)


# ---- users' own data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "shape"),
    [
        ("np.zeros((60, 5, 6, 3), np.uint8)", (3, 5, 6)),
        ("np.zeros((60, 3, 5, 6), np.uint8)", (3, 5, 6)),
        ("torch.zeros((60, 5, 6), dtype=torch.uint8)", (1, 5, 6)),
        ("np.zeros((60, 7))", (7,)),
        ("np.broadcast_to(np.float32(1), (60, 2, 3, 3))", (2, 3, 3)),
        ("np.zeros((60, 12), int)", (12,)),
    ],
)
def test_own_inputs_are_taken_in_the_usual_layouts(tmp_path: Path, inputs: str, shape: tuple[int, ...]) -> None:
    name = own(tmp_path, f"def make(classes):\n return {inputs}, np.arange(60) % classes")
    fed = load(tmp_path, name=name, clients=4, options={"classes": 3})
    assert fed.input_shape == shape
    assert fed.num_classes == 3
    batch = fed.client(0).inputs(torch.tensor([0]))
    assert batch.shape == (1, *shape)
    assert fed.public is not None
    assert fed.public.view(0).data.dtype == batch.dtype


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("np.zeros((9, 2)), np.zeros(8, int)", "9 inputs but 8 labels"),
        ("np.zeros((9, 2)), np.zeros(9, int), np.zeros(8, int)", "9 inputs but 8 users"),
        ("np.zeros((9, 2)), np.zeros(9)", "return integers"),
        ("np.zeros((9, 2)), np.full(9, -1)", "label of .* is -1"),
        ("np.zeros((9, 2)), np.zeros((9, 1), int)", "one number for each"),
        ("np.zeros((0, 2)), np.zeros(0, int)", "no inputs"),
        ("np.full((9, 2), np.nan), np.zeros(9, int)", "NaN"),
        ("np.array(['a'] * 9), np.zeros(9, int)", "not all numbers"),
        ("np.zeros((9, 3, 4, 4), int), np.zeros(9, int)", "uint8 from 0 to 255"),
        ("'nothing'", "returned an object of type str: it must be a tuple"),
        ("Dataset('x', torch.zeros(9, 2), torch.arange(9), 5)", "num_classes = 5"),
        ("np.zeros((1, 2)), np.zeros(1, int)", "too few to split"),
    ],
)
def test_own_data_with_a_fault_are_explained(tmp_path: Path, returned: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(tmp_path, name=own(tmp_path, f"def make():\n return {returned}"), clients=2)


def test_one_client_per_user(tmp_path: Path) -> None:
    body = "def make():\n u = np.repeat(['ann', 'bob', 'cy'], [60, 30, 10])\n return np.zeros((100, 2)), np.arange(100) % 2, u"
    name = own(tmp_path, body)
    fed = load(tmp_path, name=name, partition="natural", clients=2)
    assert fed.dataset.users is not None
    held = [set(fed.dataset.users[fed.client(k).rows]) for k in range(2)]
    assert [len(users) for users in held] == [1, 1]
    assert held[0] | held[1] | set(fed.dataset.users[fed.test.rows]) == {0, 1, 2}  # the third is tested on
    with pytest.raises(ConfigError, match="has 2 users"):
        load(tmp_path, name=name, partition="natural", clients=4)
    with pytest.raises(ConfigError, match="needs users"):
        load(tmp_path, partition="natural")


# ---- parquet folders ------------------------------------------------------------------------------------------------


def test_parquet_is_decoded_once_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path)
    first = data.load_dataset("cifar10", str(tmp_path), tmp_path / "cache")
    assert np.array_equal(first.inputs.numpy(), np.concatenate([pixels(40, 40), pixels(10, 10)]))
    assert first.labels.tolist() == [*(np.arange(40) % 10), *range(10)]
    assert first.official_test is not None
    assert first.official_test.sum() == 10
    monkeypatch.setattr(decode, "decode", lambda *a: pytest.fail("decoded a second time"))
    monkeypatch.setenv("FEDET_DATA", str(tmp_path))
    again = data.load_dataset("cifar10", None, tmp_path / "cache")
    assert torch.equal(again.inputs, first.inputs)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [next((tmp_path / "cache").glob("cifar10-*")).name]


@pytest.mark.parametrize("folder", ["fashion-mnist", "fashion_mnist"])
def test_fashion_mnist_is_gray_and_its_folder_has_either_name(tmp_path: Path, folder: str) -> None:
    written = write_images(tmp_path, name="fashion-mnist")
    assert pq.read_schema(written / "train.parquet").names == ["image", "label"]
    written.rename(tmp_path / folder)
    (tmp_path / "fashion-mnist").mkdir(exist_ok=True)  # an empty folder does not hide the other
    found = data.load_dataset("fashion-mnist", str(tmp_path), tmp_path / "cache")
    assert found.inputs.shape == (50, 1, 28, 28)
    assert found.inputs.dtype == torch.uint8
    assert np.array_equal(found.inputs.numpy(), np.concatenate([pixels(n, n, "fashion-mnist") for n in (40, 10)]))
    assert found.labels.tolist() == [*(np.arange(40) % 10), *range(10)]
    assert found.num_classes == 10


def test_colour_images_of_a_gray_data_set_become_gray(tmp_path: Path) -> None:
    folder = write_images(tmp_path, name="fashion-mnist")
    table = pq.read_table(folder / "train.parquet").to_pydict()
    table["image"][1]["bytes"] = parquet.png(np.repeat(pixels(40, 40, "fashion-mnist")[1], 3, axis=0))
    pq.write_table(pa.table(table), folder / "train.parquet")
    images, _ = decode.read(folder / "train.parquet", vision.LAYOUTS["fashion-mnist"])
    assert np.array_equal(images, pixels(40, 40, "fashion-mnist"))


def test_a_file_with_other_columns_is_named(tmp_path: Path) -> None:
    write_images(tmp_path).rename(tmp_path / "fashion-mnist")
    with pytest.raises(DataError, match=r"train\.parquet is not a parquet file with columns image and label"):
        data.load_dataset("fashion-mnist", str(tmp_path), tmp_path / "cache")


@pytest.mark.parametrize("augment", [PLAIN, AugmentConfig(color=0, gray=0), AugmentConfig()])
def test_gray_images_have_public_views(tmp_path: Path, augment: AugmentConfig) -> None:
    write_images(tmp_path, train=90, name="fashion-mnist")
    fed = load(tmp_path, name="fashion-mnist", dir=str(tmp_path), clients=3, partition="iid", augment=augment)
    assert fed.public is not None
    view = fed.public.view(0).data
    assert view.shape == (10, 1, 28, 28)
    assert view.min() >= -1
    assert view.max() <= 1
    plain = (fed.dataset.inputs[fed.public.rows].float() / 255 - 0.5) / 0.5
    assert torch.equal(view, plain) == (augment == PLAIN)


def test_changed_files_are_decoded_again(tmp_path: Path) -> None:
    write_images(tmp_path)
    data.load_dataset("cifar10", str(tmp_path), tmp_path / "cache")
    write_images(tmp_path, train=50)
    assert len(data.load_dataset("cifar10", str(tmp_path), tmp_path / "cache")) == 60


def _decode(root: str, queue: Any) -> None:
    queue.put(int(data.load_dataset("cifar10", root, Path(root) / "cache").inputs.sum()))


def test_two_processes_may_decode_at_once(tmp_path: Path) -> None:
    write_images(tmp_path, train=400)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=_decode, args=(str(tmp_path), queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    sums = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    expected = int(pixels(400, 400).sum()) + int(pixels(10, 10).sum())
    assert sums == [expected] * 2
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    """Four processes for forty images and more; those that were started."""
    started = []
    monkeypatch.setattr(decode, "HEAD", 10)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(decode, "spawn_module", lambda *a: started.append(runtime.spawn_module(*a)) or started[-1])
    yield started
    assert all(process.poll() is not None for process in started)


@pytest.mark.parametrize("name", SHAPES)
def test_several_processes_decode_each_their_part(tmp_path: Path, many: list[subprocess.Popen[str]], name: str) -> None:
    write_images(tmp_path, train=43, name=name)
    found = data.load_dataset(name, str(tmp_path), tmp_path / "cache")
    assert np.array_equal(found.inputs.numpy(), np.concatenate([pixels(43, 43, name), pixels(10, 10, name)]))
    assert [process.returncode for process in many] == [0, 0, 0]


def test_what_a_process_fails_at_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: list[subprocess.Popen[str]]
) -> None:
    write_images(tmp_path)
    spawn = decode.spawn_module
    monkeypatch.setattr(decode, "spawn_module", lambda module, *a: spawn(module, "nowhere", *a[1:]))
    found = data.load_dataset("cifar10", str(tmp_path), tmp_path / "cache")
    assert np.array_equal(found.inputs.numpy(), np.concatenate([pixels(40, 40), pixels(10, 10)]))
    assert [process.returncode for process in many] == [1, 1, 1]


@pytest.mark.parametrize(("side", "words"), [(31, r"image 6 is \(31, 31\), the first is \(32, 32\)"), (0, "image 6 can't be")])
def test_a_bad_image_in_another_processs_part_is_named(
    tmp_path: Path, many: list[subprocess.Popen[str]], side: int, words: str
) -> None:
    folder = write_images(tmp_path)
    table = pq.read_table(folder / "test.parquet").to_pydict()
    table["img"][6]["bytes"] = parquet.png(np.zeros((3, side, side), np.uint8)) if side else b"junk"
    pq.write_table(pa.table(table), folder / "test.parquet")
    with pytest.raises(DataError, match=rf"test\.parquet: {words}"):
        data.load_dataset("cifar10", str(tmp_path), tmp_path / "cache")
    assert many
    assert not list((tmp_path / "cache").iterdir())


def test_images_of_several_formats_in_one_file(tmp_path: Path) -> None:
    folder = write_images(tmp_path)
    table = pq.read_table(folder / "train.parquet").to_pydict()
    for row in (1, 2, 5):
        buffer = io.BytesIO()
        Image.fromarray(pixels(40, 40)[row].transpose(1, 2, 0)).save(buffer, "BMP")
        table["img"][row]["bytes"] = buffer.getvalue()
    pq.write_table(pa.table(table), folder / "train.parquet")
    assert np.array_equal(decode.read(folder / "train.parquet", vision.LAYOUTS["cifar10"])[0], pixels(40, 40))


def test_missing_data_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=re.escape(f"fedet data fetch cifar100 --dir {tmp_path}")):
        data.load_dataset("cifar100", str(tmp_path), tmp_path)
    monkeypatch.delenv("FEDET_DATA", raising=False)
    with pytest.raises(DataError, match="FEDET_DATA or --data-dir"):
        data.load_dataset("cifar10", None, tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = write_images(tmp_path)
    good = (folder / "train.parquet").read_bytes()
    (folder / "train.parquet").write_bytes(good[: len(good) // 2])
    with pytest.raises(DataError, match=r"train\.parquet"):
        data.load_dataset("cifar10", str(tmp_path), tmp_path / "cache")
    rows = [{"bytes": b"not an image", "path": "x"}]
    pq.write_table(pa.table({"img": rows, "label": [0]}), folder / "train.parquet")
    with pytest.raises(DataError, match=r"train\.parquet: image 0"):
        data.load_dataset("cifar10", str(tmp_path), tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_a_missing_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=re.escape("parquet files need pyarrow: pip install 'fedet[data]'")):
        decode.columns(Path("x"), vision.LAYOUTS["cifar10"])


# ---- real data ------------------------------------------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize(("pool", "totals"), [(True, [42000, 6000, 12000]), (False, [35000, 5000, 10000])])
def test_cifar10_is_split_exactly(tmp_path_factory: pytest.TempPathFactory, pool: bool, totals: list[int]) -> None:
    cache = tmp_path_factory.getbasetemp() / "real"
    fed = data.load(DataConfig(name="cifar10", clients=100, alpha=0.1, pool_official_test=pool), 0, cache)
    arrays = fed.split_arrays()
    assert [len(arrays[key]) for key in ("client_rows", "public", "test")] == totals
    assert (arrays["label_counts"].sum(axis=0) == totals[0] // 10).all()
    assert (np.bincount(fed.test.labels) == totals[2] // 10).all()
    assert (fed.sizes > 0).all()
    train = fed.dataset.inputs.numpy()[~fed.dataset.official_test]
    assert (train.mean(axis=(0, 2, 3)) / 255) == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)


@needs_data
def test_cifar100_can_be_the_public_data_of_cifar10(tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.getbasetemp() / "real"
    fed = data.load(DataConfig(name="cifar10", public="cifar100", public_size=500), 0, cache)
    assert fed.public is not None
    assert fed.public.labels is None
    assert fed.public.view(0).data.shape == (500, 3, 32, 32)
    hundred = data.load_dataset("cifar100", None, cache)
    assert (np.bincount(hundred.labels) == 600).all()


@needs_data
def test_fashion_mnist_is_split_exactly(tmp_path: Path) -> None:
    fed = load(tmp_path, name="fashion-mnist", clients=100, alpha=0.1)
    arrays = fed.split_arrays()
    assert [len(arrays[key]) for key in ("client_rows", "public", "test")] == [49000, 7000, 14000]
    assert (arrays["label_counts"].sum(axis=0) == 4900).all()
    train = fed.dataset.inputs.numpy()[~fed.dataset.official_test]
    assert fed.dataset.labels[:5].tolist() == [9, 0, 0, 3, 0]
    assert (train.mean() / 255, train.std() / 255) == pytest.approx((0.2860, 0.3530), abs=1e-4)


def test_partition_parts_are_public_names() -> None:
    assert set(data.__all__) == {
        "Dataset",
        "Examples",
        "FederatedData",
        "Inputs",
        "Mix",
        "MixedViews",
        "Public",
        "load",
        "load_dataset",
        "load_public",
    }
    assert partition.Parts._fields == ("rows", "offsets")
