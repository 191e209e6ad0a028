"""The accuracy of a method's output by class, and by client as far as its labels tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedet.experiment import Experiment
from fedet.storage.metrics import Record

MOST_CONFUSED = 20
"""With more classes there is no table of confusions."""
MOST_CLASSES = 1000
"""With more classes there is no list of accuracies by class."""
MOST_CLIENTS = 1000
"""With more clients there is no table of their accuracies, only their mean, worst tenth and deviation."""

Floats = npt.NDArray[np.float64]


def of_output(experiment: Experiment, predicted: Tensor) -> Record:
    """`per_class`, `confusion` and `per_client` of predictions on the test examples, one row for each model of the output.

    The accuracy for a client is that on test examples in the proportions of its own labels: the accuracies by class, weighted
    with the client's shares of the classes. It says how well the server's model suits this client, and costs nothing. The
    labels are known to the simulator; on Flower with the clients' own data they are not, and there is no `per_client`.
    """
    data = experiment.data
    counts = confusion(data.test.labels.repeat(len(predicted)), predicted.flatten(), data.num_classes)
    totals = counts.sum(axis=1)
    accuracy = np.divide(counts.diagonal(), totals, out=np.full(len(totals), np.nan), where=totals > 0)
    found: Record = {}
    if data.num_classes <= MOST_CLASSES:
        found["per_class"] = [None if np.isnan(value) else round(float(value), 6) for value in accuracy]
    if data.num_classes <= MOST_CONFUSED:
        found["confusion"] = counts.tolist()
    if not experiment.config.flower.own_data:
        found |= _per_client(data.label_counts(), accuracy)
    return found


def confusion(labels: Tensor, predicted: Tensor, num_classes: int) -> npt.NDArray[np.int64]:
    """How often examples of each class (row) were taken for each class (column)."""
    cells = labels.numpy() * num_classes + predicted.cpu().numpy()
    return np.bincount(cells, minlength=num_classes * num_classes).reshape(num_classes, num_classes)


def _per_client(label_counts: npt.NDArray[Any], accuracy: Floats) -> Record:
    """By client: the mean over its labels of the classes that the test examples have; empty clients are left out."""
    tested = ~np.isnan(accuracy)
    held = label_counts[:, tested].astype(np.float64)
    clients = np.flatnonzero(held.sum(axis=1))
    if not len(clients):
        return {}
    each = held[clients] @ accuracy[tested] / held[clients].sum(axis=1)
    worst = np.sort(each)[: max(1, len(each) // 10)]
    found: Record = {"mean": float(each.mean()), "worst_tenth": float(worst.mean()), "std": float(each.std())}
    if len(clients) <= MOST_CLIENTS:
        found["accuracies"] = {str(k): round(float(value), 6) for k, value in zip(clients, each, strict=True)}
    return {"per_client": found}
