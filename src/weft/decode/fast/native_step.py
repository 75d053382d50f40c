"""The native path: a decoder's step for some tokens of each text in one call (`native/decode/step.c`).

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

MAX_FLOAT_ROWS = 32  # up to which step.c is faster than torch's products in float32, as measured on ARM and x86
BYTES_A_THREAD = 4 << 20  # bytes of weights that another thread pays for: it is waited for after every product


class NativeRows:
    """Some more tokens of each of some texts, over and over.

    keys, values (layers, blocks, kv_heads, block_size, d_head): a text's table names the blocks that it has. What a
    text gets is the same to the bit whatever the others are; and whether its tokens are read at once or in parts, as
    long as these have more than one.
    """

    def __init__(self, model: Transformer, keys: Tensor, values: Tensor):
        assert model.decoder is not None and model.decoder.norm is not None
        self.model, settings, blocks = model, model.config, model.decoder.blocks
        self.kept: list[Tensor] = []  # what is pointed to and belongs to nobody else
        layers = (self._layer(block, keys[n], values[n]) for n, block in enumerate(blocks))
        self.layers = (native.Layer * len(blocks))(*layers)
        self.words, self.scale = self._head(), getattr(model.output, "scale", None)
        first: Any = blocks[0]
        attention, forward = settings.attention, settings.feedforward
        sizes = len(blocks), settings.d_model, attention.heads, attention.groups, settings.d_head, forward.d_ff
        kind = isinstance(forward, Gated), native.ACTIVATIONS[forward.activation]
        block = keys.shape[3], keys.stride(1)
        last = self._norm(model.decoder.norm), native.Matrix() if self.words is None else self.words
        self.found = native.Model(*sizes, *kind, *block, first.attention.scale, None, None, self.layers, *last)
        self.places, self.angles = 0, list[Tensor]()  # (places, d_head / 2) each, where there are any
        self.ones = torch.empty(0, dtype=torch.int64)
        self.results: dict[int, Tensor] = {}  # by width, written again and again: new memory would be cleared first
        self.held = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))

    def step(self, x: Tensor, places: Tensor, tables: Tensor) -> Tensor:
        """Read an embedded token (rows, d_model) of each text, at places (rows,), in the blocks of tables (rows, width)
        → logits (rows, V), good until the next call."""
        direct = self.words is not None and self.scale is None
        found = self(x, places, tables, logits=direct)
        return found if direct else self.head(found)

    def __call__(
        self, x: Tensor, places: Tensor, tables: Tensor, counts: Tensor | None = None, logits: bool = False
    ) -> Tensor:
        """The same with the next counts (texts,) tokens of each text, x (rows, d_model), from places (texts,) on →
        features (rows, d_model), or logits."""
        assert self.model.decoder is not None
        self._rotate(tables.shape[1] * self.found.block)
        if counts is None:
            counts = self.ones = self.ones if len(self.ones) == len(places) else torch.ones_like(places)
            each = places
        else:
            each = torch.arange(len(x)) + (places - counts.cumsum(0) + counts).repeat_interleave(counts)
        x = self.model.decoder.position.embed(x[:, None], each[:, None]).contiguous()
        width = self.found.head.rows if logits else self.found.d_model
        if (result := self.results.get(width)) is None or len(result) != len(x):
            result = self.results[width] = torch.empty(len(x), width)
        texts = native.Texts(*tables.shape, *map(native.address, (counts, places, tables)))
        library: Any = native.library()
        given = self.found, x.data_ptr(), texts, logits, result.data_ptr(), self.threads(len(x))
        if library.weft_step(*given):
            raise MemoryError("a decoding step found no memory")
        return result

    def head(self, features: Tensor) -> Tensor:
        """Features (rows, d_model) → logits (rows, V)."""
        if self.words is None:
            return self.model.head(features[:, None])[:, 0]
        features = features if self.scale is None else features * self.scale
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
        """The table that gives the logits, where features times it, scaled or not, is all that the head does."""
        head = self.model.output
        if isinstance(head, QuantizedHead):
            return self._matrix(head.words) if isinstance(head.words.product, Native) else None
        if type(head) is not heads.LMHead:
            return None
        table = self.model.embedding.weight if head.weight is None else head.weight
        return native.matrix(table.detach(), table.shape, bias=None if head.bias is None else head.bias.detach())

    def _keep(self, tensor: Any) -> int:
        self.kept.append(tensor.detach().contiguous())
        return self.kept[-1].data_ptr()


class NativeStep:
    """What comes after what a state holds: one more token, over and over, or several of each row."""

    def __init__(self, model: Transformer, state: TransformerState):
        store = state.cache.store  # (layers, 2, rows, kv_heads, max_len, d_head): a row is one block
        self.state, self.table = state, torch.arange(store.shape[2])[:, None]
        self.rows = NativeRows(model, store[:, 0], store[:, 1])
        self.last: list[int] | None = None  # what n-grams are made of, the newest token first

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read tokens (1,) of a state of one row → logits (1, vocab_size), good until the next call."""
        state, model = self.state, self.rows.model
        state.reserve(1)
        x = model.embed(tokens, model.embedding)
        if model.ngrams is not None:
            x = x + model.ngrams.embed_one(self._last(int(tokens)))
        logits = self.rows.step(x, state.lengths, self.table)
        state.advance(1)
        return logits

    def _last(self, token: int) -> list[int]:
        """The last tokens with this one, which is counted as read."""
        state, model = self.state, self.rows.model
        assert model.ngrams is not None and state.history is not None
        if self.last is None:
            self.last = state.history.last(model.ngrams.reach, state.lengths)[0].tolist()[::-1]
        last = [token, *self.last]
        self.last, state.history.tokens[0, state.longest] = last[:-1], token
        return last

    def read(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        """Read tokens (rows, time), of row i the first lengths[i] → features (rows, time, d_model), 0 after these."""
        state, model, (batch, time) = self.state, self.rows.model, tokens.shape
        state.reserve(time)
        self.last = None
        x = model.embed_next(tokens, state.lengths, state.history)
        counts = torch.full((batch,), time) if lengths is None else lengths
        real = torch.arange(time) < counts[:, None]
        features = x.new_zeros(batch, time, model.config.d_model)
        features[real] = self.rows(x[real], state.lengths, self.table, counts)
        state.advance(time, lengths)
        return features


def reading_pays(model: Transformer, tokens: int) -> bool:
    """Whether so many tokens at once are read faster than by torch's operations; those have their own products in
    float32 alone."""
    first: Any = model.decoder.blocks[0]  # type: ignore[union-attr]
    return tokens <= MAX_FLOAT_ROWS or isinstance(first.attention.qkv, QuantizedLinear)


def weights_are_native(model: Transformer) -> bool:
    """Whether the library can read all of a decoder's matrices."""
    parts = [part for part in model.decoder.modules() if isinstance(part, nn.Linear | QuantizedLinear)]  # type: ignore[union-attr]
    return all(type(p) is Linear or (isinstance(p, QuantizedLinear) and isinstance(p.product, Native)) for p in parts)
