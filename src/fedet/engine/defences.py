"""The average, the consensus and the mean with which a round's method combines replies, as `run.robust` names them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from fedet import maths
from fedet.config.schema import RobustConfig
from fedet.trust import averages as robust


def combining(settings: RobustConfig | None) -> dict[str, Any]:
    """The average, the consensus and the mean of a `Round`; empty without defences, so that no bit changes."""
    if settings is None:
        return {}
    share = settings.hostile
    averages: dict[str, Any] = {
        "mean": maths.average,
        "median": robust.median,
        "trimmed": partial(robust.trimmed, share=share),
        "krum": partial(robust.krum, share=share),
        "multi-krum": partial(robust.krum, share=share, keep=None),
        "geometric": robust.geometric_median,
    }
    means: dict[str, Any] = {
        "median": robust.median_of,
        "trimmed": partial(robust.trimmed_of, share=share),
        "agreement": robust.agreement_weighted,
    }
    mean = means.get(settings.consensus, maths.mean_over_clients)
    return {"average": averages[settings.average], "consensus": partial(_consensus, settings, mean), "mean": mean}


def _consensus(
    settings: RobustConfig, mean: Any, probs: Tensor, trust: Tensor | None = None, cap: float = 0.0
) -> maths.Consensus:
    """The configured consensus; trust and cap of the method itself still count."""
    kind = settings.consensus
    if kind in ("median", "trimmed"):
        return robust.combined_consensus(probs, mean(probs))
    limit = min((c for c in (cap, settings.cap) if c), default=0.0)
    if kind == "agreement" and trust is None:
        trust = maths.agreement(probs)
    if kind == "calibrated":
        probs = robust.calibrated(probs)
    return maths.consensus(probs, trust, limit, robust.entropy_confidence(probs) if kind == "entropy" else None)
