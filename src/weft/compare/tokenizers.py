"""Tokenizers on one text: how long a text gets, what of the vocabulary is used, what is unknown, and how fast they are.

Each is trained on the training side alone and measured on what is held out. Nothing of a model is in these numbers:
which tokenizer a model predicts text best with is a matter of bits per byte, at equal compute.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from weft.compare.asked import ALLOWED, choose
from weft.compare.tokenizer_picture import TokenizerComparison, TokenizerMeasure
from weft.data.config import TextSource
from weft.data.split import split_sections, train_texts
from weft.errors import ConfigError, DataError, TokenizerError
from weft.files import utf8_size
from weft.progress import Log, bar, log_to_stderr
from weft.text.config import Byte, TrainedConfig
from weft.text.tokenizer import Tokenizer, build_tokenizer

LECTURE = "Henry is givin' a lectrue on transformers"  # the sentence under each tokenizer of lecture 3
RARE = 10  # an entry that training has seen less often has hardly been learned
TOGETHER = 256  # sections encoded at a time
TIMED = 1 << 20  # bytes of text that speed is measured on
REPEATS = 3  # the best of them counts

Ints = npt.NDArray[np.int64]


def compare_tokenizers(
    specs: Sequence[str],
    data: TextSource | Sequence[str] | str,
    *,
    sentence: str = LECTURE,
    log: Log = log_to_stderr,
) -> TokenizerComparison:
    """What each tokenizer makes of the held-out side of a text, and of a `sentence`.

    A spec is a kind to train, with a vocabulary size if wanted (word, char, byte, bpe:8000, unigram:8000,
    wordpiece:8000, word:10000), or a run, a folder or a file with a finished tokenizer.
    """
    chosen = [(spec, choose(spec)) for spec in specs]
    if not chosen:
        raise ConfigError(f"--tokenizers: name at least one: {ALLOWED}")
    again = next((spec for spec, count in Counter(specs).items() if count > 1), None)
    if again is not None:
        raise ConfigError(f"--tokenizers {again}: it is named twice")
    text = _source(data)
    held_out, training = _sides(text, log)
    measures = [_measure(spec, each, text, held_out, sentence) for spec, each in chosen]
    return TokenizerComparison(tuple(measures), sentence, ", ".join(text.sources), training)


def _source(data: TextSource | Sequence[str] | str) -> TextSource:
    if not isinstance(data, TextSource):
        data = TextSource([data] if isinstance(data, str) else list(data))
    if "-" in data.sources:
        raise DataError("-: standard input can be read once, and every tokenizer reads the text; name a file")
    return data


def _sides(text: TextSource, log: Log) -> tuple[list[str], int]:
    """The held-out sections, and the bytes of the training side."""
    held_out: list[str] = []
    training = 0
    for section in split_sections(text, log=log):
        if section.side == "validation":
            held_out.append(section.text)
        else:
            training += section.size
    empty = "training" if not training else "held out" if not "".join(held_out).strip() else None
    if empty is not None:
        raise DataError(f"{', '.join(text.sources)}: no text is {empty}, so tokenizers can't be compared; add text")
    return held_out, training


def _measure(
    spec: str, chosen: TrainedConfig | Tokenizer, text: TextSource, held_out: Sequence[str], sentence: str
) -> TokenizerMeasure:
    try:
        tokenizer, seconds = _trained(chosen, text)
        with bar(f"{spec}: the training text", None):
            trained = sum(
                (_counts(tokenizer.encode_batch(some), tokenizer.vocab_size) for some in _groups(train_texts(text))),
                start=np.zeros(tokenizer.vocab_size, dtype=np.int64),
            )
        encoded = [ids for some in _groups(held_out) for ids in tokenizer.encode_batch(some)]
        pieces = tuple(_pieces(tokenizer, sentence))
    except TokenizerError as error:
        raise TokenizerError(f"{spec}: {error}") from None
    counts = _counts(encoded, tokenizer.vocab_size)
    ordinary = np.ones(tokenizer.vocab_size, dtype=bool)
    ordinary[list(tokenizer.special_tokens.values())] = False
    words = Counter(word for each in held_out for word in each.split())
    single, together, decoding = _speeds(tokenizer, held_out)
    return TokenizerMeasure(
        name=spec,
        kind=tokenizer.kind,
        entries=tokenizer.vocab_size,
        bytes=sum(map(utf8_size, held_out)),
        words=words.total(),
        tokens=int(counts.sum()),
        unknown_tokens=0 if tokenizer.unk_id is None else int(counts[tokenizer.unk_id]),
        unknown_words=_unknown_words(tokenizer, words),
        used=float((counts[ordinary] > 0).mean()),
        rare=float((trained[ordinary] < RARE).mean()),
        exact=all(tokenizer.decode(ids) == each for ids, each in zip(encoded, held_out, strict=True)),
        training_seconds=seconds,
        encode_speed=single,
        encode_all_cores_speed=together,
        decode_speed=decoding,
        pieces=pieces,
    )


def _trained(chosen: TrainedConfig | Tokenizer, text: TextSource) -> tuple[Tokenizer, float | None]:
    """A tokenizer, and the seconds that it was trained for, in which the text is read; None for a finished one."""
    if isinstance(chosen, Tokenizer):
        return chosen, None
    start = time.perf_counter()
    made = build_tokenizer(chosen, () if isinstance(chosen, Byte) else train_texts(text))
    return made, time.perf_counter() - start


def _counts(encoded: Iterable[Sequence[int]], entries: int) -> Ints:
    """How often each of the vocabulary's entries (entries,) occurs in some texts."""
    ids = np.fromiter(chain.from_iterable(encoded), dtype=np.int64)
    return np.bincount(ids, minlength=entries)


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(texts)
    while some := list(islice(rest, TOGETHER)):
        yield some


def _unknown_words(tokenizer: Tokenizer, words: Counter[str]) -> int:
    """Words, between white space, of which a part at least is unknown; each stands in a text, after a space."""
    if tokenizer.unk_id is None:
        return 0
    distinct = list(words)
    found = tokenizer.encode_batch([f" {word}" for word in distinct])
    return sum(words[word] for word, ids in zip(distinct, found, strict=True) if tokenizer.unk_id in ids)


def _speeds(tokenizer: Tokenizer, held_out: Sequence[str]) -> tuple[float, float, float]:
    """Megabytes of text a second: encoded one after another, encoded all at once, which takes all cores, and decoded.

    A section is encoded in one thread; the library divides the texts of a batch among the cores.
    """
    some, size = [], 0
    for each in held_out:
        some.append(each)
        size += utf8_size(each)
        if size >= TIMED:
            break
    encoded = tokenizer.encode_batch(some)
    single = _best(lambda: [tokenizer.encode(each) for each in some])
    together = _best(lambda: tokenizer.encode_batch(some))
    decoding = _best(lambda: [tokenizer.decode(ids) for ids in encoded])
    return size / single / 1e6, size / together / 1e6, size / decoding / 1e6


def _best(work: Callable[[], object]) -> float:
    """The seconds of the fastest of a few times: others are slower for reasons that have nothing to do with it."""
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return max(min(taken), 1e-9)


def _pieces(tokenizer: Tokenizer, sentence: str) -> Iterator[tuple[str, bool]]:
    """The tokens of a sentence as a reader would write them, and whether each is known.

    Whole words and BERT's pieces are shown as the vocabulary has them, all others as the text they add.
    """
    for id in tokenizer.encode(sentence):
        if id == tokenizer.unk_id or tokenizer.kind in ("word", "wordpiece"):
            yield tokenizer.token(id), id != tokenizer.unk_id
            continue
        spelled = tokenizer.token_bytes(id)
        try:
            yield spelled.decode(), True
        except UnicodeDecodeError:  # a part of a character
            yield "".join(f"<0x{byte:02X}>" for byte in spelled), True
