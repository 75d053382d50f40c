"""Training of tokenizers, one function per kind; texts are read once.

The same texts in the same order give the same vocabulary, id for id, on every run.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import assert_never

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from weft.errors import TokenizerError
from weft.progress import bar
from weft.text.config import BPE, Byte, Char, Specials, TrainedConfig, Unigram, Word, WordPiece
from weft.text.token_bytes import byte_letters, byte_tokens

DEFAULT_SIZE = 8192  # tokens of a vocabulary whose settings name no size
MIN_FREQUENCY = 2  # of a pair to be merged
MAX_WORD_CHARACTERS = 1000  # of a word in WordPiece, whose greedy search is quadratic; longer words are unk
WORD_START = "\ue000"  # private use: BERT's normalizer removes it from texts, so it can mark the start of a word


def train(config: TrainedConfig, texts: Iterable[str], default_size: int = DEFAULT_SIZE) -> Tokenizer:
    """Return a trained Hugging Face tokenizer with its special tokens; `default_size` applies without a vocab_size."""
    with ExitStack() as bars:
        checked = _read(texts, bars)
        match config:
            case Word():
                backend = _word(config, checked)
            case Char():
                backend = _char(config, checked)
            case Byte():
                backend = _byte(config)
            case BPE():
                backend = _bpe(config, checked, default_size)
            case WordPiece():
                backend = _wordpiece(config, checked, default_size)
            case Unigram():
                backend = _unigram(config, checked, default_size)
            case _:
                assert_never(config)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in config.specials.tokens()])
    if (cls := config.specials.cls) and (sep := config.specials.sep):
        # for other programs that load the file; weft adds special tokens only on request
        ids = [(token, backend.token_to_id(token)) for token in (cls, sep)]
        backend.post_processor = processors.TemplateProcessing(f"{cls} $A {sep}", f"{cls} $A {sep} $B:1 {sep}:1", ids)
    return backend


def _read(texts: Iterable[str], bars: ExitStack) -> Iterator[str]:
    """Yield the texts, refusing invalid characters; after the last one, a progress bar shows that training goes on."""
    characters = 0
    for text in texts:
        refuse_surrogates(text)
        characters += len(text)
        yield text
    if not characters:
        raise TokenizerError("there is no text to train the tokenizer on; provide at least one character")
    bars.enter_context(bar(f"tokenizer: learning from {characters:,} characters", None))


def refuse_surrogates(text: str) -> None:
    """Refuse a text with a lone UTF-16 surrogate, which is not a character and has no UTF-8."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise TokenizerError(f"the text contains a lone surrogate, {found}, which is not a character") from None


def look_alikes(tokens: Iterable[str]) -> str:
    """Return a pattern for the first character of any text that looks like one of these tokens.

    A split there keeps the model from finding the look-alike in its vocabulary.
    """
    return "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in tokens)


def _split_look_alikes(base: pre_tokenizers.PreTokenizer, specials: Specials) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that also splits look-alikes of special tokens that `base` would keep in one piece."""
    unsplit = [token for token in specials.tokens() if len(base.pre_tokenize_str(token)) == 1]
    if not unsplit:
        return base
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(look_alikes(unsplit)), "isolated"), base])


def _lowercase(enabled: bool) -> normalizers.Normalizer | None:
    return normalizers.Lowercase() if enabled else None


def _check_minimum(vocab_size: int | None, minimum: int, why: str) -> None:
    if vocab_size is not None and vocab_size < minimum:
        raise TokenizerError(f"tokenizer.vocab_size = {vocab_size}: too small; {why} need at least {minimum}")


def _fit(vocab_size: int | None, supported: int) -> int:
    if vocab_size is not None and vocab_size > supported:
        why = f"the text supports {supported} at most"
        raise TokenizerError(f"tokenizer.vocab_size = {vocab_size}: {why}; lower it, or add text")
    return supported if vocab_size is None else vocab_size


def _word(config: Word, texts: Iterable[str]) -> Tokenizer:
    specials = config.specials.tokens()
    unk = {} if config.specials.unk is None else {"unk_token": config.specials.unk}
    backend = Tokenizer(models.WordLevel(**unk))
    backend.normalizer = _lowercase(config.lowercase)
    splits = {"whitespace": pre_tokenizers.WhitespaceSplit, "punctuation": pre_tokenizers.Whitespace}
    backend.pre_tokenizer = _split_look_alikes(splits[config.split](), config.specials)
    trainer = trainers.WordLevelTrainer(vocab_size=2**31, show_progress=False, min_frequency=config.min_count or 0)
    backend.train_from_iterator(texts, trainer)
    trained = backend.get_vocab()
    words = sorted(trained, key=trained.__getitem__)  # the trainer's ids: by frequency, then by code point
    if not words:
        if config.min_count is not None:
            raise TokenizerError(f"tokenizer.min_count = {config.min_count}: no word occurs this often; lower it")
        raise TokenizerError("there is no text to train the tokenizer on, only white space")
    _check_minimum(config.vocab_size, len(specials) + 1, f"{len(specials)} special tokens and a word")
    words = words[: _fit(config.vocab_size, len(specials) + len(words)) - len(specials)]
    if config.order == "codepoint":
        words.sort()
    backend.model = models.WordLevel({word: id for id, word in enumerate([*specials, *words])}, **unk)
    return backend


def _char(config: Char, texts: Iterable[str]) -> Tokenizer:
    """Train a BPE model without merges, which has a byte fallback for unseen characters."""
    fallback = config.fallback == "bytes"
    fixed = [*config.specials.tokens(), *(byte_tokens() if fallback else ())]
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.lower() if config.lowercase else text)
    _check_minimum(config.vocab_size, len(fixed) + 1, f"{len(fixed)} special and byte tokens and a character")
    size = _fit(config.vocab_size, len(fixed) + len(counts)) - len(fixed)
    frequent = sorted(counts, key=lambda char: (-counts[char], char))[:size]
    vocab = {token: id for id, token in enumerate([*fixed, *sorted(frequent)])}
    unk = None if fallback else config.specials.unk
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=fallback, unk_token=unk))
    backend.normalizer = _lowercase(config.lowercase)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _byte(config: Byte) -> Tokenizer:
    """Return a byte-level BPE model without merges; ids are the special tokens, then the bytes by value."""
    letters = byte_letters()
    tokens = [*config.specials.tokens(), *sorted(letters, key=letters.__getitem__)]
    backend = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _bpe(config: BPE, texts: Iterable[str], default_size: int) -> Tokenizer:
    specials = config.specials.tokens()
    _check_minimum(config.vocab_size, len(specials) + 256, f"{len(specials)} special tokens and 256 bytes")
    backend = Tokenizer(models.BPE())
    backend.normalizer = _lowercase(config.lowercase)
    backend.pre_tokenizer = _split_look_alikes(pre_tokenizers.ByteLevel(add_prefix_space=False), config.specials)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size or default_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=specials,
        initial_alphabet=sorted(byte_letters()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    _fit(config.vocab_size, backend.get_vocab_size())
    return backend


def _wordpiece(config: WordPiece, texts: Iterable[str], default_size: int) -> Tokenizer:
    """Train merges over words with a mark at their start; a piece without the mark continues a word.

    The library's trainer numbers the ## characters in an order that differs from run to run, and keeps only those that
    occur. Here every character is in the vocabulary in both forms (lecture 3: no word is unknown).
    """
    assert config.specials.unk is not None
    size = config.vocab_size or default_size
    specials = config.specials.tokens()
    normalizer = normalizers.BertNormalizer(lowercase=config.lowercase)
    pre_tokenizer = _split_look_alikes(pre_tokenizers.BertPreTokenizer(), config.specials)
    pairs = Tokenizer(models.BPE())
    pairs.normalizer = normalizer
    marker = pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme="always")
    pairs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, marker])
    # twice the size: a merge of the mark with a character adds no piece, and there are fewer characters than `size`
    trainer = trainers.BpeTrainer(vocab_size=2 * size, min_frequency=MIN_FREQUENCY, show_progress=False)
    pairs.train_from_iterator(texts, trainer)

    trained = pairs.get_vocab()
    pieces = sorted(trained, key=trained.__getitem__)
    alphabet = sorted(piece for piece in pieces if len(piece) == 1 and piece != WORD_START)
    if not alphabet:
        raise TokenizerError("there is no text to train the tokenizer on, only white space")
    inside = [char for char in alphabet if len(pre_tokenizer.pre_tokenize_str(f"a{char}")) == 1]
    fixed = [*specials, *alphabet, *(f"##{char}" for char in inside)]
    _check_minimum(size, len(fixed), f"{len(specials)} special tokens and {len(alphabet)} characters")
    merged = [piece[1:] if piece[0] == WORD_START else f"##{piece}" for piece in pieces if len(piece) > 1]
    vocab = list(dict.fromkeys([*fixed, *merged]))
    _fit(config.vocab_size, len(vocab))

    numbered, unk = {token: id for id, token in enumerate(vocab[:size])}, config.specials.unk
    backend = Tokenizer(models.WordPiece(numbered, unk_token=unk, max_input_chars_per_word=MAX_WORD_CHARACTERS))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.WordPiece()
    return backend


def _unigram(config: Unigram, texts: Iterable[str], default_size: int) -> Tokenizer:
    """Train with the library's EM (Kudo 2018), then add the bytes and fix the order of the vocabulary."""
    assert config.specials.unk is not None
    size = config.vocab_size or default_size
    specials = config.specials.tokens()
    fixed = [*specials, *byte_tokens()]
    backend = Tokenizer(models.Unigram())
    backend.normalizer = _lowercase(config.lowercase)
    # split at newlines, and split look-alikes of special tokens and byte tokens, which are not text
    split = pre_tokenizers.Split(Regex(rf"\n|{look_alikes(specials)}|<(?=0x[0-9A-F]{{2}}>)"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), split])
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])

    def with_alphabet() -> Iterator[str]:
        """Yield the texts; then, before the long training, refuse a size below the number of characters."""
        alphabet = {" "}
        for text in texts:
            alphabet.update(text)
            yield text
        # the library locks the tokenizer while it reads, so its normalizer can't be used here
        seen = "".join(alphabet)
        minimum = len(fixed) + len(set(seen.lower() if config.lowercase else seen))
        _check_minimum(size, minimum, f"{len(fixed)} special and byte tokens and the characters of the text")

    trainer = trainers.UnigramTrainer(
        vocab_size=max(size - 256, 1), special_tokens=specials, unk_token=config.specials.unk, show_progress=False
    )
    backend.train_from_iterator(with_alphabet(), trainer)
    trained = json.loads(backend.model.__getstate__())["vocab"]
    pieces = _deterministic([(piece, score) for piece, score in trained if piece not in specials])
    _fit(config.vocab_size, len(fixed) + len(pieces))
    while len(fixed) + len(pieces) > size:  # the trainer may overshoot: drop its least likely longer pieces
        pieces.remove(next(pair for pair in reversed(pieces) if len(pair[0]) > 1))
    vocab = [*((token, 0.0) for token in fixed), *pieces]
    backend.model = models.Unigram(vocab, unk_id=fixed.index(config.specials.unk), byte_fallback=True)
    return backend


def _deterministic(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Make scores and order the same on every run.

    The trainer restores pruned characters at its lowest score, 0.0001 apart, in any order, and its sums are rounded.
    """
    lowest = round(min((score for _, score in pieces), default=0.0), 6)
    pruned = lowest + 1e-4 * sum(len(piece) == 1 for piece, _ in pieces)
    rounded = [(p, lowest if len(p) == 1 and score < pruned else round(score, 6)) for p, score in pieces]
    return sorted(rounded, key=lambda pair: (-pair[1], pair[0]))
