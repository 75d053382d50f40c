"""A pair of texts for patching, made of a run's own data: one token is exchanged, and the prediction changes."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.api.interventions import text_pairs
from weft.api.reading import ORIGINS, own_text, read_text, translation
from weft.errors import DataError, WeftError
from weft.explain.interventions.recording import require_activations
from weft.explain.interventions.swap import min_difference
from weft.explain.reading import Reading
from weft.explain.surprise import predicts_masked
from weft.models.base import LanguageModel, evaluating
from weft.models.hidden import frame_for
from weft.objectives.rows import ExampleObjective
from weft.objectives.tokens import TranslationObjective
from weft.training.objective import Objective

MAX_TOKENS = 16  # of the texts
SIZES = (8, 10, 12, 16, 20, 24, 32, 48, 96, 160)  # tokens of the excerpts whose words are exchanged
MAX_ALTERNATIVES = 3  # words that each word is exchanged for
MAX_OTHERS = 32  # texts that are compared with the clean one
MAX_MASKS = 3  # words at the end of a text that are masked, one at a time
MIN_LETTERS = 3  # of a word that is exchanged
LIKELY = 5  # tokens of which one may be an answer
MAX_TRIED = 40  # pairs, the most different first, of which one has answers that are single tokens


class Change(NamedTuple):
    """The texts, the target so far, and the predicted tokens.

    `size` is the change of their logit difference, times the root of the distance of the exchanged token.
    """

    size: float
    clean: str
    corrupt: str
    target: str
    answers: tuple[int, int]


@torch.no_grad()
def example_pair(model: LanguageModel, objective: Objective[Any]) -> dict[str, str]:
    """Return the columns of a pair: two texts that differ in one token, and the answers that this changes most."""
    require_activations(model)
    rows = isinstance(objective, ExampleObjective)  # a row is read whole, a document only in part
    text, _ = own_text(model, objective, MAX_TOKENS if rows else SIZES[-1])
    text = text[: objective.tokenizers.source.token_spans(text)[:MAX_TOKENS][-1].end]
    others = _others(model, objective, text)
    find = _masked_changes if predicts_masked(model) else _next_changes
    with evaluating(model):
        changes = sorted(find(model, objective, text, others=others), reverse=True)
    for change in changes[:MAX_TRIED]:
        if not change.size:
            break
        answer, wrong = (objective.tokenizer.decode([id]) for id in change.answers)
        if not (answer.strip() and wrong.strip()):
            continue
        given = {"clean": change.clean, "corrupt": change.corrupt, "answer": answer, "wrong": wrong}
        with suppress(DataError):
            (pair,) = text_pairs(model, objective, {**given, "target": change.target or None}, pairs=None)
            if (pair.answer, pair.other) == change.answers:
                return {**given, "target": change.target}
    raise DataError("patch: exchanging one token of this run's data changes no prediction; type two texts")


def _others(model: LanguageModel, objective: Objective[Any], text: str) -> list[str]:
    """Return copies of the text with one word or number replaced by another of its form and number of tokens.

    The replacements are those that a left-to-right model finds most likely there; for other models, frequent words.
    """
    tokenizer, counts, likely = objective.tokenizers.source, Counter[str](), None
    for side, size in product(ORIGINS, SIZES):
        with suppress(WeftError):  # the data may be gone
            counts.update(span.text for span in tokenizer.token_spans(objective.excerpt(side, size)))
    spans, found = tokenizer.token_spans(text), []
    known = {span.text for span in spans}
    if objective.recipe.objective.continues:
        reading = read_text(objective.recipe, model, objective, text=text)
        likely = _log_p(reading)[max(0, reading.before - 1) :]
    shortest = MIN_LETTERS if max(len(span.text) for span in spans) > 1 else 1  # or every token is a character
    for n, span in enumerate(spans):
        is_part = shortest > 1 and text[span.end : span.end + 1].isalpha()
        if not any(_form(span.text, shortest)[:2]) or is_part:
            continue
        same = [word for word, _ in counts.most_common() if word not in known]
        same = [word for word in same if _form(word, shortest) == _form(span.text, shortest)]
        ids = {word: tokenizer.encode(word) for word in same}
        if likely is not None:
            same.sort(key=lambda word: -float(likely[n, ids[word][0]]))
        for word in same[:MAX_ALTERNATIVES]:
            other = text[: span.start] + word + text[span.end :]
            found += [other] * (len(tokenizer.encode(other)) == len(spans))
    return found[:: max(1, len(found) // MAX_OTHERS)]


def _form(token: str, shortest: int) -> tuple[bool, bool, bool, bool]:
    """Return whether a token is a word of `shortest` letters or more, a number, capitalised, and after a space."""
    word = token.strip()
    return len(word) >= shortest and word.isalpha(), word.isnumeric(), word.istitle(), token[:1].isspace()


def _log_p(reading: Reading) -> Tensor:
    """Return log p of every token at every position, (time, vocab_size)."""
    out = reading.model(reading.tokens, **reading.model_kwargs)
    log_p = (out[0] if isinstance(out, tuple) else out)[0].float().log_softmax(-1)
    specials = [id for id in reading.tokenizer.special_tokens.values() if id < log_p.shape[1]]
    log_p[:, specials] = -torch.inf
    return log_p


def _changed(one: Tensor, two: Tensor) -> tuple[float, tuple[int, int]]:
    """Return by how much two predictions (vocab_size,) differ on the likeliest token of each, and these tokens.

    The difference counts in proportion to the probability of the less certain one. If the likeliest token is the same,
    the likely tokens whose probabilities differ most stand for them, and count for less.
    """
    a, b = int(one.argmax()), int(two.argmax())
    weight = math.exp(min(float(one[a]), float(two[b])))
    if a == b:
        likely = torch.cat([one.topk(LIKELY).indices, two.topk(LIKELY).indices])
        gap, weight = (one - two)[likely], 0.01
        a, b = int(likely[gap.argmax()]), int(likely[gap.argmin()])
    size = float(one[a] - one[b] + two[b] - two[a])
    return weight * size if size > min_difference(torch.stack([one, two])) else 0.0, (a, b)


def _next_changes(
    model: LanguageModel, objective: Objective[Any], text: str, *, others: Sequence[str]
) -> Iterator[Change]:
    """Yield changes of the next token: of a text with a token after the exchanged one, or of a translation so far."""
    target = translation(model, objective, text) if isinstance(objective, TranslationObjective) else None
    clean = read_text(objective.recipe, model, objective, text=text, target=target)
    expected, ends = _log_p(clean), [0]
    ends += [span.end for span in objective.tokenizer.token_spans(text if target is None else target)]
    for other in others:
        reading = read_text(objective.recipe, model, objective, text=other, target=target)
        found = _log_p(reading)
        same = next(n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
        shift = len(other) - len(text)
        for count, end in enumerate(ends[: len(found) - clean.before + 1]):
            at = clean.before - 1 + count
            if at < 0 or (target is None and (count < 2 or ends[count - 1] <= same)):
                continue
            size, answers = _changed(expected[at], found[at])
            distance = max(1, sum(each > same for each in ends[:count])) if target is None else 1  # in tokens
            texts = (text[:end], other[: end + shift], "") if target is None else (text, other, target[:end])
            yield Change(size * math.sqrt(distance), *texts, answers)


def _masked_changes(
    model: LanguageModel, objective: Objective[Any], text: str, *, others: Sequence[str]
) -> Iterator[Change]:
    """Yield changes of a masked word near the end of the text, after the exchanged token."""
    tokenizer, frame = objective.tokenizer, frame_for(model)
    mask = tokenizer.need("mask")
    words = [span for span in tokenizer.token_spans(text) if span.text.strip().isalpha()][-MAX_MASKS:]
    for start, right in ((word.start, text[word.end :]) for word in words):
        found: list[tuple[str, Tensor]] = []  # the clean text first
        for whole in (text, *others):
            left = whole[: start + len(whole) - len(text)]
            if not whole.endswith(text[start:]) or (found and left == text[:start]):
                continue
            framed = frame(tokenizer, [*tokenizer.encode(left), mask, *tokenizer.encode(right)], None)
            log_p = _log_p(Reading(model, tokenizer, tuple(framed.ids), framed.before))[framed.ids.index(mask)]
            found.append((left + tokenizer.token(mask) + right, log_p))
        for other, log_p in found[1:]:
            size, answers = _changed(found[0][1], log_p)
            yield Change(size, found[0][0], other, "", answers)
