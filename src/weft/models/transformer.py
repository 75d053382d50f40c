"""Transformer (Vaswani et al. 2017) as encoder, decoder or both: one class over one Block."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.data.batch import Source
from weft.errors import ModelError
from weft.models import heads
from weft.models.base import EncoderInput, LanguageModel, State, check_tokens
from weft.models.config import Decoder, Encoder, EncoderDecoder
from weft.models.stack import MaskedSource, SourceCache, Stack
from weft.nn.block import Block
from weft.nn.cache import KeyValueCache, TokenHistory
from weft.nn.dropout import RowRng, number_dropouts
from weft.nn.hashed_ngrams import NGramEmbedding
from weft.nn.init import Initialiser, reset
from weft.nn.linear import Embedding
from weft.nn.loss import Readout
from weft.nn.mask import AttentionMask, Mask, Ranges, build_block_mask, select_ranges
from weft.nn.position import Position
from weft.nn.scaled_dot_product import Probabilities

KEPT_IN_TRAINING = 1 - 0.15 * 0.8  # fraction of tokens that ESM's training did not replace by the mask token


class RowInputs(NamedTuple):
    """Inputs of a pass over whole sequences, besides their tokens.

    With `ranges`, this process reads only these indices of every row: tokens and segments are those of the ranges, and
    their queries are compared with the keys of whole rows, which positions, documents and mask describe.
    """

    positions: Tensor | None = None  # (batch, time), if not 0 … time − 1
    segments: Tensor | None = None  # (batch, time), for an encoder
    source: EncoderInput | None = None  # for an encoder–decoder
    documents: Tensor | None = None  # (batch, time) ids; packed documents don't see each other
    mask: Tensor | None = None  # (batch, time), True where a token is real
    ranges: Ranges = ()
    rng: RowRng | None = None  # generator for dropout
    routing: list[Tensor] | None = None  # routers of experts append their sums (`nn/experts.py`)


class TransformerState(State):
    """Keys and values of the tokens read so far, and of the source if there is one. Adjacent rows with one source, such
    as beams, share its keys, values and mask: these have a row for every `sharing` rows."""

    def __init__(
        self,
        cache: KeyValueCache,
        batch: int,
        max_len: int,
        *,
        source_cache: SourceCache | None = None,
        source_mask: Tensor | None = None,
    ):
        super().__init__(batch, max_len, cache.store.device)
        self.cache, self.source_cache, self.source_mask = cache, source_cache, source_mask
        self.can_grow = isinstance(cache, KeyValueCache)  # a paged cache cannot
        self.history: TokenHistory | None = None  # set if features depend on earlier tokens directly

    @property
    def sharing(self) -> int:
        """Number of adjacent rows that share a row of the source."""
        return 1 if self.source_cache is None else self.lengths.shape[0] // self.source_cache[0][0].shape[0]

    def _append(self, positions: int) -> None:
        self.cache.append(positions)
        if self.history is not None:
            self.history.append(positions)

    def reorder(self, index: Tensor) -> None:
        """Make row i continue from row `index[i]`. The source is copied only if its rows change."""
        rows = index // self.sharing
        super().reorder(index)
        self.cache.reorder(index, self.longest)
        if self.history is not None:
            self.history.reorder(index)
        if self.source_cache is None:
            return
        distinct, counts = rows.unique_consecutive(return_counts=True)
        rows = distinct if bool((counts == counts[0]).all()) else rows
        source = self.source_cache[0][0]
        if len(rows) == source.shape[0] and bool((rows == torch.arange(len(rows), device=rows.device)).all()):
            return
        self.source_cache = [(k[rows], v[rows]) for k, v in self.source_cache]
        self.source_mask = None if self.source_mask is None else self.source_mask[rows]


class Transformer(LanguageModel):
    """Encoder (BERT), decoder (GPT, LLaMA) or encoder–decoder, by the type of its config."""

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
            self.encoder = Stack(settings, settings.layers, causal=False, cross=False)
        else:
            self.ngrams = NGramEmbedding(settings.ngrams, settings.width) if settings.ngrams else None
            self.decoder = Stack(settings, settings.layers, causal=True, cross=False)
        if not isinstance(settings, EncoderDecoder) and settings.segments:
            self.segments = Embedding(settings.segments, settings.width)
        self.output = heads.build(settings, settings.head)
        self.reset_parameters()
        self.number_dropouts()

    def reset_parameters(self) -> None:
        # An untied table of the head is drawn first: a seed keeps giving the same weights.
        reset(self, Initialiser(self.config.init, self.config.d_model, self.config.layers), first=(heads.TokenHead,))

    def number_dropouts(self) -> None:
        """Number all dropouts; those of a block that several layers share get a number for each layer."""
        number_dropouts(self, lambda part: self.config.sharing if isinstance(part, Block) else 0)

    def forward_features(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """tokens (batch, time) → (batch, time, d_model). `RowInputs` describes the other arguments."""
        return self.forward_rows(tokens, RowInputs(**inputs))

    def forward_rows(
        self,
        tokens: Tensor,
        rows: RowInputs,
        *,
        hidden: Tensor | None = None,
        encoded: Tensor | None = None,
        build_block_mask: Callable[..., Any] = build_block_mask,
    ) -> Tensor:
        """tokens (batch, time) → (batch, time, d_model), from activations of earlier pipeline stages if given.

        `hidden` (batch, time, d_model) replaces the embedded tokens, and `encoded` (batch, source time, d_model) the
        encoder's output. `build_block_mask` makes FlexAttention's masks; a compiler gets one that it does not trace.
        """
        stack, attended, documents, rng = self.decoder or self.encoder, None, rows.documents, rows.rng
        assert stack is not None
        if self.decoder is not None and self.encoder is not None:
            if isinstance(self.config, EncoderDecoder) and self.config.start is not None and rows.source is None:
                mask = torch.ones_like(tokens, dtype=torch.bool) if rows.mask is None else rows.mask
                rows = rows._replace(source=Source(tokens, mask), mask=None)
                first = tokens.gather(1, mask.sum(1, keepdim=True) - 1)
                if isinstance(self.config.start, int):
                    first = torch.full_like(first, self.config.start)
                tokens = torch.cat((first, tokens[:, :-1]), dim=1)
            source = self.require_source(rows.source)
            if encoded is None:
                encoded = self.encode(source, rng=rng, build_block_mask=build_block_mask, routing=rows.routing)
            attended = mask_source(self.source_cache(encoded, rng), source.mask, tokens.shape[1])
        pair = None if documents is None else (select_ranges(documents, rows.ranges), documents)
        keys = _indices(tokens) if rows.positions is None else rows.positions
        wide = None if stack.causal else self.global_tokens(tokens, keys)
        visible = Mask(stack.causal, globals=wide, real=rows.mask, documents=pair, ranges=rows.ranges)
        x = self.embed(tokens, self.embedding, rows.segments, mask=rows.mask) if hidden is None else hidden
        if self.ngrams is not None and hidden is None:
            x = x + self.ngrams(tokens, None, rows.mask if documents is None else documents)
        queries = select_ranges(keys, rows.ranges)
        masks = [each.with_block_mask(build_block_mask) for each in stack.masks(visible, queries, keys, dtype=x.dtype)]
        past = [stack.context] * len(stack.layers) if rows.ranges else None
        return stack(
            x, queries if hidden is None else None, masks, past=past, source=attended, rng=rng, routing=rows.routing
        )

    def head(self, features: Tensor, mask: Tensor | None = None, rng: RowRng | None = None) -> Any:
        """Logits (batch, time, vocab_size), or a class, tag or vector."""
        return self.output(features, self.embedding.weight, mask, rng=rng)

    def forward(self, tokens: Tensor, *, mask: Tensor | None = None, rng: RowRng | None = None, **inputs: Any) -> Any:
        """Logits (batch, time, vocab_size), or a class, tag or vector, of whole sequences (batch, time)."""
        return self.head(self.features(tokens, mask=mask, rng=rng, **inputs), mask, rng)

    def readout(self, features: Tensor) -> Readout:
        head = self.token_head
        if head is None:
            raise ModelError(f"a head of kind '{self.config.head.kind}' predicts no tokens")
        return head.readout(features, self.embedding.weight)

    @property
    def token_head(self) -> heads.TokenHead | None:
        """Head that predicts tokens, if there is one."""
        head = self.output.words if isinstance(self.output, heads.PretrainingPair) else self.output
        return head if isinstance(head, heads.TokenHead) else None

    @property
    def alignment(self) -> Probabilities | None:
        """Tap of the last block's attention probabilities over the source, (batch, heads, time, source time)."""
        last = self.decoder.blocks[-1] if self.decoder is not None and self.encoder is not None else None
        return None if last is None else last.cross.probabilities  # type: ignore[union-attr,return-value]

    @torch.no_grad()
    def start(self, batch: int, max_len: int, source: EncoderInput | None = None) -> TransformerState:
        """Return an empty cache for `batch` sequences of up to `max_len` tokens; the source is encoded here, once."""
        if self.decoder is None or not isinstance(self.output, heads.LMHead):
            raise ModelError(f"{self._name()} with a head of kind '{self.config.head.kind}' cannot generate")
        if len(self.decoder.layers) < self.config.layers:
            raise ModelError("a model divided into pipeline stages cannot generate; load its checkpoint on one process")
        longest = self.config.longest
        if longest is not None and max_len > longest:
            learned = f"{longest} positions that this model has learned (model.context)"
            raise ModelError(f"{max_len} tokens exceed the {learned}")
        table, first = self.embedding.weight, self.decoder.blocks[0]
        assert isinstance(first, Block)
        parts, kv_heads, width = first.attention.cache_shape
        shape = len(self.decoder.blocks), parts, batch, kv_heads, max_len, width
        cache = KeyValueCache(torch.zeros(shape, dtype=table.dtype, device=table.device))
        if self.encoder is not None:
            source = self.require_source(source)
            source_cache = self.source_cache(self.encode(source))
            return TransformerState(cache, batch, max_len, source_cache=source_cache, source_mask=source.mask)
        state, switches = TransformerState(cache, batch, max_len), self.decoder.switches
        if switches or self.ngrams is not None:
            state.history = TokenHistory(switches, state.lengths, max_len)
        return state

    @torch.no_grad()
    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        """Read tokens (batch, time) after those in `state`; return features (batch, time, d_model)."""
        assert isinstance(state, TransformerState) and self.decoder is not None
        time, stack, ahead = tokens.shape[1], self.decoder, _indices(tokens)
        state.reserve(time)
        total = None
        if state.history is not None and len(state.history.switches):
            total = state.lengths + (time if lengths is None else lengths.to(state.lengths))
            if state.history.crosses_switch(tokens, state.lengths, total):
                return self._read_again(time, total, state, even=state.even and lengths is None)
        x = self.embed_next(tokens, state.lengths, state.history)
        indices = ahead + state.longest if state.even else ahead + state.lengths[:, None]
        keys = torch.arange(state.longest + time, device=tokens.device)[None]
        # in even rows, a single query sees the whole cache
        mask = Mask(time > 1, offset=state.longest) if state.even else Mask(causal=True, indices=indices)
        masks = stack.masks(mask, indices, keys, dtype=x.dtype, lengths=total)
        written = None if state.even else indices
        past = [state.cache.layer(number, written, state.longest) for number in range(len(stack.blocks))]
        source = None
        if state.source_cache is not None:
            source = mask_source(state.source_cache, state.source_mask, time * state.sharing)
        features = stack(x, indices, masks, past=past, source=source)
        state.advance(time, lengths)
        return features

    def _read_again(self, time: int, total: Tensor, state: TransformerState, *, even: bool) -> Tensor:
        """Read rows again from their first token; return features of the last `time` tokens."""
        assert state.history is not None
        last = state.lengths[:, None, None] + torch.arange(time, device=total.device)[:, None]
        tokens = state.history.tokens[:, : state.longest + time].clone()
        state.lengths, state.longest, state.even = torch.zeros_like(total), 0, True
        features = self.advance(tokens, state, None if even else total)
        return features.gather(1, last.expand(-1, -1, features.shape[-1]))

    def require_source(self, source: EncoderInput | None) -> EncoderInput:
        """Return the source; raise ModelError if there is none."""
        if source is None:
            raise ModelError(f"{self._name()} needs a source; none was given")
        return source

    def embed_next(self, tokens: Tensor, lengths: Tensor, history: TokenHistory | None) -> Tensor:
        """Embed tokens (batch, time) that follow the first `lengths` (batch,) of `history` → (batch, time, width)."""
        x = self.embed(tokens, self.embedding)
        if self.ngrams is None:
            return x
        assert history is not None
        history.add(tokens, lengths)
        return x + self.ngrams(tokens, history.last(self.ngrams.reach, lengths))

    def embed(
        self, tokens: Tensor, table: nn.Embedding, segments: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        """Embed tokens (batch, time) with their segments, by default the first → (batch, time, width). `mask`
        (batch, time) is True where a token is real."""
        check_tokens(tokens, table.num_embeddings)
        x, factor = table(tokens), self.config.embedding_factor
        x = x if factor is None else x * factor
        if isinstance(self.config, Encoder) and self.config.dropped_token is not None:
            dropped = (tokens == self.config.dropped_token)[..., None]
            real = tokens.shape[1] if mask is None else mask.sum(1)[:, None, None]
            x = x.masked_fill(dropped, 0.0) * (KEPT_IN_TRAINING / (1 - dropped.sum(1, keepdim=True) / real))
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        return x

    def global_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor | None:
        """Which of an encoder's tokens (batch, time) see and are seen by all, (batch, time) bool; None if none do."""
        settings = self.config.attention
        if not settings.global_tokens and settings.global_until is None:
            return None
        first = (positions < (settings.global_tokens or 0)).expand(tokens.shape)
        return first if settings.global_until is None else first | ((tokens == settings.global_until).cumsum(1) == 0)

    def encode(
        self,
        source: EncoderInput,
        *,
        rng: RowRng | None = None,
        hidden: Tensor | None = None,
        build_block_mask: Callable[..., Any] = build_block_mask,
        routing: list[Tensor] | None = None,
    ) -> Tensor:
        """Output of the encoder, (batch, source time, d_model); arguments as in `forward_rows`."""
        assert self.encoder is not None
        x = self.embed(source.tokens, self.source_embedding or self.embedding) if hidden is None else hidden
        positions = _indices(source.tokens)
        visible = Mask(causal=False, globals=self.global_tokens(source.tokens, positions), real=source.mask)
        masks = self.encoder.masks(visible, positions, positions, dtype=x.dtype)
        masks = [mask.with_block_mask(build_block_mask) for mask in masks]
        return self.encoder(x, positions if hidden is None else None, masks, rng=rng, routing=routing)

    def source_cache(self, encoded: Tensor, rng: RowRng | None = None) -> SourceCache:
        """Keys and values of an encoded source (batch, source time, d_model), for every decoder layer."""
        assert self.decoder is not None
        return [block.cross.keys_values(encoded, rng) for block in self.decoder.blocks]  # type: ignore[operator,union-attr]


def _indices(tokens: Tensor) -> Tensor:
    """0 … time − 1, (1, time)."""
    return torch.arange(tokens.shape[1], device=tokens.device)[None]


def mask_source(cache: SourceCache, mask: Tensor | None, time: int) -> MaskedSource:
    """Source with its mask for `time` queries: all of them see every real token, regardless of positions."""
    keys = cache[0][0]
    queries, indices = (torch.arange(length, device=keys.device)[None] for length in (time, keys.shape[2]))
    return cache, AttentionMask(Mask(causal=False, real=mask), Position(), queries, keys=indices)
