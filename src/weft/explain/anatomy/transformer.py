"""The parts of a Transformer: both stacks, their blocks, and the head."""

from dataclasses import replace
from typing import Any

from weft.costs.units import reach
from weft.explain.anatomy.parts import Code, Part, code, dims, keys, size, with_bias
from weft.explain.anatomy.positions import added_positions, scored_positions
from weft.models import heads
from weft.models.config import Encoder
from weft.models.transformer import Stack, Transformer
from weft.nn import attention, block, feedforward, norm
from weft.nn.attention_paths import attend
from weft.nn.config import Block as BlockConfig
from weft.nn.config import Gated, LayerNorm
from weft.nn.scaled_dot_product import masked_softmax, reference_attention


def transformer_columns(model: Transformer) -> tuple[Part, ...]:
    """One column a stack, the encoder's first; the head stands on the last."""
    settings = model.config
    top = _heads(model)
    if model.encoder is not None and model.decoder is not None:
        words = _embedding(model)
        source = replace(
            words,
            name="source embedding",
            own=size(model.source_embedding),
            shape=words.shape.replace("T", "S"),
            note="the table of the target's embeddings, counted there" if model.source_embedding is None else "",
            box="Source embedding",
            detail=f"{settings.source_vocab_size or settings.vocab_size:,} × {settings.d_model}",  # type: ignore[union-attr]
        )
        return (
            Part("encoder", parts=(source, *_stack(settings, model.encoder, "S"))),
            Part("decoder", parts=(words, *_stack(settings, model.decoder, "T"), *top)),
        )
    stack = model.decoder or model.encoder
    assert stack is not None
    name = "decoder" if model.decoder is not None else "encoder"
    return (Part(name, parts=(_embedding(model), *_segments(model), *_stack(settings, stack, "T"), *top)),)


def _embedding(model: Transformer) -> Part:
    settings = model.config
    factor = settings.embedding_scale
    scaled = "" if factor is False else " · √d_model" if factor is True else f" · {factor:g}"
    return Part(
        "token embedding",
        f"x = E[token]{scaled}",
        f"{dims('B', 'T')} → {dims('B', 'T', settings.width)}",
        size(model.embedding),
        keys(settings, "vocab_size", *_width(settings), *(["embedding_scale"] if scaled else [])),
        (code(Transformer.embed),),
        box="Token embedding",
        detail=f"{settings.vocab_size:,} × {settings.width}",
    )


def _width(settings: Any) -> list[str]:
    """The setting that says how wide embeddings are."""
    return ["d_model" if settings.width == settings.d_model else "d_embedding"]


def _segments(model: Transformer) -> tuple[Part, ...]:
    if model.segments is None:
        return ()
    shape = f"{dims('B', 'T', model.config.width)} → the same"
    kinds = keys(model.config, "segments")
    return (Part("segments", "x + S[0 or 1]", shape, size(model.segments), kinds, (code(Transformer.embed),)),)


def _stack(settings: Any, stack: Stack, time: str) -> tuple[Part, ...]:
    """What a stack does with embedded tokens."""
    D, parts = settings.d_model, []
    if stack.projection is not None and not stack.narrow:
        parts.append(_projection(settings, stack, time))
    if (added := added_positions(settings, stack, time)) is not None:
        parts.append(added)
    if stack.embedding_norm is not None:
        made_of = _norm(settings, "embedding norm", stack.embedding_norm, time)
        parts.append(replace(made_of, shape=f"{dims('B', time, settings.added_width)} → the same"))
    if stack.projection is not None and stack.narrow:
        parts.append(_projection(settings, stack, time))
    # the first block stands for all, unless it lacks a norm that the others have
    alike = [list(stack.blocks)] if settings.first_norm else [[stack.blocks[0]], list(stack.blocks[1:])]
    for blocks in filter(None, alike):
        parts.append(
            Part(
                "block" if stack.sharing == 1 else f"block, run {stack.sharing} times in a row",
                "layer by layer, each on what the last one gave",
                f"{dims('B', time, D)} → the same",
                settings=keys(settings, "layers", "placement", *_unusual(settings)),
                code=(code(block.Block.forward), code(Stack.forward)),
                parts=_block(settings, blocks[0], stack, time),
                repeats=len(blocks),
                note=_pattern(settings),
            )
        )
    if stack.norm is not None:
        parts.append(_norm(settings, "last norm", stack.norm, time))
    return tuple(parts)


def _projection(settings: Any, stack: Stack, time: str) -> Part:
    assert stack.projection is not None
    shape = f"{dims('B', time, settings.width)} → {dims('B', time, settings.d_model)}"
    names, formula = keys(settings, "d_embedding", "d_model"), f"x W{with_bias(stack.projection.bias is not None)}"
    return Part("projection", formula, shape, size(stack.projection), names, (code(Stack.forward),), box="Projection")


def _unusual(settings: Any) -> list[str]:
    """Settings of blocks that are named where they are not at their default."""
    fields, names = type(settings).model_fields, ("residual", "sublayers", "residual_scale", "first_norm")
    return [name for name in names if getattr(settings, name) != fields[name].default]


def _pattern(settings: Any) -> str:
    """How layers differ."""
    causal = not isinstance(settings, Encoder)
    kinds = [f"{reach(kind.window, causal)}, positions {kind.position.kind}" for kind in settings.kinds()]
    return "" if len(kinds) == 1 else f"layer by layer, again and again: {'; '.join(kinds)}"


def _block(settings: BlockConfig, layer: Any, stack: Stack, time: str) -> tuple[Part, ...]:
    if layer.parallel:
        return _side_by_side(settings, layer, stack, time)
    parts = [*_sublayer(settings, _attention(settings, layer, stack, time), layer.attention_skip, time)]
    if layer.cross is not None:
        parts += _sublayer(settings, _cross(settings, layer.cross), layer.cross_skip, time)
    inner = _feedforward(settings, layer.feedforward, time)
    return (*parts, *_sublayer(settings, inner, layer.feedforward_skip, time))


def _side_by_side(settings: BlockConfig, layer: Any, stack: Stack, time: str) -> tuple[Part, ...]:
    """Both sublayers read what the block reads, and are added at once."""
    first, second = layer.attention_skip, layer.feedforward_skip
    norms = [_norm(settings, "norm", skip.norm, time) for skip in (first, second) if skip.norm is not None]
    inside = [_attention(settings, layer, stack, time), _feedforward(settings, layer.feedforward, time)]
    ordered = [norms[0], inside[0], *norms[1:], inside[1]]
    total = Part(
        "skip",
        "x + attention(norm(x)) + feed-forward(norm(x))",
        f"{dims('B', time, settings.d_model)}",
        settings=keys(settings, "sublayers", *(["dropout"] if settings.dropout else [])),
        code=(code(block.Block.forward),),
        note="both read what the block reads" + ("; one norm serves both" if len(norms) == 1 else ""),
        skips=len(ordered),
    )
    return (*ordered, *([total] if settings.residual else []))


def _sublayer(settings: BlockConfig, inside: Part, skip: Any, time: str) -> list[Part]:
    """What stands around a sublayer: norms before or after it, and the sum."""
    normed = [] if skip.norm is None else [_norm(settings, "norm", skip.norm, time)]
    before, after = (normed, []) if skip.pre else ([], normed)
    added = [] if skip.norm_out is None else [_norm(settings, "norm of what is added", skip.norm_out, time)]
    scaled = "" if skip.scale == 1.0 else f"{skip.scale:g} · "
    inner = "f(norm(x))" if before else "f(x)"
    total = Part(
        "skip",
        f"x + {scaled}{f'norm({inner})' if added else inner}",
        f"{dims('B', time, settings.d_model)}",
        settings=keys(settings, "placement", *(["dropout"] if settings.dropout else [])),
        code=(code(block.Sublayer.forward),),
        skips=1 + len(before) + len(added),
    )
    return [*before, inside, *added, *([total] if settings.residual else []), *after]


def _norm(settings: BlockConfig, name: str, module: Any, time: str) -> Part:
    plain = isinstance(settings.norm, LayerNorm)
    formula = "g · x / √(mean(x²) + ε)"
    if plain:
        formula = ("(x − μ)/σ" if module.weight is None else "g · (x − μ)/σ") + with_bias(module.bias is not None)
    made = (code(norm.LayerNorm), code(norm.LayerNorm.forward)) if plain else (code(norm.RMSNorm.forward),)
    width = settings.d_model
    kind = "LayerNorm" if plain else "RMSNorm"
    set_as = keys(settings, "norm.kind", "norm.eps")
    shape = f"{dims('B', time, width)} → the same"
    return Part(f"{name}, {kind}", formula, shape, size(module), set_as, made, box=kind)


def _heads_text(settings: BlockConfig) -> str:
    H, G = settings.attention.heads, settings.attention.groups
    return f"{H} heads × {settings.d_head}" + (f", {G} of keys and values" if G != H else "")


def _attention(settings: BlockConfig, layer: Any, stack: Stack, time: str) -> Part:
    """Self-attention: projections, what positions do to them, scores and their mean, and the mix of heads."""
    chosen, module, D, K = settings.attention, layer.attention, settings.d_model, settings.d_head
    H, G, source = chosen.heads, chosen.groups, code(attention.SelfAttention.forward)
    bias = with_bias(module.qkv.bias is not None) + ("" if chosen.clip is None else f", cut off at ±{chosen.clip:g}")
    groups = f"k, v {dims('B', G, time, K)}"
    into = f"{dims('B', time, D)} → {dims('B', time, (H + 2 * G) * K)} → q {dims('B', H, time, K)}, {groups}"
    names = ("attention.heads", "attention.kv_heads", "attention.d_head", "attention.bias")
    parts = [
        Part("queries, keys, values", f"q, k, v = x W{bias}", into, size(module.qkv), keys(settings, *names), (source,))
    ]
    if module.q_norm is not None:
        q_norm = size(module.q_norm) + size(module.k_norm)
        parts.append(Part("norm of queries and keys", "norm(q), norm(k)", _normed(settings), q_norm,
                          keys(settings, "attention.qk_norm.kind"), (source,)))  # fmt: skip
    if (scored := scored_positions(settings.position, settings, stack, module)) is not None:
        parts.append(scored)
    parts.append(_scores(settings, stack.causal, time, time))
    parts.append(_out(settings, module, time))
    masked = "masked " if stack.causal else ""
    return Part(
        f"{masked}multi-head self-attention",
        "Attention(q, k, v) = softmax(q kᵀ/√d_k) v, head by head",
        f"{dims('B', time, D)} → the same",
        settings=keys(settings, "attention.window"),
        parts=tuple(parts),
        box=f"{masked}self-attention".capitalize(),
        detail=_heads_text(settings),
    )


def _normed(settings: BlockConfig) -> str:
    together = settings.attention.qk_norm_over == "heads"
    return "over all heads of a token" if together else f"over {settings.d_head}"


def _cross(settings: BlockConfig, module: Any) -> Part:
    """Attention to the source."""
    chosen, D, K = settings.attention, settings.d_model, settings.d_head
    H, G, bias = chosen.heads, chosen.groups, with_bias(module.q.bias is not None)
    queries, both = code(attention.CrossAttention.forward), code(attention.CrossAttention.keys_values)
    into = f"{dims('B', 'T', D)} → {dims('B', H, 'T', K)}"
    of_source = f"{dims('B', 'S', D)} → k, v {dims('B', G, 'S', K)}"
    names = keys(settings, "attention.heads", "attention.kv_heads", "attention.bias")
    parts = [
        Part("queries", f"q = x W_q{bias}", into, size(module.q), names, (queries,)),
        Part("keys, values of the source", f"k, v = source W_kv{bias}", of_source, size(module.kv), names, (both,)),
    ]
    if module.q_norm is not None:
        q_norm = size(module.q_norm) + size(module.k_norm)
        parts.append(Part("norm of queries and keys", "norm(q), norm(k)", _normed(settings), q_norm,
                          keys(settings, "attention.qk_norm.kind"), (queries, both)))  # fmt: skip
    parts += [_scores(settings, False, "T", "S"), _out(settings, module, "T")]
    return Part(
        "multi-head attention to the source",
        "Attention(q, k, v) = softmax(q kᵀ/√d_k) v, head by head",
        f"{dims('B', 'T', D)}, {dims('B', 'S', D)} → {dims('B', 'T', D)}",
        parts=tuple(parts),
        box="Attention to the source",
        detail=_heads_text(settings),
        reads=True,
    )


def _scores(settings: BlockConfig, causal: bool, queries: str, sources: str) -> Part:
    """The formula with its numbers (Vaswani et al. 2017, §3.2.1)."""
    chosen, K = settings.attention, settings.d_head
    scale = chosen.scale or K**-0.5
    root = f"scale {scale:g}" if chosen.scale else f"d_k = {K}, 1/√{K} = {scale:.4g}"
    mask = " + mask" if causal or chosen.window else ""
    scores = f"{scale:.4g} · q kᵀ"
    if chosen.softcap is not None:
        scores = f"{chosen.softcap:g} tanh({scores}/{chosen.softcap:g})"
    H = chosen.heads
    shared = f"; each head of k, v serves {H // chosen.groups} of q" if chosen.groups != H else ""
    seen = f"; the mask hides what comes later{f', and all but the last {chosen.window}' if chosen.window else ''}"
    return Part(
        "scores, softmax, weighted mean",
        f"softmax({scores}{mask}) v; {root}",
        f"{dims('B', H, queries, sources)} weights → {dims('B', queries, H * K)}",
        settings=keys(settings, "attention.scale", "attention.dropout" if chosen.dropout else "attention.scale"),
        code=(code(reference_attention), code(masked_softmax), code(attend)),
        note=(shared + (seen if mask else "")).removeprefix("; "),
    )


def _out(settings: BlockConfig, module: Any, time: str) -> Part:
    width, D = settings.attention.heads * settings.d_head, settings.d_model
    bias = with_bias(module.out.bias is not None)
    shape = f"{dims('B', time, width)} → {dims('B', time, D)}"
    source = (code(attention.SelfAttention.attend),)
    return Part("heads mixed", f"concat(heads) W_o{bias}", shape, size(module.out), code=source)


def _feedforward(settings: BlockConfig, module: Any, time: str) -> Part:
    chosen, D = settings.feedforward, settings.d_model
    F, f = chosen.d_ff, chosen.activation
    names = keys(settings, "feedforward.kind", "feedforward.d_ff", "feedforward.activation")
    wide = dims("B", time, F)
    bias = with_bias(chosen.bias)
    if isinstance(chosen, Gated):
        source, into = code(feedforward.Gated.forward), module.gate_up
        formula = "(f(x W_g) ⊙ x W_u) W_d"
        up = Part("gate and up", f"g, u = x W{bias}", f"{dims('B', time, D)} → 2 × {wide}", size(into), code=(source,))
        middle = Part("gate", f"{f}(g) ⊙ u", wide, settings=keys(settings, "feedforward.activation"), code=(source,))
    else:
        source, into = code(feedforward.Plain.forward), module.up
        formula = "f(x W₁ + b₁) W₂ + b₂" if chosen.bias else "f(x W₁) W₂"
        up = Part("up", f"x W₁{bias}", f"{dims('B', time, D)} → {wide}", size(into), code=(source,))
        middle = Part("activation", f"{f}(x)", wide, settings=keys(settings, "feedforward.activation"), code=(source,))
    down = Part("down", f"x W{bias}", f"{wide} → {dims('B', time, D)}", size(module.down), code=(source,))
    return Part(
        "feed-forward", formula, f"{dims('B', time, D)} → the same", settings=names, code=(source,),
        parts=(up, middle, down), box="Feed-forward", detail=f"{D} → {F:,} → {D}, {f}",
    )  # fmt: skip


# ---- heads


def _heads(model: Transformer) -> tuple[Part, ...]:
    settings, module = model.config, model.output
    source: tuple[Code, ...]
    match module:
        case heads.LMHead():
            back = () if module.dense is None else (_back(settings, module.dense),)
            return (*back, _words(model, module))
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
            shape = f"{dims('B', 'T', settings.d_model)} → {dims('B', 'T', module.out.out_features)}"
            source = (code(heads.Tagger.forward),)
            span = settings.head.kind == "span"
            kind, name = keys(settings, "head.kind", *([] if span else ["head.labels"])), "ends" if span else "tags"
            formula = "x W + b" if module.transform is None else f"{_before(module.transform)} W + b"
            return (Part(name, formula, shape, size(module), kind, source, box=name.capitalize()),)
        case heads.Detector():
            shape = f"{dims('B', 'T', settings.d_model)} → {dims('B', 'T')}"
            source, kind = (code(heads.Detector.forward),), keys(settings, "head.kind", "head.activation")
            formula = f"{settings.head.activation}(x W_d + b_d) w + b"  # type: ignore[union-attr]
            return (Part("replaced", formula, shape, size(module), kind, source, box="Replaced?"),)
        case heads.Embedder():
            shape = f"{dims('B', 'T', settings.d_model)} → {dims('B', settings.d_model)}"
            kind = keys(settings, "head.kind", "head.pooling", "head.normalise")
            source = (code(heads.Embedder.forward), code(heads.pool))
            return (Part("one vector a text", "mean or first of x", shape, 0, kind, source, box="Text embedding"),)
        case _:
            raise AssertionError(f"a head of kind '{settings.head.kind}' is described nowhere")


def _back(settings: Any, dense: Any) -> Part:
    """From the layers' width to the embeddings'."""
    shape = f"{dims('B', 'T', settings.d_model)} → {dims('B', 'T', settings.width)}"
    made = (code(heads.LMHead.prepare),)
    return Part("projection back", "x W", shape, size(dense), keys(settings, "d_embedding"), made, box="Projection")


def _before(transform: heads.Transform) -> str:
    return f"norm(f(x W_t{with_bias(transform.dense.bias is not None)}))"


def _transform(settings: Any, module: heads.MaskedLMHead) -> Part:
    D, E, f = settings.d_model, settings.width, settings.head.activation
    own = size(module.dense) + size(module.norm)
    shape = f"{dims('B', 'T', D)} → {'the same' if E == D else dims('B', 'T', E)}"
    kind, source = keys(settings, "head.kind", "head.activation"), (code(heads.MaskedLMHead.prepare),)
    return Part("transform", f"norm({f}(x W + b))", shape, own, kind, source, box="Transform", detail=f"{D} → {E}, {f}")


def _words(model: Transformer, module: heads.TokenHead) -> Part:
    settings: Any = model.config
    D, V, tied = settings.width, settings.vocab_size, module.weight is None
    own = sum(weight.numel() for weight in (module.weight, module.bias) if weight is not None)
    table = "Eᵀ" if tied else "W"
    product = f"x {table}{with_bias(module.bias is not None)}"
    if module.softcap is not None:
        product = f"c tanh(({product})/c), c = {module.softcap:g}"
    formula = f"logits = {product}; p = softmax(logits)"
    return Part(
        "logits", formula, f"{dims('B', 'T', D)} → {dims('B', 'T', f'{V:,}')}", own,
        keys(settings, "head.kind", "head.tied", "head.bias", "head.scale"), (code(heads.TokenHead.forward),),
        note="tied: the table of the embeddings, counted there" if tied else "", box="Logits", detail=f"{D} → {V:,}",
    )  # fmt: skip


def _classes(settings: Any, module: heads.Classifier, name: str) -> Part:
    D, labels = settings.d_model, module.out.out_features
    pooled = (
        ""
        if module.pooler is None
        else f"{getattr(settings.head, 'activation', 'tanh') if name == 'classes' else 'tanh'}"
    )
    formula = f"{pooled}(x_{module.pooling} W_p + b_p) W + b" if pooled else f"x_{module.pooling} W + b"
    if module.transform is not None:
        formula = f"{_before(module.transform)} W + b, x = x_{module.pooling}"
    sources = (code(heads.Classifier.forward), *([] if module.pooler is None else [code(heads.Pooler.forward)]))
    shape, kind = f"{dims('B', 'T', D)} → {dims('B', labels)}", keys(settings, "head.kind", "head.labels")
    return Part(name, formula, shape, size(module), kind, sources, box=name.capitalize(), detail=f"{D} → {labels}")
