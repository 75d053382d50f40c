"""How commands explain themselves: help that is quick to read, and advice where a word means nothing here."""

import inspect
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption

from weft.errors import ConfigError
from weft.recipe.synonyms import SYNONYMS

TABLE: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
# what people type who know other programs, and what it is called here, {} standing for the words that follow
COMMANDS = {name: ours for ours, names in TABLE["commands"].items() for name in names.split()}
OPTIONS = {name: ours for ours, names in TABLE["options"].items() for name in names.split()}
VALUES = {"int": "N", "float": "X", "str": "TEXT", "list[str]": "TEXT", "Path": "PATH", "path": "PATH"}


class Command(TyperCommand):
    """A command whose help leaves out what only its parser needs."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # paragraphs are lines, so that the terminal wraps them
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)

    def get_params(self, ctx: Any) -> list[Any]:
        return [_plain(param) for param in super().get_params(ctx)]


class Group(TyperGroup):
    """A command with commands in it."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_plain(param) for param in super().get_params(ctx)]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word, rest = args[0], " ".join(shlex.quote(each) for each in args[1:])
        if ctx.parent is None and word in COMMANDS and word not in self.commands:
            raise ConfigError(f"no such command '{word}'; write `weft {COMMANDS[word].format(rest).strip()}`")
        return super().resolve_command(ctx, args)


def _plain(param: Any) -> Any:
    """A parameter that shows no value where it takes none, and the kind of value in a word where it does."""
    if isinstance(param, TyperOption):
        if param.metavar is None and param.is_flag:
            param.metavar = ""
        elif param.metavar is None and hasattr(param, "bare_type"):
            param.metavar = VALUES.get(param.bare_type())
    else:
        param.display_type_rich = lambda ctx: None  # the argument's own name says it
        param.show_default = param.show_default and param.default != "-"  # the help says that it is standard input
        if param.required:  # braces would mean a choice
            param.get_usage_pieces = lambda ctx: [f"{param.metavar}{'...' if param.nargs != 1 else ''}"]
    if hasattr(param, "min"):
        param.min = param.max = None  # for the help alone; a value out of range is refused with the range
    return param


def extra_words(error: Any) -> str | None:
    """What to write instead of words that a command doesn't take, where an option takes them."""
    said = re.search(r"unexpected extra argument(?:s|\(s\))? \((.*)\)", getattr(error, "message", ""))
    if said is None or error.ctx is None:
        return None
    options = {option for param in error.ctx.command.params for option in param.opts}
    if "--prompt" not in options:
        return None
    return f"unexpected argument: {said[1]}; the text to continue is given so: --prompt {shlex.quote(said[1])}"


def unknown_option(error: Any, arguments: Sequence[str]) -> str | None:
    """What to write instead of an option that a command doesn't have, or None if nothing comes to mind."""
    if type(error).__name__ != "NoSuchOption" or error.ctx is None:
        return None
    name: str = error.option_name
    params = error.ctx.command.get_params(error.ctx)
    options = {option for param in params for option in param.opts if option.startswith("--")}
    for other in (name.replace("_", "-"), OPTIONS.get(name.replace("_", "-"), "")):
        if other in options:
            return f"no such option: {name}; it is {other} here"
    words = [param.metavar or "" for param in params if not param.opts[0].startswith("-")]
    for word in (name, OPTIONS.get(name, "")):
        if word.lstrip("-").upper() in words:
            return f"no such option: {name}; write it without one: {error.ctx.command_path} {' '.join(words)}"
    if any(param.metavar == "KEY=VALUE" for param in params):
        word = name.lstrip("-").replace("-", "_")
        if key := recipe_key(word):
            return f"no such option: {name}; a recipe's settings are written key=value: {key}={_value(name, arguments)}"
        if word in SYNONYMS:  # for which there is no setting, but something else
            return f"no such option: {name}; {SYNONYMS[word].removeprefix(': ')}"
    return None


def recipe_key(name: str) -> str | None:
    """The dotted key of the setting that a word means, here or in other programs."""
    from weft.config import keys_of
    from weft.recipe.config import Recipe

    known = list(keys_of(Recipe, {"model": {"kind": "decoder"}}))
    if name in known:
        return name
    if name in SYNONYMS:
        return SYNONYMS[name].partition(":")[0]
    return next((key for key in known if name in (key.replace(".", "_"), key.rpartition(".")[2])), None)


def _value(name: str, arguments: Sequence[str]) -> str:
    for at, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if option == name:
            following = arguments[at + 1] if at + 1 < len(arguments) else ""
            return value if equals else "true" if not following or following.startswith("--") else following
    return "VALUE"
