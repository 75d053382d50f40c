"""The fast paths equal the formula, under every mask and in every shape."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.nn import attention_paths
from weft.nn import mask as attention_mask
from weft.nn.attention_paths import Scoring, attend_by_formula, dropout_attention, fast_attention, load_kernels
from weft.nn.dropout import RowRng, row_keys
from weft.nn.mask import AttentionMask, Mask
from weft.nn.position import Position, build
from weft.nn.position_config import ALiBi, NoPosition, Sizes, T5Bias
from weft.nn.scaled_dot_product import QKV, reference_attention

B, H, K, T, D = 3, 4, 2, 37, 8
RNG = torch.Generator().manual_seed(0)
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 27, [0] * 37, [0] + [1] * 5 + [2] * 31])
REAL = torch.arange(T)[None] < torch.tensor([37, 20, 1])[:, None]
MASKS: dict[str, Mask] = {
    "everything": Mask(causal=False),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=5),
    "window on both sides": Mask(causal=False, window=4),
    "padding": Mask(causal=False, real=REAL),
    "padding and causal": Mask(causal=True, real=REAL),
    "documents": Mask(causal=True, documents=(DOCUMENTS, DOCUMENTS)),
    "documents in an encoder": Mask(causal=False, documents=(DOCUMENTS, DOCUMENTS), real=REAL),
    "documents and window": Mask(causal=True, window=6, documents=(DOCUMENTS, DOCUMENTS)),
}
POSITIONS: dict[str, Any] = {"none": NoPosition(), "alibi": ALiBi(), "t5": T5Bias(buckets=8, max_distance=16)}


def heads(device: str = "cpu", rows: int = B, time: int = T, d_head: int = D) -> QKV:
    generator = RNG if device == "cpu" else None
    shapes = ((rows, count, time, d_head) for count in (H, K, K))
    return QKV(*(torch.randn(shape, generator=generator, device=device, requires_grad=True) for shape in shapes))


def masked(mask: Mask, position: Position | None = None, device: str = "cpu", time: int = T) -> AttentionMask:
    indices = torch.arange(time, device=device)[None]
    return AttentionMask(mask, position or Position(), indices, keys=indices)


def check_attention(qkv: QKV, mask: AttentionMask, forward: float = 2e-6, backward: float = 1e-5) -> Tensor:
    """Compare output and gradients of the fast path with the formula's; return the formula's probabilities."""
    scale = qkv.q.shape[-1] ** -0.5
    fast = fast_attention(qkv, scale, mask)
    slow, probabilities = reference_attention(qkv, scale, mask.dense())
    torch.testing.assert_close(fast, slow, atol=forward, rtol=max(forward, 1e-5))
    upstream = torch.randn_like(fast)
    gradients = (torch.autograd.grad(out, qkv, upstream) for out in (fast, slow))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=backward, rtol=max(backward, 1e-4))
    return probabilities


@pytest.fixture(params=[None, 7], ids=["in one call", "by blocks of queries"])
def query_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(attention_paths, "MAX_DENSE_ENTRIES", 1)
        monkeypatch.setattr(attention_paths, "QUERY_BLOCK", request.param)


def by_definition(mask: Mask) -> Tensor:
    """Mask (B, T, T), entry by entry."""
    seen = torch.zeros(B, T, T, dtype=torch.bool)
    for b, q, k in torch.cartesian_prod(torch.arange(B), torch.arange(T), torch.arange(T)).tolist():
        visible = k <= q or not mask.causal
        if mask.window is not None:
            visible = visible and abs(q - k) < mask.window
        if mask.real is not None:
            visible = visible and bool(mask.real[b, k])
        if mask.documents is not None:
            visible = visible and bool(mask.documents[0][b, q] == mask.documents[1][b, k])
        seen[b, q, k] = visible
    return seen


@pytest.mark.parametrize("name", MASKS)
def test_dense_mask_follows_the_definition(name: str) -> None:
    dense = MASKS[name].dense(slice(0, T), slice(0, T), torch.device("cpu"))
    assert torch.equal(dense.expand(B, 1, T, T)[:, 0], by_definition(MASKS[name]))


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.usefixtures("query_block")
def test_fast_equals_reference(name: str, position: str) -> None:
    sizes = Sizes(d_model=H * D, heads=H, d_head=D, context=64, causal=MASKS[name].causal, layers=1)
    module = build(POSITIONS[position], sizes)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    sums = check_attention(heads(), masked(MASKS[name], module)).sum(-1)
    assert bool((((sums - 1).abs() < 1e-5) | (sums == 0)).all())


@pytest.mark.parametrize("d_v", [3, 2 * D])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.usefixtures("query_block")
def test_values_of_another_width_equal_the_reference(name: str, d_v: int) -> None:
    qkv = heads()
    check_attention(qkv._replace(v=torch.randn(*qkv.v.shape[:-1], d_v, requires_grad=True)), masked(MASKS[name]))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.usefixtures("query_block")
def test_the_last_queries_attend_as_among_all(window: int | None, grad: bool) -> None:
    qkv, indices = heads(), torch.arange(T)[None]
    cached = Mask(causal=True, window=window, offset=T - 9)
    last = AttentionMask(cached, Position(), indices[:, -9:], keys=indices)
    with torch.set_grad_enabled(grad):
        found = fast_attention(QKV(qkv.q[:, :, -9:], qkv.k, qkv.v), D**-0.5, last)
    whole = fast_attention(qkv, D**-0.5, masked(Mask(causal=True, window=window)))
    torch.testing.assert_close(found, whole[:, :, -9:], atol=2e-6, rtol=1e-5)
    explicit = replace(cached, offset=0, indices=indices[:, -9:])
    expected = AttentionMask(explicit, Position(), indices[:, -9:], keys=indices).dense()
    assert expected is not None and torch.equal(last.dense(), expected)  # type: ignore[arg-type]


@pytest.mark.usefixtures("query_block")
def test_softcapped_scores() -> None:
    qkv = heads()
    found = attend_by_formula(qkv, masked(Mask(causal=True)), Scoring(1.0, softcap=0.5))
    q, k, v = qkv.repeat_kv()
    scores = 0.5 * torch.tanh(q @ k.mT / 0.5)
    scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), float("-inf"))
    torch.testing.assert_close(found, scores.softmax(-1) @ v, atol=2e-6, rtol=1e-5)


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    qkv, mask = heads(), masked(Mask(causal=False, real=torch.zeros(B, T, dtype=torch.bool)))
    assert reference_attention(qkv, 1.0, mask.dense())[0].abs().max() == 0
    assert fast_attention(qkv, 1.0, mask).abs().max() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_flash_attention_aligns_the_triangle_with_the_last_key(kv_heads: int) -> None:
    shapes = ((8, 9), (kv_heads, 40), (kv_heads, 40))
    qkv = QKV(*(torch.randn(2, count, time, 64, device="cuda").bfloat16() for count, time in shapes))
    assert attention_paths._fits_flash_attention(qkv)
    assert not attention_paths._fits_flash_attention(qkv._replace(v=qkv.v[..., :32]))
    indices = torch.arange(40, device="cuda")[None]
    mask = AttentionMask(Mask(causal=True, offset=31), Position(), indices[:, -9:], keys=indices)
    expected, _ = reference_attention(QKV(*(x.float() for x in qkv)), 0.125, mask.dense())
    torch.testing.assert_close(fast_attention(qkv, 0.125, mask).float(), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
def test_flex_attention_equals_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_mask, "MIN_FLEX_ENTRIES", 0)  # these sequences are short
    mask = MASKS[name]
    documents = None if mask.documents is None else (DOCUMENTS.cuda(), DOCUMENTS.cuda())
    on_gpu = replace(mask, real=None if mask.real is None else mask.real.cuda(), documents=documents)
    check_attention(heads("cuda", d_head=16), masked(on_gpu, device="cuda"), forward=2e-3, backward=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "time"), [(3, 17), (5, 33), (2, 150), (2, 700), (4, 91), (3, 640), (2, 777)])
def test_padding_of_any_shape_equals_reference(rows: int, time: int) -> None:
    """Batches come in many shapes; some are long enough for FlexAttention."""
    real = torch.arange(time, device="cuda") < torch.randint(1, time + 1, (rows, 1), device="cuda")
    qkv, mask = heads("cuda", rows, time, 16), masked(Mask(causal=False, real=real), device="cuda", time=time)
    expected = reference_attention(qkv, 0.25, mask.dense())[0]
    torch.testing.assert_close(fast_attention(qkv, 0.25, mask), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("d_head", [24, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("limit", [None, "window", "real", "documents"])
def test_kernels_drop_what_the_formula_drops(causal: bool, limit: str | None, d_head: int) -> None:
    """Output and gradients come from the same draws, though the kernels never hold the probabilities."""
    rows, time = 3, 200
    real = torch.arange(time, device="cuda") < torch.tensor([[200], [150], [3]], device="cuda")
    documents = (torch.rand(rows, time, device="cuda") < 0.03).cumsum(1)
    limits: dict[str | None, Any] = {"window": 40, "real": real, "documents": (documents, documents)}
    where = masked(Mask(causal, **{limit: limits[limit]} if limit else {}), device="cuda", time=time)
    inputs = [torch.randn(rows, time, count, d_head, device="cuda").transpose(1, 2) for count in (H, K, K)]
    upstream = torch.randn(rows, H, time, d_head, device="cuda")

    def run(dtype: torch.dtype, kernels: bool) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        rng = RowRng(row_keys(5, torch.arange(rows, device="cuda")))
        out = dropout_attention(QKV(*leaves), where, Scoring(d_head**-0.5, p=0.25, rng=rng, kernels=kernels))
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]

    assert load_kernels(), "Triton is missing"
    exact, first = run(torch.float32, kernels=False), run(torch.bfloat16, kernels=True)
    for found, expected in zip(first, exact, strict=True):
        assert (found.float() - expected).norm() <= 0.02 * expected.norm()
    for _ in range(5):  # a product that reads overwritten operands would differ between runs
        assert all(torch.equal(*pair) for pair in zip(first, run(torch.bfloat16, kernels=True), strict=True))
