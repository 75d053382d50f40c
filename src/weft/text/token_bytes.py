"""From ids back to text: the bytes of each id, joined in one call or in a stream.

Ids of a byte-level vocabulary may end in the middle of a character. Bytes are joined first and decoded as UTF-8
afterwards, so that a stream of ids decodes to the same text as a list.
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
    """Return the tokens `<0x00>` … `<0xFF>`, which spell characters that are not in the vocabulary."""
    return [f"<0x{byte:02X}>" for byte in range(256)]


def byte_letters() -> dict[str, int]:
    """Return GPT-2's printable letter for each byte (Radford et al. 2019): itself if printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return letters | {chr(code): byte for code, byte in enumerate(others, start=0x100)}


class TokenBytes(dict[int, bytes]):
    """Maps an id to the bytes it adds in the middle of a text; `first(id)` are its bytes at the beginning of one."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        state = b"null" if backend.decoder is None else backend.decoder.__getstate__()
        types = {step["type"] for step in steps(json.loads(state))}
        if unsupported := {"BPEDecoder", "CTC"} & types:  # a token's text depends on the token after it
            name = unsupported.pop()
            raise TokenizerError(f"the tokenizer's decoder {name} is not supported; use ByteLevel or Metaspace")
        self.bytewise = "ByteLevel" in types
        self._letters = byte_letters() if self.bytewise else None
        self._byte_fallback = "ByteFallback" in types

    def __missing__(self, id: int) -> bytes:
        token = self.token(id)
        added = self._fixed_bytes(token)
        if added is None:
            added = self._decode(["a", token]).encode()[len(self._decode(["a"]).encode()) :]
        self[id] = added
        return added

    def token(self, id: int) -> str:
        """Return the vocabulary's entry."""
        token = self._backend.id_to_token(id) if id >= 0 else None
        if token is None:
            raise TokenizerError(f"id {id} is not in the vocabulary of {self._backend.get_vocab_size()} tokens")
        return token

    def first(self, id: int) -> bytes:
        token = self.token(id)
        fixed = self._fixed_bytes(token)
        return self._decode([token]).encode() if fixed is None else fixed

    def _fixed_bytes(self, token: str) -> bytes | None:
        """Bytes of a token that are the same at every position; None if they may differ."""
        if self._letters is not None:
            if all(letter in self._letters for letter in token):
                return bytes(self._letters[letter] for letter in token)
            return token.encode()
        byte = BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if byte is not None and (value := int(byte[1], 16)) >= 0x80:
            return bytes([value])
        return None

    def _decode(self, tokens: list[str]) -> str:
        decoder = self._backend.decoder
        try:
            return " ".join(tokens) if decoder is None else decoder.decode(tokens)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise TokenizerError(f"the tokenizer's decoder fails on {tokens[-1]!r}: {error}") from None

    def join(self, ids: list[int]) -> bytes:
        """Return the bytes of a whole text."""
        return self.first(ids[0]) + b"".join(map(self.__getitem__, ids[1:])) if ids else b""


class TextStream:
    """Decodes ids one at a time, as soon as characters are complete; `mid_text`: the first word keeps its space."""

    def __init__(self, token_bytes: TokenBytes, skip: Collection[int], mid_text: bool = False) -> None:
        self._token_bytes, self._skip, self._mid_text = token_bytes, skip, mid_text
        self._utf8 = UTF8("replace")

    def push(self, id: int, replacement: str | None = None) -> str:
        """Return the text that this id, or its replacement, completes; empty while a character lacks bytes."""
        if replacement is not None:
            added = (replacement if self._mid_text else replacement.removeprefix(" ")).encode()
        elif id in self._skip:
            return ""
        else:
            added = self._token_bytes[id] if self._mid_text else self._token_bytes.first(id)
        self._mid_text = True
        return self._utf8.decode(added)

    def extend(self, ids: Iterable[int]) -> str:
        """Return the text that these ids complete."""
        return "".join(map(self.push, ids))

    def flush(self) -> str:
        """Return the rest at the end of a text: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)

    def copy(self) -> "TextStream":
        """Return a copy for another text with the same prefix."""
        other = TextStream(self._token_bytes, self._skip, self._mid_text)
        other._utf8.setstate(self._utf8.getstate())
        return other
