"""A paged cache holds what a contiguous one would, with blocks in any order."""

import random

import pytest
import torch
from tests.models.contract import check_step_equals_forward
from tests.spread import spread
from torch import Tensor

from weft.decode.engine.paging import BlockStore, PagedCache
from weft.models.base import EncoderInput
from weft.models.config import LayerKind
from weft.models.presets import llama
from weft.models.transformer import Transformer, TransformerState
from weft.nn.config import Attention
from weft.nn.position_config import ALiBi, Learned, Position, Relative, Rotary, Tempered

VOCAB = 13


class ReorderedCache(PagedCache):
    """A paged cache whose rows can be reordered, as the contract demands; the engine makes new tables instead."""

    spare: list[int]

    def reorder(self, index: Tensor, filled: int) -> None:
        tables = self.tables[index]
        for row, origin in enumerate(index.tolist()):
            if origin in index[:row].tolist():  # both rows will write, so they must not share blocks
                width = tables.shape[1]
                copies, self.spare = self.spare[:width], self.spare[width:]
                self.store[:, copies] = self.store[:, tables[row]]
                tables[row] = torch.tensor(copies)
        self.tables, self._key = tables, None


class PagedTransformer(Transformer):
    """A Transformer with a cache in scattered blocks of three tokens."""

    def start(self, batch: int, max_len: int, source: EncoderInput | None = None) -> TransformerState:
        width, count = -(-max_len // 3), 400
        blocks = random.Random(max_len).sample(range(count), count)
        cache = ReorderedCache(BlockStore(self, count, 3), torch.tensor(blocks[: batch * width]).view(batch, width))
        cache.spare = blocks[batch * width :]
        state = TransformerState(cache, batch, max_len)  # type: ignore[arg-type]
        state.can_grow = False  # the tables are full
        return state


def paged(position: Position, attention: Attention | None = None) -> PagedTransformer:
    torch.manual_seed(0)
    config = llama(2, 16, 4, d_ff=32, context=64, vocab_size=VOCAB, kv_heads=2, tied=True)
    return PagedTransformer(config.replace(position=position, attention=attention or config.attention))


@pytest.mark.parametrize(
    "position", spread([Rotary(), Learned(), ALiBi(), Relative()], 2), ids=lambda position: position.kind
)
def test_reading_reordering_and_truncating(position: Position) -> None:
    check_step_equals_forward(paged(position), VOCAB, examples=15)


@pytest.mark.parametrize("d_v", [3, 7])
def test_values_of_another_width(d_v: int) -> None:
    check_step_equals_forward(paged(Rotary(), Attention(heads=4, kv_heads=2, d_v=d_v)), VOCAB, examples=8)


def test_a_window_over_blocks() -> None:
    check_step_equals_forward(paged(Rotary(), Attention(heads=2, window=3)), VOCAB, examples=10)


def test_chunks_over_blocks() -> None:
    config = llama(2, 16, 4, d_ff=32, context=64, vocab_size=VOCAB, kv_heads=2, tied=True)
    pattern = LayerKind(chunk=5), LayerKind(position=Tempered(interval=2))
    check_step_equals_forward(PagedTransformer(config.replace(pattern=pattern)), VOCAB, examples=10)


def test_padding_is_written_to_no_text() -> None:
    store = BlockStore(paged(Rotary()), 6, 4)
    assert store.data.shape == (2, 7, 2, 2, 4, 4)
    store.data += torch.arange(7).view(1, -1, 1, 1, 1, 1)
    before = store.data.clone()
    cache = PagedCache(store, torch.tensor([[0, 1], [2, store.nowhere]]))
    new = torch.full((2, 2, 7, 4), -1.0)
    keys, values = cache.layer(0, torch.arange(7).expand(2, -1), 0).extend(new, new)
    assert keys.shape == values.shape == (2, 2, 7, 4)
    assert torch.equal(store.data[:, 3:6], before[:, 3:6])
    assert torch.equal(store.data[1], before[1])
    assert bool((store.data[0, [0, 2]] == -1).all())
