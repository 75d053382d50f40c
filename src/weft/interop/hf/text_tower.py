"""Read the text part of a multimodal model: a family that weft has, in a folder with other parts beside it."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from weft.config import Tree
from weft.errors import InteropError
from weft.interop.families.positions import MAX_LAYERS
from weft.interop.settings import Settings, shown
from weft.progress import warn
from weft.storage.tensors import StoredTensor

TOWERS: Mapping[str, Tree] = tomllib.loads(Path(__file__).with_name("text_towers.toml").read_text(encoding="utf-8"))
# beginnings of the text part's names, and what they are in a model of text alone
PREFIXES = {
    r"(model\.language_model|language_model\.model|model\.text_model|text_model\.model)\.": "model.",
    r"(language_model|text_model)\.lm_head\.": "lm_head.",
    r"lm_head\.": "lm_head.",
}
CROSS, TABLE = "cross_attention_layers", "model.embed_tokens.weight"
IMAGE_TOKENS = 8  # further rows of mllama's embeddings, without logits
OTHERS = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector|vqmodel)\.")


def text_tower(tree: Tree, location: str) -> Tree | None:
    """Settings of the text part of a multimodal model, as those of a model of text; None for other models."""
    kind = tree.get("model_type")
    if not isinstance(kind, str) or kind not in TOWERS:
        return None
    tower, text = TOWERS[kind], tree.get("text_config", tree)  # older files have its keys among all others
    if not isinstance(text, dict):
        raise InteropError(f"{location}: text_config = {shown(text)}: expected a table of settings")
    inner = text.get("model_type", tower["family"])
    if text is not tree and kind in ("mistral3", "llava") and inner != tower["family"]:
        why = f"of such models weft reads those with model_type = '{tower['family']}'"
        raise InteropError(f"{location}: text_config.model_type = {shown(inner)}: {why}")
    tied = {key: tree[key] for key in ("tie_word_embeddings",) if tree.get(key) is not None}
    present = {key: value for key, value in text.items() if value is not None}
    for key in ("rope_scaling", "rope_parameters"):
        rope = present.get(key)
        # positions of pictures have three coordinates; those of text are equal
        if isinstance(rope, dict) and "mrope" in (rope.get("rope_type"), rope.get("type")):
            present[key] = {**{k: v for k, v in rope.items() if k != "type"}, "rope_type": "default"}
    settings = {**text, **tower["defaults"], **present, **tied}
    settings |= {"model_type": tower["family"], "architectures": [tower["architecture"]]}
    return settings if CROSS not in settings else settings | _without_cross(settings, location)


def _without_cross(settings: Tree, location: str) -> Tree:
    """Number of layers without those of cross-attention, which a text without an image skips, and which those are."""
    depth, crossed = Settings(settings, location).integer("num_hidden_layers"), settings[CROSS]
    if not isinstance(crossed, list) or not all(type(n) is int and 0 <= n < min(depth, MAX_LAYERS) for n in crossed):
        raise InteropError(f"{location}: {CROSS} = {shown(crossed)}: expected numbers of layers below {depth}")
    warn(f"{location}: {len(crossed)} layers of cross-attention, which need an image, are left out")
    return {"num_hidden_layers": depth - len(set(crossed)), "tie_word_embeddings": False}


def text_tensors(stored: Mapping[str, StoredTensor], settings: Tree) -> dict[str, StoredTensor]:
    """Tensors of the text part by the names that they have in a model of text alone; `settings` are those of its
    `text_tower`, from which the layers of cross-attention are removed."""
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        for prefix, ours in PREFIXES.items():
            if match := re.match(prefix, name):
                tensors[ours + name[match.end() :]] = tensor
    if (crossed := settings.pop(CROSS, None)) is not None:
        kept: dict[str, StoredTensor] = {}
        for name, tensor in tensors.items():
            layer = int(match[1]) if (match := re.match(r"model\.layers\.(\d{1,4})\.", name)) else None
            if layer is None or layer not in crossed:
                before = sum(other < (layer or 0) for other in set(crossed))
                kept[name if layer is None else name.replace(str(layer), str(layer - before), 1)] = tensor
        table, vocab_size = kept.get(TABLE), settings["vocab_size"]
        if table is not None and len(table.shape) == 2 and table.shape[0] == vocab_size + IMAGE_TOKENS:
            kept[TABLE] = replace(table, shape=(vocab_size, table.shape[1]), rows=vocab_size)
        return kept
    if any(name.startswith("model.") for name in tensors):
        return tensors
    return {name: tensor for name, tensor in stored.items() if not OTHERS.match(name)}
