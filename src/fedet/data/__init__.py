"""A federation's data: the clients' examples, the server's public inputs, and the test set, all determined by the seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedet.runtime import lazy_exports

if TYPE_CHECKING:
    from fedet.data.federated import FederatedData, load, load_public
    from fedet.data.mix import Mix, MixedViews
    from fedet.data.public import Inputs, Public
    from fedet.data.source import Dataset, Examples, load_dataset

__all__ = [
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
]

__getattr__ = lazy_exports(  # `fedet.data.decode` runs in processes that need no torch
    __name__,
    {
        "Dataset": "source",
        "Examples": "source",
        "FederatedData": "federated",
        "Inputs": "public",
        "Mix": "mix",
        "MixedViews": "mix",
        "Public": "public",
        "load": "federated",
        "load_dataset": "source",
        "load_public": "federated",
    },
)
