"""Parts of a Transformer: both stacks, their blocks, and the head."""

from dataclasses import replace
from typing import Any

from weft.costs.units import reach
from weft.explain.anatomy.parts import ModelPart, part, size, with_bias
from weft.models import heads
from weft.models.config import Encoder
from weft.models.stack import Stack
from weft.models.transformer import Transformer
from weft.nn import attention, block, experts, norm, position
from weft.nn.attention_paths import attend
from weft.nn.config import Block as BlockConfig
from weft.nn.config import Gated
from weft.nn.experts import Experts
from weft.nn.hashed_ngrams import NGramEmbedding
from weft.nn.position_config import (
    ALiBi,
    Concatenated,
    Disentangled,
    LayeredT5,
    Learned,
    NoPosition,
    Relative,
    Rotary,
    Sinusoidal,
    T5Bias,
)
from weft.nn.scaled_dot_product import masked_softmax, reference_attention

TIED = "tied to the embedding table, counted there"


def transformer_columns(model: Transformer) -> tuple[ModelPart, ...]:
    """Return one column per stack, the encoder first; the head is on top of the last."""
    settings: Any = model.config
    E, factor = settings.width, settings.embedding_scale
    words = {"V": f"{settings.vocab_size:,}", "E": E, "D": settings.d_model}
    words["scaled"] = "" if factor is False else " · √d_model" if factor is True else f" · {factor:g}"
    width = "d_embedding" if settings.factorised else "d_model" if settings.d_model == E else "d_model position.width"
    words["keys"] = width + " embedding_scale" * bool(words["scaled"])
    embedding = part("token-embedding", words, own=size(model.embedding), by=[Transformer.embed])
    if model.encoder is not None and model.decoder is not None:
        words["V"] = f"{settings.source_vocab_size or settings.vocab_size:,}"
        note = "shares the target's embedding table, counted there" if model.source_embedding is None else ""
        source = part("source-embedding", words, own=size(model.source_embedding), by=[Transformer.embed], note=note)
        return (
            ModelPart("encoder", parts=(source, *_stack(settings, model.encoder, "S"))),
            ModelPart("decoder", parts=(embedding, *_stack(settings, model.decoder, "T"), *_heads(model))),
        )
    stack = model.decoder or model.encoder
    assert stack is not None
    parts = [embedding]
    if model.segments is not None:
        parts = [embedding, part("segments", words, own=size(model.segments), by=[Transformer.embed])]
    if model.ngrams is not None:
        rows = " + ".join(f"N{order}[hash of the last {order}]" for order in model.ngrams.orders)
        words["formula"] = f"x + {rows}" if model.ngrams.projection is None else f"x + ({rows}) W"
        words["rows"], words["width"] = model.ngrams.weight.shape
        by = [NGramEmbedding.indices, NGramEmbedding.forward]
        parts = [embedding, part("n-grams", words, own=size(model.ngrams), by=by)]
    name = "decoder" if model.decoder is not None else "encoder"
    return (ModelPart(name, parts=(*parts, *_stack(settings, stack, "T"), *_heads(model))),)


def _sizes(settings: Any, time: str) -> dict[str, Any]:
    """Return the words of parts.toml for a block that reads sequences of length `time`."""
    chosen, inner = settings.attention, settings.feedforward
    sizes = {"time": time, "source": time, "D": settings.d_model, "H": chosen.heads, "G": chosen.groups}
    sizes |= {"K": settings.d_head, "HW": chosen.heads * settings.d_v}
    beta = "" if inner.beta == 1.0 else f", β = {inner.beta:g}"
    return sizes | {"F": f"{inner.d_ff:,}", "F0": inner.d_ff, "f": inner.activation, "beta": beta}


def _stack(settings: Any, stack: Stack, time: str) -> tuple[ModelPart, ...]:
    words, projection = _sizes(settings, time) | {"E": settings.width}, []
    if stack.projection is not None:
        words["bias"] = with_bias(stack.projection)
        projection = [part("projection", words, own=size(stack.projection), by=[Stack.forward])]
    parts = [*([] if stack.narrow else projection), *_added_positions(settings, stack, time)]
    if stack.embedding_norm is not None:
        parts.append(_norm("embedding norm", stack.embedding_norm, time=time, width=settings.added_width))
    parts += projection if stack.narrow else []
    defaults, unusual = type(settings).model_fields, ("residual", "sublayers", "residual_scale", "first_norm")
    chosen = ("layers", "placement", *(key for key in unusual if getattr(settings, key) != defaults[key].default))
    words |= {"keys": " ".join(chosen)}
    words["runs"] = "" if stack.sharing == 1 else f", run {stack.sharing} times in a row"
    causal, by = not isinstance(settings, Encoder), [block.Block.forward, Stack.forward]
    kinds = [f"{reach(kind, causal)}, positions {kind.position.kind}" for kind in settings.kinds(causal)]
    note = "" if len(kinds) == 1 else f"layers repeat this pattern: {'; '.join(kinds)}"
    # One block represents all, unless some lack a norm that the others have, or are dense beside mixtures of experts.
    groups: dict[Any, tuple[Any, list[Any]]] = {}
    for n, each in enumerate(stack.blocks):
        inner = settings.feedforward_at(n * stack.sharing)
        own = settings.model_copy(update={"feedforward": inner})
        groups.setdefault((settings.first_norm or n > 0, inner.kind), (own, []))[1].append(each)
    for own, blocks in groups.values():
        frame = part("block", words, by=by, note=note)
        parts.append(replace(frame, parts=_block(own, blocks[0], stack, time=time), repeats=len(blocks)))
    if stack.norm is not None:
        parts.append(_norm("last norm", stack.norm, time=time, width=settings.d_model))
    return tuple(parts)


def _block(settings: BlockConfig, layer: Any, stack: Stack, *, time: str) -> tuple[ModelPart, ...]:
    attended = _self_attention(settings, layer.attention, stack, time=time)
    if layer.parallel:
        return _parallel(settings, layer, (attended, _feedforward(settings, layer, time)), time=time)
    parts = [(attended, layer.attention_skip)]
    if layer.cross is not None:
        parts.append((_cross(settings, layer.cross), layer.cross_skip))
    if layer.feedforward is not None:
        parts.append((_feedforward(settings, layer, time), layer.feedforward_skip))
    return tuple(each for inside, skip in parts for each in _sublayer(settings, inside, skip, time=time))


def _parallel(
    settings: BlockConfig, layer: Any, inside: tuple[ModelPart, ModelPart], *, time: str
) -> tuple[ModelPart, ...]:
    """Return sublayers that both read the block's input and are added in one sum."""
    skips = layer.attention_skip, layer.feedforward_skip
    norms = [_norm("norm", skip.norm, time=time, width=settings.d_model) for skip in skips if skip.norm is not None]
    ordered = (norms[0], inside[0], *norms[1:], inside[1])
    formula, note = "x + attention(norm(x)) + feed-forward(norm(x))", "both read the block's input"
    total = _skip(settings, formula, "sublayers", time=time)
    note += "; one norm serves both" if len(norms) == 1 else ""
    return (*ordered, *(replace(each, by=(block.Block.forward,), note=note, skips=len(ordered)) for each in total))


def _sublayer(settings: BlockConfig, inside: ModelPart, skip: Any, *, time: str) -> list[ModelPart]:
    """Return a sublayer with the norms before or after it, and the sum."""
    D = settings.d_model
    norms = [] if skip.norm is None else [_norm("norm", skip.norm, time=time, width=D)]
    before, after = (norms, []) if skip.pre else ([], norms)
    output_norm = [] if skip.norm_out is None else [_norm("output norm", skip.norm_out, time=time, width=D)]
    inner = "f(norm(x))" if before else "f(x)"
    scale = "" if skip.scale == 1.0 else f"{skip.scale:g} · "
    formula = f"x + {scale}{f'norm({inner})' if output_norm else inner}"
    skips = 1 + len(before) + len(output_norm)
    total = [replace(each, skips=skips) for each in _skip(settings, formula, "placement", time=time)]
    return [*before, inside, *output_norm, *total, *after]


def _skip(settings: BlockConfig, formula: str, key: str, *, time: str) -> list[ModelPart]:
    words = {"formula": formula, "key": key, "time": time, "D": settings.d_model}
    words["dropout"] = " dropout" * bool(settings.dropout)
    return [part("skip", words, by=[block.Sublayer.forward])] if settings.residual else []


def _norm(name: str, module: Any, *, time: str, width: int) -> ModelPart:
    words: dict[str, Any] = {"name": name, "time": time, "width": width}
    if not isinstance(module, norm.LayerNorm):
        return part("rms-norm", words, own=size(module), by=[norm.RMSNorm.forward])
    words |= {"gain": "" if module.weight is None else "g · ", "bias": with_bias(module)}
    return part("layer-norm", words, own=size(module), by=[norm.LayerNorm, norm.LayerNorm.forward])


def _self_attention(settings: BlockConfig, module: Any, stack: Stack, *, time: str) -> ModelPart:
    """Return self-attention: projections, positions, scores and their mean, and the output projection."""
    chosen, words, by = settings.attention, _sizes(settings, time), [attention.SelfAttention.forward]
    words["joined"] = (chosen.heads + chosen.groups) * settings.d_head + chosen.groups * settings.d_v
    clipped = "" if chosen.clip is None else f", clipped to ±{chosen.clip:g}"
    words["bias"] = clipped if chosen.latent is not None else with_bias(module.qkv) + clipped
    words["kv"] = _keys_values(settings, time)
    words |= {"masked": "masked " if stack.causal else "", "heads": _heads_text(settings)}
    words["box"] = f"{words['masked']}self-attention".capitalize()
    parts = (
        *_projections(settings, module, words, time=time),
        *_query_norm(settings, module, *by),
        *_scored_positions(settings, stack, module),
        *_mixed(settings, module, words, causal=stack.causal),
    )
    return replace(part("self-attention", words), parts=parts)


def _projections(settings: BlockConfig, module: Any, words: dict[str, Any], *, time: str) -> list[ModelPart]:
    """Return the projections to queries, keys and values, which latent attention computes in two steps each."""
    if not isinstance(module, attention.LatentAttention):
        return [part("queries-keys-values", words, own=size(module.qkv), by=[attention.SelfAttention.forward])]
    rank, queries = module.rank, module.query_rank
    words = words | {"rank": rank, "rotated": module.rotated, "width": f"x → {queries} → norm" if queries else "x"}
    words["inputs"] = queries or settings.d_model
    by_queries, own = [attention.LatentAttention.queries], [module.q_up, module.kv_down, module.kv_latent_norm]
    down = [module.q_down, module.q_latent_norm] if queries else []
    by, expand = [attention.LatentAttention.compress], [attention.LatentAttention.expand]
    return [
        part("latent-queries", words, own=size(own[0], *down), by=by_queries),
        part("latent-vectors", words, own=size(*own[1:]), by=by),
        part("latent-keys-values", words, own=size(module.kv_up), by=expand),
    ]


def _cross(settings: BlockConfig, module: Any) -> ModelPart:
    words = _sizes(settings, "T") | {"source": "S", "bias": with_bias(module.q), "heads": _heads_text(settings)}
    words["kv"] = _keys_values(settings, "S")
    forward, keys_values = attention.CrossAttention.forward, attention.CrossAttention.keys_values
    parts = (
        part("queries", words, own=size(module.q), by=[forward]),
        part("source-keys-values", words, own=size(module.kv), by=[keys_values]),
        *_query_norm(settings, module, forward, keys_values),
        *_mixed(settings, module, words, causal=False),
    )
    return replace(part("cross-attention", words), parts=parts, reads=True)


def _keys_values(settings: BlockConfig, time: str) -> str:
    """Return the shapes of keys and values."""
    shape = f"(B, {settings.attention.groups}, {time}, {settings.d_head})"
    return f"k, v {shape}" if settings.d_v == settings.d_head else f"k {shape}, v (…, {settings.d_v})"


def _heads_text(settings: BlockConfig) -> str:
    H, G = settings.attention.heads, settings.attention.groups
    widths = f"{settings.d_head}" if settings.d_v == settings.d_head else f"{settings.d_head}, values {settings.d_v}"
    return f"{H} heads × {widths}" + (f", {G} of keys and values" if G != H else "")


def _query_norm(settings: BlockConfig, module: Any, *by: Any) -> list[ModelPart]:
    if module.q_norm is None:
        return []
    over = "all heads of a token" if settings.attention.qk_norm_over == "heads" else settings.d_head
    return [part("query-norm", {"over": over}, own=size(module.q_norm, module.k_norm), by=by)]


def _mixed(settings: BlockConfig, module: Any, words: dict[str, Any], *, causal: bool) -> list[ModelPart]:
    """Return the formula with its numbers (Vaswani et al. 2017, §3.2.1), and the output projection."""
    chosen, H, K = settings.attention, settings.attention.heads, settings.d_head
    scale = chosen.scale or K**-0.5
    scores, masked = f"{scale:.4g} · q kᵀ", causal or chosen.window
    if chosen.softcap is not None:
        scores = f"{chosen.softcap:g} tanh({scores}/{chosen.softcap:g})"
    root = f"scale {scale:g}" if chosen.scale else f"d_k = {K}, 1/√{K} = {scale:.4g}"
    notes = [f"each head of k, v serves {H // chosen.groups} of q"] if chosen.groups != H else []
    if masked:
        window = f", and all but the last {chosen.window}" if chosen.window else ""
        notes.append(f"the mask hides later tokens{window}")
    if chosen.sinks:
        notes.append("the softmax has one more score per head, the sink, which belongs to no key")
    words = words | {"scores": scores, "mask": " + mask" if masked else "", "root": root}
    words |= {"dropout": "attention.dropout" if chosen.dropout else "", "bias": with_bias(module.out)}
    by = [reference_attention, masked_softmax, attend]
    projection = part("heads-mixed", words, own=size(module.out), by=[attention.SelfAttention.attend])
    return [part("scores", words, own=size(module.sinks), by=by, note="; ".join(notes)), projection]


def _added_positions(settings: Any, stack: Stack, time: str) -> list[ModelPart]:
    """Return positions that are added or concatenated to the embeddings, or a table that all layers read."""
    chosen, width, own = settings.position, settings.added_width, size(stack.position)
    words = {"time": time, "width": width, "kind": chosen.kind}
    match chosen:
        case Sinusoidal():
            by = [position.sinusoids, position.Sinusoidal.embed]
            return [part("sinusoidal", words | {"base": chosen.base}, own=own, by=by)]
        case Concatenated():
            words |= {"base": chosen.base, "E": settings.width, "beside": width - settings.width}
            return [part("concatenated", words, own=own, by=[position.sinusoids, position.Concatenated.embed])]
        case Learned():
            return [part("learned", words | {"context": f"{settings.context:,}"}, own=own, by=[position.Learned.embed])]
        case T5Bias():
            return [part("t5-table", {"buckets": chosen.buckets, "H": settings.attention.heads}, own=own)]
        case Disentangled():
            return [part("disentangled-table", words | {"rows": 2 * chosen.buckets}, own=own)]
        case NoPosition() | Rotary() | ALiBi() | Relative() | LayeredT5():
            return []
        case _:  # declared elsewhere
            words["formula"] = type(stack.position).__doc__ or ""
            return [part("other-positions", words, own=own, by=[type(stack.position).embed])]


def _scored_positions(settings: Any, stack: Stack, module: Any) -> list[ModelPart]:
    """Return positions that act on queries, keys or scores; a table shared by all layers is not counted here."""
    chosen, K = settings.position, settings.d_head
    match chosen:
        case Rotary():
            width = chosen.rotated(K)
            end = "first" if settings.attention.latent is None else "last"
            words = {"base": chosen.base, "width": width, "over": K if width == K else f"the {end} {width} of {K}"}
            return [part("rotary", words, by=[position.Rotary.rotate, position.Rotary.frequencies])]
        case ALiBi():
            return [part("alibi", {}, by=[position.ALiBi.bias])]
        case T5Bias():
            note = "one table for all layers, counted before them"
            return [part("t5-bias", {}, by=[position.T5Bias.bias, position.T5Bias.bucket], note=note)]
        case LayeredT5():
            own, by = size(module.relative_bias), [attention.BiasedAttention.scores, position.T5Bias.bucket]
            return [part("t5-bias", {}, own=own, by=by)]
        case Disentangled():
            return [part("disentangled", {}, by=[type(module).mix, position.Disentangled.distances])]
        case Relative():
            own = size(module.relative_keys, module.relative_values)
            return [part("relative", {"rows": chosen.rows, "K": K}, own=own, by=[type(module).mix])]
    return []


def _feedforward(settings: BlockConfig, layer: Any, time: str) -> ModelPart:
    module, by = layer.feedforward, [type(layer.feedforward).forward]
    if isinstance(module, Experts):
        return _experts(module, _sizes(settings, time))
    chosen: Any = settings.feedforward
    words = _sizes(settings, time) | {"bias": with_bias(module.down)}
    words |= {"bias1": " + b₁" if chosen.bias else "", "bias2": " + b₂" if chosen.bias else ""}
    gated, down = isinstance(chosen, Gated), part("down", words, own=size(module.down), by=by)
    up = part("gate-up" if gated else "up", words, own=size(module.gate_up if gated else module.up), by=by)
    own = size(module.activation) if chosen.activation == "xielu" else 0
    middle = part("gate" if gated else "activation", words, own=own, by=by)
    return replace(part("gated" if gated else "feedforward", words, by=by), parts=(up, middle, down))


def _experts(module: Experts, words: dict[str, Any]) -> ModelPart:
    chosen, by = module.settings, [type(module.experts).forward]
    score = {"sigmoid": "σ(x W_r)"}.get(chosen.score, "softmax(x W_r)")
    words |= {"E": chosen.experts, "k": chosen.chosen, "score": score, "S": chosen.shared_width}
    parts = [
        part("router", words, own=size(module.router), by=[type(module.router).choose]),
        part("experts", words, own=size(module.experts), by=[*by, experts.grouped_product, type(module).mix]),
    ]
    if module.shared is not None:
        own = size(module.shared, module.shared_gate)
        parts.append(part("shared-experts", words, own=own, by=[type(module.shared).forward]))
    return replace(part("mixture", words, by=[type(module).forward]), parts=tuple(parts))


def _heads(model: Transformer) -> tuple[ModelPart, ...]:
    settings: Any = model.config
    module, words = model.output, {"D": settings.d_model, "E": settings.width}
    match module:
        case heads.LMHead():
            parts = [] if module.transform is None else [_transform(settings, module.transform)]
            if module.dense is not None:  # from the layers' width to the embeddings'
                parts.append(part("projection-back", words, own=size(module.dense), by=[heads.LMHead.prepare]))
            return (*parts, _logits(model, module))
        case heads.MaskedLMHead():
            return (*([] if module.dense is None else [_transform(settings, module)]), _logits(model, module))
        case heads.PretrainingPair():
            # Both heads read the same features; the diagram has them in one box.
            logits, pair = _logits(model, module.words), _classes(settings, module.next_sentence, "next sentence")
            logits = replace(logits, box="Logits, next sentence", detail=f"{logits.detail}; {pair.detail}")
            pair = replace(pair, box="", note="beside the logits, from the same features")
            before = [] if module.words.dense is None else [_transform(settings, module.words)]
            return (*before, logits, pair)
        case heads.Classifier():
            return (_classes(settings, module, "classes"),)
        case heads.Tagger():
            name, keys = ("ends", "") if settings.head.kind == "span" else ("tags", "head.labels")
            inner = "x" if module.transform is None else _transformed(module.transform)
            words |= {"name": name, "box": name.capitalize(), "keys": keys, "inner": inner}
            words["labels"] = module.out.out_features
            return (part("tags", words, own=size(module), by=[heads.Tagger.forward]),)
        case heads.Detector():
            words["f"] = settings.head.activation
            return (part("replaced", words, own=size(module), by=[heads.Detector.forward]),)
        case heads.Embedder():
            return (part("text-embedding", words, by=[heads.Embedder.forward, heads.pool]),)
        case _:
            raise AssertionError(f"a head of kind '{settings.head.kind}' has no description")


def _transformed(transform: heads.Transform) -> str:
    return f"norm(f(x W_t{with_bias(transform.dense)}))"


def _transform(settings: Any, module: heads.MaskedLMHead | heads.Transform) -> ModelPart:
    D, E, head, key = settings.d_model, settings.width, settings.head, "head"
    by: list[Any] = [heads.MaskedLMHead.prepare]
    if isinstance(module, heads.Transform):
        E, head, by, key = D, head.transform, [heads.Transform.forward], "head.transform"
    words = {"D": D, "E": E, "f": head.activation, "out": "the same" if E == D else f"(B, T, {E})", "key": key}
    return part("transform", words, own=size(module.dense, module.norm), by=by)


def _logits(model: Transformer, module: heads.TokenHead) -> ModelPart:
    settings, tied = model.config, module.weight is None
    product = f"x {'Eᵀ' if tied else 'W'}{'' if module.bias is None else ' + b'}"
    if module.softcap is not None:
        product = f"c tanh(({product})/c), c = {module.softcap:g}"
    words = {"product": product, "E": settings.width, "V": f"{settings.vocab_size:,}"}
    own, by = size(module.weight, module.bias), [heads.TokenHead.forward]
    return part("logits", words, own=own, by=by, note=TIED if tied else "")


def _classes(settings: Any, module: heads.Classifier, name: str) -> ModelPart:
    by: list[Any] = [heads.Classifier.forward, *([] if module.pooler is None else [heads.Transform.forward])]
    pooled = f"x_{module.pooling}"
    f = getattr(settings.head, "activation", "tanh") if name == "classes" else "tanh"
    formula = f"{pooled} W + b" if module.pooler is None else f"{f}({pooled} W_p + b_p) W + b"
    if module.pooled_late:
        formula = f"y_{module.pooling} W + b, y = {f}(x W_p + b_p)"
    if module.transform is not None:
        formula = f"{_transformed(module.transform)} W + b, x = {pooled}"
    words = {"name": name, "formula": formula, "D": settings.d_model, "labels": module.out.out_features}
    return part("classes", words, own=size(module), by=by)
