"""How a model in training is laid out over processes: the sizes of the named axes of a mesh, data alone.

One device a process. Each axis divides something else:

    replicate   the batch; each copy holds all of its weights, and gradients are summed over the copies
    shard       the batch; weights, gradients and moments are split, and gathered layer by layer (Zhao et al. 2023)
    tensor      the matrices inside every layer (Shoeybi et al. 2019)
    context     the tokens of every row (Liu et al. 2023)
    pipeline    the layers, stage by stage (Huang et al. 2019)
"""

import math

from pydantic import Field, PositiveInt

from weft.config import Config
from weft.errors import ConfigError, counted

AXES = ("pipeline", "replicate", "shard", "context", "tensor")  # outermost first: neighbours talk most along the last

START = "start as many with --processes or torchrun, or change parallel.*"


class Layout(Config):
    """The sizes of a mesh. Without `replicate` there are as many copies as the processes allow.

    With `sequence` the norms and skip connections between the split matrices are split as well, along the tokens of a
    row, over the processes of `tensor` (Korthikanti et al. 2022).
    """

    replicate: PositiveInt | None = Field(
        None, description="copies of the model, which divide the rows; absent: as many as there are processes for"
    )
    shard: PositiveInt = Field(1, description="processes that divide rows, weights, gradients and moments (FSDP)")
    tensor: PositiveInt = Field(1, description="processes that divide the matrices of each layer")
    sequence: bool = Field(False, description="divide the norms between those matrices too")
    context: PositiveInt = Field(1, description="processes that divide the tokens of each row")
    pipeline: PositiveInt = Field(1, description="stages that divide the layers")

    @property
    def sizes(self) -> dict[str, int]:
        """Every axis and its size, outermost first; `replicate` is 1 where it is left open."""
        return {axis: getattr(self, axis) or 1 for axis in AXES}

    @property
    def splits(self) -> bool:
        """Whether a process holds less than the whole model, or reads less than a whole row."""
        return any(size > 1 for axis, size in self.sizes.items() if axis != "replicate")

    @property
    def readers(self) -> int:
        """How many parts a batch's rows are divided into."""
        return (self.replicate or 1) * self.shard

    @property
    def row_unit(self) -> int:
        """What the length of a row is a multiple of: each process reads two ranges of it, or as many tokens as
        `sequence` divides again."""
        return 1 if self.context == 1 else self.context * math.lcm(2, self.tensor if self.sequence else 1)

    @property
    def in_words(self) -> str:
        """The axes that it uses, outermost first."""
        sizes = " × ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)
        return sizes + (" + sequence" if self.sequence else "") or "one process"

    def over(self, processes: int, key: str = "parallel", advice: str = START) -> "Layout":
        """This layout with nothing left open, over `processes`; sizes that don't multiply to that are refused.

        The error begins with `key` and ends with `advice`.
        """
        within = math.prod(size for axis, size in self.sizes.items() if axis != "replicate")
        if self.replicate is None and processes % within == 0:
            return self.replace(replicate=processes // within)
        if self.replicate is None or self.replicate * within != processes:
            wanted = (self.replicate or 1) * within
            raise ConfigError(
                f"{key}: {self.in_words} takes {counted(wanted, 'process', 'processes')}"
                f"{' or a multiple of it' if self.replicate is None and wanted > 1 else ''}, and there "
                f"{'is' if processes == 1 else 'are'} {processes}; {advice}"
            )
        return self
