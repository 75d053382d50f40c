"""A low-rank addition beside a frozen matrix: where it begins, what it adds, and how it is merged."""

import pytest
import torch

from weft.errors import ConfigError
from weft.models.build import build
from weft.models.presets import gpt, llama, vaswani
from weft.nn.block import block_linears
from weft.nn.config import LoRA
from weft.nn.linear import Linear, LowRank


def layer(heights: list[int], settings: LoRA, bias: bool = True) -> tuple[Linear, LowRank]:
    torch.manual_seed(0)
    linear = Linear(10, *heights, bias=bias).double()
    return linear, LowRank(linear, settings)


def fill(adapter: LowRank) -> None:
    """A and B as if they had been trained."""
    with torch.no_grad():
        adapter.b.normal_()


def test_it_begins_as_the_layer_was() -> None:
    linear, adapter = layer([6, 3], LoRA(rank=2))
    x = torch.randn(4, 5, 10, dtype=torch.float64)
    assert torch.equal(adapter(x), linear(x))
    assert adapter.weight is linear.weight
    assert adapter.a.abs().max() > 0
    assert not adapter.weight.requires_grad
    assert adapter.bias is not None
    assert not adapter.bias.requires_grad


@pytest.mark.parametrize("heights", [[9], [6, 3], [5, 2, 2]])
@pytest.mark.parametrize("bias", [True, False])
def test_the_formula(heights: list[int], bias: bool) -> None:
    """W x + (alpha / rank) B A x, with an A and a B for each of the matrices that lie in W (Hu et al. 2022, eq. 3)."""
    linear, adapter = layer(heights, LoRA(rank=2, alpha=6), bias)
    fill(adapter)
    x = torch.randn(7, 10, dtype=torch.float64)
    expected = []
    row = 0
    for number, height in enumerate(heights):
        a, b = adapter.a[2 * number : 2 * number + 2], adapter.b[row : row + height]
        w = linear.weight[row : row + height]
        expected.append(x @ w.T + 3 * (x @ a.T @ b.T))
        row += height
    together = torch.cat(expected, dim=-1)
    if linear.bias is not None:
        together = together + linear.bias
    assert torch.allclose(adapter(x), together, atol=1e-12)
    plain = adapter.merge()
    assert type(plain) is Linear
    assert torch.allclose(plain(x), together, atol=1e-12)
    assert torch.linalg.matrix_rank(adapter.difference()) == min(2 * len(heights), 9)


def test_merging_leaves_the_frozen_weight_alone() -> None:
    linear, adapter = layer([9], LoRA(rank=2))
    before = linear.weight.clone()
    fill(adapter)
    plain = adapter.merge()
    plain.weight.data.zero_()
    plain.bias.data.zero_()
    assert torch.equal(linear.weight, before)
    assert linear.bias.abs().max() > 0


def test_gradients_reach_a_and_b_alone() -> None:
    _, adapter = layer([6, 3], LoRA(rank=2))
    fill(adapter)
    adapter(torch.randn(4, 10, dtype=torch.float64)).square().sum().backward()
    assert {name for name, p in adapter.named_parameters() if p.grad is not None} == {"a", "b"}


def test_dropout_falls_on_the_addition_alone() -> None:
    linear, adapter = layer([9], LoRA(rank=2, dropout=0.5))
    fill(adapter)
    x = torch.randn(50, 10, dtype=torch.float64)
    with torch.no_grad():
        ones, others = adapter(x) - linear(x), adapter(x) - linear(x)
        assert not torch.allclose(ones, others)
        adapter.eval()
        assert torch.equal(adapter(x), adapter(x))
        adapter.b.zero_()
        adapter.train()
        assert torch.equal(adapter(x), linear(x))


def test_the_layers_of_blocks() -> None:
    decoder = block_linears(build(llama(2, 16, 4, 24, 16, vocab_size=11, kv_heads=2)))
    assert len(decoder) == 2 * 4
    assert decoder["decoder.blocks.1.attention.qkv"].heights == [16, 8, 8]
    assert decoder["decoder.blocks.0.feedforward.gate_up"].heights == [24, 24]
    assert block_linears(build(gpt(1, 16, 2, 8, 11)))["decoder.blocks.0.feedforward.up"].heights == [64]
    both = block_linears(build(vaswani(2, 16, 2, 32, 0.0, vocab_size=11)))
    assert len(both) == 2 * 4 + 2 * 7
    assert both["decoder.blocks.0.cross.kv"].heights == [16, 16]


def test_targets() -> None:
    names = [f"decoder.blocks.{n}.{part}" for n in range(12) for part in ("attention.qkv", "cross.q", "feedforward.up")]
    assert LoRA().chosen(names) == [name for name in names if "feedforward" not in name]
    assert LoRA(targets=("*.1.feedforward.*", "*.attention.qkv")).chosen(names[:6]) == [names[0], names[3], names[5]]
    there = r"there are decoder\.blocks\.\*\.attention\.qkv, decoder\.blocks\.\*\.cross\.q, decoder\.blocks\.\*\.feed"
    with pytest.raises(ConfigError, match=r"adapter\.targets: '\*\.q_proj' matches no layer; " + there):
        LoRA(targets=("*.attention.*", "*.q_proj")).chosen(names)
