"""Capturing shows what a model computes, changes nothing, and can replace it."""

from typing import Any

import pytest
import torch
from tests.explain.small import sharp, small

from weft.decode.config import Sampling
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.errors import ModelError
from weft.explain.capture import capture, without_head
from weft.explain.reading import SourceTokens
from weft.models.config import Bahdanau, Decoder, EncoderDecoder
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


def built(config: Any) -> Any:
    return sharp(config, factor=1.0)


def tokens_of(time: int = 12, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 40, (rows, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS)
def test_capturing_changes_no_bit_and_shows_probabilities(config: Decoder) -> None:
    model, tokens = built(config), tokens_of()
    plain = model(tokens)
    with capture(model, "decoder.*.attention.probabilities", "decoder.1.residual") as captured:
        assert torch.equal(plain, model(tokens))
    probabilities = [f"decoder.{layer}.attention.probabilities" for layer in range(2)]
    assert set(captured) == {*probabilities, "decoder.1.residual"}
    p = captured[probabilities[0]]
    assert p.shape == (2, 4, 12, 12)
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 4, 12), atol=1e-6, rtol=0)
    assert (p.triu(1) == 0).all()
    if config.attention.window:
        assert (p.tril(-config.attention.window) == 0).all()
    assert torch.equal(model.head(model.decoder.norm(captured["decoder.1.residual"])), plain)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_every_decode_step_with_a_cache_is_captured(name: str) -> None:
    model, settings = built(DECODERS[name]), Sampling(temperature=0, max_tokens=5)
    ids = tokens_of(6, 1)[0].tolist()
    plain = [chunk.id for chunk in generate(model, [Prompt(ids)], settings)]
    with capture(model, "decoder.1.attention.probabilities", "decoder.1.residual") as captured:
        written = [chunk.id for chunk in generate(model, [Prompt(ids)], settings)]
    assert written == plain
    calls = captured.calls("decoder.1.attention.probabilities")
    assert [tuple(call.shape[2:]) for call in calls] == [(6, 6), *((1, 6 + n) for n in range(1, len(calls)))]
    assert len(calls) >= 4
    with capture(model, "decoder.1.attention.probabilities") as whole:
        model(torch.tensor([[*ids, *written]]))
    last = calls[-1].shape[-1]
    expected = whole["decoder.1.attention.probabilities"][0, :, last - 1, :last]
    torch.testing.assert_close(calls[-1][0, :, 0], expected, atol=1e-6, rtol=0)


def test_encoder_decoders_and_bahdanau() -> None:
    tokens, source = tokens_of(5), SourceTokens(tokens_of(7))
    both = built(EncoderDecoder(**SMALL))
    with capture(both, "*.*.attention.probabilities", "decoder.*.cross.probabilities") as captured:
        both(tokens, source=source)
    assert captured["encoder.1.attention.probabilities"].shape == (2, 4, 7, 7)
    assert captured["decoder.1.cross.probabilities"].shape == (2, 4, 5, 7)
    bahdanau = built(Bahdanau(vocab_size=40, d_model=16, layers=1, cell="gru"))
    plain = bahdanau(tokens, source=source)
    with capture(bahdanau, "attention.probabilities") as captured:
        assert torch.equal(bahdanau(tokens, source=source), plain)
    assert captured["attention.probabilities"].shape == (2, 5, 7)


@pytest.mark.parametrize("name", ["gpt", "llama", "relative"])
def test_replacing(name: str) -> None:
    """A head without its probabilities is a head whose part of the output projection is zero."""
    model, tokens = built(DECODERS[name]), tokens_of()
    with capture(model, replace={"decoder.0.attention.probabilities": without_head(2)}):
        ablated = model(tokens)
    assert not torch.allclose(ablated, model(tokens))
    if name != "relative":  # there the vectors of distances are weighted as well
        with torch.no_grad():
            model.decoder.blocks[0].attention.out.weight[:, 16:24] = 0
        torch.testing.assert_close(ablated, model(tokens), atol=1e-5, rtol=1e-5)
    other = tokens_of(12, 2).flip(1)
    with capture(model, "decoder.0.residual") as captured:
        expected = model(other)
    with capture(model, replace={"decoder.0.residual": lambda x: captured["decoder.0.residual"]}):
        assert torch.equal(model(tokens), expected)  # everything above reads the swapped stream


def test_gradients() -> None:
    model, tokens = built(DECODERS["gpt"]), tokens_of()
    names = ("decoder.1.residual", "decoder.0.attention.probabilities", "embedding")
    with capture(model, *names, grads=True) as captured:
        loss = model(tokens).logsumexp(-1).sum()
    loss.backward()
    for name in names:
        gradient = captured[name].grad
        assert gradient is not None and gradient.shape == captured[name].shape and gradient.abs().sum() > 0
    x = captured["decoder.1.residual"].detach().requires_grad_()
    (expected,) = torch.autograd.grad(model.head(model.decoder.norm(x)).logsumexp(-1).sum(), x)
    torch.testing.assert_close(captured["decoder.1.residual"].grad, expected)


def test_wrong_names_and_shapes() -> None:
    model = built(DECODERS["gpt"])
    wrong = r"'decoder\.9\.residual': nothing in this model has that name; did you mean"
    with pytest.raises(ModelError, match=wrong), capture(model, "decoder.9.residual"):
        pass
    with capture(model, "decoder.0.residual", "decoder.1.residual") as captured:
        pass
    with pytest.raises(ModelError, match="did not compute it"):
        captured["decoder.0.residual"]
    with pytest.raises(ModelError, match=r"was not captured; did you mean 'decoder\.1\.residual'"):
        captured["decoder.1.residua"]
    with (
        pytest.raises(ModelError, match=r"shape \(2, 12, 1\), expected .* shape \(2, 12, 32\)"),
        capture(model, replace={"decoder.0.residual": lambda x: x[..., :1]}),
    ):
        model(tokens_of())
    assert not any(part._forward_hooks for part in model.modules())
