"""Batches from examples: pairs to translate, sentences with a label or a tag a word, contrastive pairs, conversations.

Each kind of batch names the fields it reads, has a function for how long examples become in it (what `Buckets`
wants), and cuts what is longer than `length` tokens, never a special token. Padding is the tokenizer's own.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.data.batch import Batch, Source, packed, pad
from weft.data.examples import Array, Examples
from weft.data.messages import encode_chat
from weft.errors import DataError
from weft.text.tokenizer import Tokenizer

Rows = Sequence[int] | Array

# ---- a source and a target: fields `source` and `target`


def pairs_lengths(examples: Examples, length: int | None = None) -> Array:
    """(examples, 2): tokens of the source with its eos, and of the target with bos or eos."""
    both = np.stack([examples.lengths("source"), examples.lengths("target")], axis=1) + 1
    return both if length is None else np.minimum(both, length)


def pairs_batch(
    examples: Examples,
    rows: Rows,
    tokenizer: Tokenizer,
    *,
    source_tokenizer: Tokenizer | None = None,
    length: int | None = None,
) -> Batch:
    """Source: text and eos, (B, S). Tokens: bos and the target; targets: the target and eos, (B, T).

    `source_tokenizer` where the source has a vocabulary of its own.
    """
    bos, eos = tokenizer.need("bos"), tokenizer.need("eos")
    reading = source_tokenizer or tokenizer
    room = _room(length, 1)
    sources = [ids[:room] for ids in _ids(examples, "source", rows)]
    targets = [ids[:room] for ids in _ids(examples, "target", rows)]
    read, real = pad([[*ids, reading.need("eos")] for ids in sources], reading.pad_id)
    tokens, _ = pad([[bos, *ids] for ids in targets], tokenizer.pad_id)
    wanted, counts = pad([[*ids, eos] for ids in targets], tokenizer.pad_id)
    return Batch(tokens, wanted, loss_mask=counts, source=Source(read, real))


# ---- one sentence or two in a frame: fields `first` and, for a pair, `second`


class Sentences(NamedTuple):
    """tokens (B, T) int64, mask (B, T) bool, segments (B, T) int64 (None where there is one sentence)."""

    tokens: Tensor
    mask: Tensor
    segments: Tensor | None


def sentence_lengths(examples: Examples, tokenizer: Tokenizer, length: int | None = None) -> Array:
    """(examples,): tokens of a sentence or a pair in its frame."""
    if "second" not in examples.fields:
        return _framed_lengths(examples.lengths("first"), 1, tokenizer, length)
    return _framed_lengths(examples.lengths("first") + examples.lengths("second"), 2, tokenizer, length)


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
    room = _room(length, len(before) + (1 if second is None else 2) * len(after))
    if second is None:
        return Sentences(*pad([[*before, *ids[:room], *after] for ids in first], tokenizer.pad_id), None)
    whole: list[list[int]] = []
    segments: list[list[int]] = []
    for one, two in zip(first, second, strict=True):
        one, two = _shortened(one, two, room)
        head, tail = [*before, *one, *after], [*two, *after]
        whole.append(head + tail)
        segments.append([0] * len(head) + [1] * len(tail))
    return Sentences(*pad(whole, tokenizer.pad_id), pad(segments, 0)[0])


def framed_room(tokenizer: Tokenizer, length: int | None) -> tuple[int | None, int]:
    """How many tokens of one sentence a row of `length` has room for, and how many come before the first."""
    before, after = _frame(tokenizer)
    return _room(length, len(before) + len(after)), len(before)


def _framed_lengths(whole: Array, count: int, tokenizer: Tokenizer, length: int | None) -> Array:
    before, after = _frame(tokenizer)
    inside = whole + len(before) + count * len(after)
    return inside if length is None else np.minimum(inside, length)


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What comes before the first sentence, and after each.

    A frame in the tokenizer's own file, such as LLaMA's bos, is no part of it: runs are read as they were trained.
    """
    if tokenizer.cls_id is not None and tokenizer.sep_id is not None:
        return [tokenizer.cls_id], [tokenizer.sep_id]
    return [], [tokenizer.need("eos")]


def _room(length: int | None, specials: int) -> int | None:
    if length is not None and length <= specials:
        raise DataError(f"batch.length = {length}: too short for any text beside {specials} special tokens; raise it")
    return None if length is None else length - specials


def _ids(examples: Examples, field: str, rows: Rows) -> list[list[int]]:
    return [examples.ids(field, int(row)).tolist() for row in rows]


def _shortened(first: Sequence[int], second: Sequence[int], room: int | None) -> tuple[Sequence[int], Sequence[int]]:
    if room is None or len(first) + len(second) <= room:
        return first, second
    kept = max(room - len(second), (room + 1) // 2)  # of the first: what the second leaves, or half
    first = first[:kept]
    return first, second[: room - len(first)]


def labelled_batch(examples: Examples, rows: Rows, tokenizer: Tokenizer, *, length: int | None = None) -> Batch:
    """Sentences, each with one target (B,): its `label`, int64, or its `score`, float32."""
    second = _ids(examples, "second", rows) if "second" in examples.fields else None
    tokens, mask, segments = framed(_ids(examples, "first", rows), second, tokenizer, length=length)
    chosen = np.asarray(rows)
    if "label" in examples.fields:
        targets = torch.from_numpy(examples.values("label")[chosen].astype(np.int64))
    else:
        targets = torch.from_numpy(examples.values("score")[chosen].astype(np.float32))
    return Batch(tokens, targets, mask=mask, segments=segments)


def contrastive_batch(examples: Examples, rows: Rows, tokenizer: Tokenizer, *, length: int | None = None) -> Batch:
    """Two texts that belong together, each in a frame of its own: tokens and mask, and the other one as the source.

    The target of row i is i: its own partner among all of the batch (B,).
    """
    tokens, mask, _ = framed(_ids(examples, "first", rows), None, tokenizer, length=length)
    other = framed(_ids(examples, "second", rows), None, tokenizer, length=length)
    return Batch(tokens, torch.arange(len(tokens)), mask=mask, source=Source(other.tokens, other.mask))


def contrastive_lengths(examples: Examples, tokenizer: Tokenizer, length: int | None = None) -> Array:
    """(examples, 2): tokens of both texts in their frames."""
    both = np.stack([examples.lengths("first"), examples.lengths("second")], axis=1)
    return _framed_lengths(both, 1, tokenizer, length)


# ---- a tag a word: fields `first` and `tags`, as `tagged_example` makes them


def tagged_example(tokenizer: Tokenizer, words: Sequence[str], tags: Sequence[int]) -> dict[str, list[int]]:
    """The tokens of a sentence, and for each the tag of the word that it begins, -1 where it begins none.

    The words are joined by spaces and cut as any text is; a token belongs to the word in which it ends.
    """
    if len(words) != len(tags):
        raise DataError(f"{len(words)} words have {len(tags)} tags; each word needs one")
    text = " ".join(words)
    word_at = [number for number, word in enumerate(words) for _ in range(len(word) + 1)]  # by character
    ids: list[int] = []
    marks: list[int] = []
    begun: set[int] = set()
    for span in tokenizer.token_spans(text):
        word = word_at[span.end - 1] if span.end and not text[span.end - 1].isspace() else None
        ids.append(span.id)
        marks.append(-1 if word is None or word in begun else tags[word])
        begun |= set() if word is None else {word}
    lost = [repr(word) for number, word in enumerate(words) if number not in begun]
    if lost:
        raise DataError(f"the tokenizer makes no token of the word {lost[0]}")
    return {"first": ids, "tags": marks}


def tagged_batch(examples: Examples, rows: Rows, tokenizer: Tokenizer, *, length: int | None = None) -> Batch:
    """Sentences with targets (B, T) that count at the first token of each word alone."""
    tokens, mask, _ = framed(_ids(examples, "first", rows), None, tokenizer, length=length)
    room, before = framed_room(tokenizer, length)
    tags = np.full(tuple(tokens.shape), -1, dtype=np.int64)
    for at, row in enumerate(rows):
        marks = examples.ids("tags", int(row))[:room]
        tags[at, before : before + len(marks)] = marks
    targets = torch.from_numpy(np.maximum(tags, 0))
    return Batch(tokens, targets, loss_mask=torch.from_numpy(tags >= 0), mask=mask)


# ---- conversations: fields `tokens` and `replies`, as `chat_example` makes them


def chat_example(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """The tokens of a conversation, and 1 for each of the assistant's own."""
    ids, replies = encode_chat(tokenizer, messages)
    return {"tokens": ids, "replies": replies}


def chat_lengths(examples: Examples, length: int) -> Array:
    """(examples,): what each takes of a row; the last token is a target alone."""
    return np.minimum(examples.lengths("tokens") - 1, length)


def chat_batch(examples: Examples, rows: Rows, tokenizer: Tokenizer, *, length: int) -> Batch:
    """Conversations packed into as few rows (B, length) as best-fit finds; only the assistant's tokens are targets.

    None attends to another. One that is longer than a row is cut.
    """
    tokens = [ids[: length + 1] for ids in _ids(examples, "tokens", rows)]
    replies = [ids[: length + 1] for ids in _ids(examples, "replies", rows)]
    batch = packed(tokens, length, tokenizer.pad_id)
    own = packed(replies, length, 0)  # the same lengths, hence the same places
    assert batch.loss_mask is not None
    return Batch(
        batch.tokens,
        batch.targets,
        loss_mask=batch.loss_mask & own.targets.bool(),
        positions=batch.positions,
        documents=batch.documents,
    )
