"""Saliency against finite differences in float64; the model's gradients are left alone."""

from typing import Any

import numpy as np
import pytest
import torch
from markupsafe import escape
from numpy.typing import NDArray
from tests.explain.small import page_data, sharp, small
from tests.spread import spread

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


def read(name: str, text: str = "a <b> c") -> Reading:
    source = (3, 5, 7, 11) if name not in ("gpt", "llama", "lstm") else None
    return Reading(sharp(MODELS[name]).double(), TOKENIZER, tuple(TOKENIZER.encode(text)), 0, source)


def differences(reading: Reading, ids: list[int], target: int, side: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """‖∂/∂x‖ and x · ∂/∂x of log p(target) after all of `ids`, one coordinate of one embedding at a time."""
    model: Any = reading.model
    name = "source_embedding" if side == "source" and model.source_embedding is not None else "embedding"
    side_ids = list(ids if side == "text" else reading.source or ())
    # A shared table is read twice, for the source first.
    nudged_call = 2 if reading.source is not None and side == "text" and model.source_embedding is None else 1
    step = 1e-6

    def log_p(position: int, coordinate: int, by: float) -> float:
        calls = []

        def nudge(x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            x = x.clone()
            if len(calls) == nudged_call:
                x[0, position, coordinate] += by
            return x

        with capture(model, replace={name: nudge}), torch.no_grad():
            return float(model(torch.tensor([ids]), **reading.model_kwargs)[0, -1].log_softmax(-1)[target])

    x = getattr(model, name).weight[side_ids].detach().numpy()
    rows = [[(log_p(n, d, step) - log_p(n, d, -step)) / (2 * step) for d in range(8)] for n in range(len(side_ids))]
    gradient = np.array(rows)
    return np.linalg.norm(gradient, axis=-1), (gradient * x).sum(-1)


@pytest.mark.parametrize("name", spread(MODELS, 3))
def test_gradients_are_finite_differences(name: str) -> None:
    reading = read(name)
    found, model = saliency(reading, 3), reading.model
    ids = list(reading.ids[:4])
    assert [side.name for side in found.sides] == (["text"] if reading.source is None else ["source", "text"])
    for side in found.sides:
        norm, times_input = differences(reading, ids, reading.ids[4], side.name)
        np.testing.assert_allclose(side.norm, norm, rtol=1e-5, atol=1e-8)
        tolerance = 1e-8 * np.abs(times_input).max()  # the error of the differences of log p
        np.testing.assert_allclose(side.times_input, times_input, rtol=1e-5, atol=tolerance)
        assert len(side.tokens) == len(norm)
    expected = model(torch.tensor([ids]), **reading.model_kwargs)[0, -1].log_softmax(-1)[reading.ids[4]]
    assert found.log_prob == pytest.approx(float(expected.detach()), abs=1e-9)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_after_the_last_token_the_target_is_the_models_prediction() -> None:
    reading = read("gpt")
    found = saliency(reading)
    best = int(reading.model(reading.tokens)[0, -1].argmax())
    assert found.target == Reading(reading.model, TOKENIZER, (best,)).pieces[0]
    assert len(found.sides[0].tokens) == len(reading.ids)


def test_the_target_of_a_masked_model_is_the_masked_token() -> None:
    model = sharp(Encoder(**SMALL)).double()
    ids = (TOKENIZER.need("cls"), *TOKENIZER.encode("abc"), TOKENIZER.need("sep"))
    found = saliency(Reading(model, TOKENIZER, ids, 1))
    assert found.target == "c" and found.masked and found.place == 3 and found.rest == ()
    assert [token.piece for token in found.sides[0].tokens] == ["<cls>", "a", "b", "<mask>", "<sep>"]
    hidden = torch.tensor([[*ids[:3], TOKENIZER.need("mask"), ids[4]]])
    assert found.log_prob == pytest.approx(float(model(hidden)[0, 3].log_softmax(-1)[ids[3]].detach()), abs=1e-9)


def test_the_page_and_the_figure_hold_both_measures() -> None:
    reading = read("shared")
    found = saliency(reading, 3)
    html = found.html()
    data = page_data(html)
    assert [each["name"] for each in data["sides"]] == ["source", "text"]
    for each, side in zip(data["sides"], found.sides, strict=True):
        assert each["norm"] == side.norm.tolist() and each["times_input"] == side.times_input.tolist()
    # All tokens are there, so that another one can be selected.
    tokens = [token["piece"] for token in (*data["sides"][1]["tokens"], *data["rest"])]
    assert tokens == reading.pieces and data["place"] == 3 and data["rest"][0]["piece"] == data["target"]
    assert "<b> c" not in html and escape(found.text()) in html
    assert len(found.figure().axes) == 4
    many = saliency(read("lstm", "word " * 20))
    assert len(many.figure().axes) == 1
    assert "gradient norm" in many.figure().axes[0].texts[-1].get_text()
    assert "probability" in many.text()


def test_bad_input() -> None:
    with pytest.raises(ModelError, match="no gradients"):
        saliency(Reading(build(NGram(vocab_size=V)), TOKENIZER, (1, 2)))
    with pytest.raises(DataError, match="place = 7: the model reads 7 tokens"):
        saliency(read("gpt"), 7)
