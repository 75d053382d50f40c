"""The CPU fast path: LLaMA's step in few operations, for a small model's step is bound by how many there are.

It reads a Transformer's own weights, quantized ones too, and gives the logits that `model.step` gives but for
rounding. What is the same in every step (transposed weights, tables of angles, views of the cache) is made once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.decode.fast.products import Dynamic4
from weft.decode.fast.quantize import QuantizedLinear
from weft.models.transformer import Transformer, TransformerState
from weft.nn.linear import Linear

Product = Callable[[Tensor], Tensor]  # x (batch, K) → x Wᵀ (batch, N)
Sum = Callable[[Tensor, Tensor], Tensor]  # residual (batch, N), x (batch, K) → residual + x Wᵀ


class CPUFastPath:
    """One more token in every row of a state, over and over. After `state.reorder` a new one is needed."""

    def __init__(self, model: Transformer, state: TransformerState):
        assert model.decoder is not None and model.decoder.norm is not None
        config, self.model, self.state = model.config, model, state
        self.batch = state.lengths.shape[0]
        self.heads, self.kv_heads, self.d_head = config.attention.heads, config.attention.groups, config.d_head
        self.d_ff = config.feedforward.d_ff
        self.scale = config.embedding_factor
        places = torch.arange(state.max_len)[None]
        angles = model.decoder.position.angles(places, state.max_len, torch.float32)
        assert angles is not None
        cos, sin = angles[0][0, 0], angles[1][0, 0]
        self.cos, self.sin = torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)  # (max_len, d_head)
        # what all heads of a step are multiplied by: queries and keys are rotated, values stay
        self.straight = torch.ones(self.heads + 2 * self.kv_heads, self.d_head)
        self.swapped = torch.zeros_like(self.straight)
        self.layers = [_Layer(block, state.cache.store[number]) for number, block in enumerate(model.decoder.blocks)]
        self.norm = _norm(model.decoder.norm, self.batch)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read tokens (batch,) → logits (batch, vocab_size)."""
        self.state.reserve(1)
        place, rotated, d_ff = self.state.longest, self.heads + self.kv_heads, self.d_ff
        self.straight[:rotated] = self.cos[place]
        self.swapped[:rotated] = self.sin[place]
        x = F.embedding(tokens, self.model.embedding.weight)
        x = x if self.scale is None else x * self.scale
        for layer in self.layers:
            x = layer.out(x, self._attend(layer, layer.qkv(layer.attention_norm(x)), place))
            both = layer.gate_up(layer.feedforward_norm(x))
            x = layer.down(x, F.silu(both.narrow(1, 0, d_ff)).mul_(both.narrow(1, d_ff, d_ff)))
        self.state.advance(1)
        return self.model.head(self.norm(x).unsqueeze(1))[:, 0]

    def _attend(self, layer: "_Layer", qkv: Tensor, place: int) -> Tensor:
        """qkv (batch, width) of the token at `place` → (batch, heads · d_head)."""
        B, H, G, D = self.batch, self.heads, self.kv_heads, self.d_head
        each = qkv.view(B, H + 2 * G, D)
        swapped = qkv.view(B, H + 2 * G, 2, D // 2).flip(2).view(B, H + 2 * G, D)
        each = (each * self.straight).addcmul_(swapped, self.swapped)
        new = each.narrow(1, H, 2 * G).view(B, 2, G, D)
        layer.cache.select(3, place).copy_(new)
        # heads that share keys stand side by side, as if they were queries of several tokens
        q = each.narrow(1, 0, H).view(B, G, H // G, D)
        keys, values = layer.keys.narrow(2, 0, place + 1), layer.values.narrow(2, 0, place + 1)
        return F.scaled_dot_product_attention(q, keys, values, scale=layer.scale).reshape(B, H * D)


class _Layer:
    """A block's parts, bound once."""

    def __init__(self, block: Any, cache: Tensor):
        """cache (2, batch, kv_heads, max_len, d_head) of its keys and values."""
        self.keys, self.values = cache.unbind(0)  # (batch, kv_heads, max_len, d_head)
        self.cache = cache.transpose(0, 1)  # (batch, 2, kv_heads, max_len, d_head), as new ones come
        self.scale: float = block.attention.scale
        batch = cache.shape[1]
        self.attention_norm = _norm(block.attention_skip.norm, batch)
        self.feedforward_norm = _norm(block.feedforward_skip.norm, batch)
        self.qkv, self.gate_up = _product(block.attention.qkv), _product(block.feedforward.gate_up)
        self.out, self.down = _sum(block.attention.out), _sum(block.feedforward.down)


def _product(part: nn.Module) -> Product:
    if type(part) is Linear:
        weight = part.weight.t()
        return lambda x: torch.mm(x, weight)
    times, centres = _direct(part)
    if centres is None:
        return times
    groups = len(centres)
    return lambda x: times(x).addmm_(x.view(len(x), groups, -1).sum(-1), centres)


def _sum(part: nn.Module) -> Sum:
    if type(part) is Linear:
        weight = part.weight.t()
        return lambda residual, x: torch.addmm(residual, x, weight)
    times, centres = _direct(part)
    if centres is None:
        return lambda residual, x: times(x).add_(residual)
    groups = len(centres)
    return lambda residual, x: times(x).add_(torch.addmm(residual, x.view(len(x), groups, -1).sum(-1), centres))


def _direct(part: nn.Module) -> tuple[Product, Tensor | None]:
    """A quantized layer without what a module's call and looking up its parts cost; and the centres of its groups
    (groups, N), where they are still to be added."""
    if not isinstance(part, QuantizedLinear) or part.bias is not None:
        return part, None
    product = part.product
    if not isinstance(product, Dynamic4):
        return product.forward, None
    packed, group, K, N = product.packed, product.group, product.K, product.N
    times = torch.ops.aten._dyn_quant_matmul_4bit.default
    return lambda x: times(x, packed, group, K, N), product.centres


def _norm(norm: Any, batch: int) -> Product:
    """RMSNorm of x (batch, width); of one row, the root is a number, which is cheaper than a tensor of one."""
    gain, eps, width = norm.weight, norm.eps, len(norm.weight)
    length_of = torch.linalg.vector_norm

    def normed(x: Tensor) -> Tensor:
        length = float(length_of(x))
        return (x * gain).mul_((length * length / width + eps) ** -0.5)

    return normed if batch == 1 else norm.forward
