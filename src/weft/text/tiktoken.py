"""Rank files as tiktoken has them: a line a token, its bytes in base64 and its rank, which is its id.

Two neighbours are joined when their union has a rank, the lowest first; so every way to make a token of two others is
a merge. How text is cut before that, and which special tokens there are, follows from the number of ranks: it is not in
the file.
"""

import base64
import binascii
import re
import tomllib
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from weft.errors import TokenizerError
from weft.text.bounds import check_letters
from weft.text.config import Pattern, Role
from weft.text.token_bytes import byte_letters

LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\s*")
MAX_TOKEN_BYTES = 512

END = "<|endoftext|>"
_FILE = tomllib.loads(Path(__file__).with_name("tiktoken.toml").read_text(encoding="utf-8"))
PATTERNS: dict[Pattern, str] = _FILE["patterns"]
# ranks in the file: the cut, and the special tokens that belong to it
KNOWN: dict[int, tuple[Pattern, dict[str, int]]] = {
    known["ranks"]: (known["pattern"], known["specials"]) for known in _FILE["vocabularies"]
}


def is_tiktoken(data: bytes) -> bool:
    """Whether a file begins with a rank line."""
    return LINE.fullmatch(data[: data.find(b"\n") + 1]) is not None


def to_tokenizer(data: bytes, pattern: Pattern | None = None) -> tuple[Tokenizer, dict[Role, str]]:
    """The tokenizer of a rank file's content, and its special tokens by role.

    `pattern` names how text is cut; without it, that follows from a known number of ranks. A file of another size gets
    one special token, `<|endoftext|>`, after its last rank.
    """
    ranks = parse(data)
    check_letters(ranks)
    if pattern is None and len(ranks) not in KNOWN:
        known = ", ".join(PATTERNS)
        raise TokenizerError(
            f"{len(ranks)} ranks match no known vocabulary; set pattern, how text is split, to one of {known}"
        )
    usual, specials = KNOWN.get(len(ranks), ("gpt2", {END: max(ranks.values()) + 1}))
    letters = {byte: letter for letter, byte in byte_letters().items()}
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (rank, cut, (spelled[token[:cut]], spelled[token[cut:]]))
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    merges.sort(key=lambda merge: merge[:2])
    vocab = {spelled[token]: rank for token, rank in ranks.items()} | specials
    backend = Tokenizer(models.BPE(vocab, [pair for _, _, pair in merges], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[pattern or usual]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    begin, end = ("<|begin_of_text|>", "<|end_of_text|>") if "<|end_of_text|>" in specials else (END, END)
    roles: dict[Role, str] = {"bos": begin, "eos": end}
    if "<|finetune_right_pad_id|>" in specials:
        roles["pad"] = "<|finetune_right_pad_id|>"
    return backend, roles


def parse(data: bytes) -> dict[bytes, int]:
    """token → rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        word, _, rank = line.partition(b" ")
        try:
            token, value = base64.b64decode(word, validate=True), int(rank)
        except (binascii.Error, ValueError):
            raise TokenizerError(f"not a rank file: line {number} is not a token in base64 and its rank") from None
        if not token or len(token) > MAX_TOKEN_BYTES or token in ranks or not 0 <= value < 2**31:
            raise TokenizerError(f"a damaged rank file: line {number} repeats a token, or is not one")
        ranks[token] = value
    if len(set(ranks.values())) < len(ranks):
        raise TokenizerError("a damaged rank file: two tokens have one rank")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise TokenizerError(f"a damaged rank file, or a truncated one: the byte {missing:#04x} has no rank")
    return ranks
