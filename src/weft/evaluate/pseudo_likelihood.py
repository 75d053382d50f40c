"""Pseudo-log-likelihood of texts: what a masked language model can say of a whole text.

Each token is masked in turn, and its log p is summed (Salazar et al. 2020). A word of several tokens is then too easy,
since the model sees its other parts, so by default the later tokens of the word are masked as well (Kauf & Ivanova
2023).
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from weft.data.corrupt import word_starts
from weft.evaluate.continuations import ContinuationScore
from weft.evaluate.perplexity import HEAD_ELEMENTS
from weft.models.base import evaluating
from weft.models.transformer import Transformer
from weft.text.tokenizer import Tokenizer

MAX_BATCH_TOKENS = 1 << 13  # of masked copies in one batch


class MaskedText(NamedTuple):
    """Ids of a text with the special tokens around it; the positions in `scored` are predicted, one after the other."""

    ids: tuple[int, ...]
    scored: range


class _Copy(NamedTuple):
    text: int
    ids: tuple[int, ...]
    position: int
    target: int


def pseudo_log_likelihoods(
    model: Transformer, tokenizer: Tokenizer, texts: Sequence[MaskedText], *, within_words: bool = False
) -> Iterator[tuple[int, ContinuationScore]]:
    """Yield the index of a text and the score of one of its tokens, for all tokens; a text's log p are summed.

    `within_words` leaves the later tokens of a word visible while an earlier one is predicted.
    """
    starts, mask = word_starts(tokenizer), tokenizer.need("mask")
    copies = []
    for number, text in enumerate(texts):
        for position in text.scored:
            end = position + 1
            while not within_words and end < text.scored.stop and not starts[text.ids[end]]:
                end += 1
            hidden = (*text.ids[:position], *[mask] * (end - position), *text.ids[end:])
            copies.append(_Copy(number, hidden, position, text.ids[position]))
    copies.sort(key=lambda copy: (-len(copy.ids), copy.text))
    for length, same in groupby(copies, key=lambda copy: len(copy.ids)):  # of equal length, so nothing is padded
        group = list(same)
        rows = max(1, min(MAX_BATCH_TOKENS // length, HEAD_ELEMENTS // model.config.vocab_size))
        for first in range(0, len(group), rows):
            batch = group[first : first + rows]
            for copy, score in zip(batch, _score(model, batch), strict=True):
                yield copy.text, score


@torch.inference_mode()
def _score(model: Transformer, batch: Sequence[_Copy]) -> list[ContinuationScore]:
    with evaluating(model) as device:
        tokens = torch.tensor([copy.ids for copy in batch], device=device)
        targets = torch.tensor([copy.target for copy in batch], device=device)
        positions = torch.tensor([copy.position for copy in batch], device=device)
        features = model.features(tokens)[torch.arange(len(batch), device=device), positions]
        log_p = model.readout(features).logits().float().log_softmax(-1)
        best = (log_p.argmax(-1) == targets).tolist()
        return list(map(ContinuationScore, log_p.gather(1, targets[:, None])[:, 0].tolist(), best))
