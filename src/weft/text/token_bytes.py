"""From ids back to text: the bytes each id stands for, joined at once or as they come.

Ids of a byte-level vocabulary may end in the middle of a character. Joining bytes, and turning them into
characters at the end, makes decoding a stream the same thing as decoding a list.
"""

import codecs
import json
import re
from collections.abc import Collection, Iterable

import tokenizers

from weft.errors import TokenizerError
from weft.text.bounds import is_failure, steps

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
UTF8 = codecs.getincrementaldecoder("utf-8")


def byte_tokens() -> list[str]:
    """The tokens `<0x00>` … `<0xFF>` that spell a character a vocabulary lacks."""
    return [f"<0x{byte:02X}>" for byte in range(256)]


def byte_letters() -> dict[str, int]:
    """GPT-2's printable letter for each byte (Radford et al. 2019): itself where it prints, else from U+0100 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = {chr(byte): byte for byte in prints}
    hidden = (byte for byte in range(256) if byte not in prints)
    letters |= {chr(0x100 + place): byte for place, byte in enumerate(hidden)}
    return letters


class TokenBytes(dict[int, bytes]):
    """id → the bytes it adds to a text that has already begun; filled as ids are met.

    `first(id)` is what it adds at the very beginning, where a word's leading space is dropped.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        written = b"null" if backend.decoder is None else backend.decoder.__getstate__()
        parts = {step["type"] for step in steps(json.loads(written))}
        if unfit := {"BPEDecoder", "CTC"} & parts:  # what a token adds would depend on the token after it
            raise TokenizerError(f"the tokenizer's decoder {unfit.pop()} is not supported; use ByteLevel or Metaspace")
        self.bytewise = "ByteLevel" in parts
        self._letters = byte_letters() if self.bytewise else None
        self._falls_back = "ByteFallback" in parts

    def __missing__(self, id: int) -> bytes:
        token = self.token(id)
        added = self._plain(token)
        if added is None:
            added = self._text(["a", token]).encode()[len(self._text(["a"]).encode()) :]
        self[id] = added
        return added

    def token(self, id: int) -> str:
        """The vocabulary's entry."""
        token = self._backend.id_to_token(id) if id >= 0 else None
        if token is None:
            raise TokenizerError(f"id {id} is not in the vocabulary of {self._backend.get_vocab_size()} tokens")
        return token

    def first(self, id: int) -> bytes:
        token = self.token(id)
        plain = self._plain(token)
        return self._text([token]).encode() if plain is None else plain

    def _plain(self, token: str) -> bytes | None:
        """The bytes of a token whose text does not depend on its place; None for the others."""
        if self._letters is not None:
            if all(letter in self._letters for letter in token):
                return bytes(self._letters[letter] for letter in token)
            return token.encode()
        byte = BYTE_TOKEN.fullmatch(token) if self._falls_back else None
        if byte is not None and (value := int(byte[1], 16)) >= 0x80:
            return bytes([value])
        return None

    def _text(self, tokens: list[str]) -> str:
        decoder = self._backend.decoder
        try:
            return " ".join(tokens) if decoder is None else decoder.decode(tokens)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise TokenizerError(f"the tokenizer's decoder fails on {tokens[-1]!r}: {error}") from None

    def join(self, ids: list[int]) -> bytes:
        """The bytes of a whole text."""
        return self.first(ids[0]) + b"".join(map(self.__getitem__, ids[1:])) if ids else b""


class TextStream:
    """Ids one at a time in, text out as soon as its characters are whole.

    Where the text has `begun` before the first of them, a word keeps its leading space.
    """

    def __init__(self, token_bytes: TokenBytes, skip: Collection[int], begun: bool = False) -> None:
        self._token_bytes, self._skip, self._begun = token_bytes, skip, begun
        self._utf8 = UTF8("replace")

    def push(self, id: int, instead: str | None = None) -> str:
        """The text that this id, or what stands for it, completes; empty while a character is still missing bytes."""
        if instead is not None:
            added = (instead if self._begun else instead.removeprefix(" ")).encode()
        elif id in self._skip:
            return ""
        else:
            added = self._token_bytes[id] if self._begun else self._token_bytes.first(id)
        self._begun = True
        return self._utf8.decode(added)

    def extend(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        return "".join(map(self.push, ids))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never got its last bytes."""
        return self._utf8.decode(b"", final=True)

    def copy(self) -> "TextStream":
        """The same for another text that begins as this one did."""
        other = TextStream(self._token_bytes, self._skip, self._begun)
        other._utf8.setstate(self._utf8.getstate())
        return other
