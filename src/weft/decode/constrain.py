"""Constrained generation: only tokens after which the text can still match a grammar. Matching is llguidance's.

A grammar is a regular expression (Rust's syntax), a JSON schema, or a context-free grammar in Lark's syntax.
"""

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from torch import Tensor

from weft.errors import ConfigError, ModelError
from weft.text.tokenizer import Tokenizer

# allow every tokenization of a text, not only the tokenizer's
ANY_TOKENIZATION = '\n%llguidance {"no_forcing": true}\n'
# fixed whitespace: with free whitespace, a model may generate it without end
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NAMED = {"properties", "$defs", "definitions"}  # keywords that hold schemas by name
COUNTED = NAMED | {"anyOf", "oneOf", "allOf", "prefixItems", "patternProperties"}
MAX_MEMBERS = 2000  # of one object or list of alternatives, whose grammar grows with the square
MAX_OPTIONAL = 1000  # of them that may be left out, each of which is an alternative after every property
MAX_PARTS = 5000  # members of all objects and lists
LIMITS = LLParserLimits(max_items_in_row=4 * MAX_OPTIONAL)
VALUES = {"const", "enum", "default", "examples"}  # keywords that hold values
BYTES = LLTokenizer("byte")


class Grammar:
    """A grammar in Lark's syntax that whole texts match; errors show its `name`, output files its `notes`."""

    def __init__(self, tokenizer: Tokenizer, lark: str, name: str, *, notes: dict[str, Any]):
        self.lark, self.name, self.notes = lark + ANY_TOKENIZATION, name, notes
        self.vocabulary = _vocabulary(tokenizer)
        self._matcher = LLMatcher(self.vocabulary.tokenizer, self.lark, log_level=0, limits=LIMITS)
        if self._matcher.is_error():
            reason = _one_line(self._matcher.get_error(), multiline="\n" in lark)
            raise ConfigError(f"{name}: {reason}")

    def begin(self, mid_text: bool = False, stop_ids: Iterable[int] = ()) -> "Constraint":
        """Return the constraint of a new text; `mid_text` if it continues the prompt's text.

        Where the text matches, it may end with eos or with one of `stop_ids`.
        """
        ends = torch.tensor(sorted(set(stop_ids)), dtype=torch.long)
        constraint = Constraint(self, self._matcher.deep_copy(), mid_text, ends=ends)
        if not bool(constraint.mask().any()):
            where = "continue a prompt, whose words begin with a space" if mid_text else "begin a text"
            raise ModelError(f"{self.name}: no token of this vocabulary can {where}")
        return constraint

    def matches(self, text: str) -> bool:
        """Return whether a whole text matches; one that reached its length limit may not."""
        matcher, tokens = LLMatcher(BYTES, self.lark, log_level=0, limits=LIMITS), list(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def regex(tokenizer: Tokenizer, expression: str) -> Grammar:
    """Return the grammar of texts that match a regular expression as a whole."""
    escaped = expression.replace("/", "\\/").replace("\n", "\\n")
    return Grammar(tokenizer, f"start: /{escaped}/", f"pattern {expression[:60]!r}", notes={"pattern": expression})


def json_schema(tokenizer: Tokenizer, schema: Any) -> Grammar:
    """Return the grammar of JSON that follows a schema: properties in its order, a space after each comma and colon.

    Objects have only the properties that the schema names, unless `additionalProperties` allows others.
    """
    return Grammar(tokenizer, f"start: %json {schema_source(schema)}", "the schema", notes={"schema": schema})


def schema_source(schema: Any) -> str:
    """Return a schema as a grammar takes it after `%json`."""
    if not isinstance(schema, dict):
        raise ConfigError(f"the schema: expected an object such as {{'type': 'integer'}}, found {schema!r:.60}")
    try:
        sizes = list(_sizes(schema))
        if max(sizes, default=0) > MAX_MEMBERS or sum(sizes) > MAX_PARTS:
            many = f"{max(sizes):,} properties or alternatives in one place and {sum(sizes):,} in all"
            raise ConfigError(f"the schema: {many}; at most {MAX_MEMBERS:,} and {MAX_PARTS:,} are accepted")
        if (optional := max(_optional(schema), default=0)) > MAX_OPTIONAL:
            few = f"at most {MAX_OPTIONAL:,} are accepted; list others as required"
            raise ConfigError(f"the schema: {optional:,} optional properties in one object; {few}")
        return json.dumps({**_closed(schema), "x-guidance": JSON_LAYOUT})
    except RecursionError:
        raise ConfigError("the schema: nested too deeply") from None
    except AttributeError:
        raise ConfigError(f"the schema: {', '.join(sorted(NAMED))} are objects that name schemas") from None


def _sizes(schema: Any) -> Iterator[int]:
    """Yield the number of properties, or of alternatives, in each place of a schema that has them."""
    for key, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if isinstance(value, dict | list) and key not in VALUES:
            if key in COUNTED:
                yield len(value)
            yield from _sizes(value)


def _optional(schema: Any) -> Iterator[int]:
    """Yield the number of optional properties of each object in a schema."""
    for key, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if isinstance(value, dict | list) and key not in VALUES:
            if key == "properties":
                required = schema.get("required")
                yield len(value) - len(set(map(str, required)) & set(value) if isinstance(required, list) else ())
            yield from _optional(value)


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no unnamed properties, which a model may generate without end.

    Combined schemas (`allOf`, `$ref`, …) are left unchanged: each part would exclude the properties of the others.
    """
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
    """Return the grammar of texts that the rule `start` of a Lark grammar derives."""
    return Grammar(tokenizer, text, "the grammar", notes={"grammar": text})


class Constraint:
    """Tracks one text and decides which tokens may follow; beams that share a prefix need copies."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, mid_text: bool, *, ends: Tensor):
        self.grammar, self.matcher, self.mid_text, self.ends = grammar, matcher, mid_text, ends
        self._mask: Tensor | None = None

    def allowed(self) -> Tensor:
        """Return `mask()`, or raise ModelError if no token can follow although the text isn't over."""
        if not bool(self.mask().any()):
            complex = "TooComplex" in self.matcher.get_error()
            reason = "too many alternatives in one place" if complex else "no token of this vocabulary can continue it"
            raise ModelError(f"{self.grammar.name}: {reason}")
        return self.mask()

    def mask(self) -> Tensor:
        """Mask (V,) on the CPU, True where a token may follow; eos and `ends` may where the text matches."""
        if self._mask is None:
            vocabulary = self.grammar.vocabulary
            bias = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8).bool()
            self._mask = bias[: vocabulary.size]
            if not self.mid_text:
                self._mask[vocabulary.openings] = bias[vocabulary.size : vocabulary.size + len(vocabulary.openings)]
            if self.matcher.is_error():  # no token fits; llguidance would end the text
                self._mask.fill_(False)
            elif len(self.ends) and self.matcher.is_accepting():
                self._mask[self.ends] = True
        return self._mask

    def push(self, token: int) -> None:
        """Add a generated token, never eos."""
        if not self.mid_text:
            token = self.grammar.vocabulary.opening.get(token, token)
        self.matcher.consume_token(token)
        self.mid_text, self._mask = True, None

    @property
    def over(self) -> bool:
        """Whether the text matches and nothing but eos may follow."""
        if not self.matcher.is_accepting():
            return False
        others, eos_id = self.mask().clone(), self.grammar.vocabulary.eos_id
        others[self.ends if eos_id is None else torch.cat([self.ends, torch.tensor([eos_id])])] = False
        return not bool(others.any())

    def copy(self) -> "Constraint":
        """Return a copy for another beam with the same prefix."""
        return Constraint(self.grammar, self.matcher.deep_copy(), self.mid_text, ends=self.ends)


class _Vocabulary:
    """A tokenizer's bytes for llguidance: after `size` tokens, variants of `openings` without their leading space."""

    def __init__(self, tokenizer: Tokenizer):
        self.size, self.eos_id, self._encode = tokenizer.vocab_size, tokenizer.eos_id, tokenizer.encode
        self.tokens = [tokenizer.token_bytes(token) for token in range(self.size)]
        hidden = set(tokenizer.special_tokens.values())
        texts = {token: tokenizer.decode([token]) for token in range(self.size) if token not in hidden}
        first = {token: text.encode() for token, text in texts.items() if "\ufffd" not in text}
        changed = [token for token, spelling in first.items() if spelling != self.tokens[token]]
        self.openings = torch.tensor(changed, dtype=torch.long)
        self.opening = {token: id for id, token in enumerate(changed, start=self.size)}
        self.tokens += [first[token] for token in changed]
        # an empty token could be generated forever
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


def _one_line(error: str, multiline: bool) -> str:
    """Return llguidance's message without its excerpt of the grammar; with line and column if that is multiline."""
    lines = error.splitlines()
    position = re.match(r"(?:at )?(\d+)\((\d+)\): ", lines[0])
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = reasons[-1] if reasons else lines[0][position.end() if position else 0 :]
    reason = re.sub(r"^(failed to compile JSON schema|invalid regex .* \(in regex\)): ", "", reason)
    return f"line {position[1]}, column {position[2]}: {reason}" if position and multiline else reason
