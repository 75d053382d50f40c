"""Blocks in any order, shared or copied, hold what a cache in one piece would."""

import random

import pytest
import torch
from tests.models.contract import check_step_equals_forward
from torch import Tensor

from weft.decode.engine.paging import BlockStore, PagedCache
from weft.models.base import EncoderInput
from weft.models.config import Decoder
from weft.models.transformer import Transformer, TransformerState
from weft.nn.config import Attention, Gated, RMSNorm
from weft.nn.position_config import ALiBi, Learned, Position, Relative, Rotary

VOCAB = 13


class Reordered(PagedCache):
    """Its rows may change places; the engine names each row's blocks anew instead."""

    spare: list[int]

    def reorder(self, index: Tensor, filled: int) -> None:
        tables = self.tables[index]
        for place, row in enumerate(index.tolist()):
            if row in index[:place].tolist():  # both will write, and not the same
                width = tables.shape[1]
                fresh, self.spare = self.spare[:width], self.spare[width:]
                self.store[:, fresh] = self.store[:, tables[place]]
                tables[place] = torch.tensor(fresh)
        self.tables, self._written = tables, None


class PagedTransformer(Transformer):
    """Keeps what it has read in scattered blocks of three tokens."""

    def start(self, batch: int, max_len: int, source: EncoderInput | None = None) -> TransformerState:
        width, count = -(-max_len // 3), 400
        numbers = random.Random(max_len).sample(range(count), count)
        cache = Reordered(BlockStore(self, count, 3), torch.tensor(numbers[: batch * width]).view(batch, width))
        cache.spare = numbers[batch * width :]
        return TransformerState(cache, batch, max_len)  # type: ignore[arg-type]


def paged(position: Position, **changes: object) -> PagedTransformer:
    torch.manual_seed(0)
    attention = Attention(heads=4, kv_heads=2)
    config = Decoder(
        vocab_size=VOCAB, context=64, layers=2, d_model=16, attention=attention, feedforward=Gated(d_ff=32),
        position=position, norm=RMSNorm(),
    )  # fmt: skip
    return PagedTransformer(config.replace(**changes))


@pytest.mark.parametrize("position", [Rotary(), Learned(), ALiBi(), Relative()], ids=lambda p: p.kind)
def test_reading_reordering_and_forgetting_as_with_one_piece(position: Position) -> None:
    check_step_equals_forward(paged(position), VOCAB, examples=15)


def test_a_window_over_blocks() -> None:
    check_step_equals_forward(paged(Rotary(), attention=Attention(heads=2, window=3)), VOCAB, examples=10)


def numbered(count: int) -> BlockStore:
    """Block n holds nothing but n."""
    store = BlockStore(paged(Rotary()), count, 4)
    assert store.data.shape == (2, count + 1, 2, 2, 4, 4)
    store.data += torch.arange(count + 1).view(1, -1, 1, 1, 1, 1)
    return store


def test_padding_goes_nowhere() -> None:
    """What a short row is padded with lands in no block that anybody reads."""
    store = numbered(6)
    before = store.data.clone()
    cache = PagedCache(store, torch.tensor([[0, 1], [2, store.nowhere]]))
    new = torch.full((2, 2, 7, 4), -1.0)
    keys, values = cache.layer(0, torch.arange(7).expand(2, -1), 0).extend(new, new)
    assert keys.shape == values.shape == (2, 2, 7, 4)
    untouched = [3, 4, 5]
    assert torch.equal(store.data[:, untouched], before[:, untouched])
    assert torch.equal(store.data[1], before[1])
    assert bool((store.data[0, [0, 2]] == -1).all())
