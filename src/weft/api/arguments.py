"""Arguments of the functions that Python calls, held to their annotations: a mistake is one line that names it."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from weft.errors import ConfigError, suggestion

T = TypeVar("T", bound=Callable[..., Any])
SHOWN = 60  # characters of a wrong value
OTHERS = "**"  # whether a function takes settings that it doesn't name

Sources = Sequence[str | Path] | str | Path  # files, folders, patterns and names of texts: one or several


def names_of(sources: Sources) -> list[str]:
    """The names of sources, however many there are."""
    return [str(each) for each in ([sources] if isinstance(sources, str | Path) else sources)]


def checked(function: T) -> T:
    """A function, or a class with its public methods, that refuses arguments of other types than it names."""
    if inspect.isclass(function):
        for name, method in vars(function).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(function, name, checked(method))
        return function
    signature = inspect.signature(function)

    @cache  # names in quotes may stand further down in the file
    def hints() -> dict[str, Any]:
        found: dict[str, Any] = {}
        written = {name: each.annotation for name, each in signature.parameters.items() if name != "self"}
        names = get_type_hints(SimpleNamespace(__annotations__=written), inspect.unwrap(function).__globals__)
        for name, hint in names.items():
            options = [each.__annotations__ for each in get_args(hint) if hasattr(each, "__total__")]
            found |= options[0] if options else {name: hint}  # **options: Unpack[…]
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD and not options:
                found[OTHERS] = Any
        return {"self": Any, **found}

    @wraps(function)
    def with_checks(*args: Any, **given: Any) -> Any:
        for name, value in {**dict(zip(signature.parameters, args, strict=False)), **given}.items():
            known = hints()
            if name not in known and OTHERS not in known:
                raise ConfigError(f"{name}: no such argument; {suggestion(name, known)}")
            hint = known.get(name, Any)
            if not _fits(value, hint):
                shown, words = repr(value), re.sub(r"\b\w+\.", "", inspect.formatannotation(hint))
                if isinstance(value, str) and _fits([value], hint):
                    words += f", such as [{shown[:SHOWN]}]"
                raise ConfigError(f"{name} = {shown[:SHOWN]}{'…' * (len(shown) > SHOWN)}: expected {words}")
        return function(*args, **given)

    return with_checks  # type: ignore[return-value]


def _fits(value: Any, hint: Any) -> bool:
    kind, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind in (Union, UnionType):
        return any(_fits(value, each) for each in inside)
    if kind is Literal:
        return value in inside
    if kind in (Sequence, Iterable):  # an array of texts is one as well, a text is none
        several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        return several and (not isinstance(value, list | tuple) or all(_fits(each, inside[0]) for each in value))
    return isinstance(value, {None: NoneType, int: Integral, float: Real}.get(hint, kind or hint))
