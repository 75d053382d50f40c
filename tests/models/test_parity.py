"""Every family against an independent implementation: logits and gradients within 1e-5, in float32."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from tests.later import Later
from torch import Tensor, nn

from weft.data.batch import Source
from weft.interop.families.base import Family
from weft.interop.families.bert import BERT
from weft.interop.families.gpt2 import GPT2
from weft.interop.families.known import FAMILIES
from weft.interop.families.llama import LLAMA
from weft.interop.families.seq2seq import MARIAN, T5
from weft.interop.weight_map import NameRule, conversions, module, tensor, their_shapes, to_ours
from weft.models.build import build
from weft.models.config import Decoder, Encoder, EncoderDecoder
from weft.models.head_config import LMHead, PretrainingHead
from weft.models.presets import bert, gpt, llama, vaswani
from weft.nn.config import Attention, Gated, Plain, RMSNorm
from weft.nn.position_config import DynamicNTK, LinearScaling, Llama3Scaling, Rotary, Sinusoidal, T5Bias

transformers = Later("transformers")

VOCAB, D, HEADS, FF = 61, 32, 4, 48


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def load(ours: Any, theirs: Mapping[str, Tensor], rules: Iterable[NameRule]) -> None:
    """Fill `ours` by a table of names. Every parameter must be named, and every name must exist."""
    table = conversions(rules, ours.config)
    used = {name: tuple(theirs[name].shape) for name in their_shapes(table)}
    weights = to_ours(table, used, theirs.__getitem__, location="theirs")
    ours.load_state_dict({name: make() for name, make in weights.items()})


def convert(theirs: nn.Module, family: Family, settings: Decoder | Encoder | EncoderDecoder) -> Any:
    """Randomise a model of transformers, and return weft's model with its weights."""
    randomise(theirs.eval())
    ours: Any = build(settings).eval()
    load(ours, theirs.state_dict(), family.rules(ours.config))
    return ours


def randomise(model: nn.Module) -> None:
    """Draw weights, gains and biases for which a swap or an omission would show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name:  # sinusoids
                continue
            parameter.normal_(std=0.15)
            if "norm" in name.lower() or "ln_" in name:
                parameter.add_(1.0 if name.endswith("weight") else 0.0)


def check_same(ours: Tensor, theirs: Tensor, our_table: Any, their_table: Any) -> None:
    """Compare logits, and the gradients of the embeddings, which depend on everything above them."""
    assert (ours - theirs).abs().max() <= 1e-5
    upstream = torch.randn_like(theirs) / theirs.numel() ** 0.5
    ours.backward(upstream)
    theirs.backward(upstream)
    assert (our_table.grad - their_table.grad).abs().max() <= 1e-5


def check_decoder(theirs: Any, family: Family, settings: Decoder, time: int) -> None:
    ours, tokens = convert(theirs, family, settings), torch.randint(VOCAB, (2, time))
    table = theirs.get_input_embeddings().weight
    check_same(ours(tokens), theirs(tokens).logits, ours.embedding.weight, table)


def check_seq2seq(theirs: Any, family: Family, settings: EncoderDecoder) -> None:
    ours, (source, mask, target) = convert(theirs, family, settings), sentence_pair()
    mine = ours(target, source=Source(source, mask))
    other = theirs(source, attention_mask=mask.long(), decoder_input_ids=target).logits
    check_same(mine, other, ours.embedding.weight, theirs.get_input_embeddings().weight)


def sentence_pair() -> tuple[Tensor, Tensor, Tensor]:
    """Source (3, 11), its mask, and target (3, 7)."""
    source, target = torch.randint(1, VOCAB, (3, 11)), torch.randint(1, VOCAB, (3, 7))
    mask = torch.arange(11)[None] < torch.tensor([11, 6, 3])[:, None]
    return source, mask, target


def test_gpt2() -> None:
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=D, n_layer=2, n_head=HEADS)
    settings = gpt(2, D, HEADS, context=32, vocab_size=VOCAB)
    check_decoder(transformers.GPT2LMHeadModel(config), GPT2, settings, time=17)


HF_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": HEADS}
LLAMA_SIZES = HF_SIZES | {"intermediate_size": FF, "num_key_value_heads": 2}
LLAMA_SIZES |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
GROUPED = llama(2, D, HEADS, d_ff=FF, context=32, vocab_size=VOCAB, kv_heads=2)
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
SCALINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (None, {"rope_type": "default"}),
    "linear": (LinearScaling(factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "dynamic-ntk": (DynamicNTK(factor=2.0), {"rope_type": "dynamic", "factor": 2.0}),
    "llama3": (Llama3Scaling(original_context=16), {"rope_type": "llama3", "factor": 8.0, **LLAMA3}),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_llama_with_grouped_queries(name: str) -> None:
    scaling, their_scaling = SCALINGS[name]
    rope = {"rope_theta": 10000.0, **their_scaling}
    config = transformers.LlamaConfig(**LLAMA_SIZES, max_position_embeddings=32, rope_parameters=rope)
    settings = GROUPED.replace(position=Rotary(scaling=scaling))
    # longer than the context, where dynamic scaling begins
    check_decoder(transformers.LlamaForCausalLM(config), LLAMA, settings, time=45)


def test_qk_norm_and_d_head_against_qwen3() -> None:
    config = transformers.Qwen3Config(**LLAMA_SIZES | {"head_dim": 12, "rms_norm_eps": 1e-6})
    norm = RMSNorm(eps=1e-6)
    settings = GROUPED.replace(norm=norm, attention=Attention(heads=HEADS, kv_heads=2, d_head=12, qk_norm=norm))
    check_decoder(transformers.Qwen3ForCausalLM(config), FAMILIES["qwen3"], settings, time=19)


def test_sliding_window_against_mistral() -> None:
    config = transformers.MistralConfig(**LLAMA_SIZES, sliding_window=5)
    settings = GROUPED.replace(attention=Attention(heads=HEADS, kv_heads=2, window=5))
    check_decoder(transformers.MistralForCausalLM(config), FAMILIES["mistral"], settings, time=19)


def test_bert_with_both_pretraining_heads() -> None:
    config = transformers.BertConfig(**HF_SIZES, intermediate_size=4 * D, max_position_embeddings=32)
    theirs, settings = transformers.BertForPreTraining(config), bert(2, D, HEADS, vocab_size=VOCAB, context=32)
    assert isinstance(settings.head, PretrainingHead)
    ours = convert(theirs, BERT, settings)
    tokens, segments = torch.randint(VOCAB, (3, 13)), torch.randint(2, (3, 13))
    mask = torch.arange(13)[None] < torch.tensor([13, 7, 4])[:, None]
    mine = ours(tokens, segments=segments, mask=mask)
    other = theirs(tokens, attention_mask=mask.long(), token_type_ids=segments)
    assert (mine.next_sentence - other.seq_relationship_logits).abs().max() <= 1e-5
    real, table = mask[..., None], theirs.bert.embeddings.word_embeddings.weight
    check_same(mine.words * real, other.prediction_logits * real, ours.embedding.weight, table)


def test_marian() -> None:
    sides = {"layers": 2, "attention_heads": HEADS, "ffn_dim": FF}
    sizes: dict[str, Any] = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sides.items()}
    sizes |= {"vocab_size": VOCAB, "d_model": D, "max_position_embeddings": 32, "activation_function": "swish"}
    config = transformers.MarianConfig(**sizes, scale_embedding=True, pad_token_id=0, decoder_start_token_id=0)
    theirs = transformers.MarianMTModel(config)
    theirs.final_logits_bias.normal_()
    ours = {"feedforward": Plain(d_ff=FF, activation="silu"), "head": LMHead(tied=True, bias=True)}
    settings = vaswani(
        2, D, HEADS, d_ff=FF, dropout=0.0, vocab_size=VOCAB, position=Sinusoidal(layout="halves"), **ours
    )
    check_seq2seq(theirs, MARIAN, settings)


@pytest.mark.parametrize("gated", [False, True], ids=["t5", "t5-v1.1"])
def test_t5(gated: bool) -> None:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "d_model": D, "d_kv": 6, "d_ff": FF, "num_heads": HEADS}
    sizes |= {"num_layers": 2, "num_decoder_layers": 3, "decoder_start_token_id": 0}
    sizes |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    sizes |= {"feed_forward_proj": "gated-gelu" if gated else "relu"}
    sizes |= {"tie_word_embeddings": not gated}  # always tied, and the output is scaled unless this is false
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    settings = EncoderDecoder(
        vocab_size=VOCAB,
        layers=3,
        encoder_layers=2,
        d_model=D,
        attention=Attention(heads=HEADS, d_head=6, scale=1.0),
        feedforward=Gated(d_ff=FF, activation="gelu-tanh") if gated else Plain(d_ff=FF, bias=False),
        norm=RMSNorm(eps=1e-6),
        position=T5Bias(buckets=8, max_distance=20),
        head=LMHead(scale=None if gated else D**-0.5),
    )
    check_seq2seq(theirs, T5, settings)


def torch_layers(side: str, last: str) -> tuple[NameRule, ...]:
    """Names of torch.nn.Transformer; its last norm is norm2 or norm3."""
    block, layer = f"{side}.blocks.{{layer}}", f"{side}.layers.{{layer}}"
    return (
        *(tensor(f"{block}.attention.qkv.{kind}", f"{layer}.self_attn.in_proj_{kind}") for kind in ("weight", "bias")),
        *module(f"{block}.attention.out", f"{layer}.self_attn.out_proj"),
        *module(f"{block}.attention_skip.norm", f"{layer}.norm1"),
        *module(f"{block}.cross.q", "q{layer}"),
        *module(f"{block}.cross.kv", "kv{layer}"),
        *module(f"{block}.cross.out", f"{layer}.multihead_attn.out_proj"),
        *module(f"{block}.cross_skip.norm", f"{layer}.norm2"),
        *module(f"{block}.feedforward.up", f"{layer}.linear1"),
        *module(f"{block}.feedforward.down", f"{layer}.linear2"),
        *module(f"{block}.feedforward_skip.norm", f"{layer}.{last}"),
    )


TORCH = (tensor("embedding.weight", "table"), *torch_layers("encoder", "norm2"), *torch_layers("decoder", "norm3"))


def test_the_2017_transformer_in_torch() -> None:
    """Post-norm encoder–decoder with ReLU against torch.nn.Transformer, without its additional last norms."""
    shape: dict[str, Any] = {"d_model": D, "nhead": HEADS, "dim_feedforward": FF, "dropout": 0.0, "batch_first": True}
    theirs = nn.Transformer(
        **shape,
        custom_encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(**shape), 2, enable_nested_tensor=False),
        custom_decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(**shape), 2),
    )
    randomise(theirs)
    ours: Any = build(vaswani(2, D, HEADS, d_ff=FF, dropout=0.0, vocab_size=VOCAB))
    table = nn.Parameter(torch.randn(VOCAB, D) * 0.15)
    tensors = {**theirs.state_dict(), "table": table.detach()}
    for i in range(2):  # torch has q, k and v of the cross-attention in one matrix
        for kind in ("weight", "bias"):
            packed = tensors[f"decoder.layers.{i}.multihead_attn.in_proj_{kind}"]
            tensors |= {f"q{i}.{kind}": packed[:D], f"kv{i}.{kind}": packed[D:]}
    load(ours, tensors, TORCH)
    source, mask, target = sentence_pair()
    mine = ours(target, source=Source(source, mask))
    embed, indices = ours.encoder.position.embed, torch.arange(11)[None]
    left, right = embed(table[source] * D**0.5, indices), embed(table[target] * D**0.5, indices[:, :7])
    causal = torch.ones(7, 7).triu(1).bool()
    features = theirs(left, right, tgt_mask=causal, src_key_padding_mask=~mask, memory_key_padding_mask=~mask)
    check_same(mine, features @ table.mT, ours.embedding.weight, table)
