"""What the trainer asks of an objective. The objectives themselves are in `weft.objectives`."""

from typing import Protocol

from torch import Tensor

from weft.data.batch import Batch
from weft.models.base import LanguageModel
from weft.training.loader import Loader

Extras = dict[str, Tensor]
Loss = tuple[Tensor, Tensor | int, Extras]


class Objective(Protocol):
    """What is learned, with the data that it is learned from."""

    @property
    def loader(self) -> Loader:
        """The batches to train on."""
        ...

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Hashes of the data."""
        ...

    @property
    def holds_out(self) -> bool:
        """Whether there is held-out data to evaluate on."""
        ...

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """The sum of the losses of a batch, the count of its targets, and extras.

        Sum and count stay apart because the trainer divides by the count of the whole step, over all parts of a batch
        and all processes; so dividing a batch never changes the gradient. Extras are sums too, without a gradient:
        `nll` is what is logged as −log p.
        """
        ...

    def evaluate(self, model: LanguageModel) -> dict[str, float]:
        """Metrics on held-out data, quickly: this is called again and again during training."""
        ...

    def sample(self, model: LanguageModel) -> list[str]:
        """A few texts that the model writes by now, if it writes; without using torch's global generators."""
        ...
