"""Which words are similar to a model: by their entries in its embedding table, and by their features in a text.

The table gives a word one vector, whatever it means; the features give every occurrence its own, so that the `bank` of
a river and the `bank` that lends money come apart (Peters et al. 2018). A decoder's features depend only on what
comes before a word.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from weft.errors import DataError, ModelError, TokenizerError, suggestion
from weft.models.base import LanguageModel
from weft.models.hidden import check_readable, context_of, frame_for, read
from weft.models.ngram import NGram
from weft.text.tokenizer import Tokenizer

_WORD = re.compile(r"\w+(?:['’-]\w+)*")


class Near(NamedTuple):
    """A vocabulary's entry and the cosine of its vector with the word's."""

    id: int
    text: str
    cosine: float


class Place(NamedTuple):
    """A word in its text: characters start … end of sentence number `sentence`."""

    sentence: int
    start: int
    end: int
    text: str


def embedding_table(model: LanguageModel) -> Tensor:
    """A model's input embeddings (vocab_size, d)."""
    if isinstance(model, NGram):
        raise ModelError("a model of kind 'ngram' has no embeddings: it counts words")
    return model.get_parameter("embedding.weight").detach()


def word_ids(tokenizer: Tokenizer, word: str) -> list[int] | None:
    """The tokens of a word inside a text, or None if some of it is unknown.

    Where a tokenizer keeps the space with the word that follows, a word after a space is meant.
    """
    try:
        spellings = [tokenizer.encode(text) for text in (f" {word}", word)]
    except TokenizerError:  # a word tokenizer without an unk token
        return None
    ids = min(spellings, key=len)
    return None if not ids or tokenizer.unk_id in ids else ids


def word_vector(model: LanguageModel, tokenizer: Tokenizer, word: str) -> NDArray[np.float32] | None:
    """A word's vector (d,), the mean of its tokens' where it is spelled in several; None if it is unknown."""
    ids = word_ids(tokenizer, word)
    return None if ids is None else embedding_table(model)[ids].float().mean(dim=0).cpu().numpy()


def nearest_words(model: LanguageModel, tokenizer: Tokenizer, word: str, top: int = 10) -> list[Near]:
    """The vocabulary's entries whose vectors are closest to the word's by cosine, its own tokens left out."""
    ids = word_ids(tokenizer, word)
    if ids is None:
        entries = [] if tokenizer.vocab_size > 100_000 else [_text(tokenizer, id) for id in range(tokenizer.vocab_size)]
        raise DataError(f"'{word}' is not in the vocabulary; {suggestion(word, entries)}")
    table = F.normalize(embedding_table(model).float(), dim=-1)
    size = min(tokenizer.vocab_size, len(table))  # a table may be padded to a round size
    query = F.normalize(embedding_table(model)[ids].float().mean(dim=0), dim=0)
    cosines = table[:size] @ query
    cosines[[id for id in {*ids, *tokenizer.special_tokens.values()} if id < size]] = -torch.inf
    best = cosines.topk(min(top, size))
    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [Near(id, _text(tokenizer, id), cosine) for id, cosine in found if cosine > -torch.inf]


def _text(tokenizer: Tokenizer, id: int) -> str:
    try:
        return tokenizer.token_bytes(id).decode("utf-8", "replace").strip() or tokenizer.token(id)
    except TokenizerError:  # an id that the vocabulary skips
        return ""


@dataclass(frozen=True)
class InContext:
    """The words of some sentences, each with the vector that the model gives it there: vectors (N, d) of length 1."""

    sentences: tuple[str, ...]
    places: tuple[Place, ...]
    vectors: NDArray[np.float32]

    def occurrences(self, word: str) -> list[int]:
        """The indices of a word in `places`, regardless of case."""
        return [n for n, place in enumerate(self.places) if place.text.casefold() == word.casefold()]

    def nearest(self, word: str, top: int = 10) -> list[tuple[Place, list[tuple[Place, float]]]]:
        """For each occurrence of the word, the most similar words of all sentences with their cosines."""
        found = self.occurrences(word)
        if not found:
            words = [place.text for place in self.places]
            raise DataError(f"'{word}' is in none of the {len(self.sentences)} sentences; {suggestion(word, words)}")
        answers = []
        for number in found:
            cosines = self.vectors @ self.vectors[number]
            order = [int(n) for n in np.argsort(-cosines, kind="stable") if n != number]
            answers.append((self.places[number], [(self.places[n], float(cosines[n])) for n in order[:top]]))
        return answers


def in_context(model: LanguageModel, tokenizer: Tokenizer, sentences: Sequence[str], batch: int = 32) -> InContext:
    """Every word of the sentences with its vector: the mean of the features of its tokens, scaled to length 1.

    Words beyond the model's context are left out.
    """
    check_readable(model)
    cuts, frame = [tokenizer.token_spans(sentence) for sentence in sentences], frame_for(model)
    framed = [frame(tokenizer, [span.id for span in cut], context_of(model)) for cut in cuts]
    found: dict[Place, NDArray[np.float32]] = {}
    for group in read(model, tokenizer, framed, batch=batch):
        for row, features in zip(group.rows, group.features.cpu(), strict=True):
            before, length = framed[row].before, framed[row].length
            for match in _WORD.finditer(sentences[row]):
                start, end = match.span()
                tokens = [n for n, span in enumerate(cuts[row]) if span.start < end and span.end > start]
                if tokens and tokens[-1] < length:
                    vector = features[[before + n for n in tokens]].mean(dim=0)
                    found[Place(row, start, end, match.group())] = F.normalize(vector, dim=0).numpy()
    if not found:
        raise DataError("the sentences contain no words")
    places = sorted(found)  # as they were given: the longest sentences were read first
    return InContext(tuple(sentences), tuple(places), np.stack([found[place] for place in places]))
