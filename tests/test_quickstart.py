"""The notebook runs from top to bottom as it stands, and its results show themselves."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "quickstart.ipynb"


@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs_and_shows_tables_and_pictures(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # small models only lose by more, and so do the other tests
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in notebook.cells)
    nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output["data"] for output in outputs if output["output_type"] in ("display_data", "execute_result")]
    pages = [data["text/html"] for data in shown if "text/html" in data]
    assert sum("<progress value='6' max='6'>" in page for page in pages) == 1  # of the first run
    assert sum("all runs" in page and "4/4 runs" in page for page in pages) == 1  # of the comparison
    assert any("<caption>fedet on digits, seed 0, 6 rounds</caption>" in page for page in pages)
    assert any("best accuracy, %" in page and "fedavg" in page for page in pages)
    assert any("per_client.worst_tenth" in page for page in pages)
    assert sum("image/png" in data for data in shown) == 2
    assert "'callback'" in shown[-1]["text/plain"]
    errors = "".join(output.get("text", "") for output in outputs if output.get("name") == "stderr")
    assert "round" not in errors
    assert list(tmp_path.glob("runs/*/report.html"))
