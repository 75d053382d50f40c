"""The native path: a decoder's step for one token of each text in one call (`c/step.c`).

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


class NativeRows:
    """One more token of each of some texts, over and over.

    keys, values (layers, blocks, kv_heads, block_size, d_head): a text's table names the blocks that it has.
    `head`: whether a step ends in logits. What a text gets is the same to the bit whatever the others are.
    """

    def __init__(self, model: Transformer, keys: Tensor, values: Tensor, head: bool):
        assert model.decoder is not None and model.decoder.norm is not None
        self.model, settings, blocks = model, model.config, model.decoder.blocks
        self.kept: list[Tensor] = []  # what is pointed to and belongs to nobody else
        layers = (self._layer(block, keys[n], values[n]) for n, block in enumerate(blocks))
        self.layers = (native.Layer * len(blocks))(*layers)
        self.words = self._head()
        first: Any = blocks[0]
        attention, forward = settings.attention, settings.feedforward
        sizes = len(blocks), settings.d_model, attention.heads, attention.groups, settings.d_head, forward.d_ff
        kind = isinstance(forward, Gated), native.ACTIVATIONS[forward.activation]
        block = keys.shape[3], keys.stride(1)
        last = self._norm(model.decoder.norm), self.words if head and self.words is not None else native.Matrix()
        self.found = native.Model(*sizes, *kind, *block, first.attention.scale, None, None, self.layers, *last)
        self.ends_in_features = head and self.words is None
        self.places, self.angles = 0, list[Tensor]()  # (places, d_head / 2) each, where there are any
        self.result = torch.empty(0, 0)  # written again and again: new memory would have to be cleared first
        self.held = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))

    def __call__(self, x: Tensor, places: Tensor, tables: Tensor) -> Tensor:
        """Read embedded tokens (rows, 1, d_model) at places (rows,) of texts in the blocks of tables (rows, width) →
        logits (rows, V), or features (rows, d_model), good until the next call."""
        model, rows = self.model, len(x)
        assert model.decoder is not None
        self._rotate(tables.shape[1] * self.found.block)
        x = model.decoder.position.embed(x, places[:, None]).contiguous()
        if self.result.shape != (size := (rows, self.found.head.rows or self.found.d_model)):
            self.result = torch.empty(size)
        texts = native.Texts(rows, tables.shape[1], native.address(places), native.address(tables))
        library: Any = native.library()
        if library.weft_step(self.found, x.data_ptr(), texts, self.result.data_ptr(), self.threads(rows)):
            raise MemoryError("a decoding step found no memory")
        return model.head(self.result[:, None])[:, 0] if self.ends_in_features else self.result

    def head(self, features: Tensor) -> Tensor:
        """Features (rows, d_model) → logits (rows, V)."""
        if self.words is None:
            return self.model.head(features[:, None])[:, 0]
        return native.multiply(self.words, features, self.threads(len(features)))

    def threads(self, rows: int) -> int:
        return min(torch.get_num_threads(), 1 + rows * self.held // BYTES_A_THREAD)

    def _rotate(self, places: int) -> None:
        """Angles for so many places: at least twice as many as before, if those don't suffice."""
        if places <= self.places:
            return
        assert self.model.decoder is not None
        self.places = max(places, 2 * self.places)
        angles = self.model.decoder.position.angles(torch.arange(self.places)[None], self.places, torch.float32)
        if angles is not None:
            self.angles = [angle[0, 0].contiguous() for angle in angles]
            self.found.cos, self.found.sin = (native.address(angle) for angle in self.angles)

    def _layer(self, block: Any, keys: Tensor, values: Tensor) -> native.Layer:
        attention, forward = block.attention, block.feedforward
        up = forward.gate_up if hasattr(forward, "gate_up") else forward.up
        return native.Layer(
            self._norm(block.attention_skip.norm),
            self._norm(block.feedforward_skip.norm),
            *(self._matrix(part) for part in (attention.qkv, attention.out, up, forward.down)),
            keys.data_ptr(),
            values.data_ptr(),
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


class NativeStep:
    """One more token after what a state of one row holds, over and over."""

    def __init__(self, model: Transformer, state: TransformerState):
        assert state.lengths.shape[0] == 1
        store = state.cache.store  # (layers, 2, 1, kv_heads, max_len, d_head)
        self.state, self.table = state, torch.zeros(1, 1, dtype=torch.int64)  # its one block is the whole cache
        self.rows = NativeRows(model, store[:, 0], store[:, 1], head=True)
        self.last: list[int] = []  # what n-grams are made of, the newest token first
        if model.ngrams is not None and state.read is not None:
            self.last = state.read.last(model.ngrams.reach, state.lengths)[0].tolist()[::-1]

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read tokens (1,) → logits (1, vocab_size)."""
        state, model = self.state, self.rows.model
        state.reserve(1)
        x = model.embed(tokens[:, None], model.embedding)
        if model.ngrams is not None and state.read is not None:
            last = [int(tokens), *self.last]
            x = x + model.ngrams.of_one(last)
            self.last, state.read.tokens[0, state.longest] = last[:-1], last[0]
        logits = self.rows(x, state.lengths, self.table)
        state.advance(1)
        return logits


def weights_are_native(model: Transformer) -> bool:
    """Whether the library can read all of a decoder's matrices."""
    parts = [part for part in model.decoder.modules() if isinstance(part, nn.Linear | QuantizedLinear)]  # type: ignore[union-attr]
    return all(type(p) is Linear or (isinstance(p, QuantizedLinear) and isinstance(p.product, Native)) for p in parts)
