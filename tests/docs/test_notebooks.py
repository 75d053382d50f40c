"""The notebooks of the documentation: small, and listed; tests/docs/test_site.py runs them."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
MAX_BYTES = 1_000_000  # of a notebook with its recorded outputs


def test_every_notebook_is_listed() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) >= 3 and all(f"({name}.ipynb)" in page for name in NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_small_and_compiles(name: str) -> None:
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < MAX_BYTES
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["execution_count"] is None  # which would change with every recording
            assert not any(output["output_type"] == "error" for output in cell["outputs"])
            compile("".join(cell["source"]), name, "exec")
