"""The maximum-likelihood estimate of an n-gram model, derived for one context."""

import numpy as np
import pytest

from weft.errors import DataError, ModelError
from weft.explain.likelihood import likelihood
from weft.models.build import build
from weft.models.config import NGram as NGramConfig
from weft.models.config import Recurrent
from weft.models.ngram import NGram
from weft.text.config import Word
from weft.text.tokenizer import Tokenizer, build_tokenizer

TEXT = "cows eat corn cows eat hay cows eat corn cows sleep"


def fitted(smoothing: str, order: int = 3) -> tuple[NGram, Tokenizer]:
    tokenizer = build_tokenizer(Word(), [TEXT])
    config = NGramConfig.model_validate(
        {"vocab_size": tokenizer.vocab_size, "order": order, "smoothing": {"kind": smoothing}}
    )
    model = build(config)
    assert isinstance(model, NGram)
    model.fit(np.array(tokenizer.encode(TEXT)))
    return model, tokenizer


def test_counts_give_the_likeliest_probabilities_unless_smoothed() -> None:
    shown = likelihood(*fitted("mle"), "the cows eat")
    assert shown.context == "cows eat" and shown.words == ("corn", "hay") and shown.counts == (2, 1)
    assert shown.difference < 1e-6
    assert "λ = 3" in (shown.text() or "") and "corn 2/3" in (shown.text() or "")
    shown = likelihood(*fitted("mle"), "cows eat")
    best = shown.log_likelihood([2 / 3, 1 / 3])
    assert all(shown.log_likelihood([p, 1 - p]) < best for p in (0.01, 0.5, 0.6, 0.7, 0.99))
    assert "smoothed" in (likelihood(*fitted("kneser-ney"), "cows eat").text() or "")


@pytest.mark.parametrize(
    ("order", "text", "counts"), [(1, "", (4, 3, 2, 1, 1)), (2, "cows", (3, 1)), (3, "cows", (3, 1))]
)
def test_contexts_of_every_length(order: int, text: str, counts: tuple[int, ...]) -> None:
    shown = likelihood(*fitted("mle", order), text)
    assert shown.counts == counts
    assert shown.charts()


def test_what_cannot_be_derived() -> None:
    model, tokenizer = fitted("mle")
    with pytest.raises(DataError, match="never occurs in the training text"):
        likelihood(model, tokenizer, "hay eat")
    with pytest.raises(ModelError, match="closed form"):
        likelihood(build(Recurrent(vocab_size=9, d_model=4)), tokenizer, "cows eat")


def test_one_word_alone_is_certain() -> None:
    shown = likelihood(*fitted("mle"), "hay cows")
    assert shown.words == ("eat",) and shown.probabilities[0] == pytest.approx(1.0)
    assert shown.charts() and "eat 1/1" in (shown.text() or "")
