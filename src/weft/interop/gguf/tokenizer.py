"""Tokenizers in GGUF files: tokens with a type and a score each, merges, and names for the rest.

There are two kinds: byte-level BPE (`gpt2`, with the name of a pre-tokenizer) and SentencePiece's BPE (`llama`; merges
are ordered by scores, and what no token holds is spelled in bytes). Both become, and are made from, Hugging Face's
tokenizer.json, so nothing is lost on the way through a run.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.config import Tree
from weft.errors import InteropError, TokenizerError, suggestion
from weft.interop import tokenizer_json
from weft.interop.tokenizer_json import SPACE, SPACE_FIRST, SPACES, BPEVocabulary, merges_by_score
from weft.text.config import Role
from weft.text.token_bytes import BYTE_TOKEN, byte_tokens
from weft.text.tokenizer import Tokenizer
from weft.text.training import look_alikes
from weft.text.vocabularies import PATTERNS

UNNAMED = "the tokenizer normalizes or splits text in a way that GGUF has no name for"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # `tokenizer.ggml.token_type`

IDS: dict[Role, str] = {  # the sixth is spelled so there
    "bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id",
    "cls": "cls_token_id", "sep": "seperator_token_id", "mask": "mask_token_id",
}  # fmt: skip


def _byte_level(use_regex: bool) -> Tree:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> Tree:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(False)]}


GPT2 = _byte_level(True)
LLAMA3, QWEN2 = _split(PATTERNS["cl100k"]), _split(PATTERNS["qwen2"])
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}

PRE_TOKENIZERS: dict[str, Tree] = {  # by llama.cpp's names; the first of each is the one that is written
    **dict.fromkeys(("gpt-2", "default", "phi-2", "mpt", "olmo", "roberta-bpe"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
}


def read_tokenizer(keys: Mapping[str, Any], place: str) -> Tokenizer | None:
    """The tokenizer that a file's keys describe; None where they describe none."""
    kind = keys.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise InteropError(f"{place}: tokenizer.ggml.model = {kind!r:.60}: {suggestion(str(kind), ['gpt2', 'llama'])}")
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in keys.items()}
    template = keys.get("tokenizer.chat_template")
    try:
        text, roles = _read(ggml, byte_level=kind == "gpt2")
        return Tokenizer.from_json(text, roles, template if isinstance(template, str) else None)
    except (InteropError, TokenizerError) as error:
        raise InteropError(f"{place}: the tokenizer: {error}") from None


def _read(ggml: Mapping[str, Any], byte_level: bool) -> tuple[str, dict[Role, str]]:
    name = str(ggml.get("pre", "default"))
    if byte_level and name not in PRE_TOKENIZERS:
        known = suggestion(name, PRE_TOKENIZERS, len(PRE_TOKENIZERS))
        raise InteropError(f"tokenizer.ggml.pre = {name!r:.60}: {known}")
    tokens, types = _tokens(ggml)
    roles = _roles(ggml, tokens)
    if byte_level:
        roles.pop("unk", None)  # bytes spell everything, so no token is unknown, whatever the file says
    elif UNKNOWN in types:
        roles.setdefault("unk", tokens[types.index(UNKNOWN)])
    hidden = (CONTROL,) if byte_level else (UNKNOWN, CONTROL)
    special = {tokens[id]: type in hidden for id, type in enumerate(types) if type in (*hidden, USER)}
    if byte_level or "merges" in ggml:
        merges: Sequence[Sequence[str]] = _merges(ggml)
    else:
        scores = ggml.get("scores")
        if scores is None or not _numbers(scores) or len(scores) < len(tokens):
            raise InteropError("tokenizer.ggml.scores: expected a number for every token")
        merges = merges_by_score(tokens, scores, [type in (NORMAL, USER, UNUSED) for type in types])
    begin = roles.get("bos") if ggml.get("add_bos_token", not byte_level) else None
    end = roles.get("eos") if ggml.get("add_eos_token", False) else None
    vocabulary = BPEVocabulary(tokens, merges, special, begin, end)
    if byte_level:
        split = PRE_TOKENIZERS[name]
        return tokenizer_json.byte_level(vocabulary, split, whole_words=split == LLAMA3), roles
    return tokenizer_json.sentencepiece(vocabulary, roles.get("unk"), bool(ggml.get("add_space_prefix", True))), roles


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


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, int | float) for value in values)


def tokenizer_keys(tokenizer: Tokenizer, vocab_size: int, pre: str | None = None) -> dict[str, Any]:
    """The keys of a tokenizer, its vocabulary padded to the model's `vocab_size`.

    `pre` is the name that a file gave to the pre-tokenizer; it is kept where it still means the same.
    """
    if tokenizer.vocab_size > vocab_size:
        raise InteropError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocab_size is {vocab_size}")
    parsed = json.loads(tokenizer.to_json())
    if parsed["model"]["type"] != "BPE":
        raise InteropError(f"a GGUF file can't hold a {tokenizer.kind} tokenizer, only BPE")
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in parsed["model"]["merges"]]
    tokens, types = [_padding(id) for id in range(vocab_size)], [UNUSED] * vocab_size
    for token, id in parsed["model"]["vocab"].items():
        tokens[id], types[id] = token, NORMAL
    for each in parsed["added_tokens"]:
        tokens[each["id"]], types[each["id"]] = each["content"], CONTROL if each["special"] else USER
    keys: dict[str, Any]
    if "ByteLevel" in json.dumps(parsed["decoder"]):
        keys = {"model": "gpt2", "pre": _pre_tokenizer_name(parsed, tokenizer, pre), "tokens": tokens}
        keys |= {"token_type": types, "merges": [" ".join(merge) for merge in merges]}
    else:
        keys = _sentencepiece_keys(parsed, tokenizer, merges, tokens, types) | {"pre": pre or "default"}
    keys |= {name: tokenizer.need(role) for role, name in IDS.items() if role in tokenizer.roles}
    before, after = tokenizer.frame  # what other programs should put around a text
    keys["add_bos_token"] = tokenizer.bos_id is not None and before[:1] == (tokenizer.bos_id,)
    keys["add_eos_token"] = tokenizer.eos_id is not None and after[-1:] == (tokenizer.eos_id,)
    keys = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return keys if tokenizer.chat_template is None else keys | {"tokenizer.chat_template": tokenizer.chat_template}


def _pre_tokenizer_name(parsed: Tree, tokenizer: Tokenizer, pre: str | None) -> str:
    normalizer, found = parsed["normalizer"], _without_guard(parsed["pre_tokenizer"], tokenizer)
    if not parsed["model"]["merges"] and normalizer is None and found == _byte_level(False):
        return "gpt-2"  # single bytes: where text is split makes no difference
    named = [name for name, known in PRE_TOKENIZERS.items() if known == found]
    composed = normalizer == {"type": "NFC"} and found == QWEN2  # llama.cpp composes characters for Qwen
    if not named or not (normalizer is None or composed):
        raise InteropError(f"{UNNAMED}; available: {', '.join(PRE_TOKENIZERS)}")
    return pre if pre in named and normalizer is None else named[0]


def _without_guard(pre_tokenizer: Tree | None, tokenizer: Tokenizer) -> Tree | None:
    """A pre-tokenizer without the step that weft puts before it to keep look-alikes of special tokens apart."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer and pre_tokenizer["type"] == "Sequence" else []
    if len(steps) != 2 or steps[0]["type"] != "Split":
        return pre_tokenizer
    pattern = steps[0]["pattern"].get("Regex", "")
    rest = pattern
    for token in sorted(tokenizer.special_tokens, key=len, reverse=True):
        rest = rest.replace(look_alikes([token]), "")
    return steps[1] if pattern and not rest.strip("|") else pre_tokenizer


def _sentencepiece_keys(
    parsed: Tree, tokenizer: Tokenizer, merges: list[Any], tokens: list[str], types: list[int]
) -> dict[str, Any]:
    model = parsed["model"]
    if not model["byte_fallback"] or not all(token in model["vocab"] for token in byte_tokens()):
        raise InteropError("a GGUF file needs a tokenizer that spells unknown characters in bytes (<0x00> … <0xFF>)")
    types = [BYTE if type == NORMAL and BYTE_TOKEN.fullmatch(tokens[id]) else type for id, type in enumerate(types)]
    if (unk := tokenizer.unk_id) is not None:
        types[unk] = UNKNOWN
    space_first, spelled = _spaces(parsed, merges)
    if spelled:
        tokens = [SPACE if token == " " else token for token in tokens]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    keys: dict[str, Any] = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    keys["add_space_prefix"] = space_first
    if merges_by_score(tokens, scores, [type in (NORMAL, USER, UNUSED) for type in types]) != merges:
        # the scores alone do not give the merges, so they are written too, for programs that read them
        keys["merges"] = [" ".join(merge) for merge in merges]
    return keys


def _spaces(parsed: Tree, merges: Sequence[tuple[str, ...]]) -> tuple[bool, bool]:
    """Whether a space is put before a text, and whether spaces are in the vocabulary as themselves."""
    split, normalizer, vocab = parsed["pre_tokenizer"], parsed["normalizer"], parsed["model"]["vocab"]
    if normalizer is None and split is None and " " in vocab and SPACE not in vocab:
        return False, True
    if normalizer is None and split and split["type"] == "Metaspace" and split["replacement"] == SPACE:
        within_words = not any(SPACE in (left + right)[1:] for left, right in merges)
        if within_words or not split["split"]:
            return split["prepend_scheme"] != "never", False
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    if steps in ([{"type": "Prepend", "prepend": SPACE}, SPACES], [SPACE_FIRST, SPACES]) and split is None:
        return True, False
    if steps == [SPACES] and split is None:
        return False, False
    raise InteropError(UNNAMED)
