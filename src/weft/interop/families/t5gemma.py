"""T5Gemma (Zhang et al. 2025): an encoder and a decoder of Gemma 2, joined by cross-attention."""

from weft.config import Tree
from weft.interop.families import llama, positions
from weft.interop.families.base import GATED, TABLES, TIED, Family, widened
from weft.interop.families.seq2seq import TWO_TABLES
from weft.interop.settings import Flat, Settings
from weft.interop.table import Key, Row, Special, constant, keys
from weft.interop.weight_map import Rules, block, module, tensor
from weft.models.config import EncoderDecoder


def _side(settings: Settings, side: str) -> Settings:
    """Settings of the encoder or the decoder, which have tables of their own in config.json."""
    table = settings.get(side, {})
    if not isinstance(table, dict):
        raise settings.error(side, "expected a table of settings")
    dropouts = {key: settings.get(key, 0.0) for key in ("attention_dropout", "dropout_rate")}
    return Settings({**GEMMA_DEFAULTS, **table, **dropouts}, f"{settings.location}: {side}")


def _read_gemmas(settings: Settings, model: Flat) -> Flat:
    parts, sides = [_side(settings, side) for side in ("encoder", "decoder")], [dict(model), dict(model)]
    for row in GEMMA_ROWS:
        for part, side in zip(parts, sides, strict=True):
            side |= row.read(part, side)
        if different := {key for key in sides[1] if sides[0].get(key) != sides[1][key]} - EACH_SIDE:
            theirs = row.theirs if isinstance(row, Key) else KEYS_OF[min(different).partition(".")[0]]
            raise parts[0].error(theirs, f"weft has one for both sides, and the decoder's is {parts[1].get(theirs)}")
    encoder, decoder = sides
    kinds = positions.kinds_of({"pattern": (), "attention.window": None, **widened(encoder, 1)})
    sizes = {"encoder_layers": encoder["layers"], "source_vocab_size": encoder["vocab_size"], "encoder_pattern": kinds}
    return {**decoder, **sizes}


def _write_gemmas(model: Flat) -> Tree:
    encoder = {"layers": model["encoder_layers"], "pattern": model["encoder_pattern"], "attention.window": None}
    encoder["vocab_size"] = model["source_vocab_size"] or model["vocab_size"]
    sides = {"decoder": model, "encoder": widened({**model, **encoder}, -1)}
    tree: Tree = {}
    for side, flat in sides.items():
        tree[side] = {key: value for row in GEMMA_ROWS for key, value in row.write(flat).items()}
        tree[side]["sliding_window"] = tree[side]["sliding_window"] or 4096  # which no layer uses, but must be a number
    return tree


EACH_SIDE = {"layers", "vocab_size", "pattern", "attention.window", "head.softcap"}  # may differ
KEYS_OF = {"position": "rope_parameters", "attention": "attention_bias", "feedforward": "hidden_activation"}
GEMMA_DEFAULTS: Tree = TABLES["defaults"]["t5gemma"]
GEMMA_ROWS: tuple[Row, ...] = (
    *llama.SIZES,
    llama.WIDTH,
    llama.EPS,
    llama.ATTENTION_BIAS,
    llama.GEMMA2_ACTIVATION,
    llama.SCALE,
    llama.SCORES,
    llama.LOGITS(30.0),
    positions.rotary(),
    llama.some_windows(lambda layer: layer % 2 == 0, 4096),
    *keys(dropout=("dropout_rate", 0.0), feedforward_dropout=("dropout_rate", 0.0)),
)


def _gemma_stack(side: str) -> Rules:
    return (
        *block(side, f"model.{side}.layers.{{layer}}", **TABLES["modules"]["t5gemma"]),
        *module(f"{side}.norm", f"model.{side}.norm"),
    )


T5GEMMA = Family(
    rows=(Special(_read_gemmas, _write_gemmas), TIED, constant("is_encoder_decoder", True)),
    fixed={**GATED, "norm.offset": 1.0, "embedding_scale": True, "placement": "sandwich"},
    names=("t5gemma", "T5Gemma", "T5Gemma"),
    model=EncoderDecoder,
    body=(*TWO_TABLES, *_gemma_stack("encoder"), *_gemma_stack("decoder")),
    heads={"lm": (tensor("output.weight", "lm_head.out_proj.weight"),)},
    classes={"lm": "T5GemmaForConditionalGeneration"},
    base=None,
    prefix="",
)
