"""What the page of a comparison shows, as plain data: the outcome, the table, curves and paired differences."""

from __future__ import annotations

from collections.abc import Sequence

from fedet.reporting import comparisons, curves, references, results, words
from fedet.reporting.run_data import RunData
from fedet.storage.metrics import Record
from fedet.ui.charts import SENT, SENT_NOTE, Chart


def view(runs: Sequence[RunData]) -> Record:
    """All that the page shows of at least one run."""
    rows, groups = results.comparison_rows(runs), results.grouped(runs)
    head, body = results.table(rows)
    federated = sum(not row["reference"] for row in rows)
    pairs = comparisons.differences(rows, groups)
    return {
        "title": words.comparison_title(runs),
        "sentence": comparisons.sentence(rows, pairs),
        "conditions": comparisons.conditions(runs),
        "head": head,
        "body": body[:federated],
        "best": results.best_rows(rows),
        "possible": body[federated:],
        "meanings": references.meanings(rows),
        "heading": references.HEADING,
        "several_seeds": any(row["n"] > 1 for row in rows),
        "charts": _charts(rows, groups),
        "pair_head": comparisons.PAIR_HEAD,
        "pairs": [pair.cells for pair in pairs],
        "equal": comparisons.equal(runs),
        "notices": words.notices(runs),
        "unfinished": sum(not run.finished for run in runs),
    }


def _charts(rows: Sequence[Record], groups: dict[str, list[RunData]]) -> list[Chart]:
    federated = {label: group for label, group in groups.items() if not group[0].reference} or groups
    levels = comparisons.levels(rows)
    by_round, by_params = ([curves.mean_curve(*item, key) for item in federated.items()] for key in ("round", "params_total"))
    first = Chart(
        "accuracy", "Accuracy", by_round, levels=levels, late=True, note="Test accuracy of each method's server model."
    )
    second = Chart("params", "Accuracy against parameters sent", by_params, x=SENT, levels=levels, note=SENT_NOTE)
    return [first, second]
