"""F26: softmax(QKᵀ/√d_k)V; rows sum to 1; any two tokens are one step apart; each head works on d/h dimensions.

python -m pytest tests/lectures/test_f26_attention.py
"""

import math

import torch

from weft.nn.attention import SelfAttention
from weft.nn.attention_paths import fast_attention
from weft.nn.config import Attention
from weft.nn.mask import AttentionMask, Mask
from weft.nn.position import Position
from weft.nn.scaled_dot_product import QKV, reference_attention

T, D, H = 9, 24, 4


def no_mask(time: int) -> AttentionMask:
    positions = torch.arange(time)[None]
    return AttentionMask(Mask(causal=False), Position(), positions, keys=positions)


def test_formula_at_float64() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, H, T, D // H, dtype=torch.float64)
    scores = q @ k.transpose(-1, -2) / math.sqrt(D // H)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    out, probabilities = reference_attention(QKV(q, k, v), (D // H) ** -0.5)
    torch.testing.assert_close((out, probabilities), (weights @ v, weights), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, H, T, dtype=torch.float64))
    torch.testing.assert_close(fast_attention(QKV(q, k, v), (D // H) ** -0.5, no_mask(T)), weights @ v)


def test_each_head_works_on_its_own_dimensions() -> None:
    """Concat(head₁ … head_h)W_O with head_i on d/h coordinates, head by head."""
    torch.manual_seed(0)
    module = SelfAttention(Attention(heads=H), D, D // H).double()
    x = torch.randn(2, T, D, dtype=torch.float64)
    w_q, w_k, w_v = module.qkv.weight.split(D)
    heads = []
    for i in range(H):
        rows = slice(i * D // H, (i + 1) * D // H)
        q, k, v = x @ w_q[rows].T, x @ w_k[rows].T, x @ w_v[rows].T
        heads.append((q @ k.transpose(-1, -2) / math.sqrt(D // H)).softmax(-1) @ v)
    expected = torch.cat(heads, dim=-1) @ module.out.weight.T
    torch.testing.assert_close(module(x, no_mask(T)), expected)


def test_any_two_tokens_are_one_step_apart() -> None:
    """One layer suffices for the last token to depend on the first, in a sequence of any length."""
    torch.manual_seed(0)
    module = SelfAttention(Attention(heads=H), D, D // H)
    x = torch.randn(1, 200, D, requires_grad=True)
    module(x, no_mask(200))[0, -1].sum().backward()
    assert x.grad is not None and x.grad[0, 0].abs().max() > 0
