"""The gradient of each operation by its operands, as a formula to read (formulas.toml).

g is the gradient of the loss by the operation's result y; the formula of an operand says what is passed back to it.
Where an operand was broadcast, its gradient is summed over the copies. The tests compute every formula and hold it to
autograd.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Rule(NamedTuple):
    """y = `forward`, and by operand the gradient.

    `operands` are the letters of the function's tensors in their order, of which a call may leave out the last; what
    comes after them is like the last. In the texts {x} stands for an operand, {y} for the result, {g} for its gradient.
    """

    operands: str
    forward: str
    gradients: Mapping[str, str]

    def gradient(self, operand: str, names: Mapping[str, str]) -> str:
        """The formula of an operand's gradient, by the names of the operands and of the result y."""
        letters = {letter: letter for letter in (*self.operands, "y")} | dict(names)
        passed = self.gradients[operand].format_map(letters | {"g": f"g_{letters['y']}"})
        return f"g_{letters[operand]} = {passed}"


_TABLE = tomllib.loads(Path(__file__).with_name("formulas.toml").read_text(encoding="utf-8"))


def _rules(table: Mapping[str, dict[str, str]]) -> dict[str, Rule]:
    return {name: Rule(row.pop("operands"), row.pop("forward"), row) for name, row in table.items()}


RULES, LECTURE = _rules(_TABLE["rules"]), _rules(_TABLE["lecture"])
MODULES: dict[str, str] = _TABLE["modules"]  # by the name of a class the rule that it follows
