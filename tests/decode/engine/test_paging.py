"""Blocks in any order, shared or copied, hold what a cache in one piece would."""

import random

import pytest
import torch
from tests.models.contract import check_step_equals_forward
from torch import Tensor

from weft.decode.engine.paging import Blocks, PagedCache
from weft.errors import ModelError
from weft.models.base import Source
from weft.models.config import Decoder
from weft.models.transformer import Transformer, TransformerState
from weft.nn.config import ALiBi, Attention, Gated, Learned, Position, Relative, RMSNorm, Rotary

VOCAB = 13


class PagedTransformer(Transformer):
    """Keeps what it has read in scattered blocks of three tokens."""

    def start(self, batch: int, max_len: int, source: Source | None = None) -> TransformerState:
        settings = self.config
        width, count = -(-max_len // 3), 400
        blocks = Blocks(
            settings.layers, count, 3, settings.attention.groups, settings.d_head, torch.float32, torch.device("cpu")
        )
        numbers = random.Random(max_len).sample(range(count), count)
        cache = PagedCache(blocks, torch.tensor(numbers[: batch * width]).view(batch, width), numbers[batch * width :])
        return TransformerState(cache, batch, max_len, None, None)  # type: ignore[arg-type]


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


def blocks_of_ones(count: int) -> Blocks:
    """Block n holds nothing but n."""
    blocks = Blocks(2, count, 4, 2, 3, torch.float32, torch.device("cpu"))
    blocks.store += torch.arange(count + 1).view(1, -1, 1, 1, 1, 1)
    return blocks


def test_copies_are_made_in_every_layer_and_leave_the_rest() -> None:
    blocks = blocks_of_ones(6)
    blocks.copy([(1, 4), (2, 0)])
    assert blocks.store[:, :, 0, 0, 0, 0].tolist() == [[2, 1, 2, 3, 1, 5, 6]] * 2
    blocks.copy([])
    assert blocks.store[0, :, 1, 1, 3, 2].tolist() == [2, 1, 2, 3, 1, 5, 6]


def test_padding_goes_nowhere() -> None:
    """What a short row is padded with lands in no block that anybody reads."""
    blocks = blocks_of_ones(6)
    before = blocks.store.clone()
    cache = PagedCache(blocks, torch.tensor([[0, 1], [2, blocks.nowhere]]))
    new = torch.full((2, 2, 7, 3), -1.0)
    keys, values = cache.layer(0, torch.arange(7).expand(2, -1), 0).extend(new, new)
    assert keys.shape == values.shape == (2, 2, 7, 3)
    untouched = [3, 4, 5]
    assert torch.equal(blocks.store[:, untouched], before[:, untouched])
    assert torch.equal(blocks.store[1], before[1])
    assert bool((blocks.store[0, [0, 2]] == -1).all())


def test_a_row_that_is_doubled_without_spare_blocks_is_refused() -> None:
    cache = PagedCache(blocks_of_ones(4), torch.tensor([[0, 1], [2, 3]]))
    with pytest.raises(ModelError, match="0 blocks left, but another row needs 2"):
        cache.reorder(torch.tensor([0, 0, 1]))


def test_blocks_of_rows_that_left_are_used_again() -> None:
    cache = PagedCache(blocks_of_ones(4), torch.tensor([[0, 1], [2, 3]]))
    cache.reorder(torch.tensor([0, 0]))
    assert _content(cache) == [[0, 0], [1, 1]]
    assert sorted(cache.tables.flatten().tolist()) == [0, 1, 2, 3]


def _content(cache: PagedCache) -> list[list[float]]:
    """What the first and the second block of each row hold."""
    held: Tensor = cache.store[0, cache.tables, 0, 0, 0, 0]
    return held.T.tolist()
