"""Every Hugging Face family, in and out: logits at 1e-5, bytes as they were, and refusals in one line."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.later import Later
from tests.text.test_sentencepiece import PLAIN, SPECIALS, block, number, piece
from torch import Tensor, nn

from weft.data.batch import Source
from weft.decode.config import Sampling
from weft.decode.fast.stepper import Stepper
from weft.decode.prompt import Prompt
from weft.decode.speculative import Draft, LookUp, speculate
from weft.errors import InteropError, WeftError
from weft.interop.bundle import ModelBundle
from weft.interop.families.known import FAMILIES
from weft.interop.hf import hf
from weft.interop.hf.tokenizer import TOKENIZER_FILES
from weft.models.build import build
from weft.models.config import Decoder, Encoder, EncoderDecoder
from weft.models.presets import bert, gpt, llama, preset, vaswani
from weft.nn.config import Attention
from weft.nn.init import empty_weights
from weft.nn.position_config import Sinusoidal
from weft.storage import tensors as tensor_files
from weft.text.config import Word
from weft.text.tokenizer import Tokenizer, build_tokenizer

hf_models = Later("transformers")

V, D, H, F = 61, 32, 4, 48

ROTARY = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_theta": 5e5,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2 = {
    "vocab_size": V,
    "n_positions": 32,
    "n_embd": D,
    "n_layer": 2,
    "n_head": H,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "ffn_dim": F,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": D,
}
FALCON = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "max_position_embeddings": 32,
}
LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]
BERT = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "intermediate_size": F,
    "max_position_embeddings": 32,
}
ROBERTA = {**BERT, "max_position_embeddings": 34, "type_vocab_size": 1}
ELECTRA = {**BERT, "embedding_size": 20}
ALBERT = {**ELECTRA, "num_hidden_layers": 4}
MPNET = {**BERT, "max_position_embeddings": 34}
MODERNBERT = {**BERT, "num_hidden_layers": 4, "local_attention": 6, "pad_token_id": 0}
DEBERTA = {
    **BERT,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 4,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
}
DISTIL = {"vocab_size": V, "dim": D, "n_layers": 2, "n_heads": H, "hidden_dim": F, "max_position_embeddings": 32}
PAIRS = {
    "vocab_size": V,
    "d_model": D,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": H,
    "decoder_attention_heads": H,
    "encoder_ffn_dim": F,
    "decoder_ffn_dim": F,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "forced_eos_token_id": 1,
    "decoder_start_token_id": 0,
}
T5 = {
    "vocab_size": V,
    "d_model": D,
    "d_kv": 6,
    "d_ff": F,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": H,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}

# name: (class of transformers, its settings)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", ROTARY),
    "llama-tied-biased": (
        "LlamaForCausalLM",
        {**ROTARY, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3": ("LlamaForCausalLM", {**ROTARY, "rope_parameters": LLAMA3}),
    "llama-linear": (
        "LlamaForCausalLM",
        {**ROTARY, "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}},
    ),
    "llama-dynamic": (
        "LlamaForCausalLM",
        {**ROTARY, "rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
    ),
    "mistral": ("MistralForCausalLM", {**ROTARY, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", ROTARY),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {**ROTARY, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**ROTARY, "head_dim": 12}),
    "qwen2-layers": (
        "Qwen2ForCausalLM",
        {**ROTARY, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "gemma": ("GemmaForCausalLM", {**ROTARY, "head_dim": 12}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**ROTARY, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 0.5},
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            **ROTARY,
            "num_hidden_layers": 3,
            "head_dim": 12,
            "sliding_window": 5,
            "layer_types": LOCAL_GLOBAL,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {
            **ROTARY,
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            **ROTARY,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.22,
            "logits_scaling": 7.0,
        },
    ),
    "phi3": ("Phi3ForCausalLM", {**ROTARY, "partial_rotary_factor": 0.5, "sliding_window": 5}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {
            **ROTARY,
            "original_max_position_embeddings": 16,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.5, 3.0]},
        },
    ),
    "olmo": ("OlmoForCausalLM", ROTARY),
    "olmo-clipped": ("OlmoForCausalLM", {**ROTARY, "clip_qkv": 0.3}),
    "olmo2": ("Olmo2ForCausalLM", ROTARY),
    "seed_oss": ("SeedOssForCausalLM", {**ROTARY, "head_dim": 12, "residual_dropout": 0.0}),
    "seed_oss-biases": (
        "SeedOssForCausalLM",
        {**ROTARY, "residual_dropout": 0.0, "attention_out_bias": True, "mlp_bias": True},
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            **ROTARY,
            "head_dim": 12,
            "sliding_window": 5,
            "rope_parameters": {
                "rope_theta": 1e4,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "cwm": (
        "CwmForCausalLM",
        {**ROTARY, "num_hidden_layers": 3, "head_dim": 12, "sliding_window": 5, "rope_parameters": LLAMA3},
    ),
    "opt": ("OPTForCausalLM", OPT),
    "opt-350m": ("OPTForCausalLM", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "opt-no-bias": ("OPTForCausalLM", {**OPT, "word_embed_proj_dim": 20, "enable_bias": False}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**ROTARY, "rotary_pct": 0.5}),
    "gpt_neox-sequential": (
        "GPTNeoXForCausalLM",
        {**ROTARY, "rotary_pct": 0.25, "use_parallel_residual": False, "attention_bias": False, "rotary_emb_base": 500},
    ),
    "gptj": ("GPTJForCausalLM", {**GPT2, "rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": V,
            "hidden_size": D,
            "num_layers": 3,
            "num_heads": H,
            "max_position_embeddings": 32,
            "window_size": 5,
            "attention_types": [[["global", "local"], 1], [["global"], 1]],
        },
    ),
    "phi": ("PhiForCausalLM", {**ROTARY, "partial_rotary_factor": 0.5}),
    "phi-normed": ("PhiForCausalLM", {**ROTARY, "qk_layernorm": True}),
    "stablelm": ("StableLmForCausalLM", {**ROTARY, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": ("StableLmForCausalLM", {**ROTARY, "use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2ForCausalLM", {**ROTARY, "sliding_window": 5}),
    "falcon": ("FalconForCausalLM", FALCON),
    "falcon-grouped": ("FalconForCausalLM", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-one-norm": (
        "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": ("FalconForCausalLM", {**FALCON, "parallel_attn": False, "multi_query": False}),
    "falcon-alibi": (
        "FalconForCausalLM",
        {**FALCON, "num_attention_heads": 6, "hidden_size": 36, "alibi": True, "bias": True, "parallel_attn": False},
    ),
    "bloom": ("BloomForCausalLM", {"vocab_size": V, "hidden_size": D, "n_layer": 2, "n_head": H}),
    "llama-yarn": (
        "LlamaForCausalLM",
        {
            **ROTARY,
            "rope_parameters": {
                "rope_theta": 1e4,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "gpt2-labels": ("GPT2ForSequenceClassification", {**GPT2, "num_labels": 3}),
    "gpt2-tags": ("GPT2ForTokenClassification", {**GPT2, "num_labels": 3}),
    "gpt2-answers": ("GPT2ForQuestionAnswering", GPT2),
    "llama-labels": ("LlamaForSequenceClassification", {**ROTARY, "num_labels": 3}),
    "llama-tags": ("LlamaForTokenClassification", {**ROTARY, "num_labels": 3}),
    "llama-answers": ("LlamaForQuestionAnswering", ROTARY),
    "bert-pretraining": ("BertForPreTraining", BERT),
    "bert-masked": ("BertForMaskedLM", BERT),
    "bert-next": ("BertForNextSentencePrediction", BERT),
    "bert-labels": ("BertForSequenceClassification", {**BERT, "id2label": {0: "bad", 1: "fair", 2: "good"}}),
    "bert-tags": ("BertForTokenClassification", {**BERT, "num_labels": 5}),
    "bert-answers": ("BertForQuestionAnswering", BERT),
    "bert-headless": ("BertModel", BERT),
    "roberta-masked": ("RobertaForMaskedLM", ROBERTA),
    "roberta-labels": ("RobertaForSequenceClassification", ROBERTA),
    "roberta-tags": ("RobertaForTokenClassification", ROBERTA),
    "roberta-answers": ("RobertaForQuestionAnswering", ROBERTA),
    "roberta-headless": ("RobertaModel", ROBERTA),
    "xlm-roberta": ("XLMRobertaForMaskedLM", ROBERTA),
    "camembert": ("CamembertForTokenClassification", ROBERTA),
    "electra": ("ElectraForPreTraining", ELECTRA),
    "electra-generator": ("ElectraForMaskedLM", ELECTRA),
    "electra-wide": ("ElectraForMaskedLM", {**ELECTRA, "embedding_size": D}),
    "electra-labels": ("ElectraForSequenceClassification", ELECTRA),
    "electra-answers": ("ElectraForQuestionAnswering", ELECTRA),
    "electra-headless": ("ElectraModel", ELECTRA),
    "albert": ("AlbertForMaskedLM", ALBERT),
    "albert-pretraining": ("AlbertForPreTraining", ALBERT),
    "albert-groups": ("AlbertForTokenClassification", {**ALBERT, "num_hidden_groups": 2}),
    "albert-labels": ("AlbertForSequenceClassification", ALBERT),
    "albert-headless": ("AlbertModel", {**ALBERT, "embedding_size": D}),
    "mpnet": ("MPNetForMaskedLM", MPNET),
    "mpnet-labels": ("MPNetForSequenceClassification", MPNET),
    "mpnet-headless": ("MPNetModel", MPNET),
    "modernbert": ("ModernBertForMaskedLM", MODERNBERT),
    "modernbert-labels": (
        "ModernBertForSequenceClassification",
        {**MODERNBERT, "classifier_pooling": "mean", "norm_bias": True, "attention_bias": True, "mlp_bias": True},
    ),
    "modernbert-tags": ("ModernBertForTokenClassification", {**MODERNBERT, "classifier_bias": True, "num_labels": 5}),
    "modernbert-answers": ("ModernBertForQuestionAnswering", MODERNBERT),
    "modernbert-headless": ("ModernBertModel", {**MODERNBERT, "layer_types": ["full_attention"] * 4}),
    "deberta-v2": ("DebertaV2ForMaskedLM", DEBERTA),
    "deberta-v2-labels": ("DebertaV2ForSequenceClassification", {**DEBERTA, "num_labels": 3, "norm_rel_ebd": "none"}),
    "deberta-v2-tags": ("DebertaV2ForTokenClassification", {**DEBERTA, "type_vocab_size": 2}),
    "deberta-v2-answers": ("DebertaV2ForQuestionAnswering", {**DEBERTA, "max_relative_positions": 10}),
    "deberta-v2-headless": ("DebertaV2Model", DEBERTA),
    "distilbert-masked": ("DistilBertForMaskedLM", DISTIL),
    "distilbert-labels": ("DistilBertForSequenceClassification", DISTIL),
    "distilbert-tags": ("DistilBertForTokenClassification", DISTIL),
    "distilbert-answers": ("DistilBertForQuestionAnswering", DISTIL),
    "distilbert-headless": ("DistilBertModel", DISTIL),
    "marian": ("MarianMTModel", {**PAIRS, "activation_function": "swish", "scale_embedding": True}),
    "marian-two-tables": (
        "MarianMTModel",
        {**PAIRS, "decoder_vocab_size": 50, "share_encoder_decoder_embeddings": False},
    ),
    "bart": ("BartForConditionalGeneration", PAIRS),
    "mbart": ("MBartForConditionalGeneration", {**PAIRS, "scale_embedding": True}),
    "pegasus": ("PegasusForConditionalGeneration", {**PAIRS, "scale_embedding": True}),
    "m2m_100": ("M2M100ForConditionalGeneration", {**PAIRS, "pad_token_id": 1, "eos_token_id": 2}),
    "t5": ("T5ForConditionalGeneration", T5),
    "mt5": ("MT5ForConditionalGeneration", T5),
    "t5-v1.1": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}

# a family whose models are those of another one is written as that one, unless it was read as itself
WRITTEN_AS = {
    "xlm-roberta": "RobertaForMaskedLM",
    "camembert": "RobertaForTokenClassification",
    "electra-wide": "BertForMaskedLM",
    "seed_oss": "Qwen2ForCausalLM",
    "seed_oss-biases": "LlamaForCausalLM",
    "ministral3": "MistralForCausalLM",
    "cwm": "SmolLM3ForCausalLM",
    "mt5": "T5ForConditionalGeneration",
}
# whose parts other cases test as well
SLOW = {
    *("roberta-answers", "electra-answers", "electra-headless", "albert-labels", "mpnet-labels", "opt-no-bias"),
    *("modernbert-tags", "modernbert-answers", "modernbert-headless"),
    *("deberta-v2-tags", "deberta-v2-answers", "deberta-v2-headless"),
    *("roberta-tags", "roberta-labels", "roberta-headless", "distilbert-tags", "distilbert-answers"),
    *("gpt2-tags", "gpt2-answers", "llama-labels", "llama-tags", "llama-answers", "xlm-roberta", "camembert"),
    *("electra-labels", "albert-headless", "mpnet-headless", "modernbert-labels", "deberta-v2-labels"),
    *("llama-tied-biased", "opt-350m", "gpt_neox-sequential", "phi-normed", "stablelm-parallel", "falcon-grouped"),
    *("falcon-sequential", "electra-wide", "electra-generator", "albert-groups", "qwen2-layers", "marian-two-tables"),
    *("distilbert-labels", "distilbert-headless", "albert-pretraining", "olmo-clipped", "falcon-one-norm"),
}
STEPS_OF_OTHERS = {"marian-two-tables", "mt5"}  # which are stepped as marian and t5-v1.1 are


# ---- help


def marked(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in cases]


def theirs(name: str, settings: dict[str, Any]) -> nn.Module:
    """A tiny model of transformers, with weights that would show a swap or an omission."""
    kind = getattr(hf_models, name)
    return filled(kind(kind.config_class(**settings)))


def filled(model: nn.Module) -> nn.Module:
    """A model with such weights."""
    name = type(model).__name__
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "embed_positions" in parameter_name and not parameter.requires_grad:
                continue  # sinusoids
            parameter.normal_(std=0.15)
            norm = "norm" in parameter_name.lower() or "ln_" in parameter_name
            if norm and parameter_name.endswith("weight") and not name.startswith("Gemma"):
                parameter.add_(1.0)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name == "final_logits_bias":
                buffer.normal_()
    return model.eval()


def built(bundle: ModelBundle) -> nn.Module:
    with empty_weights():
        model = build(bundle.model)
    model.load_state_dict({name: make() for name, make in bundle.weights.items()}, assign=True)
    return model.eval()


@torch.no_grad()
def difference(ours: nn.Module, other: nn.Module) -> float:
    """The largest difference between two models' answers, at real tokens."""
    torch.manual_seed(1)
    tokens, target = (torch.randint(3, min(50, ours.config.vocab_size), (3, time)) for time in (13, 7))
    mask = torch.arange(13)[None] < torch.tensor([13, 7, 4])[:, None]
    real = mask[..., None]
    config = ours.config
    if isinstance(config, Decoder):
        return max(gap(*map(_together, (ours(row), other(row)))) for row in (tokens[:1], tokens[1:2]))
    given = {"attention_mask": mask.long()}
    if isinstance(config, EncoderDecoder):
        mine = ours(target, source=Source(tokens, mask))
        return gap(mine, other(tokens, decoder_input_ids=target, **given).logits)
    segments = {}
    if isinstance(config, Encoder) and config.segments > 1:
        segments = {"segments": (torch.arange(13) > 4).long().expand(3, 13)}
        given["token_type_ids"] = segments["segments"]
    mine, answer = ours(tokens, mask=mask, **segments), other(tokens, **given)
    match config.head.kind:
        case "mlm+nsp":
            words = gap(mine.words * real, answer.prediction_logits * real)
            return max(words, gap(mine.next_sentence, answer.get("seq_relationship_logits", answer.get("sop_logits"))))
        case "embedding":
            pooled = (answer.last_hidden_state * real).sum(1) / real.sum(1)
            return gap(mine, nn.functional.normalize(pooled, dim=-1))
        case "mlm" | "token":
            return gap(mine * real, answer.logits * real)
        case "replaced":
            return gap(mine * mask, answer.logits * mask)
        case "span":
            return gap(mine * real, torch.stack((answer.start_logits, answer.end_logits), dim=-1) * real)
    return gap(mine, answer.logits)


def _together(answer: Any) -> Tensor:
    """The logits of an answer; those of where an answer starts and ends side by side."""
    if isinstance(answer, Tensor):
        return answer
    if hasattr(answer, "start_logits"):
        return torch.stack([answer.start_logits, answer.end_logits], dim=-1)
    return answer.logits


@torch.no_grad()
def greedy(model: nn.Module, prompt: Tensor, steps: int) -> list[int]:
    """The likeliest tokens after a prompt, one after the other."""
    stepper = Stepper(model, 1, prompt_tokens=prompt.shape[1], limit=prompt.shape[1] + steps)
    logits, found = model.head(stepper.read(prompt))[:, -1], []
    for _ in range(steps):
        found.append(int(logits.argmax()))
        logits = stepper.step(torch.tensor(found[-1:]))
    return found


def stepped(model: nn.Module, tokens: Tensor) -> Tensor:
    """The logits of tokens that are read three at first and then one by one, by whatever way is fastest."""
    stepper = Stepper(model, len(tokens), prompt_tokens=3, limit=tokens.shape[1])
    first = model.head(stepper.read(tokens[:, :3]))
    return torch.cat([first, *(stepper.step(token)[:, None].clone() for token in tokens[:, 3:].T)], dim=1)


def gap(mine: Tensor, other: Tensor) -> float:
    assert mine.shape == other.shape
    return float((mine - other).abs().max())


@pytest.fixture
def warnings_of_transformers() -> Iterator[list[str]]:
    """What transformers logs while something is loaded."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    listener, logger = Listener(logging.WARNING), logging.getLogger("transformers")
    logger.addHandler(listener)
    yield lines
    logger.removeHandler(listener)


def exported(bundle: ModelBundle, folder: Path, **given: Any) -> Path:
    folder.mkdir()
    hf.write(bundle, folder, **given)
    return folder


def same_files(one: Path, other: Path) -> bool:
    """Whether all that a model is made of, weights, settings and tokenizer, is the same to the byte."""
    parts = {*hf.KEPT, *TOKENIZER_FILES}
    names = {n for n in parts if (one / n).is_file()} | {file.name for file in one.glob("*.safetensors")}
    assert {file.name for file in other.glob("*.safetensors")} <= names
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


# ---- every family


@pytest.mark.parametrize("case", marked(CASES))
def test_in_and_out(case: str, tmp_path: Path, warnings_of_transformers: list[str]) -> None:
    name, settings = CASES[case]
    other = theirs(name, settings)
    other.save_pretrained(tmp_path / "theirs")
    bundle = hf.read(tmp_path / "theirs")
    ours = built(bundle)
    assert difference(ours, other) <= 1e-5
    if isinstance(bundle.model, Decoder) and bundle.model.head.kind == "lm":
        tokens = torch.randint(V, (2, 12))
        with torch.no_grad():
            assert gap(stepped(ours, tokens), ours(tokens)) <= 1e-5
        if "-" not in case:  # a family's first model also writes the same text
            given = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}
            assert other.generate(tokens[:1, :5], **given)[0, 5:].tolist() == greedy(ours, tokens[:1, :5], 5)

    back = exported(bundle, tmp_path / "back")
    assert same_files(tmp_path / "theirs", back)

    # as if weft had trained it: nothing is known of the folder it came from
    fresh = exported(ModelBundle(bundle.model, bundle.weights, None, "here"), tmp_path / "fresh")
    architecture = json.loads((fresh / "config.json").read_text())["architectures"][0]
    assert architecture == WRITTEN_AS.get(case, name)
    warnings_of_transformers.clear()
    again, info = getattr(hf_models, architecture).from_pretrained(fresh, output_loading_info=True)
    assert not any(info.values()), info
    assert warnings_of_transformers == []
    assert difference(ours, again.eval()) <= 1e-5
    assert hf.read(fresh).model == bundle.model


@pytest.mark.parametrize(
    "case",
    [case for case, (_, given) in CASES.items() if "decoder_start_token_id" in given and case not in STEPS_OF_OTHERS],
)
def test_written_step_by_step_as_transformers_does(case: str, tmp_path: Path) -> None:
    """From the token that writing starts with and the one that is forced upon it; here with a cache."""
    name, settings = CASES[case]
    other = theirs(name, settings)
    other.save_pretrained(tmp_path / "theirs")
    ours = built(hf.read(tmp_path / "theirs"))
    torch.manual_seed(2)
    tokens = torch.randint(3, 50, (2, 9))
    mask = torch.arange(9)[None] < torch.tensor([9, 6])[:, None]
    written = other.generate(
        tokens, attention_mask=mask.long(), do_sample=False, num_beams=1, max_new_tokens=8, forced_bos_token_id=7,
        forced_eos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    state, mine, logits = ours.start(2, 9, Source(tokens, mask)), written[:, :2], []
    with torch.no_grad():
        while len(mine[0]) < 9:
            logits.append(ours.step(mine[:, state.longest :], state))
            mine = torch.cat((mine, logits[-1][:, -1:].argmax(-1)), dim=1)
        assert gap(torch.cat(logits, dim=1), ours(mine[:, :-1], source=Source(tokens, mask))) <= 1e-5
    assert written[0, :2].tolist() == [other.config.decoder_start_token_id, 7]
    assert torch.equal(mine, written)


def test_a_long_text_has_other_factors(tmp_path: Path) -> None:
    other = theirs(*CASES["phi3-longrope"])
    other.save_pretrained(tmp_path / "theirs")
    ours, tokens = built(hf.read(tmp_path / "theirs")), torch.randint(V, (1, 20))
    with torch.no_grad():
        assert gap(ours(tokens), other(tokens).logits) <= 1e-5
        # step by step, the last logits are those of the whole text, whatever was read before
        for length, logits in enumerate(stepped(ours, tokens).unbind(1), 1):
            assert length < 3 or gap(logits, other(tokens[:, :length]).logits[:, -1]) <= 1e-5
    given = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    for length in (5, 14, 16, 17):
        written = other.generate(tokens[:, :length], **given)[0, length:].tolist()
        assert written == greedy(ours, tokens[:, :length], 12)
        for guesser in (LookUp(2), Draft(ours, Prompt(tokens[0, :length].tolist()), Sampling(max_tokens=12))):
            settings = Sampling(max_tokens=12, temperature=0.0)
            chunks = speculate(ours, tokens[0, :length].tolist(), settings, drafter=guesser)
            assert [chunk.id for chunk in chunks] == written


def test_rows_pass_into_long_factors_one_by_one(tmp_path: Path) -> None:
    """Each is what it would be alone, also one that is cut back to where the short factors hold."""
    theirs(*CASES["phi3-longrope"]).save_pretrained(tmp_path / "theirs")
    ours, tokens = built(hf.read(tmp_path / "theirs")), torch.randint(V, (3, 20))
    lengths, state = torch.tensor([9, 15, 12]), ours.start(3, 20)
    with torch.no_grad():
        ours.step(tokens[:, :15], state, lengths)
        for more in range(1, 6):
            new = tokens.gather(1, state.lengths[:, None])
            logits = ours.step(new, state)[:, 0]
            for row, length in enumerate((lengths + more).tolist()):
                assert gap(logits[row], ours(tokens[row : row + 1, :length])[0, -1]) <= 1e-5
        state.reorder(torch.tensor([1, 0]))
        state.truncate(13)
        logits = ours.step(tokens[[1, 0], 13:15], state)
        assert gap(logits, ours(tokens[[1, 0], :15])[:, 13:]) <= 1e-5


def test_every_family_is_tested() -> None:
    assert all(any(f"{case}-".startswith(f"{kind}-") for case in CASES) for kind in FAMILIES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_numbers_keep_their_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """Also where a file mixes types, and a joined matrix has parts of two."""
    theirs("LlamaForCausalLM", ROTARY).to(dtype).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/model.safetensors"
    tensors = load_file(file)
    for name in ("model.norm.weight", "model.layers.1.self_attn.k_proj.weight"):
        tensors[name] = tensors[name].float() + 1e-5
    save_file(tensors, file, {"format": "pt"})
    bundle = hf.read(tmp_path / "theirs")
    assert bundle.weights["embedding.weight"]().dtype == dtype
    assert bundle.weights["decoder.norm.weight"]().dtype == torch.float32
    assert same_files(tmp_path / "theirs", exported(bundle, tmp_path / "back"))
    wide = exported(bundle, tmp_path / "wide", dtype="fp32")
    assert {tensor.dtype for tensor in load_file(wide / "model.safetensors").values()} == {torch.float32}
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"


def test_shards(tmp_path: Path) -> None:
    theirs("GPT2LMHeadModel", GPT2).save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    bundle = hf.read(tmp_path / "theirs")
    assert same_files(tmp_path / "theirs", exported(bundle, tmp_path / "back"))
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    hf.write(bundle, narrow, "bf16")
    assert [file.name for file in narrow.glob("*.safetensors*")] == ["model.safetensors"]


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    theirs("GPT2LMHeadModel", GPT2).save_pretrained(folder, max_shard_size="30KB")
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    tensors, more = load_file(first), load_file(second)
    name = next(iter(tensors))
    save_file({**more, name: tensors[name]}, second, {"format": "pt"})
    with pytest.raises(InteropError, match=f"'{name}' is in {first.name} too"):
        hf.read(folder)


def test_files_that_notes_name_stay_in_the_folder(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "theirs")
    bundle = hf.read(folder)
    ((_, header),) = bundle.notes["headers"].items()
    wrong = replace(bundle, notes={**bundle.notes, "headers": {"../out.safetensors": header}})
    with pytest.raises(InteropError, match="not the name of a"):
        exported(wrong, tmp_path / "back")
    assert not (tmp_path / "out.safetensors").exists()


# ---- names and tensors that came and went with the years


def test_old_names_unused_tensors_and_copies_come_back(tmp_path: Path) -> None:
    """As in the first BERT files: gamma and beta, position ids, a second head, the table under a second name."""
    other = theirs("BertForMaskedLM", BERT)
    other.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/model.safetensors"
    tensors = load_file(file)
    tensors = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
               for n, t in tensors.items()}  # fmt: skip
    tensors["bert.embeddings.position_ids"] = torch.arange(32)[None]
    tensors["cls.seq_relationship.weight"] = torch.randn(2, D)
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    bundle = hf.read(tmp_path / "theirs")
    assert difference(built(bundle), other) <= 1e-5
    assert same_files(tmp_path / "theirs", exported(bundle, tmp_path / "back"))


def test_the_base_model_alone_has_no_prefix(tmp_path: Path) -> None:
    other = theirs("GPT2Model", GPT2)
    other.save_pretrained(tmp_path / "theirs")
    assert "wte.weight" in load_file(tmp_path / "theirs/model.safetensors")
    bundle = hf.read(tmp_path / "theirs")
    ours, tokens = built(bundle), torch.randint(V, (2, 9))
    with torch.no_grad():
        assert gap(ours.features(tokens), other(tokens).last_hidden_state) <= 1e-5
    assert same_files(tmp_path / "theirs", exported(bundle, tmp_path / "back"))


def test_a_table_that_differs_is_not_tied(tmp_path: Path) -> None:
    """config.json calls T5 v1.1 tied, and the tensors show that it is not."""
    theirs("T5ForConditionalGeneration", {**T5, "tie_word_embeddings": False}).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.randn(V, D)}, file, {"format": "pt"})
    bundle = hf.read(tmp_path / "theirs")
    assert not bundle.model.head.tied
    back = exported(bundle, tmp_path / "back")
    assert same_files(tmp_path / "theirs", back)
    other = hf_models.T5ForConditionalGeneration.from_pretrained(back)
    assert difference(built(bundle), other.eval()) <= 1e-5


def test_a_tied_table_under_its_other_name_alone(tmp_path: Path) -> None:
    other = theirs("BartForConditionalGeneration", PAIRS)
    other.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.shared.weight")
    save_file(tensors, file, {"format": "pt"})
    bundle = hf.read(tmp_path / "theirs")
    assert difference(built(bundle), other) <= 1e-5
    assert same_files(tmp_path / "theirs", exported(bundle, tmp_path / "back"))


def test_settings_that_weft_has_no_word_for_come_back(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "theirs")
    edit(folder, use_cache=False, summary_type="cls_index", task_specific_params={"a": [1]})
    back = exported(hf.read(folder), tmp_path / "back")
    assert json.loads((back / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


def test_labels_have_names(tmp_path: Path) -> None:
    name, settings = CASES["bert-labels"]
    theirs(name, settings).save_pretrained(tmp_path / "theirs")
    bundle = hf.read(tmp_path / "theirs")
    assert bundle.labels == ("bad", "fair", "good")
    fresh = exported(replace(bundle, notes={}), tmp_path / "fresh")
    assert json.loads((fresh / "config.json").read_text())["id2label"] == {"0": "bad", "1": "fair", "2": "good"}


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"num_labels": 2}, ("LABEL_0", "LABEL_1")),  # which transformers does not write down
        ({"id2label": {0: "a", 1: "a", 2: "b"}}, ("LABEL_0", "LABEL_1", "LABEL_2")),
    ],
)
def test_labels_without_names_of_their_own(tmp_path: Path, settings: dict[str, Any], labels: tuple[str, ...]) -> None:
    theirs("BertForSequenceClassification", {**BERT, **settings}).save_pretrained(tmp_path / "theirs")
    assert hf.read(tmp_path / "theirs").labels == labels


@pytest.mark.parametrize(("kind", "labels"), [("multi_label_classification", 3), ("regression", 3)])
def test_answers_that_are_no_labels(tmp_path: Path, kind: str, labels: int) -> None:
    theirs("BertForSequenceClassification", {**BERT, "num_labels": labels}).save_pretrained(tmp_path / "theirs")
    edit(tmp_path / "theirs", problem_type=kind)
    with pytest.raises(InteropError, match=f"problem_type = '{kind}': with 3 labels"):
        hf.read(tmp_path / "theirs")


def test_sentence_encoders_say_how_they_pool(tmp_path: Path) -> None:
    theirs("BertModel", BERT).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/1_Pooling").mkdir()
    pooling = tmp_path / "theirs/1_Pooling/config.json"
    pooling.write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')
    bundle = hf.read(tmp_path / "theirs")
    assert (bundle.model.head.pooling, bundle.model.head.normalise) == ("first", False)
    fresh = exported(ModelBundle(bundle.model, bundle.weights, None, "here"), tmp_path / "fresh")
    assert hf.read(fresh).model == bundle.model
    pooling.write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(InteropError, match=r"pooling by max_tokens; weft has mean, first \(cls\) and last"):
        hf.read(tmp_path / "theirs")


# ---- tokenizers


def words(size: int = V) -> Tokenizer:
    return build_tokenizer(Word(vocab_size=size), [" ".join(f"w{number}" for number in range(size))])


def test_the_tokenizer_comes_along(tmp_path: Path, warnings_of_transformers: list[str]) -> None:
    tokenizer = words()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = a_folder(tmp_path / "ours", tokenizer)
    other = hf_models.AutoTokenizer.from_pretrained(folder)
    assert other("w1 w2 w99")["input_ids"] == tokenizer.encode("w1 w2 w99")
    assert (other.eos_token_id, other.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
    assert other.chat_template == tokenizer.chat_template
    assert warnings_of_transformers == []
    back = hf.read(folder).tokenizer
    assert back is not None
    assert back.fingerprint == tokenizer.fingerprint
    assert back.chat_template == tokenizer.chat_template


def test_roles_may_stand_in_other_files(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "ours", words())
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 32}')
    (folder / "special_tokens_map.json").write_text('{"pad_token": {"content": "<pad>"}}')
    edit(folder, eos_token_id=3, bos_token_id=None)
    tokenizer = hf.read(folder).tokenizer
    assert tokenizer is not None
    assert tokenizer.roles == {"pad": "<pad>", "eos": tokenizer.token(3)}


def test_what_an_encoder_decoder_writes_begins_with_its_start_token(tmp_path: Path) -> None:
    settings = vaswani(1, D, H, d_ff=F, dropout=0.0, vocab_size=V, context=32).replace(
        position=Sinusoidal(layout="halves")
    )
    folder = exported(replace(fresh_model(settings), tokenizer=words()), tmp_path / "ours")
    edit(folder, decoder_start_token_id=0)
    bundle = hf.read(folder)  # generation_config.json, where it is, has the last word in transformers
    assert bundle.tokenizer is not None
    assert bundle.tokenizer.bos_id == json.loads((folder / hf.GENERATION).read_text())["decoder_start_token_id"] != 0
    (folder / hf.GENERATION).unlink()
    bundle = hf.read(folder)
    assert bundle.tokenizer is not None
    assert bundle.tokenizer.bos_id == bundle.tokenizer.pad_id == 0


def test_marians_two_tokenizers(tmp_path: Path) -> None:
    """One vocabulary, two SentencePiece models: one cuts what is read, the other what is written."""
    theirs(*CASES["marian"]).save_pretrained(tmp_path / "theirs")
    folder = tmp_path / "theirs"
    for side, letters in (("source", "ab"), ("target", "xy")):
        pieces = b"".join(piece(f"▁{letter}", -2) for letter in letters) + piece("▁", -4)
        (folder / f"{side}.spm").write_bytes(SPECIALS + pieces + block(2, number(3, 1)) + PLAIN)
    vocabulary = ["<pad>", "</s>", "<unk>", "▁a", "▁b", "▁x", "▁y", "▁"]
    (folder / "vocab.json").write_text(json.dumps({token: id for id, token in enumerate(vocabulary)}))
    bundle = hf.read(folder)
    assert bundle.tokenizer is not None
    assert bundle.source_tokenizer is not None
    assert bundle.source_tokenizer.encode("a b") == [3, 4]
    assert bundle.tokenizer.decode([5, 6]) == "x y"
    assert (bundle.source_tokenizer.eos_id, bundle.source_tokenizer.pad_id) == (1, 0)
    assert (bundle.tokenizer.bos_id, bundle.tokenizer.eos_id) == (0, 1)
    given = exported(
        replace(bundle, notes={**bundle.notes, "tokenizer": bundle.tokenizer.fingerprint}), tmp_path / "out"
    )
    assert all(
        (given / n).read_bytes() == (folder / n).read_bytes() for n in ("source.spm", "target.spm", "vocab.json")
    )


@pytest.mark.parametrize("case", ["m2m_100", "mbart", "xlm-roberta", "pegasus"])
def test_pieces_have_the_familys_ids(case: str, tmp_path: Path) -> None:
    """Without a tokenizer.json, a SentencePiece model's ids are not those of its file; against transformers' own."""
    folder, own, languages = tmp_path / "theirs", "spiece.model", ["__af__", "__am__"]
    other = theirs(CASES[case][0], {**CASES[case][1], "vocab_size": 300})
    other.save_pretrained(folder)
    pieces, ids = piece("▁a", -2) + piece("▁b", -3) + piece("a", -4) + piece("▁", -5), b""
    if case == "pegasus":
        symbols = piece("<pad>", 0, 3) + piece("</s>", 0, 3) + piece("<unk>", 0, 2)
        ids = number(43, 0) + number(42, 1) + number(40, 2) + number(41, 2**64 - 1)
    else:
        own, symbols = "sentencepiece.bpe.model", piece("<unk>", 0, 2) + piece("<s>", 0, 3) + piece("</s>", 0, 3)
        texts = ["<s>", "<pad>", "</s>", "<unk>", "▁a", "▁b", "a", "▁"]
        (folder / "vocab.json").write_text(json.dumps({text: id for id, text in enumerate(texts)}))
    if case == "mbart":
        languages = hf_models.models.mbart50.tokenization_mbart50.FAIRSEQ_LANGUAGE_CODES
    (folder / own).write_bytes(symbols + pieces + block(2, number(3, 1) + ids) + PLAIN)
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": languages}))
    tokenizer = hf.read(folder).tokenizer
    assert tokenizer is not None
    kinds = {"m2m_100": "M2M100", "mbart": "MBart50", "xlm-roberta": "XLMRoberta", "pegasus": "Pegasus"}
    reference = getattr(hf_models, f"{kinds[case]}Tokenizer").from_pretrained(folder)
    for text in ("a b", "b aa", "ba c"):
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"], text
    named = [
        token for token in ("<pad>", "</s>", "<mask>", "<mask_2>", languages[-1]) if token in reference.get_vocab()
    ]
    assert {token: tokenizer.id(token) for token in named} == {t: reference.convert_tokens_to_ids(t) for t in named}
    assert tokenizer.pad_id == reference.pad_token_id


def test_the_sources_tokenizer_comes_along(tmp_path: Path) -> None:
    """Also out of a folder that weft wrote: no file of either tokenizer is lost or changed on the way."""
    settings = vaswani(1, D, H, d_ff=F, dropout=0.0, vocab_size=V, context=32).replace(
        position=Sinusoidal(layout="halves"), source_vocab_size=50
    )
    made = replace(fresh_model(settings), tokenizer=words(), source_tokenizer=words(50))
    folder = exported(made, tmp_path / "ours")
    bundle = hf.read(folder)
    assert bundle.tokenizer is not None
    assert bundle.source_tokenizer is not None
    assert bundle.source_tokenizer.vocab_size == 50
    notes = {**bundle.notes, "tokenizer": bundle.tokenizer.fingerprint}  # as a run keeps them
    assert same_files(folder, exported(replace(bundle, notes=notes), tmp_path / "back"))
    assert (tmp_path / "back/source/tokenizer.json").is_file()
    files = {name: data for name, data in bundle.files.items() if not name.startswith("source/")}  # of an older import
    exported(replace(bundle, notes=notes, files=files), tmp_path / "older")
    assert (tmp_path / "older/source/tokenizer.json").is_file()


# ---- models that weft made


def fresh_model(settings: Any) -> ModelBundle:
    torch.manual_seed(0)
    weights = build(settings).state_dict()
    return ModelBundle(settings, {name: (lambda w=weight: w) for name, weight in weights.items()}, None, "here")


def a_folder(folder: Path, tokenizer: Tokenizer | None = None, settings: Any = None) -> Path:
    """A tiny GPT-2 as a Hugging Face folder."""
    return exported(
        replace(fresh_model(settings or gpt(2, D, H, context=32, vocab_size=V)), tokenizer=tokenizer), folder
    )


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("name", "family"),
    [("gpt-tiny", "gpt2"), ("llama-tiny", "llama"), ("transformer++", "llama"), ("bert-tiny", "bert")],
)
def test_presets_find_their_family(name: str, family: str) -> None:
    small = {"vocab_size": V, "d_model": D, "layers": 1, "context": 16}
    settings = preset(name).replace(**small, attention={**preset(name).attention.model_dump(), "heads": 2})
    assert hf.choose(fresh_model(settings)).kind == family


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "window": (
        lambda: gpt(1, D, H, context=32, vocab_size=V).replace(attention=Attention(heads=H, bias="all", window=4)),
        r"no Hugging Face family .*\.window = 4, where GPT-2 has None; .* without model\.attention\.window$",
    ),
    "sinusoids": (
        lambda: vaswani(1, D, H, d_ff=F, dropout=0.0, vocab_size=V, context=32),
        r"model\.position\.layout = 'interleaved', where Marian has 'halves'; .* with model\.position\.layout=halves$",
    ),
    "no residual": (
        lambda: llama(1, D, H, d_ff=F, context=32, vocab_size=V).replace(residual=False),
        r"model\.residual = False, where LLaMA has True; .* with model\.residual=true$",
    ),
    "recurrent": (lambda: preset("lstm"), r"model\.kind = 'recurrent': Hugging Face has no family for it"),
    "head": (
        lambda: bert(1, D, H, vocab_size=V, context=32).replace(
            head={"kind": "sequence", "labels": 2, "pooling": "mean"}
        ),
        r"model\.head\.pooling = 'mean', where BERT has 'first'; .* with objective\.pooling=first$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_family_can_hold_is_refused_by_its_setting(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    with pytest.raises(InteropError, match=message):
        exported(fresh_model(make()), tmp_path / "out")


UNREAD = {
    "GlmForCausalLM": r"'glm': .* LLaMA \('llama'\), where .*partial_rotary_factor = 0\.5: weft has only 1\.0$",
    "Olmo3ForCausalLM": r"'olmo3': .*; which needs a tensor 'model\.layers\.0\.input_layernorm\.weight'$",
    "ArceeForCausalLM": r"'arcee': .* LLaMA \('llama'\), where hidden_act = 'relu2': weft has gelu",
    "HeliumForCausalLM": r"'helium': .*, which has a place for every key and tensor: what differs is in the program",
    "Exaone4ForCausalLM": r"'exaone4': .*; which needs a tensor 'model\.layers\.0\.input_layernorm\.weight'$",
    "ApertusForCausalLM": r"'apertus': .* LLaMA \('llama'\), where hidden_act = 'xielu': weft has gelu",
    "HunYuanDenseV1ForCausalLM": r"'hunyuan_v1_dense': .* no tensor 'model\.layers\.0\.self_attn\.\w+norm\.weight'$",
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_family_that_weft_lacks_is_told_what_has_no_place(name: str, tmp_path: Path) -> None:
    theirs(name, {**ROTARY, "num_hidden_layers": 4, "head_dim": 8}).save_pretrained(tmp_path)
    with pytest.raises(InteropError, match=UNREAD[name]):
        hf.read(tmp_path)


@pytest.mark.parametrize("case", ["seed_oss", "seed_oss-biases", "ministral3", "cwm"])
def test_an_alias_is_written_under_its_own_name_where_it_came_from_it(case: str, tmp_path: Path) -> None:
    name, settings = CASES[case]
    theirs(name, settings).save_pretrained(tmp_path / "theirs")
    bundle = hf.read(tmp_path / "theirs")
    other = {**bundle.notes["config"], "rms_norm_eps": 0.5}  # than the model's: its settings are written afresh
    fresh = exported(replace(bundle, notes={**bundle.notes, "config": other}, files={}), tmp_path / "fresh")
    again = getattr(hf_models, name).from_pretrained(fresh).eval()
    assert difference(built(bundle), again) <= 1e-5
    assert hf.read(fresh).model == bundle.model


def test_ministral_reads_as_far_as_its_queries_have_no_factor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, settings = CASES["ministral3"]
    other = theirs(name, {**settings, "max_position_embeddings": 96})
    other.save_pretrained(tmp_path)
    ours, tokens = built(hf.read(tmp_path)), torch.randint(V, (1, 40))
    assert ours.config.context == 32
    assert "no factor of queries beyond 32 tokens: the context is that, not 96" in capsys.readouterr().err
    with torch.no_grad():
        mine, answer = ours(tokens[:, :32]), other(tokens).logits
    assert gap(mine, answer[:, :32]) <= 1e-5


# ---- bad input


def with_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, **changes)


def with_tensors(**changes: Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file, {"format": "pt"})

    return change


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def header_of(size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}")  # type: ignore[return-value]


def indexed(weight_map: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        shutil.move(folder / "model.safetensors", folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "unknown family": (
        with_config(model_type="mamba", state_size=16),
        r"'mamba': not a family that weft reads; the nearest is GPT-2 \('gpt2'\), which has no state_size$",
    ),
    "experts": (
        with_config(model_type="mixtral", num_experts_per_tok=2, num_local_experts=8),
        r"'mixtral': a mixture of experts \(num_local_experts = 8\), and weft has one feed-forward for all tokens$",
    ),
    "convolution": (
        with_config(**DEBERTA, model_type="deberta-v2", architectures=None, conv_kernel_size=3),
        r"conv_kernel_size = 3: weft has only 0$",
    ),
    "one direction": (
        with_config(**{**DEBERTA, "pos_att_type": ["c2p"]}, model_type="deberta-v2", architectures=None),
        r"pos_att_type = \['c2p'\]: weft compares contents with distances both ways, c2p and p2c$",
    ),
    "no experts": (
        with_config(model_type="granitemoehybrid", num_local_experts=0, num_experts_per_tok=0, shared=1),
        r"the nearest is GPT-2 \('gpt2'\), which has no num_experts_per_tok, num_local_experts, shared$",
    ),
    "images": (
        with_config(model_type="gemma3", text_config={"model_type": "gemma3_text"}),
        r"'gemma3': a model of more than text, and weft reads text alone \(here model_type = 'gemma3_text'\)$",
    ),
    "no family": (
        lambda folder: (folder / "config.json").write_text("{}"),  # type: ignore[dict-item,return-value]
        r"model_type = None: not a family that weft reads, nor like one; it reads gpt2, llama, .*t5$",
    ),
    "unknown head": (
        with_config(architectures=["GPT2DoubleHeadsModel"]),
        r"of GPT-2 weft reads GPT2LMHeadModel, GPT2ForSequenceClassification, .*, GPT2Model$",
    ),
    "not JSON": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: not valid JSON"),  # type: ignore[dict-item,return-value]
    "no object": (lambda folder: (folder / "config.json").write_text("[]"), r"expected a JSON object$"),  # type: ignore[dict-item,return-value]
    "wrong kind of value": (with_config(n_layer="two"), r"n_layer = 'two': expected a whole number above 0$"),
    "sizes that do not divide": (with_config(n_head=5), r"n_head = 5 does not divide n_embd = 32$"),
    "too many layers": (with_config(n_layer=9000), r"9000 layers, but the files hold \d+ tensors in all$"),
    "a setting weft lacks": (
        with_config(scale_attn_by_inverse_layer_idx=True),
        r"scale_attn_by_inverse_layer_idx = True: weft has only False$",
    ),
    "activation": (with_config(activation_function="mish"), r"activation_function = 'mish': weft has gelu, "),
    "missing tensor": (
        with_tensors(transformer__h__1__ln_1__bias=None),
        r"'transformer\.h\.1\.ln_1\.bias' \[32\] is missing$",
    ),
    "extra tensor": (with_tensors(stray=torch.zeros(3)), r"'stray' \[3\] has no place in this model$"),
    "one layer more": (with_config(n_layer=1), r"'transformer\.h\.1\..*has no place in this model \(and \d+ more\)$"),
    "wrong shape": (
        with_tensors(transformer__wpe__weight=torch.zeros(31, D)),
        r"'transformer\.wpe\.weight' is \[31, 32\]; the settings ask for \[32, 32\]$",
    ),
    "whole numbers": (with_tensors(transformer__ln_f__bias=torch.zeros(D, dtype=torch.int32)), r"holds I32; weights"),
    "cut short": (truncate, r"model\.safetensors: not a whole safetensors file"),
    "absurd header": (header_of(2**62), r"model\.safetensors: not a whole safetensors file"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"it has none of model\.safetensors",
    ),
    "path in the index": (
        indexed({"x": "../outside.safetensors"}),
        r"'\.\./outside\.safetensors' is not the name of a",
    ),
    "absolute path in the index": (indexed({"x": "/etc/passwd"}), r"'/etc/passwd' is not the name of a"),
    "absent shard": (indexed({"x": "b.safetensors"}), r"b\.safetensors: missing, though"),
    "not in its shard": (indexed({"x": "a.safetensors"}), r"'x' is not in a\.safetensors, where it should be$"),
    "empty index": (indexed({}), r"'weight_map' does not say"),
    "too many words": (with_config(vocab_size=V), r"tokenizer has 76 entries, but the model's vocab_size is 61$"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    tokenizer = words(76) if case == "too many words" else None
    folder = a_folder(tmp_path / "broken", tokenizer)
    change(folder)
    with pytest.raises(WeftError, match=message) as caught:
        hf.read(folder)
    assert "\n" not in str(caught.value)


def test_rotary_scaling_that_weft_lacks(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "ours", settings=llama(1, D, H, d_ff=F, context=32, vocab_size=V))
    edit(folder, rope_scaling={"rope_type": "proportional", "factor": 4.0})
    with pytest.raises(InteropError, match=r"rope_scaling: rope_type = 'proportional': weft scales rotary pos"):
        hf.read(folder)


def test_a_window_in_some_layers_alone(tmp_path: Path) -> None:
    """Also without the list of kinds, which older files do not have."""
    theirs("Qwen2ForCausalLM", ROTARY).save_pretrained(tmp_path / "theirs")
    edit(tmp_path / "theirs", use_sliding_window=True, sliding_window=4, max_window_layers=1, layer_types=None)
    assert [kind.window for kind in hf.read(tmp_path / "theirs").model.layer_kinds(2)] == [None, 4]
    edit(tmp_path / "theirs", layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(InteropError, match=r"layer_types = .*: expected 'sliding_attention' or 'full_attention' for"):
        hf.read(tmp_path / "theirs")


# ---- the file format


def test_files_are_written_a_tensor_at_a_time(tmp_path: Path) -> None:
    """With types mixed so that places would not be multiples of their sizes, in the order they come."""
    tensors = {
        "a": torch.randn(3).half(),
        "b": torch.randn(2, 2),
        "c": torch.arange(3),
        "d": torch.tensor(True),
        "e": torch.randn(5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
    }
    tensor_files.write(tmp_path / "x.safetensors", {name: (lambda t=t: t) for name, t in tensors.items()})
    back = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert tensor_files.listing(tmp_path / "x.safetensors")["b"].shape == (2, 2)
