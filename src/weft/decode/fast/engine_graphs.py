"""One token more in many texts of a pool, as steps of fixed shape that are captured as CUDA graphs and replayed.

Each text that is being written has a slot. What the device needs from step to step stays there, by slot: the numbers
of a text's blocks, which are sent where they change, and its newest token, which is chosen there, so that a step need
not wait until the host has seen what the last one wrote. A step is given slots. Rows are filled up to one of a few
sizes, each of which has a graph, with a slot that nobody has: its rows read and write the block `nowhere`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weft.decode.engine.paging import BlockStore, PagedCache
from weft.decode.fast.cuda import Chunk, PagedFastPath
from weft.decode.fast.cuda_graphs import Captured, capture
from weft.decode.sampling import on_device
from weft.models.transformer import Transformer, TransformerState

MIN_BLOCKS_SEEN = 16  # of a text, by a step of the plain model
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # rows of a step; beyond, multiples of 64
SLOT, READ, TOKEN = 0, 1, 2  # what a step is given of each row: its slot, how many tokens were read before, the next

Rows = tuple[list[int], list[int], list[int]]  # slots, and what `PagedGraphs.step` is given of each


class PagedGraphs:
    """Steps of one model over the blocks of one pool, for texts in `slots` slots."""

    def __init__(self, model: Transformer, store: BlockStore, slots: int, kernels: bool):
        device = store.data.device
        self.model, self.store, self.device, self.nobody = model, store, device, slots
        self.tables = torch.full((slots + 1, store.blocks), store.nowhere, dtype=torch.int32, device=device)
        self.newest = torch.zeros(slots + 1, dtype=torch.long, device=device)
        self.kernels = PagedFastPath(model, store, self.tables) if kernels else None
        self.shapes: dict[tuple[int, int], _Shape] = {}
        # Chunks of prompts are bound by products, steps by what they read: beside one another both take less time.
        self.beside = torch.cuda.Stream(device) if kernels and device.type == "cuda" else None

    def place(self, changes: dict[tuple[int, int], int]) -> None:
        """From now on block n of the text in slot s is number changes[s, n]."""
        places = np.array(list(changes)).T
        sent = np.concatenate([places, np.array(list(changes.values()))[None]])
        slots, columns, numbers = on_device(torch.from_numpy(sent), self.device).unbind(0)
        self.tables[slots, columns] = numbers.int()

    def keep(self, slots: Sequence[int], tokens: Tensor) -> None:
        """The newest tokens (slots,) of the texts in these slots, which they go on with."""
        self.newest.index_copy_(0, on_device(torch.tensor(slots), self.device), tokens)

    def together(self, rows: Rows, chunks: list[Chunk]) -> Tensor:
        """A step of some rows, and beside it chunks of prompts, by the kernels: features (rows + chunks, d_model)."""
        assert self.kernels is not None and chunks
        if self.beside is None:
            features = [self.step(*rows)] if rows[0] else []
            return torch.cat([*features, self.kernels.read(chunks)])
        now = torch.cuda.current_stream(self.device)
        self.beside.wait_stream(now)
        features = [self.step(*rows)] if rows[0] else []
        with torch.cuda.stream(self.beside):
            read = self.kernels.read(chunks)
        read.record_stream(now)
        now.wait_stream(self.beside)
        return torch.cat([*features, read])

    def step(self, slots: Sequence[int], reads: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Read one token in each of these slots, after reads[i] others; −1 stands for the newest one on the device.

        Features (slots, d_model), to be used before the next step.
        """
        rows = len(slots)
        size = next((size for size in SIZES if size >= rows), -(-rows // 64) * 64)
        width = 0  # the kernels look at what is filled alone
        if self.kernels is None:
            blocks = max(MIN_BLOCKS_SEEN, max(reads) // self.store.block_size + 1)
            width = 1 << (blocks - 1).bit_length()  # the power of two that holds so many
        key = size, min(width, self.store.blocks)
        if key not in self.shapes:
            self.shapes[key] = _Shape(self, *key)
        shape = self.shapes[key]
        given = np.zeros((3, size), dtype=np.int64)
        given[SLOT, rows:] = self.nobody
        given[:, :rows] = slots, reads, tokens
        shape.given.copy_(on_device(torch.from_numpy(given), self.device), non_blocking=True)
        if self.device.type != "cuda":
            return shape.work()[:rows]
        if shape.captured is None:
            kind = "paged", *key, self.store.blocks, self.store.block_size
            shape.captured = capture(self.model, kind, shape.work, lambda: None)
        graph, features = shape.captured
        graph.replay()
        return features[:rows]


class _Shape:
    """So many rows; for the plain model, of texts of so many blocks at most."""

    def __init__(self, graphs: PagedGraphs, rows: int, width: int):
        self.graphs, self.width = graphs, width
        self.given = torch.zeros(3, rows, dtype=torch.long, device=graphs.device)
        self.attention = None if graphs.kernels is None else graphs.kernels.attention_of(rows)
        self.captured: Captured | None = None

    def work(self) -> Tensor:
        """The given tokens, read; done twice, it writes the same to the same places."""
        graphs, (slots, reads, tokens) = self.graphs, self.given
        tokens = torch.where(tokens < 0, graphs.newest[slots], tokens)
        if graphs.kernels is not None:
            return graphs.kernels.step(tokens, reads, slots, self.attention)
        cache = PagedCache(graphs.store, graphs.tables[slots, : self.width].long())
        state = TransformerState(cache, len(slots), self.width * graphs.store.block_size, None, None)  # type: ignore[arg-type]
        state.lengths, state.longest = reads, state.max_len - 1
        state.even = False  # lengths are known to the device alone
        return graphs.model.advance(tokens.unsqueeze(1), state)[:, -1]
