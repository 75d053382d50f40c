"""The Transformer (Vaswani et al. 2017) as encoder, decoder or both: one class over one Block."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.errors import ModelError
from weft.models import heads
from weft.models.base import LanguageModel, Source, State, check_tokens
from weft.models.config import Decoder, Encoder, EncoderDecoder, TransformerConfig
from weft.nn import norm, position
from weft.nn.attention import Relation
from weft.nn.block import Block
from weft.nn.cache import KeyValueCache
from weft.nn.init import Initialiser, reset
from weft.nn.linear import Embedding
from weft.nn.mask import Visibility
from weft.nn.position import Position

Memory = list[tuple[Tensor, Tensor]]  # keys and values of the source, layer by layer


class Stack(nn.Module):
    """Embedded tokens in, features out: positions, blocks, and the last norm where the blocks norm first."""

    def __init__(self, settings: TransformerConfig, layers: int, causal: bool, cross: bool):
        super().__init__()
        d_model, attention = settings.d_model, settings.attention
        self.causal = causal
        self.window = attention.window
        self.position = position.build(settings.position, settings.sizes(layers, causal))
        self.embedding_norm = norm.build(settings.norm, d_model) if settings.embedding_norm else None
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(Block(settings, cross) for _ in range(layers))
        self.norm = norm.build(settings.norm, d_model) if settings.placement == "pre" else None
        self.recompute = False  # keep the inputs of blocks alone for the backward pass, and run the blocks again

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        relation: Relation,
        cache: "list[Any] | None" = None,
        memory: Memory | None = None,
        source: Relation | None = None,
    ) -> Tensor:
        """x (batch, time, d_model) → (batch, time, d_model)."""
        x = self.position.embed(x, positions)
        x = self.dropout(_narrowed(x if self.embedding_norm is None else self.embedding_norm(x)))
        again = self.recompute and torch.is_grad_enabled()
        for drawn in (relation, source) if again else ():
            if drawn is not None:
                drawn.draw()
        for layer, block in enumerate(self.blocks):
            given = relation, cache[layer] if cache else None, memory[layer] if memory else None, source
            x = checkpoint(block, x, *given, use_reentrant=False) if again else block(x, *given)
        return x if self.norm is None else self.norm(x)


class TransformerState(State):
    """Keys and values of what was read, and of the source where there is one."""

    def __init__(
        self, cache: KeyValueCache, batch: int, max_len: int, memory: Memory | None, source_mask: Tensor | None
    ):
        super().__init__(batch, max_len, cache.store.device)
        self.cache = cache
        self.memory = memory
        self.source_mask = source_mask

    def _reorder(self, index: Tensor) -> None:
        self.cache.reorder(index)
        if self.memory is not None:
            self.memory = [(k[index], v[index]) for k, v in self.memory]
        if self.source_mask is not None:
            self.source_mask = self.source_mask[index]


class Transformer(LanguageModel):
    """Encoder (BERT), decoder (GPT, LLaMA) or encoder–decoder, by the config's type."""

    config: Decoder | Encoder | EncoderDecoder

    def __init__(self, settings: Decoder | Encoder | EncoderDecoder):
        super().__init__()
        self.config = settings
        d_model = settings.d_model
        self.embedding = Embedding(settings.vocab_size, d_model)
        self.source_embedding = self.segments = self.encoder = self.decoder = None
        if isinstance(settings, EncoderDecoder):
            if settings.source_vocab_size is not None:
                self.source_embedding = Embedding(settings.source_vocab_size, d_model)
            self.encoder = Stack(settings, settings.encoder_layers or settings.layers, causal=False, cross=False)
            self.decoder = Stack(settings, settings.layers, causal=True, cross=True)
        elif isinstance(settings, Encoder):
            self.segments = Embedding(settings.segments, d_model) if settings.segments else None
            self.encoder = Stack(settings, settings.layers, causal=False, cross=False)
        else:
            self.decoder = Stack(settings, settings.layers, causal=True, cross=False)
        self.output = heads.build(settings, settings.head)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew."""
        # A table of the head's own is drawn before the rest: so a seed gives the weights that it always gave.
        init = Initialiser(self.config.init, self.config.d_model, self.config.layers)
        reset(self, init, first=(heads.WordHead, heads.MaskedWordHead))

    # ---- whole sequences

    def features(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        source: Source | None = None,
    ) -> Tensor:
        """tokens (batch, time) → (batch, time, d_model).

        positions (batch, time) where they are not 0 … time − 1; documents (batch, time) ids that keep packed
        documents apart; mask (batch, time) True where a token is real; segments (batch, time) for an encoder;
        prefix (batch,) tokens that a decoder reads in both directions; source for an encoder–decoder.
        """
        memory = relation = None
        stack = self._reading_stack()
        if self.decoder is not None and self.encoder is not None:
            memory, relation = self._remember(self._given(source), tokens.shape[1])
        visible = Visibility(
            causal=stack.causal,
            window=stack.window,
            prefix=prefix,
            real=mask,
            documents=None if documents is None else (documents, documents),
        )
        x = self._embed(tokens, self.embedding, segments)
        positions = _places(tokens) if positions is None else positions
        return stack(x, positions, self._relate(stack, visible, positions, x), None, memory, relation)

    def head(self, features: Tensor, mask: Tensor | None = None) -> Any:
        """What the head says of features (batch, time, d_model): logits, or a class, tag or vector."""
        return self.output(features, self.embedding.weight, mask)

    def forward(self, tokens: Tensor, **given: Any) -> Any:
        """The head's answer to whole sequences (batch, time); arguments as in `features`."""
        return self.head(self.features(tokens, **given), given.get("mask"))

    def readout(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features, table and bias whose product is the logits, for losses that never hold all of them."""
        words = self.output.words if isinstance(self.output, heads.PretrainingPair) else self.output
        if not isinstance(words, heads.WordHead | heads.MaskedWordHead):
            raise ModelError(f"a head of kind '{self.config.head.kind}' says no words")
        table = self.embedding.weight if words.weight is None else words.weight
        return words.prepare(features), table, words.bias

    @property
    def alignment(self) -> nn.Module | None:
        """The weights of the last block's attention to the source, (batch, heads, time, source time)."""
        last = self.decoder.blocks[-1] if self.decoder is not None and self.encoder is not None else None
        return None if last is None else last.cross.weights  # type: ignore[union-attr,return-value]

    # ---- step by step

    @torch.no_grad()
    def start(self, batch: int, max_len: int, source: Source | None = None) -> TransformerState:
        """An empty cache for `batch` sequences of up to `max_len` tokens; the source is read here, once."""
        if self.decoder is None or not isinstance(self.output, heads.WordHead):
            raise ModelError(f"{self._name()} with a head of kind '{self.config.head.kind}' cannot generate")
        longest = self.config.longest
        if longest is not None and max_len > longest:
            raise ModelError(f"{max_len} tokens are more than the {longest} positions this model learned (context)")
        attention, table = self.config.attention, self.embedding.weight
        cache = KeyValueCache(
            len(self.decoder.blocks), batch, attention.groups, max_len, self.config.d_head, table.dtype, table.device
        )
        memory = source_mask = None
        if self.encoder is not None:
            source = self._given(source)
            memory, _ = self._remember(source, 1)
            source_mask = source.mask
        return TransformerState(cache, batch, max_len, memory, source_mask)

    @torch.no_grad()
    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        """tokens (batch, time) after what `state` holds → features (batch, time, d_model)."""
        assert isinstance(state, TransformerState) and self.decoder is not None
        time, stack = tokens.shape[1], self.decoder
        state.reserve(time)
        x = self._embed(tokens, self.embedding, None)
        ahead = _places(tokens)
        places = ahead + state.longest if state.even else ahead + state.lengths[:, None]
        seen = state.longest + time
        keys = torch.arange(seen, device=tokens.device)[None]
        if state.even and stack.window is None and time == 1:
            visible = Visibility(causal=False)  # one query sees the whole cache
        elif state.even:
            visible = Visibility(causal=True, window=stack.window, behind=state.longest)
        else:
            visible = Visibility(causal=True, window=stack.window, places=places)
        relation = Relation(visible, stack.position, places, keys, stack.position.angles(places, seen, x.dtype))
        written = None if state.even else places
        cache = [state.cache.layer(number, written, state.longest) for number in range(len(stack.blocks))]
        source = None if state.memory is None else _source_relation(state.memory, state.source_mask, time)
        features = stack(x, places, relation, cache, state.memory, source)
        state.advance(time, lengths)
        return features

    # ---- inside

    def _reading_stack(self) -> Stack:
        stack = self.encoder if self.decoder is None else self.decoder
        assert stack is not None
        return stack

    def _given(self, source: Source | None) -> Source:
        if source is None:
            raise ModelError(f"{self._name()} reads a source before it writes; none was given")
        return source

    def _embed(self, tokens: Tensor, table: nn.Embedding, segments: Tensor | None) -> Tensor:
        check_tokens(tokens, table.num_embeddings)
        x = table(tokens)
        if self.config.embedding_scale:
            x = x * self.config.d_model**0.5
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        return x

    def _relate(self, stack: Stack, visible: Visibility, positions: Tensor, x: Tensor) -> Relation:
        angles = stack.position.angles(positions, positions.shape[1], x.dtype)
        return Relation(visible, stack.position, positions, positions, angles)

    def _remember(self, source: Source, time: int) -> tuple[Memory, Relation]:
        """Every decoder layer's keys and values of the source, and how `time` queries stand to them."""
        assert self.encoder is not None and self.decoder is not None
        x = self._embed(source.tokens, self.source_embedding or self.embedding, None)
        positions = _places(source.tokens)
        visible = Visibility(causal=False, window=self.encoder.window, real=source.mask)
        encoded = self.encoder(x, positions, self._relate(self.encoder, visible, positions, x))
        memory: Memory = [block.cross.memory(encoded) for block in self.decoder.blocks]  # type: ignore[operator,union-attr]
        return memory, _source_relation(memory, source.mask, time)


def _narrowed(x: Tensor) -> Tensor:
    """x as bf16 where products are: what runs along the skip connections is then half as wide.

    fp16 is left out; its range is too small for a sum over many layers.
    """
    device = x.device.type
    narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    return x.bfloat16() if narrow else x


def _places(tokens: Tensor) -> Tensor:
    """0 … time − 1, (1, time)."""
    return torch.arange(tokens.shape[1], device=tokens.device)[None]


def _source_relation(memory: Memory, mask: Tensor | None, time: int) -> Relation:
    """Every query sees every real token of the source; positions take no part."""
    keys = memory[0][0]
    device = keys.device
    return Relation(
        Visibility(causal=False, real=mask),
        Position(),
        torch.arange(time, device=device)[None],
        torch.arange(keys.shape[2], device=device)[None],
    )
