"""Words that a model treats as similar: by its embedding table, and by their features in sentences.

The table has one vector per word, whatever its meaning; features differ between occurrences, so the `bank` of a river
and the `bank` that lends money are far apart (Peters et al. 2018). A decoder's features depend only on the text before
a word.
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
from weft.models.hidden import Occurrence, word_vectors
from weft.models.ngram import NGram
from weft.text.tokenizer import Tokenizer

_WORD = re.compile(r"\w+(?:['’-]\w+)*")


class Neighbour(NamedTuple):
    """Token of the vocabulary and the cosine similarity of its vector to the word's."""

    id: int
    text: str
    cosine: float


def embedding_table(model: LanguageModel) -> Tensor:
    """Return a model's input embeddings (vocab_size, d)."""
    if isinstance(model, NGram):
        raise ModelError("a model of kind 'ngram' has no embeddings: it counts tokens")
    return model.get_parameter("embedding.weight").detach()


def word_ids(tokenizer: Tokenizer, word: str) -> list[int] | None:
    """Return the tokens of a word inside a text, after a space if the tokenizer joins it; None if a part is unknown."""
    try:  # in a vocabulary of whole words, one that a text would be split at (u.s.) is looked up as it is
        if tokenizer.kind == "word" and word not in tokenizer.special_tokens:
            return [tokenizer.id(word)]
    except TokenizerError:
        pass
    try:
        spellings = [tokenizer.encode(text) for text in (f" {word}", word)]
    except TokenizerError:  # a word tokenizer without an unk token
        return None
    ids = min(spellings, key=len)
    return None if not ids or tokenizer.unk_id in ids else ids


def word_id(tokenizer: Tokenizer, word: str) -> int | None:
    """Return the id of a word that is one token; None for others."""
    ids = word_ids(tokenizer, word)
    return ids[0] if ids is not None and len(ids) == 1 else None


def word_vector(model: LanguageModel, tokenizer: Tokenizer, word: str) -> NDArray[np.float32] | None:
    """Return a word's vector (d,), the mean over its tokens; None if it is unknown."""
    ids = word_ids(tokenizer, word)
    return None if ids is None else embedding_table(model)[ids].float().mean(dim=0).cpu().numpy()


def signed_words(expression: str) -> list[tuple[int, str]]:
    """Return the words of an expression such as `king - man + woman` with their signs; of other texts, the text."""
    parts = expression.replace("−", "-").split()
    if not {"+", "-"} & set(parts) or len(parts) == 1:
        return [(1, expression)]
    parts = parts if parts[0] in ("+", "-") else ["+", *parts]
    signs, words = parts[::2], parts[1::2]
    if len(signs) != len(words) or not set(signs) <= {"+", "-"} or {"+", "-"} & set(words):
        raise DataError(f"'{expression}': expected words joined by + or -, such as 'king - man + woman'")
    return [(1 if sign == "+" else -1, word) for sign, word in zip(signs, words, strict=True)]


def nearest_words(model: LanguageModel, tokenizer: Tokenizer, expression: str, *, top: int = 10) -> list[Neighbour]:
    """Return the tokens with the highest cosine similarity to a word, or to a sum such as `king - man + woman`."""
    table = F.normalize(embedding_table(model).float(), dim=-1)
    size = min(tokenizer.vocab_size, len(table))  # the table may be padded
    ids, query = list[int](), torch.zeros_like(table[0])
    for sign, word in signed_words(expression):
        spelled = word_ids(tokenizer, word)
        if spelled is None:
            entries = [] if size > 100_000 else [_text(tokenizer, id) for id in range(tokenizer.vocab_size)]
            raise DataError(f"'{word}' is not in the vocabulary; {suggestion(word, entries)}")
        # a sum is one of vectors of length 1
        query += sign * F.normalize(embedding_table(model)[spelled].float().mean(dim=0), dim=0)
        ids += spelled
    if query.norm() < 1e-6:
        raise DataError(f"'{expression}': the words add up to zero, which is near nothing")
    cosines = table[:size] @ F.normalize(query, dim=0)
    cosines[[id for id in {*ids, *tokenizer.special_tokens.values()} if id < size]] = -torch.inf
    best = cosines.topk(min(top, size))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [Neighbour(id, _text(tokenizer, id), cosine) for id, cosine in pairs if cosine > -torch.inf]


def _text(tokenizer: Tokenizer, id: int) -> str:
    try:
        return tokenizer.token_bytes(id).decode("utf-8", "replace").strip() or tokenizer.token(id)
    except TokenizerError:  # the vocabulary has no such id
        return ""


@dataclass(frozen=True)
class InContext:
    """Words of several sentences, each with its contextual vector: vectors (N, d) of length 1."""

    sentences: tuple[str, ...]
    words: tuple[Occurrence, ...]
    vectors: NDArray[np.float32]

    def nearest(self, word: str, top: int = 10) -> list[tuple[Occurrence, list[tuple[Occurrence, float]]]]:
        """Return, for each occurrence of a word in any case, the most similar words of all sentences, with cosines."""
        occurrences = [n for n, each in enumerate(self.words) if each.text.casefold() == word.casefold()]
        if not occurrences:
            texts = [each.text for each in self.words]
            raise DataError(f"'{word}' is in none of the {len(self.sentences)} sentences; {suggestion(word, texts)}")
        answers = []
        for number in occurrences:
            cosines = self.vectors @ self.vectors[number]
            order = [int(n) for n in np.argsort(-cosines, kind="stable") if n != number]
            answers.append((self.words[number], [(self.words[n], float(cosines[n])) for n in order[:top]]))
        return answers


def in_context(model: LanguageModel, tokenizer: Tokenizer, sentences: Sequence[str], *, batch: int = 32) -> InContext:
    """Return every word of the sentences with its vector: the mean of its tokens' features, scaled to length 1.

    Words beyond the model's context are left out.
    """
    found = [
        Occurrence(number, *match.span(), match.group())
        for number, sentence in enumerate(sentences)
        for match in _WORD.finditer(sentence)
    ]
    vectors = word_vectors(model, tokenizer, sentences, words=found, batch=batch)
    words = [word for word in found if word in vectors]
    if not words:
        raise DataError("the sentences contain no words")
    return InContext(tuple(sentences), tuple(words), unit_rows(np.stack([vectors[word] for word in words])))


def unit_rows(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale vectors (n, d) to length 1; zeros stay zeros."""
    return vectors / np.maximum(1e-30, np.linalg.norm(vectors, axis=1, keepdims=True))
