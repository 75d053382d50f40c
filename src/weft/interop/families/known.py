"""All families of Hugging Face models that weft reads and writes; add a new one here, or in its relatives' module.

For a model of an unknown family, the error names the nearest family and what that lacks.
"""

import re
from collections.abc import Collection
from contextlib import suppress

from weft.config import Tree
from weft.errors import InteropError, WeftError
from weft.interop.families import bert, deberta, encoders, experts, gpt2, gpt_neox, llama, recent, seq2seq
from weft.interop.families.base import TABLES, Family
from weft.interop.families.modernbert import MODERNBERT, MODERNBERT_DECODER
from weft.interop.families.t5gemma import T5GEMMA
from weft.interop.settings import Flat, Settings, Transformer, count_experts, shown
from weft.interop.weight_map import conversions, their_shapes
from weft.models.config import Decoder, Encoder, EncoderDecoder

# if several can express a model trained by weft, the first is written
DECODERS = (
    *(
        gpt2.GPT2,
        llama.LLAMA,
        *recent.FAMILIES,
        *experts.FAMILIES,
        gpt2.OPT,
        gpt_neox.GPT_NEOX,
        gpt2.GPTJ,
        gpt2.GPT_NEO,
    ),
    *(gpt_neox.PHI, gpt_neox.STABLELM, gpt_neox.FALCON, gpt_neox.STARCODER2, gpt_neox.BLOOM),
    *(gpt2.GPT_BIGCODE, gpt2.CODEGEN, gpt_neox.MPT, MODERNBERT_DECODER),
)
ENCODERS = (*bert.FAMILIES, MODERNBERT, *deberta.FAMILIES, *encoders.FAMILIES)
FAMILIES: dict[str, Family] = {family.kind: family for family in (*DECODERS, *ENCODERS, *seq2seq.FAMILIES, T5GEMMA)}

# keys that any config.json may have
COMMON = {
    *("architectures", "auto_map", "dtype", "id2label", "label2id", "model_type", "problem_type", "torch_dtype"),
    *("tie_word_embeddings", "transformers_version", "use_cache", "_name_or_path", "initializer_range", "torchscript"),
    *("is_decoder", "is_encoder_decoder", "add_cross_attention", "chunk_size_feed_forward", "pretraining_tp"),
    *("return_dict", "output_attentions", "output_hidden_states"),
}
NEEDS: dict[str, str] = TABLES["needs"]
USUAL = ("gpt2", "llama", "mistral", "qwen3", "gemma3_text", "bert", "roberta", "modernbert", "bart", "t5")
MAX_LISTED = 4  # keys listed in a message
UNSUPPORTED_VALUE = 3  # weight of an unsupported value against unknown kinds of tensors, in choosing the nearest family


def family_of(tree: Tree, location: str, tensors: Collection[str] = ()) -> tuple[Family, str]:
    """Family of a config.json and the architecture it names; `tensors` are the names of the folder's tensors."""
    kind, architectures = tree.get("model_type"), tree.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(architecture, str | None):
        raise InteropError(f"{location}: architectures = {shown(architectures)}: expected the name of one")
    by_name = {name: family for family in FAMILIES.values() for name in family.architectures}
    if kind is None and architecture in by_name:
        kind = by_name[architecture].kind
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InteropError(f"{location}: model_type = {shown(kind)}: {_why_unknown(tree, tensors)}")
    family = FAMILIES[kind]
    if architecture is None:
        architecture = list(family.architectures)[-1]  # the base model
    if architecture not in family.architectures:
        known = ", ".join(family.architectures) + (f"; it needs {NEEDS[architecture]}" if architecture in NEEDS else "")
        raise InteropError(f"{location}: architectures = {shown([architecture])}: of {family.title} weft reads {known}")
    return family, architecture


def _why_unknown(tree: Tree, tensors: Collection[str]) -> str:
    """Explanation why a config.json can't be read, to follow its model_type in a message."""
    if isinstance(kind := tree.get("model_type"), str) and kind in NEEDS:
        return f"not a family that weft reads; it needs {NEEDS[kind]}"
    text = tree.get("text_config")
    if isinstance(text, dict):
        text_type = shown(text.get("model_type"))
        return f"a multimodal model, and weft reads only text models (its text_config has model_type = {text_type})"
    present = {key for key, value in tree.items() if value is not None and key not in COMMON}
    present = {key for key in present if not any(part in key for part in ("token", "dropout", "pdrop"))}
    similar = [family for family in FAMILIES.values() if issubclass(family.model, _stacks(tree))]
    compared = [(family, *_compare(family, tree, tensors)) for family in similar]
    family, keys, reasons = max(compared, key=lambda c: len(present & c[1]) - min(len(c[2]), UNSUPPORTED_VALUE))
    shared = present & keys
    if len(shared) < 3:
        return f"not a family that weft reads, nor like one; it reads {len(FAMILIES)}, among them {', '.join(USUAL)}"
    others = sorted(present - shared)
    more = f" and {len(others) - MAX_LISTED} more" if len(others) > MAX_LISTED else ""
    reasons = [f"which has no {', '.join(others[:MAX_LISTED])}{more}"] * bool(others) + reasons[:1]
    reasons = reasons or ["which has the same keys and tensors: the two must differ in their code"]
    return f"not a family that weft reads; the nearest is {family.title} ('{family.kind}'), {'; '.join(reasons)}"


def _compare(family: Family, tree: Tree, tensors: Collection[str]) -> tuple[set[str], list[str]]:
    """Keys of a family, and reasons why it can't express a model: an unsupported value, or kinds of tensors that only
    one of the two has."""
    settings, reasons = Settings(tree, "config.json"), list[str]()
    usual = "mlm" if family.model is Encoder else "lm"
    classes = [name for name, head in family.architectures.items() if head == usual] or list(family.architectures)
    known: Flat = {key: is_present(tensors) for key, is_present in family.by_weights.items()}
    try:
        model = family.read(settings, classes[0], known)
    except WeftError as error:
        reasons = [f"where {str(error).partition(': ')[2]}"] * UNSUPPORTED_VALUE
        partial: Flat = {**family.fixed, "head.kind": family.architectures[classes[0]], **known}
        for row in family.rows:
            # a row may need a setting of another row that could not be read
            with suppress(WeftError, KeyError):
                partial |= row.read(settings, partial)
    else:
        if len(tensors) >= max(model.layers, count_experts(model)):  # checked before that many are built
            reasons = _tensor_differences(family, model, tensors)
        elif tensors:
            reasons = ["which has more layers or experts than there are tensors"] * UNSUPPORTED_VALUE
    return settings.used | set(family.only), reasons


def _tensor_differences(family: Family, model: Transformer, tensors: Collection[str]) -> list[str]:
    expected = set(their_shapes(conversions(family.rules(model), model)))
    known = expected | family.copies(model).keys()
    foreign = [name for name in tensors if name not in known and not family.is_unused(name)]
    kinds = {re.sub(r"\d+", "0", name): f"which has no tensor '{name}'" for name in reversed(foreign)}
    for name in sorted(expected.difference(tensors)):
        kinds.setdefault(re.sub(r"\d+", "0", name), f"which needs a tensor '{name}'")
    return list(kinds.values())


def _stacks(tree: Tree) -> type[Transformer] | tuple[type[Transformer], ...]:
    """Model types that the architecture of a config.json may be."""
    architectures = tree.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if tree.get("is_encoder_decoder") is True or name.endswith("ForConditionalGeneration"):
        return EncoderDecoder
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return Decoder
    return Encoder if name.endswith("ForMaskedLM") else (Decoder, Encoder, EncoderDecoder)
