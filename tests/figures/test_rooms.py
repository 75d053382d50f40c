"""Only figures/ reads web/ and page templates, and a report is written without matplotlib."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "weft"
QUICK = ("formats", "plot", "shapes", "page", "tables")  # modules that a report may import


def packages(path: Path) -> set[str]:
    """Return the packages that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split(".")[0] for name in found}


def test_only_figures_imports_drawing_libraries() -> None:
    files = [path for room in ("compare", "evaluate", "runs") for path in (ROOT / room).rglob("*.py")]
    assert not [path for path in files if packages(path) & {"matplotlib", "jinja2"}]
    assert not [
        path for path in ROOT.rglob("*.py") if '"web"' in path.read_text("utf-8") and path.parent.name != "figures"
    ]


def test_a_report_needs_no_matplotlib() -> None:
    assert not [name for name in QUICK if "matplotlib" in packages(ROOT / "figures" / f"{name}.py")]
    allowed = {f"weft.figures.{name}" for name in QUICK}
    nodes = ast.walk(ast.parse((ROOT / "runs" / "report.py").read_text("utf-8")))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and "figures" in (node.module or "")}
    assert imported <= allowed
