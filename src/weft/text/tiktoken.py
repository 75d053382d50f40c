"""Rank files as tiktoken has them: a line a token, its bytes in base64 and its rank, which is its id.

Two neighbours are joined when their union has a rank, the lowest first; so every way to make a token of two others is
a merge. How text is cut before that, and which special tokens there are, follows from the number of ranks: it is not in
the file.
"""

import base64
import binascii
import re
from collections.abc import Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from weft.errors import TokenizerError
from weft.text.config import Pattern, Role
from weft.text.token_bytes import byte_letters

LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\s*")
LONGEST = 512  # bytes of a token

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS: dict[Pattern, str] = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    "qwen2": rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
}

END = "<|endoftext|>"
_FILL = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276}
_LLAMA3 = {
    "<|begin_of_text|>": 0,
    "<|end_of_text|>": 1,
    "<|finetune_right_pad_id|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "<|eom_id|>": 8,
    "<|eot_id|>": 9,
    "<|python_tag|>": 10,
}
# ranks in the file: the cut, and the special tokens that belong to it
KNOWN: dict[int, tuple[Pattern, Mapping[str, int]]] = {
    50256: ("gpt2", {END: 50256}),
    50280: ("gpt2", {END: 50256}),
    100256: ("cl100k", {END: 100257, **_FILL}),
    128000: ("cl100k", {token: 128000 + place for token, place in _LLAMA3.items()}),
    151643: ("qwen2", {END: 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}),
    199998: ("o200k", {END: 199999, "<|endofprompt|>": 200018}),
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
    vocab = {spelled[token]: rank for token, rank in ranks.items()} | dict(specials)
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
        if not token or len(token) > LONGEST or token in ranks or not 0 <= value < 2**31:
            raise TokenizerError(f"a damaged rank file: line {number} repeats a token, or is not one")
        ranks[token] = value
    if len(set(ranks.values())) < len(ranks):
        raise TokenizerError("a damaged rank file: two tokens have one rank")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise TokenizerError(f"a damaged rank file, or a truncated one: the byte {missing:#04x} has no rank")
    return ranks
