"""Tokenizers in GGUF files: tokens with a type and a score each, merges, and names for the rest.

There are two kinds: byte-level BPE (`gpt2`, with the name of a pre-tokenizer) and SentencePiece's BPE (`llama`; merges
are ordered by scores, and what no token holds is spelled in bytes). Both become, and are made from, Hugging Face's
tokenizer.json, so nothing is lost on the way through a run.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import InteropError, TokenizerError, suggestion
from weft.interop.gguf_file import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Value
from weft.interop.tokenizer_json import SPACE, BPEVocabulary, Json, byte_level, merges_by_score, sentencepiece
from weft.text.config import Role
from weft.text.token_bytes import BYTE_TOKEN, byte_tokens
from weft.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # `tokenizer.ggml.token_type`

IDS: dict[Role, str] = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "cls": "cls_token_id",
    "sep": "seperator_token_id",  # spelled so there
    "mask": "mask_token_id",
}


# ---- pre-tokenizers, by llama.cpp's names


def _byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> Json:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(False)]}


def _words(digits: str) -> str:
    """The pattern of GPT-4's family: words with one symbol before them, `digits`, symbols, line ends, spaces."""
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{rest}"


GPT2 = _byte_level(True)
LLAMA3 = _split(_words(r"\p{N}{1,3}"))
QWEN2 = _split(_words(r"\p{N}"))
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}

PRE_TOKENIZERS: dict[str, Json] = {  # the first name of each is the one that is written
    "gpt-2": GPT2,
    "default": GPT2,
    "phi-2": GPT2,
    "mpt": GPT2,
    "olmo": GPT2,
    "roberta-bpe": GPT2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "codeshell": DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "megrez": QWEN2,
}


# ---- from a file's keys


def read_tokenizer(keys: Mapping[str, Value], where: str) -> Tokenizer | None:
    """The tokenizer that a file holds; None where it holds none."""
    kind = keys["tokenizer.ggml.model"].value if "tokenizer.ggml.model" in keys else None
    if kind in (None, "none", "no_vocab"):
        return None
    read = {"gpt2": _read_byte_level, "llama": _read_sentencepiece}.get(str(kind))
    if read is None:
        raise InteropError(f"{where}: tokenizer.ggml.model = {kind!r:.60}: {suggestion(str(kind), ['gpt2', 'llama'])}")
    ggml = {key.removeprefix("tokenizer.ggml."): value.value for key, value in keys.items()}
    template = ggml.get("tokenizer.chat_template")
    try:
        text, roles = read(ggml)
        return Tokenizer.from_json(text, roles, template if isinstance(template, str) else None)
    except (InteropError, TokenizerError) as error:
        raise InteropError(f"{where}: the tokenizer: {error}") from None


def _read_byte_level(ggml: Mapping[str, Any]) -> tuple[str, dict[Role, str]]:
    name = str(ggml.get("pre", "default"))
    if name not in PRE_TOKENIZERS:
        raise InteropError(
            f"tokenizer.ggml.pre = {name!r:.60}: {suggestion(name, PRE_TOKENIZERS, len(PRE_TOKENIZERS))}"
        )
    tokens, types = _tokens(ggml)
    roles = _roles(ggml, tokens)
    roles.pop("unk", None)  # bytes spell everything, so no token is unknown, whatever the file says
    special = {tokens[id]: type == CONTROL for id, type in enumerate(types) if type in (CONTROL, USER)}
    vocabulary = BPEVocabulary(tokens, _merges(ggml), special, *_ends(ggml, roles, False))
    return byte_level(vocabulary, PRE_TOKENIZERS[name], whole_words=PRE_TOKENIZERS[name] == LLAMA3), roles


def _read_sentencepiece(ggml: Mapping[str, Any]) -> tuple[str, dict[Role, str]]:
    tokens, types = _tokens(ggml)
    roles = _roles(ggml, tokens)
    unknown = next((tokens[id] for id, type in enumerate(types) if type == UNKNOWN), None)
    if unknown is not None:
        roles.setdefault("unk", unknown)
    special = {tokens[id]: type != USER for id, type in enumerate(types) if type in (UNKNOWN, CONTROL, USER)}
    if "merges" in ggml:
        merges: Sequence[Sequence[str]] = _merges(ggml)
    else:
        scores = ggml.get("scores")
        if scores is None or not _numbers(scores) or len(scores) < len(tokens):
            raise InteropError("tokenizer.ggml.scores: expected a number for every token")
        merges = merges_by_score(tokens, scores, [type in (NORMAL, USER, UNUSED) for type in types])
    vocabulary = BPEVocabulary(tokens, merges, special, *_ends(ggml, roles, True))
    return sentencepiece(vocabulary, roles.get("unk"), bool(ggml.get("add_space_prefix", True))), roles


def _tokens(ggml: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """The tokens and their types, without those that only pad the vocabulary at its end."""
    tokens = ggml.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise InteropError("tokenizer.ggml.tokens: expected an array of strings")
    types = ggml.get("token_type", [NORMAL] * len(tokens))
    if not _numbers(types) or len(types) != len(tokens):
        raise InteropError(f"tokenizer.ggml.token_type: expected a number for each of the {len(tokens)} tokens")
    size = len(tokens)
    while size > 1 and types[size - 1] == UNUSED and tokens[size - 1] == _padding(size - 1):
        size -= 1
    return tokens[:size], types[:size]


def _padding(id: int) -> str:
    return f"[PAD{id}]"


def _merges(ggml: Mapping[str, Any]) -> list[list[str]]:
    merges = ggml.get("merges", [])
    if not isinstance(merges, list):
        raise InteropError("tokenizer.ggml.merges: expected an array of strings")
    pairs = [str(merge).split(" ") for merge in merges]
    wrong = next((pair for pair in pairs if len(pair) != 2 or not all(pair)), None)
    if wrong is not None:
        raise InteropError(f"tokenizer.ggml.merges: {' '.join(wrong)!r:.60} is not two tokens with a space in between")
    return pairs


def _roles(ggml: Mapping[str, Any], tokens: Sequence[str]) -> dict[Role, str]:
    roles: dict[Role, str] = {}
    for role, key in IDS.items():
        id = ggml.get(key)
        if isinstance(id, int) and 0 <= id < 2**32 - 1:  # the largest number stands for none
            if id >= len(tokens):
                raise InteropError(f"tokenizer.ggml.{key} = {id}: there are {len(tokens)} tokens")
            roles[role] = tokens[id]
    return roles


def _ends(ggml: Mapping[str, Any], roles: Mapping[Role, str], begins: bool) -> tuple[str | None, str | None]:
    begin = roles.get("bos") if ggml.get("add_bos_token", begins) else None
    return begin, roles.get("eos") if ggml.get("add_eos_token", False) else None


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, int | float) for value in values)


# ---- to a file's keys


def tokenizer_keys(tokenizer: Tokenizer, vocab_size: int, pre: str | None = None) -> dict[str, Value]:
    """The keys of a tokenizer, its vocabulary padded to the model's `vocab_size`.

    `pre` is the name that a file gave to the pre-tokenizer; it is kept where it still means the same.
    """
    if tokenizer.vocab_size > vocab_size:
        raise InteropError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocab_size is {vocab_size}")
    parsed = json.loads(tokenizer.to_json())
    if parsed["model"]["type"] != "BPE":
        raise InteropError(f"a GGUF file can't hold a {tokenizer.kind} tokenizer, only BPE")
    entries = {**parsed["model"]["vocab"], **{each["content"]: each["id"] for each in parsed["added_tokens"]}}
    tokens, types = [_padding(id) for id in range(vocab_size)], [UNUSED] * vocab_size
    for token, id in entries.items():
        tokens[id], types[id] = token, NORMAL
    for each in parsed["added_tokens"]:
        types[each["id"]] = CONTROL if each["special"] else USER
    write = _byte_level_keys if "ByteLevel" in json.dumps(parsed["decoder"]) else _sentencepiece_keys
    keys = write(parsed, tokens, types, tokenizer, pre)
    for role, name in IDS.items():
        if role in tokenizer.roles:
            keys[f"tokenizer.ggml.{name}"] = Value(UINT32, tokenizer.need(role))
    for name, added in zip(("add_bos_token", "add_eos_token"), _adds(parsed, tokenizer), strict=True):
        keys[f"tokenizer.ggml.{name}"] = Value(BOOL, added)
    if tokenizer.chat_template is not None:
        keys["tokenizer.chat_template"] = Value(STRING, tokenizer.chat_template)
    return keys


def _byte_level_keys(
    parsed: Json, tokens: list[str], types: list[int], tokenizer: Tokenizer, pre: str | None
) -> dict[str, Value]:
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in parsed["model"]["merges"]]
    return {
        "tokenizer.ggml.model": Value(STRING, "gpt2"),
        "tokenizer.ggml.pre": Value(STRING, _pre_tokenizer_name(parsed, tokenizer, pre)),
        "tokenizer.ggml.tokens": Value(ARRAY, tokens, STRING),
        "tokenizer.ggml.token_type": Value(ARRAY, types, INT32),
        "tokenizer.ggml.merges": Value(ARRAY, merges, STRING),
    }


def _pre_tokenizer_name(parsed: Json, tokenizer: Tokenizer, pre: str | None) -> str:
    """llama.cpp's name of a pre-tokenizer."""
    normalizer, found = parsed["normalizer"], _without_guard(parsed["pre_tokenizer"], tokenizer)
    if not parsed["model"]["merges"] and normalizer is None and found == _byte_level(False):
        return "gpt-2"  # single bytes: where text is split makes no difference
    if pre in PRE_TOKENIZERS and found == PRE_TOKENIZERS[pre] and normalizer is None:
        return pre
    name = next((name for name, known in PRE_TOKENIZERS.items() if known == found), None)
    composed = normalizer == {"type": "NFC"} and found == QWEN2  # llama.cpp composes characters for Qwen
    if name is None or not (normalizer is None or composed):
        known = ", ".join(PRE_TOKENIZERS)
        raise InteropError(
            f"the tokenizer normalizes or splits text in a way that GGUF has no name for; known: {known}"
        )
    return name


def _without_guard(pre_tokenizer: Json | None, tokenizer: Tokenizer) -> Json | None:
    """A pre-tokenizer without the step that weft puts before it to keep look-alikes of special tokens apart."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer and pre_tokenizer["type"] == "Sequence" else []
    if len(steps) == 2 and steps[0]["type"] == "Split":
        guards = [f"{re.escape(t[0])}(?={re.escape(t[1:])})" for t in tokenizer.special_tokens]
        pattern = steps[0]["pattern"].get("Regex", "")
        if pattern and all(part in guards for part in _alternatives(pattern, guards)):
            return steps[1]
    return pre_tokenizer


def _alternatives(pattern: str, guards: Sequence[str]) -> list[str]:
    """A pattern taken apart at the bars between known guards; what is not a guard stays whole."""
    found = []
    while pattern:
        guard = next((each for each in guards if pattern == each or pattern.startswith(each + "|")), pattern)
        found.append(guard)
        pattern = pattern[len(guard) + 1 :]
    return found


def _sentencepiece_keys(
    parsed: Json, tokens: list[str], types: list[int], tokenizer: Tokenizer, pre: str | None
) -> dict[str, Value]:
    vocab, model = parsed["model"]["vocab"], parsed["model"]
    if not model["byte_fallback"] or not all(token in vocab for token in byte_tokens()):
        raise InteropError("a GGUF file needs a tokenizer that spells unknown characters in bytes (<0x00> … <0xFF>)")
    for id, token in enumerate(tokens):
        if types[id] == NORMAL and BYTE_TOKEN.fullmatch(token):
            types[id] = BYTE
    if (unk := tokenizer.unk_id) is not None:
        types[unk] = UNKNOWN
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    space_first, spelled = _spaces(parsed, merges)
    if spelled:
        tokens = [SPACE if token == " " else token for token in tokens]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    keys = {
        "tokenizer.ggml.model": Value(STRING, "llama"),
        "tokenizer.ggml.pre": Value(STRING, pre or "default"),
        "tokenizer.ggml.tokens": Value(ARRAY, tokens, STRING),
        "tokenizer.ggml.scores": Value(ARRAY, scores, FLOAT32),
        "tokenizer.ggml.token_type": Value(ARRAY, types, INT32),
        "tokenizer.ggml.add_space_prefix": Value(BOOL, space_first),
    }
    if merges_by_score(tokens, scores, [type in (NORMAL, USER, UNUSED) for type in types]) != merges:
        # the scores alone do not give the merges, so they are written too, for programs that read them
        keys["tokenizer.ggml.merges"] = Value(ARRAY, [" ".join(merge) for merge in merges], STRING)
    return keys


def _spaces(parsed: Json, merges: Sequence[tuple[str, ...]]) -> tuple[bool, bool]:
    """Whether a space is put before a text, and whether spaces are in the vocabulary as themselves."""
    split, normalizer, vocab = parsed["pre_tokenizer"], parsed["normalizer"], parsed["model"]["vocab"]
    if normalizer is None and split is None and " " in vocab and SPACE not in vocab:
        return False, True
    if normalizer is None and split and split["type"] == "Metaspace" and split["replacement"] == SPACE:
        within_words = not any(SPACE in (left + right)[1:] for left, right in merges)
        if within_words or not split["split"]:
            return split["prepend_scheme"] != "never", False
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if steps == [{"type": "Prepend", "prepend": SPACE}, replace] and split is None:
        return True, False
    if steps == [replace]:
        return False, False
    raise InteropError("the tokenizer normalizes or splits text in a way that GGUF has no name for")


def _adds(parsed: Json, tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Whether other programs should put a token before and after a text."""
    single = (parsed["post_processor"] or {}).get("single") or []
    begin, end = (
        (step.get("SpecialToken", {}).get("id", "") for step in (single[0], single[-1])) if single else ("", "")
    )
    return begin == tokenizer.roles.get("bos"), end == tokenizer.roles.get("eos")
