"""Looking inside a model shows what it computes, changes nothing, and can replace it."""

import math

import pytest
import torch
from tests.explain.small import small

from weft.decode.config import Sampling
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.errors import ModelError
from weft.explain.capture import capture, without_head
from weft.explain.reading import SourceTokens
from weft.models.build import build
from weft.models.config import Bahdanau, Decoder, Encoder, EncoderDecoder
from weft.nn.config import Attention, RMSNorm
from weft.nn.position_config import ALiBi, Relative, Rotary

SMALL = small(40)
GPT = Decoder(**SMALL)
DECODERS = {
    "gpt": GPT,
    "llama": GPT.replace(attention=Attention(heads=4, kv_heads=2), position=Rotary(), norm=RMSNorm()),
    "window": GPT.replace(attention=Attention(heads=4, window=5)),
    "alibi": GPT.replace(position=ALiBi()),
    "relative": GPT.replace(position=Relative(max_distance=8)),
}


def built(config):
    torch.manual_seed(0)
    return build(config).eval()


def words(time: int = 12, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 40, (rows, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS)
def test_looking_changes_no_bit_and_sees_probabilities(config) -> None:
    model, tokens = built(config), words()
    plain = model(tokens)
    with capture(model, "decoder.*.attention.probabilities", "decoder.1.residual") as seen:
        watched = model(tokens)
    assert torch.equal(plain, watched)
    assert set(seen) == {
        "decoder.0.attention.probabilities",
        "decoder.1.attention.probabilities",
        "decoder.1.residual",
    }
    probabilities = seen["decoder.0.attention.probabilities"]
    assert probabilities.shape == (2, 4, 12, 12)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 4, 12), atol=1e-6, rtol=0)
    assert (probabilities.triu(1) == 0).all()
    if config.attention.window:
        assert (probabilities.tril(-config.attention.window) == 0).all()
    assert torch.equal(model.head(model.decoder.norm(seen["decoder.1.residual"])), plain)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_probabilities_are_those_of_the_formula() -> None:
    model, tokens = built(DECODERS["gpt"]), words()
    with capture(model, "decoder.0.attention.probabilities", "decoder.0.attention.qkv") as seen:
        model(tokens)
    q, k, _ = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in seen["decoder.0.attention.qkv"].chunk(3, -1))
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf)
    torch.testing.assert_close(seen["decoder.0.attention.probabilities"], scores.softmax(-1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("config", [DECODERS["gpt"], DECODERS["llama"]], ids=["gpt", "llama"])
def test_a_text_that_is_written_with_a_cache_shows_each_step(config) -> None:
    model, settings = built(config), Sampling(temperature=0, max_tokens=5)
    ids = words(6, 1)[0].tolist()
    plain = [chunk.id for chunk in generate(model, [Prompt(ids)], settings)]
    with capture(model, "decoder.1.attention.probabilities", "decoder.1.residual") as seen:
        written = [chunk.id for chunk in generate(model, [Prompt(ids)], settings)]
    assert written == plain
    calls = seen.calls("decoder.1.attention.probabilities")
    assert [tuple(call.shape[2:]) for call in calls] == [(6, 6), *((1, 6 + n) for n in range(1, len(calls)))]
    assert len(calls) >= 4
    with capture(model, "decoder.1.attention.probabilities") as whole:
        model(torch.tensor([[*ids, *written]]))
    last = calls[-1].shape[-1]
    torch.testing.assert_close(
        calls[-1][0, :, 0], whole["decoder.1.attention.probabilities"][0, :, last - 1, :last], atol=1e-6, rtol=0
    )


def test_encoders_pairs_and_bahdanau() -> None:
    tokens, source = words(5), SourceTokens(words(7))
    encoder = built(Encoder(**SMALL))
    with capture(encoder, "encoder.*.attention.probabilities") as seen:
        encoder.features(tokens)
    assert all(each.shape == (2, 4, 5, 5) for each in seen.values()) and len(seen) == 2
    both = built(EncoderDecoder(**SMALL))
    with capture(both, "*.*.attention.probabilities", "decoder.*.cross.probabilities") as seen:
        both(tokens, source=source)
    assert seen["encoder.1.attention.probabilities"].shape == (2, 4, 7, 7)
    assert seen["decoder.1.cross.probabilities"].shape == (2, 4, 5, 7)
    old = built(Bahdanau(vocab_size=40, d_model=16, layers=1, cell="gru"))
    plain = old(tokens, source=source)
    with capture(old, "attention.probabilities") as seen:
        assert torch.equal(old(tokens, source=source), plain)
    assert seen["attention.probabilities"].shape == (2, 5, 7)


@pytest.mark.parametrize("name", ["gpt", "llama", "relative"])
def test_replacing(name: str) -> None:
    """A head without its probabilities is a head whose part of the output projection is zero."""
    model, tokens = built(DECODERS[name]), words()
    with capture(model, replace={"decoder.0.attention.probabilities": without_head(2)}):
        ablated = model(tokens)
    assert not torch.allclose(ablated, model(tokens))
    if name != "relative":  # whose values at a distance are weighted as well
        with torch.no_grad():
            model.decoder.blocks[0].attention.out.weight[:, 16:24] = 0
        torch.testing.assert_close(ablated, model(tokens), atol=1e-5, rtol=1e-5)
    other = words(12, 2).flip(1)
    with capture(model, "decoder.0.residual") as seen:
        expected = model(other)
    with capture(model, replace={"decoder.0.residual": lambda x: seen["decoder.0.residual"]}):
        assert torch.equal(model(tokens), expected)  # all that comes after reads the swapped stream


def test_gradients() -> None:
    model, tokens = built(DECODERS["gpt"]), words()
    names = ("decoder.1.residual", "decoder.0.attention.probabilities", "embedding")
    with capture(model, *names, grads=True) as seen:
        loss = model(tokens).logsumexp(-1).sum()
    loss.backward()
    for name in names:
        assert seen.gradient(name).shape == seen[name].shape and seen.gradient(name).abs().sum() > 0
    x = seen["decoder.1.residual"].detach().requires_grad_()
    (expected,) = torch.autograd.grad(model.head(model.decoder.norm(x)).logsumexp(-1).sum(), x)
    torch.testing.assert_close(seen.gradient("decoder.1.residual"), expected)


def test_names_that_are_wrong() -> None:
    model = built(DECODERS["gpt"])
    wrong = r"'decoder\.9\.residual': nothing in this model has that name; did you mean"
    with pytest.raises(ModelError, match=wrong), capture(model, "decoder.9.residual"):
        pass
    with capture(model, "decoder.0.residual", "decoder.1.residual") as seen:
        pass
    with pytest.raises(ModelError, match="did not compute it"):
        seen["decoder.0.residual"]
    with pytest.raises(ModelError, match=r"was not asked for; did you mean 'decoder\.1\.residual'"):
        seen["decoder.1.residua"]
    with (
        pytest.raises(ModelError, match=r"shape \(2, 12, 1\), where \(2, 12, 32\)"),
        capture(model, replace={"decoder.0.residual": lambda x: x[..., :1]}),
    ):
        model(words())
    assert not any(part._forward_hooks for part in model.modules())
