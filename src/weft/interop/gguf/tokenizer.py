"""Read and write the tokenizers of GGUF files: tokens with types and scores, merges, and the name of a pre-tokenizer.

There are two kinds: byte-level BPE (`gpt2`) and SentencePiece's BPE (`llama`), with merges ordered by score and byte
fallback. Both are converted to and from Hugging Face's tokenizer.json without loss.
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

UNNAMED = "GGUF has no name for the tokenizer's way of normalizing or splitting text"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # `tokenizer.ggml.token_type`

IDS: dict[Role, str] = {  # `seperator` is llama.cpp's spelling
    "bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id",
    "cls": "cls_token_id", "sep": "seperator_token_id", "mask": "mask_token_id",
}  # fmt: skip


def _byte_level(use_regex: bool) -> Tree:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(*patterns: str) -> Tree:
    kind = {"type": "Split", "behavior": "Isolated", "invert": False}
    splits = [{**kind, "pattern": {"Regex": pattern}} for pattern in patterns]
    return {"type": "Sequence", "pretokenizers": [*splits, _byte_level(False)]}


GPT2 = _byte_level(True)
LLAMA3, QWEN2 = _split(PATTERNS["cl100k"]), _split(PATTERNS["qwen2"])
PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
WORDS = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = WORDS.replace(r"\r\n", "\r\n")  # DeepSeek's tokenizer.json has the characters themselves
DEEPSEEK3 = _split(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", f"{PUNCTUATION}|{WORDS}")
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}

PRE_TOKENIZERS: dict[str, Tree] = {  # by llama.cpp's names; of several for one, the first is written
    **dict.fromkeys(("gpt-2", "default", "phi-2", "mpt", "olmo", "roberta-bpe"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "glm4", "chatglm-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _split(PATTERNS["o200k"])),
    "deepseek-v3": DEEPSEEK3,
}


def read_tokenizer(keys: Mapping[str, Any], location: str) -> Tokenizer | None:
    """Read the tokenizer from a file's keys; None if they have none."""
    kind = keys.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        hint = suggestion(str(kind), ["gpt2", "llama"])
        raise InteropError(f"{location}: tokenizer.ggml.model = {kind!r:.60}: {hint}")
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in keys.items()}
    template = keys.get("tokenizer.chat_template")
    try:
        text, roles = _to_tokenizer_json(ggml, byte_level=kind == "gpt2")
        return Tokenizer.from_json(text, roles, template if isinstance(template, str) else None)
    except (InteropError, TokenizerError) as error:
        raise InteropError(f"{location}: the tokenizer: {error}") from None


def _to_tokenizer_json(ggml: Mapping[str, Any], byte_level: bool) -> tuple[str, dict[Role, str]]:
    """tokenizer.json and the roles of its special tokens."""
    name = str(ggml.get("pre", "default"))
    if byte_level and name not in PRE_TOKENIZERS:
        known = suggestion(name, PRE_TOKENIZERS, len(PRE_TOKENIZERS))
        raise InteropError(f"tokenizer.ggml.pre = {name!r:.60}: {known}")
    tokens, types = _read_tokens(ggml)
    roles = _read_roles(ggml, tokens)
    if byte_level:
        roles.pop("unk", None)  # bytes encode everything, so nothing is unknown
    elif UNKNOWN in types:
        roles.setdefault("unk", tokens[types.index(UNKNOWN)])
    hidden = (CONTROL,) if byte_level else (UNKNOWN, CONTROL)
    special = {tokens[id]: type in hidden for id, type in enumerate(types) if type in (*hidden, USER)}
    if byte_level or "merges" in ggml:
        merges: Sequence[Sequence[str]] = _read_merges(ggml)
    else:
        scores = ggml.get("scores")
        if scores is None or not _are_numbers(scores) or len(scores) < len(tokens):
            raise InteropError("tokenizer.ggml.scores: expected a number for every token")
        merges = merges_by_score(tokens, scores, [type in (NORMAL, USER, UNUSED) for type in types])
    begin = roles.get("bos") if ggml.get("add_bos_token", not byte_level) else None
    end = roles.get("eos") if ggml.get("add_eos_token", False) else None
    vocabulary = BPEVocabulary(tokens, merges, special, begin=begin, end=end)
    if byte_level:
        split = PRE_TOKENIZERS[name]
        return tokenizer_json.byte_level(vocabulary, split, whole_words=split == LLAMA3), roles
    return tokenizer_json.sentencepiece(vocabulary, roles.get("unk"), bool(ggml.get("add_space_prefix", True))), roles


def _read_tokens(ggml: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens and their types, without padding at the end of the vocabulary."""
    tokens = ggml.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise InteropError("tokenizer.ggml.tokens: expected an array of strings")
    types = ggml.get("token_type", [NORMAL] * len(tokens))
    if not _are_numbers(types) or len(types) != len(tokens):
        raise InteropError(f"tokenizer.ggml.token_type: expected a number for each of the {len(tokens)} tokens")
    size = len(tokens)
    while size > 1 and types[size - 1] == UNUSED and tokens[size - 1] == _padding(size - 1):
        size -= 1
    return tokens[:size], types[:size]


def _padding(id: int) -> str:
    return f"[PAD{id}]"


def _read_merges(ggml: Mapping[str, Any]) -> list[list[str]]:
    merges = ggml.get("merges", [])
    if not isinstance(merges, list):
        raise InteropError("tokenizer.ggml.merges: expected an array of strings")
    pairs = [str(merge).split(" ") for merge in merges]
    invalid = next((pair for pair in pairs if len(pair) != 2 or not all(pair)), None)
    if invalid is not None:
        raise InteropError(f"tokenizer.ggml.merges: {' '.join(invalid)!r:.60} is not two tokens separated by a space")
    return pairs


def _read_roles(ggml: Mapping[str, Any], tokens: Sequence[str]) -> dict[Role, str]:
    roles: dict[Role, str] = {}
    for role, key in IDS.items():
        id = ggml.get(key)
        if isinstance(id, int) and 0 <= id < 2**32 - 1:  # the largest number means none
            if id >= len(tokens):
                raise InteropError(f"tokenizer.ggml.{key} = {id}: there are {len(tokens)} tokens")
            roles[role] = tokens[id]
    return roles


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, int | float) for value in values)


def tokenizer_keys(tokenizer: Tokenizer, vocab_size: int, pre: str | None = None) -> dict[str, Any]:
    """Keys of a tokenizer, with its vocabulary padded to the model's `vocab_size`.

    `pre` is the name of the pre-tokenizer in an imported file; it is kept if it still names this pre-tokenizer.
    """
    if tokenizer.vocab_size > vocab_size:
        raise InteropError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocab_size is {vocab_size}")
    parsed = json.loads(tokenizer.to_json())
    if parsed["model"]["type"] != "BPE":
        raise InteropError(f"a GGUF file can't have a {tokenizer.kind} tokenizer, only BPE")
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in parsed["model"]["merges"]]
    tokens, types = [_padding(id) for id in range(vocab_size)], [UNUSED] * vocab_size
    for token, id in parsed["model"]["vocab"].items():
        tokens[id], types[id] = token, NORMAL
    for added in parsed["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER
    keys: dict[str, Any]
    if "ByteLevel" in json.dumps(parsed["decoder"]):
        keys = {"model": "gpt2", "pre": _pre_tokenizer_name(parsed, tokenizer, pre), "tokens": tokens}
        keys |= {"token_type": types, "merges": [" ".join(merge) for merge in merges]}
    else:
        keys = _sentencepiece_keys(parsed, merges, tokens, types=types, unk_id=tokenizer.unk_id)
        keys["pre"] = pre or "default"
    keys |= {name: tokenizer.need(role) for role, name in IDS.items() if role in tokenizer.roles}
    before, after = tokenizer.frame
    keys["add_bos_token"] = tokenizer.bos_id is not None and before[:1] == (tokenizer.bos_id,)
    keys["add_eos_token"] = tokenizer.eos_id is not None and after[-1:] == (tokenizer.eos_id,)
    keys = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return keys if tokenizer.chat_template is None else keys | {"tokenizer.chat_template": tokenizer.chat_template}


def _pre_tokenizer_name(parsed: Tree, tokenizer: Tokenizer, pre: str | None) -> str:
    normalizer, pre_tokenizer = parsed["normalizer"], _without_guard(parsed["pre_tokenizer"], tokenizer)
    if not parsed["model"]["merges"] and normalizer is None and pre_tokenizer == _byte_level(False):
        return "gpt-2"  # single bytes: the split makes no difference
    names = [name for name, known in PRE_TOKENIZERS.items() if known == pre_tokenizer]
    composed = normalizer == {"type": "NFC"} and pre_tokenizer == QWEN2  # llama.cpp applies NFC for Qwen
    if not names or not (normalizer is None or composed):
        raise InteropError(f"{UNNAMED}; available: {', '.join(PRE_TOKENIZERS)}")
    return pre if pre in names and normalizer is None else names[0]


def _without_guard(pre_tokenizer: Tree | None, tokenizer: Tokenizer) -> Tree | None:
    """Remove the first step that weft adds to split off look-alikes of special tokens, if there is one."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer and pre_tokenizer["type"] == "Sequence" else []
    if len(steps) != 2 or steps[0]["type"] != "Split":
        return pre_tokenizer
    pattern = steps[0]["pattern"].get("Regex", "")
    others = pattern
    for token in sorted(tokenizer.special_tokens, key=len, reverse=True):
        others = others.replace(look_alikes([token]), "")
    return steps[1] if pattern and not others.strip("|") else pre_tokenizer


def _sentencepiece_keys(
    parsed: Tree, merges: list[Any], tokens: list[str], *, types: list[int], unk_id: int | None
) -> dict[str, Any]:
    model = parsed["model"]
    if not model["byte_fallback"] or not all(token in model["vocab"] for token in byte_tokens()):
        raise InteropError("a GGUF file needs a tokenizer with byte fallback (<0x00> … <0xFF>)")
    types = [BYTE if type == NORMAL and BYTE_TOKEN.fullmatch(tokens[id]) else type for id, type in enumerate(types)]
    if unk_id is not None:
        types[unk_id] = UNKNOWN
    space_first, has_plain_spaces = _spaces(parsed, merges)
    if has_plain_spaces:
        tokens = [SPACE if token == " " else token for token in tokens]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    keys: dict[str, Any] = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    keys["add_space_prefix"] = space_first
    if merges_by_score(tokens, scores, [type in (NORMAL, USER, UNUSED) for type in types]) != merges:
        # scores alone do not reproduce the merges: write these too, for programs that read them
        keys["merges"] = [" ".join(merge) for merge in merges]
    return keys


def _spaces(parsed: Tree, merges: Sequence[tuple[str, ...]]) -> tuple[bool, bool]:
    """Whether a space is added before a text, and whether the vocabulary has plain spaces instead of ▁."""
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
