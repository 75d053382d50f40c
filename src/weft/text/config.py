"""Settings of tokenizers, one config type per kind.

`build_tokenizer` in `text/tokenizer.py` trains a tokenizer with these settings, or loads a finished one.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from weft.config import Config

Role = Literal["pad", "unk", "bos", "eos", "cls", "sep", "mask"]
ROLES: tuple[Role, ...] = ("pad", "unk", "bos", "eos", "cls", "sep", "mask")

Pattern = Literal["gpt2", "cl100k", "o200k", "qwen2"]  # that splits text of a rank file (`vocabularies.py`)

VocabSize = Annotated[int, Field(ge=1)]


class Specials(Config):
    """Special tokens by role. A role without a token doesn't exist; two roles may share one token.

    They have the first ids, in the order of the fields; those of `extra` follow.
    """

    pad: str | None = Field(None, description="padding of rows")
    unk: str | None = Field(None, description="replaces text that has no token")
    bos: str | None = Field(None, description="begins a text")
    eos: str | None = Field(None, description="ends a text")
    cls: str | None = Field(None, description="begins the input of an encoder")
    sep: str | None = Field(None, description="ends each sentence in the input of an encoder")
    mask: str | None = Field(None, description="replaces a masked word")
    extra: tuple[str, ...] = Field((), description="others: chat roles, sentinels")

    @field_validator(*ROLES, "extra")
    @classmethod
    def _distinct(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for token in (value,) if isinstance(value, str) else value or ():
            # ordinary tokens may be one character or look like `<0x41>`
            if len(token) < 2 or token != token.strip() or re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                raise ValueError(f"{token!r} cannot be a special token; write two or more characters, as in '<pad>'")
        return value

    def roles(self) -> dict[Role, str]:
        """Return the roles that exist, with their tokens."""
        return {role: token for role in ROLES if (token := getattr(self, role)) is not None}

    def tokens(self) -> list[str]:
        """Return each special token once, in the order of their ids."""
        return list(dict.fromkeys([*self.roles().values(), *self.extra]))


OPEN = Specials(pad="<pad>", unk="<unk>", bos="<bos>", eos="<eos>")
CLOSED = Specials(pad="<pad>", bos="<bos>", eos="<eos>")  # for kinds that spell any text: nothing is unknown
BERT = Specials(pad="[PAD]", unk="[UNK]", cls="[CLS]", sep="[SEP]", mask="[MASK]")


class Trained(Config):
    """Settings of every kind that learns its vocabulary."""

    specials: Specials = Field(OPEN, description="special tokens by role")


class Word(Trained):
    """Whole words. A word that isn't in the training text becomes the unk token, or an error if there is none."""

    kind: Literal["word"] = "word"
    vocab_size: VocabSize | None = Field(None, description="number of most frequent words to keep; absent: all")
    min_count: VocabSize | None = Field(None, description="leave out words that occur fewer times than this")
    lowercase: bool = Field(False, description="convert text to lower case first")
    split: Literal["whitespace", "punctuation"] = Field(
        "whitespace", description="where words end: at whitespace, or at punctuation too"
    )
    order: Literal["frequency", "codepoint"] = Field("frequency", description="order of the ids")


class Char(Trained):
    """Characters. Characters that aren't in the training text become UTF-8 bytes, so any text is restored exactly.

    The bytes take 256 ids. With `fallback = "unk"` there are none, and unseen characters become the unk token.
    """

    kind: Literal["char"] = "char"
    vocab_size: VocabSize | None = Field(None, description="number of most frequent characters to keep; absent: all")
    lowercase: bool = Field(False, description="convert text to lower case first")
    fallback: Literal["bytes", "unk"] = Field("bytes", description="unseen characters become UTF-8 bytes or unk tokens")

    @model_validator(mode="after")
    def _unknown(self) -> Self:
        if self.fallback == "unk" and self.specials.unk is None:
            raise ValueError('fallback = "unk" needs specials.unk')
        return self


class Byte(Trained):
    """The 256 bytes of UTF-8, without training; they spell any text."""

    kind: Literal["byte"] = "byte"
    specials: Specials = Field(CLOSED, description="special tokens by role")


class BPE(Trained):
    """Byte-pair encoding over bytes, as in GPT-2 (Sennrich et al. 2016; Radford et al. 2019)."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: VocabSize | None = Field(None, description="absent: 8192, or fewer if the text supports fewer")
    lowercase: bool = Field(False, description="convert text to lower case first")
    specials: Specials = Field(CLOSED, description="special tokens by role")


class WordPiece(Trained):
    """BERT's pieces of words; pieces after the first begin with ## (Devlin et al. 2019)."""

    kind: Literal["wordpiece"] = "wordpiece"
    vocab_size: VocabSize | None = Field(None, description="absent: 8192, or fewer if the text supports fewer")
    lowercase: bool = Field(True, description="convert text to lower case first")
    specials: Specials = Field(BERT, description="special tokens by role")

    @model_validator(mode="after")
    def _unknown(self) -> Self:
        if self.specials.unk is None:
            raise ValueError("a wordpiece tokenizer needs specials.unk, for characters missing from the training text")
        return self


class Unigram(Trained):
    """SentencePiece's unigram model (Kudo 2018), with bytes for characters that aren't in the training text."""

    kind: Literal["unigram"] = "unigram"
    vocab_size: VocabSize | None = Field(None, description="absent: 8192, or fewer if the text supports fewer")
    lowercase: bool = Field(False, description="convert text to lower case first")

    @model_validator(mode="after")
    def _unknown(self) -> Self:
        if self.specials.unk is None:
            raise ValueError("a unigram tokenizer needs specials.unk")
        return self


class Pretrained(Config):
    """A finished tokenizer: a tokenizer.json, or a folder (a run, a Hugging Face model) with one.

    It may also be a SentencePiece model, tiktoken's ranks, BERT's vocab.txt, or GPT-2's vocab.json and merges.txt.
    """

    kind: Literal["pretrained"] = "pretrained"
    path: str = Field(description="file or folder")
    pattern: Pattern | None = Field(None, description="how a rank file's text is split; absent: by its number of ranks")


TrainedConfig = Word | Char | Byte | BPE | WordPiece | Unigram
TokenizerConfig = Annotated[TrainedConfig | Pretrained, Field(discriminator="kind")]
KINDS: tuple[str, ...] = ("word", "char", "byte", "bpe", "wordpiece", "unigram")
