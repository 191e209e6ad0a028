"""Accuracy by class and by client: the numbers by hand, in the records, and that nothing else changes."""

import numpy as np
import pytest
import torch
from terminal import SMALL

import fedet
from fedet.engine import breakdown
from fedet.methods import METHODS


def test_confusion_counts_true_classes_in_rows():
    counts = breakdown.confusion(torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 1, 1, 2, 0]), 3)
    assert counts.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]


def test_the_accuracy_for_a_client_is_that_of_its_label_mix():
    held = np.array([[10, 0, 0], [5, 5, 0], [0, 0, 0], [0, 1, 99], [0, 0, 7]])  # one client is empty, class 2 is not tested
    (found,) = breakdown._per_client(held, np.array([0.5, 1.0, np.nan])).values()
    assert found["accuracies"] == {"0": 0.5, "1": 0.75, "3": 1.0}
    assert found["mean"] == pytest.approx(0.75)
    assert found["worst_tenth"] == 0.5
    assert found["std"] == pytest.approx(np.std([0.5, 0.75, 1.0]))
    assert breakdown._per_client(held[:, 2:], np.array([np.nan])) == {}


def test_a_run_records_it_every_eval_all_every_rounds(tmp_path):
    result = fedet.run(SMALL, out=tmp_path, rounds=3, run__eval_all_every=2, progress=False)
    assert ["per_class" in entry for entry in result.metrics] == [False, True, True]  # and after the last round
    split = np.load(result.run_dir / "split.npz")
    for entry in result.metrics[1:]:
        counts = np.array(entry["confusion"])
        assert counts.sum() == len(split["test"])
        assert counts.trace() / counts.sum() == pytest.approx(entry["accuracy"])
        assert np.allclose(entry["per_class"], counts.diagonal() / counts.sum(axis=1), atol=1e-6)
        shares = split["label_counts"] / split["label_counts"].sum(axis=1, keepdims=True)
        expected = {str(k): value for k, value in enumerate(shares @ np.array(entry["per_class"]))}
        assert entry["per_client"]["accuracies"] == pytest.approx(expected, abs=1e-5)
    frame = pytest.importorskip("pandas") and result.to_pandas()
    assert frame.loc[3, "per_client.mean"] == result.metrics[-1]["per_client"]["mean"]
    assert frame.loc[3, "per_class.0"] == result.metrics[-1]["per_class"][0]


@pytest.mark.parametrize("method", [*(cls.name for cls in METHODS), "local"])
def test_every_method_has_it_if_it_has_a_server_model(tmp_path, method):
    result = fedet.run(SMALL, out=tmp_path, rounds=1, method=method, progress=False)
    assert ("per_class" in result.metrics[-1]) == (method != "local")
