"""The tokenizer, over Hugging Face's `tokenizers`: encoding, decoding, special tokens by role, a chat template.

Files have Hugging Face's format, so that other programs load them; loading a file can't run code.
"""

import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, Self

# set explicitly, so that the library doesn't warn about a fork; a child disables it, since threads don't survive a fork
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import tokenizers
from tokenizers import AddedToken, Regex, pre_tokenizers

from weft.errors import TokenizerError, os_errors, suggestion
from weft.storage.files import write_text
from weft.text import bounds, vocabularies
from weft.text.bounds import call_library
from weft.text.config import ROLES, Pattern, Pretrained, Role, TokenizerConfig
from weft.text.fragments import FragmentEncoder, FragmentIds, SplitPoints, TextFragment
from weft.text.template import ESCAPED, SpecialTokenEscape, render
from weft.text.token_bytes import BYTE_TOKEN, TextStream, TokenBytes
from weft.text.training import DEFAULT_SIZE, look_alikes, refuse_surrogates, train

os.register_at_fork(after_in_child=lambda: os.environ.__setitem__("TOKENIZERS_PARALLELISM", "false"))

FILE = "tokenizer.json"
SHOWN_TOKENS = 60  # of a vocabulary, in a notebook
Ids = tuple[int, ...]

# tokens of each role in a file that names no roles
_ROLES: Any = tomllib.loads(Path(__file__).with_name("roles.toml").read_text(encoding="utf-8"))
CUSTOMARY: dict[Role, list[str]] = _ROLES


class TokenSpan(NamedTuple):
    """A token of a text: its id, the vocabulary's entry, and its half-open range [start, end) of characters."""

    id: int
    token: str
    text: str
    start: int
    end: int


class Tokenizer:
    """Encodes text as token ids, and decodes them.

    Text that looks like a special token isn't read as one. Special ids are added by `bos`, `eos` and the `…_id`s, or
    read by `encode(..., specials=True)` and `reading_specials`, for trusted texts.
    """

    def __init__(self, backend: tokenizers.Tokenizer, roles: Mapping[Role, str], chat_template: str | None = None):
        backend.no_padding()
        backend.no_truncation()
        vocab = backend.get_vocab()
        bounds.check_ids(vocab)
        self.roles: dict[Role, str] = {role: roles[role] for role in ROLES if roles.get(role) in vocab}
        special = {entry.content for entry in backend.get_added_tokens_decoder().values() if entry.special}
        undeclared = [token for token in dict.fromkeys(self.roles.values()) if token not in special]
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in undeclared])
        self._json = backend.to_str()
        # with and without a role
        self.special_tokens = {token: vocab[token] for token in sorted(special.union(undeclared))}
        ids = {role: self.special_tokens[token] for role, token in self.roles.items()}
        self.pad_id, self.unk_id, self.bos_id, self.eos_id, self.cls_id, self.sep_id, self.mask_id = map(ids.get, ROLES)
        self.vocab_size = max(vocab.values(), default=-1) + 1  # special tokens included
        self.chat_template = chat_template
        self.path: Path | None = None  # of the file that it was loaded from
        self.finds_specials = False

        backend.encode_special_tokens = True  # not part of the file
        self._backend = backend
        # split look-alikes that the model would find in its vocabulary, as a unigram model does
        candidates = [token for token in self.special_tokens if token != self.roles.get("unk") and len(token) > 1]
        found = [token for token in candidates if vocab[token] in self._try_encode(token)]
        if found:
            split, before = pre_tokenizers.Split(Regex(look_alikes(found)), "isolated"), backend.pre_tokenizer
            backend.pre_tokenizer = split if before is None else pre_tokenizers.Sequence([before, split])
        for text in bounds.PROBES:  # an exponential regular expression panics here, not on a user's text
            self._try_encode(text)
        self._token_bytes = TokenBytes(backend)
        # an unknown word or character is shown in a text; an unknown piece of a word would mean nothing
        shown = {self.unk_id} - {self.eos_id} if self.kind in ("word", "char") else set()
        self._hidden = frozenset(self.special_tokens.values()) - shown

    def _try_encode(self, text: str) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        except Exception:  # a word tokenizer without unk doesn't know the word
            return []

    @classmethod
    def from_json(cls, text: str, roles: Mapping[Role, str] | None = None, chat_template: str | None = None) -> Self:
        """Build a tokenizer from a tokenizer.json; without `roles`, customary names such as `<eos>` have theirs."""
        bounds.check(text)
        backend = call_library(lambda: tokenizers.Tokenizer.from_str(text))
        if not backend.get_vocab_size():
            raise TokenizerError("not a tokenizer: its vocabulary is empty")
        if roles is None:
            known = {
                role: [t for t in names if backend.token_to_id(t) is not None] for role, names in CUSTOMARY.items()
            }
            roles = {role: tokens[0] for role, tokens in known.items() if tokens}
        return call_library(lambda: cls(backend, roles, chat_template))

    @classmethod
    def load(cls, path: str | Path, pattern: Pattern | None = None) -> Self:
        """Load a tokenizer.json, or a folder with one, and the roles in tokenizer_config.json beside it.

        Other programs' vocabularies (`vocabularies.py`) are read as well; `pattern` splits the text of a rank file.
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
                backend, file_roles = call_library(lambda: vocabularies.read(file, pattern))
                bounds.check_ids(backend.get_vocab())
                text, roles = backend.to_str(), roles or file_roles
            elif pattern is not None:
                raise TokenizerError(f"pattern = '{pattern}' applies to rank files only, and this is not one")
            tokenizer = cls.from_json(text, roles, template)
        except TokenizerError as error:
            raise TokenizerError(f"{file}: {error}") from None
        tokenizer.path = file
        return tokenizer

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json into a folder (or to a path ending in .json) and tokenizer_config.json beside it."""
        path = Path(path)
        file = path if path.suffix == ".json" else path / FILE
        with os_errors(file, TokenizerError, verb="written"):
            vocabularies.write_settings(file.parent, self.roles, self.chat_template)
            write_text(file, self._json)

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return self._json

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(_rebuild, finds_specials=self.finds_specials), (self._json, self.roles, self.chat_template)

    def reading_specials(self) -> "Tokenizer":
        """Return a copy that reads special tokens in every text: only for trusted texts."""
        return _rebuild(self._json, self.roles, self.chat_template, finds_specials=True)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 that two tokenizers share if they give the same ids and roles to texts without special tokens."""
        return hashlib.sha256(f"{self._json}\n{json.dumps(self.roles)}".encode()).hexdigest()

    def __repr__(self) -> str:
        return f"Tokenizer({type(self._backend.model).__name__}: {self.vocab_size:,} tokens)"

    def _repr_html_(self) -> str:
        tokens = " ".join(f"<code>{escape(self.token(id))}</code>" for id in range(min(self.vocab_size, SHOWN_TOKENS)))
        roles = ", ".join(f"{role} <code>{escape(token)}</code>" for role, token in self.roles.items())
        return f"<p>{escape(repr(self))}{roles and f'; {roles}'}</p><p>{tokens} …</p>"

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, specials: bool = False) -> list[int]:
        """Return the ids of a text; `specials` reads special tokens in it, only for trusted text."""
        with bounds.quiet:
            ids = self._encode(self._trusting if specials else self._backend, [text])[0]
        return [*([self.need("bos")] if bos else []), *ids, *([self.need("eos")] if eos else [])]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts, encoded on all cores."""
        return self._encode(self._backend, list(texts))

    def _encode(self, backend: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
        with self._explain_errors(texts):
            if not all(isinstance(text, str) for text in texts):  # the library would take a list of words
                raise TypeError
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    @cached_property
    def _fragments(self) -> FragmentEncoder:
        return FragmentEncoder(self._backend)

    @property
    def split_points(self) -> SplitPoints | None:
        """Positions at which a text may be split into fragments (`fragments.py`); None if it may not be split."""
        return self._fragments.split_points

    def encode_fragments(self, fragments: Sequence[TextFragment]) -> list[FragmentIds]:
        """Encode fragments of texts on all cores; their ids, concatenated, equal those of the texts."""
        with self._explain_errors(fragment.text for fragment in fragments):
            return self._fragments.encode(fragments)

    def token_spans(self, text: str, *, specials: bool = False) -> list[TokenSpan]:
        """Return the tokens of a text with their ranges; byte tokens of one character share its range."""
        with self._explain_errors([text]), bounds.quiet:
            encoding = (self._trusting if specials else self._backend).encode(text, add_special_tokens=False)
        tokens = zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True)
        return [TokenSpan(id, token, text[start:end], start, end) for id, token, (start, end) in tokens]

    @contextmanager
    def _explain_errors(self, texts: Iterable[str]) -> Iterator[None]:
        """Convert an error of the library to one that says why these texts can't be encoded."""
        try:
            yield
        except Exception as error:
            normalizer, pre_tokenizer = self._backend.normalizer, self._backend.pre_tokenizer
            texts = list(texts)
            for text in texts:
                if not isinstance(text, str):
                    raise TokenizerError(f"{text!r:.60}: expected a text, not {type(text).__name__}") from None
                refuse_surrogates(text)
            for text in texts:
                text = text if normalizer is None else normalizer.normalize_str(text)
                for word, _ in [(text, None)] if pre_tokenizer is None else pre_tokenizer.pre_tokenize_str(text):
                    if self._backend.token_to_id(word) is None:
                        reason = f"{word!r} is not in the vocabulary, and this tokenizer has no unk token"
                        raise TokenizerError(reason) from None
            raise TokenizerError(f"the text cannot be encoded: {error}") from None
        except BaseException as error:
            if not bounds.is_failure(error):
                raise
            raise TokenizerError(f"the tokenizer fails on a text: {error}") from None

    @cached_property
    def _trusting(self) -> tokenizers.Tokenizer:
        """A backend that finds special tokens in a text."""
        return tokenizers.Tokenizer.from_str(self._json)

    def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
        """Return the text of ids; special tokens are left out unless `specials`, except those for unknown words."""
        skip = frozenset() if specials else self._hidden
        try:
            shown = [id for each in ids if (id := int(each)) not in skip]
        except (TypeError, ValueError):
            raise TokenizerError(f"{ids!r:.60}: expected token ids, such as [5, 7]") from None
        return self._token_bytes.join(shown).decode("utf-8", "replace")

    def stream(self, *, specials: bool = False, mid_text: bool = False) -> TextStream:
        """Return a decoder for ids that come one at a time: `push` and `flush` together equal `decode`.

        If `mid_text`, the ids continue a text, so that the first word keeps its leading space.
        """
        return TextStream(self._token_bytes, frozenset() if specials else self._hidden, mid_text)

    @cached_property
    def kind(self) -> str:
        """One of word, char, byte, bpe, wordpiece or unigram."""
        model = type(self._backend.model).__name__
        if model != "BPE":
            return {"WordLevel": "word", "WordPiece": "wordpiece", "Unigram": "unigram"}[model]
        ordinary = self._backend.get_vocab().keys() - self.special_tokens.keys()
        if any(len(token) > 1 and not BYTE_TOKEN.fullmatch(token) for token in ordinary):
            return "bpe"
        return "byte" if self._token_bytes.bytewise else "char"

    def token(self, id: int) -> str:
        """Return the vocabulary's entry for an id."""
        return self._token_bytes.token(int(id))

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that an id adds in the middle of a text; they may be part of a character."""
        return self._token_bytes[int(id)]

    def id(self, token: str) -> int:
        """Return the id of a vocabulary's entry."""
        id = self._backend.token_to_id(token)
        if id is None:
            raise TokenizerError(f"{token!r} is not in the vocabulary; {suggestion(token, self._backend.get_vocab())}")
        return id

    @property
    def has_frame(self) -> bool:
        """Whether the tokenizer's file has a post-processor, even one that adds no tokens."""
        return self._backend.post_processor is not None

    @cached_property
    def frame(self) -> tuple[Ids, Ids]:
        """Ids that the tokenizer's post-processor puts before and after every text; mostly none."""
        encoding = self._post_process()
        if encoding is None:
            return (), ()
        text = [position for position, added in enumerate(encoding.special_tokens_mask) if not added]
        first, last = (text[0], text[-1]) if text else (len(encoding.ids), len(encoding.ids))
        return tuple(encoding.ids[:first]), tuple(encoding.ids[last + 1 :])

    @cached_property
    def pair_frame(self) -> tuple[Ids, Ids, Ids, bool]:
        """Ids that the post-processor puts before, between and after two texts; and whether their segments differ."""
        encoding = self._post_process("a")
        if encoding is None:
            return (), (), (), True
        first, second = ([at for at, text in enumerate(encoding.sequence_ids) if text == number] for number in (0, 1))
        if not first or not second:  # the post-processor drops a text
            before, after = self.frame
            return before, after, after, True
        before, between = tuple(encoding.ids[: first[0]]), tuple(encoding.ids[first[-1] + 1 : second[0]])
        segments = encoding.type_ids[first[0]] != encoding.type_ids[second[0]]
        return before, between, tuple(encoding.ids[second[-1] + 1 :]), segments

    def _post_process(self, second: str | None = None) -> tokenizers.Encoding | None:
        """One text, or two, encoded with the post-processor; None without one."""
        if self._backend.post_processor is None:
            return None
        try:
            encoding = self._backend.encode("a", second)
        except BaseException as error:  # a word tokenizer without unk doesn't know the word
            if not bounds.is_failure(error):
                raise
            return None
        beyond = next((id for id in encoding.ids if id >= self.vocab_size), None)
        if beyond is not None:
            wrong = f"puts id {beyond} around a text, but the vocabulary ends at {self.vocab_size - 1}"
            raise TokenizerError(f"the tokenizer's own file {wrong}; repair its post_processor")
        return encoding

    @property
    def leading(self) -> Ids:
        """Ids that the post-processor puts before every text, such as LLaMA's bos; mostly none."""
        return self.frame[0]

    @property
    def adds_bos(self) -> bool:
        """Whether the post-processor puts bos before every text; training documents then begin with it."""
        return self.bos_id is not None and self.bos_id in self.leading

    def need(self, role: Role) -> int:
        """Return the id of a role; raise TokenizerError if it has no token."""
        token = self.roles.get(role)
        if token is None:
            has = f"it has {', '.join(self.roles) or 'none'}"
            key = f"tokenizer.specials.{role}"
            raise TokenizerError(f"this {self.kind} tokenizer has no {role} token ({has}); set {key}=<{role}>")
        return self.special_tokens[token]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, reply: bool = True, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Render a conversation of {role, content} messages; `reply` begins the assistant's turn.

        `tools` are definitions of functions that the assistant may call, for a template that has tools. The template
        isn't trusted and runs in a sandbox. `to_chat` prepares messages, `chat_ids` encodes the result.
        """
        if self.chat_template is None:
            files = f"{vocabularies.SETTINGS} beside {FILE}"
            raise TokenizerError(f"this tokenizer has no chat template; a {files} may provide one")
        tokens = {f"{role}_token": self.roles.get(role, "") for role in ROLES}
        variables = {"messages": messages, "add_generation_prompt": reply, "documents": None, **tokens}
        variables["tools"] = list(tools) or None
        try:
            return render(self.chat_template, variables)
        except TokenizerError as error:
            raise TokenizerError(f"{self.path.parent}: {error}" if self.path else str(error)) from None

    def to_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages for `chat`, with look-alikes of special tokens escaped, unless this tokenizer reads them."""
        return [{key: text if key == "role" else self.escape(text) for key, text in each.items()} for each in messages]

    def escape(self, value: Any) -> Any:
        """Return a text, or all texts in lists and dictionaries, with look-alikes of special tokens escaped."""
        if isinstance(value, str):
            differs = self.encode(value, specials=True) != self.encode(value)
            return self._escape.escape(value) if differs else value
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(each) for key, each in value.items()}
        return [self.escape(each) for each in value] if isinstance(value, list | tuple) else value

    def chat_ids(self, text: str) -> list[int]:
        """Return the ids of a conversation that `chat` rendered, with its special tokens, except escaped ones."""
        if ESCAPED.search(text):
            return self._encode(self._escape.backend, [text])[0]
        return self.encode(text, specials=True)

    @cached_property
    def _escape(self) -> SpecialTokenEscape:
        return SpecialTokenEscape(self._backend, self.special_tokens)


def _rebuild(json: str, roles: Mapping[Role, str], chat_template: str | None, *, finds_specials: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_json(json, roles, chat_template)
    if finds_specials:
        tokenizer._backend, tokenizer.finds_specials = tokenizer._trusting, True
    return tokenizer


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str] = (), default_size: int = DEFAULT_SIZE) -> Tokenizer:
    """Return the tokenizer of a config: trained on texts, which are read once, one at a time; or a finished one.

    If the config names no `vocab_size`, the vocabulary has `default_size` tokens, or as many as the text supports.
    """
    if isinstance(config, Pretrained):
        return Tokenizer.load(config.path, config.pattern)
    return Tokenizer(train(config, texts, default_size), config.specials.roles())
