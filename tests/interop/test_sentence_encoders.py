"""Sentence encoders: poolings of sentence-transformers, and decoders that attend to both sides."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interop.hf_models import BERT, CASES, ROTARY, built, difference, edit, exported, hf_models, same_files, saved
from tests.spread import spread
from torch import Tensor

from weft.errors import InteropError
from weft.interop.hf import hf
from weft.models.config import Encoder
from weft.models.head_config import EmbeddingHead


def test_pooling_of_sentence_encoders(tmp_path: Path) -> None:
    saved(tmp_path / "theirs", "BertModel", BERT)
    (tmp_path / "theirs/1_Pooling").mkdir()
    pooling = tmp_path / "theirs/1_Pooling/config.json"
    pooling.write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')
    bundle = hf.read(tmp_path / "theirs")
    assert isinstance(bundle.model, Encoder) and isinstance(bundle.model.head, EmbeddingHead)
    assert (bundle.model.head.pooling, bundle.model.head.normalise) == ("first", False)
    fresh = exported(replace(bundle, notes={}, files={}), tmp_path / "fresh")
    assert hf.read(fresh).model == bundle.model
    pooling.write_text('{"pooling_mode_max_tokens": true, "pooling_mode_mean_tokens": true}')
    with pytest.raises(InteropError, match=r"pooling by max_tokens and mean_tokens; weft has one of cls_token, "):
        hf.read(tmp_path / "theirs")
    modules = tmp_path / "theirs/modules.json"
    pooling.write_text('{"pooling_mode_max_tokens": true}')
    modules.write_text('[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]')
    with pytest.raises(InteropError, match="a module of type 'Dense'; weft has Transformer, Pooling, Normalize"):
        hf.read(tmp_path / "theirs")
    for text in ("{", "[1]", '["a"]', '{"a": 1}', '[{"type": 3}]'):
        modules.write_text(text)
        with pytest.raises(InteropError, match="expected a list of modules"):
            hf.read(tmp_path / "theirs")


POOLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls_token": lambda x, real: x[:, 0],
    "mean_tokens": lambda x, real: (x * real).sum(1) / real.sum(1),
    "max_tokens": lambda x, real: x.masked_fill(real == 0, -1e9).max(1).values,
    "mean_sqrt_len_tokens": lambda x, real: (x * real).sum(1) / real.sum(1).sqrt(),
    "weightedmean_tokens": lambda x, real: (
        (x * real * torch.arange(1, 10)[:, None]).sum(1) / (real * torch.arange(1, 10)[:, None]).sum(1)
    ),
    "lasttoken": lambda x, real: x[torch.arange(2), real.sum(1)[:, 0].long() - 1],
}


@pytest.mark.parametrize("mode", POOLED)
@pytest.mark.parametrize("name", spread(["BertModel", "Qwen3Model", "Qwen3ForCausalLM"], 1))
def test_each_pooling_of_sentence_transformers(name: str, mode: str, tmp_path: Path) -> None:
    """A decoder with these files embeds texts too, and its LM head is not used."""
    other = saved(tmp_path / "theirs", name, BERT if name == "BertModel" else ROTARY)
    (tmp_path / "theirs/1_Pooling").mkdir()
    flags = {f"pooling_mode_{each}": each == mode for each in POOLED}
    (tmp_path / "theirs/1_Pooling/config.json").write_text(json.dumps(flags))
    bundle = hf.read(tmp_path / "theirs")
    tokens, mask = torch.randint(3, 50, (2, 9)), torch.arange(9) < torch.tensor([9, 5])[:, None]
    with torch.no_grad():
        base = other.model if name == "Qwen3ForCausalLM" else other
        features = base(tokens, attention_mask=mask.long()).last_hidden_state
        ours = built(bundle)(tokens, mask=mask)
    torch.testing.assert_close(ours, POOLED[mode](features, mask[..., None].float()), atol=1e-5, rtol=1e-5)
    assert same_files(tmp_path / "theirs", exported(bundle, tmp_path / "back"))
    fresh = exported(replace(bundle, notes={}, files={}, unused={}), tmp_path / "fresh")
    assert hf.read(fresh).model == bundle.model


# ---- decoders that attend to both sides

# families in which transformers ignores the key, or partly, and encoders as decoders, which have no such key
IGNORED = ("gpt_neo", "stablelm", "falcon", "bloom", "mpt", "llama4", "bert", "roberta", "xlm-roberta")
DECODERS = [
    case
    for case, (name, _) in CASES.items()
    if name.endswith(("ForCausalLM", "LMHeadModel"))
    and not case.startswith(IGNORED)
    and case not in ("opt-350m", "opt-no-bias")
]
SOME = ("llama", "mistral", "qwen2-layers", "gemma3_text", "smollm3", "gpt2", "gpt_neox", "phi", "starcoder2")


@pytest.mark.parametrize(
    "case", [case if case in SOME else pytest.param(case, marks=pytest.mark.slow) for case in DECODERS]
)
def test_a_decoder_that_is_not_causal(case: str, tmp_path: Path) -> None:
    name, settings = CASES[case]
    settings = {**settings, "is_causal": False}
    other = saved(tmp_path / "theirs", name, settings)
    bundle = hf.read(tmp_path / "theirs")
    assert isinstance(bundle.model, Encoder)
    tokens, mask = torch.randint(3, 50, (2, 13)), torch.arange(13) < torch.tensor([13, 8])[:, None]
    ours = built(bundle)
    with torch.no_grad():
        expected = other(tokens, attention_mask=mask.long()).logits
        gap = ((ours(tokens, mask=mask) - expected) * mask[..., None]).abs().max()
        changed = other(torch.cat((tokens[:, :-1], tokens[:, -1:] + 1), 1), attention_mask=mask.long()).logits
    assert gap <= 1e-5
    assert (expected - changed)[0, :5].abs().max() > 1e-6
    assert same_files(tmp_path / "theirs", exported(bundle, tmp_path / "back"))
    notes = {**bundle.notes, "config": {**bundle.notes["config"], "vocab_size": 1}}  # so that all keys are written
    fresh = exported(replace(bundle, notes=notes, files={}), tmp_path / "fresh")
    assert hf.read(fresh).model == bundle.model
    loaded = getattr(hf_models, name).from_pretrained(fresh).eval()
    with torch.no_grad():
        again = loaded(tokens, attention_mask=mask.long()).logits
    assert ((again - expected) * mask[..., None]).abs().max() <= 1e-5


def test_heads_of_a_decoder_that_is_not_causal(tmp_path: Path) -> None:
    tokens = torch.randint(3, 50, (2, 9))
    for name in ("LlamaForSequenceClassification", "LlamaForTokenClassification"):
        settings: dict[str, Any] = {**ROTARY, "is_causal": False, "num_labels": 3}
        other = saved(tmp_path / name, name, settings)
        with torch.no_grad():
            assert (built(hf.read(tmp_path / name))(tokens) - other(tokens).logits).abs().max() <= 1e-5
    base = saved(tmp_path / "base", "LlamaModel", {**ROTARY, "is_causal": False})
    bundle = hf.read(tmp_path / "base")
    assert bundle.model.head == EmbeddingHead()  # type: ignore[union-attr]
    with torch.no_grad():
        pooled = base(tokens).last_hidden_state.mean(1)
        gap = built(bundle)(tokens) - torch.nn.functional.normalize(pooled, dim=-1)
    assert gap.abs().max() <= 1e-5


@pytest.mark.parametrize("case", ["gpt_neo", "stablelm", "falcon", "bloom", "bart", "t5"])
def test_a_family_that_is_always_causal_refuses_the_key(case: str, tmp_path: Path) -> None:
    saved(tmp_path, *CASES[case])
    edit(tmp_path, is_causal=False)
    with pytest.raises(InteropError, match=r"is_causal = False: weft has only True$"):
        hf.read(tmp_path)


NOMIC = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 32, "layer_norm_epsilon": 1e-12,
    "rotary_emb_base": 1000, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "activation_function": "swiglu", "prenorm": False,
    "qkv_proj_bias": False, "rotary_scaling_factor": None, "rotary_emb_fraction": 1.0, "vocab_size": 61,
    "type_vocab_size": 2, "model_type": "nomic_bert", "architectures": ["NomicBertModel"],
}  # fmt: skip


def test_the_first_files_of_nomic_bert_have_other_keys(tmp_path: Path) -> None:
    other = saved(tmp_path, *CASES["nomic_bert-headless"])
    (tmp_path / "config.json").write_text(json.dumps(NOMIC))
    assert difference(built(hf.read(tmp_path)), other) <= 1e-5
    for key, value in (("prenorm", True), ("rotary_scaling_factor", 2.0), ("activation_function", "gelu")):
        (tmp_path / "config.json").write_text(json.dumps({**NOMIC, key: value}))
        with pytest.raises(InteropError, match=f"{key} = .*: weft has only"):
            hf.read(tmp_path)
