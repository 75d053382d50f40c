"""Base of all settings: frozen, typed configs, read from TOML, overridden by dotted keys and saved again.

A setting with variants is a union of config types, told apart by `kind`: choosing the type chooses the variant.
Settings are data; the code that builds from them is next to the classes it builds. Each room declares its config
types in a `config.py` that imports no torch, so reading a recipe is instant.
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

from weft.errors import ConfigError, did_you_mean, os_errors, suggestion
from weft.storage import files

Tree = dict[str, Any]


class Config(BaseModel):
    """Base of every config type: frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, defer_build=True)

    synonyms: ClassVar[Mapping[str, str]] = {}  # another program's name for a setting → its dotted key here

    def replace(self, **changes: Any) -> Self:
        """Return a copy with these fields changed, validated again."""
        return type(self).model_validate({**self.model_dump(exclude_none=True), **changes})


C = TypeVar("C", bound="Config")


def kinds(base: type[C]) -> list[type[C]]:
    """Return the variants of `base`: every subclass that sets `kind`, in order of declaration."""
    return [kind for child in base.__subclasses__() for kind in (child, *kinds(child)) if tag_of(kind) is not None]


def tag_of(kind: type[Config]) -> str | None:
    """Return the default of a config type's `kind` field, or None if it has none."""
    field = kind.model_fields.get("kind")
    return field.default if field is not None and isinstance(field.default, str) else None


class AnyKind:
    """Mark a setting that accepts any variant of a base type: `position: Annotated[PositionConfig, AnyKind()]`.

    Declaring a subclass is enough to add a variant. Variants are looked up when the type with this setting is first
    built, so a type declared in the same file as its variants must defer that with `defer_build=True`.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(Annotated[Union[tuple(kinds(source))], Field(discriminator="kind")])  # noqa: UP007


def read_toml(path: Path) -> Tree:
    """Return the tables of a TOML file."""
    with os_errors(path, ConfigError):
        if not path.exists():
            raise ConfigError(f"{path}: no such recipe")
        text = files.read_text(path).removeprefix("\ufeff")  # a byte order mark
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """Merge `above` over `below`, table by table.

    A table that names a different `kind` replaces the one below it: the old variant's keys don't apply to it.
    """
    kind = above.get("kind", below.get("kind"))
    merged: Tree = dict(below) if kind == below.get("kind", kind) else {}
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = merge(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged


def assignments(words: Iterable[str]) -> Tree:
    """Parse `key.sub=value` overrides into nested tables. A value that isn't valid TOML is a bare string."""
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
    """Expand a dotted key to nested tables. The value may be a config, or a table that itself has dotted keys."""
    if not isinstance(key, str) or not all(key.split(".")):
        raise ConfigError(f"{key!r}: not a setting's name, such as 'model.layers'")
    if isinstance(value, Mapping):
        tree: Tree = {}
        for name in sorted(value, key=lambda name: str(name).count(".")):
            tree = merge(tree, nested(name, value[name]))
        value = tree
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else _plain(value)}


def flat(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """Flatten nested tables to a dict from dotted keys to values."""
    leaves: Tree = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, PurePath):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def validate(kind: type[C], tree: Mapping[str, Any], source: str = "") -> C:
    """Build a config of type `kind`, or raise an error that names the key, its value and the expected one."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        problems = [_describe(kind, tree, problem) for problem in error.errors()]
        where = f"{source}: " if source else ""
        raise ConfigError(where + "; ".join(dict.fromkeys(problems))) from None


def _describe(kind: type[Config], tree: Mapping[str, Any], problem: Any) -> str:
    keys, owner = _locate(kind, problem["loc"])
    key = ".".join(keys) or "the recipe"
    value, context = problem.get("input"), problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            names = [".".join([*keys[:-1], name]) for name in (owner.model_fields if owner else ())]
            while isinstance(value, Mapping) and len(value) == 1:  # for `training.steps = 5`, report the full key
                [(name, value)] = value.items()
                keys.append(name)
            return f"{'.'.join(keys)}: unknown key; {_advice(kind, tree, '.'.join(keys), siblings=names)}"
        case "missing":
            return f"{key}: missing"
        case "union_tag_not_found":
            return f"{key}.kind: missing; it chooses the variant"
        case "union_tag_invalid":
            tag = str(context["tag"])
            return f"{key}.kind = {tag!r}: unknown kind; {suggestion(tag, QUOTED.findall(context['expected_tags']))}"
        case "literal_error" if isinstance(value, str):
            return f"{key} = {value!r}: {suggestion(value, QUOTED.findall(context['expected']))}"
        case "model_type" | "model_attributes_type":
            field = owner.model_fields.get(keys[-1]) if owner and keys else None
            tags = [tag for tag in map(tag_of, members_of(field)) if tag is not None]
            if not tags or not isinstance(value, str):
                return f"{key} = {value!r}: expected a table"
            hint = f"={value}" if value in tags else f", one of {', '.join(tags)}"
            return f"{key} = {value!r}: expected a table; its kind is set as {key}.kind{hint}"
        case "tuple_type":
            return f"{key} = {value!r}: expected a list, such as [{value!r}]"
        case "value_error":
            return f"{key}: {context['error']}" if keys else str(context["error"])
        case _:
            return f"{key} = {value!r}: expected {expected(problem)}"


def expected(problem: Any) -> str:
    """Return, in plain words, the value that a problem found by pydantic asks for."""
    kind: str = problem["type"]
    text = next((text for prefix, text in EXPECTED.items() if kind.startswith(prefix)), None)
    if text is not None:
        return text.format(**problem.get("ctx", {}))
    compared = "a number " if kind.startswith(("greater", "less")) else ""
    return compared + re.sub(r"^\w+ should (be|have|match) ", "", problem["msg"])


QUOTED = re.compile(r"'([^']*)'")
# prefix of a pydantic error type → the value it expected, in plain words
EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "finite": "a finite number",
    "dict": "a table",
    "model": "a table",
    "list": "a list",
    "tuple": "a list",
    "too_short": "at least {min_length} in the list",
    "too_long": "at most {max_length} in the list",
    "string_too_short": "non-empty text",
    "string_too_long": "at most {max_length} characters",
    "string_pattern": "text that matches {pattern}",
    "string": "text",
    "union_tag": "an object with a known 'type'",
    "literal": "{expected}",
}


def _advice(kind: type[Config], tree: Mapping[str, Any], key: str, *, siblings: Sequence[str]) -> str:
    """Say what to write instead of an unknown key: the end of an error message, with full keys to copy.

    Names that other programs use are looked up in the synonyms. Otherwise offer the same name elsewhere in the recipe,
    or the nearest one; `siblings` are the valid keys of the same table.
    """
    key = key.replace("-", "_")
    known, name = list(keys_of(kind, tree)), _last(key)
    meant, _, note = next((kind.synonyms[word] for word in (key, name) if word in kind.synonyms), "").partition(": ")
    if note and not meant:
        return note
    if meant and meant != key:
        if not note and not any(f"{known_key}.".startswith(f"{meant}.") for known_key in known):
            note = "but not in a recipe of this kind"
        return f"it is '{meant}' here" + (f", {note}" if note else "")
    near: list[str] = []
    for keys, cutoff in ((siblings, 0.8), (known, 1.0), (siblings, 0.6), (known, 0.75)):
        by_name = {_last(candidate): candidate for candidate in reversed(keys)}
        near = near or [by_name[match] for match in get_close_matches(name, by_name, n=3, cutoff=cutoff)]
    if near:
        return did_you_mean(near)
    return f"the keys here are {', '.join(map(_last, siblings))}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def keys_of(kind: type[Config], tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all settings of a config type, for the variants that `tree` chooses."""
    for name, field in kind.model_fields.items():
        members, value = members_of(field), tree.get(name)
        if not members:
            yield f"{prefix}{name}"
            continue
        table = value if isinstance(value, Mapping) else {}
        default = type(field.default) if isinstance(field.default, Config) else members[0]
        chosen = next((member for member in members if tag_of(member) == table.get("kind")), default)
        yield from keys_of(chosen, table, f"{prefix}{name}.")


def _locate(kind: type[Config], location: tuple[Any, ...]) -> tuple[list[str], type[Config] | None]:
    """Return the parts of the dotted key at a pydantic location, without union tags, and the config type it is in."""
    keys: list[str] = []
    owner: type[Config] | None = kind
    members: list[type[Config]] = [kind]  # config types that the value at this location may have
    may_be_tag = False
    for part in location:
        chosen = next((member for member in members if may_be_tag and part in (member.__name__, tag_of(member))), None)
        may_be_tag = chosen is None
        if chosen is not None:
            owner, members = chosen, [chosen]
            continue
        keys.append(str(part))
        owner = members[0] if len(members) == 1 else None
        members = members_of(owner.model_fields.get(part) if owner is not None and isinstance(part, str) else None)
    return keys, owner


def members_of(field: FieldInfo | None) -> list[type[Config]]:
    """Return the config types that a field accepts; none if it isn't a table."""
    return [] if field is None else _config_types(field.annotation, field.metadata)


def _config_types(annotation: Any, metadata: Iterable[Any] = ()) -> list[type[Config]]:
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        return _config_types(inner, marks)
    if get_origin(annotation) in (Union, UnionType):
        return [member for part in get_args(annotation) for member in _config_types(part)]
    if not (isinstance(annotation, type) and issubclass(annotation, Config)):
        return []
    return kinds(annotation) if any(isinstance(mark, AnyKind) for mark in metadata) else [annotation]


def to_toml(config: Config, comments: Mapping[str, str] | None = None) -> str:
    """Format a config as TOML. Values that are None are left out: absent and None are equivalent.

    `comments` maps dotted keys that are left out to a comment, written where the key would be.
    """
    text = tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
    for key, comment in reversed(list((comments or {}).items())):
        table, _, name = key.rpartition(".")
        if f"\n[{table}]\n" in text:
            text = text.replace(f"\n[{table}]\n", f"\n[{table}]\n# {name}: {comment}\n")
        else:
            text = f"# {key}: {comment}\n{text}"
    return text
