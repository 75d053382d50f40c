"""The CPU fast path: a decoder's step in few operations, for a small model's step is bound by how many there are.

It reads a Transformer's own weights, quantized ones too, and gives the logits that `model.step` gives but for
rounding. What is the same in every step (transposed weights, tables of positions, views of the cache) is made once, and
again when the state's memory has moved.

For several rows at a time, as beams are, products are those of `c/tiles.h`: up to three times as fast as torch's, whose
fast ones want another copy of the weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.decode.fast import native
from weft.decode.fast.products import KleidiAI4
from weft.decode.fast.quantize import QuantizedLinear
from weft.models import heads
from weft.models.stack import SourceCache
from weft.models.transformer import Transformer, TransformerState
from weft.nn.feedforward import Gated
from weft.nn.linear import Linear
from weft.nn.norm import RMSNorm
from weft.nn.position_config import ALiBi, Learned, PositionConfig, Sinusoidal, T5Bias

Product = Callable[[Tensor], Tensor]  # x (batch, K) → x Wᵀ + b (batch, N)
Sum = Callable[[Tensor, Tensor], Tensor]  # residual (batch, N), x (batch, K) → residual + x Wᵀ + b

ADDED: tuple[type[PositionConfig], ...] = (Sinusoidal, Learned)  # to the embeddings
BIASED: tuple[type[PositionConfig], ...] = (T5Bias, ALiBi)  # the scores, by the distance alone
MIN_WEIGHTS = 1 << 17  # numbers of a matrix that is worth a call of ours


class CPUFastPath:
    """One more token in every row of a state, over and over. The rows are of equal length, and may be reordered."""

    def __init__(self, model: Transformer, state: TransformerState):
        assert model.decoder is not None
        config, self.model, self.state = model.config, model, state
        self.heads, self.kv_heads, self.d_head = config.attention.heads, config.attention.groups, config.d_head
        self.window, self.scale = config.attention.window, config.embedding_factor
        self.embedding_norm, self.norm = _norm(model.decoder.embedding_norm), _norm(model.decoder.norm)
        self.layers = [_Layer(block, False) for block in model.decoder.blocks]
        self.words: Product | None = None
        self.many = False  # whether products are those for several rows
        self.added: Tensor | None = None  # (max_len, d_model)
        self.bias: Tensor | None = None  # (1, heads, 1, max_len), of keys before the last place
        self.angles: tuple[Tensor, Tensor] | None = None  # (max_len, d_head) each
        # what all heads of a step are multiplied by: queries and keys are rotated, values stay
        self.straight = torch.ones(self.heads + 2 * self.kv_heads, self.d_head)
        self.swapped = torch.zeros_like(self.straight)
        self.store: Tensor | None = None
        self.source: SourceCache | None = None
        self.max_len = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read tokens (batch,) → logits (batch, vocab_size)."""
        state = self.state
        state.reserve(1)
        if state.cache.store is not self.store or state.source_cache is not self.source:
            self._bind()
        place = state.longest
        if self.model.ngrams is None:
            x = F.embedding(tokens, self.model.embedding.weight)
            x = x if self.scale is None else x * self.scale
        else:
            x = self.model.embed_next(tokens[:, None], state.lengths, state.history)[:, 0]
        if self.added is not None:
            x = x + self.added[place]
        if self.angles is not None:
            rotated = self.heads + self.kv_heads
            self.straight[:rotated], self.swapped[:rotated] = self.angles[0][place], self.angles[1][place]
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        for layer in self.layers:
            x = layer.attention(x, lambda qkv, layer=layer: self._attend(layer, qkv, place))  # type: ignore[misc]
            if layer.cross is not None:
                x = layer.cross(x, lambda q, layer=layer: self._attend_source(layer, q))  # type: ignore[misc]
            x = layer.feedforward(x, layer.activate)
        state.advance(1)
        x = x if self.norm is None else self.norm(x)
        if self.words is not None:
            return self.words(self.model.output.prepare(x))  # type: ignore[operator]
        return self.model.head(x.unsqueeze(1))[:, 0]

    def _bind(self) -> None:
        """Look at where the state's keys and values are now, and make tables for as many places as they have."""
        state, decoder = self.state, self.model.decoder
        assert decoder is not None
        self.store, self.source = state.cache.store, state.source_cache
        if not self.many and len(state.lengths) > 1 and native.library() is not None:
            self._take_many()
        mask = None  # what is added to the scores of a source's keys, (rows, 1, 1, source time), where there is padding
        if state.source_mask is not None and not bool(state.source_mask.all()):
            mask = torch.zeros(state.source_mask.shape).masked_fill_(~state.source_mask, -torch.inf)[:, None, None]
        for number, layer in enumerate(self.layers):
            layer.keys, layer.values = self.store[number].unbind(0)
            layer.cache = self.store[number].transpose(0, 1)
            if self.source is not None:
                layer.source, layer.mask = self.source[number], mask
        if state.max_len == self.max_len:
            return
        self.max_len = state.max_len
        position, kind, places = decoder.position, self.model.config.position, torch.arange(self.max_len)[None]
        if isinstance(kind, ADDED):
            self.added = position.embed(torch.zeros(1, self.max_len, self.model.config.d_model), places)[0]
        if isinstance(kind, BIASED):
            self.bias = position.bias(places[:, -1:], places)
        angles = position.angles(places, self.max_len, torch.float32)
        if angles is not None:
            cos, sin = angles[0][0, 0], angles[1][0, 0]
            self.angles = torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)

    def _take_many(self) -> None:
        model, self.many = self.model, True
        assert model.decoder is not None
        self.layers = [_Layer(block, True) for block in model.decoder.blocks]
        if type(model.output) is heads.LMHead and model.output.softcap is None:
            table = model.embedding.weight if model.output.weight is None else model.output.weight
            self.words = _many(table, model.output.bias)

    def _attend(self, layer: "_Layer", qkv: Tensor, place: int) -> Tensor:
        """qkv (batch, width) of the token at `place` → (batch, heads · d_head)."""
        B, H, G, D = len(qkv), self.heads, self.kv_heads, self.d_head
        each = qkv.view(B, H + 2 * G, D)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k, v = each.split((H, G, G), dim=1)
            each = torch.cat((layer.q_norm(q), layer.k_norm(k), v), dim=1)
        if self.angles is not None:
            swapped = each.view(B, H + 2 * G, 2, D // 2).flip(2).view(B, H + 2 * G, D)
            each = (each * self.straight).addcmul_(swapped, self.swapped)
        new = each.narrow(1, H, 2 * G).view(B, 2, G, D)
        layer.cache.select(3, place).copy_(new)
        # heads that share keys stand side by side, as if they were queries of several tokens
        q = each.narrow(1, 0, H).view(B, G, H // G, D)
        seen = place + 1 if self.window is None else min(place + 1, self.window)
        first, bias = place + 1 - seen, None
        if self.bias is not None:
            bias = self.bias.narrow(3, self.max_len - seen, seen).reshape(1, G, H // G, seen).expand(B, -1, -1, -1)
        keys, values = layer.keys.narrow(2, first, seen), layer.values.narrow(2, first, seen)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=layer.scale)
        return mixed.reshape(B, H * D)

    def _attend_source(self, layer: "_Layer", q: Tensor) -> Tensor:
        """Queries (batch, heads · d_head) over the source; the rows that share one are queries of one row."""
        B, H, D, rows = len(q), self.heads, self.d_head, len(layer.source[0])
        each = q.view(rows, B // rows, H, D).transpose(1, 2)
        each = each if layer.cross_norm is None else layer.cross_norm(each)
        mask = None if layer.mask is None else layer.mask.expand(-1, -1, B // rows, -1)
        mixed = F.scaled_dot_product_attention(
            each, *layer.source, attn_mask=mask, scale=layer.scale, enable_gqa=self.kv_heads != H
        )
        return mixed.transpose(1, 2).reshape(B, H * D)


class _Layer:
    """A block's parts, bound once; the views of keys and values, whenever these have moved."""

    keys: Tensor  # (batch, kv_heads, max_len, d_head)
    values: Tensor
    cache: Tensor  # (batch, 2, kv_heads, max_len, d_head), as new ones come
    source: tuple[Tensor, Tensor]  # (rows, kv_heads, source time, d_head)
    mask: Tensor | None

    def __init__(self, block: Any, many: bool):
        attention, feedforward = block.attention, block.feedforward
        self.scale: float = attention.scale
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.attention = _sublayer(block.attention_skip, attention.qkv, attention.out, many)
        self.cross = None
        if block.cross is not None:
            self.cross_norm = block.cross.q_norm
            self.cross = _sublayer(block.cross_skip, block.cross.q, block.cross.out, many)
        gated = isinstance(feedforward, Gated)
        first = feedforward.gate_up if gated else feedforward.up
        self.feedforward = _sublayer(block.feedforward_skip, first, feedforward.down, many)
        activation: Product = feedforward.activation

        def gate(both: Tensor) -> Tensor:
            half = both.shape[1] // 2
            return activation(both.narrow(1, 0, half)).mul_(both.narrow(1, half, half))

        self.activate = gate if gated else activation


def _sublayer(skip: Any, into: nn.Module, out: nn.Module, many: bool) -> Callable[[Tensor, Product], Tensor]:
    """x + f(x), where f is a product, what is given, and another product; with the norm before or after it."""
    first, last = _product(into, many), _sum(out, many)
    norm = _norm(skip.norm)
    if norm is None:
        return lambda x, between: last(x, between(first(x)))
    if skip.pre:
        return lambda x, between: last(x, between(first(norm(x))))
    return lambda x, between: norm(last(x, between(first(x))))


def _product(part: nn.Module, many: bool) -> Product:
    if many and type(part) is Linear and (found := _many(part.weight, part.bias)) is not None:
        return found
    if type(part) is Linear:
        weight, bias = part.weight.t(), part.bias
        return (lambda x: torch.mm(x, weight)) if bias is None else (lambda x: torch.addmm(bias, x, weight))
    times, centres = _direct(part)
    if centres is None:
        return times
    groups = len(centres)
    return lambda x: times(x).addmm_(x.view(len(x), groups, -1).sum(-1), centres)


def _sum(part: nn.Module, many: bool) -> Sum:
    times, centres = _direct(part)
    if centres is not None:
        groups = len(centres)
        return lambda residual, x: times(x).add_(torch.addmm(residual, x.view(len(x), groups, -1).sum(-1), centres))
    product = _product(part, many)
    if type(part) is Linear and part.bias is None and not isinstance(product, _Many):
        weight = part.weight.t()
        return lambda residual, x: torch.addmm(residual, x, weight)
    return lambda residual, x: product(x).add_(residual)


def _direct(part: nn.Module) -> tuple[Product, Tensor | None]:
    """A quantized layer without what a module's call and looking up its parts cost; and the centres of its groups
    (groups, N), where they are still to be added."""
    if not isinstance(part, QuantizedLinear) or part.bias is not None:
        return part, None
    product = part.product
    if not isinstance(product, KleidiAI4):
        return product.forward, None
    packed, group, K, N = product.packed, product.group, product.K, product.N
    times = torch.ops.aten._dyn_quant_matmul_4bit.default
    return lambda x: times(x, packed, group, K, N), product.centres


def _norm(norm: Any) -> Product | None:
    """A norm of x (batch, width); RMSNorm's root of one row is a number, which is cheaper than a tensor of one."""
    if not isinstance(norm, RMSNorm):
        return None if norm is None else norm.forward
    gain, eps, width = norm.weight + norm.offset if norm.offset else norm.weight, norm.eps, len(norm.weight)
    length_of, plain = torch.linalg.vector_norm, norm.forward

    def normed(x: Tensor) -> Tensor:
        if len(x) > 1:
            return plain(x)
        length = float(length_of(x))
        return (x * gain).mul_((length * length / width + eps) ** -0.5)

    return normed


class _Many:
    """A product with many rows, by weft's own kernel. Its result is good until the next one of as many rows: new memory
    would have to be cleared first."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.kept, self.found = (weight, bias), native.matrix(weight, weight.shape, bias=bias)
        self.memory = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.memory) < len(x):
            self.memory = torch.empty(len(x), self.found.rows)
        return native.multiply_many(self.found, x, self.memory[: len(x)])


def _many(weight: Tensor, bias: Tensor | None) -> Product | None:
    """x (batch, K) → x Wᵀ + b (batch, N) for a weight (N, K) in float32, where weft's kernel fits and pays."""
    rows, columns = weight.shape
    if rows < native.MANY_ROWS or columns % native.MANY_COLUMNS or weight.numel() < MIN_WEIGHTS:
        return None
    return _Many(weight.detach(), None if bias is None else bias.detach())
