"""Gradient of each operation with respect to its operands, as a readable formula (formulas.toml).

g is the gradient of the loss with respect to the operation's result y; an operand's formula is the gradient passed back
to it. The gradient of a broadcast operand is summed over the copies. Tests evaluate every formula against autograd.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class GradientRule(NamedTuple):
    """Formula y = `forward` and gradient of each operand; {x} is an operand, {y} the result and {g} its gradient."""

    operands: str  # letters of the function's tensors, in order; the last may be omitted or repeated
    forward: str
    gradients: Mapping[str, str]

    def gradient(self, operand: str, names: Mapping[str, str]) -> str:
        """Return the formula of an operand's gradient; `names` replace the letters of operands and the result."""
        letters = {letter: letter for letter in (*self.operands, "y")} | dict(names)
        letters["g"] = f"g_{letters['y']}"
        return f"g_{letters[operand]} = {self.gradients[operand].format_map(letters)}"


_TABLE = tomllib.loads(Path(__file__).with_name("formulas.toml").read_text(encoding="utf-8"))


def _rules(table: Mapping[str, dict[str, str]]) -> dict[str, GradientRule]:
    return {name: GradientRule(row.pop("operands"), row.pop("forward"), row) for name, row in table.items()}


RULES, LECTURE = _rules(_TABLE["rules"]), _rules(_TABLE["lecture"])
MODULES: dict[str, str] = _TABLE["modules"]  # class name → the rule of the whole module
