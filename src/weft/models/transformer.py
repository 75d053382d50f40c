"""The Transformer (Vaswani et al. 2017) as encoder, decoder or both: one class over one Block."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.errors import ModelError
from weft.models import heads
from weft.models.base import LanguageModel, Source, State, check_tokens
from weft.models.config import Decoder, Encoder, EncoderDecoder, TransformerConfig
from weft.nn import norm, position
from weft.nn.block import Block
from weft.nn.cache import KeyValueCache, Past, ReadTokens
from weft.nn.dropout import Dropout, RowRng, number_dropouts
from weft.nn.hashed_ngrams import NGramEmbedding
from weft.nn.init import Initialiser, reset
from weft.nn.linear import Embedding, Linear
from weft.nn.loss import Readout
from weft.nn.mask import AttentionMask, Mask, Ranges, map_blocks, taken
from weft.nn.position import Position
from weft.nn.scaled_dot_product import Probabilities

SourceCache = list[tuple[Tensor, Tensor]]  # keys and values of the source, layer by layer


class Given(TypedDict, total=False):
    """What else a pass over whole sequences may be given."""

    documents: Tensor | None  # (batch, time) ids that keep packed documents apart
    mask: Tensor | None  # (batch, time) True where a token is real
    prefix: Tensor | None  # (batch,) so many tokens are read in both directions by a decoder
    ranges: Ranges  # the places of whole rows that are read here, where processes divide them
    rng: RowRng | None  # what dropout draws from
    hidden: Tensor | None  # (batch, time, d_model), of the layers before these, which are elsewhere
    encoded: Tensor | None  # (batch, source time, d_model), what the encoder has made of the source
    map_blocks: Callable[..., Any]  # makes FlexAttention's map of a mask; for a compiler, outside of its graphs


class EncodedSource(NamedTuple):
    """What a decoder reads of its source."""

    cache: SourceCache
    mask: AttentionMask


class LayerInputs(NamedTuple):
    """What the layers of a stack read besides hidden states: a mask for each kind of layer, keys and values of other
    tokens for each layer, the source, and what dropout draws from."""

    masks: Sequence[AttentionMask]
    cache: Sequence[Past | None] | None = None
    source: EncodedSource | None = None
    rng: RowRng | None = None


class Stack(nn.Module):
    """Embedded tokens in, features out: positions, blocks, and the last norm where the blocks norm first."""

    def __init__(self, settings: TransformerConfig, layers: int, causal: bool, cross: bool):
        super().__init__()
        d_model, sizes = settings.d_model, settings.sizes(layers, causal)
        self.causal = causal
        self.windows = [kind.window for kind in settings.kinds()]
        self.position = position.build(settings.position, sizes)
        # kinds of layers that know positions in their own way, by their number in the pattern
        own = {str(number): kind.position for number, kind in enumerate(settings.pattern) if kind.position is not None}
        self.positions = nn.ModuleDict({number: position.build(each, sizes) for number, each in own.items()})
        self.embedding_norm = norm.build(settings.norm, settings.added_width) if settings.embedding_norm else None
        self.dropout = Dropout(settings.dropout)
        self.narrow = isinstance(settings, Encoder)  # what is added to embeddings is as narrow as they are
        self.projection = Linear(settings.width, d_model, bias=self.narrow) if settings.factorised else None
        self.sharing = settings.sharing
        blocks = layers // self.sharing
        self.blocks = nn.ModuleList(
            Block(settings, cross, n % len(self.windows), settings.first_norm or n > 0) for n in range(blocks)
        )
        self.norm = norm.build(settings.norm, d_model) if settings.last_norm else None
        self.context: Past | None = None  # where processes divide rows: gives the keys and values of whole ones
        self.recompute = False  # keep only the blocks' inputs for the backward pass, and run the blocks again

    @property
    def layers(self) -> list[nn.Module]:
        """The block of each layer, from the lowest up; layers in a row may share one."""
        return [block for block in self.blocks for _ in range(self.sharing)]

    @property
    def switches(self) -> list[int]:
        """The lengths above which a text is read by other angles, in ascending order."""
        return sorted({each.switch for each in (self.position, *self.positions.values()) if each.switch})  # type: ignore[misc]

    def masks(
        self, mask: Mask, queries: Tensor, keys: Tensor, dtype: torch.dtype, lengths: Tensor | None = None
    ) -> list[AttentionMask]:
        """A mask for every kind of layer, with its window, and what positions do there.

        queries (batch or 1, time) and keys (batch or 1, source time) are those of the tokens and of all keys; angles
        are of type `dtype`, and those of texts of these `lengths` (batch,) where they are given.
        """
        made = []
        for number, window in enumerate(self.windows):
            key = str(number)
            used = self.positions[key] if key in self.positions else self.position  # noqa: SIM401 — no dict
            assert isinstance(used, Position)
            by_row = lengths is not None and used.switch is not None
            angles = used.angles(queries, lengths if by_row else keys.shape[1], dtype)  # type: ignore[arg-type]
            made.append(AttentionMask(replace(mask, window=window), used, queries, keys, angles))
        return made

    def begin(self, x: Tensor, positions: Tensor, rng: RowRng | None) -> Tensor:
        """Embedded tokens x (batch, time, width) → what the first layer reads, (batch, time, d_model)."""
        x = x if self.projection is None or self.narrow else self.projection(x)
        x = self.position.embed(x, positions)
        x = self.dropout(_narrowed(x if self.embedding_norm is None else self.embedding_norm(x)), rng)
        return self.projection(x) if self.projection is not None and self.narrow else x

    def forward(self, x: Tensor, positions: Tensor | None, given: LayerInputs) -> Tensor:
        """x (batch, time, width) at `positions` → (batch, time, d_model); without positions, x are hidden states."""
        masks, cache, source, rng = given
        x = _narrowed(x) if positions is None else self.begin(x, positions, rng)
        again = self.recompute and torch.is_grad_enabled()
        if again:
            for mask in (*masks, *([] if source is None else [source.mask])):
                mask.prepare()
        for layer, block in enumerate(self.layers):
            inputs: dict[str, Any] = {
                "mask": masks[block.kind],  # type: ignore[call-overload]
                "past": cache[layer] if cache else None,
                "source": None if source is None else (source.cache[layer], source.mask),
                "rng": None if rng is None else rng.repeated(layer % self.sharing),
            }
            x = checkpoint(block, x, use_reentrant=False, **inputs) if again else block(x, **inputs)
        return x if self.norm is None else self.norm(x)


class TransformerState(State):
    """Keys and values of what was read, and of the source where there is one.

    Rows that stand side by side and are written from one source, as beams are, share its keys and values and its mask:
    these have a row for every `sharing` rows.
    """

    can_grow = True

    def __init__(
        self,
        cache: KeyValueCache,
        batch: int,
        max_len: int,
        source_cache: SourceCache | None,
        source_mask: Tensor | None,
    ):
        super().__init__(batch, max_len, cache.store.device)
        self.cache, self.source_cache, self.source_mask = cache, source_cache, source_mask
        self.read: ReadTokens | None = None  # where what is read depends on the tokens before it

    @property
    def sharing(self) -> int:
        """Rows that share a row of the source."""
        return 1 if self.source_cache is None else self.lengths.shape[0] // self.source_cache[0][0].shape[0]

    def _append(self, positions: int) -> None:
        self.cache.append(positions)
        if self.read is not None:
            self.read.append(positions)

    def reorder(self, index: Tensor) -> None:
        """Row i goes on from where row index[i] is. A source is copied only where its rows change."""
        rows = index // self.sharing
        super().reorder(index)
        self.cache.reorder(index, self.longest)
        if self.read is not None:
            self.read.reorder(index)
        if self.source_cache is None:
            return
        few, counts = rows.unique_consecutive(return_counts=True)
        rows = few if bool((counts == counts[0]).all()) else rows
        source = self.source_cache[0][0]
        if len(rows) == source.shape[0] and bool((rows == torch.arange(len(rows), device=rows.device)).all()):
            return
        self.source_cache = [(k[rows], v[rows]) for k, v in self.source_cache]
        self.source_mask = None if self.source_mask is None else self.source_mask[rows]


class Transformer(LanguageModel):
    """Encoder (BERT), decoder (GPT, LLaMA) or encoder–decoder, by the config's type."""

    config: Decoder | Encoder | EncoderDecoder

    def __init__(self, settings: Decoder | Encoder | EncoderDecoder):
        super().__init__()
        self.config = settings
        self.embedding = Embedding(settings.vocab_size, settings.width)
        self.source_embedding = self.segments = self.ngrams = self.encoder = self.decoder = None
        if isinstance(settings, EncoderDecoder):
            if settings.source_vocab_size is not None:
                self.source_embedding = Embedding(settings.source_vocab_size, settings.width)
            self.encoder = Stack(settings, settings.encoder_layers or settings.layers, causal=False, cross=False)
            self.decoder = Stack(settings, settings.layers, causal=True, cross=True)
        elif isinstance(settings, Encoder):
            self.segments = Embedding(settings.segments, settings.width) if settings.segments else None
            self.encoder = Stack(settings, settings.layers, causal=False, cross=False)
        else:
            self.ngrams = NGramEmbedding(settings.ngrams, settings.width) if settings.ngrams else None
            self.decoder = Stack(settings, settings.layers, causal=True, cross=False)
        self.output = heads.build(settings, settings.head)
        self.reset_parameters()
        self.number_dropouts()

    def reset_parameters(self) -> None:
        # A table of the head's own is drawn before the rest: so a seed gives the weights that it always gave.
        reset(self, Initialiser(self.config.init, self.config.d_model, self.config.layers), first=(heads.TokenHead,))

    def number_dropouts(self) -> None:
        """Give every dropout a number of its own, and blocks that several layers share one for each layer."""
        number_dropouts(self, lambda part: self.config.sharing if isinstance(part, Block) else 0)

    def forward_features(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        source: Source | None = None,
        **given: Unpack[Given],
    ) -> Tensor:
        """tokens (batch, time) → (batch, time, d_model).

        positions (batch, time) where they are not 0 … time − 1; segments (batch, time) for an encoder; source for an
        encoder–decoder. With `ranges`, tokens and segments are those of the ranges alone, and what else is given is
        that of whole rows: the queries of the ranges are compared with all of a row's keys.
        """
        stack, rng, hidden = self.decoder or self.encoder, given.get("rng"), given.get("hidden")
        assert stack is not None
        maps, read = given.get("map_blocks", map_blocks), None
        if self.decoder is not None and self.encoder is not None:
            source = self._given(source)
            encoded = given.get("encoded")
            encoded = self.encode(source, rng=rng, map_blocks=maps) if encoded is None else encoded
            read = encoded_source(self.source_cache(encoded, rng), source.mask, tokens.shape[1])
        documents, ranges = given.get("documents"), given.get("ranges", ())
        seen = Mask(
            causal=stack.causal,
            prefix=given.get("prefix"),
            real=given.get("mask"),
            documents=None if documents is None else (taken(documents, ranges), documents),
            ranges=ranges,
        )
        x = self.embed(tokens, self.embedding, segments) if hidden is None else hidden
        if self.ngrams is not None and hidden is None:
            x = x + self.ngrams(tokens, None, seen.real if documents is None else documents)
        keys = _places(tokens) if positions is None else positions
        queries = taken(keys, ranges)
        masks = [mask.mapped(maps) for mask in stack.masks(seen, queries, keys, x.dtype)]
        others = [stack.context] * len(stack.layers) if ranges else None
        return stack(x, queries if hidden is None else None, LayerInputs(masks, others, read, rng))

    def head(self, features: Tensor, mask: Tensor | None = None, rng: RowRng | None = None) -> Any:
        """Logits (batch, time, vocab_size), or a class, tag or vector."""
        return self.output(features, self.embedding.weight, mask, rng)

    def forward(self, tokens: Tensor, **given: Any) -> Any:
        return self.head(self.features(tokens, **given), given.get("mask"), given.get("rng"))

    def readout(self, features: Tensor) -> Readout:
        head = self.token_head
        if head is None:
            raise ModelError(f"a head of kind '{self.config.head.kind}' predicts no tokens")
        return head.readout(features, self.embedding.weight)

    @property
    def token_head(self) -> heads.TokenHead | None:
        """The head that predicts tokens, if there is one."""
        head = self.output.words if isinstance(self.output, heads.PretrainingPair) else self.output
        return head if isinstance(head, heads.TokenHead) else None

    @property
    def alignment(self) -> Probabilities | None:
        """The probabilities of the last block's attention to the source, (batch, heads, time, source time)."""
        last = self.decoder.blocks[-1] if self.decoder is not None and self.encoder is not None else None
        return None if last is None else last.cross.probabilities  # type: ignore[union-attr,return-value]

    @torch.no_grad()
    def start(self, batch: int, max_len: int, source: Source | None = None) -> TransformerState:
        """An empty cache for `batch` sequences of up to `max_len` tokens; the source is read here, once."""
        if self.decoder is None or not isinstance(self.output, heads.LMHead):
            raise ModelError(f"{self._name()} with a head of kind '{self.config.head.kind}' cannot generate")
        if len(self.decoder.layers) < self.config.layers:
            instead = "load its checkpoint on one process"
            raise ModelError(f"a model whose layers are divided into stages can't generate; {instead}")
        longest = self.config.longest
        if longest is not None and max_len > longest:
            exceeded = f"{longest} positions that this model has learned (model.context)"
            raise ModelError(f"{max_len} tokens exceed the {exceeded}")
        table, first = self.embedding.weight, self.decoder.blocks[0]
        assert isinstance(first, Block)
        shape = len(self.decoder.blocks), 2, batch, first.attention.kv_heads, max_len, self.config.d_head
        cache = KeyValueCache(torch.zeros(shape, dtype=table.dtype, device=table.device))
        if self.encoder is None:
            state, switches = TransformerState(cache, batch, max_len, None, None), self.decoder.switches
            if switches or self.ngrams is not None:
                state.read = ReadTokens(switches, state.lengths, max_len)
            return state
        source = self._given(source)
        return TransformerState(cache, batch, max_len, self.source_cache(self.encode(source)), source.mask)

    @torch.no_grad()
    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        """tokens (batch, time) after what `state` holds → features (batch, time, d_model)."""
        assert isinstance(state, TransformerState) and self.decoder is not None
        time, stack, ahead = tokens.shape[1], self.decoder, _places(tokens)
        state.reserve(time)
        total = None
        if state.read is not None and len(state.read.switches):
            total = state.lengths + (time if lengths is None else lengths.to(state.lengths))
            if state.read.passes(tokens, state.lengths, total):
                return self._read_again(time, total, state, even=state.even and lengths is None)
        x = self.embed_next(tokens, state.lengths, state.read)
        places = ahead + state.longest if state.even else ahead + state.lengths[:, None]
        keys = torch.arange(state.longest + time, device=tokens.device)[None]
        # of even rows, one query comes after the whole cache
        mask = Mask(time > 1, offset=state.longest) if state.even else Mask(causal=True, places=places)
        masks = stack.masks(mask, places, keys, x.dtype, total)
        written = None if state.even else places
        cache = [state.cache.layer(number, written, state.longest) for number in range(len(stack.blocks))]
        source = None
        if state.source_cache is not None:
            source = encoded_source(state.source_cache, state.source_mask, time * state.sharing)
        features = stack(x, places, LayerInputs(masks, cache, source))
        state.advance(time, lengths)
        return features

    def _read_again(self, time: int, total: Tensor, state: TransformerState, even: bool) -> Tensor:
        """The features of the last `time` tokens of rows that are read from their beginning on."""
        assert state.read is not None
        places = state.lengths[:, None, None] + torch.arange(time, device=total.device)[:, None]
        whole = state.read.tokens[:, : state.longest + time].clone()
        state.lengths, state.longest, state.even = torch.zeros_like(total), 0, True
        features = self.advance(whole, state, None if even else total)
        return features.gather(1, places.expand(-1, -1, features.shape[-1]))

    def _given(self, source: Source | None) -> Source:
        if source is None:
            raise ModelError(f"{self._name()} reads a source before it writes; none was given")
        return source

    def embed_next(self, tokens: Tensor, lengths: Tensor, read: ReadTokens | None) -> Tensor:
        """tokens (batch, time) after the first `lengths` (batch,) of those that were `read` → (batch, time, width)."""
        x = self.embed(tokens, self.embedding)
        if self.ngrams is None:
            return x
        assert read is not None
        read.add(tokens, lengths)
        return x + self.ngrams(tokens, read.last(self.ngrams.reach, lengths))

    def embed(self, tokens: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        """tokens (batch, time) → (batch, time, width), in an encoder with what their segments add."""
        check_tokens(tokens, table.num_embeddings)
        x, factor = table(tokens), self.config.embedding_factor
        x = x if factor is None else x * factor
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        return x

    def encode(
        self,
        source: Source,
        *,
        rng: RowRng | None = None,
        hidden: Tensor | None = None,
        map_blocks: Callable[..., Any] = map_blocks,
    ) -> Tensor:
        """What the encoder makes of the source, (batch, source time, d_model); `hidden` as in `Given`."""
        assert self.encoder is not None
        x = self.embed(source.tokens, self.source_embedding or self.embedding) if hidden is None else hidden
        places = _places(source.tokens)
        masks = self.encoder.masks(Mask(causal=False, real=source.mask), places, places, x.dtype)
        inputs = LayerInputs([mask.mapped(map_blocks) for mask in masks], rng=rng)
        return self.encoder(x, places if hidden is None else None, inputs)

    def source_cache(self, encoded: Tensor, rng: RowRng | None = None) -> SourceCache:
        """Every decoder layer's keys and values of an encoded source (batch, source time, d_model)."""
        assert self.decoder is not None
        return [block.cross.keys_values(encoded, rng) for block in self.decoder.blocks]  # type: ignore[operator,union-attr]


def _narrowed(x: Tensor) -> Tensor:
    """x as bf16 where products are: what runs along the skip connections is then half as wide. fp16 is left out; its
    range is too small for a sum over many layers."""
    device = x.device.type
    narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    return x.bfloat16() if narrow else x


def _places(tokens: Tensor) -> Tensor:
    """0 … time − 1, (1, time)."""
    return torch.arange(tokens.shape[1], device=tokens.device)[None]


def encoded_source(cache: SourceCache, mask: Tensor | None, time: int) -> EncodedSource:
    """A source as `time` queries read it: every real token of it; positions take no part."""
    keys = cache[0][0]
    queries, places = (torch.arange(length, device=keys.device)[None] for length in (time, keys.shape[2]))
    return EncodedSource(cache, AttentionMask(Mask(causal=False, real=mask), Position(), queries, places))
