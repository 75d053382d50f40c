"""The fast path equals the formula, under every mask, shape by shape."""

from typing import Any

import pytest
import torch
from torch import Tensor

from weft.nn import attention_paths
from weft.nn import mask as attention_mask
from weft.nn.attention_paths import Dropping, Scoring, by_formula, dropped_attention, fast_attention, load_kernels
from weft.nn.dropout import RowRng, row_keys
from weft.nn.mask import AttentionMask, Mask
from weft.nn.position import Position, build
from weft.nn.position_config import ALiBi, NoPosition, Sizes, T5Bias
from weft.nn.scaled_dot_product import QKV, reference_attention

B, H, K, T, D = 3, 4, 2, 37, 8
PARTS = torch.Generator().manual_seed(0)
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 27, [0] * 37, [0] + [1] * 5 + [2] * 31])
REAL = torch.arange(T)[None] < torch.tensor([37, 20, 1])[:, None]
MASKS: dict[str, Mask] = {
    "everything": Mask(causal=False),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=5),
    "window on both sides": Mask(causal=False, window=4),
    "padding": Mask(causal=False, real=REAL),
    "padding and causal": Mask(causal=True, real=REAL),
    "prefix": Mask(causal=True, prefix=torch.tensor([5, 0, 37])),
    "documents": Mask(causal=True, documents=(DOCUMENTS, DOCUMENTS)),
    "documents in an encoder": Mask(causal=False, documents=(DOCUMENTS, DOCUMENTS), real=REAL),
    "documents and window": Mask(causal=True, window=6, documents=(DOCUMENTS, DOCUMENTS)),
}
POSITIONS: dict[str, Any] = {"none": NoPosition(), "alibi": ALiBi(), "t5": T5Bias(buckets=8, max_distance=16)}


def tensors() -> list[Tensor]:
    shapes = ((B, H, T, D), (B, K, T, D), (B, K, T, D))
    return [torch.randn(shape, generator=PARTS, requires_grad=True) for shape in shapes]


def masked(name: str, position: str) -> AttentionMask:
    module = build(POSITIONS[position], Sizes(H * D, H, D, 64, MASKS[name].causal, layers=1))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    places = torch.arange(T)[None]
    return AttentionMask(MASKS[name], module, places, places)


def by_hand(mask: Mask) -> Tensor:
    """The mask (B, T, T), entry by entry, from its description."""
    seen = torch.zeros(B, T, T, dtype=torch.bool)
    for b in range(B):
        for q in range(T):
            for k in range(T):
                ok = k <= q or not mask.causal
                if mask.window is not None:
                    ok = ok and abs(q - k) < mask.window
                if mask.prefix is not None:
                    ok = ok or k < int(mask.prefix[b])
                if mask.real is not None:
                    ok = ok and bool(mask.real[b, k])
                if mask.documents is not None:
                    ok = ok and bool(mask.documents[0][b, q] == mask.documents[1][b, k])
                seen[b, q, k] = ok
    return seen


# ---- the last tokens of a text, behind what a cache holds

CONTINUED: dict[str, Mask] = {
    "plain": Mask(causal=True, offset=T - 9),
    "window": Mask(causal=True, window=5, offset=T - 9),
    "wide window": Mask(causal=True, window=30, offset=T - 9),
}


@pytest.mark.parametrize("blocks", [False, True], ids=["at once", "by blocks of queries"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CONTINUED)
def test_the_last_queries_get_what_they_get_among_all(
    name: str, grad: bool, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks:
        monkeypatch.setattr(attention_paths, "MAX_DENSE_ENTRIES", 1)
        monkeypatch.setattr(attention_paths, "QUERY_BLOCK", 4)
    q, k, v = tensors()
    none, places = Position(), torch.arange(T)[None]
    whole = AttentionMask(Mask(causal=True, window=CONTINUED[name].window), none, places, places)
    last = AttentionMask(CONTINUED[name], none, places[:, -9:], places)
    with torch.set_grad_enabled(grad):
        found = fast_attention(QKV(q[:, :, -9:], k, v), D**-0.5, last)
    torch.testing.assert_close(found, fast_attention(QKV(q, k, v), D**-0.5, whole)[:, :, -9:], atol=2e-6, rtol=1e-5)
    given = Mask(causal=True, window=CONTINUED[name].window, places=places[:, -9:])
    assert torch.equal(last.dense(), AttentionMask(given, none, places[:, -9:], places).dense())


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_kernel_draws_the_triangle_from_its_end(kv_heads: int) -> None:
    shapes = ((8, 9), (kv_heads, 40), (kv_heads, 40))
    q, k, v = (torch.randn(2, h, t, 64, device="cuda").bfloat16() for h, t in shapes)
    assert attention_paths._flashes(q)
    none, places = Position(), torch.arange(40, device="cuda")[None]
    mask = AttentionMask(Mask(causal=True, offset=31), none, places[:, -9:], places)
    expected, _ = reference_attention(QKV(q.float(), k.float(), v.float()), 0.125, mask.dense())
    torch.testing.assert_close(fast_attention(QKV(q, k, v), 0.125, mask).float(), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("name", MASKS)
def test_the_dense_mask_is_as_described(name: str) -> None:
    dense = MASKS[name].dense(slice(0, T), slice(0, T), torch.device("cpu"))
    assert torch.equal(dense.expand(B, 1, T, T)[:, 0], by_hand(MASKS[name]))


@pytest.mark.parametrize("blocks", [False, True], ids=["at once", "by blocks of queries"])
def test_capped_scores(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if blocks:
        monkeypatch.setattr(attention_paths, "MAX_DENSE_ENTRIES", 1)
        monkeypatch.setattr(attention_paths, "QUERY_BLOCK", 7)
    q, k, v = tensors()
    where = masked("causal", "none")
    found = by_formula(QKV(q, k, v), where, Scoring(1.0, softcap=0.5))
    repeats = q.shape[1] // k.shape[1]
    scores = 0.5 * torch.tanh(q @ k.repeat_interleave(repeats, 1).mT / 0.5)
    scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), float("-inf"))
    torch.testing.assert_close(found, scores.softmax(-1) @ v.repeat_interleave(repeats, 1), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("blocks", [False, True], ids=["at once", "by blocks of queries"])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", MASKS)
def test_fast_equals_reference(name: str, position: str, blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if blocks:
        monkeypatch.setattr(attention_paths, "MAX_DENSE_ENTRIES", 1)
        monkeypatch.setattr(attention_paths, "QUERY_BLOCK", 7)
    q, k, v = tensors()
    where = masked(name, position)
    fast = fast_attention(QKV(q, k, v), D**-0.5, where)
    slow, probabilities = reference_attention(QKV(q, k, v), D**-0.5, where.dense())
    torch.testing.assert_close(fast, slow, atol=2e-6, rtol=1e-5)
    sums = probabilities.sum(-1)
    assert bool((((sums - 1).abs() < 1e-5) | (sums == 0)).all())
    upstream = torch.randn(fast.shape, generator=PARTS)
    for mine, other in zip(
        torch.autograd.grad(fast, (q, k, v), upstream),
        torch.autograd.grad(slow, (q, k, v), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    q, k, v = tensors()
    nothing = Mask(causal=False, real=torch.zeros(B, T, dtype=torch.bool))
    where = AttentionMask(nothing, masked("causal", "none").position, torch.arange(T)[None], torch.arange(T)[None])
    assert reference_attention(QKV(q, k, v), 1.0, where.dense())[0].abs().max() == 0
    assert fast_attention(QKV(q, k, v), 1.0, where).abs().max() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
def test_flex_equals_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_mask, "MIN_FLEX_ENTRIES", 0)  # also for so short a sequence
    where = MASKS[name]
    moved = Mask(
        causal=where.causal,
        window=where.window,
        prefix=None if where.prefix is None else where.prefix.cuda(),
        real=None if where.real is None else where.real.cuda(),
        documents=None if where.documents is None else (DOCUMENTS.cuda(), DOCUMENTS.cuda()),
    )
    q, k, v = (torch.randn(B, h, T, 16, device="cuda", requires_grad=True) for h in (H, K, K))
    places = torch.arange(T, device="cuda")[None]
    there = AttentionMask(moved, Position(), places, places)
    fast = fast_attention(QKV(q, k, v), 0.25, there)
    slow, _ = reference_attention(QKV(q, k, v), 0.25, there.dense())
    torch.testing.assert_close(fast, slow, atol=2e-3, rtol=2e-3)
    upstream = torch.randn_like(fast)
    for mine, other in zip(
        torch.autograd.grad(fast, (q, k, v), upstream),
        torch.autograd.grad(slow, (q, k, v), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, atol=5e-3, rtol=5e-3)


@pytest.mark.gpu
def test_padding_of_any_shape_equals_the_reference() -> None:
    """Batches of rows come in many shapes, one after the other; some are long enough for FlexAttention."""
    for rows, time in [(3, 17), (5, 33), (2, 150), (2, 700), (4, 91), (3, 640), (2, 777)]:
        real = torch.arange(time, device="cuda") < torch.randint(1, time + 1, (rows, 1), device="cuda")
        q, k, v = (torch.randn(rows, h, time, 16, device="cuda") for h in (H, K, K))
        places = torch.arange(time, device="cuda")[None]
        mask = Mask(causal=False, real=real)
        there = AttentionMask(mask, Position(), places, places)
        fast = fast_attention(QKV(q, k, v), 0.25, there)
        torch.testing.assert_close(
            fast, reference_attention(QKV(q, k, v), 0.25, there.dense())[0], atol=2e-3, rtol=2e-3
        )


@pytest.mark.gpu
@pytest.mark.parametrize("d_head", [24, 64, 128])
@pytest.mark.parametrize(
    "seen",
    [
        {"causal": False},
        {"causal": True},
        {"causal": True, "window": 40},
        {"causal": False, "window": 40},
        {"causal": False, "real": True},
        {"causal": True, "documents": True},
    ],
)
def test_kernels_drop_what_the_formula_drops(seen: dict[str, Any], d_head: int) -> None:
    """The same output and gradients, from the same draws, though the kernels never hold the probabilities."""
    rows, time, kv_heads = 3, 200, 2
    if seen.get("real"):
        seen = seen | {"real": torch.arange(time, device="cuda") < torch.tensor([[200], [150], [3]], device="cuda")}
    if seen.get("documents"):
        documents = (torch.rand(rows, time, device="cuda") < 0.03).cumsum(1)
        seen = seen | {"documents": (documents, documents)}
    places = torch.arange(time, device="cuda")[None]
    there = AttentionMask(Mask(**seen), Position(), places, places)
    sizes = {"q": 4, "k": kv_heads, "v": kv_heads}
    given = [torch.randn(rows, time, heads, d_head, device="cuda").transpose(1, 2) for heads in sizes.values()]
    upstream = torch.randn(rows, 4, time, d_head, device="cuda")

    def passes(dtype: torch.dtype, kernels: bool) -> list[torch.Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in given]
        dropping = Dropping(0.25, RowRng(row_keys(5, torch.arange(rows, device="cuda"))), kernels=kernels)
        out = dropped_attention(QKV(*leaves), there, Scoring(d_head**-0.5, dropping=dropping))
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]

    assert load_kernels(), "Triton is missing"
    exact = passes(torch.float32, kernels=False)
    for found, expected in zip(passes(torch.bfloat16, kernels=True), exact, strict=True):
        assert (found.float() - expected).norm() <= 0.02 * expected.norm()
    first = passes(torch.bfloat16, kernels=True)
    for _ in range(5):  # a product that reads what is being overwritten differs from time to time
        again = passes(torch.bfloat16, kernels=True)
        assert all(torch.equal(*two) for two in zip(first, again, strict=True))
