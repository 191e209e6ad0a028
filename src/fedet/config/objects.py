"""Objects that a program passes where a configuration takes a name: data, models, methods.

A configuration stays plain text. An object that another process can import becomes its `module:name` or `file.py:name`. Any
other becomes `object/FINGERPRINT:name`: the fingerprint is of the data, or of the code of a function or class, so that a run
is never resumed with something else. This process finds the object itself within `scope()`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fedet.config.sources import Plain
from fedet.errors import ConfigError
from fedet.errors.tracebacks import in_library

PREFIX = "object/"
ARRAYS = "arrays"
"""The name of data that is given as such and not as a function."""

Objects = dict[str, Any]
_objects: ContextVar[Objects | None] = ContextVar("_objects", default=None)


@contextlib.contextmanager
def scope(known: Mapping[str, Any] | None = None) -> Iterator[Objects]:
    """Within the block, objects are found by their references: these, those of an enclosing block, and those named in it."""
    found = {**(_objects.get() or {}), **(known or {})}
    token = _objects.set(found)
    try:
        yield found
    finally:
        _objects.reset(token)


def given(reference: str) -> Any:
    """The object of this reference, or None if the program did not pass it."""
    return (_objects.get() or {}).get(reference)


def code() -> Objects:
    """The functions and classes that were passed, without the data, which may be large."""
    return {reference: found for reference, found in (_objects.get() or {}).items() if not is_data(reference)}


def is_data(reference: str) -> bool:
    """Whether this names data that was given as arrays."""
    return reference.startswith(PREFIX) and reference.endswith(f":{ARRAYS}")


def shown(reference: str) -> str:
    """A reference without the folder or the fingerprint in front of it."""
    return reference.rpartition(":")[2] if reference.startswith(PREFIX) else reference.rpartition("/")[2]


def named(tree: Mapping[str, Any]) -> Plain:
    """The same tables with a reference in place of every object."""
    out = dict(tree)
    if "data" in out:
        data = dict(out["data"]) if isinstance(out["data"], Mapping) else {"name": out["data"]}
        out["data"] = data | {key: _data(data[key]) for key in ("name", "public") if key in data}
    if isinstance(models := out.get("models"), Mapping):
        out["models"] = dict(models)
        if isinstance(clients := models.get("clients"), list | tuple):
            out["models"]["clients"] = [_model(client) for client in clients]
        elif callable(clients):
            name = _short_name(clients)
            raise ConfigError(f"models.clients = {name}: it is a list; write it as [{name}]")
        if "server" in models:
            out["models"]["server"] = _model(models["server"])
    if "method" in out:
        out["method"] = _method(out["method"])
    return out


def reference_of(found: Any) -> str:
    """The name by which another process can import an object, or else one with its fingerprint, for this process alone."""
    reference = _importable(found) or f"{PREFIX}{_fingerprint(found)}:{_short_name(found)}"
    return _known(reference, found)


def _known(reference: str, found: Any) -> str:
    known = _objects.get()
    if known is None:
        raise ConfigError(f"'{reference}' is an object, and only a name can be used here: write module:name or file.py:name")
    known[reference] = found
    return reference


def _data(value: Any) -> Any:
    if value is None or isinstance(value, str | Path | bool | int | float):
        return value
    if callable(value):
        return reference_of(value)
    made = _as_arrays(value)
    return _known(f"{PREFIX}{_content(made)}:{ARRAYS}", lambda: made)


def _as_arrays(value: Any) -> Any:
    """Arrays and fedet's data sets as they are; a data set of torch as arrays of its items."""
    if isinstance(value, tuple | list) or hasattr(value, "inputs") or hasattr(value, "dtype"):
        return tuple(value) if isinstance(value, list) else value
    if not (hasattr(value, "__getitem__") and hasattr(value, "__len__")):
        raise ConfigError(
            f"an object of type {type(value).__name__} is no data: give inputs and labels, a Dataset, or a function that "
            "returns them"
        )
    import numpy as np

    items = [value[index] for index in range(len(value))]
    return np.stack([np.asarray(x) for x, _ in items]), np.array([int(y) for _, y in items])


def _content(made: Any) -> str:
    """A fingerprint of data."""
    import numpy as np

    digest = hashlib.blake2b(digest_size=6)
    for part in _parts(made):
        array = np.ascontiguousarray(part)
        digest.update(f"{array.dtype.str} {array.shape} ".encode())
        digest.update(array.data if array.dtype.kind in "biuf" else repr(array.tolist()).encode())
    return digest.hexdigest()


def _parts(made: Any) -> list[Any]:
    if hasattr(made, "inputs"):
        return [
            part for part in (made.inputs, made.labels, made.users, made.official_test, made.num_classes) if part is not None
        ]
    return list(made) if isinstance(made, tuple) else [made]


def _model(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {**value, "name": _model(value["name"])} if "name" in value else value
    return reference_of(value) if callable(value) else value


def _method(value: Any) -> Any:
    """A method's table: an instance brings the values of all its fields."""
    table = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = table.get("name")
    if name is None or isinstance(name, str):
        return table if isinstance(value, Mapping) else value
    cls: Any = name if isinstance(name, type) else type(name)
    if not hasattr(cls, "traits"):  # not imported here: what a method is, is known above
        raise ConfigError(
            f"method = {name!r} is not a method: give a name, or a subclass of fedet.Method or an instance of one"
        )
    fields = dataclasses.asdict(name) if dataclasses.is_dataclass(name) and not isinstance(name, type) else {}
    ours = cls.__module__.startswith("fedet.methods.")
    return {**fields, **table, "name": cls.name if ours else reference_of(cls)}


def _importable(found: Any) -> str | None:
    """The reference by which a new process would import exactly this object, or None."""
    name = getattr(found, "__qualname__", "")
    module = sys.modules.get(getattr(found, "__module__", None) or "")
    if not name.isidentifier() or module is None or module.__name__ == "__main__" or getattr(module, name, None) is not found:
        return None
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if spec is None:
        return None
    if file and not module.__package__ and not in_library(file):
        return f"{Path(file).resolve()}:{name}"  # a file of its own is found from any folder, a module only from its own
    return f"{module.__name__}:{name}"


def _short_name(found: Any) -> str:
    inner = getattr(found, "func", found)  # of a functools.partial
    name = getattr(inner, "__name__", type(inner).__name__)
    return name.strip("<>") if name.strip("<>").isidentifier() else type(inner).__name__


def _fingerprint(found: Any) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for part in _described(found, 0):
        digest.update(part.encode())
    return digest.hexdigest()


def _described(value: Any, depth: int) -> Iterator[str]:
    """What a function, class or plain value is, as text that does not depend on the process or on where it was defined."""
    if depth > 8:
        return
    inner: list[Any] = []
    if isinstance(value, types.CodeType):
        yield f"code {value.co_code.hex()} {value.co_names} {value.co_varnames}"
        inner = list(value.co_consts)
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        inner = [value.__code__, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *cells]
    elif isinstance(value, type):
        yield f"class {value.__qualname__} {[base.__qualname__ for base in value.__bases__]}"
        inner = [item for key, item in sorted(vars(value).items()) if key not in ("__firstlineno__", "__module__", "__doc__")]
    elif isinstance(value, staticmethod | classmethod):
        inner = [value.__func__]
    elif isinstance(value, property):
        inner = [value.fget]
    elif isinstance(value, tuple | list):
        inner = list(value)
    elif isinstance(value, frozenset | set):
        inner = sorted(map(repr, value))
    elif isinstance(value, bool | int | float | complex | str | bytes | None):
        yield repr(value)
    elif hasattr(value, "func") and hasattr(value, "keywords"):
        inner = [value.func, *value.args, *(item for pair in sorted(value.keywords.items()) for item in pair)]
    elif inspect.ismethod(value):
        inner = [value.__func__]
    else:
        yield type(value).__qualname__
    for item in inner:
        yield from _described(item, depth + 1)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
