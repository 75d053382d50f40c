"""The surprisal of each token of a text: −log p, as psycholinguistics calls it (Hale 2001; Levy 2008)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from weft.errors import DataError
from weft.evaluate.perplexity import spans, token_losses
from weft.models.base import LanguageModel, evaluating
from weft.models.ngram import NGram


class Surprisal(NamedTuple):
    """A token as it stands in the text, and its surprisal in nats; None for a first token that nothing predicts."""

    token: str
    nats: float | None


@torch.no_grad()
def surprisals(model: LanguageModel, ids: Sequence[int], before: Sequence[int], length: int) -> list[float | None]:
    """−log p in nats of each of `ids` that are read after `before`.

    More than `length` tokens are read in windows of so many, each half a window further on: a token is predicted from
    half a window or more.
    """
    if not ids:
        raise DataError("the text to score is empty")
    if isinstance(model, NGram):  # it counted texts without anything before them
        return [-each for each in model.log_prob(np.asarray(ids), np.zeros(0, dtype=np.int64)).tolist()]
    tokens = torch.tensor([*before, *ids])
    found: list[float | None] = [None] * (not before)
    with evaluating(model) as device:
        for span in spans(len(tokens), length, max(1, length // 2)):
            row = tokens[span.start : span.start + span.length + 1].to(device)
            features = model.advance(row[None, :-1], model.start(1, span.length))
            losses = token_losses(model, features[0, -span.scored :], row[-span.scored :])
            found += losses.tolist()
    return found[-len(ids) :]
