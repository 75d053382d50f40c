"""Recipes: frozen, typed settings that are read from TOML, overridden by dotted keys and saved again.

A setting that comes in variants is a union of config types, distinguished by `kind`; choosing the type is
choosing the variant. Settings are data: what builds from them stands beside the classes it builds. This file holds
what all config types share; each room declares its own in a `config.py` that imports no torch, so that reading a
recipe is instant.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path, PurePath
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from weft.errors import ConfigError, did_you_mean, suggestion
from weft.storage import files

Tree = dict[str, Any]


class Config(BaseModel):
    """The base of every config type: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, defer_build=True)

    synonyms: ClassVar[Mapping[str, str]] = {}  # what other programs call a key → its dotted key here

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again."""
        return type(self).model_validate({**self.model_dump(exclude_none=True), **changes})


C = TypeVar("C", bound="Config")


def kinds(base: type[C]) -> list[type[C]]:
    """The variants of `base`: every declared subclass that has a `kind` of its own, in the order of declaration."""
    return [kind for child in base.__subclasses__() for kind in (child, *kinds(child)) if tag_of(kind) is not None]


def tag_of(kind: type[Config]) -> str | None:
    field = kind.model_fields.get("kind")
    return field.default if field is not None and isinstance(field.default, str) else None


class AnyKind:
    """Marks a setting that any variant of a base type may fill: `position: Annotated[PositionConfig, AnyKind()]`.

    A variant belongs to it by being declared. The variants are looked up when the type that has the setting is first
    used; if that type is declared in the same file as they are, it has to defer that with `defer_build=True`.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(Annotated[Union[tuple(kinds(source))], Field(discriminator="kind")])  # noqa: UP007


def read_toml(path: Path) -> Tree:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(files.read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """`below` with `above` laid over it, table by table.

    A table that names another `kind` replaces the one below it: the old variant's keys mean nothing to it.
    """
    kind = above.get("kind", below.get("kind"))
    merged: Tree = dict(below) if kind == below.get("kind", kind) else {}
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = merge(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged


def assignments(words: Iterable[str]) -> Tree:
    """The table that `key.sub=value …` words describe. A value is a TOML value, or else a bare string."""
    tree: Tree = {}
    for word in words:
        key, equals, text = word.partition("=") if isinstance(word, str) else ("", "", "")
        if not equals or not all(key.strip().split(".")):
            raise ConfigError(f"'{word}': an override is written key=value, for instance model.layers=8")
        if not text:
            raise ConfigError(f"'{word}': the value is missing")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        tree = merge(tree, nested(key.strip(), value))
    return tree


def nested(key: Any, value: Any) -> Tree:
    """The table in which a dotted key has a value, which may be a table with such keys or a config."""
    if not isinstance(key, str) or not all(key.split(".")):
        raise ConfigError(f"{key!r}: not a setting's name, such as 'model.layers'")
    if isinstance(value, Mapping):
        tree: Tree = {}
        for name in sorted(value, key=lambda name: str(name).count(".")):
            tree = merge(tree, nested(name, value[name]))
        value = tree
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else _plain(value)}


def flat(tree: Mapping[str, Any], inside: str = "") -> Tree:
    """The values of nested tables by their dotted keys."""
    leaves: Tree = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{inside}{key}.") if isinstance(value, Mapping) else {f"{inside}{key}": value}
    return leaves


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, PurePath):
        return str(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def validate(kind: type[C], tree: Mapping[str, Any], source: str = "") -> C:
    """`tree` as a config of type `kind`, or an error that names the key, the value and what was expected."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        problems = [_describe(kind, tree, problem) for problem in error.errors()]
        where = f"{source}: " if source else ""
        raise ConfigError(where + "; ".join(dict.fromkeys(problems))) from None


def _describe(kind: type[Config], tree: Mapping[str, Any], problem: Any) -> str:
    keys, here = _walk(kind, problem["loc"])
    key = ".".join(keys) or "the recipe"
    given, context = problem.get("input"), problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            names = [".".join([*keys[:-1], name]) for name in (here.model_fields if here else ())]
            while isinstance(given, Mapping) and len(given) == 1:  # `training.steps = 5`: the whole key is unknown
                [(name, given)] = given.items()
                keys.append(name)
            return f"{'.'.join(keys)}: unknown key; {advice(kind, tree, '.'.join(keys), names)}"
        case "missing":
            return f"{key}: missing"
        case "union_tag_not_found":
            return f"{key}.kind: missing; it chooses the variant"
        case "union_tag_invalid":
            tag = str(context["tag"])
            return f"{key}.kind = {tag!r}: unknown kind; {suggestion(tag, QUOTED.findall(context['expected_tags']))}"
        case "literal_error" if isinstance(given, str):
            return f"{key} = {given!r}: {suggestion(given, QUOTED.findall(context['expected']))}"
        case "model_type" | "model_attributes_type":
            field = here.model_fields.get(keys[-1]) if here and keys else None
            tags = [tag for tag in map(tag_of, members_of(field)) if tag is not None]
            if not tags or not isinstance(given, str):
                return f"{key} = {given!r}: expected a table"
            hint = f"={given}" if given in tags else f", one of {', '.join(tags)}"
            return f"{key} = {given!r}: expected a table; its kind is set as {key}.kind{hint}"
        case "tuple_type":
            return f"{key} = {given!r}: expected a list, such as [{given!r}]"
        case "value_error":
            return f"{key}: {context['error']}" if keys else str(context["error"])
        case "string_pattern_mismatch":
            return f"{key} = {given!r}: expected text that matches {context['pattern']}"
        case kind_:
            compared = "a number " if kind_.startswith(("greater", "less")) else ""
            message = compared + re.sub(r"^\w+ should (be|have|match) ", "", problem["msg"])
            expected = next((words for begins, words in EXPECTED.items() if kind_.startswith(begins)), message)
            return f"{key} = {given!r}: expected {expected}"


QUOTED = re.compile(r"'([^']*)'")
# pydantic's kinds of error, by how they begin, in the words of a person
EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "finite": "a finite number",
    "dict": "a table",
    "string_too_short": "some text",
    "string": "text",
}


def advice(kind: type[Config], tree: Mapping[str, Any], key: str, beside: Sequence[str] = ()) -> str:
    """What to write instead of an unknown key: the tail of an error, of which every key can be copied.

    Another program's name for a setting is known by the table of synonyms. Otherwise it is the same name anywhere in
    the recipe, or the nearest one; `beside` are the keys that the unknown one stands among.
    """
    known, name = list(keys_of(kind, tree)), _last(key)
    meant, _, note = next((kind.synonyms[word] for word in (key, name) if word in kind.synonyms), "").partition(": ")
    if note and not meant:
        return note
    if meant and meant != key:
        if not note and not any(f"{each}.".startswith(f"{meant}.") for each in known):
            note = "but not in a recipe of this kind"
        return f"it is '{meant}' here" + (f", {note}" if note else "")
    near: list[str] = []
    for keys, cutoff in ((beside, 0.8), (known, 1.0), (beside, 0.6), (known, 0.75)):
        by_name = {_last(each): each for each in reversed(keys)}
        near = near or [by_name[end] for end in get_close_matches(name, by_name, n=3, cutoff=cutoff)]
    if near:
        return did_you_mean(near)
    return f"the keys here are {', '.join(map(_last, beside))}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def keys_of(kind: type[Config], tree: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    """The dotted keys of all settings that a config of this type can have, with the variants that `tree` chooses."""
    for name, field in kind.model_fields.items():
        members, given = members_of(field), tree.get(name)
        if not members:
            yield f"{inside}{name}"
            continue
        table = given if isinstance(given, Mapping) else {}
        usual = type(field.default) if isinstance(field.default, Config) else members[0]
        chosen = next((member for member in members if tag_of(member) == table.get("kind")), usual)
        yield from keys_of(chosen, table, f"{inside}{name}.")


def _walk(kind: type[Config], location: tuple[Any, ...]) -> tuple[list[str], type[Config] | None]:
    """The dotted key of a pydantic location, less the union tags in it, and the config type that has the key."""
    keys: list[str] = []
    owner: type[Config] | None = kind
    members: list[type[Config]] = [kind]  # the types that a value at this place may have
    may_be_tag = False
    for part in location:
        chosen = next((each for each in members if may_be_tag and part in (each.__name__, tag_of(each))), None)
        may_be_tag = chosen is None
        if chosen is not None:
            owner, members = chosen, [chosen]
            continue
        keys.append(str(part))
        owner = members[0] if len(members) == 1 else None
        members = members_of(owner.model_fields.get(part) if owner is not None and isinstance(part, str) else None)
    return keys, owner


def members_of(field: FieldInfo | None) -> list[type[Config]]:
    return [] if field is None else _among(field.annotation, field.metadata)


def _among(annotation: Any, metadata: Iterable[Any] = ()) -> list[type[Config]]:
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        return _among(inner, marks)
    if get_origin(annotation) in (Union, UnionType):
        return [member for part in get_args(annotation) for member in _among(part)]
    if not (isinstance(annotation, type) and issubclass(annotation, Config)):
        return []
    return kinds(annotation) if any(isinstance(mark, AnyKind) for mark in metadata) else [annotation]


def to_toml(config: Config, comments: Mapping[str, str] | None = None) -> str:
    """The resolved config as TOML. What is None is left out: absent and None mean the same.

    `comments` says of some keys that are left out, where they would stand, what becomes of them.
    """
    text = tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
    for key, comment in reversed(list((comments or {}).items())):
        table, _, name = key.rpartition(".")
        if f"\n[{table}]\n" in text:
            text = text.replace(f"\n[{table}]\n", f"\n[{table}]\n# {name}: {comment}\n")
        else:
            text = f"# {key}: {comment}\n{text}"
    return text
