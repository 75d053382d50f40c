"""Each key of each family's config.json, gone or changed: weft gives what transformers gives, or names the key."""

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
from tests.interop.hf_models import CASES, built, difference, filled, theirs
from tests.interop.test_families_settings import KINDS
from tests.later import Later
from torch import nn

from weft.errors import InteropError, WeftError
from weft.interop.families.known import FAMILIES
from weft.interop.hf import hf
from weft.interop.settings import Settings

transformers = Later("transformers")

GONE = object()
# of a model that is built; where a width is gone it is the class's own, which the settings alone are compared for
MAX_PARAMETERS = 3_000_000
ACTIVATIONS = ("relu", "gelu", "silu", "gelu_pytorch_tanh", "quick_gelu")
# says which model it is, how it is stored, or what it writes, and not what it computes
OTHERS = {"architectures", "model_type", "dtype", "transformers_version", "id2label", "label2id", "problem_type"}
OTHERS |= {"return_dict", "output_hidden_states", "output_attentions", "_name_or_path", "chunk_size_feed_forward"}
OTHERS |= {"is_encoder_decoder"}


def alternatives(key: str, value: Any) -> list[Any]:
    """Other values that a key may have, of the kind that its own is."""
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


def changed(tree: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The tree with each key, at the top or in a table, gone or of another value."""
    for key, value in tree.items():
        if key in OTHERS:
            continue
        yield key, GONE, {name: each for name, each in tree.items() if name != key}
        if value is not None:
            yield key, None, {**tree, key: None}
        for other in alternatives(key, value):
            yield key, other, {**tree, key: other}
        if isinstance(value, dict):
            for inner, other, table in changed(value):
                yield inner, other, {**tree, key: table}


def tree_of(kind: str) -> dict[str, Any]:
    name, settings = CASES[KINDS[kind]]
    return {**getattr(transformers, name).config_class(**settings).to_dict(), "architectures": [name]}


def theirs_of(tree: dict[str, Any], folder: Path) -> nn.Module | None:
    """What transformers makes of a config.json, with a folder of it; None where that is nothing, or a large model."""
    kind = getattr(transformers, tree["architectures"][0])
    shutil.rmtree(folder, ignore_errors=True)
    try:
        config = kind.config_class.from_dict(json.loads(json.dumps(tree)))
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
        if size > MAX_PARAMETERS:
            return None
        model = filled(kind(config))
        model.save_pretrained(folder)
        with torch.no_grad():
            model(torch.ones(1, 2, dtype=torch.long))
    except Exception:
        return None
    (folder / "config.json").write_text(json.dumps(tree))
    return model


def wrong(kind: str, folder: Path, only: dict[str, Any] | None = None) -> list[str]:
    """The changes of a family's keys, or `only` these, after which weft gives something else, without a word."""
    found = []
    cases = [each for each in changed(tree_of(kind)) if only is None or each[:2] in only.items()]
    assert cases
    for key, value, tree in cases:
        model = theirs_of(tree, folder)
        if model is None:
            continue
        what = f"{key} {'is gone' if value is GONE else f'= {value!r}'}"
        try:
            gap = difference(built(hf.read(folder)), model)
        except WeftError as error:
            if key not in str(error):
                found.append(f"{what}: {error}")
        else:
            if not gap <= 1e-5:
                found.append(f"{what}: differs by {gap}")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_absent_key_is_the_classs_default(kind: str) -> None:
    """Whatever else is there: by the settings alone, as the models would be large."""
    name, _ = CASES[KINDS[kind]]
    family, tree = FAMILIES[kind], getattr(transformers, name).config_class().to_dict()
    tree |= {"share_att_key": True, "position_biased_input": False} if kind == "deberta-v2" else {}
    tree |= {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256}
    whole = family.read(Settings(tree, "config.json"), name, {})
    for key in tree.keys() - OTHERS:
        fewer = {other: value for other, value in tree.items() if other != key}
        try:
            assert family.read(Settings(fewer, "config.json"), name, {}) == whole, key
        except InteropError as error:
            assert key in str(error)  # noqa: PT017 — or nothing is raised


CHANGES = {
    "t5": {"dense_act_fn": "silu"},
    "gemma2": {"hidden_activation": "gelu"},
    "gemma3_text": {"attn_logit_softcapping": 0.5},
    "smollm3": {"use_sliding_window": False},
    "gpt_neo": {"attention_layers": ["local", "global", "global"]},
    "phi3": {"original_max_position_embeddings": 8},
    "starcoder2": {"num_key_value_heads": GONE},
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_key_counts_as_in_transformers(kind: str, tmp_path: Path) -> None:
    assert wrong(kind, tmp_path / "model", CHANGES[kind]) == []


def test_a_decoder_that_differs_from_its_encoder_is_refused_by_its_key(tmp_path: Path) -> None:
    theirs(*CASES["bart"]).save_pretrained(tmp_path)
    tree = json.loads((tmp_path / "config.json").read_text())
    del tree["decoder_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(tree))
    line = r"decoder_attention_heads = missing: .* encoder_attention_heads = 4 \(absent, it is 16\)$"
    with pytest.raises(InteropError, match=line):
        hf.read(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_key_counts_as_in_transformers(kind: str, tmp_path: Path) -> None:
    assert wrong(kind, tmp_path / "model") == []
