"""One token more in many texts of a pool, as a step of fixed shape that is captured as a CUDA graph and replayed.

Rows are filled up to a power of two, and so are the blocks that a row may name: few graphs serve all steps of the
engine. Rows that only fill up read and write the block `nowhere`.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.decode.engine.paging import BlockStore, PagedCache
from weft.decode.fast.cuda import CUDAFastPath
from weft.decode.fast.cuda_graphs import Captured, capture
from weft.models.transformer import Transformer, TransformerState

NARROWEST = 16  # blocks of a row that a step has capacity for, at least
TOKEN, READ, TABLE = 0, 1, 2  # columns of what a step is given: the token, how many were read before, and the blocks

Kernels = Callable[[TransformerState], CUDAFastPath | None]  # the CUDA fast path for a state, where it fits


class PagedGraphs:
    """Steps of one model over the blocks of one pool."""

    def __init__(self, model: Transformer, store: BlockStore, kernels: Kernels):
        self.model, self.store, self.kernels = model, store, kernels
        self.shapes: dict[tuple[int, int], _Shape] = {}

    def __call__(self, tokens: Sequence[int], reads: Sequence[int], tables: npt.NDArray[np.int64]) -> Tensor:
        """Row i reads a token after reads[i] others, in the blocks that tables (rows, width) name; features (rows,
        d_model), to be used before the next step.
        """
        rows, width = tables.shape
        key = _power(rows), _power(max(width, NARROWEST))
        if key not in self.shapes:
            self.shapes[key] = _Shape(self, *key)
        shape = self.shapes[key]
        given = np.full((key[0], TABLE + key[1]), self.store.nowhere, dtype=np.int64)
        given[:, :TABLE] = 0
        given[:rows, TOKEN], given[:rows, READ], given[:rows, TABLE : TABLE + width] = tokens, reads, tables
        shape.given.copy_(torch.from_numpy(given))
        if not shape.given.is_cuda:
            return shape.work()[:rows]
        if shape.captured is None:
            shape.captured = capture(self.model, ("paged", *key), shape.work, lambda: None)
        graph, features = shape.captured
        graph.replay()
        return features[:rows]


class _Shape:
    """So many rows of so many blocks at most."""

    def __init__(self, graphs: PagedGraphs, rows: int, width: int):
        self.model, store = graphs.model, graphs.store
        self.given = torch.zeros(rows, TABLE + width, dtype=torch.long, device=store.data.device)
        cache, capacity = PagedCache(store, self.given[:, TABLE:]), width * store.block_size
        self.state = TransformerState(cache, rows, capacity, None, None)  # type: ignore[arg-type]
        self.state.even = False  # lengths are known to the device alone
        self.kernels = graphs.kernels(self.state)
        self.captured: Captured | None = None

    def work(self) -> Tensor:
        """The given tokens, read; done twice, it writes the same to the same places."""
        tokens, state = self.given[:, TOKEN : TOKEN + 1], self.state
        state.lengths = self.given[:, READ].contiguous()
        state.longest = state.max_len - 1
        if self.kernels is not None:
            return self.kernels.features(tokens)
        return self.model.advance(tokens, state)[:, -1]


def _power(count: int) -> int:
    """The power of two that holds so many."""
    return 1 << (count - 1).bit_length()
