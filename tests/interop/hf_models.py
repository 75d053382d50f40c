"""Tiny models of transformers for every family that weft reads, and helpers to compare them with weft's."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.later import Later
from torch import Tensor, nn

from weft.data.batch import Source
from weft.decode.fast.stepper import Stepper
from weft.interop.bundle import ModelBundle, lazy_weights
from weft.interop.hf import hf
from weft.interop.hf.tokenizer import TOKENIZER_FILES
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Decoder, Encoder, EncoderDecoder
from weft.models.presets import gpt
from weft.nn.init import empty_weights
from weft.text.config import Word
from weft.text.tokenizer import Tokenizer, build_tokenizer

hf_models = Later("transformers")

V, D, H, F = 61, 32, 4, 48

SIZES = {
    "vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": H, "max_position_embeddings": 32,
}  # fmt: skip
BERT = {**SIZES, "intermediate_size": F}
ROTARY = {**BERT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA3 = {
    "rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.5, 3.0]}
THREE_LAYERS = {**ROTARY, "num_hidden_layers": 3}
GEMMA3 = {
    **THREE_LAYERS, "head_dim": 12, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}  # fmt: skip
GRANITE = {
    **ROTARY, "embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22,
    "logits_scaling": 7.0,
}  # fmt: skip
EXPERTS = {**ROTARY, "num_experts_per_tok": 2}
NAMED = {"num_experts": 6, "moe_intermediate_size": 20, "intermediate_size": F}
GLM_MOE = {
    **EXPERTS, "n_routed_experts": 8, "moe_intermediate_size": 20, "n_group": 4, "topk_group": 2,
    "num_hidden_layers": 3, "routed_scaling_factor": 1.5, "n_shared_experts": 2,
}  # fmt: skip
DEEPSEEK = {
    **GLM_MOE, "num_key_value_heads": H, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 1,
}  # fmt: skip
GPT_NEO = {
    "vocab_size": V, "hidden_size": D, "num_layers": 3, "num_heads": H, "max_position_embeddings": 32,
    "window_size": 5, "attention_types": [[["global", "local"], 1], [["global"], 1]],
}  # fmt: skip
GPT2 = {
    "vocab_size": V, "n_positions": 32, "n_embd": D, "n_layer": 2, "n_head": H, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MPT = {"vocab_size": V, "d_model": 36, "n_heads": 6, "n_layers": 2, "max_seq_len": 32}
OPT = {**SIZES, "ffn_dim": F, "word_embed_proj_dim": D}
ROBERTA = {**BERT, "max_position_embeddings": 34, "type_vocab_size": 1}
ELECTRA = {**BERT, "embedding_size": 20}
ALBERT = {**ELECTRA, "num_hidden_layers": 4}
MPNET = {**BERT, "max_position_embeddings": 34}
MODERNBERT = {**BERT, "num_hidden_layers": 4, "local_attention": 6, "pad_token_id": 0}
DEBERTA = {
    **BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4,
    "max_relative_positions": -1, "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False,
    "type_vocab_size": 0,
}  # fmt: skip
DEBERTA_V1 = {
    key: value for key, value in DEBERTA.items() if key not in ("share_att_key", "norm_rel_ebd", "position_buckets")
}
LONGFORMER: dict[str, Any] = {
    **ROBERTA,
    "attention_window": [4, 8],
    "type_vocab_size": 2,
    "pad_token_id": 1,
    "sep_token_id": 2,
}
ESM = {
    **BERT, "max_position_embeddings": 34, "pad_token_id": 1, "mask_token_id": 15, "token_dropout": True,
    "position_embedding_type": "rotary",
}  # fmt: skip
DISTIL = {"vocab_size": V, "dim": D, "n_layers": 2, "n_heads": H, "hidden_dim": F, "max_position_embeddings": 32}
PAIRS = {
    "vocab_size": V, "d_model": D, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": H,
    "decoder_attention_heads": H, "encoder_ffn_dim": F, "decoder_ffn_dim": F, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
LED: dict[str, Any] = {key: value for key, value in PAIRS.items() if key != "max_position_embeddings"}
LED |= {"max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 16, "attention_window": [4, 8]}
GEMMA_SIDE = {**ROTARY, "head_dim": 12, "sliding_window": 3, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 0.5}
T5GEMMA = {"encoder": GEMMA_SIDE, "decoder": {**GEMMA_SIDE, "num_hidden_layers": 3}, "decoder_start_token_id": 1}
T5 = {
    "vocab_size": V, "d_model": D, "d_kv": 6, "d_ff": F, "num_layers": 2, "num_decoder_layers": 3, "num_heads": H,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": 0,
}  # fmt: skip

# name → class of transformers and its settings
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
        {**THREE_LAYERS, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "mixtral": ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 5, "sliding_window": 5}),
    "mixtral-labels": ("MixtralForSequenceClassification", {**EXPERTS, "num_local_experts": 5, "num_labels": 3}),
    "mixtral-answers": ("MixtralForQuestionAnswering", {**EXPERTS, "num_local_experts": 5}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**THREE_LAYERS, **NAMED, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 12},
    ),
    "qwen2_moe-dense": (
        "Qwen2MoeForCausalLM",
        {
            **EXPERTS,
            **NAMED,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 3,
            "qkv_bias": False,
            "norm_topk_prob": True,
        },
    ),
    "qwen2_moe-answers": ("Qwen2MoeForQuestionAnswering", {**EXPERTS, **NAMED}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**EXPERTS, **NAMED, "head_dim": 12, "norm_topk_prob": True}),
    "qwen3_moe-dense": (
        "Qwen3MoeForCausalLM",
        {**EXPERTS, **NAMED, "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 5},
    ),
    "olmoe": ("OlmoeForCausalLM", {**EXPERTS, "num_experts": 6, "clip_qkv": 0.3}),
    "granitemoe": ("GraniteMoeForCausalLM", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        {**THREE_LAYERS, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20, "moe_num_shared_experts": 2},
    ),
    "ernie4_5_moe-interval": (
        "Ernie4_5_MoeForCausalLM",
        {
            **ROTARY,
            "num_hidden_layers": 5,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 20,
            "moe_num_shared_experts": 0,
            "moe_layer_interval": 2,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 3,
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1ForCausalLM",
        {
            **ROTARY,
            "head_dim": 12,
            "num_experts": 6,
            "moe_topk": 2,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 1.0, "alpha": 50.0},
        },
    ),
    "glm4_moe": ("Glm4MoeForCausalLM", {**GLM_MOE, "head_dim": 12, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe-plain": (
        "Glm4MoeForCausalLM",
        {**GLM_MOE, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        {
            **EXPERTS,
            "num_local_experts": 6,
            "head_dim": 12,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        {
            **EXPERTS,
            "num_local_experts": 6,
            "lm_head_bias": True,
            "attention_bias": True,
            "router_jitter_noise": 0.2,
            "head_dim": 8,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **EXPERTS,
            "num_local_experts": 6,
            "head_dim": 12,
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "rope_parameters": {**YARN, "truncate": False},
            "swiglu_limit": 0.5,
        },
    ),
    "llama4_text": (
        "Llama4ForCausalLM",
        {
            **EXPERTS,
            "num_local_experts": 6,
            "head_dim": 12,
            "intermediate_size_mlp": 40,
            "num_hidden_layers": 5,
            "attention_chunk_size": 5,
            "floor_scale": 3,
            "attn_scale": 0.4,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama4_text-plain": (
        "Llama4ForCausalLM",
        {
            **EXPERTS,
            "num_local_experts": 6,
            "head_dim": 12,
            "attention_bias": True,
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
            "no_rope_layers": [1, 0, 1],
            "num_hidden_layers": 3,
            "attention_chunk_size": 4,
        },
    ),
    "gpt_oss-labels": (
        "GptOssForSequenceClassification",
        {**EXPERTS, "num_local_experts": 6, "num_labels": 3, "rope_parameters": {"rope_type": "default"}},
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "q_lora_rank": None,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2-queries": ("DeepseekV2ForCausalLM", {**DEEPSEEK, "attention_bias": True}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "attention_bias": True},
    ),
    "deepseek_v3-halves": (
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "rope_interleave": False, "q_lora_rank": None, "norm_topk_prob": False, "v_head_dim": 12},
    ),
    "gemma": ("GemmaForCausalLM", {**ROTARY, "head_dim": 12}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**ROTARY, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 0.5},
    ),
    "gemma3_text": ("Gemma3ForCausalLM", GEMMA3),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {**THREE_LAYERS, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5},
    ),
    "granite": ("GraniteForCausalLM", GRANITE),
    "phi3": ("Phi3ForCausalLM", {**ROTARY, "partial_rotary_factor": 0.5, "sliding_window": 5}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {**ROTARY, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5, "rope_parameters": LONGROPE},
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
        {**ROTARY, "head_dim": 12, "sliding_window": 5, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    ),
    "cwm": ("CwmForCausalLM", {**THREE_LAYERS, "head_dim": 12, "sliding_window": 5, "rope_parameters": LLAMA3}),
    "opt": ("OPTForCausalLM", OPT),
    "opt-350m": ("OPTForCausalLM", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "opt-no-bias": ("OPTForCausalLM", {**OPT, "word_embed_proj_dim": 20, "enable_bias": False}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**ROTARY, "rotary_pct": 0.5}),
    "gpt_neox-sequential": (
        "GPTNeoXForCausalLM",
        {**ROTARY, "rotary_pct": 0.25, "use_parallel_residual": False, "attention_bias": False, "rotary_emb_base": 500},
    ),
    "gptj": ("GPTJForCausalLM", {**GPT2, "rotary_dim": 4}),
    "gpt_neo": ("GPTNeoForCausalLM", GPT_NEO),
    "phi": ("PhiForCausalLM", {**ROTARY, "partial_rotary_factor": 0.5}),
    "phi-normed": ("PhiForCausalLM", {**ROTARY, "qk_layernorm": True}),
    "stablelm": ("StableLmForCausalLM", {**ROTARY, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": ("StableLmForCausalLM", {**ROTARY, "use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2ForCausalLM", {**ROTARY, "sliding_window": 5}),
    "falcon": ("FalconForCausalLM", SIZES),
    "falcon-grouped": ("FalconForCausalLM", {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-one-norm": (
        "FalconForCausalLM",
        {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": ("FalconForCausalLM", {**SIZES, "parallel_attn": False, "multi_query": False}),
    "falcon-alibi": (
        "FalconForCausalLM",
        {**SIZES, "num_attention_heads": 6, "hidden_size": 36, "alibi": True, "bias": True, "parallel_attn": False},
    ),
    "bloom": ("BloomForCausalLM", {"vocab_size": V, "hidden_size": D, "n_layer": 2, "n_head": H}),
    "cohere": ("CohereForCausalLM", {**ROTARY, "logit_scale": 0.3}),
    "cohere-normed": ("CohereForCausalLM", {**ROTARY, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("Cohere2ForCausalLM", {**THREE_LAYERS, "sliding_window": 5, "layer_types": GEMMA3["layer_types"]}),
    "glm": ("GlmForCausalLM", {**ROTARY, "head_dim": 8}),
    "glm4": ("Glm4ForCausalLM", {**ROTARY, "head_dim": 12}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {
            **THREE_LAYERS,
            "sliding_window": 5,
            "layer_types": GEMMA3["layer_types"],
            "rope_parameters": GEMMA3["rope_parameters"],
        },
    ),
    "exaone4": ("Exaone4ForCausalLM", {**THREE_LAYERS, "sliding_window": 5, "sliding_window_pattern": 2}),
    "exaone4-full": (
        "Exaone4ForCausalLM",
        {**THREE_LAYERS, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "helium": ("HeliumForCausalLM", {**ROTARY, "head_dim": 8, "attention_bias": True}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {**ROTARY, "head_dim": 12}),
    "ernie4_5-biases": (
        "Ernie4_5ForCausalLM",
        {**ROTARY, "head_dim": 8, "use_bias": True, "tie_word_embeddings": False},
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1ForCausalLM",
        {
            **ROTARY,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4},
        },
    ),
    "arcee": ("ArceeForCausalLM", {**ROTARY, "head_dim": 8, "mlp_bias": True}),
    "nemotron": ("NemotronForCausalLM", {**ROTARY, "head_dim": 12}),
    "ministral": (
        "MinistralForCausalLM",
        {**THREE_LAYERS, "head_dim": 12, "sliding_window": 5, "layer_types": GEMMA3["layer_types"]},
    ),
    "apertus": ("ApertusForCausalLM", {**ROTARY, "rope_parameters": LLAMA3}),
    "apertus-relu2": (
        "ApertusForCausalLM",
        {**ROTARY, "head_dim": 12, "attention_bias": True, "hidden_act": "relu2", "rope_parameters": LLAMA3},
    ),
    "apertus-tags": ("ApertusForTokenClassification", {**ROTARY, "rope_parameters": LLAMA3}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT2),
    "gpt_bigcode-heads": ("GPTBigCodeForCausalLM", {**GPT2, "multi_query": False}),
    "gpt_bigcode-labels": ("GPTBigCodeForSequenceClassification", {**GPT2, "num_labels": 3}),
    "codegen": ("CodeGenForCausalLM", {**GPT2, "rotary_dim": 4}),
    "mpt": ("MptForCausalLM", MPT),
    "mpt-clipped": ("MptForCausalLM", {**MPT, "attn_config": {"clip_qkv": 0.3, "softmax_scale": 0.2}}),
    "mpt-tags": ("MptForTokenClassification", MPT),
    "llama-yarn": (
        "LlamaForCausalLM",
        {**ROTARY, "rope_parameters": {**YARN, "original_max_position_embeddings": 8}},
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
    "bert-causal": ("BertLMHeadModel", {**BERT, "is_decoder": True}),
    "bert-causal-tags": ("BertForTokenClassification", {**BERT, "is_decoder": True}),
    "bert-causal-headless": ("BertModel", {**BERT, "is_decoder": True}),
    "roberta-causal": ("RobertaForCausalLM", {**ROBERTA, "is_decoder": True, "hidden_act": "relu"}),
    "xlm-roberta-causal": ("XLMRobertaForCausalLM", {**ROBERTA, "is_decoder": True}),
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
    "modernbert-decoder": ("ModernBertDecoderForCausalLM", MODERNBERT),
    "modernbert-decoder-biases": (
        "ModernBertDecoderForCausalLM",
        {**MODERNBERT, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "decoder_bias": False}
        | {"classifier_bias": True, "classifier_activation": "relu", "tie_word_embeddings": False},
    ),
    "modernbert-decoder-labels": (
        "ModernBertDecoderForSequenceClassification",
        {**MODERNBERT, "classifier_bias": True, "num_labels": 3, "global_attn_every_n_layers": 2},
    ),
    "eurobert": ("EuroBertForMaskedLM", ROTARY),
    "eurobert-biases": (
        "EuroBertForMaskedLM",
        {**ROTARY, "head_dim": 12, "mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "eurobert-labels": ("EuroBertForSequenceClassification", {**ROTARY, "num_labels": 3}),
    "eurobert-labels-first": ("EuroBertForSequenceClassification", {**ROTARY, "classifier_pooling": "bos"}),
    "eurobert-labels-mean": ("EuroBertForSequenceClassification", {**ROTARY, "classifier_pooling": "mean"}),
    "eurobert-tags": ("EuroBertForTokenClassification", {**ROTARY, "num_labels": 5}),
    "eurobert-headless": ("EuroBertModel", ROTARY),
    "nomic_bert": ("NomicBertForMaskedLM", BERT),
    "nomic_bert-labels": ("NomicBertForSequenceClassification", {**BERT, "head_dim": 12, "num_labels": 3}),
    "nomic_bert-tags": ("NomicBertForTokenClassification", {**BERT, "num_labels": 5, "hidden_act": "gelu"}),
    "nomic_bert-headless": ("NomicBertModel", BERT),
    "esm": ("EsmForMaskedLM", ESM),
    "esm-learned": ("EsmForMaskedLM", {**ESM, "position_embedding_type": "absolute", "emb_layer_norm_before": True}),
    "esm-labels": ("EsmForSequenceClassification", {**ESM, "token_dropout": False, "rope_theta": 500.0}),
    "esm-tags": ("EsmForTokenClassification", {**ESM, "num_labels": 5}),
    "esm-headless": ("EsmModel", ESM),
    "deberta-v2": ("DebertaV2ForMaskedLM", DEBERTA),
    "deberta-v2-labels": ("DebertaV2ForSequenceClassification", {**DEBERTA, "num_labels": 3, "norm_rel_ebd": "none"}),
    "deberta-v2-tags": ("DebertaV2ForTokenClassification", {**DEBERTA, "type_vocab_size": 2}),
    "deberta-v2-answers": ("DebertaV2ForQuestionAnswering", {**DEBERTA, "max_relative_positions": 10}),
    "deberta-v2-headless": ("DebertaV2Model", DEBERTA),
    "deberta-v2-single": ("DebertaV2ForMaskedLM", {**DEBERTA, "position_buckets": -1, "max_relative_positions": 6}),
    "deberta": ("DebertaForMaskedLM", DEBERTA_V1),
    "deberta-labels": (
        "DebertaForSequenceClassification",
        {**DEBERTA_V1, "max_relative_positions": 5, "num_labels": 3},
    ),
    "deberta-tags": ("DebertaForTokenClassification", {**DEBERTA_V1, "type_vocab_size": 2}),
    "deberta-answers": ("DebertaForQuestionAnswering", {**DEBERTA_V1, "pos_att_type": "c2p|p2c"}),
    "deberta-headless": ("DebertaModel", DEBERTA_V1),
    "longformer": ("LongformerForMaskedLM", LONGFORMER),
    "longformer-labels": ("LongformerForSequenceClassification", {**LONGFORMER, "num_labels": 3}),
    "longformer-tags": ("LongformerForTokenClassification", {**LONGFORMER, "attention_window": 6}),
    "longformer-answers": ("LongformerForQuestionAnswering", LONGFORMER),
    "longformer-headless": ("LongformerModel", {**LONGFORMER, "type_vocab_size": 1}),
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
    "bart-labels": ("BartForSequenceClassification", {**PAIRS, "num_labels": 3, "decoder_start_token_id": 1}),
    "mbart": ("MBartForConditionalGeneration", {**PAIRS, "scale_embedding": True}),
    "mbart-labels": ("MBartForSequenceClassification", {**PAIRS, "num_labels": 3}),
    "led": ("LEDForConditionalGeneration", LED),
    "t5gemma": ("T5GemmaForConditionalGeneration", T5GEMMA),
    "t5gemma-full": (
        "T5GemmaForConditionalGeneration",
        {
            "encoder": {**GEMMA_SIDE, "layer_types": ["full_attention"] * 2, "vocab_size": 70},
            "decoder": {**GEMMA_SIDE, "attention_bias": False, "sliding_window": 4, "final_logit_softcapping": None},
            "tie_word_embeddings": False,
        },
    ),
    "blenderbot": ("BlenderbotForConditionalGeneration", PAIRS),
    "pegasus": ("PegasusForConditionalGeneration", {**PAIRS, "scale_embedding": True}),
    "m2m_100": ("M2M100ForConditionalGeneration", {**PAIRS, "pad_token_id": 1, "eos_token_id": 2}),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5-labels": ("T5ForSequenceClassification", {**T5, "num_labels": 3, "eos_token_id": 1}),
    "mt5-labels": ("MT5ForSequenceClassification", {**T5, "eos_token_id": 1}),
    "mt5": ("MT5ForConditionalGeneration", T5),
    "umt5": ("UMT5ForConditionalGeneration", T5),
    "umt5-relu": ("UMT5ForConditionalGeneration", {**T5, "feed_forward_proj": "relu"}),
    "umt5-labels": ("UMT5ForSequenceClassification", {**T5, "num_labels": 3, "eos_token_id": 1}),
    "t5-v1.1": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}


def theirs(name: str, settings: dict[str, Any]) -> nn.Module:
    """A tiny model of transformers with random weights, which reveal a swap or an omission."""
    kind = getattr(hf_models, name)
    return filled(kind(kind.config_class(**settings)))


def saved(folder: Path, name: str, settings: dict[str, Any], **options: Any) -> Any:
    """Save such a model in a folder, and return it."""
    model: Any = theirs(name, settings)
    model.save_pretrained(folder, **options)
    return model


def filled(model: nn.Module) -> nn.Module:
    """Fill a model with random weights, gains around 1."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name and not parameter.requires_grad:
                continue  # sinusoids
            parameter.normal_(std=0.15)
            is_norm = "norm" in name.lower() or "ln_" in name
            if is_norm and name.endswith("weight") and not type(model).__name__.startswith("Gemma"):
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.normal_()
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    return model.eval()


def built(bundle: ModelBundle) -> LanguageModel:
    """Build weft's model with the weights of a bundle."""
    with empty_weights():
        model = build(bundle.model)
    model.load_state_dict({name: make() for name, make in bundle.weights.items()}, assign=True)
    return model.eval()


@torch.no_grad()
def difference(ours: nn.Module, other: nn.Module) -> float:
    """Largest difference between the outputs of two models, at real tokens."""
    torch.manual_seed(1)
    config: Any = ours.config
    tokens, target = (torch.randint(3, min(50, config.vocab_size), (3, time)) for time in (13, 7))
    mask = torch.arange(13)[None] < torch.tensor([13, 7, 4])[:, None]
    real = mask[..., None]
    if isinstance(config, Decoder) and config.head.kind != "embedding":
        return max(gap(*map(_logits, (ours(row), other(row)))) for row in (tokens[:1], tokens[1:2]))
    inputs = {"attention_mask": mask.long()}
    if isinstance(config, EncoderDecoder) and config.head.kind == "sequence":
        tokens[torch.arange(3), mask.sum(1) - (1 if config.head.pooling == "last" else 2)] = 1
        tokens[~mask] = 0
        other.config.update({"eos_token_id": 1, "pad_token_id": 0})  # type: ignore[operator,union-attr]
        return gap(ours(tokens, mask=mask), other(tokens, **inputs).logits)
    if isinstance(config, EncoderDecoder):
        output = ours(target, source=Source(tokens, mask))
        return gap(output, other(tokens, decoder_input_ids=target, **inputs).logits)
    segments = {}
    if config.attention.global_until is not None:  # three separators, as in a pair of texts
        for place in (2, 1, 0):
            tokens[torch.arange(3), mask.sum(1) // 2 + place - 1] = config.attention.global_until
    if isinstance(config, Encoder) and config.segments > 1:
        segments = {"segments": (torch.arange(13) > 4).long().expand(3, 13)}
        inputs["token_type_ids"] = segments["segments"]
    output, expected = ours(tokens, mask=mask, **segments), other(tokens, **inputs)
    match config.head.kind:
        case "mlm+nsp":
            next_sentence = expected.get("seq_relationship_logits", expected.get("sop_logits"))
            words = gap(output.words * real, expected.prediction_logits * real)
            return max(words, gap(output.next_sentence, next_sentence))
        case "embedding":
            pooled = (expected.last_hidden_state * real).sum(1) / real.sum(1)
            return gap(output, nn.functional.normalize(pooled, dim=-1))
        case "mlm" | "token" | "span":
            return gap(output * real, _logits(expected) * real)
        case "replaced":
            return gap(output * mask, expected.logits * mask)
    return gap(output, expected.logits)


def _logits(output: Any) -> Tensor:
    """Logits of an output; for a span, those of its start and its end stacked."""
    if isinstance(output, Tensor):
        return output
    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.logits


def gap(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max())


@torch.no_grad()
def greedy(model: LanguageModel, prompt: Tensor, steps: int) -> list[int]:
    """Most likely tokens after a prompt, one after another."""
    stepper = Stepper(model, 1, prompt_tokens=prompt.shape[1], limit=prompt.shape[1] + steps)
    logits, tokens = model.head(stepper.read(prompt))[:, -1], []
    for _ in range(steps):
        tokens.append(int(logits.argmax()))
        logits = stepper.step(torch.tensor(tokens[-1:]))
    return tokens


def stepped(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Logits of tokens, of which three are read first and the others one by one, on the fast path."""
    stepper = Stepper(model, len(tokens), prompt_tokens=3, limit=tokens.shape[1])
    first = model.head(stepper.read(tokens[:, :3]))
    return torch.cat([first, *(stepper.step(token)[:, None].clone() for token in tokens[:, 3:].T)], dim=1)


def exported(bundle: ModelBundle, folder: Path, **options: Any) -> Path:
    folder.mkdir()
    hf.write(bundle, folder, **options)
    return folder


def same_files(one: Path, other: Path) -> bool:
    """Whether weights, settings and tokenizer of two folders are equal byte for byte."""
    parts = {*hf.KEPT, *TOKENIZER_FILES}
    names = {n for n in parts if (one / n).is_file()} | {file.name for file in one.glob("*.safetensors")}
    assert {file.name for file in other.glob("*.safetensors")} <= names
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def words(size: int = V) -> Tokenizer:
    return build_tokenizer(Word(vocab_size=size), [" ".join(f"w{number}" for number in range(size))])


def fresh_model(settings: Any) -> ModelBundle:
    torch.manual_seed(0)
    weights = build(settings).state_dict()
    return ModelBundle(settings, lazy_weights(weights.__getitem__, weights), tokenizer=None, origin="here")


def a_folder(folder: Path, tokenizer: Tokenizer | None = None, settings: Any = None) -> Path:
    """A tiny GPT-2 as a Hugging Face folder."""
    return exported(
        replace(fresh_model(settings or gpt(2, D, H, context=32, vocab_size=V)), tokenizer=tokenizer), folder
    )


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
