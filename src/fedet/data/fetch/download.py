"""Get files: over HTTP with resume, with a package manager, and out of archives."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedet.errors import DataError

Progress = Callable[[int, int], None]
Get = Callable[[str, Path, str], None]
"""Downloads an address to a file that has this MD5."""


class Unreachable(DataError):
    """The source does not respond, or the program that reads it is missing: the reason, and what to do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}: {advice}")
        self.reason = reason


def download(
    url: str,
    target: Path,
    md5: str,
    progress: Progress | None = None,
    attempts: int = 5,
    pause: float = 1.0,
    patient: bool = True,
) -> None:
    """Download a file, resuming from `<target>.part` if there is one; it gets its name after its MD5 was checked.

    Without patience the first attempt that transfers nothing is the last one, for when there is another source.
    """
    if _matches(target, md5):
        return
    part = target.with_name(target.name + ".part")
    failure = _transfer_all(url, part, progress, attempts, pause, patient)
    if failure:
        raise Unreachable(f"{url} could not be read ({failure})", "run the command again, and the download resumes")
    if not _matches(part, md5):
        part.unlink(missing_ok=True)
        raise DataError(f"{url} has a wrong checksum and was deleted: run the command again")
    os.replace(part, target)


def run_downloader(command: Sequence[str], folder: Path, pattern: str, if_missing: str, if_failed: str) -> Path:
    """Run a package manager that downloads one file into a folder, and return that file; the last two say what to do."""
    name, said = command[0], " ".join(command)
    program = shutil.which(name)
    if program is None:
        raise Unreachable(f"`{name}` is not installed", if_missing)
    try:
        done = subprocess.run(
            [program, *command[1:]], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1800
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"`{said}` took over half an hour", "try again later") from None
    found = next(folder.glob(pattern), None)
    if done.returncode or found is None:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unreachable(f"`{said}` failed ({last})", if_failed)
    return found


def members(path: Path, suffix: str | tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Base name and content of an archive's regular files; nothing is extracted to disk, so no name can escape the folder."""
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() and member.name.endswith(suffix) else None
                if file:
                    yield member.name.rpartition("/")[2], file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{path} is not a readable archive: delete it and run the command again ({error})") from None


def _transfer_all(
    url: str, part: Path, progress: Progress | None, attempts: int, pause: float, patient: bool
) -> Exception | None:
    """Try until the file is complete; returns the last error if it is not."""
    failure: Exception | None = None
    for attempt in range(attempts):
        time.sleep(pause if attempt else 0)
        before = _size(part)
        try:
            if _transfer(url, part, progress, 30 if patient else 10):
                return None
            failure = ConnectionError("the connection was lost")
        except urllib.error.HTTPError as error:
            error.close()
            failure = error
            if error.code < 500:
                break
        except (OSError, http.client.HTTPException) as error:
            failure = error
        if not patient and _size(part) <= before:
            break
    return failure


def _transfer(url: str, part: Path, progress: Progress | None, timeout: float) -> bool:
    """Append what is missing; returns whether the file is complete."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing after what we have: complete, or not this file
            error.close()
            return True
        raise
    with response:
        if response.status != 206:
            have = 0
        total = have + int(response.headers.get("Content-Length") or 0)
        with part.open("ab" if have else "wb") as out:
            while block := response.read(1 << 18):
                out.write(block)
                have += len(block)
                if progress:
                    progress(have, total)
    return have >= total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _matches(path: Path, md5: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == md5
