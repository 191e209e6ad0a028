"""Seeded mutations of files, and the limits under which whoever reads them must stay: time and memory."""

import contextlib
import copy
import signal
import struct
from pathlib import Path

import pytest
import tomli_w

from fedet.errors import FedetError

resource = pytest.importorskip("resource", reason="time and memory are limited on Unix only")
STATM = Path("/proc/self/statm")
NUMBERS = (0, -1, 1, 2, 1e-300, 1e308, -0.0, 10**9, 10**12, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400)
ODD_NUMBERS = (float("nan"), float("inf"), float("-inf"))
WORDS = (
    "", " ", ".", "..", "/", "~", "~nobody/x", "../../etc/passwd", "/dev/zero", "/proc/self/mem", "a\0b", "\ud7ff", "\u202e",
    "é" * 300, "x" * 5000, "os:system", "nowhere.py:f", ":", "a:", ":a", "hf:", "hf:/", "text:", "text:/", "folder:",
    "folder:/proc",
    "digits", "fedet", "auto", "all", "split", "natural", "{}", "%s%n", "$(id)", "\n", "null", "true", "1e5", "cpu",
    "cuda:99", "meta",
)  # fmt: skip
CONTAINERS = ([], {}, [[]], [{}], {"": 1}, {"name": {}}, [1, "a"], {"a": {"b": {"c": []}}}, ["cnn"] * 50, [1] * 200)
TOKENS = (
    b"[", b"]", b"{", b"}", b"=", b".", b",", b'"', b"'", b'"""', b"'''", b"\n", b"#", b"\\", b"\\u0000", b"\0", b"\xff",
    b"\xef\xbb\xbf",
    b"nan", b"inf", b"-", b"1e999", b"0x", b"1979-05-27", b"07:32:00", b"true", b"[[run]]\n", b"[run]\n", b"base = 'digits'\n",
    b"[" * 3000, b"{a=" * 3000, b"a." * 3000 + b"b=1\n", b"9" * 5000,
)  # fmt: skip


MAX_SENTENCE = 20_000
"""Characters of an error message."""


class Hang(BaseException):
    """A case took longer than it may; no handler of the package catches this."""


@contextlib.contextmanager
def limits(seconds=10.0, memory=1 << 30):
    """End a case that takes too much time, and let one that asks for too much memory fail where it asks.

    Time is that of the processor, because machines are busy; ten times as much may pass by the clock.
    """

    def late(*_):
        raise Hang(f"more than {seconds} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    clocks = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, 10 * seconds))
    handlers = {number: signal.signal(number, late) for _, number, _ in clocks}
    if STATM.exists():  # elsewhere nobody says how much is used already, so that only time is limited
        used = int(STATM.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, before[1]))
    for clock, _, most in clocks:
        signal.setitimer(clock, most)
    try:
        yield
    finally:
        for clock, number, _ in clocks:
            signal.setitimer(clock, 0)
            signal.signal(number, handlers[number])
        resource.setrlimit(resource.RLIMIT_AS, before)


def attempt(work, *arguments):
    """What became of a case: its value, or the error that the package raised; anything else is a failure of the package."""
    with limits():
        try:
            return work(*arguments)
        except FedetError as error:
            found = error
    assert 0 < len(str(found).strip()) < MAX_SENTENCE
    return found


def junk(rng):
    """Any value that a configuration file or a JSON file can hold."""
    return copy.deepcopy(rng.choice(rng.choice((NUMBERS, NUMBERS, ODD_NUMBERS, WORDS, WORDS, CONTAINERS, (True, False)))))


def places(value, path=()):
    """Every place in nested tables and lists."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def change_table(value, rng):
    """Replace, remove, rename, add or move one entry, in place."""
    found = list(places(value))
    if not found:  # earlier changes have removed everything
        value["zzz"] = junk(rng)
        return
    *way, last = rng.choice(found)
    parent = value
    for key in way:
        parent = parent[key]
    kind = rng.randrange(6)
    if kind == 0:
        del parent[last]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice(WORDS) or "x"] = parent.pop(last)
    elif kind == 2 and isinstance(parent, dict):
        parent[rng.choice(("base", "name", "run", "data", "methods", "options", "label", "zzz"))] = junk(rng)
    elif kind == 3:
        parent[last] = [parent[last]]
    else:
        parent[last] = junk(rng)


def nested(value, depth, rng):
    """A value many levels down."""
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def change_bytes(data, rng, tokens=TOKENS):
    """Flip, cut, double, remove or insert some bytes."""
    data, kind = bytearray(data), rng.randrange(6)
    at = rng.randrange(len(data) + 1)
    length = min(rng.choice((1, 2, 8, 64, 4096)), len(data))
    if kind == 0 and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        del data[at : at + length]
    elif kind == 3:
        data[at:at] = data[at : at + length]
    elif kind == 4:
        data[at:at] = rng.choice(tokens)
    else:
        data[at : at + length] = rng.randbytes(length)
    return bytes(data)


def toml(value):
    """A table as TOML, as far as it can be written."""
    try:
        return tomli_w.dumps(value).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):
        return b"x = ["


def safetensors_header(data):
    """The header of a safetensors file as text, and the rest."""
    size = struct.unpack("<Q", data[:8])[0]
    return data[8 : 8 + size], data[8 + size :]


def with_header(header, rest):
    """A safetensors file with this header."""
    return struct.pack("<Q", len(header)) + header + rest
