"""ModernBERT (Warner et al. 2024): rotary positions, pre-norm, a gated feed-forward, few biases.

Two of three layers attend within a window to both sides and have a separate rotary base. The norm of the embeddings is
also that of the first attention, and every head begins with a dense layer and a norm.
"""

from weft.config import Tree
from weft.interop.families.base import GATED, count_labels, write_labels
from weft.interop.families.bert import family
from weft.interop.families.llama import ATTENTION_BIAS, FEEDFORWARD_BIAS
from weft.interop.families.positions import depth, layer_types, two_bases, write_windows
from weft.interop.settings import THEIR_ACTIVATIONS, Flat, Settings
from weft.interop.table import Special, keys
from weft.interop.weight_map import block, module, tensor

POOLING = {"cls": "first", "mean": "mean"}


def _read_head(settings: Settings, model: Flat) -> Flat:
    kind, bias = model["head.kind"], settings.flag("classifier_bias", False)
    activation = settings.activation("classifier_activation", "gelu")
    if kind == "embedding":
        return {}
    if kind == "mlm":
        tied, lm_bias = settings.flag("tie_word_embeddings", True), settings.flag("decoder_bias", True)
        return {"head.tied": tied, "head.bias": lm_bias, "head.dense_bias": bias, "head.activation": activation}
    head: Flat = {"head.transform.activation": activation, "head.transform.bias": bias}
    head["head.dropout"] = settings.number("classifier_dropout", 0.0)
    if kind != "span":
        head["head.labels"] = count_labels(settings)
    if kind != "sequence":
        return head
    pooling = settings.get("classifier_pooling", "cls")
    if pooling not in tuple(POOLING):
        raise settings.error("classifier_pooling", f"weft has {' and '.join(POOLING)}")
    return head | {"head.pooler": False, "head.pooling": POOLING[pooling]}


def _write_head(model: Flat) -> Tree:
    is_mlm = model["head.kind"] == "mlm"
    bias = "head.dense_bias" if is_mlm else "head.transform.bias"
    activation = "head.activation" if is_mlm else "head.transform.activation"
    pooling = {ours: theirs for theirs, ours in POOLING.items()}
    return {
        "tie_word_embeddings": model.get("head.tied", True),
        "decoder_bias": model["head.bias"] if is_mlm else True,
        "classifier_bias": model.get(bias, False),
        "classifier_activation": THEIR_ACTIVATIONS[model.get(activation, "gelu")],
        "classifier_dropout": model.get("head.dropout", 0.0),
        "classifier_pooling": pooling.get(model.get("head.pooling", "first"), "cls"),
        **write_labels(model),
    }


def _read_windows(settings: Settings, model: Flat) -> tuple[list[bool], int]:
    """Whether each layer has a window, and its size; transformers counts both sides without the token itself."""
    step = settings.integer("global_attn_every_n_layers", 3)
    windowed = layer_types(settings, model, [layer % step != 0 for layer in range(depth(model))])
    return windowed, settings.integer("local_attention", 128) // 2 + 1


def _write_windows(model: Flat) -> Tree:
    tree = write_windows(model, "local_attention")
    return {**tree, "local_attention": 2 * ((tree["local_attention"] or 65) - 1)}


SIZES = keys(
    vocab_size=("vocab_size", 50368), context=("max_position_embeddings", 8192), d_model=("hidden_size", 768),
    d_ff=("intermediate_size", 1152), layers=("num_hidden_layers", 22), heads=("num_attention_heads", 12),
    activation=("hidden_activation", "gelu"), eps=("norm_eps", 1e-5), norm_bias=("norm_bias", False),
    attention_dropout=("attention_dropout", 0.0), feedforward_dropout=("mlp_dropout", 0.0),
    dropout=("embedding_dropout", 0.0), std=("initializer_range", 0.02),
)  # fmt: skip
LABELS = (
    *module("output.transform.dense", "head.dense"),
    *module("output.transform.norm", "head.norm"),
    *module("output.out", "classifier"),
)
MLM = (*module("output.dense", "head.dense"), *module("output.norm", "head.norm"), *module("output", "decoder"))
LAYER = "model.layers.{layer}"
MODERNBERT = family(
    ("modernbert", "ModernBERT", "ModernBert"),
    (
        *SIZES,
        ATTENTION_BIAS,
        FEEDFORWARD_BIAS,
        two_bases(
            ("global_rope_theta", 160000.0),
            ("local_rope_theta", 10000.0),
            read_windows=_read_windows,
            write_windows=_write_windows,
        ),
        Special(_read_head, _write_head),
    ),
    fixed={**GATED, "norm.kind": "layer", "embedding_norm": True, "first_norm": False},
    only={"rope_scaling": None},
    body=(
        tensor("embedding.weight", "model.embeddings.tok_embeddings.weight"),
        *module("encoder.embedding_norm", "model.embeddings.norm"),
        *block("encoder", LAYER, norm="attn_norm", qkv="attn.Wqkv", out="attn.Wo"),
        *block("encoder", LAYER, ff_norm="mlp_norm", gate_up="mlp.Wi", down="mlp.Wo"),
        *module("encoder.norm", "model.final_norm"),
    ),
    heads={"mlm": MLM, "sequence": LABELS, "token": LABELS, "span": LABELS, "embedding": ()},
    root="model",
    unused=(r"(head|decoder|classifier)\..*",),
)
