"""Low-rank adapters of frozen matrices: their start, their formula, and merging."""

import pytest
import torch

from weft.errors import ConfigError
from weft.models.build import build
from weft.models.presets import gpt, llama, vaswani
from weft.nn.block import block_linears
from weft.nn.config import LoRA
from weft.nn.linear import Linear, LowRank


def layer(heights: list[int], settings: LoRA, bias: bool = True, trained: bool = True) -> tuple[Linear, LowRank]:
    torch.manual_seed(0)
    linear = Linear(10, *heights, bias=bias).double()
    adapter = LowRank(linear, settings)
    if trained:
        torch.nn.init.normal_(adapter.b)
    return linear, adapter


def test_a_new_adapter_changes_nothing_and_freezes_the_layer() -> None:
    linear, adapter = layer([6, 3], LoRA(rank=2), trained=False)
    x = torch.randn(4, 5, 10, dtype=torch.float64)
    assert torch.equal(adapter(x), linear(x))
    assert adapter.weight is linear.weight and adapter.a.abs().max() > 0
    torch.nn.init.normal_(adapter.b)
    adapter(x).square().sum().backward()
    assert {name for name, p in adapter.named_parameters() if p.grad is not None} == {"a", "b"}


@pytest.mark.parametrize("heights", [[9], [6, 3], [5, 2, 2]])
@pytest.mark.parametrize("bias", [True, False])
def test_the_formula(heights: list[int], bias: bool) -> None:
    """W x + (alpha / rank) B A x, with an A and a B for each matrix stacked in W (Hu et al. 2022, eq. 3)."""
    linear, adapter = layer(heights, LoRA(rank=2, alpha=6), bias)
    x = torch.randn(7, 10, dtype=torch.float64)
    stacked = zip(linear.weight.split(heights), adapter.a.split(2), adapter.b.split(heights), strict=True)
    expected = torch.cat([x @ w.T + 3 * (x @ a.T @ b.T) for w, a, b in stacked], dim=-1)
    expected = expected + linear.bias if bias else expected
    assert torch.allclose(adapter(x), expected, atol=1e-12)
    plain = adapter.merge()
    assert type(plain) is Linear and torch.allclose(plain(x), expected, atol=1e-12)
    assert torch.linalg.matrix_rank(adapter.difference()) == min(2 * len(heights), 9)


def test_merging_copies_the_frozen_weight() -> None:
    linear, adapter = layer([9], LoRA(rank=2))
    before, plain = linear.weight.clone(), adapter.merge()
    plain.weight.data.zero_()
    plain.bias.data.zero_()
    assert torch.equal(linear.weight, before) and linear.bias.abs().max() > 0


def test_dropout_affects_the_adapter_alone() -> None:
    linear, adapter = layer([9], LoRA(rank=2, dropout=0.5))
    x = torch.randn(50, 10, dtype=torch.float64)
    with torch.no_grad():
        assert not torch.allclose(adapter(x), adapter(x))
        assert torch.equal(adapter.eval()(x), adapter(x))
        adapter.b.zero_()
        adapter.train()
        assert torch.equal(adapter(x), linear(x))


def test_linear_layers_of_blocks() -> None:
    decoder = block_linears(build(llama(2, 16, 4, d_ff=24, context=16, vocab_size=11, kv_heads=2)))
    assert len(decoder) == 2 * 4
    assert decoder["decoder.blocks.1.attention.qkv"].heights == [16, 8, 8]
    assert decoder["decoder.blocks.0.feedforward.gate_up"].heights == [24, 24]
    plain = block_linears(build(gpt(1, 16, 2, context=8, vocab_size=11)))
    assert plain["decoder.blocks.0.feedforward.up"].heights == [64]
    both = block_linears(build(vaswani(2, 16, 2, d_ff=32, dropout=0.0, vocab_size=11)))
    assert len(both) == 2 * 4 + 2 * 7
    assert both["decoder.blocks.0.cross.kv"].heights == [16, 16]


def test_targets() -> None:
    names = [f"decoder.blocks.{n}.{part}" for n in range(12) for part in ("attention.qkv", "cross.q", "feedforward.up")]
    assert LoRA().match_targets(names) == [name for name in names if "feedforward" not in name]
    some = LoRA(targets=("*.1.feedforward.*", "*.attention.qkv"))
    assert some.match_targets(names[:6]) == [names[0], names[3], names[5]]
    layers = r"there are decoder\.blocks\.\*\.attention\.qkv, decoder\.blocks\.\*\.cross\.q, decoder\.blocks\.\*\.feed"
    with pytest.raises(ConfigError, match=r"adapter\.targets: '\*\.q_proj' matches no layer; " + layers):
        LoRA(targets=("*.attention.*", "*.q_proj")).match_targets(names)
