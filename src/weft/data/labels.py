"""Numbers for labels, assigned while rows are read: examples are written in one pass, before all labels are known."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from weft.data.table import Row
from weft.errors import DataError


def label_names(labels: Iterable[str]) -> list[str]:
    """All labels once, in an order that doesn't depend on theirs: as numbers if all are, else as text."""
    names = set(labels)
    if all(name.lstrip("-").isdecimal() for name in names):
        return sorted(names, key=int)
    return sorted(names)


class Labels:
    """Labels of one column. With `names` they are numbered in that order, and others are refused.

    Without, a label gets a number at first sight, and its final one, its place in `label_names`, once all rows were
    seen: `write_sides` puts that in its place. Labels that validation rows alone have are refused then.
    """

    def __init__(self, column: str, names: Sequence[str] | None = None) -> None:
        self.column = column
        self._given = None if names is None else list(names)
        self._numbers = {name: number for number, name in enumerate(names or ())}
        self._untaught: dict[str, str] = {}  # labels that no training row had so far, and where each was met first

    def number(self, label: str, row: Row) -> int:
        """The provisional number of a label of this row."""
        if label not in self._numbers:
            if self._given is not None:
                raise self._unknown(label, row.where)
            self._numbers[label] = len(self._numbers)
            self._untaught[label] = row.where
        if self._untaught and row.side == "train":
            self._untaught.pop(label, None)
        return self._numbers[label]

    @property
    def names(self) -> list[str]:
        """All labels in their final order, once the rows were seen."""
        for label, where in self._untaught.items():
            raise self._unknown(label, where)
        return label_names(self._numbers) if self._given is None else self._given

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """For each number that `number` gave, the final one: (labels,)."""
        final = {name: place for place, name in enumerate(self.names)}
        return np.array([final[name] for name in self._numbers], dtype=np.int64)

    def _unknown(self, label: str, where: str) -> DataError:
        known = self._given if self._given is not None else label_names(set(self._numbers) - set(self._untaught))
        return DataError(
            f"{where}: '{self.column}' is {label!r}, which no training row has; known: {', '.join(known[:12])}"
        )
