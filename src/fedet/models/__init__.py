"""Models: a body of any architecture, and a head of the same shape in all of them."""

from fedet.models.cache import ModelCache
from fedet.models.factory import FAMILIES, build, count_macs, describe
from fedet.models.model import Head, Model, Net, channels_last
from fedet.models.split import SPLIT, Split

__all__ = [
    "FAMILIES",
    "SPLIT",
    "Head",
    "Model",
    "ModelCache",
    "Net",
    "Split",
    "build",
    "channels_last",
    "count_macs",
    "describe",
]
