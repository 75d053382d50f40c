"""Saliency against finite differences in float64; it leaves the model's own gradients alone."""

import json
import re

import numpy as np
import pytest
import torch
from markupsafe import escape
from tests.explain.small import small

from weft.errors import DataError, ModelError
from weft.explain.capture import capture
from weft.explain.reading import Reading
from weft.explain.saliency import saliency
from weft.models.build import build
from weft.models.config import Bahdanau, Decoder, Encoder, EncoderDecoder, NGram, Recurrent
from weft.nn.config import Attention, Plain, RMSNorm
from weft.nn.position_config import Rotary
from weft.text.config import Byte, Specials
from weft.text.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(Byte(specials=Specials(cls="<cls>", sep="<sep>", mask="<mask>")))
V = TOKENIZER.vocab_size
SMALL = small(V, context=32, d_model=8, attention=Attention(heads=2), feedforward=Plain(d_ff=16))
MODELS = {
    "gpt": Decoder(**SMALL),
    "llama": Decoder(**{**SMALL, "position": Rotary(), "norm": RMSNorm(), "embedding_scale": True}),
    "lstm": Recurrent(vocab_size=V, d_model=8),
    "shared": EncoderDecoder(**SMALL),
    "own": EncoderDecoder(**SMALL, source_vocab_size=20),
    "bahdanau": Bahdanau(vocab_size=V, d_model=8),
    "bahdanau-own": Bahdanau(vocab_size=V, source_vocab_size=20, d_model=8),
}


def doubled(config):
    torch.manual_seed(0)
    model = build(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model


def read(model, name: str, text: str = "a <b> c") -> Reading:
    source = (3, 5, 7, 11) if name not in ("gpt", "llama", "lstm") else None
    return Reading(model, TOKENIZER, tuple(TOKENIZER.encode(text)), 0, source)


def differences(model, reading: Reading, ids: list[int], target: int, side: str) -> tuple[np.ndarray, np.ndarray]:
    """‖∂/∂x‖ and x · ∂/∂x of log p(target) after all of `ids`, one coordinate of one embedding at a time."""
    name = "source_embedding" if side == "source" and model.source_embedding is not None else "embedding"
    time = len(ids) if side == "text" else len(reading.source)
    width, step = 8, 1e-6

    def log_p(place: int, coordinate: int, by: float) -> float:
        calls = []

        def nudge(x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            # a shared table is read twice, for the source first
            wanted = len(calls) == (
                2 if reading.source is not None and side == "text" and model.source_embedding is None else 1
            )
            x = x.clone()
            if wanted:
                x[0, place, coordinate] += by
            return x

        with capture(model, replace={name: nudge}), torch.no_grad():
            return float(model(torch.tensor([ids]), **reading.given)[0, -1].log_softmax(-1)[target])

    table = model.source_embedding if name == "source_embedding" else model.embedding
    x = table.weight[list(ids if side == "text" else reading.source)].detach().numpy()
    gradient = np.array(
        [[(log_p(n, d, step) - log_p(n, d, -step)) / (2 * step) for d in range(width)] for n in range(time)]
    )
    return np.linalg.norm(gradient, axis=-1), (gradient * x).sum(-1)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_finite_differences(name: str) -> None:
    model = doubled(MODELS[name])
    reading = read(model, name)
    found = saliency(reading, 3)
    ids = list(reading.ids[:4])
    assert [side.name for side in found.sides] == (["text"] if reading.source is None else ["source", "text"])
    for side in found.sides:
        norm, times_input = differences(model, reading, ids, reading.ids[4], side.name)
        np.testing.assert_allclose(side.norm, norm, rtol=1e-5, atol=1e-8)
        coarse = 1e-8 * np.abs(times_input).max()  # as the differences of log p are
        np.testing.assert_allclose(side.times_input, times_input, rtol=1e-5, atol=coarse)
        assert len(side.tokens) == len(norm)
    expected = model(torch.tensor([ids]), **reading.given)[0, -1].log_softmax(-1)[reading.ids[4]]
    assert found.log_prob == pytest.approx(float(expected.detach()), abs=1e-9)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_after_the_last_token_it_is_what_the_model_predicts() -> None:
    model = doubled(MODELS["gpt"])
    reading = read(model, "gpt")
    found = saliency(reading)
    best = int(model(reading.tokens)[0, -1].argmax())
    assert found.target == Reading(model, TOKENIZER, (best,)).pieces[0]
    assert len(found.sides[0].tokens) == len(reading.ids)


def test_a_masked_model_is_asked_for_the_masked_token() -> None:
    model = doubled(Encoder(**SMALL))
    ids = (TOKENIZER.cls_id, *TOKENIZER.encode("abc"), TOKENIZER.sep_id)
    found = saliency(Reading(model, TOKENIZER, ids, 1))
    assert found.target == "c" and found.masked and found.place == 3 and found.rest == ()
    assert [token.piece for token in found.sides[0].tokens] == ["<cls>", "a", "b", "<mask>", "<sep>"]
    hidden = torch.tensor([[*ids[:3], TOKENIZER.need("mask"), ids[4]]])
    assert found.log_prob == pytest.approx(float(model(hidden)[0, 3].log_softmax(-1)[ids[3]].detach()), abs=1e-9)


def test_the_page_and_the_figure_hold_both_measures() -> None:
    reading = read(doubled(MODELS["shared"]), "shared")
    found = saliency(reading, 3)
    html = found.html()
    held = json.loads(re.search(r'<script type="application/json" class="data">(.*?)</script>', html)[1])
    assert [each["name"] for each in held["sides"]] == ["source", "text"]
    for each, side in zip(held["sides"], found.sides, strict=True):
        assert each["norm"] == side.norm.tolist() and each["times_input"] == side.times_input.tolist()
    # all that was read stands there, so that another token can be chosen
    tokens = [token["piece"] for token in (*held["sides"][1]["tokens"], *held["rest"])]
    assert tokens == reading.pieces and held["place"] == 3 and held["rest"][0]["piece"] == held["target"]
    assert "<b> c" not in html and escape(found.text()) in html
    assert len(found.figure().axes) == 4
    many = saliency(read(doubled(MODELS["lstm"]), "lstm", "word " * 20))
    assert len(many.figure().axes) == 1
    assert "gradient norm" in many.figure().axes[0].texts[-1].get_text()
    assert "probability" in many.text()


def test_bad_input() -> None:
    with pytest.raises(ModelError, match="no gradients"):
        saliency(Reading(build(NGram(vocab_size=V)), TOKENIZER, (1, 2)))
    with pytest.raises(DataError, match="place = 7: the model reads 7 tokens"):
        saliency(read(doubled(MODELS["gpt"]), "gpt"), 7)
