"""Layout of a model over processes in training: the sizes of the named axes of a device mesh.

Each process has one device. Each axis divides something else:

    replicate   the batch; every replica has all weights, and gradients are summed over the replicas
    shard       the batch; weights, gradients and moments are sharded, and gathered layer by layer (Zhao et al. 2023)
    tensor      the matrices inside every layer (Shoeybi et al. 2019)
    context     the tokens of every row (Liu et al. 2023)
    experts     the batch, and the experts of each mixture (Lepikhin et al. 2021)
    pipeline    the layers, stage by stage (Huang et al. 2019)
"""

import math

from pydantic import Field, PositiveInt

from weft.config import Config
from weft.errors import ConfigError, counted

# outermost first: ranks communicate most along the last
AXES = ("pipeline", "replicate", "shard", "context", "experts", "tensor")

START = "start that many with --processes or torchrun, or change parallel.*"


class Layout(Config):
    """Sizes of a device mesh.

    With `sequence`, the norms and skip connections between the divided matrices are divided too, along the tokens of a
    row, over the processes of `tensor` (Korthikanti et al. 2022).
    """

    replicate: PositiveInt | None = Field(
        None, description="replicas of the model, which divide the rows; absent: as many as the processes allow"
    )
    shard: PositiveInt = Field(1, description="processes that divide rows, weights, gradients and moments (FSDP)")
    tensor: PositiveInt = Field(1, description="processes that divide the matrices of each layer")
    sequence: bool = Field(False, description="also divide the norms between those matrices")
    context: PositiveInt = Field(1, description="processes that divide the tokens of each row")
    experts: PositiveInt = Field(1, description="processes that divide rows and the experts of each mixture")
    pipeline: PositiveInt = Field(1, description="stages that divide the layers")

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every axis, outermost first; `replicate` is 1 if it is not set."""
        return {axis: getattr(self, axis) or 1 for axis in AXES}

    @property
    def splits(self) -> bool:
        """Whether a process has only a part of the model or of a row."""
        return any(size > 1 for axis, size in self.sizes.items() if axis != "replicate")

    @property
    def readers(self) -> int:
        """Number of parts that the rows of a batch are divided into."""
        return (self.replicate or 1) * self.shard * self.experts

    @property
    def row_unit(self) -> int:
        """Number that the length of a row must be a multiple of: each process reads two ranges of it, which `sequence`
        divides again."""
        return 1 if self.context == 1 else self.context * math.lcm(2, self.tensor if self.sequence else 1)

    @property
    def in_words(self) -> str:
        """Description of the axes larger than 1, outermost first."""
        sizes = " × ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)
        return sizes + (" + sequence" if self.sequence else "") or "one process"

    def over(self, processes: int, key: str = "parallel", advice: str = START) -> "Layout":
        """Return this layout with `replicate` set for `processes` processes. Raise ConfigError if the sizes don't
        multiply to that number; the message begins with `key` and ends with `advice`."""
        within = math.prod(size for axis, size in self.sizes.items() if axis != "replicate")
        if self.replicate is None and processes % within == 0:
            return self.replace(replicate=processes // within)
        if self.replicate is None or self.replicate * within != processes:
            needed = (self.replicate or 1) * within
            raise ConfigError(
                f"{key}: {self.in_words} needs {counted(needed, 'process', 'processes')}"
                f"{' or a multiple' if self.replicate is None and needed > 1 else ''}, but there "
                f"{'is' if processes == 1 else 'are'} {processes}; {advice}"
            )
        return self
