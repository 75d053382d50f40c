"""The CPU fast path: a decode step in few torch operations, since their number bounds a small model's step.

It reads a Transformer's weights, quantised ones too, and returns the logits of `model.step` up to rounding. What is the
same in every step (transposed weights, position tables, views of the cache) is computed once, and again when the
state's memory has moved.

Several rows, such as beams, are multiplied by weft's GEMM (`native.gemm`): up to three times as fast as torch's
product, whose fast kernels need a packed copy of the weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.decode.fast import native
from weft.decode.fast.matmul import KleidiAIInt4
from weft.decode.fast.path import LLAMA, PlainPath, is_float32_on_cpu, others_at_default, setting_names
from weft.decode.fast.quantize import QuantizedLinear
from weft.models import heads
from weft.models.base import LanguageModel, State
from weft.models.config import Decoder, EncoderDecoder
from weft.models.stack import SourceCache
from weft.models.transformer import Transformer, TransformerState
from weft.nn.cache import KeyValueCache
from weft.nn.feedforward import Gated
from weft.nn.linear import Linear
from weft.nn.norm import RMSNorm
from weft.nn.position_config import ALiBi, Learned, NoPosition, PositionConfig, Rotary, Sinusoidal, T5Bias

LinearFunction = Callable[[Tensor], Tensor]  # x (batch, K) → x Wᵀ + b (batch, N)
ResidualFunction = Callable[[Tensor, Tensor], Tensor]  # residual (batch, N), x (batch, K) → residual + x Wᵀ + b
SublayerFunction = Callable[[Tensor, LinearFunction], Tensor]

EMBEDDED: tuple[type[PositionConfig], ...] = (Sinusoidal, Learned)  # positions added to the embeddings
SCORE_BIASED: tuple[type[PositionConfig], ...] = (T5Bias, ALiBi)  # positions that bias scores, by distance alone
MIN_GEMM_WEIGHTS = 1 << 17  # elements of a matrix from which on `native.gemm` pays
SETTINGS = LLAMA | setting_names(
    *("feedforward", "norm", "head", "placement", "embedding_norm", "ngrams", "encoder_layers", "source_vocab_size"),
    attention="bias qk_norm window",
)


class CPUFastPath(PlainPath):
    """Decode steps of a state whose rows are equally long. Rows may be reordered between steps."""

    survives_move = survives_truncation = True  # every step checks where the state's memory is

    def __init__(self, model: Transformer, state: TransformerState, *, min_gemm_weights: int = MIN_GEMM_WEIGHTS):
        assert model.decoder is not None
        super().__init__(model, state)
        config = model.config
        self.heads, self.kv_heads, self.d_head = config.attention.heads, config.attention.groups, config.d_head
        self.window, self.scale = config.attention.window, config.embedding_factor
        self.embedding_norm, self.norm = _norm(model.decoder.embedding_norm), _norm(model.decoder.norm)
        self.layers = [CPULayer(block, None) for block in model.decoder.blocks]
        self.lm_head: LinearFunction | None = None
        self.min_gemm_weights, self.uses_gemm = min_gemm_weights, False
        self.position_embeddings: Tensor | None = None  # (max_len, d_model)
        self.score_bias: Tensor | None = None  # (1, heads, 1, max_len), of the query at the last position
        self.angles: tuple[Tensor, Tensor] | None = None  # (max_len, d_head) each
        # Factors of all heads of a step: queries and keys are rotated, values stay.
        self.rope_cos = torch.ones(self.heads + 2 * self.kv_heads, self.d_head)
        self.rope_sin = torch.zeros_like(self.rope_cos)
        self.store: Tensor | None = None
        self.source: SourceCache | None = None
        self.max_len = 0

    @classmethod
    def fits(cls, model: LanguageModel, state: State) -> bool:
        """Whether this is a float32 decoder, perhaps with a source, of fixed positions, and rows are equally long."""
        settings = model.config
        even = isinstance(state, TransformerState) and state.even and isinstance(state.cache, KeyValueCache)
        if not even or not is_float32_on_cpu(model) or not isinstance(settings, Decoder | EncoderDecoder):
            return False
        known = type(settings.position) in (Rotary, NoPosition, *EMBEDDED, *SCORE_BIASED)
        if settings.placement not in ("pre", "post", "none") or not known:
            return False
        if settings.feedforward.kind not in ("plain", "gated"):
            return False
        return settings.position.changes_after(settings.context) is None and others_at_default(settings, SETTINGS)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read tokens (batch,) → logits (batch, vocab_size)."""
        state = self.state
        state.reserve(1)
        if state.cache.store is not self.store or state.source_cache is not self.source:
            self._bind()
        position = state.longest
        if self.model.ngrams is None:
            x = F.embedding(tokens, self.model.embedding.weight)
            x = x if self.scale is None else x * self.scale
        else:
            x = self.model.embed_next(tokens[:, None], state.lengths, state.history)[:, 0]
        if self.position_embeddings is not None:
            x = x + self.position_embeddings[position]
        if self.angles is not None:
            rotated = self.heads + self.kv_heads
            self.rope_cos[:rotated], self.rope_sin[:rotated] = self.angles[0][position], self.angles[1][position]
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        for layer in self.layers:
            x = layer.attention(x, lambda qkv, layer=layer: self._attend(layer, qkv, position))  # type: ignore[misc]
            if layer.cross is not None:
                x = layer.cross(x, lambda q, layer=layer: self._attend_source(layer, q))  # type: ignore[misc]
            x = layer.feedforward(x, layer.activate)
        state.advance(1)
        x = x if self.norm is None else self.norm(x)
        if self.lm_head is not None:
            return self.lm_head(self.model.output.prepare(x))
        return self.model.head(x.unsqueeze(1))[:, 0]

    def _bind(self) -> None:
        """Take views of the state's keys and values, and make position tables for its capacity."""
        state = self.state
        self.store, self.source = state.cache.store, state.source_cache
        if not self.uses_gemm and len(state.lengths) > 1 and native.library() is not None:
            self._use_gemm()
        mask = None  # added to the scores of the source's keys (rows, 1, 1, source time), if there is padding
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
        position, kind = self.model.decoder.position, self.model.config.position
        positions = torch.arange(self.max_len)[None]
        if isinstance(kind, EMBEDDED):
            zeros = torch.zeros(1, self.max_len, self.model.config.d_model)
            self.position_embeddings = position.embed(zeros, positions)[0]
        if isinstance(kind, SCORE_BIASED):
            self.score_bias = position.bias(positions[:, -1:], positions)
        angles = position.angles(positions, self.max_len, torch.float32)
        if angles is not None:
            cos, sin = angles[0][0, 0], angles[1][0, 0]
            self.angles = torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)

    def _use_gemm(self) -> None:
        model, self.uses_gemm = self.model, True
        self.layers = [CPULayer(block, self.min_gemm_weights) for block in model.decoder.blocks]
        if type(model.output) is heads.LMHead and model.output.softcap is None:
            table = model.embedding.weight if model.output.weight is None else model.output.weight
            self.lm_head = _gemm(table, model.output.bias, self.min_gemm_weights)

    def _attend(self, layer: "CPULayer", qkv: Tensor, position: int) -> Tensor:
        """qkv (batch, width) of the token at `position` → (batch, heads · d_head)."""
        B, H, G, D = len(qkv), self.heads, self.kv_heads, self.d_head
        x = qkv.view(B, H + 2 * G, D)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k, v = x.split((H, G, G), dim=1)
            x = torch.cat((layer.q_norm(q), layer.k_norm(k), v), dim=1)
        if self.angles is not None:
            swapped = x.view(B, H + 2 * G, 2, D // 2).flip(2).view(B, H + 2 * G, D)
            x = (x * self.rope_cos).addcmul_(swapped, self.rope_sin)
        layer.cache.select(3, position).copy_(x.narrow(1, H, 2 * G).view(B, 2, G, D))
        # Heads that share keys are treated as queries of several tokens.
        q = x.narrow(1, 0, H).view(B, G, H // G, D)
        seen = position + 1 if self.window is None else min(position + 1, self.window)
        first, bias = position + 1 - seen, None
        if self.score_bias is not None:
            bias = self.score_bias.narrow(3, self.max_len - seen, seen)
            bias = bias.reshape(1, G, H // G, seen).expand(B, -1, -1, -1)
        keys, values = layer.keys.narrow(2, first, seen), layer.values.narrow(2, first, seen)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=layer.scale)
        return mixed.reshape(B, H * D)

    def _attend_source(self, layer: "CPULayer", q: Tensor) -> Tensor:
        """Attend from queries (batch, heads · d_head) to the source; rows with one source are queries of one row."""
        B, H, D, rows = len(q), self.heads, self.d_head, len(layer.source[0])
        queries = q.view(rows, B // rows, H, D).transpose(1, 2)
        queries = queries if layer.cross_norm is None else layer.cross_norm(queries)
        mask = None if layer.mask is None else layer.mask.expand(-1, -1, B // rows, -1)
        arguments, shared = (queries, *layer.source), self.kv_heads != H
        mixed = F.scaled_dot_product_attention(*arguments, attn_mask=mask, scale=layer.scale, enable_gqa=shared)
        return mixed.transpose(1, 2).reshape(B, H * D)


class CPULayer:
    """A block's functions, and views of its keys and values; weft's GEMM multiplies from `min_gemm_weights` on."""

    keys: Tensor  # (batch, kv_heads, max_len, d_head)
    values: Tensor
    cache: Tensor  # (batch, 2, kv_heads, max_len, d_head): both, as they are written
    source: tuple[Tensor, Tensor]  # (rows, kv_heads, source time, d_head)
    mask: Tensor | None

    def __init__(self, block: Any, min_gemm_weights: int | None):
        attention, feedforward = block.attention, block.feedforward
        self.scale: float = attention.scale
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.attention = _sublayer(block.attention_skip, attention.qkv, attention.out, gemm=min_gemm_weights)
        self.cross = None
        if block.cross is not None:
            self.cross_norm = block.cross.q_norm
            self.cross = _sublayer(block.cross_skip, block.cross.q, block.cross.out, gemm=min_gemm_weights)
        gated = isinstance(feedforward, Gated)
        first = feedforward.gate_up if gated else feedforward.up
        self.feedforward = _sublayer(block.feedforward_skip, first, feedforward.down, gemm=min_gemm_weights)
        activation: LinearFunction = feedforward.activation

        def gate(both: Tensor) -> Tensor:
            half = both.shape[1] // 2
            return activation(both.narrow(1, 0, half)).mul_(both.narrow(1, half, half))

        self.activate = gate if gated else activation


def _sublayer(skip: Any, first: nn.Module, last: nn.Module, *, gemm: int | None) -> SublayerFunction:
    """Build f(x, between) = x + last(between(first(x))), with the norm before or after it."""
    project, add = _linear(first, gemm), _residual(last, gemm)
    norm = _norm(skip.norm)
    if norm is None:
        return lambda x, between: add(x, between(project(x)))
    if skip.pre:
        return lambda x, between: add(x, between(project(norm(x))))
    return lambda x, between: norm(add(x, between(project(x))))


def _linear(part: nn.Module, gemm: int | None) -> LinearFunction:
    if gemm is not None and type(part) is Linear and (product := _gemm(part.weight, part.bias, gemm)) is not None:
        return product
    if type(part) is Linear:
        weight, bias = part.weight.t(), part.bias
        return (lambda x: torch.mm(x, weight)) if bias is None else (lambda x: torch.addmm(bias, x, weight))
    multiply, centres = _quantized(part)
    if centres is None:
        return multiply
    return lambda x: multiply(x).addmm_(x.view(len(x), len(centres), -1).sum(-1), centres)


def _residual(part: nn.Module, gemm: int | None) -> ResidualFunction:
    multiply, centres = _quantized(part)
    if centres is not None:
        groups = len(centres)
        return lambda residual, x: multiply(x).add_(torch.addmm(residual, x.view(len(x), groups, -1).sum(-1), centres))
    linear = _linear(part, gemm)
    if type(part) is Linear and part.bias is None and not isinstance(linear, GemmLinear):
        weight = part.weight.t()
        return lambda residual, x: torch.addmm(residual, x, weight)
    return lambda residual, x: linear(x).add_(residual)


def _quantized(part: nn.Module) -> tuple[LinearFunction, Tensor | None]:
    """A quantised layer's kernel, and the centres (groups, N) that it leaves out; other layers unchanged, and None."""
    if not isinstance(part, QuantizedLinear) or part.bias is not None:
        return part, None
    matmul = part.matmul
    if not isinstance(matmul, KleidiAIInt4):
        return matmul.forward, None
    packed, group, K, N = matmul.packed, matmul.group, matmul.K, matmul.N
    multiply = torch.ops.aten._dyn_quant_matmul_4bit.default
    return lambda x: multiply(x, packed, group, K, N), matmul.centres


def _norm(norm: Any) -> LinearFunction | None:
    """Normalise x (batch, width). For one row RMSNorm's root is a Python number: cheaper than a tensor of one."""
    if not isinstance(norm, RMSNorm) or norm.weight is None:
        return None if norm is None else norm.forward
    gain, eps, width = norm.weight + norm.offset if norm.offset else norm.weight, norm.eps, len(norm.weight)
    length_of, forward = torch.linalg.vector_norm, norm.forward

    def normalise(x: Tensor) -> Tensor:
        if len(x) > 1:
            return forward(x)
        length = float(length_of(x))
        return (x * gain).mul_((length * length / width + eps) ** -0.5)

    return normalise


class GemmLinear:
    """x (batch, K) → x Wᵀ + b by weft's GEMM, overwritten by the next call: new memory would have to be cleared."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.tensors, self.matrix = (weight, bias), native.matrix(weight, weight.shape, bias=bias)
        self.memory = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.memory) < len(x):
            self.memory = torch.empty(len(x), self.matrix.rows)
        return native.gemm(self.matrix, x, self.memory[: len(x)])


def _gemm(weight: Tensor, bias: Tensor | None, min_weights: int) -> GemmLinear | None:
    """Multiply by a float32 weight (N, K) with weft's GEMM, or None where it doesn't fit or doesn't pay."""
    rows, columns = weight.shape
    if rows < native.MIN_GEMM_ROWS or columns % native.GEMM_COLUMNS or weight.numel() < min_weights:
        return None
    return GemmLinear(weight.detach(), None if bias is None else bias.detach())
