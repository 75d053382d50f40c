"""What a tokenizer's own file has around every text: its post-processor, seen by what it does."""

from typing import NamedTuple

import tokenizers

from weft.errors import TokenizerError
from weft.text import bounds

Ids = tuple[int, ...]


class PairFrame(NamedTuple):
    """Ids before, between and after two texts, and whether the second is in a segment of its own."""

    before: Ids = ()
    between: Ids = ()
    after: Ids = ()
    segments: bool = True


def frame_of(backend: tokenizers.Tokenizer, vocab_size: int) -> tuple[Ids, Ids]:
    """The ids before and after a text."""
    encoding = _framed(backend, vocab_size)
    if encoding is None:
        return (), ()
    text = [place for place, added in enumerate(encoding.special_tokens_mask) if not added]
    if not text:
        return tuple(encoding.ids), ()
    return tuple(encoding.ids[: text[0]]), tuple(encoding.ids[text[-1] + 1 :])


def pair_frame_of(backend: tokenizers.Tokenizer, vocab_size: int) -> PairFrame:
    """The same of two texts, where one is [CLS] and [SEP] around each, as a rule."""
    encoding = _framed(backend, vocab_size, "a")
    if encoding is None:
        return PairFrame()
    first, second = ([at for at, text in enumerate(encoding.sequence_ids) if text == number] for number in (0, 1))
    if not first or not second:  # a text of nothing
        before, after = frame_of(backend, vocab_size)
        return PairFrame(before, after, after)
    return PairFrame(
        tuple(encoding.ids[: first[0]]),
        tuple(encoding.ids[first[-1] + 1 : second[0]]),
        tuple(encoding.ids[second[-1] + 1 :]),
        encoding.type_ids[first[0]] != encoding.type_ids[second[0]],
    )


def _framed(backend: tokenizers.Tokenizer, vocab_size: int, second: str | None = None) -> tokenizers.Encoding | None:
    """A text, or two, as the file has them read; None where it says nothing."""
    if backend.post_processor is None:
        return None
    try:
        encoding = backend.encode("a", second)
    except BaseException as error:  # a word tokenizer without unk, which knows no such word
        if not bounds.is_failure(error):
            raise
        return None
    beyond = next((id for id in encoding.ids if id >= vocab_size), None)
    if beyond is not None:
        raise TokenizerError(
            f"the tokenizer's own file puts id {beyond} around a text, but the vocabulary ends at "
            f"{vocab_size - 1}; mend its post_processor"
        )
    return encoding
