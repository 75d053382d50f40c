"""Every family against an implementation that nobody here wrote: logits and gradients at 1e-5, float32."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from torch import Tensor, nn

from weft.data.batch import Source
from weft.models.config import Decoder, Encoder, EncoderDecoder, LMHead, PretrainingHead
from weft.models.presets import bert, gpt, llama, vaswani
from weft.nn.config import (
    Attention,
    DynamicNTK,
    Gated,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    Plain,
    RMSNorm,
    Rotary,
    Sinusoidal,
    T5Bias,
)

VOCAB, D, HEADS, FF = 61, 32, 4, 48
Names = dict[str, str | tuple[str, ...]]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def load(ours: nn.Module, theirs: nn.Module, names: Names, transposed: bool = False) -> None:
    """Fill `ours` from `theirs`: our name → their name, or their names stacked. Every parameter must be named."""
    given = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    missing = {name for name, _ in ours.named_parameters()} ^ set(names)
    assert not missing, f"named on one side only: {sorted(missing)}"
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parts = (names[name],) if isinstance(names[name], str) else names[name]
            tensor = torch.cat([given[part] for part in parts])
            flip = transposed and tensor.dim() == 2 and ".blocks." in name  # GPT-2 keeps its matrices (in, out)
            parameter.copy_((tensor.mT if flip else tensor).reshape(parameter.shape))


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


def numbered(layers: int, table: Names) -> Names:
    """`table` once for every layer, with {} the layer's number."""
    return {
        ours.format(i): theirs.format(i) if isinstance(theirs, str) else tuple(t.format(i) for t in theirs)
        for i in range(layers)
        for ours, theirs in table.items()
    }


def both(ours: str, theirs: str) -> Names:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


def test_gpt2() -> None:
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=D, n_layer=2, n_head=HEADS)
    ).eval()
    randomise(theirs)
    ours = gpt(2, D, HEADS, 32, VOCAB).build().eval()
    block, h = "decoder.blocks.{}", "transformer.h.{}"
    names: Names = {
        "embedding.weight": "transformer.wte.weight",
        "decoder.position.weight": "transformer.wpe.weight",
        **both("decoder.norm", "transformer.ln_f"),
        **numbered(
            2,
            both(f"{block}.attention_skip.norm", f"{h}.ln_1")
            | both(f"{block}.attention.qkv", f"{h}.attn.c_attn")
            | both(f"{block}.attention.out", f"{h}.attn.c_proj")
            | both(f"{block}.feedforward_skip.norm", f"{h}.ln_2")
            | both(f"{block}.feedforward.up", f"{h}.mlp.c_fc")
            | both(f"{block}.feedforward.down", f"{h}.mlp.c_proj"),
        ),
    }
    load(ours, theirs, names, transposed=True)
    tokens = torch.randint(VOCAB, (3, 17))
    same(ours(tokens), theirs(tokens).logits, ours.embedding.weight, theirs.transformer.wte.weight)


def llama_names(layers: int) -> Names:
    block, layer = "decoder.blocks.{}", "model.layers.{}"
    return {
        "embedding.weight": "model.embed_tokens.weight",
        "decoder.norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        **numbered(
            layers,
            {
                f"{block}.attention_skip.norm.weight": f"{layer}.input_layernorm.weight",
                f"{block}.attention.qkv.weight": tuple(f"{layer}.self_attn.{x}_proj.weight" for x in "qkv"),
                f"{block}.attention.out.weight": f"{layer}.self_attn.o_proj.weight",
                f"{block}.feedforward_skip.norm.weight": f"{layer}.post_attention_layernorm.weight",
                f"{block}.feedforward.gate_up.weight": (
                    f"{layer}.mlp.gate_proj.weight",
                    f"{layer}.mlp.up_proj.weight",
                ),
                f"{block}.feedforward.down.weight": f"{layer}.mlp.down_proj.weight",
            },
        ),
    }


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
    settings = llama(2, D, HEADS, FF, 32, VOCAB, kv_heads=2).replace(position=Rotary(scaling=scaling))
    ours = settings.build().eval()
    load(ours, theirs, llama_names(2))
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
    ours = settings.build().eval()
    block, layer = "encoder.blocks.{}", "bert.encoder.layer.{}"
    qkv = {
        f"{block}.attention.qkv.{kind}": tuple(f"{layer}.attention.self.{x}.{kind}" for x in ("query", "key", "value"))
        for kind in ("weight", "bias")
    }
    names: Names = {
        "embedding.weight": "bert.embeddings.word_embeddings.weight",
        "segments.weight": "bert.embeddings.token_type_embeddings.weight",
        "encoder.position.weight": "bert.embeddings.position_embeddings.weight",
        **both("encoder.embedding_norm", "bert.embeddings.LayerNorm"),
        **both("output.words.dense", "cls.predictions.transform.dense"),
        **both("output.words.norm", "cls.predictions.transform.LayerNorm"),
        "output.words.bias": "cls.predictions.bias",
        **both("output.follows.pooler.dense", "bert.pooler.dense"),
        **both("output.follows.out", "cls.seq_relationship"),
        **numbered(
            2,
            qkv
            | both(f"{block}.attention.out", f"{layer}.attention.output.dense")
            | both(f"{block}.attention_skip.norm", f"{layer}.attention.output.LayerNorm")
            | both(f"{block}.feedforward.up", f"{layer}.intermediate.dense")
            | both(f"{block}.feedforward.down", f"{layer}.output.dense")
            | both(f"{block}.feedforward_skip.norm", f"{layer}.output.LayerNorm"),
        ),
    }
    load(ours, theirs, names)
    tokens, segments = torch.randint(VOCAB, (3, 13)), torch.randint(2, (3, 13))
    mask = torch.arange(13)[None] < torch.tensor([13, 7, 4])[:, None]
    mine = ours(tokens, segments=segments, mask=mask)
    other = theirs(tokens, attention_mask=mask.long(), token_type_ids=segments)
    assert (mine.follows - other.seq_relationship_logits).abs().max() <= 1e-5
    real = mask[..., None]
    table = theirs.bert.embeddings.word_embeddings.weight
    same(mine.words * real, other.prediction_logits * real, ours.embedding.weight, table)


def encoder_decoder_names(
    layers: int, theirs: str, norms: tuple[str, str, str], ff: tuple[str, str], attention: tuple[str, str, str]
) -> Names:
    """The names that Marian's kind of encoder–decoder has, with biases."""
    self_norm, cross_norm, ff_norm = norms
    own, cross, out = attention
    names: Names = {}
    for side in ("encoder", "decoder"):
        block, layer = f"{side}.blocks.{{}}", f"{theirs}{side}.layers.{{}}"
        table: Names = {}
        for kind in ("weight", "bias"):
            table[f"{block}.attention.qkv.{kind}"] = tuple(f"{layer}.{own}.{x}_proj.{kind}" for x in "qkv")
            if side == "decoder":
                table[f"{block}.cross.q.{kind}"] = f"{layer}.{cross}.q_proj.{kind}"
                table[f"{block}.cross.kv.{kind}"] = tuple(f"{layer}.{cross}.{x}_proj.{kind}" for x in "kv")
        table |= both(f"{block}.attention.out", f"{layer}.{own}.{out}")
        table |= both(f"{block}.attention_skip.norm", f"{layer}.{self_norm}")
        table |= both(f"{block}.feedforward.up", f"{layer}.{ff[0]}")
        table |= both(f"{block}.feedforward.down", f"{layer}.{ff[1]}")
        table |= both(f"{block}.feedforward_skip.norm", f"{layer}.{ff_norm}")
        if side == "decoder":
            table |= both(f"{block}.cross.out", f"{layer}.{cross}.{out}")
            table |= both(f"{block}.cross_skip.norm", f"{layer}.{cross_norm}")
        names |= numbered(layers, table)
    return names


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
    ours = (
        vaswani(2, D, HEADS, FF, 0.0, VOCAB)
        .replace(
            position=Sinusoidal(layout="halves"),
            feedforward=Plain(d_ff=FF, activation="silu"),
            head=LMHead(tied=True, bias=True),
        )
        .build()
        .eval()
    )
    names = encoder_decoder_names(
        2,
        "model.",
        ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
        ("fc1", "fc2"),
        ("self_attn", "encoder_attn", "out_proj"),
    )
    names |= {"embedding.weight": "model.shared.weight", "output.bias": "final_logits_bias"}
    load(ours, theirs, names)
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
            tie_word_embeddings=not gated,  # ties in any case, and scales the output unless told otherwise
            decoder_start_token_id=0,
        )
    ).eval()
    randomise(theirs)
    ours = (
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
        .build()
        .eval()
    )
    names: Names = {"embedding.weight": "shared.weight"}
    for side, layers in (("encoder", 2), ("decoder", 3)):
        block, layer = f"{side}.blocks.{{}}", f"{side}.block.{{}}.layer"
        table: Names = {
            f"{block}.attention.qkv.weight": tuple(f"{layer}.0.SelfAttention.{x}.weight" for x in "qkv"),
            f"{block}.attention.out.weight": f"{layer}.0.SelfAttention.o.weight",
            f"{block}.attention_skip.norm.weight": f"{layer}.0.layer_norm.weight",
        }
        last = 1 if side == "encoder" else 2
        if side == "decoder":
            table[f"{block}.cross.q.weight"] = f"{layer}.1.EncDecAttention.q.weight"
            table[f"{block}.cross.kv.weight"] = tuple(f"{layer}.1.EncDecAttention.{x}.weight" for x in "kv")
            table[f"{block}.cross.out.weight"] = f"{layer}.1.EncDecAttention.o.weight"
            table[f"{block}.cross_skip.norm.weight"] = f"{layer}.1.layer_norm.weight"
        dense = f"{layer}.{last}.DenseReluDense"
        if gated:
            table[f"{block}.feedforward.gate_up.weight"] = (f"{dense}.wi_0.weight", f"{dense}.wi_1.weight")
        else:
            table[f"{block}.feedforward.up.weight"] = f"{dense}.wi.weight"
        table[f"{block}.feedforward.down.weight"] = f"{dense}.wo.weight"
        table[f"{block}.feedforward_skip.norm.weight"] = f"{layer}.{last}.layer_norm.weight"
        names |= numbered(layers, table)
        names[f"{side}.norm.weight"] = f"{side}.final_layer_norm.weight"
        names[f"{side}.position.weight"] = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    load(ours, theirs, names)
    source, mask, target = a_pair()
    mine = ours(target, source=Source(source, mask))
    other = theirs(source, attention_mask=mask.long(), decoder_input_ids=target).logits
    same(mine, other, ours.embedding.weight, theirs.shared.weight)


def test_the_2017_transformer_in_torch() -> None:
    """Post-norm encoder–decoder with ReLU against torch.nn.Transformer (whose extra last norms are taken off)."""
    shape = {"d_model": D, "nhead": HEADS, "dim_feedforward": FF, "dropout": 0.0, "batch_first": True}
    theirs = nn.Transformer(
        **shape,
        custom_encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(**shape), 2, enable_nested_tensor=False),
        custom_decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(**shape), 2),
    )
    randomise(theirs)
    ours = vaswani(2, D, HEADS, FF, 0.0, VOCAB).build()
    names: Names = {"embedding.weight": "table"}
    theirs.register_parameter("table", nn.Parameter(torch.randn(VOCAB, D) * 0.15))
    for side in ("encoder", "decoder"):
        block, layer = f"{side}.blocks.{{}}", f"{side}.layers.{{}}"
        table: Names = {}
        for kind in ("weight", "bias"):
            table[f"{block}.attention.qkv.{kind}"] = f"{layer}.self_attn.in_proj_{kind}"
        table |= both(f"{block}.attention.out", f"{layer}.self_attn.out_proj")
        table |= both(f"{block}.attention_skip.norm", f"{layer}.norm1")
        table |= both(f"{block}.feedforward.up", f"{layer}.linear1")
        table |= both(f"{block}.feedforward.down", f"{layer}.linear2")
        table |= both(f"{block}.feedforward_skip.norm", f"{layer}.norm{3 if side == 'decoder' else 2}")
        names |= numbered(2, table)
    cross = numbered(
        2,
        both("decoder.blocks.{}.cross.out", "decoder.layers.{}.multihead_attn.out_proj")
        | both("decoder.blocks.{}.cross_skip.norm", "decoder.layers.{}.norm2"),
    )
    for i in range(2):  # torch keeps q, k and v of the cross-attention in one matrix
        for kind in ("weight", "bias"):
            packed = getattr(theirs.decoder.layers[i].multihead_attn, f"in_proj_{kind}")
            for part, rows in (("q", slice(0, D)), ("kv", slice(D, 3 * D))):
                theirs.register_buffer(f"{part}{i}{kind}", packed.detach()[rows].clone())
                cross[f"decoder.blocks.{i}.cross.{part}.{kind}"] = f"{part}{i}{kind}"
    load(ours, theirs, names | cross)
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
    base = llama(2, D, HEADS, FF, 32, VOCAB, eps=1e-6)
    ours = base.replace(attention=Attention(heads=HEADS, kv_heads=2, d_head=12, qk_norm=norm)).build().eval()
    names = llama_names(2) | numbered(
        2,
        {
            "decoder.blocks.{}.attention.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
            "decoder.blocks.{}.attention.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
        },
    )
    load(ours, theirs, names)
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
    settings = llama(2, D, HEADS, FF, 32, VOCAB, kv_heads=2)
    ours = settings.replace(attention=Attention(heads=HEADS, kv_heads=2, window=5)).build().eval()
    load(ours, theirs, llama_names(2))
    tokens = torch.randint(VOCAB, (2, 19))
    same(ours(tokens), theirs(tokens).logits, ours.embedding.weight, theirs.model.embed_tokens.weight)


def test_names_are_all_used() -> None:
    """The loader of these tests refuses a parameter that no name fills, so that parity cannot hold by accident."""
    ours = Decoder(
        vocab_size=VOCAB,
        layers=1,
        d_model=D,
        attention=Attention(heads=HEADS),
        feedforward=Plain(d_ff=FF),
        norm=LayerNorm(),
        position=Sinusoidal(),
    ).build()
    with pytest.raises(AssertionError, match="named on one side only"):
        load(ours, nn.Linear(2, 2), {"embedding.weight": "weight"})
    assert not isinstance(ours, Encoder)
