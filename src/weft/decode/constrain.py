"""Constrained writing: only tokens after which the text can still match a grammar. llguidance follows the grammar.

A grammar is a regular expression (Rust's syntax), JSON of a schema, or a context-free grammar in Lark's syntax.
"""

import json
import re
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from weft.errors import ConfigError, ModelError
from weft.text.tokenizer import Tokenizer

# every spelling of a text may be written, not only the one that the tokenizer would choose
ANY_SPELLING = '\n%llguidance {"no_forcing": true}\n'
# a model that may write white space where it likes can do so without end
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NAMED = {"properties", "$defs", "definitions"}  # keywords that hold schemas by name
VALUES = {"const", "enum", "default", "examples"}  # keywords that hold values
BYTES = LLTokenizer("byte")


class Grammar:
    """What whole texts of a tokenizer have to match."""

    def __init__(self, tokenizer: Tokenizer, lark: str, name: str, notes: dict[str, Any]):
        """A grammar in Lark's syntax; `name` is what messages call it, `notes` what a file of texts notes of it."""
        self.lark, self.name, self.notes = lark + ANY_SPELLING, name, notes
        self.vocabulary = _vocabulary(tokenizer)
        self._matcher = LLMatcher(self.vocabulary.tokenizer, self.lark, log_level=0)
        if self._matcher.is_error():
            reason = _one_line(self._matcher.get_error(), several="\n" in lark)
            raise ConfigError(f"{name}: {reason}")

    def begin(self, begun: bool = False) -> "Constraint":
        """For a text that is about to be written; after a prompt it goes on with a text that has `begun`."""
        constraint = Constraint(self, self._matcher.deep_copy(), begun)
        if not bool(constraint.mask().any()):
            where = "continue a prompt, whose words begin with a space" if begun else "begin a text"
            raise ModelError(f"{self.name}: no token of this vocabulary can {where}")
        return constraint

    def matches(self, text: str) -> bool:
        """Whether a whole text matches, which one that was cut off may not."""
        matcher, letters = LLMatcher(BYTES, self.lark, log_level=0), list(text.encode())
        return matcher.try_consume_tokens(letters) == len(letters) and matcher.is_accepting()


def regex(tokenizer: Tokenizer, expression: str) -> Grammar:
    """Texts that match a regular expression as a whole."""
    written = expression.replace("/", "\\/").replace("\n", "\\n")
    return Grammar(tokenizer, f"start: /{written}/", f"pattern {expression[:60]!r}", {"pattern": expression})


def json_schema(tokenizer: Tokenizer, schema: Any) -> Grammar:
    """Texts that are JSON of this schema: members in the schema's order, a space after each comma and colon. An object
    has the members that its schema names, and others only where `additionalProperties` allows them."""
    if not isinstance(schema, dict):
        raise ConfigError(f"the schema: expected an object such as {{'type': 'integer'}}, found {schema!r:.60}")
    try:
        text = json.dumps({**_closed(schema), "x-guidance": JSON_LAYOUT})
    except RecursionError:
        raise ConfigError("the schema: nested too deeply") from None
    except AttributeError:
        raise ConfigError(f"the schema: {', '.join(sorted(NAMED))} are objects that name schemas") from None
    return Grammar(tokenizer, f"start: %json {text}", "the schema", {"schema": schema})


def _closed(schema: Any) -> Any:
    """The same without members that no schema names: a model that may add members can do so without end. What is put
    together from several schemas stays as it is, since each would exclude the members of the others."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict) or {"allOf", "$ref"} & schema.keys():
        return schema
    closed = {key: value if key in VALUES else _closed(value) for key, value in schema.items() if key not in NAMED}
    for key in NAMED & schema.keys():
        closed[key] = {name: _closed(each) for name, each in schema[key].items()}
    if "properties" in schema and not {"anyOf", "oneOf", "patternProperties"} & schema.keys():
        closed.setdefault("additionalProperties", False)
    return closed


def lark(tokenizer: Tokenizer, text: str) -> Grammar:
    """Texts that the rule `start` of a Lark grammar derives."""
    return Grammar(tokenizer, text, "the grammar", {"grammar": text})


class Constraint:
    """Says which tokens one text may go on with. A beam that splits in two needs a copy."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, begun: bool):
        self.grammar, self.matcher, self.begun = grammar, matcher, begun
        self._mask: Tensor | None = None

    def allowed(self) -> Tensor:
        """(V,) on the CPU, True where a token may follow; a ModelError where none can, though the text isn't over."""
        if not bool(self.mask().any()):
            raise ModelError(f"{self.grammar.name}: no token of this vocabulary can continue it")
        return self.mask()

    def mask(self) -> Tensor:
        """(V,), True where a token may follow; the end of the text where it matches."""
        if self._mask is None:
            vocabulary = self.grammar.vocabulary
            found = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8).bool()
            self._mask = found[: vocabulary.size]
            if not self.begun:
                self._mask[vocabulary.openings] = found[vocabulary.size : vocabulary.size + len(vocabulary.openings)]
            if self.matcher.is_error():  # no token fits, and llguidance would end the text
                self._mask.fill_(False)
        return self._mask

    def push(self, token: int) -> None:
        """This token was written; never the end of the text."""
        if not self.begun:
            token = self.grammar.vocabulary.opening.get(token, token)
        self.matcher.consume_token(token)
        self.begun, self._mask = True, None

    @property
    def over(self) -> bool:
        """The text matches, and nothing but its end may follow."""
        if not self.matcher.is_accepting():
            return False
        eos_id = self.grammar.vocabulary.eos_id
        return int(self.mask().sum()) == (0 if eos_id is None else 1)

    def copy(self) -> "Constraint":
        """The same for another text that begins as this one did."""
        return Constraint(self.grammar, self.matcher.deep_copy(), self.begun)


class _Vocabulary:
    """A tokenizer as llguidance knows it: the bytes that each token spells.

    A word that begins a text may spell itself without its leading space. Those spellings stand behind the tokenizer's
    own `size` tokens, in the order of `openings`.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.size, self.eos_id, self._encode = tokenizer.vocab_size, tokenizer.eos_id, tokenizer.encode
        self.tokens = [tokenizer.token_bytes(token) for token in range(self.size)]
        hidden = set(tokenizer.special_tokens.values())
        spelled = {token: tokenizer.decode([token]) for token in range(self.size) if token not in hidden}
        first = {token: text.encode() for token, text in spelled.items() if "\ufffd" not in text}
        changed = [token for token, spelling in first.items() if spelling != self.tokens[token]]
        self.openings = torch.tensor(changed, dtype=torch.long)
        self.opening = {token: self.size + place for place, token in enumerate(changed)}
        self.tokens += [first[token] for token in changed]
        # a token without text could be written forever
        self.special_token_ids = [*hidden, *(id for id, spelling in enumerate(self.tokens) if not spelling)]
        self.bos_token_id, self.eos_token_id = None, self.eos_id
        if self.eos_id is None:
            self.eos_token_id = len(self.tokens)
            self.tokens.append(b"<eos>")
            self.special_token_ids.append(self.eos_token_id)
        self.tokenizer = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace"))


_vocabulary = lru_cache(maxsize=2)(_Vocabulary)


def _one_line(error: str, several: bool) -> str:
    """What llguidance says, less its drawing of the place; in a grammar of several lines, with the line."""
    lines = error.splitlines()
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", lines[0])
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = reasons[-1] if reasons else lines[0][place.end() if place else 0 :]
    reason = re.sub(r"^(failed to compile JSON schema|invalid regex .* \(in regex\)): ", "", reason)
    return f"line {place[1]}, column {place[2]}: {reason}" if place and several else reason
