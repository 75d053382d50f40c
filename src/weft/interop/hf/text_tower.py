"""Read the text part of a multimodal model: a family that weft has, in a folder with other parts beside it."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from weft.config import Tree
from weft.errors import InteropError
from weft.interop.settings import shown
from weft.storage.tensors import StoredTensor

TOWERS: Mapping[str, Tree] = tomllib.loads(Path(__file__).with_name("text_towers.toml").read_text(encoding="utf-8"))
# beginnings of the text part's names, and what they are in a model of text alone
PREFIXES = {
    r"(model\.language_model|language_model\.model|model\.text_model|text_model\.model)\.": "model.",
    r"(language_model|text_model)\.lm_head\.": "lm_head.",
    r"lm_head\.": "lm_head.",
}
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
    return settings | {"model_type": tower["family"], "architectures": [tower["architecture"]]}


def text_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors of the text part by the names that they have in a model of text alone."""
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        for prefix, ours in PREFIXES.items():
            if match := re.match(prefix, name):
                tensors[ours + name[match.end() :]] = tensor
    if any(name.startswith("model.") for name in tensors):
        return tensors
    return {name: tensor for name, tensor in stored.items() if not OTHERS.match(name)}
