"""The native path: a decoder's step for one row in one call (`c/step.c`).

It reads a Transformer's own weights, quantized ones too, and gives the logits that `model.step` gives but for rounding.
"""

from typing import Any

import torch
from torch import Tensor, nn

from weft.decode.fast import native
from weft.decode.fast.products import Native
from weft.decode.fast.quantize import QuantizedHead, QuantizedLinear
from weft.models import heads
from weft.models.transformer import Transformer, TransformerState
from weft.nn.config import Gated
from weft.nn.linear import Linear
from weft.nn.norm import LayerNorm, RMSNorm

BYTES_A_THREAD = 4 << 20  # bytes of weights that another thread pays for: it is waited for after every product


class NativeStep:
    """One more token after what a state of one row holds, over and over."""

    def __init__(self, model: Transformer, state: TransformerState):
        assert model.decoder is not None and model.decoder.norm is not None and state.lengths.shape[0] == 1
        self.model, self.state, settings = model, state, model.config
        self.kept: list[Tensor] = []  # what is pointed to and belongs to nobody else
        self.places = torch.arange(state.max_len)[None]
        angles = model.decoder.position.angles(self.places, state.max_len, torch.float32)
        cos, sin = (None, None) if angles is None else (self._keep(angle[0, 0]) for angle in angles)
        blocks, store = model.decoder.blocks, state.cache.store  # (layers, 2, 1, kv_heads, max_len, d_head)
        self.layers = (native.Layer * len(blocks))(*(self._layer(b, store[n, :, 0]) for n, b in enumerate(blocks)))
        found = self._head()
        first: Any = blocks[0]
        attention, forward = settings.attention, settings.feedforward
        sizes = len(blocks), settings.d_model, attention.heads, attention.groups, settings.d_head, forward.d_ff
        kind = isinstance(forward, Gated), native.ACTIVATIONS[forward.activation]
        last = self._norm(model.decoder.norm), native.Matrix() if found is None else found
        self.found = native.Model(*sizes, *kind, state.max_len, first.attention.scale, cos, sin, self.layers, *last)
        self.result = torch.empty(1, settings.d_model if found is None else found.rows)
        held = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))
        self.threads = min(torch.get_num_threads(), 1 + held // BYTES_A_THREAD)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read tokens (1,) → logits (1, vocab_size), good until the next step."""
        model, state, place = self.model, self.state, self.state.longest
        assert model.decoder is not None
        state.reserve(1)
        x = model.embed(tokens[None], model.embedding)
        x = model.decoder.position.embed(x, self.places[:, place : place + 1])
        library: Any = native.library()
        given = self.found, x.contiguous().data_ptr(), place, self.result.data_ptr(), self.threads
        if library.weft_step(*given):
            raise MemoryError("a decoding step found no memory")
        state.advance(1)
        return self.result if self.found.head.rows else model.head(self.result[None])[:, 0]

    def _layer(self, block: Any, cache: Tensor) -> native.Layer:
        """A block and its part (2, kv_heads, max_len, d_head) of the cache."""
        attention, forward = block.attention, block.feedforward
        up = forward.gate_up if hasattr(forward, "gate_up") else forward.up
        return native.Layer(
            self._norm(block.attention_skip.norm),
            self._norm(block.feedforward_skip.norm),
            *(self._matrix(part) for part in (attention.qkv, attention.out, up, forward.down)),
            native.address(cache[0]),
            native.address(cache[1]),
        )

    def _norm(self, norm: Any) -> native.Norm:
        assert isinstance(norm, LayerNorm | RMSNorm)
        centred = isinstance(norm, LayerNorm)
        bias = self._keep(norm.bias) if centred and norm.bias is not None else None
        return native.Norm(self._keep(norm.weight), bias, norm.eps, 0.0 if centred else norm.offset, centred)

    def _matrix(self, part: Any) -> native.Matrix:
        bias = None if part.bias is None else part.bias.detach()
        if isinstance(part, QuantizedLinear):
            assert isinstance(part.product, Native)
            return part.product.matrix(bias)
        assert isinstance(part, Linear)
        return native.matrix(part.weight.detach(), part.weight.shape, bias=bias)

    def _head(self) -> native.Matrix | None:
        """The table that gives the logits, where features times it is all that the head does."""
        head = self.model.output
        if not isinstance(head, heads.LMHead) or head.scale is not None:
            return None
        if isinstance(head, QuantizedHead):
            return self._matrix(head.words) if isinstance(head.words.product, Native) else None
        if type(head) is not heads.LMHead or head.bias is not None:
            return None
        table = self.model.embedding.weight if head.weight is None else head.weight
        return native.matrix(table.detach(), table.shape)

    def _keep(self, tensor: Any) -> int:
        self.kept.append(tensor.detach().contiguous())
        return self.kept[-1].data_ptr()


def weights_are_native(model: Transformer) -> bool:
    """Whether the library can read all of a decoder's matrices."""
    parts = [part for part in model.decoder.modules() if isinstance(part, nn.Linear | QuantizedLinear)]  # type: ignore[union-attr]
    return all(type(p) is Linear or (isinstance(p, QuantizedLinear) and isinstance(p.product, Native)) for p in parts)
