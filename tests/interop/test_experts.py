"""Mixtures of experts in files: damaged tensors and impossible sizes give one line, and packed weights are unpacked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.interop.hf_models import CASES, built, difference, gap, saved
from tests.later import Later
from torch import Tensor

from weft.errors import InteropError
from weft.interop.hf import hf

packing = Later("transformers.integrations.mxfp4")
ROUTER = "model.layers.0.block_sparse_moe.router.layer.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"

Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
BROKEN: dict[str, tuple[str, Change, str]] = {
    "missing": ("qwen3_moe", lambda tree, weights: weights.pop(EXPERT), rf"'{EXPERT}' \[20, 32\] is missing$"),
    "shape": (
        "qwen3_moe",
        lambda tree, weights: weights.update({EXPERT: torch.zeros(21, 32)}),
        rf"'{EXPERT}' is \[21, 32\]; the settings require \[20, 32\]$",
    ),
    "one too many": (
        "qwen3_moe",
        lambda tree, weights: weights.update({EXPERT.replace(".2.", ".6."): torch.zeros(20, 32)}),
        r"experts\.6\.up_proj\.weight' \[20, 32\] has no place in this model$",
    ),
    "chosen": (
        "mixtral",
        lambda tree, weights: tree.update(num_experts_per_tok=6),
        r"num_experts_per_tok = 6: .* at most .* = 5$",
    ),
    "two names": (
        "mixtral",
        lambda tree, weights: tree.update(num_experts=4),
        r"num_experts = 4: another name of num_local_experts, which is 5$",
    ),
    "none": ("mixtral", lambda tree, weights: tree.update(num_local_experts=0), r"num_local_experts = 0: expected"),
    "many": (
        "mixtral",
        lambda tree, weights: tree.update(num_local_experts=2**27),
        r"134217728 experts, but the files have only \d+ tensors$",
    ),
    "groups": ("glm4_moe", lambda tree, weights: tree.update(n_group=3), r"n_group = 3 does not divide"),
    "listed": (
        "hunyuan_v1_moe",
        lambda tree, weights: tree.update(moe_topk=[1, 2]),
        r"moe_topk = \[1, 2\]: weft has one number for all layers$",
    ),
    "fused": (
        "granitemoe",
        lambda tree, weights: weights.update({ROUTER: torch.zeros(5, 32)}),
        r"router\.layer\.weight' is \[5, 32\]; the settings require \[6, 32\]$",
    ),
    "latent": (
        "deepseek_v3",
        lambda tree, weights: tree.update(num_key_value_heads=2),
        r"num_key_value_heads = 2: weft has only the value of num_attention_heads, 4$",
    ),
}


def change(folder: Path, edit: Change) -> None:
    tree, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    edit(tree, weights)
    (folder / "config.json").write_text(json.dumps(tree))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", BROKEN)
def test_damage_gives_one_line(name: str, tmp_path: Path) -> None:
    case, edit, message = BROKEN[name]
    saved(tmp_path, *CASES[case])
    change(tmp_path, edit)
    with pytest.raises(InteropError, match=message):
        hf.read(tmp_path)


def test_layers_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    other = saved(tmp_path, *CASES["glm4_moe"])
    change(tmp_path, lambda tree, weights: weights.update({"model.layers.46.enorm.weight": torch.ones(32)}))
    assert difference(built(hf.read(tmp_path)), other) <= 1e-5


GPT_OSS = ("GptOssForCausalLM", {**CASES["gpt_oss"][1], "hidden_size": 32, "intermediate_size": 64})


def pack(tree: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Replace the experts' matrices by random packed ones, as in GPT-OSS's own files."""
    torch.manual_seed(5)
    tree["quantization_config"] = {"quant_method": "mxfp4"}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)


def test_packed_weights_equal_those_that_transformers_unpacks(tmp_path: Path) -> None:
    saved(tmp_path / "theirs", *GPT_OSS)
    change(tmp_path / "theirs", pack)
    packed, bundle = load_file(tmp_path / "theirs" / "model.safetensors"), hf.read(tmp_path / "theirs")
    (tmp_path / "back").mkdir()
    hf.write(bundle, tmp_path / "back")
    unpacked = load_file(tmp_path / "back" / "model.safetensors")
    names = [name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")]
    assert len(names) == 6
    for name in names:
        expected = packing.convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"])
        assert expected.dtype == torch.bfloat16 and torch.equal(unpacked[name], expected)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert gap(*(built(hf.read(tmp_path / side)).double()(torch.ones(1, 3).long()) for side in ("theirs", "back"))) == 0


@pytest.mark.parametrize("end", ["_blocks", "_scales"])
def test_damaged_packed_weights_give_one_line(end: str, tmp_path: Path) -> None:
    saved(tmp_path, *GPT_OSS)
    change(tmp_path, pack)
    name = f"model.layers.0.mlp.experts.down_proj{end}"
    change(tmp_path, lambda tree, weights: weights.update({name: weights[name][..., :1].contiguous()}))
    with pytest.raises(InteropError, match=r"down_proj_blocks' is not made of blocks of 16 bytes with '_scales'$"):
        hf.read(tmp_path)
