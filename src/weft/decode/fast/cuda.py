"""The CUDA fast path: LLaMA's step in five kernels a layer (norm and projection, attention, projection and skip, norm
and gate, projection and skip).

It reads a Transformer's own weights, 8- and 4-bit ones too, and gives the logits that `model.step` gives but for
rounding. Reading a prompt goes the same way, with torch's attention. Over the blocks of a pool it reads one token in
many texts, and chunks of many prompts in one call: the tokens of all chunks go through the linear layers one behind the
other, without padding, and attention takes them text by text (`attend.py`). What a text reads follows from its
block table, so that it may share its first blocks.
"""

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.decode.engine.paging import BlockStore
from weft.decode.fast.products import Plain8, Triton4
from weft.decode.fast.quantize import QuantizedHead, QuantizedLinear
from weft.decode.sampling import on_device
from weft.models import heads
from weft.models.transformer import Transformer, TransformerState
from weft.nn.linear import Linear

# cuDNN's attention is the fastest over long prompts, but prepares itself for every new length
MIN_CUDNN_TOKENS = 4096
SHORT_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LONG_ATTENTION = [SDPBackend.CUDNN_ATTENTION, *SHORT_ATTENTION]
# a step's attention over several texts, which are of unequal lengths
CROWD = 8  # programs for each processor of the GPU
WARPS = 2  # 4.28 TB/s on an H200, where 4 reach 3.95


class FusedLayers:
    """LLaMA's layers around the attention, for texts of up to `longest` tokens."""

    def __init__(self, model: Transformer, longest: int):
        from weft.decode.fast import attend, chunks, kernels, kernels4, kernels8

        assert model.decoder is not None
        self.kernels, self.kernels4, self.kernels8 = kernels, kernels4, kernels8
        self.attend, self.chunks, self.model = attend, chunks, model
        self.blocks: list[Any] = list(model.decoder.blocks)
        config, table = model.config, model.embedding.weight
        self.device, self.dtype = table.device, table.dtype
        self.heads, self.kv_heads, self.d_head = config.attention.heads, config.attention.groups, config.d_head
        self.pdl = self.device.type == "cuda" and kernels.has_pdl(self.device)
        places = torch.arange(longest, device=self.device)[None]
        angles = model.decoder.position.angles(places, longest, torch.float32)
        assert angles is not None
        self.angles = angles[0][0, 0].contiguous(), angles[1][0, 0].contiguous()

    def attention_for(self, batch: int, crowd: int, eight: bool = False) -> Any:
        """Attention of a step of so many rows, by about `crowd` programs for each of the GPU's processors; `eight`:
        over keys and values in 8 bits."""
        gpu = torch.cuda.get_device_properties(self.device) if self.device.type == "cuda" else None
        processors = 1 if gpu is None else gpu.multi_processor_count
        shape = batch, self.heads, self.kv_heads, self.d_head
        return self.attend.Attention(*shape, self.device, crowd * processors, eight)

    def normed(self, x: Tensor) -> Tensor:
        """x (…, d_model) after the last norm."""
        assert self.model.decoder is not None and self.model.decoder.norm is not None
        return self.model.decoder.norm(x)

    def _feedforward(self, block: Any, x: Tensor) -> Tensor:
        """x (…, d_model) plus its gated layer."""
        layer, norm = block.feedforward, block.feedforward_skip.norm
        gated = self._by_matvec(layer.gate_up, x, norm, gated=True)
        if gated is not None:
            return self._times(layer.down, gated, residual=x)
        # what is widest of all has no name here: it goes once it is gated
        return self._times(layer.down, self._times(layer.gate_up, x, norm), residual=x, halves=True)

    def _embed(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.model.embedding.weight)
        factor = self.model.config.embedding_factor
        return x if factor is None else x * factor

    def _by_matvec(
        self, part: nn.Module, x: Tensor, norm: Any = None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor | None:
        """A linear layer with what stands around it in one kernel: for one row, and weights that it can read."""
        found = _matrix(part) if x.dim() == 2 and len(x) == 1 else None
        if found is None:
            return None
        gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return self.kernels.matvec(x, *found, gain, eps, residual, gated, pdl=self.pdl)

    def _times(
        self, part: nn.Module, x: Tensor, norm: Any = None, residual: Tensor | None = None, halves: bool = False
    ) -> Tensor:
        """residual + x Wᵀ; x is first normed or, of `halves`, one gates the other."""
        y = None if halves else self._by_matvec(part, x, norm, residual)
        if y is not None:
            return y
        numbers = _numbers(part)
        if numbers is not None and numbers[0].dtype == torch.int8:
            gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return self.kernels8.product(self.kernels8.rounded(x, gain, eps, halves), *numbers, x.dtype, residual)
        if halves:
            x = self.kernels.gate(x.flatten(0, -2)).view(*x.shape[:-1], -1)
        x = x if norm is None else norm(x)
        if residual is not None and type(part) is Linear:  # an adapter is one as well, with more to it
            return torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), part.weight.t()).view_as(residual)
        if numbers is not None:
            return self.kernels4.product(x.contiguous(), *numbers, residual)
        return part(x) if residual is None else residual + part(x)


class CUDAFastPath(FusedLayers):
    """The kernels of one model, for the rows of one state, whose cache is in one piece."""

    def __init__(self, model: Transformer, state: TransformerState):
        super().__init__(model, state.max_len)
        self.state, batch = state, state.lengths.shape[0]
        self.attention = self.attention_for(batch, self.attend.CROWD)
        self.mixed = torch.empty(batch, self.heads * self.d_head, dtype=self.dtype, device=self.device)
        self.logits = torch.empty(1, model.config.vocab_size, dtype=torch.float32, device=self.device)

    def read(self, tokens: Tensor) -> Tensor:
        """tokens (batch, time), the first that the state reads → features (batch, time, d_model)."""
        store = self.state.cache.store
        x = self._embed(tokens)
        with sdpa_kernel(LONG_ATTENTION if tokens.shape[1] >= MIN_CUDNN_TOKENS else SHORT_ATTENTION, set_priority=True):
            for number, block in enumerate(self.blocks):
                x = self._read_attention(block, x, store[number, 0], store[number, 1])
                x = self._feedforward(block, x)
        return self.normed(x)

    def step(self, tokens: Tensor) -> Tensor:
        """tokens (batch, 1) → logits (batch, vocab_size). Every row's length grows by one, on the device."""
        state, store = self.state, self.state.cache.store
        x = self._embed(tokens[:, 0])
        for number, block in enumerate(self.blocks):
            attention = block.attention
            qkv = self._times(attention.qkv, x, norm=block.attention_skip.norm)
            given = qkv, self.angles, store[number, 0], store[number, 1], state.lengths, attention.scale, self.mixed
            self.attention(*given, pdl=self.pdl)
            x = self._feedforward(block, self._times(attention.out, self.mixed, residual=x))
        state.lengths.add_(1)
        return self._words(x)

    def _read_attention(self, block: Any, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """x (batch, time, d_model) plus what it attends to; its keys and values are put at the cache's start."""
        T, attention = x.shape[1], block.attention
        qkv = self._times(attention.qkv, x, block.attention_skip.norm)
        self.chunks.rotate_and_store(qkv, self.angles, keys, values)
        q = qkv[..., : self.heads * self.d_head].unflatten(-1, (self.heads, self.d_head)).transpose(1, 2)
        given, shared = (q, keys[:, :, :T], values[:, :, :T]), self.heads != self.kv_heads
        mixed = F.scaled_dot_product_attention(*given, is_causal=True, scale=attention.scale, enable_gqa=shared)
        return self._times(attention.out, mixed.transpose(1, 2).flatten(2), residual=x)

    def _words(self, x: Tensor) -> Tensor:
        """x (batch, d_model) → logits (batch, vocab_size)."""
        head, stack = self.model.output, self.model.decoder
        assert isinstance(head, heads.LMHead) and stack is not None and stack.norm is not None
        found = None
        if x.shape[0] == 1 and head.scale is None:
            if isinstance(head, QuantizedHead):
                found = _matrix(head.words)
            elif head.bias is None:
                found = (self.model.embedding.weight if head.weight is None else head.weight), None
        if found is not None:
            gain, eps = stack.norm.weight, stack.norm.eps
            return self.kernels.matvec(x, *found, gain, eps, out=self.logits, pdl=self.pdl)
        return self.model.head(self.normed(x).unsqueeze(1))[:, 0]


class Chunk(NamedTuple):
    """Ids to be read after `read` others of the text in a slot."""

    slot: int
    read: int
    ids: list[int]


class PagedFastPath(FusedLayers):
    """The kernels of one model over the blocks of one store, whose numbers tables (slots, blocks of a text) hold."""

    def __init__(self, model: Transformer, store: BlockStore, tables: Tensor):
        super().__init__(model, store.blocks * store.block_size)
        self.store, self.tables = store, tables

    def attention_of(self, batch: int) -> Any:
        eight = self.store.scales is not None
        attention = self.attention_for(batch, self.attend.CROWD if batch == 1 and not eight else CROWD, eight)
        attention.warps = attention.warps if batch == 1 or attention.group == 1 else WARPS
        return attention

    def step(self, tokens: Tensor, reads: Tensor, slots: Tensor, attention: Any) -> Tensor:
        """tokens (rows,), each after reads (rows,) others of the text in its slot → features (rows, d_model).
        `attention` is this batch size's, from `attention_of`."""
        x = self._embed(tokens)
        mixed = torch.empty(len(x), self.heads * self.d_head, dtype=self.dtype, device=self.device)
        for number, block in enumerate(self.blocks):
            qkv = self._times(block.attention.qkv, x, norm=block.attention_skip.norm)
            keys, values, scales = self.store.layer(number)
            given = qkv, self.angles, keys, values, reads, block.attention.scale, mixed
            attention(*given, pdl=self.pdl, tables=self.tables, slots=slots, scales=scales)
            x = self._feedforward(block, self._times(block.attention.out, mixed, residual=x))
        return self.normed(x)

    def read(self, chunks: list[Chunk]) -> Tensor:
        """Read chunks of several texts → features (chunks, d_model) after the last token of each."""
        lengths, high = [len(chunk.ids) for chunk in chunks], self.chunks.HIGH
        ends = list(accumulate(lengths))
        ids = np.concatenate([np.array(chunk.ids, dtype=np.int64) for chunk in chunks])
        each = np.concatenate([np.arange(chunk.read, chunk.read + len(chunk.ids)) for chunk in chunks])
        columns = np.stack([ids, each, np.repeat([chunk.slot for chunk in chunks], lengths)])
        tiles = [
            (chunk.slot, end - len(chunk.ids) + at, min(high, len(chunk.ids) - at), chunk.read + at)
            for chunk, end in zip(chunks, ends, strict=True)
            for at in range(0, len(chunk.ids), high)
        ]
        tiles.sort(key=lambda tile: -tile[3])  # those that see most keys take longest, so they go first
        tokens, places, slots = on_device(torch.from_numpy(columns), self.device).unbind(0)
        sent = on_device(torch.tensor(tiles, dtype=torch.int32), self.device)
        last = on_device(torch.tensor(ends) - 1, self.device)
        x = self._embed(tokens)
        mixed = torch.empty(len(x), self.heads * self.d_head, dtype=self.dtype, device=self.device)
        for number, block in enumerate(self.blocks):
            (keys, values, scales), attention = self.store.layer(number), block.attention
            qkv = self._times(attention.qkv, x, block.attention_skip.norm)
            self.chunks.rotate_and_store(qkv, self.angles, keys, values, (places, slots, self.tables), scales)
            self.chunks.attend_chunks(qkv, keys, values, scales, self.tables, sent, attention.scale, mixed)
            del qkv
            x = self._feedforward(block, self._times(attention.out, mixed, residual=x))
        return self.normed(x.index_select(0, last))


def _matrix(part: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """The weights of a layer and, for small ones, their scales; None where the kernels can't read them."""
    if part.bias is not None:
        return None
    return (part.weight, None) if type(part) is Linear else _numbers(part)


def _numbers(part: nn.Module) -> tuple[Tensor, Tensor] | None:
    """The 8- or 4-bit weights of a layer and their scales, where it has such, and no bias."""
    if isinstance(part, QuantizedLinear) and isinstance(part.product, Plain8 | Triton4) and part.bias is None:
        return part.product.numbers, part.product.scales
    return None
