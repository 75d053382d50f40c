"""Which tokenizer: one config type a kind. Choosing the type chooses how text is cut.

`build_tokenizer` in `text/tokenizer.py` trains a tokenizer as these settings say, or loads a finished one.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from weft.config import Config

Role = Literal["pad", "unk", "bos", "eos", "cls", "sep", "mask"]
ROLES: tuple[Role, ...] = ("pad", "unk", "bos", "eos", "cls", "sep", "mask")

Pattern = Literal["gpt2", "cl100k", "o200k", "qwen2"]  # how a rank file's text is cut (`vocabularies.py`)

VocabSize = Annotated[int, Field(ge=1)]


class Specials(Config):
    """Special tokens by role. A role that is not named does not exist; two roles may share one token.

    They take the first ids, in the order of the fields, then `extra` (chat roles, sentinels).
    """

    pad: str | None = Field(None, description="fills rows up")
    unk: str | None = Field(None, description="stands for what has no token")
    bos: str | None = Field(None, description="begins a text")
    eos: str | None = Field(None, description="ends a text")
    cls: str | None = Field(None, description="begins what an encoder reads")
    sep: str | None = Field(None, description="ends each sentence that an encoder reads")
    mask: str | None = Field(None, description="stands for a masked word")
    extra: tuple[str, ...] = Field((), description="further ones: chat roles, sentinels")

    @field_validator(*ROLES, "extra")
    @classmethod
    def _distinct(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for token in (value,) if isinstance(value, str) else value or ():
            # one character, or `<0x41>`, is what ordinary tokens look like
            if len(token) < 2 or token != token.strip() or re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                raise ValueError(f"{token!r} cannot be a special token; write two or more characters, as in '<pad>'")
        return value

    def roles(self) -> dict[Role, str]:
        """The roles that exist, with their tokens."""
        return {role: token for role in ROLES if (token := getattr(self, role)) is not None}

    def tokens(self) -> list[str]:
        """Every special token once, in the order of their ids."""
        return list(dict.fromkeys([*self.roles().values(), *self.extra]))


OPEN = Specials(pad="<pad>", unk="<unk>", bos="<bos>", eos="<eos>")
CLOSED = Specials(pad="<pad>", bos="<bos>", eos="<eos>")  # for kinds that can spell any text: nothing is unknown
BERT = Specials(pad="[PAD]", unk="[UNK]", cls="[CLS]", sep="[SEP]", mask="[MASK]")


class Trained(Config):
    """What every kind that learns its vocabulary shares."""

    specials: Specials = Field(OPEN, description="special tokens by role")


class Word(Trained):
    """Whole words. A word that was not in the training text becomes the unk token, or is an error if there is none."""

    kind: Literal["word"] = "word"
    vocab_size: VocabSize | None = Field(None, description="the most frequent words only; absent: all of them")
    lowercase: bool = Field(False, description="make text lower case first")
    split: Literal["whitespace", "punctuation"] = Field(
        "whitespace", description="where a word ends: at white space, or at punctuation too"
    )
    order: Literal["frequency", "codepoint"] = Field("frequency", description="how ids follow each other")


class Char(Trained):
    """Characters. One that was not in the training text is spelled in UTF-8 bytes, so any text is restored exactly.

    The bytes take 256 ids. `fallback = "unk"` leaves them out and makes unseen characters the unk token.
    """

    kind: Literal["char"] = "char"
    vocab_size: VocabSize | None = Field(None, description="the most frequent characters only; absent: all of them")
    lowercase: bool = Field(False, description="make text lower case first")
    fallback: Literal["bytes", "unk"] = Field(
        "bytes", description="what an unseen character becomes: UTF-8 bytes or the unk token"
    )

    @model_validator(mode="after")
    def _unknown(self) -> Self:
        if self.fallback == "unk" and self.specials.unk is None:
            raise ValueError('fallback = "unk" needs specials.unk')
        return self


class Byte(Trained):
    """The 256 bytes of UTF-8: nothing to learn, no text it cannot spell."""

    kind: Literal["byte"] = "byte"
    specials: Specials = Field(CLOSED, description="special tokens by role")


class BPE(Trained):
    """Byte-pair encoding over bytes, as in GPT-2 (Sennrich et al. 2016; Radford et al. 2019)."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: VocabSize | None = Field(None, description="absent: 8192, or fewer where the text supports fewer")
    lowercase: bool = Field(False, description="make text lower case first")
    specials: Specials = Field(CLOSED, description="special tokens by role")


class WordPiece(Trained):
    """BERT's pieces: a word's first piece, then pieces that begin with ## (Devlin et al. 2019)."""

    kind: Literal["wordpiece"] = "wordpiece"
    vocab_size: VocabSize | None = Field(None, description="absent: 8192, or fewer where the text supports fewer")
    lowercase: bool = Field(True, description="make text lower case first")
    specials: Specials = Field(BERT, description="special tokens by role")

    @model_validator(mode="after")
    def _unknown(self) -> Self:
        if self.specials.unk is None:
            raise ValueError("a wordpiece tokenizer needs specials.unk, for characters missing from the training text")
        return self


class Unigram(Trained):
    """SentencePiece's unigram model (Kudo 2018), with bytes for characters that were not in the training text."""

    kind: Literal["unigram"] = "unigram"
    vocab_size: VocabSize | None = Field(None, description="absent: 8192, or fewer where the text supports fewer")
    lowercase: bool = Field(False, description="make text lower case first")

    @model_validator(mode="after")
    def _unknown(self) -> Self:
        if self.specials.unk is None:
            raise ValueError("a unigram tokenizer needs specials.unk")
        return self


class Pretrained(Config):
    """A finished tokenizer: a tokenizer.json, or a folder (a run, a Hugging Face model) that holds one.

    Also a SentencePiece model, tiktoken's ranks, BERT's vocab.txt, or GPT-2's vocab.json with merges.txt beside it.
    """

    kind: Literal["pretrained"] = "pretrained"
    path: str = Field(description="of the file or folder")
    pattern: Pattern | None = Field(None, description="how text is cut before ranks apply; absent: by their number")


TrainedConfig = Word | Char | Byte | BPE | WordPiece | Unigram
TokenizerConfig = Annotated[TrainedConfig | Pretrained, Field(discriminator="kind")]
KINDS: tuple[str, ...] = ("word", "char", "byte", "bpe", "wordpiece", "unigram")
