"""The CUDA fast path: LLaMA's step in five kernels a layer (norm and projection, attention, projection and skip, norm
and gate, projection and skip).

It reads a Transformer's own weights, 8- and 4-bit ones too, and gives the logits that `model.step` gives but for
rounding. Reading a prompt goes the same way, with torch's attention.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.decode.fast.products import Plain8, Triton4
from weft.decode.fast.quantize import QuantizedHead, QuantizedLinear
from weft.models import heads
from weft.models.transformer import Transformer, TransformerState
from weft.nn.linear import Linear

# cuDNN's attention is the fastest over long prompts, but prepares itself for every new length
LONG = 4096
LONG_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
SHORT_ATTENTION = LONG_ATTENTION[1:]


class FusedLayers:
    """LLaMA's layers around the attention, for texts of up to `longest` tokens."""

    def __init__(self, model: Transformer, longest: int):
        from weft.decode.fast import attend, kernels

        assert model.decoder is not None
        self.kernels, self.attend, self.model = kernels, attend, model
        self.blocks: list[Any] = list(model.decoder.blocks)
        config, table = model.config, model.embedding.weight
        self.device, self.dtype = table.device, table.dtype
        self.heads, self.kv_heads, self.d_head = config.attention.heads, config.attention.groups, config.d_head
        self.pdl = self.device.type == "cuda" and kernels.has_pdl(self.device)
        places = torch.arange(longest, device=self.device)[None]
        angles = model.decoder.position.angles(places, longest, torch.float32)
        assert angles is not None
        self.angles = angles[0][0, 0].contiguous(), angles[1][0, 0].contiguous()

    def attention_for(self, batch: int, crowd: int | None = None) -> Any:
        """Attention of a step of so many rows, by about `crowd` programs for each of the GPU's processors."""
        processors = 1
        if self.device.type == "cuda":
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        shape = batch, self.heads, self.kv_heads, self.d_head
        programs = (crowd or self.attend.CROWD) * processors
        return self.attend.Attention(*shape, self.device, programs, self.attend.BLOCK)

    def normed(self, x: Tensor) -> Tensor:
        """x (…, d_model) after the last norm."""
        assert self.model.decoder is not None and self.model.decoder.norm is not None
        return self.model.decoder.norm(x)

    # ---- inside

    def _feedforward(self, block: Any, x: Tensor) -> Tensor:
        """x (batch, d_model) plus its gated layer."""
        forward = block.feedforward
        h = self._times(forward.gate_up, x, norm=block.feedforward_skip.norm, gated=True)
        return self._times(forward.down, h, residual=x)

    def _read_feedforward(self, block: Any, x: Tensor) -> Tensor:
        """x (…, d_model) of many tokens plus its gated layer."""
        forward = block.feedforward
        both = self._plain(forward.gate_up, block.feedforward_skip.norm(x))
        gated = self.kernels.gate(both.flatten(0, -2)).view(*x.shape[:-1], -1)
        del both  # the widest of all
        return self._plus(forward.down, gated, x)

    def _embed(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.model.embedding.weight)
        factor = self.model.config.embedding_factor
        return x if factor is None else x * factor

    def _times(
        self,
        part: nn.Module,
        x: Tensor,
        norm: Any = None,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """A linear layer with what stands around it: one kernel for one row, the library's product for more."""
        found = _matrix(part) if x.shape[0] == 1 else None
        if found is not None:
            gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return self.kernels.matvec(x, *found, gain, eps, residual, gated, pdl=self.pdl)
        h = x if norm is None else norm(x)
        if residual is not None:
            return self._plus(part, h, residual)
        y = self._plain(part, h)
        return self.kernels.gate(y) if gated else y

    def _plain(self, part: nn.Module, x: Tensor) -> Tensor:
        """x Wᵀ."""
        numbers = _numbers(part) if x.numel() <= self.kernels.FEW * x.shape[-1] else None
        return part(x) if numbers is None else self.kernels.product(x.contiguous(), *numbers)

    def _plus(self, part: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x Wᵀ, added where the product is summed up."""
        if type(part) is Linear:  # an adapter is one as well, with more to it
            flat = torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), part.weight.t())
            return flat.view_as(residual)
        numbers = _numbers(part) if x.numel() <= self.kernels.FEW * x.shape[-1] else None
        return residual + part(x) if numbers is None else self.kernels.product(x.contiguous(), *numbers, residual)


class CUDAFastPath(FusedLayers):
    """The kernels of one model, for the rows of one state, whose cache is in one piece."""

    def __init__(self, model: Transformer, state: TransformerState):
        super().__init__(model, state.max_len)
        self.state, batch = state, state.lengths.shape[0]
        self.attention = self.attention_for(batch)
        self.mixed = torch.empty(batch, self.heads * self.d_head, dtype=self.dtype, device=self.device)
        self.logits = torch.empty(1, model.config.vocab_size, dtype=torch.float32, device=self.device)

    def step(self, tokens: Tensor) -> Tensor:
        """tokens (batch, 1) → logits (batch, vocab_size). Every row's length grows by one, on the device."""
        return self._words(self._blocks(tokens))

    def features(self, tokens: Tensor) -> Tensor:
        """tokens (batch, 1) → features (batch, d_model). Every row's length grows by one, on the device."""
        return self.normed(self._blocks(tokens))

    def read(self, tokens: Tensor) -> Tensor:
        """tokens (batch, time), the first that the state reads → features (batch, time, d_model)."""
        store = self.state.cache.store
        x = self._embed(tokens)
        with sdpa_kernel(LONG_ATTENTION if tokens.shape[1] >= LONG else SHORT_ATTENTION, set_priority=True):
            for number, block in enumerate(self.blocks):
                x = self._read_attention(block, x, store[number, 0], store[number, 1])
                x = self._read_feedforward(block, x)
        return self.normed(x)

    # ---- inside

    def _blocks(self, tokens: Tensor) -> Tensor:
        """tokens (batch, 1) through all blocks → (batch, d_model), before the last norm."""
        state, store = self.state, self.state.cache.store
        x = self._embed(tokens[:, 0])
        for number, block in enumerate(self.blocks):
            attention = block.attention
            qkv = self._times(attention.qkv, x, norm=block.attention_skip.norm)
            given = qkv, self.angles, store[number, 0], store[number, 1], state.lengths, attention.scale, self.mixed
            self.attention(*given, pdl=self.pdl)
            x = self._feedforward(block, self._times(attention.out, self.mixed, residual=x))
        state.lengths.add_(1)
        return x

    def _read_attention(self, block: Any, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """x (batch, time, d_model) plus what it attends to; its keys and values are put at the cache's start."""
        T, attention = x.shape[1], block.attention
        qkv = self._plain(attention.qkv, block.attention_skip.norm(x))
        self.attend.rotate_and_store(qkv, self.angles, keys, values, self.heads, self.kv_heads)
        q = qkv[..., : self.heads * self.d_head].unflatten(-1, (self.heads, self.d_head)).transpose(1, 2)
        shared = self.heads != self.kv_heads
        mixed = F.scaled_dot_product_attention(
            q, keys[:, :, :T], values[:, :, :T], is_causal=True, scale=attention.scale, enable_gqa=shared
        )
        return self._plus(attention.out, mixed.transpose(1, 2).flatten(2), x)

    def _words(self, x: Tensor) -> Tensor:
        """x (batch, d_model) → logits (batch, vocab_size)."""
        head, stack = self.model.output, self.model.decoder
        assert isinstance(head, heads.WordHead) and stack is not None and stack.norm is not None
        found = None
        if x.shape[0] == 1 and head.scale is None:
            if isinstance(head, QuantizedHead):
                found = _matrix(head.words)
            elif head.bias is None:
                found = (self.model.embedding.weight if head.weight is None else head.weight), None
        if found is not None:
            gain, eps = stack.norm.weight, stack.norm.eps
            return self.kernels.matvec(x, *found, gain, eps, out=self.logits, pdl=self.pdl)
        features = self.normed(x)
        numbers = _numbers(head.words) if isinstance(head, QuantizedHead) and head.scale is None else None
        if numbers is not None and len(x) <= self.kernels.FEW:
            return self.kernels.product(features, *numbers)
        return self.model.head(features.unsqueeze(1))[:, 0]


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
