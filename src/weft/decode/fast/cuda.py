"""The CUDA fast path: LLaMA's step in five kernels per layer (norm and qkv; attention; output projection and residual;
norm, projection and gate; down projection and residual), with a mixture of experts in six.

It reads a Transformer's weights, 8- and 4-bit ones too, and returns the logits of `model.step` up to rounding. Prompts
are read by the same kernels, with torch's attention. Over a paged cache it reads one token of many texts, or chunks of
many prompts in one call: their tokens are concatenated for the linear layers, without padding, and attention handles
them text by text (`attend.py`, `chunks.py`). A text may share blocks, since its block table says where it is.
"""

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.decode.engine.paging import BlockStore
from weft.decode.fast.matmul import ReferenceInt8, TritonInt4, has_cuda_kernels
from weft.decode.fast.path import PlainPath, has_readable_weights, is_llama_like, without_experts
from weft.decode.fast.quantize import QuantizedHead, QuantizedLinear
from weft.decode.sampling import on_device
from weft.models import heads
from weft.models.base import LanguageModel, State
from weft.models.transformer import Transformer, TransformerState
from weft.nn.cache import KeyValueCache
from weft.nn.experts import Experts
from weft.nn.linear import Linear

MIN_CUDNN_TOKENS = 4096  # prompts this long use cuDNN's attention: the fastest, but it plans for every new length
SHORT_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LONG_ATTENTION = [SDPBackend.CUDNN_ATTENTION, *SHORT_ATTENTION]
# Attention of a step over several texts of unequal lengths:
PROGRAMS_PER_SM = 8
WARPS = 2  # 4.28 TB/s on an H200, where 4 warps reach 3.95


def supports_kernels(model: Transformer) -> bool:
    """Whether weft's kernels can run a model: LLaMA's shape, with experts or without, in 16 bits on a GPU."""
    table = model.embedding.weight
    if not table.is_cuda or table.dtype not in (torch.bfloat16, torch.float16) or not has_cuda_kernels():
        return False
    shaped = is_llama_like(without_experts(model.config)) and model.config.d_head in (32, 64, 128, 256)
    return shaped and has_readable_weights(model)


class FusedLayers:
    """LLaMA's layers around the attention, for texts of up to `max_len` tokens."""

    def __init__(self, model: Transformer, max_len: int):
        from weft.decode.fast import attend, chunks, kernels, kernels4, kernels8, kernels_experts

        assert model.decoder is not None
        self.kernels, self.kernels4, self.kernels8 = kernels, kernels4, kernels8
        self.kernels_experts = kernels_experts
        self.attend, self.chunks, self.model = attend, chunks, model
        self.blocks: list[Any] = list(model.decoder.blocks)
        self.norm: Any = model.decoder.norm
        config, table = model.config, model.embedding.weight
        self.device, self.dtype = table.device, table.dtype
        self.heads, self.kv_heads, self.d_head = config.attention.heads, config.attention.groups, config.d_head
        self.pdl = kernels.has_pdl(self.device)
        positions = torch.arange(max_len, device=self.device)[None]
        angles = model.decoder.position.angles(positions, max_len, torch.float32)
        assert angles is not None
        self.angles = angles[0][0, 0].contiguous(), angles[1][0, 0].contiguous()

    def attention_for(self, batch: int, programs_per_sm: int, int8: bool = False) -> Any:
        """Attention of a step with this many rows, over quantised keys and values if `int8`."""
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        shape = batch, self.heads, self.kv_heads, self.d_head
        return self.attend.DecodeAttention(*shape, self.device, programs_per_sm * processors, int8)

    def _feedforward(self, block: Any, x: Tensor) -> Tensor:
        """Add the feed-forward layer to x (…, d_model)."""
        layer, norm = block.feedforward, block.feedforward_skip.norm
        return (self._experts if isinstance(layer, Experts) else self._gated)(layer, x, norm)

    def _gated(self, layer: Any, x: Tensor, norm: Any) -> Tensor:
        gated = self._matvec(layer.gate_up, x, norm=norm, gated=True)
        if gated is not None:
            return self._linear(layer.down, gated, residual=x)
        # The widest activations are not bound to a name, so that they are freed once they are gated.
        return self._linear(layer.down, self._linear(layer.gate_up, x, norm=norm), residual=x, halves=True)

    def _experts(self, layer: Experts, x: Tensor, norm: Any) -> Tensor:
        if x.dim() > 2 or len(x) > 1 or not layer.experts.fused or not self.kernels_experts.fits(layer.settings):
            return x + layer(norm(x))
        residual = x if layer.shared is None else self._gated(layer.shared, x, norm)
        return self.kernels_experts.mixture(layer, x, norm, residual=residual, pdl=self.pdl)

    def _embed(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.model.embedding.weight)
        factor = self.model.config.embedding_factor
        return x if factor is None else x * factor

    def _matvec(
        self, part: nn.Module, x: Tensor, *, norm: Any = None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor | None:
        """Apply norm, linear layer, gate and residual in one kernel; None if x or the weights don't fit it."""
        weights = _weights(part) if x.dim() == 2 and len(x) == 1 else None
        if weights is None:
            return None
        gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return self.kernels.matvec(x, *weights, gain, eps, residual, gated, pdl=self.pdl)

    def _linear(
        self, part: nn.Module, x: Tensor, *, norm: Any = None, residual: Tensor | None = None, halves: bool = False
    ) -> Tensor:
        """residual + x Wᵀ, where x is normalised first or, with `halves`, its first half gates the second."""
        y = None if halves else self._matvec(part, x, norm=norm, residual=residual)
        if y is not None:
            return y
        quantized = _quantized_weights(part)
        if quantized is not None and quantized[0].dtype == torch.int8:
            gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return self.kernels8.matmul(self.kernels8.quantize(x, gain, eps, halves), *quantized, x.dtype, residual)
        if halves:
            x = self.kernels.gate(x.flatten(0, -2)).view(*x.shape[:-1], -1)
        x = x if norm is None else norm(x)
        if residual is not None and type(part) is Linear:  # not an adapter, which is a subclass
            return torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), part.weight.t()).view_as(residual)
        if quantized is not None:
            return self.kernels4.matmul(x.contiguous(), *quantized, residual)
        return part(x) if residual is None else residual + part(x)


class CUDAFastPath(FusedLayers, PlainPath):
    """The kernels over the contiguous cache of one state."""

    def __init__(self, model: Transformer, state: TransformerState):
        super().__init__(model, state.max_len)
        self.state, batch = state, state.lengths.shape[0]
        self.attention = self.attention_for(batch, self.attend.PROGRAMS_PER_SM)
        self.mixed = torch.empty(batch, self.heads * self.d_head, dtype=self.dtype, device=self.device)
        self.logits = torch.empty(1, model.config.vocab_size, dtype=torch.float32, device=self.device)

    @classmethod
    def fits(cls, model: LanguageModel, state: State) -> bool:
        if not isinstance(model, Transformer) or not isinstance(state, TransformerState):
            return False
        return isinstance(state.cache, KeyValueCache) and supports_kernels(model)

    @classmethod
    def fits_prefill(cls, model: LanguageModel, state: State, tokens: int) -> bool:
        """Whether the kernels read these tokens: only the first that a state reads."""
        return not state.longest and cls.fits(model, state)

    def read(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        """Read tokens (batch, time), the first lengths[i] of row i → features (batch, time, d_model)."""
        time, store = tokens.shape[1], self.state.cache.store
        self.state.reserve(time)
        x = self._embed(tokens)
        with sdpa_kernel(LONG_ATTENTION if time >= MIN_CUDNN_TOKENS else SHORT_ATTENTION, set_priority=True):
            for number, block in enumerate(self.blocks):
                x = self._attend_prompt(block, x, store[number])
                x = self._feedforward(block, x)
        self.state.advance(time, lengths)
        return self.norm(x)

    def step(self, tokens: Tensor) -> Tensor:
        """Read tokens (batch, 1) → logits (batch, vocab_size). Every row's length grows by one, on the device."""
        state, store = self.state, self.state.cache.store
        x = self._embed(tokens[:, 0])
        for number, block in enumerate(self.blocks):
            attention, (keys, values) = block.attention, store[number]
            qkv = self._linear(attention.qkv, x, norm=block.attention_skip.norm)
            self.attention(qkv, self.angles, keys, values, state.lengths, attention.scale, self.mixed, pdl=self.pdl)
            x = self._feedforward(block, self._linear(attention.out, self.mixed, residual=x))
        state.lengths.add_(1)
        return self._head(x)

    def _attend_prompt(self, block: Any, x: Tensor, store: Tensor) -> Tensor:
        """Add the attention to x (batch, time, d_model), and write its keys and values to the start of a layer's store
        (2, batch, kv_heads, max_len, d_head)."""
        T, attention, (keys, values) = x.shape[1], block.attention, store
        qkv = self._linear(attention.qkv, x, norm=block.attention_skip.norm)
        self.chunks.rotate_and_store(qkv, self.angles, keys, values)
        q = qkv[..., : self.heads * self.d_head].unflatten(-1, (self.heads, self.d_head)).transpose(1, 2)
        arguments, shared = (q, keys[:, :, :T], values[:, :, :T]), self.heads != self.kv_heads
        mixed = F.scaled_dot_product_attention(*arguments, is_causal=True, scale=attention.scale, enable_gqa=shared)
        return self._linear(attention.out, mixed.transpose(1, 2).flatten(2), residual=x)

    def _head(self, x: Tensor) -> Tensor:
        """x (batch, d_model) → logits (batch, vocab_size)."""
        head, weights = self.model.output, None
        assert isinstance(head, heads.LMHead)
        if x.shape[0] == 1 and head.scale is None:
            if isinstance(head, QuantizedHead):
                weights = _weights(head.words)
            elif head.bias is None:
                weights = (self.model.embedding.weight if head.weight is None else head.weight), None
        if weights is not None:
            return self.kernels.matvec(x, *weights, self.norm.weight, self.norm.eps, out=self.logits, pdl=self.pdl)
        return self.model.head(self.norm(x).unsqueeze(1))[:, 0]


class PromptChunk(NamedTuple):
    """The next `ids` of the text in a slot, after `read` others."""

    slot: int
    read: int
    ids: list[int]


class PagedFastPath(FusedLayers):
    """The kernels over a block store; tables (slots, blocks of a text) list the blocks of each slot's text."""

    def __init__(self, model: Transformer, store: BlockStore, tables: Tensor):
        super().__init__(model, store.blocks * store.block_size)
        self.store, self.tables = store, tables

    def step_attention(self, batch: int) -> Any:
        int8 = self.store.scales is not None
        programs = self.attend.PROGRAMS_PER_SM if batch == 1 and not int8 else PROGRAMS_PER_SM
        attention = self.attention_for(batch, programs, int8)
        attention.warps = attention.warps if batch == 1 or attention.group == 1 else WARPS
        return attention

    def step(self, tokens: Tensor, lengths: Tensor, slots: Tensor, *, attention: Any) -> Tensor:
        """Read tokens (rows,), each after lengths (rows,) others of the text in its slot → features (rows, d_model).
        `attention` is from `step_attention`, for this batch size."""
        x = self._embed(tokens)
        mixed = torch.empty(len(x), self.heads * self.d_head, dtype=self.dtype, device=self.device)
        for number, block in enumerate(self.blocks):
            qkv = self._linear(block.attention.qkv, x, norm=block.attention_skip.norm)
            keys, values, scales = self.store.layer(number)
            arguments = qkv, self.angles, keys, values, lengths, block.attention.scale, mixed
            attention(*arguments, pdl=self.pdl, tables=self.tables, slots=slots, scales=scales)
            x = self._feedforward(block, self._linear(block.attention.out, mixed, residual=x))
        return self.norm(x)

    def read(self, chunks: list[PromptChunk]) -> Tensor:
        """Read chunks of several texts → features (chunks, d_model) after the last token of each."""
        lengths, tile = [len(chunk.ids) for chunk in chunks], self.chunks.QUERY_TILE
        ends = list(accumulate(lengths))
        ids = np.concatenate([np.array(chunk.ids, dtype=np.int64) for chunk in chunks])
        text_positions = np.concatenate([np.arange(chunk.read, chunk.read + len(chunk.ids)) for chunk in chunks])
        columns = np.stack([ids, text_positions, np.repeat([chunk.slot for chunk in chunks], lengths)])
        tiles = [
            (chunk.slot, end - len(chunk.ids) + at, min(tile, len(chunk.ids) - at), chunk.read + at)
            for chunk, end in zip(chunks, ends, strict=True)
            for at in range(0, len(chunk.ids), tile)
        ]
        tiles.sort(key=lambda item: -item[3])  # tiles that see the most keys take the longest, so they go first
        tokens, positions, slots = on_device(torch.from_numpy(columns), self.device).unbind(0)
        tiles_on_device = on_device(torch.tensor(tiles, dtype=torch.int32), self.device)
        last = on_device(torch.tensor(ends) - 1, self.device)
        x = self._embed(tokens)
        mixed = torch.empty(len(x), self.heads * self.d_head, dtype=self.dtype, device=self.device)
        for number, block in enumerate(self.blocks):
            (keys, values, scales), attention = self.store.layer(number), block.attention
            qkv = self._linear(attention.qkv, x, norm=block.attention_skip.norm)
            self.chunks.rotate_and_store(qkv, self.angles, keys, values, (positions, slots, self.tables), scales)
            self.chunks.attend_chunks(qkv, keys, values, scales, self.tables, tiles_on_device, attention.scale, mixed)
            del qkv
            x = self._feedforward(block, self._linear(attention.out, mixed, residual=x))
        return self.norm(x.index_select(0, last))


def _weights(part: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """A layer's weights and, if they are quantised, their scales; None if the kernels can't read them."""
    if part.bias is not None:
        return None
    return (part.weight, None) if type(part) is Linear else _quantized_weights(part)


def _quantized_weights(part: nn.Module) -> tuple[Tensor, Tensor] | None:
    """The 8- or 4-bit weights of a layer without bias, and their scales."""
    if isinstance(part, QuantizedLinear) and isinstance(part.matmul, ReferenceInt8 | TritonInt4) and part.bias is None:
        return part.matmul.numbers, part.matmul.scales
    return None
