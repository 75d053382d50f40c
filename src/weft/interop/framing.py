"""What a checkpoint's makers put around a text, written into the tokenizer that reads it.

A tokenizer.json says it itself. Older files (a SentencePiece model, GPT-2's or BERT's lists) leave it to the class that
reads them, and CTranslate2 to the settings of its model.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from weft.config import Tree
from weft.text.config import Role
from weft.text.tokenizer import Tokenizer


class Frame(NamedTuple):
    """The roles of the tokens before and after a text."""

    before: tuple[Role, ...] = ()
    after: tuple[Role, ...] = ()


ENDED, ENCLOSED = Frame(after=("eos",)), Frame(("bos",), ("eos",))
# by transformers' class, without what all their names end with; those of language models are asked for `add_bos_token`
CLASSES = {
    "Marian": ENDED,
    "T5": ENDED,
    "Pegasus": ENDED,
    "Bart": ENCLOSED,
    "Roberta": ENCLOSED,
    "XLMRoberta": ENCLOSED,
    "Camembert": ENCLOSED,
    "Albert": Frame(("cls",), ("sep",)),
    "Llama": Frame(("bos",)),
    "Gemma": Frame(("bos",)),
    "GPT2": Frame(),
}
# how models of several languages are told which (`recipe.objective.Languages`), and what they read if nobody says
LANGUAGES: Mapping[str, Tree] = {
    "MBart": {"token": "{}", "source": "after", "target": "start", "reads": "en_XX"},
    "MBart50": {"token": "{}", "source": "before", "target": "first", "reads": "en_XX"},
    "Nllb": {"token": "{}", "source": "before", "target": "first", "reads": "eng_Latn"},
    "M2M100": {"token": "__{}__", "source": "before", "target": "first", "reads": "en"},
    "Marian": {"token": ">>{}<<", "source": "none", "target": "source"},
}
# those of M2M-100 (Fan et al. 2021), whose ids follow the vocabulary's in this order
M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy "
    "id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru "
    "sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
SWITCHED = ("Llama", "Gemma", "GPT2")
BY_MODEL = {
    "marian": "Marian",
    "t5": "T5",
    "mt5": "T5",
    "pegasus": "Pegasus",
    "bart": "Bart",
    "mbart": "MBart",
    "m2m_100": "M2M100",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "albert": "Albert",
    "llama": "Llama",
    "mistral": "Llama",
    "gemma": "Gemma",
}


def framed(tokenizer: Tokenizer, before: Sequence[str], after: Sequence[str]) -> Tokenizer:
    """The tokenizer with these tokens around every text, in its own file too."""
    tree = json.loads(tokenizer.to_json())

    def sequence(name: str, segment: int) -> list[dict[str, Any]]:
        around = [[{"SpecialToken": {"id": token, "type_id": segment}} for token in side] for side in (before, after)]
        return [*around[0], {"Sequence": {"id": name, "type_id": segment}}, *around[1]]

    tokens = dict.fromkeys((*before, *after))
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)[len(before) :]],
        "special_tokens": {token: {"id": token, "ids": [tokenizer.id(token)], "tokens": [token]} for token in tokens},
    }
    return Tokenizer.from_json(json.dumps(tree, ensure_ascii=False), tokenizer.roles, tokenizer.chat_template)


def framed_as_its_class(tokenizer: Tokenizer, settings: Mapping[str, Any], model_type: object) -> Tokenizer:
    """The tokenizer framed as transformers' class has it that tokenizer_config.json names, or the model's usual one.

    A tokenizer whose file says it, and one of an unknown class, stay as they are.
    """
    name = _class(settings, model_type)
    if tokenizer.frames or name not in CLASSES:
        return tokenizer
    before, after = CLASSES[name]
    if name in SWITCHED:
        before = ("bos",) if settings.get("add_bos_token", bool(before)) else ()
        after = ("eos",) if settings.get("add_eos_token", False) else ()
    roles = tokenizer.roles
    return framed(tokenizer, *([roles[role] for role in side if role in roles] for side in (before, after)))


def languages_of(tokenizer: Tokenizer, settings: Mapping[str, Any], config: Mapping[str, Any]) -> Tree | None:
    """How a model of several languages is told which ones it reads and writes; None for one of no languages.

    The language to write is the one that the decoder begins with by its settings, those of generation_config.json too.
    """
    name = _class(settings, config.get("model_type"))
    if name not in LANGUAGES:
        return None
    found = dict(LANGUAGES[name])
    if settings.get("legacy_behaviour") is True and name == "Nllb":
        found["source"] = "after"
    begin, end = found["token"].split("{}")
    special = {id: token for token, id in tokenizer.special_tokens.items()}
    if name == "Marian" and not any(token.startswith(begin) and token.endswith(end) for token in special.values()):
        return None
    if isinstance(reads := settings.get("src_lang"), str) and found["source"] != "none":
        found["reads"] = reads
    start = config.get("decoder_start_token_id" if found["target"] == "start" else "forced_bos_token_id")
    first = special.get(start) if isinstance(start, int) else None
    if first is not None and (code := re.fullmatch(f"{re.escape(begin)}([A-Za-z_-]+){re.escape(end)}", first)):
        found["writes"] = code[1]
    elif isinstance(writes := settings.get("tgt_lang"), str):
        found["writes"] = writes
    return found


def _class(settings: Mapping[str, Any], model_type: object) -> str:
    named = settings.get("tokenizer_class")
    return str(named).removesuffix("Fast").removesuffix("Tokenizer") if named else BY_MODEL.get(str(model_type), "")
