"""The files of the package, each parsed once for all the rules that it has to keep."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "weft"
MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All that a file holds; the module comes first."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
