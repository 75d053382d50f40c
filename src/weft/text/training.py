"""How each kind of tokenizer learns its vocabulary from texts that are read once.

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
from weft.storage.files import utf8_size
from weft.text.config import BPE, Byte, Char, Specials, TrainedConfig, Unigram, Word, WordPiece
from weft.text.token_bytes import byte_letters, byte_tokens

DEFAULT_SIZE = 8192
MIN_FREQUENCY = 2  # a pair seen once teaches nothing
MAX_WORD_CHARACTERS = 1000  # that wordpiece cuts; beyond, the greedy search gets slow and the word is unk
WORD_START = "\ue000"  # private use: BERT's normalizer removes it from texts, so it can mark


def learn(config: TrainedConfig, texts: Iterable[str], most: int = DEFAULT_SIZE) -> Tokenizer:
    """A trained Hugging Face tokenizer with its special tokens in place; of `most` tokens where none are asked for."""
    with ExitStack() as bars:
        reading = _read(texts, bars)
        match config:
            case Word():
                backend = _word(config, reading)
            case Char():
                backend = _char(config, reading)
            case Byte():
                backend = _byte(config)
            case BPE():
                backend = _bpe(config, reading, most)
            case WordPiece():
                backend = _wordpiece(config, reading, most)
            case Unigram():
                backend = _unigram(config, reading, most)
            case _:
                assert_never(config)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in config.specials.tokens()])
    if (cls := config.specials.cls) and (sep := config.specials.sep):
        # for other programs that load the file; weft's own encoding adds nothing unasked
        ids = [(token, backend.token_to_id(token)) for token in (cls, sep)]
        backend.post_processor = processors.TemplateProcessing(f"{cls} $A {sep}", f"{cls} $A {sep} $B:1 {sep}:1", ids)
    return backend


def _read(texts: Iterable[str], bars: ExitStack) -> Iterator[str]:
    """Passes the texts on and refuses what no tokenizer can hold; bars show the reading, and the learning after it."""
    characters = 0
    with bar("tokenizer: reading text", None, unit="bytes") as advance:
        for text in texts:
            refuse_surrogates(text)
            advance(utf8_size(text))
            characters += len(text)
            yield text
    if not characters:
        raise TokenizerError("there is no text to train the tokenizer on; provide at least one character")
    bars.enter_context(bar(f"tokenizer: learning from {characters:,} characters", None))


def refuse_surrogates(text: str) -> None:
    """An error where a text holds half of a UTF-16 pair, which is no character and has no UTF-8."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise TokenizerError(f"the text contains a lone surrogate, {found}, which is not a character") from None


def look_alikes(tokens: Iterable[str]) -> str:
    """A pattern for the first character of anything in a text that looks like one of these tokens.

    Cutting there keeps the look-alike from being found in the vocabulary.
    """
    return "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in tokens)


def _guarded(cutter: pre_tokenizers.PreTokenizer, specials: Specials) -> pre_tokenizers.PreTokenizer:
    """`cutter`, and a cut inside whatever looks like a special token and would otherwise stay whole."""
    whole = [token for token in specials.tokens() if len(cutter.pre_tokenize_str(token)) == 1]
    if not whole:
        return cutter
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(look_alikes(whole)), "isolated"), cutter])


def _lowercase(wanted: bool) -> normalizers.Normalizer | None:
    return normalizers.Lowercase() if wanted else None


def _need(asked: int | None, needed: int, why: str) -> None:
    if asked is not None and asked < needed:
        raise TokenizerError(f"tokenizer.vocab_size = {asked}: too small; {why} need at least {needed}")


def _fit(asked: int | None, supported: int) -> int:
    if asked is not None and asked > supported:
        why = f"the text supports {supported} at most"
        raise TokenizerError(f"tokenizer.vocab_size = {asked}: {why}; lower it, or add text")
    return supported if asked is None else asked


def _numbered(tokens: Iterable[str]) -> dict[str, int]:
    return {token: id for id, token in enumerate(tokens)}


def _word(config: Word, texts: Iterable[str]) -> Tokenizer:
    specials = config.specials.tokens()
    unk = {} if config.specials.unk is None else {"unk_token": config.specials.unk}
    backend = Tokenizer(models.WordLevel(**unk))
    backend.normalizer = _lowercase(config.lowercase)
    cutters = {"whitespace": pre_tokenizers.WhitespaceSplit, "punctuation": pre_tokenizers.Whitespace}
    backend.pre_tokenizer = _guarded(cutters[config.split](), config.specials)
    backend.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=2**31, show_progress=False))
    found = backend.get_vocab()
    words = sorted(found, key=found.__getitem__)  # the trainer's ids: by frequency, then by code point
    if not words:
        raise TokenizerError("there is no text to train the tokenizer on, only white space")
    _need(config.vocab_size, len(specials) + 1, f"{len(specials)} special tokens and a word")
    words = words[: _fit(config.vocab_size, len(specials) + len(words)) - len(specials)]
    if config.order == "codepoint":
        words.sort()
    backend.model = models.WordLevel(_numbered([*specials, *words]), **unk)
    return backend


def _char(config: Char, texts: Iterable[str]) -> Tokenizer:
    """A BPE model that never merges, so that its byte fallback serves characters too."""
    spelled = config.fallback == "bytes"
    fixed = [*config.specials.tokens(), *(byte_tokens() if spelled else ())]
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.lower() if config.lowercase else text)
    _need(config.vocab_size, len(fixed) + 1, f"{len(fixed)} special and byte tokens and a character")
    places = _fit(config.vocab_size, len(fixed) + len(counts)) - len(fixed)
    frequent = sorted(counts, key=lambda char: (-counts[char], char))[:places]
    vocab, unk = _numbered([*fixed, *sorted(frequent)]), None if spelled else config.specials.unk
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=spelled, unk_token=unk))
    backend.normalizer = _lowercase(config.lowercase)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _byte(config: Byte) -> Tokenizer:
    """A byte-level BPE model that never merges: the id of a byte is its value after the special tokens."""
    letters = byte_letters()
    vocab = _numbered([*config.specials.tokens(), *sorted(letters, key=letters.__getitem__)])
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _bpe(config: BPE, texts: Iterable[str], most: int) -> Tokenizer:
    specials = config.specials.tokens()
    _need(config.vocab_size, len(specials) + 256, f"{len(specials)} special tokens and 256 bytes")
    backend = Tokenizer(models.BPE())
    backend.normalizer = _lowercase(config.lowercase)
    backend.pre_tokenizer = _guarded(pre_tokenizers.ByteLevel(add_prefix_space=False), config.specials)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size or most,
        min_frequency=MIN_FREQUENCY,
        special_tokens=specials,
        initial_alphabet=sorted(byte_letters()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    _fit(config.vocab_size, backend.get_vocab_size())
    return backend


def _wordpiece(config: WordPiece, texts: Iterable[str], most: int) -> Tokenizer:
    """Pair merges over words whose beginning is marked; a piece without the mark continues a word.

    The library's own trainer numbers the ## characters as it meets them, which differs from run to run, and keeps
    only those it met. Here every character is in the vocabulary in both forms (lecture 3: no word is unknown).
    """
    assert config.specials.unk is not None
    asked = config.vocab_size or most
    specials = config.specials.tokens()
    normalizer = normalizers.BertNormalizer(lowercase=config.lowercase)
    cutter = _guarded(pre_tokenizers.BertPreTokenizer(), config.specials)
    pairs = Tokenizer(models.BPE())
    pairs.normalizer = normalizer
    marker = pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme="always")
    pairs.pre_tokenizer = pre_tokenizers.Sequence([cutter, marker])
    # twice: a merge of the mark with one character gives nothing new, and there are fewer characters than `asked`
    trainer = trainers.BpeTrainer(vocab_size=2 * asked, min_frequency=MIN_FREQUENCY, show_progress=False)
    pairs.train_from_iterator(texts, trainer)

    found = pairs.get_vocab()
    pieces = sorted(found, key=found.__getitem__)
    alphabet = sorted(piece for piece in pieces if len(piece) == 1 and piece != WORD_START)
    if not alphabet:
        raise TokenizerError("there is no text to train the tokenizer on, only white space")
    inside = [char for char in alphabet if len(cutter.pre_tokenize_str(f"a{char}")) == 1]
    fixed = [*specials, *alphabet, *(f"##{char}" for char in inside)]
    _need(asked, len(fixed), f"{len(specials)} special tokens and {len(alphabet)} characters")
    merged = [piece[1:] if piece[0] == WORD_START else f"##{piece}" for piece in pieces if len(piece) > 1]
    vocab = list(dict.fromkeys([*fixed, *merged]))
    _fit(config.vocab_size, len(vocab))

    numbered, unk = _numbered(vocab[:asked]), config.specials.unk
    backend = Tokenizer(models.WordPiece(numbered, unk_token=unk, max_input_chars_per_word=MAX_WORD_CHARACTERS))
    backend.normalizer = normalizer
    backend.pre_tokenizer = cutter
    backend.decoder = decoders.WordPiece()
    return backend


def _unigram(config: Unigram, texts: Iterable[str], most: int) -> Tokenizer:
    """Kudo's EM from the library, then the bytes put in, and the order of the vocabulary made fixed."""
    assert config.specials.unk is not None
    asked = config.vocab_size or most
    specials = config.specials.tokens()
    fixed = [*specials, *byte_tokens()]
    backend = Tokenizer(models.Unigram())
    backend.normalizer = _lowercase(config.lowercase)
    # lines stay apart; the pieces of the vocabulary that are no text (special tokens, bytes) are never found in one
    cut = pre_tokenizers.Split(Regex(rf"\n|{look_alikes(specials)}|<(?=0x[0-9A-F]{{2}}>)"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), cut])
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])

    def with_alphabet() -> Iterator[str]:
        """The texts; then, before the long work begins, an error where their characters don't fit."""
        alphabet = {" "}
        for text in texts:
            alphabet.update(text)
            yield text
        # the library holds a lock on the tokenizer while it reads, so this may not ask it for its normalizer
        seen = "".join(alphabet)
        needed = len(fixed) + len(set(seen.lower() if config.lowercase else seen))
        _need(asked, needed, f"{len(fixed)} special and byte tokens and the characters of the text")

    trainer = trainers.UnigramTrainer(
        vocab_size=max(asked - 256, 1), special_tokens=specials, unk_token=config.specials.unk, show_progress=False
    )
    backend.train_from_iterator(with_alphabet(), trainer)
    found = json.loads(backend.model.__getstate__())["vocab"]
    pieces = _settled([(piece, score) for piece, score in found if piece not in specials])
    _fit(config.vocab_size, len(fixed) + len(pieces))
    while len(fixed) + len(pieces) > asked:  # the trainer may overshoot; its least likely longer pieces go
        pieces.remove(next(pair for pair in reversed(pieces) if len(pair[0]) > 1))
    vocab = [*((token, 0.0) for token in fixed), *pieces]
    backend.model = models.Unigram(vocab, unk_id=fixed.index(config.specials.unk), byte_fallback=True)
    return backend


def _settled(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Scores and order that are the same on every run.

    The trainer adds the characters it pruned back at its lowest score, 0.0001 apart, in an order that changes
    from run to run, and its sums differ in the last digits.
    """
    lowest = round(min((score for _, score in pieces), default=0.0), 6)
    pruned = lowest + 1e-4 * sum(len(piece) == 1 for piece, _ in pieces)
    settled = [(p, lowest if len(p) == 1 and score < pruned else round(score, 6)) for p, score in pieces]
    return sorted(settled, key=lambda pair: (-pair[1], pair[0]))
