"""Every family of Hugging Face models that weft reads and writes; a new one is named here, or in its relatives' file.

What no family describes is told which one comes nearest, and what that lacks.
"""

import re
from collections.abc import Collection
from contextlib import suppress

from weft.config import Tree
from weft.errors import InteropError, WeftError
from weft.interop.families import bert, gpt2, gpt_neox, llama, seq2seq
from weft.interop.families.base import Family
from weft.interop.families.modernbert import MODERNBERT
from weft.interop.settings import Flat, Settings, Transformer, shown
from weft.interop.weight_map import conversions, their_shapes
from weft.models.config import Decoder, Encoder, EncoderDecoder

# where several can hold a model that weft has trained, the first one is written
DECODERS = (
    *(gpt2.GPT2, *llama.FAMILIES, gpt2.OPT, gpt_neox.GPT_NEOX, gpt2.GPTJ, gpt2.GPT_NEO),
    *(gpt_neox.PHI, gpt_neox.STABLELM, gpt_neox.FALCON, gpt_neox.STARCODER2, gpt_neox.BLOOM),
)
ENCODERS = (*bert.FAMILIES, MODERNBERT, bert.DEBERTA_V2)
FAMILIES: dict[str, Family] = {family.kind: family for family in (*DECODERS, *ENCODERS, *seq2seq.FAMILIES)}

# what every config.json may have, whatever the model is
COMMON = {
    *("architectures", "auto_map", "dtype", "id2label", "label2id", "model_type", "problem_type", "torch_dtype"),
    *("tie_word_embeddings", "transformers_version", "use_cache", "_name_or_path", "initializer_range", "torchscript"),
    *("is_decoder", "is_encoder_decoder", "add_cross_attention", "chunk_size_feed_forward", "pretraining_tp"),
    *("return_dict", "output_attentions", "output_hidden_states"),
}
MAX_NAMED = 4  # keys that a line has room for
UNREAD = 3  # how many kinds of tensors without a place a value without one counts for


def family_of(tree: Tree, place: str, tensors: Collection[str] = ()) -> tuple[Family, str]:
    """The family of a config.json, and which of its architectures the folder holds; `tensors` are those beside it."""
    kind, named = tree.get("model_type"), tree.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if not isinstance(architecture, str | None):
        raise InteropError(f"{place}: architectures = {shown(named)}: expected the name of one")
    by_name = {name: family for family in FAMILIES.values() for name in family.architectures}
    if kind is None and architecture in by_name:
        kind = by_name[architecture].kind
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InteropError(f"{place}: model_type = {shown(kind)}: {_unknown(tree, tensors)}")
    family = FAMILIES[kind]
    if architecture is None:
        architecture = list(family.architectures)[-1]  # the base model
    if architecture not in family.architectures:
        known = ", ".join(family.architectures)
        raise InteropError(f"{place}: architectures = {shown([architecture])}: of {family.title} weft reads {known}")
    return family, architecture


def _unknown(tree: Tree, tensors: Collection[str]) -> str:
    """Why a config.json can't be read, from the word that follows its model_type on."""
    inside = tree.get("text_config")
    if isinstance(inside, dict):
        within = shown(inside.get("model_type"))
        return f"a model of more than text, and weft reads text alone (here model_type = {within})"
    given = {key for key, value in tree.items() if value is not None and key not in COMMON}
    given = {key for key in given if not any(part in key for part in ("token", "dropout", "pdrop"))}
    alike = [family for family in FAMILIES.values() if issubclass(family.model, _stacks(tree))]
    counts = [key for key in sorted(given) if "expert" in key and isinstance(tree[key], int)]
    counts = [key for key in counts if key.endswith("experts")] or counts  # how many there are, where that is given
    if experts := [key for key in counts if tree[key]]:
        count = f"{experts[0]} = {shown(tree[experts[0]])}"
        return f"a mixture of experts ({count}), and weft has one feed-forward for all tokens"
    known = [(family, *_asked(family, tree, tensors)) for family in alike]
    family, asked, reasons = max(known, key=lambda one: len(given & one[1]) - min(len(one[2]), UNREAD))
    shared = given & asked
    if len(shared) < 3:
        return f"not a family that weft reads, nor like one; it reads {', '.join(FAMILIES)}"
    others = sorted(given - shared)
    lacks = ", ".join(others[:MAX_NAMED]) + (f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else "")
    reasons = [f"which has no {lacks}"] * bool(others) + reasons[:1]
    reasons = reasons or ["which has a place for every key and tensor: what differs is in the program of the other"]
    return f"not a family that weft reads; the nearest is {family.title} ('{family.kind}'), {'; '.join(reasons)}"


def _asked(family: Family, tree: Tree, tensors: Collection[str]) -> tuple[set[str], list[str]]:
    """The keys that a family has, whether or not it has the values that are there; and what it can't say of a model:
    a value that it does not have, or each kind of tensor that one has and the other has not."""
    settings, reasons = Settings(tree, "config.json"), list[str]()
    own = [name for name, head in family.architectures.items() if head == "lm"] or list(family.architectures)
    known: Flat = {key: there(tensors) for key, there in family.by_weights.items()}
    try:
        model = family.read(settings, own[0], known)
    except WeftError as error:
        reasons = [f"where {str(error).partition(': ')[2]}"] * UNREAD
        found: Flat = {**family.fixed, "head.kind": family.architectures[own[0]], **known}
        for row in family.rows:
            # a row may need what another would have read, had its value been one of the family's
            with suppress(WeftError, KeyError):
                found |= row.read(settings, found)
    else:
        if len(tensors) >= model.layers:  # before that many layers are listed
            reasons = _misplaced(family, model, tensors)
    return settings.asked | set(family.only), reasons


def _misplaced(family: Family, model: Transformer, tensors: Collection[str]) -> list[str]:
    wanted, unused = set(their_shapes(conversions(family.rules(model), model))), "|".join(family.unused) or "$^"
    known = wanted | family.copies(model).keys()
    foreign = [name for name in tensors if name not in known and not re.fullmatch(unused, name)]
    kinds = {re.sub(r"\d+", "0", name): f"which has no tensor '{name}'" for name in reversed(foreign)}
    for name in sorted(wanted.difference(tensors)):
        kinds.setdefault(re.sub(r"\d+", "0", name), f"which needs a tensor '{name}'")
    return list(kinds.values())


def _stacks(tree: Tree) -> type[Transformer] | tuple[type[Transformer], ...]:
    named = tree.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    if tree.get("is_encoder_decoder") is True or name.endswith("ForConditionalGeneration"):
        return EncoderDecoder
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return Decoder
    return Encoder if name.endswith("ForMaskedLM") else (Decoder, Encoder, EncoderDecoder)
