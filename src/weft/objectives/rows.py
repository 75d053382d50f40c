"""What objectives share that learn from rows: each row becomes an example, batched with others of similar length."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from weft.data.batch import Batch
from weft.data.bucket import Buckets
from weft.data.examples import Examples, write_examples
from weft.data.rows import split_rows
from weft.data.shards import Side
from weft.data.table import Kind, Row, Skipped
from weft.errors import DataError, RunError
from weft.models.base import LanguageModel
from weft.objectives.objective import EVALUATED_TOKENS, Objective, Prepared, Results
from weft.progress import Log
from weft.recipe.objective import ObjectiveConfig
from weft.training.loader import Loader, micro_rows

S = TypeVar("S", bound=ObjectiveConfig)
Numbers = npt.NDArray[np.int64]


class RowObjective(Objective[S]):
    """Rows with named columns."""

    # ---- what each objective knows of its rows

    @abstractmethod
    def columns(self) -> Mapping[str, Kind]:
        """The columns that are read, and what each holds."""

    @abstractmethod
    def row_texts(self, values: Mapping[str, Any], side: Literal["target", "source"]) -> Iterator[str]:
        """The text of a row, for a tokenizer to learn from."""

    @abstractmethod
    def encode(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """Rows as examples: ids and numbers."""

    @abstractmethod
    def lengths(self, examples: Examples) -> Numbers:
        """Tokens of each example as it is batched: (examples,) or (examples, sides)."""

    @abstractmethod
    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        """Some examples as one batch."""

    @abstractmethod
    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, float]:
        """How good a model is."""
