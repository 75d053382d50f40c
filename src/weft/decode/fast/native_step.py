"""The native path: a decoder's step for tokens of one or more texts in one C call (`native/decode/step.c`).

It reads a Transformer's weights, quantised ones too, and returns the logits of `model.step` up to rounding.
"""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor, nn

from weft.decode.engine.paging import BlockStore
from weft.decode.fast import native
from weft.decode.fast.matmul import NativeMatmul
from weft.decode.fast.path import LLAMA, PlainPath, is_float32_on_cpu, others_at_default, setting_names
from weft.decode.fast.quantize import QuantizedHead, QuantizedLinear, SplitExperts
from weft.models import heads
from weft.models.base import LanguageModel, State
from weft.models.config import Decoder
from weft.models.transformer import Transformer, TransformerState
from weft.nn import config
from weft.nn.cache import KeyValueCache
from weft.nn.experts import Experts
from weft.nn.linear import Linear
from weft.nn.norm import LayerNorm, RMSNorm
from weft.nn.position_config import Learned, LinearScaling, Llama3Scaling, NoPosition, Rotary, Sinusoidal, YaRN

MAX_FLOAT_ROWS = 32  # tokens per call up to which C is faster than torch in float32, as measured on ARM and x86
BYTES_PER_THREAD = 4 << 20  # weights that a step reads for each thread: threads meet after every product
EXPERTS = (  # settings of a mixture that C knows, and those that matter in training alone
    "experts chosen score renormalised scale weighs limit up_offset router_bias choice_bias groups kept_groups "
    "group_score shared shared_d_ff dense first_dense every dense_layers balance_loss z_loss capacity"
)
SETTINGS = LLAMA | setting_names(
    *("ngrams", "pattern", "residual_scale"),
    attention="bias clip qk_norm qk_norm_over qk_norm_rotated window sinks",
    feedforward=f"activation beta bias {EXPERTS}",
    norm="bias gain offset",
    position="pairs fraction",
)


class NativeDecoder:
    """Runs tokens of several texts through a decoder over a paged KV cache, one C call per step.

    keys, values (layers, blocks, kv_heads, block_size, d_head); a text's table lists its blocks. A text's results don't
    depend, to the bit, on other texts, nor on how its tokens are split over calls that read more than one of them.
    """

    def __init__(self, model: Transformer, keys: Tensor, values: Tensor):
        assert model.decoder is not None and model.decoder.norm is not None
        self.model, settings, blocks = model, model.config, model.decoder.blocks
        self.position = model.decoder.position
        self.bytes_per_thread = BYTES_PER_THREAD
        self.tensors: list[Tensor] = []  # keeps alive what C points to and nobody else owns
        layers = (self._layer(block, keys[n], values[n]) for n, block in enumerate(blocks))
        self.layers = (native.CLayer * len(blocks))(*layers)
        self.head_matrix, self.head_scale = self._head(), getattr(model.output, "scale", None)
        first: Any = blocks[0]
        attention = settings.attention
        self.c_model = native.CModel(
            layers=len(blocks),
            d_model=settings.d_model,
            heads=attention.heads,
            kv_heads=attention.groups,
            d_head=settings.d_head,
            activation=native.ACTIVATIONS[settings.feedforward.activation],
            qk_norm=native.NORMALISED[_normalised(attention, rotary=isinstance(settings.position, Rotary))],
            **self._widest(),
            block_size=keys.shape[3],
            stride=keys.stride(1),
            scale=first.attention.scale,
            clip=math.inf if attention.clip is None else attention.clip,
            beta=settings.feedforward.beta,
            residual_scale=settings.residual_scale,
            layer=self.layers,
            norm=self._norm(model.decoder.norm),
            head=native.CMatrix() if self.head_matrix is None else self.head_matrix,
        )
        self.positions, self.angles = 0, list[Tensor]()  # cos and sin (positions, d_head / 2) of rotary positions
        self.ones = torch.empty(0, dtype=torch.int64)
        self.results: dict[int, Tensor] = {}  # by width; reused, since new memory would have to be cleared
        self.weight_bytes = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))

    def step(self, x: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """Read one embedded token of each text, x (rows, d_model), at positions (rows,), in the blocks of tables (rows,
        width) → logits (rows, V), valid until the next call."""
        direct = self.head_matrix is not None and self.head_scale is None
        result = self(x, positions, tables, logits=direct)
        return result if direct else self.head(result)

    def __call__(
        self, x: Tensor, positions: Tensor, tables: Tensor, *, counts: Tensor | None = None, logits: bool = False
    ) -> Tensor:
        """Read the next counts (texts,) embedded tokens of each text, by default one, x (rows, d_model), from positions
        (texts,) on → features (rows, d_model) or logits (rows, V), valid until the next call."""
        self._extend_angles(tables.shape[1] * self.c_model.block_size)
        if counts is None:
            counts = self.ones = self.ones if len(self.ones) == len(positions) else torch.ones_like(positions)
            token_positions = positions
        else:
            token_positions = torch.arange(len(x)) + (positions - counts.cumsum(0) + counts).repeat_interleave(counts)
        x = self.position.embed(x[:, None], token_positions[:, None]).contiguous()
        width = self.c_model.head.rows if logits else self.c_model.d_model
        if (result := self.results.get(width)) is None or len(result) != len(x):
            result = self.results[width] = torch.empty(len(x), width)
        batch = native.CBatch(*tables.shape, *map(native.address, (counts, positions, tables)))
        arguments = self.c_model, x.data_ptr(), batch, logits, result.data_ptr(), self.threads(len(x))
        library: Any = native.library()
        if library.weft_step(*arguments):
            raise MemoryError("out of memory in a decoding step")
        return result

    def head(self, features: Tensor) -> Tensor:
        """Features (rows, d_model) → logits (rows, V)."""
        if self.head_matrix is None:
            return self.model.head(features[:, None])[:, 0]
        features = features if self.head_scale is None else features * self.head_scale
        return native.multiply(self.head_matrix, features, self.threads(len(features)))

    def threads(self, rows: int) -> int:
        return min(torch.get_num_threads(), 1 + rows * self.weight_bytes // self.bytes_per_thread)

    def _extend_angles(self, positions: int) -> None:
        """Compute rotary angles for this many positions, at least doubling the table if it is too short."""
        if positions <= self.positions:
            return
        self.positions = max(positions, 2 * self.positions)
        stack, indices = self.model.decoder, torch.arange(self.positions)[None]
        tables: dict[Any, list[Tensor]] = {}
        for layer, block in zip(self.layers, stack.blocks, strict=True):  # type: ignore[union-attr]
            encoding: Any = stack.position_of(block.kind)  # type: ignore[union-attr]
            if encoding.settings.rotates:
                if encoding not in tables:
                    angles = encoding.angles(indices, self.positions, torch.float32)
                    tables[encoding] = [angle[0, 0].contiguous() for angle in angles]
                layer.cos, layer.sin = map(native.address, tables[encoding])
                layer.rotated, layer.adjacent = encoding.rotated, encoding.settings.pairs == "adjacent"
        self.angles = [table for pair in tables.values() for table in pair]

    def _layer(self, block: Any, keys: Tensor, values: Tensor) -> native.CLayer:
        attention, mixture = block.attention, isinstance(block.feedforward, Experts)
        dense = block.feedforward.shared if mixture else block.feedforward
        up = None if dense is None else dense.gate_up if hasattr(dense, "gate_up") else dense.up
        return native.CLayer(
            attention_norm=self._norm(block.attention_skip.norm),
            feedforward_norm=self._norm(block.feedforward_skip.norm),
            q_norm=self._norm(attention.q_norm),
            k_norm=self._norm(attention.k_norm),
            qkv=_matrix(attention.qkv),
            out=_matrix(attention.out),
            up=native.CMatrix() if up is None else _matrix(up),
            down=native.CMatrix() if dense is None else _matrix(dense.down),
            experts=ctypes.pointer(self._experts(block.feedforward)) if mixture else None,  # kept alive by the layer
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            sinks=None if attention.sinks is None else self._keep(attention.sinks),
            window=self.model.decoder.windows[block.kind] or native.NO_WINDOW,  # type: ignore[union-attr]
        )

    def _experts(self, part: Experts) -> native.CExperts:
        settings, router = part.settings, part.router
        bias = None if router.bias is None else router.bias.detach()
        gate_up, down = (
            (native.CMatrix * settings.experts)(*_expert_matrices(part.experts, name)) for name in ("gate_up", "down")
        )
        return native.CExperts(
            experts=settings.experts,
            chosen=settings.chosen,
            score=native.SCORES[settings.score],
            renormalised=settings.renormalised,
            weighs_input=settings.weighs == "input",
            groups=settings.groups,
            kept_groups=settings.kept_groups or settings.groups,
            best_two=settings.group_score == "best-two",
            scale=settings.scale,
            limit=math.inf if settings.limit is None else settings.limit,
            up_offset=settings.up_offset,
            choice_bias=None if router.choice_bias is None else self._keep(router.choice_bias),
            router=native.matrix(router.weight.detach(), router.weight.shape, bias=bias),
            shared_gate=native.CMatrix() if part.shared_gate is None else _matrix(part.shared_gate),
            gate_up=gate_up,
            down=down,
        )

    def _widest(self) -> dict[str, int]:
        """Sizes of the largest layers, which bound the memory of a step."""
        settings = self.model.config
        mixtures = [settings.feedforward] if isinstance(settings.feedforward, config.Experts) else []
        dense = [inner for each in mixtures for inner in (each.shared_width, each.dense.d_ff if each.dense else 0)]
        return {
            "d_ff": max(dense or [settings.feedforward.d_ff]),
            "max_experts": max((each.experts for each in mixtures), default=0),
            "max_chosen": max((each.chosen for each in mixtures), default=0),
            "d_expert": max((each.d_ff for each in mixtures), default=0),
        }

    def _norm(self, norm: Any) -> native.CNorm:
        if norm is None:
            return native.CNorm()
        assert isinstance(norm, LayerNorm | RMSNorm)
        centred = isinstance(norm, LayerNorm)
        parts = (norm.weight, norm.bias if centred else None)
        gain, bias = (None if part is None else self._keep(part) for part in parts)
        return native.CNorm(gain, bias, norm.eps, norm.offset, centred)

    def _head(self) -> native.CMatrix | None:
        """Matrix of an LM head that does no more than multiply, and perhaps scale; None for other heads."""
        head = self.model.output
        if isinstance(head, QuantizedHead):
            return _matrix(head.words) if isinstance(head.words.matmul, NativeMatmul) else None
        if type(head) is not heads.LMHead:
            return None
        table = self.model.embedding.weight if head.weight is None else head.weight
        return native.matrix(table.detach(), table.shape, bias=None if head.bias is None else head.bias.detach())

    def _keep(self, tensor: Any) -> int:
        self.tensors.append(tensor.detach().contiguous())
        return self.tensors[-1].data_ptr()


def _normalised(attention: config.Attention, *, rotary: bool) -> str:
    """Key of NORMALISED for the norms of queries and keys; those that follow the rotation need rotary positions."""
    if attention.qk_norm is None or (attention.qk_norm_rotated and not rotary):
        return "none"
    return "rotated" if attention.qk_norm_rotated else attention.qk_norm_over


def _matrix(part: Any) -> native.CMatrix:
    bias = None if part.bias is None else part.bias.detach()
    if isinstance(part, QuantizedLinear):
        assert isinstance(part.matmul, NativeMatmul)
        return part.matmul.matrix(bias)
    assert isinstance(part, Linear)
    return native.matrix(part.weight.detach(), part.weight.shape, bias=bias)


def _expert_matrices(layers: Any, name: str) -> list[native.CMatrix]:
    if isinstance(layers, SplitExperts):
        return [_matrix(layer) for layer in getattr(layers, name)]
    weights, biases = getattr(layers, name).detach(), getattr(layers, f"{name}_bias")
    biases = [None] * len(weights) if biases is None else biases.detach()
    return [native.matrix(weight, weight.shape, bias=bias) for weight, bias in zip(weights, biases, strict=True)]


class NativeStep(PlainPath):
    """Decode steps of a state with one row, and prefill of states with any number of rows."""

    survives_truncation = True  # but no move: C holds the addresses of the state's memory

    def __init__(self, model: Transformer, state: TransformerState):
        store = state.cache.store  # (layers, 2, rows, kv_heads, max_len, d_head): each row is one block
        super().__init__(model, state)
        self.tables = torch.arange(store.shape[2])[:, None]
        self.decoder = NativeDecoder(model, store[:, 0], store[:, 1])
        self.recent: tuple[int, list[int]] | None = None  # a text's length, and its last tokens, newest first

    @classmethod
    def fits(cls, model: LanguageModel, state: State) -> bool:
        return len(state.lengths) == 1 and state.even and cls.fits_prefill(model, state, 1)

    @classmethod
    def fits_prefill(cls, model: LanguageModel, state: State, tokens: int) -> bool:
        """Whether C reads this many tokens, of all rows together, the fastest."""
        cached = isinstance(state, TransformerState) and isinstance(state.cache, KeyValueCache)
        return cached and _is_supported(model) and native_is_faster(model, tokens)  # type: ignore[arg-type]

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read tokens (1,) → logits (1, vocab_size), valid until the next call."""
        state, model = self.state, self.model
        state.reserve(1)
        x = model.embed(tokens, model.embedding)
        if model.ngrams is not None:
            x = x + model.ngrams.embed_one(self._last_tokens(int(tokens)))
        logits = self.decoder.step(x, state.lengths, self.tables)
        state.advance(1)
        return logits

    def _last_tokens(self, token: int) -> list[int]:
        """Record a token as read, and return the last tokens that n-grams are made of, newest first."""
        state, model = self.state, self.model
        if self.recent is not None and self.recent[0] == state.longest:
            before = self.recent[1]
        else:
            before = state.history.last(model.ngrams.reach, state.lengths)[0].tolist()[::-1]
        last = [token, *before]
        state.history.tokens[0, state.longest] = token
        self.recent = state.longest + 1, last[:-1]
        return last

    def read(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        """Read tokens (rows, time), the first lengths[i] of row i → features (rows, time, d_model), 0 at padding."""
        state, model, (batch, time) = self.state, self.model, tokens.shape
        state.reserve(time)
        self.recent = None
        x = model.embed_next(tokens, state.lengths, state.history)
        counts = torch.full((batch,), time) if lengths is None else lengths
        real = torch.arange(time) < counts[:, None]
        features = x.new_zeros(batch, time, model.config.d_model)
        features[real] = self.decoder(x[real], state.lengths, self.tables, counts=counts)
        state.advance(time, lengths)
        return features


def native_decoder(model: Transformer, store: BlockStore) -> NativeDecoder | None:
    """Build the native decoder over a block store, or None if the model or the store is not supported."""
    if model.embedding.weight.device.type != "cpu" or store.scales is not None or not _is_supported(model):
        return None
    return NativeDecoder(model, store.data[:, :, 0], store.data[:, :, 1])


def native_is_faster(model: Transformer, tokens: int) -> bool:
    """Whether C reads this many tokens in one call faster than torch, which is fast in float32 only."""
    first: Any = model.decoder.blocks[0]  # type: ignore[union-attr]
    return tokens <= MAX_FLOAT_ROWS or isinstance(first.attention.qkv, QuantizedLinear)


def _is_supported(model: LanguageModel) -> bool:
    """Whether a model has the shape of LLaMA or GPT-2, in float32 with weights that C can read."""
    settings = model.config
    if not is_float32_on_cpu(model) or not isinstance(settings, Decoder):
        return False
    kinds = settings.kinds()
    rotary = [isinstance(kind.position, Rotary) for kind in kinds]
    if any(kind.chunk or not _is_supported_position(kind.position) for kind in kinds):
        return False
    if settings.attention.qk_norm_rotated and len(set(rotary)) > 1:  # normalised in some layers, and not in others
        return False
    if settings.d_head > native.MAX_D_HEAD or settings.feedforward.activation not in native.ACTIVATIONS:
        return False
    attention, hidden = settings.attention, settings.feedforward
    if attention.qk_norm is not None and attention.qk_norm_over == "each-head":
        return False
    if isinstance(hidden, config.Experts) and hidden.score not in native.SCORES:
        return False
    dense = getattr(hidden, "dense", None) or hidden
    if (dense.activation, dense.beta) != (hidden.activation, hidden.beta):
        return False
    parts = [part for part in model.decoder.modules() if isinstance(part, nn.Linear | QuantizedLinear)]  # type: ignore[union-attr]
    readable = all(type(p) is Linear or isinstance(getattr(p, "matmul", None), NativeMatmul) for p in parts)
    fits = all(others_at_default(settings.replace(position=kind.position), SETTINGS) for kind in kinds)
    return readable and fits and native.library() is not None


def _is_supported_position(position: Any) -> bool:
    """Whether C can use a position encoding: added to the embeddings, or angles that do not depend on the length."""
    scaling = getattr(position, "scaling", None)
    supported = isinstance(scaling, LinearScaling | Llama3Scaling | YaRN | None)
    return supported and isinstance(position, Rotary | Learned | Sinusoidal | NoPosition)
