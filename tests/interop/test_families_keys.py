"""Each key of each family's config.json, removed or changed: weft computes what transformers does, or names the key."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interop.hf_models import CASES, built, difference, filled, saved
from tests.interop.test_families_settings import MODELS, tree_of
from tests.later import Later
from tests.spread import spread

from weft.errors import InteropError, WeftError
from weft.interop.families.known import FAMILIES
from weft.interop.hf import hf
from weft.interop.settings import Settings

transformers = Later("transformers")

REMOVED = object()
MAX_PARAMETERS = 3_000_000  # of a model that is built; without a key of a size, the class's default may be large
ACTIVATIONS = ("relu", "gelu", "silu", "gelu_pytorch_tanh", "quick_gelu")
# keys about the model's identity, storage or outputs, which do not change what it computes
IGNORED = {"architectures", "model_type", "dtype", "transformers_version", "id2label", "label2id", "problem_type"}
IGNORED |= {"return_dict", "output_hidden_states", "output_attentions", "_name_or_path", "chunk_size_feed_forward"}
IGNORED |= {"is_encoder_decoder"}


def alternatives(key: str, value: Any) -> list[Any]:
    """Other values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, max(1, value // 2)]
    if isinstance(value, float):
        return [value * 2 + 0.1, value / 2]
    if value is None:
        return [True, 2, 0.5]
    if isinstance(value, str):
        return [name for name in ACTIVATIONS if name != value] if "act" in key or value in ACTIVATIONS else ["other"]
    if isinstance(value, list) and value:
        return [value[::-1], value[1:] + value[:1], value[:1] * len(value), []]
    return []


def changed_trees(tree: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield key, new value and the changed tree, for each key at the top or in a table: removed, null, and others."""
    for key, value in tree.items():
        if key in IGNORED:
            continue
        yield key, REMOVED, {name: other for name, other in tree.items() if name != key}
        if value is not None:
            yield key, None, {**tree, key: None}
        for other in alternatives(key, value):
            yield key, other, {**tree, key: other}
        if isinstance(value, dict):
            for inner, other, table in changed_trees(value):
                yield inner, other, {**tree, key: table}


def reference(tree: dict[str, Any], folder: Path) -> Any:
    """Build and save the model that transformers makes of a config.json; None if it makes none, or a large one."""
    model_class = getattr(transformers, tree["architectures"][0])
    shutil.rmtree(folder, ignore_errors=True)
    try:
        config = model_class.config_class.from_dict(json.loads(json.dumps(tree)))
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
        if size > MAX_PARAMETERS:
            return None
        model: Any = filled(model_class(config))
        model.save_pretrained(folder)
        with torch.no_grad():
            model(torch.ones(1, 2, dtype=torch.long))
    except Exception:
        return None
    (folder / "config.json").write_text(json.dumps(tree))
    return model


def differences(family: str, folder: Path, subset: dict[str, Any] | None = None) -> list[str]:
    """Changes, or those of `subset`, with which weft computes something else or raises an error without the key."""
    lines = []
    changes = [change for change in changed_trees(tree_of(family)) if subset is None or change[:2] in subset.items()]
    assert changes
    for key, value, tree in changes:
        model = reference(tree, folder)
        if model is None:
            continue
        change = f"{key} {'removed' if value is REMOVED else f'= {value!r}'}"
        try:
            gap = difference(built(hf.read(folder)), model)
        except WeftError as error:
            if key not in str(error):
                lines.append(f"{change}: {error}")
        else:
            if not gap <= 1e-4:
                lines.append(f"{change}: differs by {gap}")
    return lines


@pytest.mark.parametrize("family", spread(MODELS, 30))
def test_an_absent_key_has_the_default_of_transformers(family: str) -> None:
    """Compares the settings, as models of the default sizes would be large."""
    name, _ = CASES[MODELS[family]]
    reader, tree = FAMILIES[family], getattr(transformers, name).config_class().to_dict()
    tree |= {"share_att_key": True, "position_biased_input": False} if "deberta" in family else {}
    tree |= {"vocab_size": 33, "pad_token_id": 1} if family == "esm" else {}
    tree |= {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    tree |= {"glm4_moe": {"head_dim": 128}, "deepseek_v2": {"num_experts_per_tok": 2}}.get(family, {})
    expected = reader.read(Settings(tree, "config.json"), name, {})
    for key in tree.keys() - IGNORED:
        others = {other: value for other, value in tree.items() if other != key}
        try:
            assert reader.read(Settings(others, "config.json"), name, {}) == expected, key
        except InteropError as error:
            assert key in str(error)  # noqa: PT017 — or nothing is raised


CHANGES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"truncate": None, "swiglu_limit": 0.25},
    "deepseek_v3": {"rope_interleave": None, "head_dim": 2, "topk_group": 1},
    "granitemoe": {"attention_multiplier": None},
    "qwen2_moe": {"decoder_sparse_step": 1, "norm_topk_prob": False},
    "ernie4_5_moe": {"moe_layer_interval": 1},
    "t5": {"dense_act_fn": "silu"},
    "gemma2": {"hidden_activation": "gelu"},
    "gemma3_text": {"attn_logit_softcapping": 0.5},
    "smollm3": {"use_sliding_window": False},
    "gpt_neo": {"attention_layers": ["local", "global", "global"]},
    "phi3": {"original_max_position_embeddings": 8},
    "starcoder2": {"num_key_value_heads": REMOVED},
}


@pytest.mark.parametrize("family", spread(CHANGES, 5))
def test_some_keys_mean_what_they_mean_in_transformers(family: str, tmp_path: Path) -> None:
    assert differences(family, tmp_path / "model", CHANGES[family]) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_every_key_means_what_it_means_in_transformers(family: str, tmp_path: Path) -> None:
    assert differences(family, tmp_path / "model") == []


def test_a_decoder_that_differs_from_its_encoder_is_refused_by_its_key(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["bart"])
    tree = json.loads((tmp_path / "config.json").read_text())
    del tree["decoder_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(tree))
    message = r"decoder_attention_heads = missing: .* encoder_attention_heads = 4 \(absent, it is 16\)$"
    with pytest.raises(InteropError, match=message):
        hf.read(tmp_path)
