"""ModernBERT (Warner et al. 2024): rotary positions, pre-norm, a gated feed-forward, few biases.

Two of three layers attend within a window to both sides and have a separate rotary base. The norm of the embeddings is
also that of the first attention, and every head begins with a dense layer and a norm. ModernBERT-decoder (Ettin; Weller
et al. 2025) is the same as a causal model.
"""

from dataclasses import replace

from weft.config import Tree
from weft.interop.families.base import GATED, count_labels, in_stack, sizes, write_labels
from weft.interop.families.bert import family
from weft.interop.families.llama import ATTENTION_BIAS, FEEDFORWARD_BIAS
from weft.interop.families.positions import depth, layer_types, two_bases, window, write_windows
from weft.interop.settings import THEIR_ACTIVATIONS, Flat, Settings
from weft.interop.table import Row, Special
from weft.interop.weight_map import block, module, tensor
from weft.models.config import Decoder

POOLING = {"cls": "first", "mean": "mean"}


def _read_head(settings: Settings, model: Flat) -> Flat:
    kind, bias = model["head.kind"], settings.flag("classifier_bias", False)
    activation = settings.activation("classifier_activation", "gelu")
    if kind == "embedding":
        return {}
    tokens = {"head.tied": settings.flag("tie_word_embeddings", True), "head.bias": settings.flag("decoder_bias", True)}
    if kind == "mlm":
        return {**tokens, "head.dense_bias": bias, "head.activation": activation}
    head: Flat = {"head.transform.activation": activation, "head.transform.bias": bias}
    if kind == "lm":
        return head | tokens
    head["head.dropout"] = settings.number("classifier_dropout", 0.0)
    if kind != "span":
        head["head.labels"] = count_labels(settings)
    if kind != "sequence":
        return head
    pooling = settings.get("classifier_pooling", "cls")
    if pooling not in tuple(POOLING):
        raise settings.error("classifier_pooling", f"weft has {' and '.join(POOLING)}")
    return head | {"head.pooler": False, "head.pooling": POOLING[pooling]}


def _read_decoder_head(settings: Settings, model: Flat) -> Flat:
    last = {"head.pooling": "last", "head.bias": settings.flag("classifier_bias", False)}
    return _read_head(settings, model) | (last if model["head.kind"] == "sequence" else {})


def _write_head(model: Flat) -> Tree:
    is_mlm, predicts = model["head.kind"] == "mlm", model["head.kind"] in ("lm", "mlm")
    bias = "head.dense_bias" if is_mlm else "head.transform.bias"
    activation = "head.activation" if is_mlm else "head.transform.activation"
    pooling = {ours: theirs for theirs, ours in POOLING.items()}
    return {
        "tie_word_embeddings": model.get("head.tied", True),
        "decoder_bias": model["head.bias"] if predicts else True,
        "classifier_bias": model.get(bias, False),
        "classifier_activation": THEIR_ACTIVATIONS[model.get(activation, "gelu")],
        "classifier_dropout": model.get("head.dropout", 0.0),
        "classifier_pooling": pooling.get(model.get("head.pooling", "first"), "cls"),
        **write_labels(model),
    }


def _rotary(own: int) -> Special:
    """Row of positions and windows: transformers counts half of local_attention without the token itself if `own` is 1,
    and with it if it is 0, where the half has a key that takes precedence."""

    def read(settings: Settings, model: Flat) -> tuple[list[bool], int | None]:
        step = settings.integer("global_attn_every_n_layers", 3)
        windowed = layer_types(settings, model, [layer % step != 0 for layer in range(depth(model))])
        half = settings.integer("local_attention", 128) // 2
        return windowed, half + 1 if own else window(settings, half)

    def write(model: Flat) -> Tree:
        tree = write_windows(model, "local_attention")
        half = (tree["local_attention"] or 64 + own) - own
        return {**tree, "local_attention": 2 * half} | ({} if own else {"sliding_window": half})

    bases = ("global_rope_theta", 160000.0), ("local_rope_theta", 10000.0)
    return two_bases(*bases, read_windows=read, write_windows=write)


SIZES = sizes("modernbert")
LABELS = (
    *module("output.transform.dense", "head.dense"),
    *module("output.transform.norm", "head.norm"),
    *module("output.out", "classifier"),
)
MLM = (*module("output.dense", "head.dense"), *module("output.norm", "head.norm"), *module("output", "decoder"))
LM = (
    *module("output.transform.dense", "lm_head.dense"),
    *module("output.transform.norm", "lm_head.norm"),
    *module("output", "decoder"),
)
LAYER = "model.layers.{layer}"
ROWS: tuple[Row, ...] = (*SIZES, ATTENTION_BIAS, FEEDFORWARD_BIAS)
BODY = (
    tensor("embedding.weight", "model.embeddings.tok_embeddings.weight"),
    *module("encoder.embedding_norm", "model.embeddings.norm"),
    *block("encoder", LAYER, norm="attn_norm", qkv="attn.Wqkv", out="attn.Wo"),
    *block("encoder", LAYER, ff_norm="mlp_norm", gate_up="mlp.Wi", down="mlp.Wo"),
    *module("encoder.norm", "model.final_norm"),
)
MODERNBERT = family(
    ("modernbert", "ModernBERT", "ModernBert"),
    (*ROWS, _rotary(1), Special(_read_head, _write_head)),
    fixed={**GATED, "norm.kind": "layer", "embedding_norm": True, "first_norm": False},
    only={"rope_scaling": None},
    body=BODY,
    heads={"mlm": MLM, "sequence": LABELS, "token": LABELS, "span": LABELS, "embedding": ()},
    root="model",
    unused=(r"(head|decoder|classifier)\..*",),
)
SEPARATE = block("decoder", LAYER, qkv="attn.*_proj")
MODERNBERT_DECODER = replace(
    MODERNBERT,
    names=("modernbert-decoder", "ModernBERT-decoder", "ModernBertDecoder"),
    model=Decoder,
    rows=(*ROWS, _rotary(0), Special(_read_decoder_head, _write_head)),
    body=(*in_stack("decoder", tuple(rule for rule in BODY if ".qkv." not in rule.ours)), *SEPARATE),
    heads={"lm": LM, "sequence": LABELS},
    base="lm",
    ids={"bos": 0, "pad": 0},
)
