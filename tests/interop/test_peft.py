"""Adapters of PEFT: read, compared with their definition applied to models of transformers, and written unchanged."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.interop.hf_models import CASES, ROTARY, built, difference, exported, saved, words
from tests.interop.test_families_settings import DEEP, STRANGE
from torch import Tensor

import weft
from weft.api.import_model import import_model
from weft.errors import WeftError
from weft.interop import peft
from weft.interop.bundle import ModelBundle
from weft.interop.hf import hf
from weft.interop.hf.tokenizer import tokenizer_files
from weft.training.weights import add_adapters

LLAMA = ("LlamaForCausalLM", ROTARY)
BASE = "their/model"  # name of the base model on the hub
# name: a model of transformers, endings of the modules with adapters, settings, modules trained in full
ADAPTERS: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, ...], dict[str, Any], tuple[str, ...]]] = {
    "queries and values": (LLAMA, ("q_proj", "v_proj"), {"r": 3, "lora_alpha": 12}, ()),
    "all matrices": (
        LLAMA,
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        {"r": 2},
        (),
    ),
    "rslora, one layer": (LLAMA, ("layers.1.mlp.down_proj",), {"r": 4, "lora_alpha": 6, "use_rslora": True}, ()),
    "fused matrix": (CASES["gpt2"], ("c_attn",), {"r": 3, "fan_in_fan_out": True}, ()),
    "head": (CASES["roberta-labels"], ("query", "value"), {"r": 2}, ("classifier.dense", "classifier.out_proj")),
    "two stacks": (CASES["t5"], ("SelfAttention.q", "EncDecAttention.v", "wo"), {"r": 2}, ()),
}


def matrix(module: Any) -> Tensor:
    """Weight (out, in), which transformers stores transposed in Conv1D."""
    return module.weight.T if type(module).__name__ == "Conv1D" else module.weight


def save_adapter(case: str, folder: Path) -> tuple[Any, ModelBundle]:
    """Save an adapter as peft does; return the reference with (alpha / r) B A added, and the base as weft reads it."""
    (name, settings), endings, options, full = ADAPTERS[case]
    reference = saved(folder / "base", name, settings)
    config = {"lora_alpha": 8, **options}
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    tensors: dict[str, Tensor] = {}
    torch.manual_seed(3)
    with torch.no_grad():
        for path, module in reference.named_modules():
            if path.endswith(endings) and hasattr(module, "weight"):
                rows, columns = matrix(module).shape
                a, b = 0.3 * torch.randn(rank, columns), 0.3 * torch.randn(rows, rank)
                tensors |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
                matrix(module).add_(scale * b @ a)
            if path in full:
                for kind, parameter in module.named_parameters():
                    parameter.add_(torch.randn_like(parameter))
                    tensors[f"base_model.model.{path}.{kind}"] = parameter.clone()
    assert tensors
    (folder / "adapter").mkdir()
    save_file(tensors, folder / "adapter/adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "base_model_name_or_path": BASE, "bias": "none", "lora_dropout": 0.05, **config}
    (folder / "adapter/adapter_config.json").write_text(json.dumps(config))
    return reference, hf.read(folder / "base")


def adapted(base: ModelBundle, adapter: peft.Adapter) -> Any:
    model = built(base)
    add_adapters(model, adapter.settings)
    model.load_state_dict({**model.state_dict(), **adapter.weights})
    return model.eval()


def differences(folder: Path) -> dict[str, Tensor]:
    """Return what a PEFT folder adds to each matrix."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors, added = load_file(folder / "adapter_model.safetensors"), {}
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            rank = config.get("rank_pattern", {}).get(module, config["r"])
            alpha = config.get("alpha_pattern", {}).get(module, config["lora_alpha"])
            assert len(a) == rank
            scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
            added[module] = scale * tensors[name.replace("lora_A", "lora_B")] @ a
    return added


@pytest.mark.parametrize("case", ADAPTERS)
def test_reading_and_writing(case: str, tmp_path: Path) -> None:
    reference, base = save_adapter(case, tmp_path)
    adapter = peft.read(tmp_path / "adapter", base)
    assert difference(adapted(base, adapter), reference) <= 2e-5

    for name in ("back", "fresh"):
        (tmp_path / name).mkdir()
    peft.write(tmp_path / "back", base, adapter, base_name=BASE)
    for file in (peft.CONFIG, peft.WEIGHTS):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()

    # as if weft had trained it
    peft.write(tmp_path / "fresh", base, peft.Adapter(adapter.settings, adapter.weights), base_name=BASE)
    ours, expected = differences(tmp_path / "fresh"), differences(tmp_path / "adapter")
    assert ours.keys() == expected.keys()
    assert all(torch.allclose(ours[name], expected[name], atol=1e-6) for name in expected)
    config = json.loads((tmp_path / "fresh/adapter_config.json").read_text())
    targets = config["target_modules"]
    # the rule by which peft finds its modules
    matches = {
        path for path, _ in reference.named_modules() if any(path == t or path.endswith(f".{t}") for t in targets)
    }
    assert {path for path in matches if hasattr(reference.get_submodule(path), "weight")} == set(expected)
    assert tuple(config["modules_to_save"] or ()) == ADAPTERS[case][3]
    again = peft.read(tmp_path / "fresh", base)
    assert difference(adapted(base, again), reference) <= 2e-5


def test_adapters_of_queries_keys_and_values_are_joined_for_a_fused_matrix(tmp_path: Path) -> None:
    _, base = save_adapter("fused matrix", tmp_path)
    adapter = peft.read(tmp_path / "adapter", base)
    torch.manual_seed(0)
    weights = {name: torch.randn_like(tensor) for name, tensor in adapter.weights.items()}
    (tmp_path / "out").mkdir()
    peft.write(tmp_path / "out", base, replace(adapter, weights=weights), base_name="x")
    model = adapted(base, peft.Adapter(adapter.settings, weights))
    ours = model.get_submodule("decoder.blocks.1.attention.qkv").difference()
    assert torch.allclose(ours, differences(tmp_path / "out")["transformer.h.1.attn.c_attn"], atol=1e-5)
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["r"] == 9  # three times that of each


def edit_config(folder: Path, **settings: Any) -> None:
    file = folder / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, r"adapter_config\.json: use_dora = True: weft has only False$"),
        ({"peft_type": "IA3"}, r"peft_type = 'IA3': weft has only 'LORA'$"),
        ({"bias": "all"}, r"bias = 'all': weft has only 'none'$"),
        ({"lora_alpha": "x"}, r"lora_alpha = 'x': expected a number$"),
        ({"alpha_pattern": {"(a+)+b": 4}}, r"names of modules there, not expressions$"),
        ({"lora_dropout": 1.5}, r"dropout"),
    ],
)
def test_unsupported_settings_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, base = save_adapter("queries and values", tmp_path)
    edit_config(tmp_path, **settings)
    with pytest.raises(WeftError, match=message) as caught:
        peft.read(tmp_path / "adapter", base)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.embed_tokens.lora_embedding_A", torch.zeros(2, 61), r"fits no matrix of the base model$"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.zeros(2, 32), r"expected an A and a B of one rank$"),
        (
            "model.layers.0.self_attn.q_proj.lora_A.weight",
            torch.zeros(3, 31),
            r"'.*q_proj.weight' \[32, 32\] has an adapter of",
        ),
        ("model.norm.weight", torch.zeros(32), r"fits no matrix of the base model$"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, tensor: Tensor, message: str, tmp_path: Path) -> None:
    _, base = save_adapter("queries and values", tmp_path)
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{name}": tensor}, file, {"format": "pt"})
    with pytest.raises(WeftError, match=message):
        peft.read(tmp_path / "adapter", base)


def test_strange_settings_give_an_adapter_or_one_line(tmp_path: Path) -> None:
    _, base = save_adapter("queries and values", tmp_path)
    config, lines = json.loads((tmp_path / "adapter/adapter_config.json").read_text()), []
    for key in ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "alpha_pattern"):
        for strange in STRANGE[::2]:
            if strange is DEEP or (isinstance(strange, float) and not math.isfinite(strange)):
                continue
            edit_config(tmp_path, **{**config, "use_rslora": False, "alpha_pattern": {}, key: strange})
            try:
                peft.read(tmp_path / "adapter", base)
            except WeftError as error:
                lines.append(str(error))
    assert len(lines) > 25
    assert not [line for line in lines if "\n" in line or len(line) > 600]


def test_a_module_with_a_different_alpha_and_rank(tmp_path: Path) -> None:
    _, base = save_adapter("queries and values", tmp_path)
    file, name = tmp_path / "adapter/adapter_model.safetensors", "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = load_file(file)
    tensors |= {f"{name}.lora_A.weight": torch.randn(5, 32), f"{name}.lora_B.weight": torch.randn(32, 5)}
    save_file(tensors, file, {"format": "pt"})
    module = "model.layers.0.self_attn.q_proj"
    edit_config(tmp_path, alpha_pattern={module: 7}, rank_pattern={module: 5})
    adapter = peft.read(tmp_path / "adapter", base)
    ours = adapted(base, adapter).get_submodule("decoder.blocks.0.attention.qkv").difference()
    expected = differences(tmp_path / "adapter")
    assert torch.allclose(ours[:32], expected[module], atol=1e-5)
    assert not ours[32:48].any()  # keys have no adapter
    assert torch.allclose(ours[48:], expected["model.layers.0.self_attn.v_proj"], atol=1e-5)


def test_a_run_of_an_adapter(tmp_path: Path) -> None:
    """It is loaded with its base, exported merged and as an adapter, and refused without the base."""
    reference, base = save_adapter("queries and values", tmp_path)
    for name, data in tokenizer_files(ModelBundle(base.model, {}, words(), "here")).items():
        (tmp_path / "base" / name).write_bytes(data)
    with pytest.raises(WeftError, match=r"a PEFT adapter for their/model; import that, and name its run with --base$"):
        import_model(tmp_path / "adapter", tmp_path / "run")
    import_model(tmp_path / "base", tmp_path / "base-run")
    with pytest.raises(WeftError, match=r"--base .*: .*base is not an adapter; leave it out$"):
        import_model(tmp_path / "base", tmp_path / "run", base=tmp_path / "base-run")
    with pytest.raises(WeftError, match=r"--tokenizer .*: .* is an adapter, which uses its base's; leave it out$"):
        import_model(tmp_path / "adapter", tmp_path / "run", tokenizer=tmp_path / "base", base=tmp_path / "base-run")
    import_model(tmp_path / "adapter", tmp_path / "run", base=tmp_path / "base-run")
    run = weft.load(tmp_path / "run", device="cpu")
    assert difference(run.model, reference) <= 2e-5
    run.export("peft", tmp_path / "out")
    for file in (peft.CONFIG, peft.WEIGHTS):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()
    with pytest.raises(WeftError, match=r"--to peft: .*base-run has no adapter; --to hf writes the whole model$"):
        weft.load(tmp_path / "base-run", device="cpu").export("peft", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    merged = exported(hf.read(run.export("hf", tmp_path / "hf")), tmp_path / "again")
    assert difference(built(hf.read(merged)), reference) <= 2e-5
    count = sum(parameter.numel() for parameter in built(hf.read(merged)).parameters())
    assert f"| parameters | {count:,} |" in (tmp_path / "hf/README.md").read_text()
    count = sum(tensor.numel() for tensor in load_file(tmp_path / "out" / peft.WEIGHTS).values())
    assert f"| parameters of the adapter | {count:,} |" in (tmp_path / "out/README.md").read_text()
    edit_config(tmp_path, peft_type="IA3")
    with pytest.raises(WeftError, match=r"peft_type = 'IA3': weft has only 'LORA'$"):
        import_model(tmp_path / "adapter", tmp_path / "other")


def test_an_adapter_of_torch_save(tmp_path: Path) -> None:
    """PEFT wrote such files before safetensors; an export has safetensors."""
    _, base = save_adapter("queries and values", tmp_path)
    folder = tmp_path / "adapter"
    expected = peft.read(folder, base)
    torch.save(load_file(folder / peft.WEIGHTS), folder / peft.PICKLED)
    before = differences(folder)
    (folder / peft.WEIGHTS).unlink()
    adapter = peft.read(folder, base)
    assert adapter.settings == expected.settings
    assert all(torch.equal(adapter.weights[name], tensor) for name, tensor in expected.weights.items())
    (tmp_path / "out").mkdir()
    peft.write(tmp_path / "out", base, adapter, base_name=BASE)
    after = differences(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.allclose(after[name], before[name], atol=1e-6) for name in before)
