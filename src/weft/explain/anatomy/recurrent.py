"""The parts of models that are no Transformers: recurrent stacks, Bahdanau's attention, and n-grams."""

from typing import Any

from torch import nn

from weft.explain.anatomy.parts import Part, code, dims, folded, keys, size
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
    settings = model.config
    D, V = settings.d_model, settings.vocab_size
    tied = model.output is None
    own = model.output_bias.numel() + (0 if model.output is None else model.output.numel())
    logits = Part(
        "logits",
        f"logits = {'E' if tied else 'W_yh'} h_t + b_y; p = softmax(logits)",
        f"{dims('B', 'T', D)} → {dims('B', 'T', f'{V:,}')}",
        own,
        keys(settings, "tied"),
        (code(Recurrent.head), code(Recurrent.readout)),
        note="tied: the table of the embeddings, counted there" if tied else "",
        box="Logits",
        detail=f"{D} → {V:,}",
    )
    words = _embedding(settings, model.embedding, "token embedding", "T")
    return (Part("recurrent", parts=(words, *_layers(settings, model.recurrence, "layer", "T"), logits)),)


def bahdanau_columns(model: Bahdanau) -> tuple[Part, ...]:
    """What reads the source, and what writes (Bahdanau et al. 2015, §3 and appendix A)."""
    settings, D = model.config, model.config.d_model
    E, A, V = settings.d_embedding or D, settings.d_attention or D, settings.vocab_size
    shared = model.source_embedding is None
    words = _embedding(settings, model.source_embedding, "source embedding", "S", shared)
    bridge = Part(
        "first state", "s_0 = tanh(W ←h_1 + b)", f"{dims('B', D)} → {dims('B', settings.layers, D)}",
        size(model.bridge), keys(settings, "layers"), (code(Bahdanau.encode),),
        note="the state that the decoder begins with",
    )  # fmt: skip
    attention = Part(
        "additive attention",
        "e_j = v · tanh(W_q s_(t−1) + W_k h_j), a = softmax(e), c_t = Σ a_j h_j",
        f"s {dims('B', D)}, h {dims('B', 'S', 2 * D)} → a {dims('B', 'S')}, c {dims('B', 2 * D)}",
        size(model.attention),
        keys(settings, "d_attention"),
        (code(AdditiveAttention.forward),),
        box="Additive attention",
        detail=f"{D}, {2 * D} → {A} → 1",
        reads=True,
    )
    readout = Part(
        "readout", "maxout of pairs over [s_t, c_t, x_t] W + b",
        f"{dims('B', 'T', 3 * D + E)} → {dims('B', 'T', 2 * D)} → {dims('B', 'T', D)}", size(model.maxout),
        keys(settings, "d_model"), (code(Bahdanau._decode),), box="Readout", detail=f"{3 * D + E} → {2 * D} → {D}",
    )  # fmt: skip
    logits = Part(
        "logits", "logits = W x + b; p = softmax(logits)", f"{dims('B', 'T', D)} → {dims('B', 'T', f'{V:,}')}",
        size(model.output), keys(settings, "vocab_size"), (code(Bahdanau.head),), box="Logits", detail=f"{D} → {V:,}",
    )  # fmt: skip
    encoder = _layers(settings, model.encoder, "encoder layer, both ways", "S")
    decoder = _layers(settings, model.decoder, "decoder layer", "T")
    own = _embedding(settings, model.embedding, "token embedding", "T")
    return (
        Part("encoder", parts=(words, *encoder, bridge)),
        Part("decoder", parts=(own, attention, *decoder, readout, logits)),
    )


def ngram_columns(model: NGram) -> tuple[Part, ...]:
    """Context, look-up, smoothing: counts, no weights."""
    settings = model.config
    width, V = settings.order - 1, settings.vocab_size
    context = Part(
        "context", f"c = the last {width} words", f"{dims('B', 'T')} → {dims('B', 'T', width)}",
        settings=keys(settings, "order"), code=(code(NGram.forward_features),),
        box="Context", detail=f"the last {width} words",
    )  # fmt: skip
    counts = Part(
        "counts", "n(w₁ … w_n), found once in the text", f"tables of n-grams, n = 1 … {settings.order}",
        settings=keys(settings, "order", "vocab_size"), code=(code(NGram.fit), code(ngram.count_ngrams)),
        note="no parameters: the text decides how many counts there are", box="Counts", detail="sorted tables",
    )  # fmt: skip
    smoothed = Part(
        "smoothing", SMOOTHED[settings.smoothing.kind], f"{dims('B', 'T', width)} → {dims('B', 'T', f'{V:,}')}",
        settings=keys(settings, "smoothing.kind", "smoothing.k", "smoothing.alpha", "smoothing.discount"),
        code=(code(ngram_smoothing.smooth), code(NGram.head)), box="Smoothing", detail=settings.smoothing.kind,
    )  # fmt: skip
    return (Part("n-gram", parts=(context, counts, smoothed)),)


def _embedding(settings: Any, table: nn.Embedding | None, name: str, time: str, shared: bool = False) -> Part:
    E = settings.d_embedding or settings.d_model
    V = settings.vocab_size if table is None else table.num_embeddings
    return Part(
        name, "x = E[token]", f"{dims('B', time)} → {dims('B', time, E)}", size(table),
        keys(settings, "vocab_size", "source_vocab_size", "d_embedding", "d_model"),
        (code(Bahdanau.encode if time == "S" else Recurrent.forward_features),),
        box=name.capitalize(), detail=f"{V:,} × {E}",
        note="the table of the target's embeddings" if shared else "",
    )  # fmt: skip


def _layers(settings: Any, stack: nn.RNNBase, name: str, time: str) -> tuple[Part, ...]:
    """The layers of a recurrent stack; those that are alike together."""
    D, ways, cell = settings.d_model, 1 + stack.bidirectional, settings.cell
    parts = []
    for layer in range(stack.num_layers):
        d_input = ways * D if layer else stack.input_size
        own = [weight for path, weight in stack.named_parameters() if path.split("_l")[1].split("_")[0] == str(layer)]
        chosen = ["cell", "activation"] if cell == "elman" else ["cell"]
        parts.append(
            Part(
                f"{NAMES[cell]} {name}",
                CELLS[cell].format(f=getattr(settings, "activation", "tanh")),
                f"{dims('B', time, d_input)} → {dims('B', time, ways * D)}",
                size(own),
                keys(settings, *chosen, "layers", "d_model"),
                (code(type(stack).forward) if isinstance(stack, SigmoidElman) else code(read),),
                box=f"{NAMES[cell]}{', both ways' if ways > 1 else ''}",
                detail=f"{d_input} → {ways * D}",
                loops=True,
            )
        )
    return folded(parts)
