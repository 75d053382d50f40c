"""Latent attention (DeepSeek) and attention sinks (GPT-OSS): fused paths against the formula, steps against whole
passes, and what the cache holds."""

from typing import Any

import pytest
import torch
from torch import Tensor

from weft.config import validate
from weft.costs.count import count
from weft.costs.memory import cache_bytes
from weft.decode.engine.paging import BlockStore, block_bytes
from weft.errors import ConfigError
from weft.models.build import build
from weft.models.config import Decoder
from weft.nn import attention_paths
from weft.nn.attention import LatentAttention
from weft.nn.attention_paths import Scoring, attend
from weft.nn.mask import AttentionMask, Mask
from weft.nn.position import Position
from weft.nn.scaled_dot_product import QKV, reference_attention

LATENT = {"rank": 12, "query_rank": 10}


def decoder(attention: dict[str, Any], **changes: Any) -> Decoder:
    tree = {
        "vocab_size": 61, "d_model": 32, "layers": 2, "context": 64, "norm": {"kind": "rms"},
        "attention": {"heads": 4, **attention}, "feedforward": {"kind": "gated", "d_ff": 48},
        "position": {"kind": "rotary", "fraction": 1 / 3 if "latent" in attention else 1.0}, **changes,
    }  # fmt: skip
    return validate(Decoder, tree, "test")


VARIANTS: dict[str, Decoder] = {
    "latent": decoder({"latent": LATENT, "d_head": 12, "d_v": 9}),
    "latent, one query matrix, adjacent pairs": decoder(
        {"latent": {"rank": 12}, "d_head": 12, "bias": "all"},
        position={"kind": "rotary", "fraction": 0.5, "pairs": "adjacent"},
    ),
    "sinks": decoder({"sinks": True, "kv_heads": 2}),
    "sinks and windows": decoder({"sinks": True}, pattern=[{"window": 5}, {}]),
    "sinks, softcap": decoder({"sinks": True, "softcap": 5.0}),
    "latent and sinks": decoder({"latent": LATENT, "d_head": 12, "sinks": True}),
}


def built(settings: Decoder) -> Any:
    torch.manual_seed(3)
    model = build(settings).eval()
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight)
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_equal_the_whole_pass(name: str) -> None:
    model = built(VARIANTS[name])
    tokens = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(tokens)
        state = model.start(3, 20)
        parts = [model.step(tokens[:, :7], state), model.step(tokens[:, 7:11], state)]
        parts += [model.step(tokens[:, n : n + 1], state) for n in range(11, 17)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_counted_parameters_are_those_of_the_model(name: str) -> None:
    assert count(VARIANTS[name]).parameters == sum(weight.numel() for weight in built(VARIANTS[name]).parameters())


def test_the_cache_holds_one_vector_per_token() -> None:
    settings = VARIANTS["latent"]
    model = built(settings)
    width = LATENT["rank"] + 4
    assert isinstance(model.decoder.blocks[0].attention, LatentAttention)
    store = model.start(2, 8).cache.store
    assert store.shape == (2, 1, 2, 1, 8, width)
    assert cache_bytes(settings, "fp32") == store.numel() * 4 // (2 * 8) == 2 * width * 4
    paged = BlockStore(model, 1, 16)
    assert paged.data[:, :1].numel() * 4 == block_bytes(model, 16)


def random_qkv(kv_heads: int, queries: int, keys: int) -> QKV:
    torch.manual_seed(0)
    q = torch.randn(2, 4, queries, 8, requires_grad=True)
    return QKV(q, *(torch.randn(2, kv_heads, keys, 8, requires_grad=True) for _ in "kv"))


def attended(qkv: QKV, mask: Mask, sinks: Tensor, p: float = 0.0) -> Tensor:
    keys, queries = torch.arange(qkv.k.shape[2])[None], torch.arange(qkv.q.shape[2])[None] + mask.offset
    limits = AttentionMask(mask, Position(), queries, keys=keys)
    return attend(qkv, limits, Scoring(0.3, sinks=sinks, p=p))


@pytest.mark.parametrize("mask", [Mask(True), Mask(False), Mask(True, window=3), Mask(True, offset=4)])
@pytest.mark.parametrize("dense", [True, False])
def test_fused_attention_with_sinks_equals_the_formula(
    mask: Mask, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not dense:
        monkeypatch.setattr(attention_paths, "MAX_DENSE_ENTRIES", 8)
        monkeypatch.setattr(attention_paths, "QUERY_BLOCK", 4)
    qkv, sinks = random_qkv(2, 9, 9 + mask.offset), torch.randn(4, requires_grad=True)
    visible = mask.dense(slice(0, 9), slice(0, 9 + mask.offset), torch.device("cpu"))
    expected, probabilities = reference_attention(qkv, 0.3, visible, sinks=sinks)
    assert (probabilities.sum(-1) < 1).all()
    out, weights = attended(qkv, mask, sinks), torch.randn_like(expected)
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad((expected * weights).sum(), [*qkv, sinks], retain_graph=True)
    for got, want in zip(torch.autograd.grad((out * weights).sum(), [*qkv, sinks]), wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_dropout_keeps_sinks() -> None:
    qkv, sinks = random_qkv(4, 6, 6), torch.full((4,), 30.0)
    assert attended(qkv, Mask(True), sinks, p=0.5).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent": LATENT, "d_head": 12, "kv_heads": 2}, "leave out kv_heads"),
        ({"latent": LATENT, "d_head": 12, "qk_norm": {"kind": "rms"}}, "leave out kv_heads, qk_norm"),
        ({"latent": LATENT, "d_head": 1}, "position.fraction|rotary positions"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder(changes)
    with pytest.raises(ConfigError, match="needs rotary positions of a part"):
        decoder({"latent": LATENT}, position={"kind": "rotary"})
