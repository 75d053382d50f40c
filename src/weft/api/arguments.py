"""Type checks for functions that users call from Python: a wrong argument is one line that names it.

Pydantic's `validate_call` would convert arguments (a text to a number) and refuse NumPy's numbers and arrays.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from weft.config import Config
from weft.errors import ConfigError, suggestion
from weft.recipe.config import Recipe
from weft.recipe.synonyms import SYNONYMS

T = TypeVar("T", bound=Callable[..., Any])
MAX_SHOWN = 60  # characters of a wrong value in a message
ABSTRACT: dict[Any, Any] = {None: NoneType, int: Integral, float: Real}

Sources = Sequence[str | Path] | str | Path  # one or several files, folders, patterns or names of texts


def source_names(sources: Sources) -> list[str]:
    """Return one source or several as a list of names."""
    return [str(source) for source in ([sources] if isinstance(sources, str | Path) else sources)]


def takes_settings(config: type[Config]) -> Callable[[T], T]:
    """Show a function's `**settings` as keyword arguments, one for each field of a config type.

    The function validates their values itself; None stands for a setting that is left out.
    """

    def decorate(function: T) -> T:
        signature = inspect.signature(function)
        named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        fields = [(name, hint) for name, hint in get_type_hints(config).items() if name in config.model_fields]
        kind = inspect.Parameter.KEYWORD_ONLY
        settings = [inspect.Parameter(name, kind, default=None, annotation=hint | None) for name, hint in fields]
        attributes = {"__signature__": signature.replace(parameters=[*named, *settings]), "settings": dict(fields)}
        vars(function).update(attributes)
        return function

    return decorate


def checked(function: T) -> T:
    """Make a function, or the public methods of a class, refuse arguments that do not match their annotations."""
    if inspect.isclass(function):
        for name, method in vars(function).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(function, name, checked(method))
        return function
    signature = inspect.signature(function)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())

    @cache  # evaluated on the first call: quoted annotations may name classes further down in the file
    def hints() -> dict[str, Any]:
        annotations = {name: each.annotation for name, each in signature.parameters.items() if name != "self"}
        module = inspect.unwrap(function).__globals__
        validated = dict.fromkeys(("self", *getattr(function, "settings", ())), Any)
        return get_type_hints(SimpleNamespace(__annotations__=annotations), module) | validated

    @wraps(function)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        known = hints()
        for name, value in {**dict(zip(signature.parameters, args, strict=False)), **kwargs}.items():
            if name not in known and not takes_any:
                raise ConfigError(f"{name}: no such argument; {_instead(name, value, known)}")
            hint = known.get(name, Any)
            if not _fits(value, hint):
                shown, expected = repr(value), re.sub(r"\b(?!torch)\w+\.", "", inspect.formatannotation(hint))
                literal = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal]
                of_texts = literal and isinstance(value, str)
                expected = suggestion(value, get_args(literal[0])) if of_texts else f"expected {expected}"
                if isinstance(value, str) and _fits([value], hint):
                    expected += f", such as [{shown[:MAX_SHOWN]}]"
                raise ConfigError(f"{name} = {shown[:MAX_SHOWN]}{'…' * (len(shown) > MAX_SHOWN)}: {expected}")
        return function(*args, **kwargs)

    return with_checks  # type: ignore[return-value]


def _instead(name: str, value: Any, known: Mapping[str, Any]) -> str:
    """Say what to write for an unknown argument: settings of a recipe are `changes`."""
    key, _, note = SYNONYMS.get(name, name).partition(": ")
    unknown = key and key.partition(".")[0] not in Recipe.model_fields
    if "changes" not in known or unknown or get_close_matches(name, known):
        return suggestion(name, known)
    if not key:  # not a setting here
        return note
    shown = "…" if note else f"{value!r:.{MAX_SHOWN}}"  # the value given there means something else here
    return f"settings of the recipe are written changes={{{key!r}: {shown}}}" + (f"; {note}" if note else "")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value may be passed for an annotation; any iterable but a text fits a sequence."""
    kind, members = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind in (Union, UnionType):
        return any(_fits(value, member) for member in members)
    if kind is Literal:
        return value in members
    if kind in (Sequence, Iterable):
        several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        return several and (not isinstance(value, list | tuple) or all(_fits(item, members[0]) for item in value))
    if kind is tuple and ... not in members:
        return isinstance(value, tuple) and len(value) == len(members) and all(map(_fits, value, members))
    return isinstance(value, ABSTRACT.get(hint, kind or hint))
