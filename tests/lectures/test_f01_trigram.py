"""F1 (lecture 3): an n-gram model is learned by counting; the trigrams of eleven snippets about cows."""

import numpy as np
import pytest
import torch

from weft.models.config import NGram
from weft.models.ngram import NGram as Model
from weft.models.smoothing import MaximumLikelihood

SNIPPETS = """\
the cows eat grass
our cows eat hay daily
factory-farm cows eat corn
on an organic farm, cows eat hay and
do your cows eat grass or corn?
what do cows eat if they have
cows eat corn when there is no
which cows eat which foods depends
if cows eat grass
when cows eat corn their stomachs
should we let cows eat corn?"""
EXPECTED = {"corn": 4, "grass": 3, "hay": 2, "if": 1, "which": 1}


def test_what_cows_eat() -> None:
    documents = [snippet.replace("?", " ?").replace(",", " ,").split() for snippet in SNIPPETS.splitlines()]
    vocabulary = sorted({word for document in documents for word in document})
    ids = {word: i for i, word in enumerate(vocabulary)}
    tokens = np.array([ids[word] for document in documents for word in document])
    begins = np.cumsum([0] + [len(document) for document in documents])[:-1]

    model = Model(NGram(vocab_size=len(vocabulary), order=3, smoothing=MaximumLikelihood()))
    model.fit(tokens, begins)

    row = model(torch.tensor([[ids["cows"], ids["eat"]]]))[0, -1].exp()
    for word in vocabulary:
        assert row[ids[word]].item() == pytest.approx(EXPECTED.get(word, 0) / 11, rel=1e-6, abs=0)
