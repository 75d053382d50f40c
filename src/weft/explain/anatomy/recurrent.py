"""The parts of models that are no Transformers: recurrent stacks, Bahdanau's attention, and n-grams."""

from functools import partial
from typing import Any

from torch import nn

from weft.explain.anatomy.parts import Part, folded, part, size
from weft.models import ngram, ngram_smoothing
from weft.models.bahdanau import AdditiveAttention, Bahdanau
from weft.models.ngram import NGram
from weft.models.recurrent import Recurrent
from weft.nn.recurrent import SigmoidElman, read

CELLS = {
    "elman": "h_t = {f}(W_ah h_(t−1) + W_ax x_t + b_a)",
    "lstm": "i, f, o = σ(W x_t + U h_(t−1) + b), g = tanh(…); c_t = f ⊙ c_(t−1) + i ⊙ g; h_t = o ⊙ tanh(c_t)",
    "gru": "r, z = σ(W x_t + U h_(t−1) + b); n = tanh(W x_t + r ⊙ (U h_(t−1) + b)); h_t = (1 − z) ⊙ n + z ⊙ h_(t−1)",
}
NAMES = {"elman": "Elman", "lstm": "LSTM", "gru": "GRU"}
SMOOTHED = {
    "mle": "p(w | c) = n(c w) / n(c)",
    "add-k": "p(w | c) = (n(c w) + k) / (n(c) + kV)",
    "stupid-backoff": "s(w | c) = n(c w) / n(c), or α · s(w | shorter c) where that is 0",
    "kneser-ney": "p(w | c) = max(n(c w) − d, 0) / n(c) + λ(c) · p(w | shorter c)",
    "modified-kneser-ney": "p(w | c) = max(n(c w) − d, 0) / n(c) + λ(c) · p(w | shorter c); d is d₁, d₂ or d₃₊",
}


def recurrent_columns(model: Recurrent) -> tuple[Part, ...]:
    """Embedding, layers, logits."""
    settings, tied = model.config, model.output is None
    sizes = settings.d_model, f"{settings.vocab_size:,}"
    formula = f"logits = {'E' if tied else 'W_yh'} h_t + b_y; p = softmax(logits)"
    shape, own = "(B, T, {}) → (B, T, {})".format(*sizes), size(model.output, model.output_bias)
    note = "tied: the table of the embeddings, counted there" if tied else ""
    more = {"own": own, "note": note, "detail": "{} → {}".format(*sizes)}
    logits = part(settings, "logits", formula, shape, "tied", Recurrent.head, Recurrent.readout, **more)
    words = _embedding(settings, model.embedding, "token embedding", "T")
    return (Part("recurrent", parts=(words, *_layers(settings, model.recurrence, "layer", "T"), logits)),)


def bahdanau_columns(model: Bahdanau) -> tuple[Part, ...]:
    """What reads the source, and what writes (Bahdanau et al. 2015, §3 and appendix A)."""
    settings, D = model.config, model.config.d_model
    E, A, V = settings.d_embedding or D, settings.d_attention or D, f"{settings.vocab_size:,}"
    describe, shared = partial(part, settings), model.source_embedding is None
    words = _embedding(settings, model.source_embedding, "source embedding", "S", shared)
    formula, shape = "s_0 = tanh(W ←h_1 + b)", f"(B, {D}) → (B, {settings.layers}, {D})"
    more = {"note": "the state that the decoder begins with", "own": size(model.bridge)}
    bridge = describe("first state", formula, shape, "layers", Bahdanau.encode, **more)
    formula = "e_j = v · tanh(W_q s_(t−1) + W_k h_j), a = softmax(e), c_t = Σ a_j h_j"
    shape = f"s (B, {D}), h (B, S, {2 * D}) → a (B, S), c (B, {2 * D})"
    more = {"own": size(model.attention), "detail": f"{D}, {2 * D} → {A} → 1", "reads": True}
    attention = describe("additive attention", formula, shape, "d_attention", AdditiveAttention.forward, **more)
    formula, own = "maxout of pairs over [s_t, c_t, x_t] W + b", size(model.maxout)
    shape, sizes = f"(B, T, {3 * D + E}) → (B, T, {2 * D}) → (B, T, {D})", f"{3 * D + E} → {2 * D} → {D}"
    readout = describe("readout", formula, shape, "d_model", Bahdanau._decode, own=own, detail=sizes)
    formula, shape, own = "logits = W x + b; p = softmax(logits)", f"(B, T, {D}) → (B, T, {V})", size(model.output)
    logits = describe("logits", formula, shape, "vocab_size", Bahdanau.head, own=own, detail=f"{D} → {V}")
    encoder = _layers(settings, model.encoder, "encoder layer, both ways", "S")
    decoder = _layers(settings, model.decoder, "decoder layer", "T")
    own_words = _embedding(settings, model.embedding, "token embedding", "T")
    return (
        Part("encoder", parts=(words, *encoder, bridge)),
        Part("decoder", parts=(own_words, attention, *decoder, readout, logits)),
    )


def ngram_columns(model: NGram) -> tuple[Part, ...]:
    """Context, look-up, smoothing: counts, no weights."""
    settings, kind = model.config, model.config.smoothing.kind
    describe, width = partial(part, settings), settings.order - 1
    last, shape = f"the last {width} words", f"(B, T) → (B, T, {width})"
    context = describe("context", f"c = {last}", shape, "order", NGram.forward_features, detail=last)
    formula, tables = "n(w₁ … w_n), found once in the text", f"tables of n-grams, n = 1 … {settings.order}"
    more = {"note": "no parameters: the text decides how many counts there are", "detail": "sorted tables"}
    counts = describe("counts", formula, tables, "order vocab_size", NGram.fit, ngram.count_ngrams, **more)
    shape, by = f"(B, T, {width}) → (B, T, {settings.vocab_size:,})", (ngram_smoothing.smooth, NGram.head)
    keys = "smoothing.kind smoothing.k smoothing.alpha smoothing.discount"
    smoothed = describe("smoothing", SMOOTHED[kind], shape, keys, *by, detail=kind)
    return (Part("n-gram", parts=(context, counts, smoothed)),)


def _embedding(settings: Any, table: nn.Embedding | None, name: str, time: str, shared: bool = False) -> Part:
    E, keys = settings.d_embedding or settings.d_model, "vocab_size source_vocab_size d_embedding d_model"
    V = settings.vocab_size if table is None else table.num_embeddings
    by = Bahdanau.encode if time == "S" else Recurrent.forward_features
    more = {"detail": f"{V:,} × {E}", "note": "the table of the target's embeddings" if shared else ""}
    return part(settings, name, "x = E[token]", f"(B, {time}) → (B, {time}, {E})", keys, by, own=size(table), **more)


def _layers(settings: Any, stack: nn.RNNBase, name: str, time: str) -> tuple[Part, ...]:
    cell, out = settings.cell, (1 + stack.bidirectional) * settings.d_model
    formula = CELLS[cell].format(f=getattr(settings, "activation", "tanh"))
    keys = f"cell {'activation' if cell == 'elman' else ''} layers d_model"
    by = type(stack).forward if isinstance(stack, SigmoidElman) else read
    box = f"{NAMES[cell]}{', both ways' if stack.bidirectional else ''}"
    parts = []
    for layer in range(stack.num_layers):
        given = out if layer else stack.input_size
        own = [weight for path, weight in stack.named_parameters() if path.split("_l")[1].split("_")[0] == str(layer)]
        shape, detail = f"(B, {time}, {given}) → (B, {time}, {out})", f"{given} → {out}"
        more = {"own": size(*own), "box": box, "detail": detail, "loops": True}
        parts.append(part(settings, f"{NAMES[cell]} {name}", formula, shape, keys, by, **more))
    return folded(parts)
