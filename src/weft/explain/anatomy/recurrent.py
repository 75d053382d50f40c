"""Parts of models other than Transformers: recurrent stacks, Bahdanau's attention, n-grams and word vectors."""

from dataclasses import replace
from typing import Any

from torch import nn

from weft.explain.anatomy.parts import ModelPart, folded, part, size
from weft.models import ngram, ngram_smoothing
from weft.models.bahdanau import AdditiveAttention, Bahdanau
from weft.models.bengio import Bengio
from weft.models.config import GloVe, Word2Vec
from weft.models.elmo import ELMo
from weft.models.glove import GloVeTraining, cooccurrences
from weft.models.ngram import NGram, contexts
from weft.models.recurrent import Recurrent
from weft.models.word2vec import Word2VecTraining
from weft.models.word_table import WordTable
from weft.nn.recurrent import SigmoidElman, read


def recurrent_columns(model: Recurrent) -> tuple[ModelPart, ...]:
    """Return embedding, layers and logits."""
    settings, tied = model.config, model.output is None
    words = {"D": settings.d_model, "V": f"{settings.vocab_size:,}", "matrix": "E" if tied else "W_yh"}
    note, by = "tied to the embedding table, counted there" if tied else "", (Recurrent.head, Recurrent.readout)
    logits = part("recurrent-logits", words, own=size(model.output, model.output_bias), by=by, note=note)
    layers = _layers(settings, model.recurrence, "layer")
    return (ModelPart("recurrent", parts=(_embedding(settings, model.embedding, "token"), *layers, logits)),)


def bengio_columns(model: Bengio) -> tuple[ModelPart, ...]:
    """Return embedding, hidden layer and logits of a neural n-gram (Bengio et al. 2003, §2)."""
    settings, features = model.config, model.output.shape[1]
    words = {
        "name": "token",
        "time": "T",
        "V": f"{settings.vocab_size:,}",
        "E": settings.d_embedding or settings.d_model,
    }
    words |= {
        "D": settings.d_model,
        "X": settings.d_input,
        "out": features,
        "direct": " + W x" if settings.direct else "",
    }
    embedding = part("embedding", words, own=size(model.embedding), by=[Bengio.forward_features])
    context = part("bengio-context", words | {"width": settings.order - 1}, by=[contexts, Bengio._hidden])
    hidden = part("tanh-layer", words, own=size(model.hidden), by=[Bengio._hidden])
    logits = part("bengio-logits", words, own=size(model.output, model.output_bias), by=[Bengio.readout])
    return (ModelPart("neural n-gram", parts=(embedding, context, hidden, logits)),)


def elmo_columns(model: ELMo) -> tuple[ModelPart, ...]:
    """Return the two directions, which share the embeddings and the logits; both are counted in the first."""
    settings, D = model.config, model.config.d_model
    words = {"name": "token", "time": "T", "V": f"{settings.vocab_size:,}", "E": D, "D": D, "matrix": "W_yh"}
    words |= {"out": D, "width": D, "both": "", "f": ""}
    by, columns = [ELMo._read], list[ModelPart]()
    for name, layers in (("forward", model.ahead), ("backward", model.back)):
        first, note = not columns, "" if not columns else "shared with the forward direction, counted there"
        embedding = part("embedding", words, own=size(model.embedding) if first else 0, by=by, note=note)
        own = size(model.output, model.output_bias) if first else 0
        logits = part("recurrent-logits", words, own=own, by=[ELMo.readout], note=note)
        named = {**words, "name": f"{name} layer"}
        cells = [replace(part("lstm", named, own=size(layer), by=by), loops=True) for layer in layers]
        columns.append(ModelPart(name, parts=(embedding, *folded(cells), logits)))
    return tuple(columns)


def bahdanau_columns(model: Bahdanau) -> tuple[ModelPart, ...]:
    """Return the encoder and the decoder (Bahdanau et al. 2015, §3 and appendix A)."""
    settings, D = model.config, model.config.d_model
    joined = 3 * D + (settings.d_embedding or D)
    words = {"D": D, "D2": 2 * D, "A": settings.d_attention or D, "V": f"{settings.vocab_size:,}", "joined": joined}
    words["layers"] = settings.layers
    bridge = part("bridge", words, own=size(model.bridge), by=[Bahdanau.encode], note="the decoder's initial state")
    attention = part("additive-attention", words, own=size(model.attention), by=[AdditiveAttention.forward])
    readout = part("readout", words, own=size(model.maxout), by=[Bahdanau._decode])
    logits = part("bahdanau-logits", words, own=size(model.output), by=[Bahdanau.head])
    source = _embedding(settings, model.source_embedding, "source", time="S")
    encoder = _layers(settings, model.encoder, "encoder layer, bidirectional", time="S")
    target, decoder = _embedding(settings, model.embedding, "token"), _layers(settings, model.decoder, "decoder layer")
    reading = (target, replace(attention, reads=True), *decoder, readout, logits)
    return ModelPart("encoder", parts=(source, *encoder, bridge)), ModelPart("decoder", parts=reading)


def ngram_columns(model: NGram) -> tuple[ModelPart, ...]:
    """Return context, counts and smoothing."""
    settings, kind = model.config, model.config.smoothing.kind
    words = {"order": settings.order, "width": settings.order - 1, "V": f"{settings.vocab_size:,}"}
    note = "no parameters: the text decides how many counts there are"
    context = part("context", words, by=[NGram.forward_features])
    counts = part("counts", words, by=[NGram.fit, ngram.count_ngrams], note=note)
    smoothing = part(f"smoothing-{kind}", words, by=[ngram_smoothing.smooth, NGram.head])
    return (ModelPart("n-gram", parts=(context, counts, smoothing)),)


def word_table_columns(model: WordTable) -> tuple[ModelPart, ...]:
    """Return the table of vectors, and what it is trained to predict."""
    settings = model.config
    words: dict[str, object] = {"name": "word", "time": "T", "V": f"{settings.vocab_size:,}", "E": settings.d_model}
    table = part("embedding", words, own=size(model.embedding), by=[WordTable.forward_features])
    note = "only in training: the context vectors are not part of the model"
    if isinstance(settings, Word2Vec):
        words |= {"window": settings.window, "negatives": settings.negatives}
        by = [Word2VecTraining._train_chunk, Word2VecTraining._update]
        return (ModelPart("word2vec", parts=(table, part(settings.architecture, words, by=by, note=note))),)
    assert isinstance(settings, GloVe)
    words |= {"window": settings.window, "x_max": f"{settings.x_max:g}", "alpha": settings.alpha}
    counts = part("co-occurrences", words, by=[cooccurrences])
    fit = part("glove-fit", words, by=[GloVeTraining._update], note=note)
    return (ModelPart("GloVe", parts=(table, counts, fit)),)


def _embedding(settings: Any, table: nn.Embedding | None, name: str, *, time: str = "T") -> ModelPart:
    """Return an embedding; without a table it is the target's, counted there."""
    V = settings.vocab_size if table is None else table.num_embeddings
    words = {"name": name, "time": time, "V": f"{V:,}", "E": settings.d_embedding or settings.d_model}
    by = [Bahdanau.encode if time == "S" else Recurrent.forward_features]
    note = "shares the target's embedding table" if table is None else ""
    return part("embedding", words, own=size(table), by=by, note=note)


def _layers(settings: Any, stack: nn.RNNBase, name: str, *, time: str = "T") -> tuple[ModelPart, ...]:
    words, layers = {"name": name, "time": time, "out": (1 + stack.bidirectional) * settings.d_model}, []
    words |= {"both": ", bidirectional" if stack.bidirectional else "", "f": getattr(settings, "activation", "")}
    for layer in range(stack.num_layers):
        words |= {"width": words["out"] if layer else stack.input_size}
        own = [weight for path, weight in stack.named_parameters() if path.split("_l")[1].split("_")[0] == str(layer)]
        by = [type(stack).forward if isinstance(stack, SigmoidElman) else read]
        layers.append(replace(part(settings.cell, words, own=size(*own), by=by), loops=True))
    return folded(layers)
