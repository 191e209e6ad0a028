"""Averages and consensuses that a minority of hostile clients can't decide, as functions of tensors.

Each docstring has the literature, and a proof sketch or a counter-example. `n` is the number of clients, of which `f` are
hostile. None of them is better than all others: the guide has measurements (docs/guide/robustness.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_low

import torch
from torch import Tensor

from fedet import maths

Models = Sequence[Mapping[str, Tensor]]


def norm(update: Mapping[str, Tensor]) -> float:
    """The Euclidean norm over all floating-point tensors, in float64; infinite only if it is no number of that type."""
    floats = [w for w in update.values() if w.is_floating_point() and w.numel()]
    squares = [float(w.double().square().sum()) for w in floats]
    if all(map(math.isfinite, squares)):
        return math.sqrt(math.fsum(squares))
    largest = max(float(w.double().abs().max()) for w in floats)  # the squares of 1e200 are no longer numbers
    if not math.isfinite(largest):
        return math.inf
    return largest * math.sqrt(math.fsum(float((w.double() / largest).square().sum()) for w in floats))


def difference(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The update from old to new weights, of the floating-point tensors, in float64."""
    return {name: w.double() - old[name].double() for name, w in new.items() if w.is_floating_point()}


def clipped(new: Mapping[str, Tensor], old: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """`new` with its update from `old` scaled by a factor of at most 1; with 1 it is `new` itself. Integers become `old`'s.

    Sun et al., "Can You Really Backdoor Federated Learning?", 2019; with the median of the norms as the limit, as in Nguyen et
    al., "FLAME", USENIX Security 2022. If all updates are clipped to the limit c, f of n clients move a mean by at most
    2 c f / n from where honest ones would have moved it, whatever they send. Counter-example: f clients that all move by c in
    the same direction are not noticed at all, round after round.
    """
    if factor >= 1:
        return dict(new)
    return {
        name: (old[name].double() + factor * (w.double() - old[name].double())).to(w.dtype)
        if w.is_floating_point()
        else old[name]
        for name, w in new.items()
    }


def mean_cosines(updates: Tensor, least: float = 0.0) -> Tensor:
    """The mean cosine between each client's update (clients, numbers) and those of the others; below the length `least`, less.

    As in Fung et al., "The Limitations of Federated Learning in Sybil Settings" (FoolsGold), RAID 2020, and Cao et al.,
    "FLTrust", NDSS 2021, with the other clients in place of trusted data. If two honest updates have the cosine c on average,
    and each of f among n clients sends an honest update reversed, an honest client has (n - 2 f - 1) c / (n - 1) on average,
    a reversed one (2 f - n - 1) c / (n - 1): with f < n / 2 the honest one has more, by 2 (n - 2 f) c / (n - 1).
    Counter-examples: clients whose labels have little in common have a c near 0; and with f > n / 2 it is the honest ones
    that stand out. A client without an update has 0.
    """
    units = updates / updates.norm(dim=1, keepdim=True).clamp(min=max(least, torch.finfo(updates.dtype).tiny))
    cosines = units @ units.T
    others: Tensor = cosines.sum(dim=1) - cosines.diagonal()
    return others / max(1, len(updates) - 1)


def correlations(probs: Tensor) -> Tensor:
    """How far each client's soft labels (clients, inputs, classes) vary with the inputs as those of the others do.

    Peer prediction: Dasgupta and Ghosh, "Crowdsourced Judgement Elicitation with Endogenous Proficiency", WWW 2013, and
    Shnayder et al., "Informed Truthfulness in Multi-Task Peer Prediction", EC 2016, score a report by its agreement with
    others on the same input less that on different inputs, which is the covariance; here it is divided by the lengths, or by
    the mean length if that is more. Proof: what is left of labels that do not depend on the input, once their mean over the
    inputs is subtracted, is zero, so such a client has exactly 0, however many send the same and whatever the others say,
    while agreement with the majority calls it the best client as soon as there are enough of them. Labels that depend on
    chance alone have 0 on average. An honest client need not know all classes: it only has to know its own when it sees them.
    Counter-examples: a client with a single class does not, and has 0, too; a majority that shifts every class by one
    correlates with itself.
    """
    varying = (probs.double() - probs.double().mean(dim=1, keepdim=True)).flatten(1)
    return mean_cosines(varying, float(varying.norm(dim=1).mean()))


def median(models: Models, weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """The coordinate-wise median of state dicts; with an even number, the mean of the middle two. Weights are not used.

    Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018. With f < n / 2, the
    middle values of each coordinate have honest ones on both sides or are honest, so each coordinate stays in the honest
    range. Counter-example: where clients differ, the median of (0, 0, 1) is 0: what only a few know is forgotten; and the
    coordinates of the result come from different clients, so that it may be unlike any of them.
    """
    return {name: _cast(_middle(stack), stack) for name, stack in _stacks(models)}


def trimmed(models: Models, weights: Sequence[float] | None = None, share: float = 0.2) -> dict[str, Tensor]:
    """The coordinate-wise mean without the `share` largest and smallest values, rounded up. Weights are not used.

    Yin et al., ICML 2018. If at most the trimmed number is hostile, each value that is left lies between two honest ones, so
    the mean does, too. With a share of 0 it is the uniform mean. Counter-example: as for the median, rare knowledge is lost.
    """
    if share == 0:
        return maths.average(models)
    return {name: _cast(_trimmed(stack.double(), share), stack) for name, stack in _stacks(models)}


def krum(models: Models, weights: Sequence[float] | None = None, share: float = 0.2, keep: int | None = 1) -> dict[str, Tensor]:
    """The model (or the mean of the `keep` models; None: all but the hostile share) nearest to its n - f - 2 neighbours.

    Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017. For n > 2 f + 2 a
    chosen model has an honest one among its neighbours, so it is as near to the honest ones as these are to each other.
    Counter-example: f + 1 colluders with f underestimated are each other's nearest neighbours and are chosen; and where each
    client knows other classes, one client's model is no average of all.
    """
    n = len(models)
    hostile = math.ceil(share * n)
    points = torch.stack([torch.cat([w.double().flatten() for w in model.values()]) for model in models])
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest = distances.sort(dim=1).values[:, 1 : 1 + max(1, n - hostile - 2)]
    order = nearest.sum(dim=1).argsort(stable=True).tolist()
    chosen = sorted(order[: max(1, n - hostile) if keep is None else keep])
    return maths.average([models[k] for k in chosen], None if weights is None else [weights[k] for k in chosen])


def geometric_median(models: Models, weights: Sequence[float] | None = None, steps: int = 32) -> dict[str, Tensor]:
    """The point with the least weighted sum of distances to the models, by Weiszfeld's algorithm from their median.

    Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP 2022. With less than half of the
    weight hostile, the result is at most 2 (n - f) / (n - 2 f) times the honest models' radius away from their mean (Minsker
    2015): an outlier pulls with its direction only, not with its distance. From the mean, which one model can move
    anywhere, the steps would not get that near; the coordinate-wise median is in the honest range already. Counter-example:
    two honest clusters of 3 and 2 models give the first cluster, not a compromise.
    """
    factors = [1.0] * len(models) if weights is None else list(weights)
    points = torch.stack([torch.cat([w.double().flatten() for w in model.values()]) for model in models])
    share = torch.tensor(factors, dtype=torch.float64) / math.fsum(factors)
    centre = _middle(points)
    floor = 1e-12 * float((points - centre).norm(dim=1).median()) + 1e-300  # outliers must not set the scale
    pull = share
    for _ in range(steps):
        pull = share / (points - centre).norm(dim=1).clamp(min=floor)
        moved = ((pull / pull.sum())[:, None] * points).sum(dim=0)
        if torch.equal(moved, centre):
            break
        centre = moved
    return maths.average(models, (pull / pull.sum()).tolist())


def median_of(values: Tensor) -> Tensor:
    """The median over the clients of what they say, (clients, batch, classes); as `median`, entry by entry."""
    return _middle(values)


def trimmed_of(values: Tensor, share: float) -> Tensor:
    """The trimmed mean over the clients of what they say, (clients, batch, classes); as `trimmed`, entry by entry."""
    return values.mean(dim=0) if share == 0 else _trimmed(values, share)


def agreement_weighted(values: Tensor) -> Tensor:
    """The mean of what clients say, (clients, batch, classes), weighted by how often each agrees with the others' majority.

    As annotators are weighted in Li and Yu, "Error Rate Bounds and Iterative Weighted Majority Voting for Crowdsourcing", 2014.
    `maths.agreement` leaves a client's own vote out of the majority, so a liar can't raise its weight by voting for itself.
    With honest clients that mostly agree, a client that contradicts everybody has a weight of almost zero. Counter-example:
    more than half of the clients collude, and it is the honest ones that count for nothing.
    """
    trust = maths.agreement(values)
    if not bool(trust.any()):
        return values.mean(dim=0)
    return ((trust / trust.sum())[:, None, None] * values).sum(dim=0)


def entropy_confidence(probs: Tensor) -> Tensor:
    """One minus the entropy over that of the uniform distribution, (clients, batch): 0 for a uniform client, 1 for one-hot.

    Instead of the paper's variance, as in FedGEMS and in Park et al., "Sageflow", NeurIPS 2021 (entropy of models on public
    data). For (1 - e, e, 0, ..., 0) the variance falls linearly in e, the entropy faster, so a hesitant client loses more.
    Counter-example: a one-hot liar has the largest confidence with either; only a cap or its agreement limits it.
    """
    entropy = -torch.xlogy(probs, probs).sum(dim=-1)
    return (1 - entropy / math.log(probs.shape[-1])).clamp(min=0)


def calibrated(probs: Tensor, steps: int = 30) -> Tensor:
    """Each client's probabilities at the temperature at which its mean largest one is its agreement with the others' majority.

    Temperature scaling (Guo et al., "On Calibration of Modern Neural Networks", ICML 2017) with the majority of the other
    clients in place of labels. The mean largest probability falls with the temperature, so bisection finds it. A one-hot liar
    that others contradict is flattened to 1 / classes and has no variance left. Counter-example: an honest client that alone
    knows a rare class is contradicted on it, and loses its confidence there and everywhere.
    """
    wanted = maths.agreement(probs).clamp(min=1 / probs.shape[-1], max=1.0)
    logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
    low, high = (torch.full_like(wanted, value) for value in (math.log(0.05), math.log(1000.0)))
    for _ in range(steps):
        middle = (low + high) / 2
        found = torch.softmax(logs / middle.exp()[:, None, None], dim=-1).amax(dim=-1).mean(dim=-1)
        too_sure = found > wanted
        low, high = torch.where(too_sure, middle, low), torch.where(too_sure, high, middle)
    return torch.softmax(logs / ((low + high) / 2).exp()[:, None, None], dim=-1)


def combined_consensus(probs: Tensor, combined: Tensor) -> maths.Consensus:
    """A consensus whose probabilities (batch, classes) are given, as the median or the trimmed mean of the clients' ones.

    The probabilities are scaled to sum to 1; clients have equal weights. Yin et al. as above: with f < n / 2 (or at most the
    trimmed share), each class's probability lies between two honest ones before scaling. Counter-example: the median over
    three clients that are each sure of another class is zero everywhere; then it is uniform.
    """
    clients = len(probs)
    total = combined.sum(dim=-1, keepdim=True)
    even = torch.full_like(combined, 1 / combined.shape[-1])
    combined = torch.where(total > 0, combined / total.where(total > 0, total.new_ones(())), even)
    label = combined.argmax(dim=-1)
    dissents = (probs.argmax(dim=-1) != label).to(probs.dtype) / clients
    alpha = torch.full_like(dissents, 1 / clients)
    return maths.Consensus(alpha, combined, label, (dissents.unsqueeze(-1) * probs).sum(dim=0), dissents.sum(dim=0))


def leave_out(agreements: Sequence[float], factor: float) -> int | None:
    """The client that agrees with the others' majority least, if that is less than `factor` times what the median client does.

    As Fang et al., "Local Model Poisoning Attacks to Byzantine-Robust Federated Learning", USENIX Security 2020, leave out
    whose model errs the most on validation data, with the others' majority in place of labels.
    With f < n / 2 the median is at most the largest honest agreement, so a factor of 1 or less never leaves out all honest
    clients; one with rare classes may be. None if there are fewer than three clients, of which nobody is the odd one out.
    """
    if len(agreements) < 3:
        return None
    worst = min(range(len(agreements)), key=lambda k: (agreements[k], k))
    middle = float(torch.tensor(agreements, dtype=torch.float64).quantile(0.5))
    return worst if agreements[worst] < factor * middle else None


def uninformative(scores: Sequence[float], factor: float, least: float, among: Sequence[int]) -> int | None:
    """Of the clients `among`, the one with the least score, if that is less than `factor` times the median positive one.

    Scores are `correlations`. Only positive ones say what is usual, so that clients that tell nothing can't lower it, however
    many they are. None if fewer than three have one, or if the usual score is below `least`: two clients may have something
    in common by chance, or because they collude.
    """
    positive = [score for score in scores if score > 0]
    if len(positive) < 3 or median_low(positive) < least or not among:
        return None
    worst = min(among, key=lambda k: (scores[k], k))
    return worst if scores[worst] < factor * median_low(positive) else None


def is_probabilities(value: Tensor) -> bool:
    """Whether each row is a probability distribution."""
    rows = value.dim() == 2 and value.shape[1] > 1
    return rows and bool((value >= 0).all()) and bool(((value.sum(dim=-1) - 1).abs() < 1e-3).all())


def _stacks(models: Models) -> list[tuple[str, Tensor]]:
    if not models:
        raise ValueError("an average needs at least one model")
    return [(name, torch.stack([model[name] for model in models])) for name in models[0]]


def _middle(stack: Tensor) -> Tensor:
    """The median over the first dimension; torch's own takes the lower of the middle two."""
    values = stack.sort(dim=0).values
    n = len(stack)
    return values[n // 2] if n % 2 else (values[n // 2 - 1] / 2 + values[n // 2] / 2)


def _trimmed(stack: Tensor, share: float) -> Tensor:
    cut = min(math.ceil(share * len(stack)), (len(stack) - 1) // 2)
    return stack.sort(dim=0).values[cut : len(stack) - cut].mean(dim=0)


def _cast(value: Tensor, like: Tensor) -> Tensor:
    return (value if like.is_floating_point() else value.round()).to(like.dtype)
