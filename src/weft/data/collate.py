"""Sentences in the frame that encoders read: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from weft.data.batch import pad
from weft.data.examples import Array, Examples
from weft.errors import DataError
from weft.text.tokenizer import Tokenizer


class Sentences(NamedTuple):
    """tokens (B, T) int64, mask (B, T) bool, segments (B, T) int64 (None where there is one sentence)."""

    tokens: Tensor
    mask: Tensor
    segments: Tensor | None


def framed(
    first: Sequence[Sequence[int]],
    second: Sequence[Sequence[int]] | None,
    tokenizer: Tokenizer,
    *,
    length: int | None = None,
) -> Sentences:
    """[CLS] first [SEP], or [CLS] first [SEP] second [SEP]; with eos for [SEP] where the tokenizer has no such frame.

    Of a pair that is too long, the longer sentence is cut first (Devlin et al. 2019).
    """
    before, after = _frame(tokenizer)
    most = text_length(length, len(before) + (1 if second is None else 2) * len(after))
    if second is None:
        return Sentences(*pad([[*before, *ids[:most], *after] for ids in first], tokenizer.pad_id), None)
    whole: list[list[int]] = []
    segments: list[list[int]] = []
    for one, two in zip(first, second, strict=True):
        one, two = _shortened(one, two, most)
        head, tail = [*before, *one, *after], [*two, *after]
        whole.append(head + tail)
        segments.append([0] * len(head) + [1] * len(tail))
    return Sentences(*pad(whole, tokenizer.pad_id), pad(segments, 0)[0])


def framed_lengths(examples: Examples, fields: Sequence[str], tokenizer: Tokenizer, length: int) -> Array:
    """(examples,): tokens of a sentence, or of a pair in two fields, in its frame; `length` at most."""
    before, after = _frame(tokenizer)
    text = np.sum([examples.lengths(field) for field in fields], axis=0)
    return np.minimum(text + len(before) + len(fields) * len(after), length)


def framed_text_length(tokenizer: Tokenizer, length: int | None) -> tuple[int | None, int]:
    """How many tokens of one sentence fit into a row of `length`, and how many stand before the first."""
    before, after = _frame(tokenizer)
    return text_length(length, len(before) + len(after)), len(before)


def text_length(length: int | None, specials: int) -> int | None:
    """How many tokens of text fit into a row beside its special tokens."""
    if length is not None and length <= specials:
        raise DataError(f"batch.length = {length} leaves no space for text beside {specials} special tokens; raise it")
    return None if length is None else length - specials


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What comes before the first sentence, and after each.

    A frame in the tokenizer's own file, such as LLaMA's bos, is no part of it: runs are read as they were trained.
    """
    if tokenizer.cls_id is not None and tokenizer.sep_id is not None:
        return [tokenizer.cls_id], [tokenizer.sep_id]
    return [], [tokenizer.need("eos")]


def _shortened(first: Sequence[int], second: Sequence[int], most: int | None) -> tuple[Sequence[int], Sequence[int]]:
    if most is None or len(first) + len(second) <= most:
        return first, second
    kept = max(most - len(second), (most + 1) // 2)  # of the first: what the second leaves, or half
    first = first[:kept]
    return first, second[: most - len(first)]
