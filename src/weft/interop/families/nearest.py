"""What to say of a model that no family describes: which one comes nearest, and what it lacks."""

from collections.abc import Iterable
from contextlib import suppress

from weft.config import Tree
from weft.errors import WeftError
from weft.interop.families.base import Family
from weft.interop.settings import Flat, Settings, Transformer, shown
from weft.models.config import Decoder, Encoder, EncoderDecoder

# what every config.json may have, whatever the model is
COMMON = {
    *("architectures", "auto_map", "dtype", "id2label", "label2id", "model_type", "problem_type", "torch_dtype"),
    *("tie_word_embeddings", "transformers_version", "use_cache", "_name_or_path", "initializer_range", "torchscript"),
    *("is_decoder", "is_encoder_decoder", "add_cross_attention", "chunk_size_feed_forward"),
}
NAMED = 4  # keys that a line has room for


def unknown(tree: Tree, families: Iterable[Family]) -> str:
    """Why a config.json can't be read, from the word that follows its model_type on."""
    inside = tree.get("text_config")
    if isinstance(inside, dict):
        within = shown(inside.get("model_type"))
        return f"a model of more than text, and weft reads text alone (here model_type = {within})"
    given = {key for key, value in tree.items() if value is not None and not _common(key)}
    every = list(families)
    alike = [family for family in every if issubclass(family.model, _stacks(tree))]
    known = {family.kind: (family.title, given & _keys(family, tree)) for family in alike}
    kind, (title, shared) = max(known.items(), key=lambda one: len(one[1][1]))
    experts = [key for key in sorted(given) if "expert" in key and isinstance(tree[key], int)]
    if experts:
        count = min(experts, key=lambda key: not key.endswith("experts"))  # how many there are, where that is given
        count += f" = {shown(tree[count])}"
        return f"a mixture of experts ({count}), and weft has one feed-forward for all tokens"
    if len(shared) < 3:
        return f"not a family that weft reads, nor like one; it reads {', '.join(family.kind for family in every)}"
    others = sorted(given - shared)
    lacks = ", ".join(others[:NAMED]) + (f" and {len(others) - NAMED} more" if len(others) > NAMED else "")
    unlike = f", which has no {lacks}" if others else ", whose settings have the same names"
    return f"not a family that weft reads; the nearest is {title} ('{kind}'){unlike}"


def _stacks(tree: Tree) -> type[Transformer] | tuple[type[Transformer], ...]:
    """The kinds of models that a config.json may be of, by the class that it names."""
    named = tree.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    if tree.get("is_encoder_decoder") is True or name.endswith("ForConditionalGeneration"):
        return EncoderDecoder
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return Decoder
    return Encoder if name.endswith("ForMaskedLM") else (Decoder, Encoder, EncoderDecoder)


def _common(key: str) -> bool:
    return key in COMMON or any(part in key for part in ("token", "dropout", "pdrop"))


def _keys(family: Family, tree: Tree) -> set[str]:
    """The keys that a family has, whether or not it has the values that are there."""
    table, settings = family.settings, Settings(tree, "")
    model: Flat = {**table.fixed, "head.kind": next(iter(family.architectures.values()))}
    for row in table.rows:
        # a row may need what another would have read, had its value been one of the family's
        with suppress(WeftError, KeyError):
            model |= row.read(settings, model)
    return settings.asked | set(table.only)
