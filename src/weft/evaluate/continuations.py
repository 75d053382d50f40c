"""Log-probabilities of continuations after their contexts, in batches of similar length."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from weft.errors import ConfigError
from weft.evaluate.perplexity import HEAD_ELEMENTS
from weft.models.base import LanguageModel, evaluating

MAX_BATCH_TOKENS = 1 << 17  # of a batch, unless one text is longer: recurrent models have no window
UNLIMITED = 1 << 16  # the window of a model that has none

Ids = tuple[int, ...]


class Continuation(NamedTuple):
    """Ids of a text and of the context that it follows."""

    context: Sequence[int]
    ids: Sequence[int]


class ContinuationScore(NamedTuple):
    """log p of a continuation, and whether each of its tokens is the likeliest."""

    log_p: float
    greedy: bool


def scoring_window(model: LanguageModel) -> int:
    """Return the number of tokens that a causal model reads to score a continuation."""
    windowed = getattr(model.config, "kind", "") not in ("recurrent", "bengio", "ngram")
    context: int = getattr(model.config, "context", UNLIMITED) if windowed else UNLIMITED
    return context


def continuation_scores(
    model: LanguageModel, continuations: Sequence[Continuation], *, window: int, rows: int
) -> Iterator[tuple[int, ContinuationScore]]:
    """Yield the index and the score of each continuation, the longest first, `rows` texts in a batch.

    A context is cut at its beginning to fit into the `window`.
    """
    inputs: list[Ids] = []
    for context, ids in continuations:
        if not ids or not context or len(ids) > window:
            raise ConfigError(
                f"a continuation of {len(ids)} tokens after a context of {len(context)} cannot be scored with a window "
                f"of {window}"
            )
        inputs.append(tuple([*context, *ids][-(window + 1) :][:-1]))
    for batch in _batches(inputs, rows):
        scores = _score(model, [inputs[index] for index in batch], [continuations[index].ids for index in batch])
        yield from zip(batch, scores, strict=True)


def _batches(inputs: Sequence[Ids], rows: int) -> Iterator[list[int]]:
    """Yield the indices of requests in one batch, the longest first; equal inputs share a row of the batch.

    The answers to a multiple-choice question are mostly of one token, and then they have the same input.
    """
    order = sorted(range(len(inputs)), key=lambda index: (-len(inputs[index]), inputs[index]))
    batch: list[int] = []
    used = 0
    for ids, same in groupby(order, key=inputs.__getitem__):
        longest = len(inputs[batch[0]]) if batch else len(ids)
        if batch and used >= max(1, min(rows, MAX_BATCH_TOKENS // longest)):
            yield batch
            batch, used = [], 0
        batch, used = [*batch, *same], used + 1
    if batch:
        yield batch


@torch.inference_mode()
def _score(
    model: LanguageModel, inputs: Sequence[Ids], continuations: Sequence[Sequence[int]]
) -> list[ContinuationScore]:
    rows = {ids: row for row, ids in enumerate(dict.fromkeys(inputs))}
    tokens = torch.zeros(len(rows), len(inputs[0]), dtype=torch.long)  # padded on the right
    for ids, row in rows.items():
        tokens[row, : len(ids)] = torch.tensor(ids)
    predictions = [  # the last positions of a row predict its continuation
        (rows[ids], position, target)
        for ids, continuation in zip(inputs, continuations, strict=True)
        for position, target in enumerate(continuation, len(ids) - len(continuation))
    ]
    chunk = max(1, HEAD_ELEMENTS // int(model.config.vocab_size))  # type: ignore[attr-defined]
    logprobs, greedy = [], []
    with evaluating(model) as device:
        row_of, position_of, targets = torch.tensor(predictions, device=device).unbind(1)
        features = model.features(tokens.to(device))[row_of, position_of]
        for hidden, expected in zip(features.split(chunk), targets.split(chunk), strict=True):
            logits = model.head(hidden[None])[0].float()
            logprobs.append(logits.log_softmax(-1).gather(1, expected[:, None])[:, 0])
            greedy.append(logits.argmax(-1) == expected)
    lengths = list(map(len, continuations))
    scores = torch.cat(logprobs).double().cpu().split(lengths), torch.cat(greedy).cpu().split(lengths)
    return [ContinuationScore(float(log_p.sum()), bool(best.all())) for log_p, best in zip(*scores, strict=True)]
