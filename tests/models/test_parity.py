"""The 2017 Transformer against torch.nn.Transformer; tests/interop/test_hf.py compares all other families."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.data.batch import Source
from weft.interop.weight_map import NameRule, conversions, module, tensor, their_shapes, to_ours
from weft.models.build import build
from weft.models.presets import vaswani

VOCAB, D, HEADS, FF = 61, 32, 4, 48


def load(ours: Any, theirs: Mapping[str, Tensor], rules: Iterable[NameRule]) -> None:
    """Fill `ours` by a table of names. Every parameter must be named, and every name must exist."""
    table = conversions(rules, ours.config)
    used = {name: tuple(theirs[name].shape) for name in their_shapes(table)}
    weights = to_ours(table, used, theirs.__getitem__, location="theirs")
    ours.load_state_dict({name: make() for name, make in weights.items()})


def randomise(model: nn.Module) -> None:
    """Draw weights, gains and biases for which a swap or an omission would show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.15)
            if "norm" in name.lower() or "ln_" in name:
                parameter.add_(1.0 if name.endswith("weight") else 0.0)


def torch_layers(side: str, last: str) -> tuple[NameRule, ...]:
    """Names of torch.nn.Transformer; its last norm is norm2 or norm3."""
    block, layer = f"{side}.blocks.{{layer}}", f"{side}.layers.{{layer}}"
    return (
        *(tensor(f"{block}.attention.qkv.{kind}", f"{layer}.self_attn.in_proj_{kind}") for kind in ("weight", "bias")),
        *module(f"{block}.attention.out", f"{layer}.self_attn.out_proj"),
        *module(f"{block}.attention_skip.norm", f"{layer}.norm1"),
        *module(f"{block}.cross.q", "q{layer}"),
        *module(f"{block}.cross.kv", "kv{layer}"),
        *module(f"{block}.cross.out", f"{layer}.multihead_attn.out_proj"),
        *module(f"{block}.cross_skip.norm", f"{layer}.norm2"),
        *module(f"{block}.feedforward.up", f"{layer}.linear1"),
        *module(f"{block}.feedforward.down", f"{layer}.linear2"),
        *module(f"{block}.feedforward_skip.norm", f"{layer}.{last}"),
    )


TORCH = (tensor("embedding.weight", "table"), *torch_layers("encoder", "norm2"), *torch_layers("decoder", "norm3"))


def test_the_2017_transformer_in_torch() -> None:
    """Post-norm encoder–decoder with ReLU against torch.nn.Transformer, without its additional last norms."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"d_model": D, "nhead": HEADS, "dim_feedforward": FF, "dropout": 0.0, "batch_first": True}
    theirs = nn.Transformer(
        **shape,
        custom_encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(**shape), 2, enable_nested_tensor=False),
        custom_decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(**shape), 2),
    )
    randomise(theirs)
    ours: Any = build(vaswani(2, D, HEADS, d_ff=FF, dropout=0.0, vocab_size=VOCAB))
    table = nn.Parameter(torch.randn(VOCAB, D) * 0.15)
    tensors = {**theirs.state_dict(), "table": table.detach()}
    for i in range(2):  # torch has q, k and v of the cross-attention in one matrix
        for kind in ("weight", "bias"):
            packed = tensors[f"decoder.layers.{i}.multihead_attn.in_proj_{kind}"]
            tensors |= {f"q{i}.{kind}": packed[:D], f"kv{i}.{kind}": packed[D:]}
    load(ours, tensors, TORCH)
    source, target = torch.randint(1, VOCAB, (3, 11)), torch.randint(1, VOCAB, (3, 7))
    mask = torch.arange(11)[None] < torch.tensor([11, 6, 3])[:, None]
    mine = ours(target, source=Source(source, mask))
    embed, indices = ours.encoder.position.embed, torch.arange(11)[None]
    left, right = embed(table[source] * D**0.5, indices), embed(table[target] * D**0.5, indices[:, :7])
    causal = torch.ones(7, 7).triu(1).bool()
    features = theirs(left, right, tgt_mask=causal, src_key_padding_mask=~mask, memory_key_padding_mask=~mask)
    expected = features @ table.mT
    assert (mine - expected).abs().max() <= 1e-5
    upstream = torch.randn_like(expected) / expected.numel() ** 0.5
    mine.backward(upstream)
    expected.backward(upstream)
    assert (ours.embedding.weight.grad - table.grad).abs().max() <= 1e-5  # depends on everything above it
