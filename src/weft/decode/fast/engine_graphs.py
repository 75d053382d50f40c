"""One token more in many texts of a pool, as a step of fixed shape that a GPU records once and replays.

Rows are filled up to a power of two, and so are the blocks that a row may name: few recordings serve all turns of the
engine. Rows that are there for the number's sake read and write the block `nowhere`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.decode.engine.paging import Blocks, PagedCache
from weft.decode.fast import cuda as fused
from weft.decode.fast.cuda_graphs import recording, stretches
from weft.models.transformer import Transformer, TransformerState

NARROWEST = 16  # blocks of a row that a step has room for, at least
TOKEN, READ, TABLE = 0, 1, 2  # columns of what a step is given: the token, how many were read before, and the blocks


class PagedStep:
    """Steps of one model over the blocks of one pool."""

    def __init__(self, model: Transformer, blocks: Blocks, record: bool | None = None):
        self.model, self.blocks, self.device = model, blocks, blocks.store.device
        self.record = self.device.type == "cuda" if record is None else record
        self.steps: dict[tuple[int, int], _Shape] = {}

    @staticmethod
    def fits(model: Transformer, longest: int) -> bool:
        """Whether texts of up to `longest` tokens can be read so: on a GPU, and without a source."""
        return model.embedding.weight.is_cuda and model.encoder is None and not stretches(model, longest)

    def __call__(self, tokens: Sequence[int], reads: Sequence[int], tables: npt.NDArray[np.int64]) -> Tensor:
        """Row i reads a token after reads[i] others, in the blocks that tables (rows, width) name; features (rows,
        d_model), to be used before the next step.
        """
        rows, width = tables.shape
        key = _power(rows), _power(max(width, NARROWEST))
        if key not in self.steps:
            self.steps[key] = _Shape(self.model, self.blocks, *key)
        step = self.steps[key]
        given = np.full((key[0], TABLE + key[1]), self.blocks.nowhere, dtype=np.int64)
        given[:, :TABLE] = 0
        given[:rows, TOKEN], given[:rows, READ], given[:rows, TABLE : TABLE + width] = tokens, reads, tables
        step.given.copy_(torch.from_numpy(given))
        if not self.record:
            return step.work()[:rows]
        if step.recorded is None:
            step.recorded = recording(self.model, self.device, ("paged", *key), step.work, lambda: None)
        graph, features = step.recorded
        graph.replay()
        return features[:rows]


class _Shape:
    """So many rows of so many blocks at most."""

    def __init__(self, model: Transformer, blocks: Blocks, rows: int, width: int):
        self.model = model
        self.given = torch.zeros(rows, TABLE + width, dtype=torch.long, device=blocks.store.device)
        cache, room = PagedCache(blocks, self.given[:, TABLE:]), width * blocks.block
        self.state = TransformerState(cache, rows, room, None, None)  # type: ignore[arg-type]
        self.state.even = False  # lengths are known to the device alone
        self.fused = fused.Fused(model, self.state) if fused.fits(model, self.state) else None
        self.recorded: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def work(self) -> Tensor:
        """The given tokens, read; done twice, it writes the same to the same places."""
        tokens, state = self.given[:, TOKEN : TOKEN + 1], self.state
        state.lengths = self.given[:, READ].contiguous()
        state.longest = state.max_len - 1
        if self.fused is not None:
            return self.fused.features(tokens)
        return self.model.advance(tokens, state)[:, -1]


def _power(count: int) -> int:
    """The power of two that holds so many."""
    return 1 << (count - 1).bit_length()
