"""Load inputs and labels: the package's data sets, a user's function, and a user's generator of public inputs."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fedet.config import objects, plugins
from fedet.config.schema import PrivacyConfig
from fedet.data import vision
from fedet.data.augment import normalise
from fedet.errors import ConfigError, DataError

NAMES = ("digits", *vision.LAYOUTS)
TEXTS = ("sent140", "rt-critics")
TABLES = (".csv", ".tsv", ".parquet", ".xlsx", ".npy", ".npz")
"""Endings of files that a function of the user's has to read."""
_CHUNK = 2048


@dataclass(frozen=True)
class Dataset:
    """All examples of one source: uint8 images (n, c, h, w), or float or integer inputs that models take unchanged."""

    name: str
    inputs: Tensor
    labels: Tensor
    num_classes: int
    users: npt.NDArray[np.int64] | None = None
    """Each example's user, for one client per user."""
    official_test: npt.NDArray[np.bool_] | None = None
    """Which examples belong to the official test set."""
    vocab_size: int | None = None
    """Texts only: the number of token ids."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.inputs.shape[1:])

    def batch(self, rows: Tensor) -> Tensor:
        """These rows as model inputs: uint8 becomes float32, normalised with mean 0.5 and standard deviation 0.5."""
        return prepare(self.inputs.index_select(0, rows))


@dataclass(frozen=True)
class Examples:
    """Some rows of a data set with their labels: a client's, or the test set."""

    dataset: Dataset
    rows: Tensor
    privacy: PrivacyConfig | None = None
    """How training on these examples keeps them private; None if it need not."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Tensor:
        """The labels of all these examples."""
        return self.dataset.labels[self.rows]

    def inputs(self, index: Tensor) -> Tensor:
        """Model inputs at these positions among the examples."""
        return self.dataset.batch(self.rows[index])

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Model inputs and labels at these positions among the examples."""
        rows = self.rows[index]
        return self.dataset.batch(rows), self.dataset.labels[rows]


def prepare(x: Tensor) -> Tensor:
    """Make model inputs: uint8 is normalised, anything else unchanged."""
    return normalise(x.to(torch.float32) / 255) if x.dtype == torch.uint8 else x


def load_dataset(name: str, dir: str | None, cache: Path, options: Mapping[str, Any] | None = None) -> Dataset:
    """The data set of this name, or what the user's function `module:function` or `file.py:function` returns."""
    options = options or {}
    if ":" in name:
        return _from_function(name, options)
    if options:
        raise ConfigError(f"data.options ({', '.join(options)}) are for a function of your own: {name} takes none")
    if name == "digits":
        return _digits()
    if name not in NAMES:
        from fedet.config.sources import suggested

        if Path(name).suffix in TABLES:
            raise ConfigError(
                f"data.name = '{name}': a table is read by a function of yours that returns inputs and labels; write "
                f"file.py:function (docs/guide/tabular.md has one for CSV), or text:{name} if its rows are texts"
            )
        known = [*NAMES, *TEXTS]
        hint = suggested(name, known, "function")
        raise ConfigError(f"no data set is called '{name}'{hint}; known: {', '.join(known)}, text:PATH or module:function")
    images, labels, official = vision.load_parquet(name, dir, cache)
    return Dataset(name, torch.from_numpy(images), torch.from_numpy(labels), int(labels.max()) + 1, official_test=official)


def accepted(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values for which the function has parameters; all of them if it takes arbitrary keywords."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(values)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {key: value for key, value in values.items() if key in names}


def generate(reference: str, values: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Call a user's generator with those of the values that it accepts: its inputs, and labels if it returns any."""
    function = _function(reference, "generator of public inputs")
    made = _call(reference, function, accepted(function, values))
    if isinstance(made, Dataset):
        made = (made.inputs, made.labels)
    if not isinstance(made, tuple):
        return _inputs(made, reference), None
    inputs, labels = _inputs(made[0], reference), _labels(made[1], reference)
    if len(inputs) != len(labels):
        raise DataError(f"{_who(reference)}: {len(inputs)} inputs but {len(labels)} labels; one label is needed for each input")
    return inputs, labels


def convert(inputs: Tensor, shape: tuple[int, ...], dtype: torch.dtype, source: str) -> Tensor:
    """Convert public inputs to the data set's shape: images are resized (bilinear) and get its number of channels."""
    if inputs.dtype == torch.int64 and dtype == torch.int32:  # a user's function, beside texts that are stored as int32
        inputs = inputs.to(dtype)
    if inputs.dtype != dtype and not (dtype == torch.uint8 and inputs.is_floating_point()):
        raise DataError(
            f"the public inputs of {source} are {inputs.dtype}, those of the data set {dtype}: make them the same type"
        )
    if tuple(inputs.shape[1:]) == shape:
        return inputs
    if inputs.ndim != 4 or len(shape) != 3 or {inputs.shape[1], shape[0]} - {1, 3}:
        raise DataError(f"the public inputs of {source} have shape {tuple(inputs.shape[1:])}, but the models take {shape}")
    return torch.cat([_resized(chunk, shape) for chunk in torch.split(inputs, _CHUNK)])


def _resized(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    values = x.to(torch.float32)
    if values.shape[1] != shape[0]:
        luma = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
        values = (values * luma).sum(dim=1, keepdim=True) if shape[0] == 1 else values.expand(-1, 3, -1, -1)
    if tuple(values.shape[2:]) != shape[1:]:
        values = F.interpolate(values, size=shape[1:], mode="bilinear", antialias=True)
    return values.round().clamp(0, 255).to(torch.uint8) if x.dtype == torch.uint8 else values


def _digits() -> Dataset:
    images, labels = _digits_table()
    pixels = np.round(images.reshape(-1, 1, 8, 8) * 255 / 16).astype(np.uint8)
    return Dataset("digits", torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64)), 10)


def _digits_table() -> tuple[Any, Any]:
    """The pixels and labels in scikit-learn's file, without importing it where it has its usual place: that takes seconds."""
    found = importlib.util.find_spec("sklearn")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            table = np.loadtxt(path, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


def _from_function(reference: str, options: Mapping[str, Any]) -> Dataset:
    function = _function(reference, "data set")
    unknown = set(options) - set(accepted(function, options))
    if unknown:
        raise ConfigError(f"{reference} has no parameter for data.options.{sorted(unknown)[0]}")
    made = _call(reference, function, options)
    if isinstance(made, Dataset):
        made = (made.inputs, made.labels, made.users, made.official_test, made.num_classes)
    elif not isinstance(made, tuple) or len(made) not in (2, 3):
        given = "is" if objects.is_data(reference) else "returned"
        raise DataError(
            f"{_who(reference)} {given} {_what(made)}: it must be a tuple (inputs, labels) or (inputs, labels, users), or a "
            "fedet.data.Dataset"
        )
    inputs, labels = _inputs(made[0], reference), _labels(made[1], reference)
    users, official, classes = (*made[2:], None, None, None)[:3]
    users = None if users is None else np.unique(np.asarray(users), return_inverse=True)[1].reshape(-1).astype(np.int64)
    official = None if official is None else np.asarray(official, dtype=bool)
    for what, other in (("labels", labels), ("users", users), ("official_test", official)):
        if other is not None and len(other) != len(inputs):
            raise DataError(f"{_who(reference)}: {len(inputs)} inputs but {len(other)} {what}; one is needed for each input")
    most = int(labels.max()) + 1
    if classes is not None and classes < most:
        raise DataError(f"{_who(reference)}: num_classes = {classes} but a label {most - 1}: labels are 0 to num_classes - 1")
    return Dataset(reference, inputs, labels, classes or most, users, official)


def _function(reference: str, kind: str) -> Callable[..., Any]:
    found: Any = plugins.resolve(reference, kind)
    if not callable(found):
        raise ConfigError(f"{reference} is {_what(found)}: give a function that returns inputs and labels")
    return found  # type: ignore[no-any-return]


def _who(reference: str) -> str:
    """A data set in a message: by its name, or if it was given as arrays, by how."""
    return "the data that was passed" if objects.is_data(reference) else reference


def _what(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "nothing (None)" if value is None else f"an object of type {type(value).__name__}"


def _call(reference: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    try:
        return function(**options)
    except (DataError, ConfigError):
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"{reference} failed: {type(error).__name__}: {error}") from error


def _tensor(value: Any, what: str, instead: str) -> Tensor:
    """A user's array as a tensor; `instead` says what to do about one that does not hold numbers."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        array = np.asarray(value)
    except ValueError:  # nested lists of different lengths
        raise DataError(f"{what} are not all of the same shape: make them one array") from None
    if array.dtype.kind == "O" and (kinds := _kinds(value)) and not set(kinds) - set("biuf"):
        whole = "f" not in kinds and not value.isna().to_numpy().any()
        array = value.to_numpy("int64") if whole else value.to_numpy("float64", na_value=np.nan)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what} are not all numbers ({_contents(value, array)}): {instead}")
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _kinds(value: Any) -> str:
    """NumPy's kinds of the columns of a pandas table or series; mixed ones, and those with gaps, become an array of objects."""
    types: Any = getattr(value, "dtypes", None)
    return "".join(getattr(dtype, "kind", "O") for dtype in (types if hasattr(types, "items") else [types]))


def _contents(value: Any, array: npt.NDArray[Any]) -> str:
    """What is in an array that does not hold numbers: in a table, by column."""
    types: Any = getattr(value, "dtypes", None)
    if array.ndim == 2 and hasattr(types, "items"):
        return f"{_columns([name for name, dtype in types.items() if dtype.kind not in 'biuf'])} not"
    first = array.flat[0] if array.size else None
    return f"they are text, such as {str(first)!r}" if isinstance(first, str) else f"their type is {array.dtype}"


def _columns(names: Sequence[object]) -> str:
    shown = ", ".join(repr(str(name)) for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"the columns {shown} are" if len(names) > 1 else f"the column {shown} is"


def _inputs(value: Any, reference: str) -> Tensor:
    who = _who(reference)
    x = _tensor(value, f"the inputs of {who}", "drop what is no number, or turn it into numbers, as pandas.get_dummies does")
    if not x.ndim or not x.numel():
        raise DataError(f"there are no inputs in {who}: inputs are an array with one row for each example")
    if x.dtype == torch.uint8:
        if x.ndim == 3:
            x = x[:, None]
        elif x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            x = x.permute(0, 3, 1, 2)
        return x.contiguous()
    if x.is_floating_point():
        taken = x.to(torch.float32)
        if not torch.isfinite(taken).all():
            odd, advice = "NaN or infinite values", "fill them in or drop the rows"
            if torch.isfinite(x).all():
                odd, advice = "values beyond 3.4e38, the largest of float32", "scale them"
            raise DataError(f"the inputs of {who} contain {odd}{_where(value, taken)}: {advice}")
        return taken
    if x.ndim == 4:
        raise DataError(f"the images of {who} are {x.dtype}: return uint8 from 0 to 255, or floats as the model takes them")
    return x.to(torch.int64)


def _where(value: Any, x: Tensor) -> str:
    """In which columns of a table the values are that are not finite."""
    names = list(getattr(value, "columns", ()))
    if x.ndim != 2 or len(names) != x.shape[1]:
        return ""
    odd = [name for name, fine in zip(names, torch.isfinite(x).all(dim=0).tolist(), strict=True) if not fine]
    return f" ({_columns(odd)} affected)"


def _labels(value: Any, reference: str) -> Tensor:
    who = _who(reference)
    y = _tensor(
        value, f"the labels of {who}", "number the classes from 0, as numpy.unique(labels, return_inverse=True)[1] does"
    )
    if y.is_floating_point() or y.dtype == torch.bool:
        missing = y.is_floating_point() and not torch.isfinite(y).all()
        how = "some are missing, drop these rows" if missing else "return integers from 0, such as labels.astype('int64')"
        raise DataError(f"the labels of {who} are {str(y.dtype).removeprefix('torch.')}: {how}")
    if y.ndim != 1:
        raise DataError(f"the labels of {who} have shape {tuple(y.shape)}: return one number for each input")
    if len(y) and int(y.min()) < 0:
        raise DataError(f"a label of {who} is {int(y.min())}: labels start at 0")
    return y.to(torch.int64)
