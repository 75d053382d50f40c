"""One tokenizer over Hugging Face's `tokenizers`: text to ids, ids to text, special tokens by role, a chat template.

What is saved is their file format, so that other programs load it; nothing that is loaded can run code.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

# set, so that the library doesn't warn when the process forks; a child turns it off, for threads do not survive a fork
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import tokenizers
from tokenizers import AddedToken, Regex, pre_tokenizers

from weft.errors import TokenizerError, suggestion
from weft.storage.files import write_text
from weft.text import bounds, vocabularies
from weft.text.bounds import careful
from weft.text.config import ROLES, Pattern, Pretrained, Role, TokenizerConfig
from weft.text.disguise import WORN, Disguise
from weft.text.pieces import Joints, Piece, PieceIds, Pieces
from weft.text.template import render
from weft.text.token_bytes import BYTE_TOKEN, TextStream, TokenBytes
from weft.text.training import DEFAULT_SIZE, learn, look_alikes, refuse_surrogates

os.register_at_fork(after_in_child=lambda: os.environ.__setitem__("TOKENIZERS_PARALLELISM", "false"))

FILE = "tokenizer.json"
Ids = tuple[int, ...]

# the tokens that play a role in a file that names no roles
CUSTOMARY: dict[Role, tuple[str, ...]] = {
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "unk": ("<unk>", "[UNK]"),
    "bos": ("<bos>", "<s>", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("[MASK]", "<mask>"),
}


class TokenSpan(NamedTuple):
    """A token of a text: its id, the vocabulary's entry, and the characters start … end of the text it came from."""

    id: int
    token: str
    text: str
    start: int
    end: int


class Tokenizer:
    """Cuts text into tokens and puts it together again.

    Text that merely looks like a special token never becomes one: their ids enter by `bos`, `eos` and the `…_id`s,
    or through `encode(..., specials=True)`, for text that weft itself has written, and `reading_specials`.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, roles: Mapping[Role, str], chat_template: str | None = None
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        vocab = backend.get_vocab()
        _refuse_holes(vocab)
        # the roles that exist, and every special token with its id, those without a role too
        self.roles: dict[Role, str] = {role: roles[role] for role in ROLES if roles.get(role) in vocab}
        special = {entry.content for entry in backend.get_added_tokens_decoder().values() if entry.special}
        undeclared = [token for token in dict.fromkeys(self.roles.values()) if token not in special]
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in undeclared])
        self._json = backend.to_str()
        self.special_tokens = {token: vocab[token] for token in sorted(special.union(undeclared))}
        ids = {role: self.special_tokens[token] for role, token in self.roles.items()}
        self.pad_id, self.unk_id, self.bos_id, self.eos_id, self.cls_id, self.sep_id, self.mask_id = map(ids.get, ROLES)
        self.vocab_size = max(vocab.values(), default=-1) + 1  # special tokens included
        self.chat_template = chat_template
        self.place: Path | None = None  # of the file that it was read from
        self.finds_specials = False

        backend.encode_special_tokens = True  # not part of the file
        self._backend = backend
        # cut the look-alikes that the model itself would find in its vocabulary, as a unigram model does
        known = [token for token in self.special_tokens if token != self.roles.get("unk") and len(token) > 1]
        found = [token for token in known if vocab[token] in self._read(token)]
        if found:
            cut, before = pre_tokenizers.Split(Regex(look_alikes(found)), "isolated"), backend.pre_tokenizer
            backend.pre_tokenizer = cut if before is None else pre_tokenizers.Sequence([before, cut])
        for text in bounds.PROBES:  # panic now where a regular expression takes for ever, not on somebody's text
            self._read(text)
        self._token_bytes = TokenBytes(backend)
        # a word or a character that is unknown is missed in a text; a piece of one tells nobody anything
        shown = {self.unk_id} - {self.eos_id} if self.kind in ("word", "char") else set()
        self._hidden = frozenset(self.special_tokens.values()) - shown

    def _read(self, token: str) -> list[int]:
        try:
            return self._backend.encode(token, add_special_tokens=False).ids
        except Exception:  # a word tokenizer without unk knows no such word: nothing to protect
            return []

    @classmethod
    def from_json(cls, text: str, roles: Mapping[Role, str] | None = None, chat_template: str | None = None) -> Self:
        """From the content of a tokenizer.json. Without `roles`, customary names such as `<eos>` take theirs."""
        bounds.check(text)
        backend = careful(lambda: tokenizers.Tokenizer.from_str(text))
        if not backend.get_vocab_size():
            raise TokenizerError("not a tokenizer: its vocabulary is empty")
        if roles is None:
            known = backend.token_to_id
            named = {role: next((t for t in names if known(t) is not None), None) for role, names in CUSTOMARY.items()}
            roles = {role: token for role, token in named.items() if token is not None}
        return careful(lambda: cls(backend, roles, chat_template))

    @classmethod
    def load(cls, path: str | Path, pattern: Pattern | None = None) -> Self:
        """From a tokenizer.json or a folder that holds one, with the roles of the tokenizer_config.json beside it.

        Other programs' vocabularies (`vocabularies.py`) are read as well; `pattern` is how a rank file splits text.
        """
        path = Path(path)
        file = path / FILE if path.is_dir() else path
        if path.is_dir() and not file.is_file():
            file = vocabularies.in_folder(path) or file
        foreign = file.is_file() and vocabularies.is_vocabulary(file)
        text = None if foreign else vocabularies.optional_text(file)
        if text is None and not foreign:
            what = f"no {FILE} in this folder" if path.is_dir() else "no such tokenizer file or folder"
            raise TokenizerError(f"{path}: {what}")
        roles, template = vocabularies.read_settings(file.parent)
        try:
            if text is None:
                backend, own = careful(lambda: vocabularies.read(file, pattern))
                _refuse_holes(backend.get_vocab())
                text, roles = backend.to_str(), roles or own
            elif pattern is not None:
                raise TokenizerError(f"pattern = '{pattern}' applies to rank files only, and this is not one")
            made = cls.from_json(text, roles, template)
        except TokenizerError as error:
            raise TokenizerError(f"{file}: {error}") from None
        made.place = file
        return made

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json into a folder (or to a path ending in .json) and tokenizer_config.json beside it."""
        path = Path(path)
        file = path if path.suffix == ".json" else path / FILE
        try:
            vocabularies.write_settings(file.parent, self.roles, self.chat_template)
            write_text(file, self._json)
        except OSError as error:
            raise TokenizerError(f"{file}: cannot be written: {error.strerror}") from None

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        return self._json

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._json, self.roles, self.chat_template, self.finds_specials)

    def reading_specials(self) -> "Tokenizer":
        """The same tokenizer, but one that finds special tokens in every text: only for texts from a trusted hand."""
        return _again(self._json, self.roles, self.chat_template, finds_specials=True)

    @cached_property
    def fingerprint(self) -> str:
        """A sha256 that two tokenizers share when they give the same ids and roles to texts without special tokens."""
        return hashlib.sha256(f"{self._json}\n{json.dumps(self.roles)}".encode()).hexdigest()

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, specials: bool = False) -> list[int]:
        """The ids of a text. `specials` reads special tokens in it: only for text from a trusted hand."""
        with bounds.quiet:
            ids = self._encode(self._trusting if specials else self._backend, [text])[0]
        return [*([self.need("bos")] if bos else []), *ids, *([self.need("eos")] if eos else [])]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        return self._encode(self._backend, list(texts))

    def _encode(self, backend: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
        with self._telling(texts):
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self._backend)

    @property
    def joints(self) -> Joints | None:
        """Where a text may be cut into pieces (`pieces.py`); None where it is to be encoded whole."""
        return self._pieces.joints

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[PieceIds]:
        """The ids of many pieces of texts, on all cores: put together, those of the texts."""
        with self._telling(piece.text for piece in pieces):
            return self._pieces.encode(pieces)

    def token_spans(self, text: str, *, specials: bool = False) -> list[TokenSpan]:
        """How a text is cut. Tokens of one character that is spelled in bytes share its place; `specials` as above."""
        with self._telling([text]), bounds.quiet:
            encoding = (self._trusting if specials else self._backend).encode(text, add_special_tokens=False)
        cut = zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True)
        return [TokenSpan(id, token, text[start:end], start, end) for id, token, (start, end) in cut]

    @contextmanager
    def _telling(self, texts: Iterable[str]) -> Iterator[None]:
        """An error of the library becomes one that tells why these texts cannot be encoded."""
        try:
            yield
        except Exception as error:
            normalizer, cutter = self._backend.normalizer, self._backend.pre_tokenizer
            texts = list(texts)
            for text in texts:
                if not isinstance(text, str):
                    raise TokenizerError(f"{text!r:.60}: expected a text, not {type(text).__name__}") from None
                refuse_surrogates(text)
            for text in texts:
                text = text if normalizer is None else normalizer.normalize_str(text)
                for word, _ in [(text, None)] if cutter is None else cutter.pre_tokenize_str(text):
                    if self._backend.token_to_id(word) is None:
                        what = f"{word!r} is not in the vocabulary, and this tokenizer has no unk token"
                        raise TokenizerError(what) from None
            raise TokenizerError(f"the text cannot be encoded: {error}") from None
        except BaseException as error:
            if not bounds.is_failure(error):
                raise
            raise TokenizerError(f"the tokenizer fails on a text: {error}") from None

    @cached_property
    def _trusting(self) -> tokenizers.Tokenizer:
        """The same tokenizer, but one that finds special tokens in a text."""
        return tokenizers.Tokenizer.from_str(self._json)

    def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
        """The text of these ids, with their special tokens if `specials`, else with those for unknown words alone."""
        skip = frozenset() if specials else self._hidden
        return self._token_bytes.join([id for each in ids if (id := int(each)) not in skip]).decode("utf-8", "replace")

    def stream(self, *, specials: bool = False, mid_text: bool = False) -> TextStream:
        """Return a decoder for ids that come one at a time: `push` and `flush` together return what `decode` does.

        If `mid_text`, the ids continue a text, so that the first word keeps its leading space.
        """
        return TextStream(self._token_bytes, frozenset() if specials else self._hidden, mid_text)

    @cached_property
    def kind(self) -> str:
        """word, char, byte, bpe, wordpiece or unigram."""
        model = type(self._backend.model).__name__
        if model != "BPE":
            return {"WordLevel": "word", "WordPiece": "wordpiece", "Unigram": "unigram"}[model]
        ordinary = self._backend.get_vocab().keys() - self.special_tokens.keys()
        if any(len(token) > 1 and not BYTE_TOKEN.fullmatch(token) for token in ordinary):
            return "bpe"
        return "byte" if self._token_bytes.bytewise else "char"

    def token(self, id: int) -> str:
        """The vocabulary's entry for an id."""
        return self._token_bytes.token(int(id))

    def token_bytes(self, id: int) -> bytes:
        """The bytes that an id adds to a text which has begun; they may be a part of a character."""
        return self._token_bytes[int(id)]

    def id(self, token: str) -> int:
        """The id of a vocabulary's entry."""
        id = self._backend.token_to_id(token)
        if id is None:
            raise TokenizerError(f"{token!r} is not in the vocabulary; {suggestion(token, self._backend.get_vocab())}")
        return id

    @property
    def frames(self) -> bool:
        """Whether the tokenizer's own file says what stands around a text, be it nothing."""
        return self._backend.post_processor is not None

    @cached_property
    def frame(self) -> tuple[Ids, Ids]:
        """The ids that the tokenizer's own file (its post-processor) puts before and after every text; mostly none."""
        encoding = self._framed()
        if encoding is None:
            return (), ()
        text = [place for place, added in enumerate(encoding.special_tokens_mask) if not added]
        first, last = (text[0], text[-1]) if text else (len(encoding.ids), len(encoding.ids))
        return tuple(encoding.ids[:first]), tuple(encoding.ids[last + 1 :])

    @cached_property
    def pair_frame(self) -> tuple[Ids, Ids, Ids, bool]:
        """The same before, between and after two texts; and whether the second is in a segment of its own."""
        encoding = self._framed("a")
        if encoding is None:
            return (), (), (), True
        first, second = ([at for at, text in enumerate(encoding.sequence_ids) if text == number] for number in (0, 1))
        if not first or not second:  # a text of nothing
            before, after = self.frame
            return before, after, after, True
        before, between = tuple(encoding.ids[: first[0]]), tuple(encoding.ids[first[-1] + 1 : second[0]])
        segments = encoding.type_ids[first[0]] != encoding.type_ids[second[0]]
        return before, between, tuple(encoding.ids[second[-1] + 1 :]), segments

    def _framed(self, second: str | None = None) -> tokenizers.Encoding | None:
        """A text, or two, as the file has them read; None where it says nothing."""
        if self._backend.post_processor is None:
            return None
        try:
            encoding = self._backend.encode("a", second)
        except BaseException as error:  # a word tokenizer without unk, which knows no such word
            if not bounds.is_failure(error):
                raise
            return None
        beyond = next((id for id in encoding.ids if id >= self.vocab_size), None)
        if beyond is not None:
            wrong = f"puts id {beyond} around a text, but the vocabulary ends at {self.vocab_size - 1}"
            raise TokenizerError(f"the tokenizer's own file {wrong}; mend its post_processor")
        return encoding

    @property
    def leading(self) -> tuple[int, ...]:
        """The ids that the tokenizer's own file puts before every text, as LLaMA's does with bos; mostly none."""
        return self.frame[0]

    @property
    def opens(self) -> bool:
        """Whether the tokenizer's own file puts bos before every text; documents to learn from then begin with it."""
        return self.bos_id is not None and self.bos_id in self.leading

    def need(self, role: Role) -> int:
        """The id of a role that has to exist."""
        token = self.roles.get(role)
        if token is None:
            has = f"it has {', '.join(self.roles) or 'none'}"
            raise TokenizerError(f"this {self.kind} tokenizer has no {role} token ({has}); set specials.{role}")
        return self.special_tokens[token]

    def chat(self, messages: Sequence[Mapping[str, str]], *, reply: bool = True) -> str:
        """The text of a conversation of {role, content} messages; `reply` opens the assistant's turn.

        The template comes with the tokenizer, so it is rendered in a sandbox. What it makes of `to_chat`'s messages is
        for `chat_ids`.
        """
        if self.chat_template is None:
            giver = f"a {vocabularies.SETTINGS} beside {FILE} may give it one"
            raise TokenizerError(f"this tokenizer has no chat template; {giver}")
        tokens = {f"{role}_token": self.roles.get(role, "") for role in ROLES}
        given = {"messages": messages, "add_generation_prompt": reply, "tools": None, "documents": None, **tokens}
        try:
            return render(self.chat_template, given)
        except TokenizerError as error:
            raise TokenizerError(f"{self.place.parent}: {error}" if self.place else str(error)) from None

    def to_chat(self, messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """Messages for `chat`, in which what looks like a special token is text, unless this tokenizer reads them."""
        given = [dict(message) for message in messages]
        if all(self.encode(each["content"], specials=True) == self.encode(each["content"]) for each in given):
            return given
        return [{**message, "content": self._disguise.put_on(message["content"])} for message in given]

    def chat_ids(self, text: str) -> list[int]:
        """The ids of what `chat` has made of `to_chat`'s messages: special tokens are found in it, but for those."""
        return (
            self._encode(self._disguise.backend, [text])[0] if WORN.search(text) else self.encode(text, specials=True)
        )

    @cached_property
    def _disguise(self) -> Disguise:
        return Disguise(self._backend, self.special_tokens)


def _again(json: str, roles: Mapping[Role, str], chat_template: str | None, finds_specials: bool) -> Tokenizer:
    made = Tokenizer.from_json(json, roles, chat_template)
    if finds_specials:
        made._backend, made.finds_specials = made._trusting, True
    return made


def build_tokenizer(settings: TokenizerConfig, texts: Iterable[str] = (), most: int = DEFAULT_SIZE) -> Tokenizer:
    """The tokenizer that `settings` describe: trained on texts, which are read once, one at a time; or a finished one.

    Pieces of words are learned up to `most` tokens, or as many as the text supports, where the settings name no
    `vocab_size`.
    """
    if isinstance(settings, Pretrained):
        return Tokenizer.load(settings.path, settings.pattern)
    return Tokenizer(learn(settings, texts, most), settings.specials.roles())


def _refuse_holes(vocab: Mapping[str, int]) -> None:
    """Ids may leave some out, but a hole of millions is no vocabulary, and the library fills it when it is saved."""
    token = max(vocab, key=vocab.__getitem__, default="")
    most = 4 * len(vocab) + 65536
    if vocab and vocab[token] >= most:
        shown = token if len(token) <= 40 else token[:40] + "…"
        found = f"the token {shown!r} has id {vocab[token]}, far beyond its {len(vocab)} tokens"
        raise TokenizerError(f"not a tokenizer: {found}; expected ids below {most}")
