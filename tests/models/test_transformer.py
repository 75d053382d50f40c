"""Transformers of all kinds: the stepping contract, masks, heads, and refused settings."""

import math
import re
from typing import Any

import pytest
import torch
from tests.models.contract import PaddedSource, check_contract, check_step_equals_forward
from tests.pairwise import each_once
from tests.spread import spread
from torch import nn

from weft.config import validate
from weft.errors import ConfigError, ModelError
from weft.explain.capture import capture
from weft.models import head_config
from weft.models.build import build as build_model
from weft.models.config import Decoder, Encoder, EncoderDecoder, LayerKind
from weft.models.head_config import LMHead, MaskedLMHead
from weft.models.presets import bert, gpt, llama, vaswani
from weft.models.transformer import Transformer
from weft.nn import position_config
from weft.nn.config import Attention, Gated, LayerNorm, NormalInit, Plain, RMSNorm
from weft.nn.mask import Mask
from weft.nn.position import build as build_position
from weft.nn.position_config import (
    Concatenated,
    Disentangled,
    Learned,
    NoPosition,
    Relative,
    Rotary,
    Sinusoidal,
    T5Bias,
    Tempered,
)
from weft.nn.scaled_dot_product import Probabilities

VOCAB = 29
POSITIONS = [
    NoPosition(),
    Sinusoidal(),
    Sinusoidal(layout="tensor2tensor"),
    Concatenated(width=10),
    Learned(),
    Relative(max_distance=3),
    Rotary(),
    Rotary(pairs="adjacent", scaling=position_config.LinearScaling(factor=2.0)),
    T5Bias(buckets=8, max_distance=12),
    position_config.ALiBi(),
    position_config.ALiBi(factor=0.5, rounded=True),
    Disentangled(buckets=4, max_distance=12),
    Disentangled(buckets=4, logarithmic=False, separate=True),
]


def decoder(position: Any = None, **changes: Any) -> Decoder:
    """Small decoder with weights large enough for mistakes to show."""
    attention = Attention(heads=4, kv_heads=4 if isinstance(position, Relative | Disentangled) else 2)
    fields: dict[str, Any] = {"vocab_size": VOCAB, "context": 32, "layers": 2, "d_model": 24, "attention": attention}
    fields |= {"feedforward": Gated(d_ff=32), "norm": RMSNorm(), "position": position or Rotary()}
    return Decoder(**fields | {"init": NormalInit(std=0.2)} | changes)


def build(settings: Decoder | Encoder | EncoderDecoder, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return build_model(settings).eval()


@pytest.mark.parametrize(
    ("position", "window"), each_once(POSITIONS, [None, 3]), ids=lambda value: getattr(value, "kind", value)
)
def test_step_equals_forward_for_every_position(position: Any, window: int | None) -> None:
    settings = decoder(position)
    settings = settings.replace(attention=settings.attention.replace(window=window))
    check_step_equals_forward(build(settings), VOCAB)


DECODERS = {
    "gpt": gpt(2, 24, 4, context=32, vocab_size=VOCAB),
    "llama": llama(2, 24, 4, d_ff=32, context=32, vocab_size=VOCAB, kv_heads=1),
    "post-norm": decoder(placement="post", norm=LayerNorm(), feedforward=Plain(d_ff=40, activation="gelu")),
    "no norm": decoder(placement="none", init=NormalInit(std=0.1)),
    "no residual": decoder(placement="pre", residual=False),
    "qk-norm": decoder(attention=Attention(heads=3, d_head=10, qk_norm=RMSNorm(), bias="qkv")),
    "scaled": decoder(embedding_scale=True, embedding_norm=True, head=LMHead(tied=False, bias=True)),
    "parallel": decoder(sublayers="parallel", position=Rotary(fraction=2 / 3), residual_scale=0.5),
    "parallel, two norms": decoder(sublayers="parallel-two-norms", norm=LayerNorm(gain=False, bias=False)),
    "sandwich, softcapped": decoder(
        placement="sandwich", attention=Attention(heads=4, softcap=0.5), head=LMHead(softcap=2.0), embedding_scale=3.0
    ),
    "norms after": decoder(
        placement="res-post", attention=Attention(heads=4, kv_heads=2, qk_norm=RMSNorm(), qk_norm_over="heads")
    ),
    "layers that differ": decoder(
        layers=4,
        pattern=(LayerKind(window=3, position=Rotary(base=50.0)), LayerKind(position=NoPosition()), LayerKind()),
    ),
    "chunks, tempered": decoder(
        layers=3,
        attention=Attention(heads=4, kv_heads=2, qk_norm=RMSNorm(gain=False), qk_norm_rotated=True),
        pattern=(LayerKind(chunk=4), LayerKind(chunk=3, position=Tempered(growth=0.5, interval=3)), LayerKind()),
    ),
    "narrow embeddings": decoder(d_embedding=10, position=Learned(), embedding_norm=True),
    "narrow embeddings, untied": decoder(d_embedding=10, placement="post", head=LMHead(tied=False, scale=0.5)),
    "norms of each head": decoder(
        embedding_norm=True,
        first_norm=False,
        attention=Attention(heads=4, kv_heads=2, qk_norm=LayerNorm(), qk_norm_over="each-head"),
    ),
    "wide values": decoder(attention=Attention(heads=4, kv_heads=2, d_v=9, bias="all", qk_norm=RMSNorm())),
    "narrow values, no heads shared": decoder(attention=Attention(heads=3, d_head=8, d_v=5, window=3)),
    "concatenated, untied": decoder(position=Concatenated(), embedding_norm=True, head=LMHead(tied=False, bias=True)),
    "swish": decoder(feedforward=Gated(d_ff=32, beta=1.7)),
    "stretched": decoder(position=Rotary(scaling=position_config.YaRN(factor=4.0, original_context=8))),
}


@pytest.mark.parametrize("name", spread(DECODERS, 11))
def test_every_decoder_keeps_the_contract(name: str) -> None:
    check_contract(build(DECODERS[name]), VOCAB)


@torch.no_grad()
def test_a_pattern_gives_each_layer_its_own_window() -> None:
    """Only tokens within reach of both windows, one after the other, change the last token's logits."""
    model = build(decoder(layers=2, pattern=(LayerKind(window=3), LayerKind(window=2))))
    tokens = torch.randint(VOCAB, (1, 12))
    expected = model(tokens)[0, -1]
    for index in range(11):
        changed = tokens.clone()
        changed[0, index] = (changed[0, index] + 1) % VOCAB
        assert bool((model(changed)[0, -1] != expected).any()) == (index >= 11 - 3)  # 2 tokens back, then 1


@torch.no_grad()
def test_a_token_sees_its_own_chunk() -> None:
    model = build(decoder(layers=1, pattern=(LayerKind(chunk=4),)))
    tokens = torch.randint(VOCAB, (1, 12))
    for last, chunk in ((7, range(4, 8)), (8, range(8, 9)), (10, range(8, 11))):
        expected = model(tokens)[0, last]
        for index in range(last):
            changed = tokens.clone()
            changed[0, index] = (changed[0, index] + 1) % VOCAB
            assert bool((model(changed)[0, last] != expected).any()) == (index in chunk)


@torch.no_grad()
def test_chunks_begin_with_their_document() -> None:
    model = build(DECODERS["chunks, tempered"])
    one, two = torch.randint(VOCAB, (1, 6)), torch.randint(VOCAB, (1, 9))
    documents = torch.tensor([[0] * 6 + [1] * 9, [1] * 15])
    positions = torch.tensor([[*range(6), *range(9)], [*range(15)]])
    packed = model(torch.cat((one, two), 1).expand(2, -1), documents=documents, positions=positions)
    torch.testing.assert_close(packed[:1], torch.cat((model(one), model(two)), 1))
    torch.testing.assert_close(packed[1:], model(torch.cat((one, two), 1)))


def test_tempered_queries_follow_the_formula() -> None:
    position = build_position(Tempered(growth=0.5, interval=3), decoder().sizes(1, causal=True))
    factors = position.scale_queries(torch.ones(1, 1, 7, 1), torch.arange(7)[None]).flatten()
    expected = [1 + 0.5 * math.log(1 + (n + 1) // 3) for n in range(7)]
    torch.testing.assert_close(factors, torch.tensor(expected))


@torch.no_grad()
@pytest.mark.parametrize("sublayers", ["parallel", "parallel-two-norms"])
def test_parallel_sublayers_are_summed(sublayers: str) -> None:
    """x + attention(n(x)) + feed-forward(m(x)), computed with the parts of the model."""
    model = build(decoder(layers=1, sublayers=sublayers))
    stack, indices = model.decoder, torch.arange(7)[None]
    assert stack is not None and stack.norm is not None
    block: Any = stack.blocks[0]
    tokens = torch.randint(VOCAB, (2, 7))
    x = model.embedding(tokens)
    (mask,) = stack.masks(Mask(causal=True), indices, indices, dtype=x.dtype)
    h = block.attention_skip.norm(x)
    feedforward_input = block.feedforward_skip.norm(x) if sublayers == "parallel-two-norms" else h
    expected = stack.norm(x + block.attention(h, mask) + block.feedforward(feedforward_input))
    torch.testing.assert_close(model.features(tokens), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sublayers": "parallel", "placement": "post"}, "needs placement = 'pre', not 'post'"),
        ({"pattern": [{"window": 3}], "attention": {"heads": 4, "window": 2}}, "with a pattern, set the window"),
        ({"position": Learned(), "pattern": [{"position": Rotary()}]}, "only rotary or no positions can differ"),
        ({"pattern": [{"window": 3, "chunk": 4}]}, "has a window or chunks; leave out one"),
        (
            {
                "attention": {"heads": 4, "qk_norm": {"kind": "rms"}, "qk_norm_rotated": True},
                "pattern": [{}, {"position": {"kind": "none"}}],
            },
            "layers without rotation have no such norm; set its gain = false",
        ),
        ({"norm": {"kind": "layer", "gain": False}}, "needs bias = false as well"),
        ({"norm": {"kind": "rms", "gain": False, "offset": 1}}, "added to the gain, and gain = false"),
        ({"position": Rotary(fraction=0.5), "attention": {"heads": 4, "d_head": 6}}, "of d_head = 6 is 3"),
        ({"embedding_scale": -2}, "-2: expected true, false, or a number above 0"),
        ({"attention": {"heads": 5}}, "attention.heads = 5 does not divide d_model = 24"),
        ({"attention": {"heads": 4, "kv_heads": 3}}, "kv_heads = 3 does not divide heads = 4"),
        ({"attention": {"heads": 8}}, "d_head = 3 is odd"),
        ({"layers": 0}, "layers = 0"),
        ({"position": {"kind": "rotory"}}, "did you mean 'rotary'"),
        ({"norm": {"kind": "rms", "epsilon": 1}}, "norm.epsilon: unknown key"),
        ({"dropout": 1.5}, "dropout = 1.5"),
        ({"attention": {"heads": 4, "d_v": 0}}, "attention.d_v = 0"),
        ({"attention": {"heads": 4, "d_v": 7}, "position": Relative()}, "need attention.d_v = d_head = 6, not 7"),
        ({"feedforward": {"kind": "plain", "d_ff": 9, "beta": 2}}, "needs feedforward.activation = 'silu', not 'relu'"),
        ({"feedforward": {"kind": "gated", "d_ff": 9, "beta": 0}}, "feedforward.gated.beta = 0|feedforward.beta = 0"),
        ({"position": {"kind": "concatenated", "width": 24}}, "leaves no coordinate of d_model = 24"),
        ({"position": {"kind": "concatenated", "width": 5}}, "position.width = 5 is odd"),
        ({"position": {"kind": "concatenated"}, "d_embedding": 6}, "decide the width of the embeddings"),
    ],
)
def test_invalid_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(Decoder, {**decoder().model_dump(exclude_none=True), **change})


def padded_source(vocab_size: int = VOCAB) -> PaddedSource:
    torch.manual_seed(5)
    return PaddedSource(torch.randint(vocab_size, (3, 6)), torch.arange(6)[None] < torch.tensor([6, 4, 1])[:, None])


@pytest.mark.parametrize(
    "position", [Sinusoidal(), Concatenated(), T5Bias(buckets=8, max_distance=12), Rotary()], ids=lambda p: p.kind
)
def test_encoder_decoder_keeps_the_contract(position: Any) -> None:
    d_v = 11 if isinstance(position, Rotary) else None
    changes = {"position": position, "source_vocab_size": 17, "encoder_layers": 1}
    changes["attention"] = Attention(heads=4, bias="all", d_v=d_v)
    model = build(vaswani(2, 24, 4, d_ff=32, dropout=0.0, vocab_size=VOCAB, **changes))
    check_contract(model, VOCAB, padded_source(17))


@torch.no_grad()
def test_concatenated_positions_are_beside_the_embeddings() -> None:
    """The first layer reads [x_i ; p_i]: 16 coordinates of the token's row, then 4 sines and 4 cosines in turn."""
    model: Any = build(decoder(position=Concatenated(width=8, base=100.0, amplitude=0.5)))
    tokens = torch.randint(VOCAB, (2, 7))
    assert model.embedding.weight.shape == (VOCAB, 16) and model.output.dense.weight.shape == (16, 24)
    logits, features = model(tokens), model.features(tokens)
    waves = [[f(i / 100.0 ** (2 * k / 8)) for k in range(4) for f in (math.sin, math.cos)] for i in range(7)]
    expected = torch.cat((model.embedding.weight[tokens], 0.5 * torch.tensor(waves).expand(2, -1, -1)), dim=-1)
    torch.testing.assert_close(model.decoder.begin(model.embedding(tokens), torch.arange(7)[None], None), expected)
    torch.testing.assert_close(logits, features @ model.output.dense.weight.T @ model.embedding.weight.T)


def test_source_padding_changes_nothing() -> None:
    model = build(vaswani(2, 24, 4, d_ff=32, dropout=0.0, vocab_size=VOCAB))
    source, tokens = padded_source(), torch.randint(VOCAB, (3, 5))
    assert source.mask is not None
    other = PaddedSource(torch.where(source.mask, source.tokens, 3), source.mask)
    assert torch.equal(model(tokens, source=source), model(tokens, source=other))


@pytest.mark.parametrize("position", [p for p in POSITIONS if p.kind != "none"], ids=lambda p: p.kind)
def test_encoder_padding_changes_nothing(position: Any) -> None:
    settings = bert(2, 24, 4, vocab_size=VOCAB, context=32).replace(position=position, dropout=0.0, head=MaskedLMHead())
    model = build(settings)
    tokens = torch.randint(VOCAB, (2, 9))
    mask = torch.arange(9)[None] < torch.tensor([9, 5])[:, None]
    together = model(tokens, mask=mask)
    torch.testing.assert_close(together[1, :5], model(tokens[1:, :5])[0], atol=1e-5, rtol=1e-5)
    changed = model(torch.where(mask, tokens, 1), mask=mask)
    assert torch.equal(together[mask], changed[mask])


@pytest.mark.parametrize("position", POSITIONS, ids=lambda p: p.kind)
def test_packed_documents_never_see_each_other(position: Any) -> None:
    model = build(decoder(position))
    first, second = torch.randint(VOCAB, (1, 5)), torch.randint(VOCAB, (1, 7))
    packed = torch.cat((first, second), dim=1)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    together = model(packed, documents=documents, positions=positions)
    torch.testing.assert_close(together[:, :5], model(first), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together[:, 5:], model(second), atol=1e-5, rtol=1e-5)


def test_watching_the_probabilities_changes_nothing_and_rows_sum_to_one() -> None:
    model = build(decoder())
    tokens = torch.randint(VOCAB, (2, 9))
    fast = model(tokens)
    seen: list[torch.Tensor] = []
    tap = model.get_submodule("decoder.blocks.1.attention.probabilities")
    assert isinstance(tap, Probabilities)
    stop = tap.watch(seen.append)
    torch.testing.assert_close(model(tokens), fast, atol=1e-5, rtol=1e-5)
    stop()
    assert seen[0].shape == (2, 4, 9, 9)
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(2, 4, 9))
    assert seen[0].triu(1).abs().max() == 0
    model(tokens)
    assert len(seen) == 1


HEADS: list[tuple[Any, tuple[int, ...]]] = [
    (head_config.NextSentenceHead(), (3, 2)),
    (head_config.ClassificationHead(labels=4), (3, 4)),
    (head_config.ClassificationHead(labels=1, pooling="mean", pooler=False), (3, 1)),
    (head_config.ClassificationHead(labels=2, pooling="last"), (3, 2)),
    (head_config.TaggingHead(labels=5), (3, 7, 5)),
    (head_config.EmbeddingHead(), (3, 24)),
    (head_config.EmbeddingHead(pooling="first", normalise=False), (3, 24)),
]


@pytest.mark.parametrize(("head", "shape"), HEADS)
def test_heads(head: Any, shape: tuple[int, ...]) -> None:
    model = build(bert(2, 24, 4, vocab_size=VOCAB, context=32).replace(head=head))
    tokens = torch.randint(VOCAB, (3, 7))
    mask = torch.arange(7)[None] < torch.tensor([7, 4, 1])[:, None]
    out = model(tokens, mask=mask)
    assert out.shape == shape
    alone = model(tokens[1:2, :4])
    torch.testing.assert_close(out[1:2, :4] if len(shape) == 3 else out[1:2], alone, atol=1e-5, rtol=1e-5)
    if isinstance(head, head_config.EmbeddingHead) and head.normalise:
        torch.testing.assert_close(out.norm(dim=-1), torch.ones(3))


@pytest.mark.parametrize(
    "settings",
    [decoder(), decoder(head=LMHead(tied=False, bias=True, scale=0.5)), bert(1, 24, 4, vocab_size=VOCAB, context=32)],
)
def test_readout_has_the_factors_of_the_logits(settings: Decoder | Encoder) -> None:
    model, tokens = build(settings), torch.randint(VOCAB, (2, 5))
    readout, output = model.readout(model.features(tokens)), model(tokens)
    logits = output.words if hasattr(output, "words") else output
    torch.testing.assert_close(nn.functional.linear(readout.features, readout.weight, readout.bias), logits)
    torch.testing.assert_close(readout.logits(), logits)


def test_tied_embeddings_are_one_tensor() -> None:
    assert "output.weight" not in build(decoder()).state_dict()
    assert "output.weight" in build(decoder(head=LMHead(tied=False))).state_dict()


def test_dropout_acts_only_in_training() -> None:
    model = build(gpt(2, 24, 4, context=32, vocab_size=VOCAB, dropout=0.5))
    tokens = torch.randint(VOCAB, (2, 6))
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_invalid_inputs_are_refused_by_value() -> None:
    model = build(decoder(Learned()))
    with pytest.raises(ModelError, match="33 tokens exceed the 32 positions"):
        model(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(ModelError, match="40 tokens exceed the 32 positions"):
        model.start(1, 40)
    for wrong in (VOCAB, -1):
        with pytest.raises(ModelError, match=f"token id {wrong} is outside the vocabulary of {VOCAB}"):
            model(torch.tensor([[1, wrong]]))
    with pytest.raises(ModelError, match="exceed the 4"):
        model.step(torch.zeros(1, 5, dtype=torch.long), model.start(1, 4))
    with pytest.raises(ModelError, match="cannot generate"):
        build(bert(1, 24, 4, vocab_size=VOCAB, context=32)).start(1, 8)
    with pytest.raises(ModelError, match="needs a source; none was given"):
        build(vaswani(1, 24, 4, d_ff=32, dropout=0.0, vocab_size=VOCAB))(torch.zeros(1, 2, dtype=torch.long))


# ---- fewer parameters


def _unshared(shared: Transformer, times: int) -> Transformer:
    """Equivalent encoder with a separate block for each layer."""
    model = build(shared.config.replace(distinct_layers=None))
    weights = {name: value for name, value in shared.state_dict().items() if ".blocks." not in name}
    for name, value in shared.state_dict().items():
        if ".blocks." in name:
            before, block, after = re.split(r"(?<=\.blocks\.)(\d+)", name)
            weights |= {f"{before}{times * int(block) + turn}{after}": value for turn in range(times)}
    model.load_state_dict(weights)
    return model


SMALL_BERT = bert(6, 16, 2, vocab_size=23, context=12).replace(head=MaskedLMHead(), dropout=0.0)


def test_layers_that_share_weights_repeat_the_block() -> None:
    """Logits, gradients (summed over the layers) and captured activations of each layer."""
    shared = build(SMALL_BERT.replace(distinct_layers=2))
    whole, tokens = _unshared(shared, 3), torch.randint(23, (2, 9))
    assert shared.encoder is not None and len(shared.encoder.blocks) == 2
    names = [f"encoder.{layer}.residual" for layer in range(6)] + ["encoder.4.attention.probabilities"]
    with capture(shared, *names) as mine, capture(whole, *names) as theirs:
        first, second = shared(tokens), whole(tokens)
    assert torch.equal(first, second)
    assert all(torch.equal(mine[name], theirs[name]) for name in names)
    first.square().sum().backward()
    second.square().sum().backward()
    for name, weight in shared.named_parameters():
        if ".blocks.1." in name:
            copies = [whole.get_parameter(name.replace(".blocks.1.", f".blocks.{layer}.")) for layer in (3, 4, 5)]
            expected = torch.stack([copy.grad for copy in copies if copy.grad is not None]).sum(0)
            torch.testing.assert_close(weight.grad, expected, rtol=1e-3, atol=1e-4)
    change = {"encoder.1.residual": lambda x: x * 0}
    with torch.no_grad(), capture(shared, replace=change), capture(whole, replace=change):
        assert torch.equal(shared(tokens), whole(tokens))


def test_narrow_embeddings_are_projected() -> None:
    """Tables, norm and logits are d_embedding wide; the layers are d_model wide."""
    model: Any = build(SMALL_BERT.replace(layers=1, d_embedding=6))
    tokens = torch.randint(23, (2, 9))
    stack, head = model.encoder, model.output
    x = model.embedding.weight[tokens] + stack.position.weight[:9] + model.segments.weight[0]
    x = stack.embedding_norm(x) @ stack.projection.weight.T + stack.projection.bias
    with capture(model, "encoder.projection") as seen:
        logits = model(tokens)
    torch.testing.assert_close(seen["encoder.projection"], x.detach())
    features = model.features(tokens)
    narrow = head.norm(nn.functional.gelu(features @ head.dense.weight.T + head.dense.bias))
    assert narrow.shape == (2, 9, 6)
    torch.testing.assert_close(logits, narrow @ model.embedding.weight.T + head.bias)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distinct_layers": 4}, "distinct_layers = 4 does not divide layers = 6"),
        ({"d_embedding": 5, "position": {"kind": "sinusoidal"}}, "pair sines with cosines, but d_model = 5 is odd"),
        ({"first_norm": False, "placement": "post"}, "first_norm = false needs placement = 'pre'"),
        ({"d_embedding": 8, "head": MaskedLMHead(dense=False)}, "needs embeddings of width d_model = 16, not 8"),
    ],
)
def test_invalid_encoders_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SMALL_BERT.replace(**changes)


def test_replaced_tokens_have_a_logit_each() -> None:
    model: Any = build(SMALL_BERT.replace(head=head_config.ReplacedHead(activation="gelu")))
    tokens = torch.randint(23, (2, 9))
    features, head = model.features(tokens), model.output
    hidden = nn.functional.gelu(features @ head.dense.weight.T + head.dense.bias)
    torch.testing.assert_close(model(tokens), (hidden @ head.out.weight.T + head.out.bias)[..., 0])
