"""The logit lens: its last row is the model, its other rows the norm and the head by hand; the page holds them."""

from typing import Any

import numpy as np
import pytest
import torch
from markupsafe import escape
from tests.explain.small import page_data, sharp, small

from weft.errors import ModelError
from weft.explain.lens import lens
from weft.explain.reading import Reading
from weft.explain.surprise import Guess
from weft.models.build import build
from weft.models.config import Decoder, Encoder, EncoderDecoder, Recurrent
from weft.models.head_config import PretrainingHead
from weft.nn.config import RMSNorm
from weft.nn.position_config import Rotary
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(Byte())
SMALL = small(TOKENIZER.vocab_size + 3, context=128, layers=3)
GPT = Decoder(**SMALL)
MODELS = {
    "gpt": GPT,
    "llama": GPT.replace(position=Rotary(), norm=RMSNorm(), embedding_scale=True),
    "post-norm": GPT.replace(placement="post", embedding_norm=True),
    "bert": Encoder(**{**SMALL, "placement": "post"}, head=PretrainingHead()),
    "encoder-decoder": EncoderDecoder(**SMALL),
}


def read(model: Any, text: str = "to be <or> not") -> Reading:
    source = (3, 5, 7) if model.encoder is not None and model.decoder is not None else None
    return Reading(model, TOKENIZER, tuple(TOKENIZER.encode(text)), 0, source)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_the_last_row_is_the_model(config: Any) -> None:
    reading = read(model := sharp(config))
    found = lens(reading)
    out: Any = model(reading.tokens, **reading.model_kwargs)
    p = getattr(out, "words", out)[0].softmax(-1)[:, : TOKENIZER.vocab_size]
    values, ids = p.topk(1)
    assert found.probability.shape == (4, len(reading.ids))
    for guess, p, id in zip(found.guesses[-1], values[:, 0], ids[:, 0].tolist(), strict=True):
        assert guess.probability == pytest.approx(float(p), abs=1e-6)
        assert guess.piece == Reading(model, TOKENIZER, (id,)).pieces[0]
    assert (found.final_rank[-1] == 1).all()
    np.testing.assert_allclose(found.final_probability[-1], values[:, 0], atol=1e-6)


@torch.no_grad()
def test_the_other_rows_are_norm_and_head_of_the_residuals() -> None:
    reading = read(model := sharp(GPT))
    found = lens(reading)
    residuals = [model.embedding(reading.tokens) + model.decoder.position.weight[: len(reading.ids)]]
    for block in model.decoder.blocks:
        block.register_forward_hook(lambda _, given, out: residuals.append(out))
    final = model(reading.tokens)[0, :, : TOKENIZER.vocab_size].argmax(-1)
    for row, residual in enumerate(residuals):
        p = model.head(model.decoder.norm(residual))[0].softmax(-1)[:, : TOKENIZER.vocab_size]
        np.testing.assert_allclose(found.probability[row], p.amax(-1), atol=1e-6)
        own = p.gather(1, final[:, None])
        np.testing.assert_allclose(found.final_probability[row], own[:, 0], atol=1e-6)
        assert found.final_rank[row].tolist() == ((p > own).sum(1) + 1).tolist()
    assert "last norm" in found.about


def test_post_norm_and_masked_models_are_described() -> None:
    assert "the head alone" in lens(read(sharp(MODELS["post-norm"]))).about
    assert "at its position" in lens(read(sharp(MODELS["bert"]))).about


def test_the_end_of_a_long_text_is_shown() -> None:
    reading = read(sharp(GPT), "".join(chr(97 + n % 7) for n in range(120)))
    found = lens(reading)
    assert found.start == 24 and found.read == tuple(reading.pieces[24:])
    p = reading.model(reading.tokens)[0, 24:].softmax(-1)[:, : TOKENIZER.vocab_size].amax(-1)
    np.testing.assert_allclose(found.probability[-1], p.detach(), atol=1e-5)
    assert len(found.figure().axes[0].get_xticks()) == 16


def test_the_page_holds_every_cell() -> None:
    found = lens(read(sharp(GPT)))
    html = found.html()
    data = page_data(html)
    assert data["final_rank"] == found.final_rank.tolist() and data["read"] == list(found.read)
    assert [[Guess(**cell) for cell in row] for row in data["guesses"]] == [list(row) for row in found.guesses]
    assert "<or" not in html and escape(found.text()) in html
    assert "output" in found.text() and "rank 1" in found.text()


def test_bad_input() -> None:
    with pytest.raises(ModelError, match="'recurrent' has no residual stream"):
        lens(Reading(build(Recurrent(vocab_size=300, d_model=8)), TOKENIZER, (1, 2)))
