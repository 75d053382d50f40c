"""The parts of a Transformer: both stacks, their blocks, and the head."""

from dataclasses import replace
from functools import partial
from typing import Any

from weft.costs.units import reach
from weft.explain.anatomy.parts import Part, part, size, with_bias
from weft.models import heads
from weft.models.config import Encoder
from weft.models.stack import Stack
from weft.models.transformer import Transformer
from weft.nn import attention, block, norm, position
from weft.nn.attention_paths import attend
from weft.nn.config import Block as BlockConfig
from weft.nn.config import Gated, LayerNorm
from weft.nn.hashed_ngrams import NGramEmbedding
from weft.nn.position_config import ALiBi, Disentangled, Learned, NoPosition, Relative, Rotary, Sinusoidal, T5Bias
from weft.nn.scaled_dot_product import masked_softmax, reference_attention

ATTENTION = "Attention(q, k, v) = softmax(q kᵀ/√d_k) v, head by head"


def transformer_columns(model: Transformer) -> tuple[Part, ...]:
    """One column a stack, the encoder's first; the head stands on the last."""
    settings: Any = model.config
    words, top = _embedding(model), _heads(model)
    if model.encoder is not None and model.decoder is not None:
        shape, detail = words.shape.replace("T", "S"), f"{settings.source_vocab_size or settings.vocab_size:,}"
        note = "the table of the target's embeddings, counted there" if model.source_embedding is None else ""
        source = replace(words, name="source embedding", box="Source embedding", shape=shape, note=note)
        source = replace(source, own=size(model.source_embedding), detail=f"{detail} × {settings.d_model}")
        return (
            Part("encoder", parts=(source, *_stack(settings, model.encoder, "S"))),
            Part("decoder", parts=(words, *_stack(settings, model.decoder, "T"), *top)),
        )
    stack = model.decoder or model.encoder
    assert stack is not None
    name, shape = "decoder" if model.decoder is not None else "encoder", f"(B, T, {settings.width}) → the same"
    added = []
    if model.segments is not None:
        more = {"own": size(model.segments)}
        added = [part(settings, "segments", "x + S[0 or 1]", shape, "segments", Transformer.embed, **more)]
    if model.ngrams is not None:
        added = [_ngrams(settings, model.ngrams, shape)]
    return (Part(name, parts=(words, *added, *_stack(settings, stack, "T"), *top)),)


def _ngrams(settings: Any, tables: NGramEmbedding, shape: str) -> Part:
    rows = " + ".join(f"N{order}[hash of the last {order}]" for order in tables.orders)
    formula = f"x + {rows}" if tables.projection is None else f"x + ({rows}) W"
    keys, detail = "ngrams.orders ngrams.rows ngrams.width", f"{tables.weight.shape[0]:,} × {tables.weight.shape[1]}"
    more = {"own": size(tables), "box": "N-grams", "detail": detail}
    return part(settings, "n-grams", formula, shape, keys, NGramEmbedding.indices, NGramEmbedding.forward, **more)


def _embedding(model: Transformer) -> Part:
    settings, own = model.config, size(model.embedding)
    E, factor = settings.width, settings.embedding_scale
    scaled = "" if factor is False else " · √d_model" if factor is True else f" · {factor:g}"
    keys = f"vocab_size {'d_model' if settings.d_model == E else 'd_embedding'}" + " embedding_scale" * bool(scaled)
    shape, sizes = f"(B, T) → (B, T, {E})", f"{settings.vocab_size:,} × {E}"
    by = Transformer.embed
    return part(settings, "token embedding", f"x = E[token]{scaled}", shape, keys, by, own=own, detail=sizes)


def _stack(settings: Any, stack: Stack, time: str) -> tuple[Part, ...]:
    parts, projection = [], []
    if stack.projection is not None:
        shape = f"(B, {time}, {settings.width}) → (B, {time}, {settings.d_model})"
        formula, more = f"x W{with_bias(stack.projection)}", {"own": size(stack.projection), "box": "Projection"}
        projection = [part(settings, "projection", formula, shape, "d_embedding d_model", Stack.forward, **more)]
    parts += [] if stack.narrow else projection
    parts += _added_positions(settings, stack, time)
    if stack.embedding_norm is not None:
        made_of = _norm(settings, "embedding norm", stack.embedding_norm, time)
        parts.append(replace(made_of, shape=f"(B, {time}, {settings.added_width}) → the same"))
    parts += projection if stack.narrow else []
    fields, unusual = type(settings).model_fields, ("residual", "sublayers", "residual_scale", "first_norm")
    keys = ("layers", "placement", *(name for name in unusual if getattr(settings, name) != fields[name].default))
    # the first block stands for all, unless it lacks a norm that the others have
    alike = [list(stack.blocks)] if settings.first_norm else [[stack.blocks[0]], list(stack.blocks[1:])]
    name = "block" if stack.sharing == 1 else f"block, run {stack.sharing} times in a row"
    formula, shape = "layer by layer, each on what the last one gave", f"(B, {time}, {settings.d_model}) → the same"
    causal, by = not isinstance(settings, Encoder), (block.Block.forward, Stack.forward)
    kinds = [f"{reach(kind.window, causal)}, positions {kind.position.kind}" for kind in settings.kinds()]
    note = "" if len(kinds) == 1 else f"layer by layer, again and again: {'; '.join(kinds)}"
    for blocks in filter(None, alike):
        more = {"parts": _block(settings, blocks[0], stack, time), "repeats": len(blocks), "note": note}
        parts.append(part(settings, name, formula, shape, " ".join(keys), *by, **more))
    if stack.norm is not None:
        parts.append(_norm(settings, "last norm", stack.norm, time))
    return tuple(parts)


def _block(settings: BlockConfig, layer: Any, stack: Stack, time: str) -> tuple[Part, ...]:
    inside = _attention(settings, layer.attention, stack, time), _feedforward(settings, layer.feedforward, time)
    if layer.parallel:
        return _side_by_side(settings, layer, inside, time)
    cross = [] if layer.cross is None else _sublayer(settings, _cross(settings, layer.cross), layer.cross_skip, time)
    first, second = layer.attention_skip, layer.feedforward_skip
    return (*_sublayer(settings, inside[0], first, time), *cross, *_sublayer(settings, inside[1], second, time))


def _side_by_side(settings: BlockConfig, layer: Any, inside: tuple[Part, Part], time: str) -> tuple[Part, ...]:
    """Both sublayers read what the block reads, and are added at once."""
    skips = layer.attention_skip, layer.feedforward_skip
    norms = [_norm(settings, "norm", skip.norm, time) for skip in skips if skip.norm is not None]
    ordered = (norms[0], inside[0], *norms[1:], inside[1])
    formula, note = "x + attention(norm(x)) + feed-forward(norm(x))", "both read what the block reads"
    more = {"note": note + ("; one norm serves both" if len(norms) == 1 else ""), "skips": len(ordered)}
    return (*ordered, *_skip(settings, formula, "sublayers", time, block.Block.forward, **more))


def _sublayer(settings: BlockConfig, inside: Part, skip: Any, time: str) -> list[Part]:
    """What stands around a sublayer: norms before or after it, and the sum."""
    normed = [] if skip.norm is None else [_norm(settings, "norm", skip.norm, time)]
    before, after = (normed, []) if skip.pre else ([], normed)
    added = [] if skip.norm_out is None else [_norm(settings, "norm of what is added", skip.norm_out, time)]
    scaled = "" if skip.scale == 1.0 else f"{skip.scale:g} · "
    inner = "f(norm(x))" if before else "f(x)"
    formula = f"x + {scaled}{f'norm({inner})' if added else inner}"
    skips = 1 + len(before) + len(added)
    total = _skip(settings, formula, "placement", time, block.Sublayer.forward, skips=skips)
    return [*before, inside, *added, *total, *after]


def _skip(settings: BlockConfig, formula: str, key: str, time: str, *by: Any, **more: Any) -> list[Part]:
    keys, shape = key + " dropout" * bool(settings.dropout), f"(B, {time}, {settings.d_model})"
    return [part(settings, "skip", formula, shape, keys, *by, **more)] if settings.residual else []


def _norm(settings: BlockConfig, name: str, module: Any, time: str) -> Part:
    shape, own, keys = f"(B, {time}, {settings.d_model}) → the same", size(module), "norm.kind norm.eps"
    kind, formula = "RMSNorm", "g · x / √(mean(x²) + ε)"
    by: list[Any] = [norm.RMSNorm.forward]
    if isinstance(settings.norm, LayerNorm):
        formula = ("(x − μ)/σ" if module.weight is None else "g · (x − μ)/σ") + with_bias(module)
        kind, by = "LayerNorm", [norm.LayerNorm, norm.LayerNorm.forward]
    return part(settings, f"{name}, {kind}", formula, shape, keys, *by, own=own, box=kind)


def _attention(settings: BlockConfig, module: Any, stack: Stack, time: str) -> Part:
    """Self-attention: projections, what positions do to them, scores and their mean, and the mix of heads."""
    chosen, D, K = settings.attention, settings.d_model, settings.d_head
    H, G, by = chosen.heads, chosen.groups, attention.SelfAttention.forward
    bias = with_bias(module.qkv) + ("" if chosen.clip is None else f", cut off at ±{chosen.clip:g}")
    shape = f"(B, {time}, {D}) → (B, {time}, {(H + 2 * G) * K}) → q (B, {H}, {time}, {K}), k, v (B, {G}, {time}, {K})"
    keys, own = "attention.heads attention.kv_heads attention.d_head attention.bias", size(module.qkv)
    parts = [
        part(settings, "queries, keys, values", f"q, k, v = x W{bias}", shape, keys, by, own=own),
        *_normed_queries(settings, module, by),
        *_scored_positions(settings, stack, module),
        *_mixed(settings, module, stack.causal, time, time),
    ]
    name, masked = "multi-head self-attention", "masked " if stack.causal else ""
    more = {"parts": tuple(parts), "box": f"{masked}self-attention".capitalize(), "detail": _heads_text(settings)}
    shape = f"(B, {time}, {D}) → the same"
    return part(settings, f"{masked}{name}", ATTENTION, shape, "attention.window", **more)


def _cross(settings: BlockConfig, module: Any) -> Part:
    chosen, D, K, bias = settings.attention, settings.d_model, settings.d_head, with_bias(module.q)
    of, by = attention.CrossAttention, (attention.CrossAttention.forward, attention.CrossAttention.keys_values)
    q, kv = f"(B, T, {D}) → (B, {chosen.heads}, T, {K})", f"(B, S, {D}) → k, v (B, {chosen.groups}, S, {K})"
    keys, source = "attention.heads attention.kv_heads attention.bias", "keys, values of the source"
    parts = [
        part(settings, "queries", f"q = x W_q{bias}", q, keys, of.forward, own=size(module.q)),
        part(settings, source, f"k, v = source W_kv{bias}", kv, keys, of.keys_values, own=size(module.kv)),
        *_normed_queries(settings, module, *by),
        *_mixed(settings, module, False, "T", "S"),
    ]
    name, shape = "multi-head attention to the source", f"(B, T, {D}), (B, S, {D}) → (B, T, {D})"
    more = {"box": "Attention to the source", "detail": _heads_text(settings), "reads": True}
    return part(settings, name, ATTENTION, shape, "", parts=tuple(parts), **more)


def _heads_text(settings: BlockConfig) -> str:
    H, G = settings.attention.heads, settings.attention.groups
    return f"{H} heads × {settings.d_head}" + (f", {G} of keys and values" if G != H else "")


def _normed_queries(settings: BlockConfig, module: Any, *by: Any) -> list[Part]:
    if module.q_norm is None:
        return []
    over = "all heads of a token" if settings.attention.qk_norm_over == "heads" else settings.d_head
    own, key = size(module.q_norm, module.k_norm), "attention.qk_norm.kind"
    return [part(settings, "norm of queries and keys", "norm(q), norm(k)", f"over {over}", key, *by, own=own)]


def _mixed(settings: BlockConfig, module: Any, causal: bool, queries: str, sources: str) -> list[Part]:
    """The formula with its numbers (Vaswani et al. 2017, §3.2.1), and the mix of heads."""
    chosen, H, K, D = settings.attention, settings.attention.heads, settings.d_head, settings.d_model
    scale = chosen.scale or K**-0.5
    root = f"scale {scale:g}" if chosen.scale else f"d_k = {K}, 1/√{K} = {scale:.4g}"
    mask = " + mask" if causal or chosen.window else ""
    scores = f"{scale:.4g} · q kᵀ"
    if chosen.softcap is not None:
        scores = f"{chosen.softcap:g} tanh({scores}/{chosen.softcap:g})"
    shared = f"; each head of k, v serves {H // chosen.groups} of q" if chosen.groups != H else ""
    seen = f"; the mask hides what comes later{f', and all but the last {chosen.window}' if chosen.window else ''}"
    name, by = "scores, softmax, weighted mean", (reference_attention, masked_softmax, attend)
    formula, note = f"softmax({scores}{mask}) v; {root}", (shared + (seen if mask else "")).removeprefix("; ")
    keys = "attention.scale " + ("attention.dropout" if chosen.dropout else "attention.scale")
    shape = f"(B, {H}, {queries}, {sources}) weights → (B, {queries}, {H * K})"
    weighted = part(settings, name, formula, shape, keys, *by, note=note)
    shape, formula = f"(B, {queries}, {H * K}) → (B, {queries}, {D})", f"concat(heads) W_o{with_bias(module.out)}"
    mixed = part(settings, "heads mixed", formula, shape, "", attention.SelfAttention.attend, own=size(module.out))
    return [weighted, mixed]


def _added_positions(settings: Any, stack: Stack, time: str) -> list[Part]:
    """Positions that are added to the embeddings, or a table that all layers read."""
    chosen, D, own = settings.position, settings.added_width, size(stack.position)
    by: tuple[Any, ...]
    describe, table = partial(part, settings), "table of distances"
    match chosen:
        case Sinusoidal():
            formula = f"x + PE[p]; PE(p, 2i) = sin(p/{chosen.base:g}^(2i/{D})), PE(p, 2i + 1) = cos(…)"
            by, keys = (position.sinusoids, position.Sinusoidal.embed), "position.kind position.layout position.base"
            detail = "sines and cosines"
        case Learned():
            formula, keys, by = "x + P[p]", "position.kind context", (position.Learned.embed,)
            detail = f"{settings.context:,} × {D}"
        case T5Bias():
            shape = f"({chosen.buckets}, {settings.attention.heads})"
            formula = "b, which the scores of every layer are added to"
            return [describe(table, formula, shape, "position.buckets", own=own)]
        case Disentangled():
            shape, keys = f"({2 * chosen.buckets}, {D})", "position.buckets position.max_distance"
            return [describe(table, "Δ, normed", shape, keys, own=own)]
        case NoPosition() | Rotary() | ALiBi() | Relative():
            return []
        case _:  # declared elsewhere
            formula, by = type(stack.position).__doc__ or "", (type(stack.position).embed,)
            keys, detail = "position.kind", chosen.kind
    shape, more = f"(B, {time}, {D}) → the same", {"own": own, "box": "+ Positions", "detail": detail}
    return [describe(f"positions, {chosen.kind}", formula, shape, keys, *by, **more)]


def _scored_positions(settings: Any, stack: Stack, module: Any) -> list[Part]:
    """Positions that act on queries, keys or scores; their table, if it is one for all layers, is counted in none."""
    chosen, K, shape, own, note = settings.position, settings.d_head, "", 0, ""
    by: tuple[Any, ...]
    match chosen:
        case Rotary():
            width = chosen.rotated(K)
            formula = f"pairs of q, k rotated by p · θ_i, θ_i = {chosen.base:g}^(−2i/{width})"
            keys = "position.base position.pairs position.scaling.kind"
            by = position.Rotary.rotate, position.Rotary.frequencies
            shape = f"over {K}" if width == K else f"over the first {width} of {K}"
        case ALiBi():
            formula, keys = "scores − m_h · |i − j|, m_h = 2^(−8/heads), 2^(−16/heads), …", ""
            by = (position.ALiBi.bias,)
        case T5Bias():
            formula, keys = "scores + b[bucket(j − i), head]", "position.buckets position.max_distance"
            by, note = (position.T5Bias.bias, position.T5Bias.bucket), "one table for all layers, counted before them"
        case Disentangled():
            formula = "q kᵀ + q k_Δᵀ + q_Δ kᵀ, where q_Δ, k_Δ = Δ W"
            keys, by = "position.buckets position.max_distance", (type(module).mix, position.Disentangled.distances)
        case Relative():
            formula, keys = "softmax(q(k + a_k[j − i])ᵀ · scale)(v + a_v[j − i])", "position.max_distance"
            own, by = size(module.relative_keys, module.relative_values), (type(module).mix,)
            shape = f"2 × ({chosen.rows}, {K})"
        case _:
            return []
    keys = f"position.kind {keys}"
    return [part(settings, f"positions, {chosen.kind}", formula, shape, keys, *by, own=own, note=note)]


def _feedforward(settings: BlockConfig, module: Any, time: str) -> Part:
    chosen, D, describe = settings.feedforward, settings.d_model, partial(part, settings)
    F, f, bias = chosen.d_ff, chosen.activation, with_bias(module.down)
    x, wide, keys = f"(B, {time}, {D})", f"(B, {time}, {F})", "feedforward.activation"
    by = type(module).forward
    if isinstance(chosen, Gated):
        formula = "(f(x W_g) ⊙ x W_u) W_d"
        up = describe("gate and up", f"g, u = x W{bias}", f"{x} → 2 × {wide}", "", by, own=size(module.gate_up))
        middle = describe("gate", f"{f}(g) ⊙ u", wide, keys, by)
    else:
        formula = "f(x W₁ + b₁) W₂ + b₂" if chosen.bias else "f(x W₁) W₂"
        up = describe("up", f"x W₁{bias}", f"{x} → {wide}", "", by, own=size(module.up))
        middle = describe("activation", f"{f}(x)", wide, keys, by)
    down = describe("down", f"x W{bias}", f"{wide} → {x}", "", by, own=size(module.down))
    more = {"parts": (up, middle, down), "detail": f"{D} → {F:,} → {D}, {f}"}
    keys = "feedforward.kind feedforward.d_ff feedforward.activation"
    return describe("feed-forward", formula, f"{x} → the same", keys, by, **more)


def _heads(model: Transformer) -> tuple[Part, ...]:
    settings: Any = model.config
    module, x, describe = model.output, f"(B, T, {settings.d_model})", partial(part, settings)
    by: Any
    match module:
        case heads.LMHead(dense=None):
            return (_words(model, module),)
        case heads.LMHead():  # from the layers' width to the embeddings'
            shape, own, by = f"{x} → (B, T, {settings.width})", size(module.dense), heads.LMHead.prepare
            back = describe("projection back", "x W", shape, "d_embedding", by, own=own, box="Projection")
            return (back, _words(model, module))
        case heads.MaskedLMHead():
            return (_transform(settings, module), _words(model, module))
        case heads.PretrainingPair():
            # both heads read the same features; a diagram has them in one box
            words, pair = _words(model, module.words), _classes(settings, module.next_sentence, "next sentence")
            words = replace(words, box="Logits, next sentence", detail=f"{words.detail}; {pair.detail}")
            pair = replace(pair, box="", note="beside the logits, from the same features")
            return (_transform(settings, module.words), words, pair)
        case heads.Classifier():
            return (_classes(settings, module, "classes"),)
        case heads.Tagger():
            name, keys = ("ends", "head.kind") if settings.head.kind == "span" else ("tags", "head.kind head.labels")
            formula = "x W + b" if module.transform is None else f"{_before(module.transform)} W + b"
            shape, by, box = f"{x} → (B, T, {module.out.out_features})", heads.Tagger.forward, name.capitalize()
            return (describe(name, formula, shape, keys, by, own=size(module), box=box),)
        case heads.Detector():
            formula, keys = f"{settings.head.activation}(x W_d + b_d) w + b", "head.kind head.activation"
            own, by = size(module), heads.Detector.forward
            return (describe("replaced", formula, f"{x} → (B, T)", keys, by, own=own, box="Replaced?"),)
        case heads.Embedder():
            keys, by = "head.kind head.pooling head.normalise", (heads.Embedder.forward, heads.pool)
            shape, box = f"{x} → (B, {settings.d_model})", "Text embedding"
            return (describe("one vector a text", "mean or first of x", shape, keys, *by, box=box),)
        case _:
            raise AssertionError(f"a head of kind '{settings.head.kind}' is described nowhere")


def _before(transform: heads.Transform) -> str:
    return f"norm(f(x W_t{with_bias(transform.dense)}))"


def _transform(settings: Any, module: heads.MaskedLMHead) -> Part:
    D, E, f = settings.d_model, settings.width, settings.head.activation
    own, by, keys = size(module.dense, module.norm), heads.MaskedLMHead.prepare, "head.kind head.activation"
    shape = f"(B, T, {D}) → {'the same' if E == D else f'(B, T, {E})'}"
    return part(settings, "transform", f"norm({f}(x W + b))", shape, keys, by, own=own, detail=f"{D} → {E}, {f}")


def _words(model: Transformer, module: heads.TokenHead) -> Part:
    settings: Any = model.config
    D, V, tied = settings.width, f"{settings.vocab_size:,}", module.weight is None
    product = f"x {'Eᵀ' if tied else 'W'}{'' if module.bias is None else ' + b'}"
    if module.softcap is not None:
        product = f"c tanh(({product})/c), c = {module.softcap:g}"
    formula, shape = f"logits = {product}; p = softmax(logits)", f"(B, T, {D}) → (B, T, {V})"
    own, keys = size(module.weight, module.bias), "head.kind head.tied head.bias head.scale"
    more = {"note": "tied: the table of the embeddings, counted there" if tied else "", "detail": f"{D} → {V}"}
    return part(settings, "logits", formula, shape, keys, heads.TokenHead.forward, own=own, **more)


def _classes(settings: Any, module: heads.Classifier, name: str) -> Part:
    D, labels, given = settings.d_model, module.out.out_features, f"x_{module.pooling}"
    by: list[Any] = [heads.Classifier.forward, *([] if module.pooler is None else [heads.Transform.forward])]
    f = getattr(settings.head, "activation", "tanh") if name == "classes" else "tanh"
    formula = f"{given} W + b" if module.pooler is None else f"{f}({given} W_p + b_p) W + b"
    if module.transform is not None:
        formula = f"{_before(module.transform)} W + b, x = {given}"
    shape, keys = f"(B, T, {D}) → (B, {labels})", "head.kind head.labels"
    return part(settings, name, formula, shape, keys, *by, own=size(module), detail=f"{D} → {labels}")
