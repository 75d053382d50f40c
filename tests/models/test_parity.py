"""Every family against an implementation that nobody here wrote: logits and gradients at 1e-5, float32."""

import os
from collections.abc import Iterable, Mapping

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from tests.later import Later
from torch import Tensor, nn

from weft.data.batch import Source
from weft.interop.families.base import Family
from weft.interop.families.bert import BERT
from weft.interop.families.gpt2 import GPT2
from weft.interop.families.llama import LLAMA, MISTRAL, QWEN3
from weft.interop.families.seq2seq import MARIAN, T5
from weft.interop.weight_map import NameRule, conversions, module, tensor, their_shapes, to_ours
from weft.models.build import build
from weft.models.config import EncoderDecoder, LMHead, PretrainingHead
from weft.models.presets import bert, gpt, llama, vaswani
from weft.nn.config import Attention, Gated, Plain, RMSNorm
from weft.nn.position_config import DynamicNTK, LinearScaling, Llama3Scaling, Rotary, Sinusoidal, T5Bias

transformers = Later("transformers")

VOCAB, D, HEADS, FF = 61, 32, 4, 48


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def load(ours: nn.Module, theirs: Mapping[str, Tensor], rules: Iterable[NameRule]) -> None:
    """Fill `ours` by a table of names. Every parameter must be named, and every name be there."""
    table = conversions(rules, ours.config)
    used = {name: tuple(theirs[name].shape) for name in their_shapes(table)}
    weights = to_ours(table, used, theirs.__getitem__, location="theirs")
    ours.load_state_dict({name: make() for name, make in weights.items()})


def fill(ours: nn.Module, theirs: nn.Module, family: Family) -> None:
    """The same for a model of transformers, by its family's table."""
    load(ours, theirs.state_dict(), family.rules(ours.config))


def randomise(model: nn.Module) -> None:
    """Weights, gains and biases that would show a swap or an omission."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.15)
            if "norm" in name.lower() or "ln_" in name:
                parameter.add_(1.0 if name.endswith("weight") else 0.0)


def same(ours: Tensor, theirs: Tensor, our_table: nn.Parameter, their_table: nn.Parameter) -> None:
    """Logits agree, and so does the gradient of a loss at the very bottom, where everything above it counts."""
    assert (ours - theirs).abs().max() <= 1e-5
    weight = torch.randn_like(theirs) / theirs.numel() ** 0.5
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    assert our_table.grad is not None
    assert their_table.grad is not None
    assert (our_table.grad - their_table.grad).abs().max() <= 1e-5


def test_gpt2() -> None:
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=D, n_layer=2, n_head=HEADS)
    ).eval()
    randomise(theirs)
    ours = build(gpt(2, D, HEADS, 32, VOCAB)).eval()
    fill(ours, theirs, GPT2)
    tokens = torch.randint(VOCAB, (3, 17))
    same(ours(tokens), theirs(tokens).logits, ours.embedding.weight, theirs.transformer.wte.weight)


SCALINGS = [
    (None, None),
    (LinearScaling(factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    (DynamicNTK(factor=2.0), {"rope_type": "dynamic", "factor": 2.0}),
    (
        Llama3Scaling(factor=8.0, low=1.0, high=4.0, original_context=16),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
]


@pytest.mark.parametrize(("scaling", "their_scaling"), SCALINGS, ids=["plain", "linear", "dynamic-ntk", "llama3"])
def test_llama_with_grouped_queries(scaling: object, their_scaling: dict[str, object] | None) -> None:
    rope = {"rope_theta": 10000.0, "rope_type": "default", **(their_scaling or {})}
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=D,
            intermediate_size=FF,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            max_position_embeddings=32,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            rope_parameters=rope,
        )
    ).eval()
    randomise(theirs)
    settings = llama(2, D, HEADS, FF, 32, vocab_size=VOCAB, kv_heads=2).replace(position=Rotary(scaling=scaling))
    ours = build(settings).eval()
    fill(ours, theirs, LLAMA)
    tokens = torch.randint(VOCAB, (2, 45))  # past the context, where dynamic scaling begins
    same(ours(tokens), theirs(tokens).logits, ours.embedding.weight, theirs.model.embed_tokens.weight)


def test_bert_with_both_pretraining_heads() -> None:
    theirs = transformers.BertForPreTraining(
        transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=D,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=4 * D,
            max_position_embeddings=32,
        )
    ).eval()
    randomise(theirs)
    settings = bert(2, D, HEADS, VOCAB, 32)
    assert isinstance(settings.head, PretrainingHead)
    ours = build(settings).eval()
    fill(ours, theirs, BERT)
    tokens, segments = torch.randint(VOCAB, (3, 13)), torch.randint(2, (3, 13))
    mask = torch.arange(13)[None] < torch.tensor([13, 7, 4])[:, None]
    mine = ours(tokens, segments=segments, mask=mask)
    other = theirs(tokens, attention_mask=mask.long(), token_type_ids=segments)
    assert (mine.next_sentence - other.seq_relationship_logits).abs().max() <= 1e-5
    real = mask[..., None]
    table = theirs.bert.embeddings.word_embeddings.weight
    same(mine.words * real, other.prediction_logits * real, ours.embedding.weight, table)


def test_marian() -> None:
    theirs = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=VOCAB,
            d_model=D,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=FF,
            decoder_ffn_dim=FF,
            max_position_embeddings=32,
            activation_function="swish",
            scale_embedding=True,
            pad_token_id=0,
            decoder_start_token_id=0,
        )
    ).eval()
    randomise_except_positions(theirs)
    theirs.final_logits_bias.normal_()
    ours = build(
        vaswani(2, D, HEADS, FF, 0.0, vocab_size=VOCAB).replace(
            position=Sinusoidal(layout="halves"),
            feedforward=Plain(d_ff=FF, activation="silu"),
            head=LMHead(tied=True, bias=True),
        )
    ).eval()
    fill(ours, theirs, MARIAN)
    source, mask, target = a_pair()
    mine = ours(target, source=Source(source, mask))
    other = theirs(source, attention_mask=mask.long(), decoder_input_ids=target).logits
    same(mine, other, ours.embedding.weight, theirs.model.shared.weight)


def randomise_except_positions(model: nn.Module) -> None:
    kept = {n: p.detach().clone() for n, p in model.named_parameters() if "embed_positions" in n}
    randomise(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in kept:
                parameter.copy_(kept[name])


def a_pair() -> tuple[Tensor, Tensor, Tensor]:
    source, target = torch.randint(1, VOCAB, (3, 11)), torch.randint(1, VOCAB, (3, 7))
    mask = torch.arange(11)[None] < torch.tensor([11, 6, 3])[:, None]
    return source, mask, target


@pytest.mark.parametrize("gated", [False, True], ids=["t5", "t5-v1.1"])
def test_t5(gated: bool) -> None:
    theirs = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCAB,
            d_model=D,
            d_kv=6,
            d_ff=FF,
            num_layers=2,
            num_decoder_layers=3,
            num_heads=HEADS,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=20,
            feed_forward_proj="gated-gelu" if gated else "relu",
            tie_word_embeddings=not gated,  # ties in any case, and scales the output unless configured otherwise
            decoder_start_token_id=0,
        )
    ).eval()
    randomise(theirs)
    ours = build(
        EncoderDecoder(
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
    ).eval()
    fill(ours, theirs, T5)
    source, mask, target = a_pair()
    mine = ours(target, source=Source(source, mask))
    other = theirs(source, attention_mask=mask.long(), decoder_input_ids=target).logits
    same(mine, other, ours.embedding.weight, theirs.shared.weight)


def torch_layers(side: str, last: str) -> tuple[NameRule, ...]:
    """torch.nn.Transformer's names; its last norm is norm2 or norm3."""
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


TORCH = (
    tensor("embedding.weight", "table"),
    *torch_layers("encoder", "norm2"),
    *torch_layers("decoder", "norm3"),
)


def test_the_2017_transformer_in_torch() -> None:
    """Post-norm encoder–decoder with ReLU against torch.nn.Transformer (whose extra last norms are taken off)."""
    shape = {"d_model": D, "nhead": HEADS, "dim_feedforward": FF, "dropout": 0.0, "batch_first": True}
    theirs = nn.Transformer(
        **shape,
        custom_encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(**shape), 2, enable_nested_tensor=False),
        custom_decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(**shape), 2),
    )
    randomise(theirs)
    ours = build(vaswani(2, D, HEADS, FF, 0.0, vocab_size=VOCAB))
    theirs.register_parameter("table", nn.Parameter(torch.randn(VOCAB, D) * 0.15))
    tensors = dict(theirs.state_dict())
    for i in range(2):  # torch keeps q, k and v of the cross-attention in one matrix
        for kind in ("weight", "bias"):
            packed = tensors[f"decoder.layers.{i}.multihead_attn.in_proj_{kind}"]
            tensors |= {f"q{i}.{kind}": packed[:D], f"kv{i}.{kind}": packed[D:]}
    load(ours, tensors, TORCH)
    source, mask, target = a_pair()
    mine = ours(target, source=Source(source, mask))
    embed = ours.encoder.position.embed
    places = torch.arange(11)[None]
    left = embed(theirs.table[source] * D**0.5, places)
    right = embed(theirs.table[target] * D**0.5, places[:, :7])
    causal = torch.ones(7, 7).triu(1).bool()
    features = theirs(left, right, tgt_mask=causal, src_key_padding_mask=~mask, memory_key_padding_mask=~mask)
    same(mine, features @ theirs.table.mT, ours.embedding.weight, theirs.table)


def test_qk_norm_and_own_d_head_against_qwen3() -> None:
    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=D,
            intermediate_size=FF,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            head_dim=12,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
        )
    ).eval()
    randomise(theirs)
    norm = RMSNorm(eps=1e-6)
    base = llama(2, D, HEADS, FF, 32, vocab_size=VOCAB, eps=1e-6)
    ours = build(base.replace(attention=Attention(heads=HEADS, kv_heads=2, d_head=12, qk_norm=norm))).eval()
    fill(ours, theirs, QWEN3)
    tokens = torch.randint(VOCAB, (2, 19))
    same(ours(tokens), theirs(tokens).logits, ours.embedding.weight, theirs.model.embed_tokens.weight)


def test_sliding_window_against_mistral() -> None:
    theirs = transformers.MistralForCausalLM(
        transformers.MistralConfig(
            vocab_size=VOCAB,
            hidden_size=D,
            intermediate_size=FF,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            sliding_window=5,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        )
    ).eval()
    randomise(theirs)
    settings = llama(2, D, HEADS, FF, 32, vocab_size=VOCAB, kv_heads=2)
    ours = build(settings.replace(attention=Attention(heads=HEADS, kv_heads=2, window=5))).eval()
    fill(ours, theirs, MISTRAL)
    tokens = torch.randint(VOCAB, (2, 19))
    same(ours(tokens), theirs(tokens).logits, ours.embedding.weight, theirs.model.embed_tokens.weight)
