"""The methods' formulas as functions of tensors, independent of models, devices and configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

_PIECE_SIZE = 1 << 15


def average(models: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """Weighted mean of state dicts, uniform by default.

    Sums are computed in float64 in the given order and rounded once, so with clients in ascending id the result does not
    depend on the order in which they finished. Integer buffers are rounded to the nearest integer.
    """
    if not models:
        raise ValueError("average needs at least one model")
    factors = [1.0] * len(models) if weights is None else list(weights)
    if len(factors) != len(models) or min(factors) < 0 or sum(factors) <= 0:
        raise ValueError("average needs one non-negative weight per model, not all zero")
    total = math.fsum(factors)
    return {name: _mean([model[name] for model in models], factors, total) for name in models[0]}


def _mean(tensors: Sequence[Tensor], factors: Sequence[float], total: float) -> Tensor:
    """Average in pieces that fit the processor's cache, which is two to three times as fast."""
    first = tensors[0]
    if first.numel() <= _PIECE_SIZE:
        return _sum(tensors, factors, total)
    mean, rows = torch.empty_like(first), max(1, _PIECE_SIZE * len(first) // first.numel())
    for piece, *parts in zip(*(torch.split(tensor, rows) for tensor in (mean, *tensors)), strict=True):
        piece.copy_(_sum(parts, factors, total))
    return mean


def _sum(tensors: Sequence[Tensor], factors: Sequence[float], total: float) -> Tensor:
    acc = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, factor in zip(tensors, factors, strict=True):
        acc.add_(tensor, alpha=factor)
    acc /= total
    dtype = tensors[0].dtype
    return (acc if dtype.is_floating_point else acc.round_()).to(dtype)


@dataclass(frozen=True, slots=True)
class Consensus:
    """An ensemble's consensus on a batch; indexing selects samples."""

    alpha: Tensor
    """(clients, batch): each client's weight, its confidence relative to the others'."""
    probs: Tensor
    """(batch, classes): the weighted consensus, on the simplex."""
    label: Tensor
    """(batch): the consensus label."""
    diversity: Tensor
    """(batch, classes): the dissenters' probabilities, weighted with the same alpha; they sum to `mass`."""
    mass: Tensor
    """(batch): the dissenters' total weight, zero where all agree."""

    def __getitem__(self, index: Tensor) -> Consensus:
        """The consensus on these samples of the batch."""
        return Consensus(self.alpha[:, index], self.probs[index], self.label[index], self.diversity[index], self.mass[index])

    def to(self, device: torch.device) -> Consensus:
        """The consensus on another device."""
        return Consensus(*(getattr(self, name).to(device) for name in ("alpha", "probs", "label", "diversity", "mass")))


def confidence(probs: Tensor) -> Tensor:
    """Variance over the classes of each probability vector; exactly zero where it is uniform up to rounding."""
    variance = probs.var(dim=-1, unbiased=False)
    rounding = 4 * torch.finfo(probs.dtype).eps / probs.shape[-1]
    return variance.where(variance > rounding**2, variance.new_zeros(()))


def consensus(probs: Tensor, trust: Tensor | None = None, cap: float = 0.0, weight: Tensor | None = None) -> Consensus:
    """Weighted consensus and diversity of an ensemble's probabilities (clients, batch, classes).

    alpha_k(x) = Var(s_k(x)) / sum_l Var(s_l(x)); if every client is uniform, all weights are equal. Ties go to the lowest
    label. `trust` (clients) multiplies each client's variance, and no weight exceeds `cap` / clients (0: no limit). `weight`
    (clients, batch) replaces the variance by another measure of confidence.
    """
    if probs.dim() != 3 or 0 in probs.shape[::2]:
        raise ValueError(f"consensus takes probabilities of shape (clients, batch, classes), not {tuple(probs.shape)}")
    variance = confidence(probs) if weight is None else weight
    if trust is not None:
        variance = variance * trust.to(variance.dtype).unsqueeze(-1)
    total = variance.sum(dim=0)
    alpha = torch.where(total > 0, variance / total.where(total > 0, total.new_ones(())), 1 / probs.shape[0])
    if cap:
        alpha = capped(alpha, cap / probs.shape[0])
    return agreed(alpha, probs, (alpha.unsqueeze(-1) * probs).sum(dim=0))


def agreed(alpha: Tensor, probs: Tensor, combined: Tensor) -> Consensus:
    """The consensus whose probabilities are `combined` (batch, classes), with the dissenters from its label."""
    label = combined.argmax(dim=-1)
    dissents = probs.argmax(dim=-1) != label
    return Consensus(
        alpha=alpha,
        probs=combined,
        label=label,
        diversity=(alpha.unsqueeze(-1) * probs * dissents.unsqueeze(-1)).sum(dim=0),
        mass=(alpha * dissents).sum(dim=0),
    )


def agreement(probs: Tensor) -> Tensor:
    """How often each client (clients, batch, classes) predicts what most of the others predict; a single client gets 1."""
    choices = probs.argmax(dim=-1)
    if len(choices) == 1:
        return probs.new_ones(1)
    own = F.one_hot(choices, probs.shape[-1])
    others = own.sum(dim=0) - own
    return (choices == others.argmax(dim=-1)).to(probs.dtype).mean(dim=-1)


def capped(alpha: Tensor, limit: float) -> Tensor:
    """Weights (clients, ...) that sum to 1 over the clients, with none above the limit; the others grow in proportion.

    As weights by stated numbers of examples are truncated in Portnoy et al., "Towards Federated Learning with Byzantine-Robust
    Client Weighting", 2020. A limit below 1 / clients can't be kept: then all weights are equal. With the limit c / n, f of n
    clients have at most c f / n of the weight, however sure they are: they can't change a label that the others prefer to
    every other one by more than c f / (n - c f). Counter-example: they change one that the others prefer by less.
    """
    clients = len(alpha)
    if limit * clients <= 1:
        return torch.full_like(alpha, 1 / clients)
    full = alpha > limit
    for _ in range(clients):  # in each pass at least one more weight reaches the limit, or nothing changes
        free = alpha.where(~full, alpha.new_zeros(()))
        left, share = 1 - limit * full.sum(dim=0), free.sum(dim=0)
        spare = (~full).sum(dim=0).clamp(min=1)
        grown = torch.where(share > 0, free * (left / share.where(share > 0, share.new_ones(()))), left / spare)
        result = grown.where(~full, grown.new_full((), limit))
        over = full | (result > limit * (1 + 1e-6))
        if torch.equal(over, full):
            return result
        full = over
    return result


def sharpen(probs: Tensor, temperature: float) -> Tensor:
    """Probabilities (..., classes) to the power 1 / temperature, normalised: below 1 sharper, above 1 flatter."""
    return probs if temperature == 1 else torch.softmax(probs.log() / temperature, dim=-1)


def aligned(probs: Tensor, marginal: Tensor, strength: float = 1.0) -> Tensor:
    """Probabilities (batch, classes) reweighted so that their mean over the batch moves towards this marginal.

    Each class is multiplied by (marginal / mean)^strength, then each row is normalised (distribution alignment, ReMixMatch).
    """
    mean = probs.mean(dim=0)
    factors = (marginal.to(probs.dtype) / mean.clamp(min=torch.finfo(probs.dtype).tiny)).clamp(0.01, 100) ** strength
    weighted = probs * factors
    return weighted / weighted.sum(dim=-1, keepdim=True)


def moving_average(old: Mapping[str, Tensor], new: Mapping[str, Tensor], step: int, decay: float) -> dict[str, Tensor]:
    """An exponential moving average of state dicts after step 1, 2, ...: decay * old + (1 - decay) * new.

    The decay starts low, min(decay, step / (step + 3)), so that the first, poor models are soon forgotten.
    """
    kept = min(decay, step / (step + 3))
    return average([old, new], [kept, 1 - kept])


def ensemble_loss(
    logits: Tensor,
    consensus: Consensus,
    lam: float,
    diversity: Literal["raw", "normalised"] = "raw",
    target: Literal["hard", "soft"] = "hard",
) -> Tensor:
    """Fed-ET's loss of the server's logits (batch, classes), mean over the batch.

    Cross-entropy to the consensus (its label, or its probabilities with `target="soft"`) plus
    lam * KL(diversity || softmax(logits)). `raw` keeps the diversity's mass, so that each sample counts with the dissenters'
    weight; `normalised` scales it to one. A sample on which all agree adds exactly zero to the second term.
    """
    loss = F.cross_entropy(logits, consensus.label if target == "hard" else consensus.probs.to(logits.dtype))
    if lam == 0:
        return loss
    if diversity not in ("raw", "normalised"):
        raise ValueError(f"diversity must be 'raw' or 'normalised', not {diversity!r}")
    target_probs = consensus.diversity.to(logits.dtype)
    if diversity == "normalised":
        mass = consensus.mass.to(logits.dtype).unsqueeze(-1)
        target_probs = target_probs / mass.where(mass > 0, mass.new_ones(()))
    divergence = torch.xlogy(target_probs, target_probs) - target_probs * F.log_softmax(logits, dim=-1)
    return loss + lam * divergence.sum(dim=-1).mean()


@dataclass(frozen=True, slots=True)
class Bound:
    """The paper's generalisation bound, term by term; each is linear in the clients' weights."""

    empirical: float
    sample_size: float
    discrepancy: float
    joint: float

    @property
    def total(self) -> float:
        """The bound itself."""
        return self.empirical + self.sample_size + self.discrepancy + self.joint


def sample_size_term(alpha: Tensor, sizes: Tensor, delta: float, constant: Literal["theorem", "lemma"] = "theorem") -> float:
    """sqrt(log 1/delta) * sum alpha_i / sqrt(n_i) as the theorem prints it, or with its lemma's sqrt(log(2/delta) / 2).

    The printed constant covers the lemma's only for delta <= 1/2.
    """
    if not 0 < delta <= 0.5:
        raise ValueError("delta must be in (0, 0.5]: above 0.5 the theorem's constant is smaller than its lemma's")
    factor = math.log(1 / delta) if constant == "theorem" else math.log(2 / delta) / 2
    return math.sqrt(factor) * float((alpha.double() / sizes.double().sqrt()).sum())


def label_discrepancy(client: Tensor, target: Tensor) -> Tensor:
    """Total variation between label distributions (..., classes), a bound on half the discrepancy under pure label skew."""
    return (client.double() - target.double()).abs().sum(dim=-1) / 2


def generalisation_bound(
    alpha: Tensor, errors: Tensor, sizes: Tensor, discrepancies: Tensor, joint: Tensor, delta: float = 0.05
) -> Bound:
    """Theorem 1 for constant weights: training errors, sizes, half discrepancies and joint errors per client.

    It is the paper's bound, not a certificate: no union over the clients, and hypotheses are fitted on the same sample.
    """
    weights = alpha.double()
    return Bound(
        empirical=float((weights * errors.double()).sum()),
        sample_size=sample_size_term(alpha, sizes, delta),
        discrepancy=float((weights * discrepancies.double()).sum()),
        joint=float((weights * joint.double()).sum()),
    )


def proximal(params: Mapping[str, Tensor], reference: Mapping[str, Tensor], mu: float) -> Tensor:
    """FedProx's penalty, mu/2 * ||params - reference||^2; its gradient is mu * (params - reference)."""
    return mu / 2 * torch.stack([(w - reference[name]).square().sum() for name, w in params.items()]).sum()


def label_offset(counts: Tensor, strength: float) -> Tensor:
    """What logit adjustment adds to each class's logit in training: strength * log of its share of these counts (classes).

    A model trained with it need not learn how frequent the labels are, and a class that is missing is hardly pushed down
    (Menon et al., ICLR 2021; for clients Zhang et al., ICML 2022). Half an example more of each class keeps it finite.
    """
    smoothed = counts + 0.5
    return strength * torch.log(smoothed / smoothed.sum())


def mixup_loss(logits: Tensor, own: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """Cross-entropy of logits (batch, classes) for mixtures of two inputs: share * own label + (1 - share) * other label.

    Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018.
    """
    losses = [F.cross_entropy(logits, labels, reduction="none") for labels in (own, other)]
    return torch.lerp(losses[1], losses[0], share).mean()


def linear(params: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> Tensor:
    """The inner product <direction, params>: added to a loss, it adds `direction` to the gradient."""
    return torch.stack([(w * direction[name]).sum() for name, w in params.items()]).sum()


def contrastive(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """MOON's model-contrastive loss, mean over the batch: near to the global representation, far from the previous one.

    -log(e^(cos(z, z_global)/T) / (e^(cos(z, z_global)/T) + e^(cos(z, z_previous)/T))), written so that it can't overflow.
    """
    near, far = (F.cosine_similarity(z, other, dim=-1) for other in (z_global, z_previous))
    return F.softplus((far - near) / temperature).mean()


def matching_views(z: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss (NT-Xent) of representations (2n, width): row i and row i + n are two views of one input.

    Each row picks its other view among all other rows by cosine similarity; the mean cross-entropy of that choice.
    """
    n = len(z) // 2
    z = F.normalize(z, dim=-1)
    similarity = (z @ z.T / temperature).masked_fill(torch.eye(2 * n, dtype=torch.bool, device=z.device), -math.inf)
    return F.cross_entropy(similarity, torch.arange(2 * n, device=z.device).roll(n))


def mean_over_clients(values: Tensor) -> Tensor:
    """The mean of what clients say, (clients, batch, classes), over the clients."""
    return values.mean(dim=0)


def average_logits(logits: Tensor, mean: Callable[[Tensor], Tensor] = mean_over_clients) -> Tensor:
    """FedDF's target: the softmax of the mean of the clients' logits (clients, batch, classes)."""
    return torch.softmax(mean(logits), dim=-1)


def era(probs: Tensor, temperature: float, mean: Callable[[Tensor], Tensor] = mean_over_clients) -> Tensor:
    """DS-FL's entropy reduction aggregation of probabilities (clients, batch, classes): softmax(mean / temperature).

    The argument of the softmax is a probability vector, so with many classes it flattens uncertain predictions instead of
    sharpening them.
    """
    return torch.softmax(mean(probs) / temperature, dim=-1)


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    """KL(target || softmax(logits)), mean over the batch."""
    return (torch.xlogy(target, target) - target * F.log_softmax(logits, dim=-1)).sum(dim=-1).mean()


def distillation(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """T^2 * KL(softmax(teacher / T) || softmax(student / T)), mean over the batch."""
    target = torch.softmax(teacher_logits / temperature, dim=-1)
    return temperature**2 * divergence(student_logits / temperature, target)


def reliable_fusion(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """FedGEMS's selective fusion of the clients' logits (clients, batch, classes) for labelled samples.

    Clients that predict the label are reliable and weighted by a softmax of 1 / entropy; the others have weight zero. Returns
    the weights (clients, batch) and the fused logits (batch, classes); where no client is reliable both are zero.
    """
    log_probs = F.log_softmax(logits, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    reliable = logits.argmax(dim=-1) == labels
    certainty = (1 / entropy.clamp(min=1e-4)).masked_fill(~reliable, -math.inf)
    any_reliable = reliable.any(dim=0)
    weights = torch.softmax(certainty.where(any_reliable, certainty.new_zeros(())), dim=0) * any_reliable
    return weights, (weights.unsqueeze(-1) * logits).sum(dim=0)
