"""The notebooks of the documentation: small, without outputs, and run from top to bottom without an error."""

import json
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
MAX_BYTES = 1_000_000
MAX_CELL_SECONDS = 600  # on a machine with other things to do; on a quiet one a notebook takes a minute


def test_there_are_some_and_the_index_lists_them() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) >= 3
    for name in NOTEBOOKS:
        assert f"\n{name}\n" in index and f"{{download}}`{name}.ipynb`" in index


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_without_outputs(name: str) -> None:
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < MAX_BYTES
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            compile("".join(cell["source"]), name, "exec")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_without_an_error(name: str, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=MAX_CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1] / "src")})  # raises where a cell does
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs and not any(output["output_type"] == "error" for output in outputs)
