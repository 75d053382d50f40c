"""Text parts of multimodal models: the logits of text alone, and an export as a model of text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.interop.hf_models import GEMMA3, LLAMA3, ROTARY, V, built, edit, exported, gap, hf_models, saved, stepped
from tests.spread import spread

from weft.errors import InteropError
from weft.interop.hf import hf

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "out_hidden_size": 32, "in_channels": 3}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
IDS = {"image_token_id": 9, "video_token_id": 10, "vision_start_token_id": 11, "vision_end_token_id": 12}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": GEMMA3,
            "vision_config": {**VISION, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
        },
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {
            "text_config": {**ROTARY, "num_local_experts": 3, "intermediate_size_mlp": 40, "attention_chunk_size": 5}
            | {"pad_token_id": 0, "rope_parameters": LLAMA3},
            "vision_config": {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_output_dim": 32}
            | {"projector_input_dim": 32, "projector_output_dim": 32},
        },
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {"text_config": {**ROTARY, "rope_parameters": MROPE}, "vision_config": QWEN_VISION, **IDS},
    ),
    "qwen2_vl-window": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**ROTARY, "rope_parameters": MROPE, "use_sliding_window": True}
            | {"sliding_window": 5, "max_window_layers": 1},
            "vision_config": QWEN_VISION,
            "tie_word_embeddings": True,
            **IDS,
        },
    ),
    "emu3": (
        "Emu3ForConditionalGeneration",
        {
            "text_config": {**ROTARY, "attention_dropout": 0.0, "rope_parameters": LLAMA3},
            "vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "hidden_size": 32}
            | {"attn_resolutions": [], "codebook_size": 16},
            "vocabulary_map": {"<image>": 9},
        },
    ),
    "mllama": (
        "MllamaForConditionalGeneration",
        {
            "text_config": {**ROTARY, "num_hidden_layers": 5, "cross_attention_layers": [1, 3]}
            | {"rope_parameters": LLAMA3},
            "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "attention_heads": 2}
            | {"num_global_layers": 1, "vision_output_dim": 32, "image_size": 28, "patch_size": 14}
            | {"intermediate_layers_indices": [0]},
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": {**ROTARY, "rope_parameters": MROPE}, "vision_config": QWEN_VISION, **IDS},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**ROTARY, "head_dim": 8, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
            **IDS,
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"text_config": {**ROTARY, "model_type": "mistral"}, "vision_config": {**VISION, "model_type": "pixtral"}},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {**ROTARY, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
        },
    ),
}


@pytest.mark.parametrize("case", spread(CASES, 4))
def test_the_text_part_of_a_multimodal_model(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = saved(tmp_path / "theirs", *CASES[case])
    bundle = hf.read(tmp_path / "theirs")
    assert "a multimodal model; its text part is read" in capsys.readouterr().err
    ours, tokens = built(bundle), torch.randint(13, V, (2, 12))
    with torch.no_grad():
        expected = other(tokens).logits
        assert gap(ours(tokens), expected) <= 1e-5
        assert gap(stepped(ours, tokens), expected) <= 1e-5
    out = exported(bundle, tmp_path / "out")
    name = json.loads((out / "config.json").read_text())["architectures"][0]
    loaded, info = getattr(hf_models, name).from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        assert gap(loaded.eval()(tokens).logits, expected) <= 1e-5


def test_keys_and_names_of_older_files(tmp_path: Path) -> None:
    """Qwen2.5-VL had the keys of its text part among all others, and tensors without a prefix."""
    other = saved(tmp_path, *CASES["qwen2_5_vl"])
    tree = json.loads((tmp_path / "config.json").read_text())
    text = tree.pop("text_config")
    del text["rope_parameters"]
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    tree = {**text, **tree, "rope_scaling": rope, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    file = tmp_path / "model.safetensors"
    renamed = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file, {"format": "pt"})
    tokens = torch.randint(13, V, (2, 12))
    with torch.no_grad():
        assert gap(built(hf.read(tmp_path))(tokens), other(tokens).logits) <= 1e-5


def test_a_text_part_of_another_family_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["llava"])
    edit(tmp_path, text_config={"model_type": "mixtral"})
    with pytest.raises(InteropError, match=r"text_config\.model_type = 'mixtral': of such models weft reads"):
        hf.read(tmp_path)
    edit(tmp_path, text_config=[1])
    with pytest.raises(InteropError, match=r"text_config = \[1\]: expected a table of settings"):
        hf.read(tmp_path)


@pytest.mark.parametrize("layers", ["x", [9], [-1], [True], [[1]], {}])
def test_strange_layers_of_cross_attention_are_refused(layers: Any, tmp_path: Path) -> None:
    saved(tmp_path, *CASES["mllama"])
    tree = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path, text_config={**tree["text_config"], "cross_attention_layers": layers})
    with pytest.raises(InteropError, match=r"cross_attention_layers = .*: expected numbers of layers below 5"):
        hf.read(tmp_path)
