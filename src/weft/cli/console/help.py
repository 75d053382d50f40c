"""Help of the commands, and suggestions for words of other programs."""

import inspect
import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption

from weft.errors import ConfigError, quoted
from weft.recipe.synonyms import SYNONYMS

TABLE: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
# another program's word → weft's; {} stands for the words that follow
COMMANDS = {name: command for command, names in TABLE["commands"].items() for name in names.split()}
OPTIONS: dict[str, list[str]] = defaultdict(list)
for _option, _names in TABLE["options"].items():
    for _name in _names.split():
        OPTIONS[_name].append(_option)
VALUES = {"int": "N", "float": "X", "str": "TEXT", "list[str]": "TEXT", "Path": "PATH", "path": "PATH"}


class Command(TyperCommand):
    """A command with concise help."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # one line per paragraph, so that the terminal wraps them
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)

    def get_params(self, ctx: Any) -> list[Any]:
        return [_concise(param) for param in super().get_params(ctx)]


class CommandGroup(TyperGroup):
    """A command with subcommands, which suggests them for words of other programs."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_concise(param) for param in super().get_params(ctx)]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word, following = args[0], shlex.join(args[1:])
        if ctx.parent is None and word in COMMANDS and word not in self.commands:
            raise ConfigError(f"no such command '{word}'; write `weft {COMMANDS[word].format(following).strip()}`")
        return super().resolve_command(ctx, args)


def _concise(param: Any) -> Any:
    """Make a parameter show its kind of value in one word, and none for a flag."""
    if isinstance(param, TyperOption):
        if param.metavar is None and param.is_flag:
            param.metavar = ""
        elif param.metavar is None and hasattr(param, "bare_type"):
            param.metavar = VALUES.get(param.bare_type())
    else:
        param.display_type_rich = lambda ctx: None  # the name is enough
        param.show_default = param.show_default and param.default != "-"  # standard input, as the help says
        if param.required:  # braces would mean a choice
            param.get_usage_pieces = lambda ctx: [f"{param.metavar}{'...' if param.nargs != 1 else ''}"]
    if hasattr(param, "min"):
        param.min = param.max = None  # only in the help; a value out of range is still refused
    return param


def extra_words(error: Any) -> str | None:
    """Return a message for unexpected words of a command that takes a --prompt, or reads turns line by line."""
    match = re.search(r"unexpected extra argument(?:s|\(s\))? \((.*)\)", getattr(error, "message", ""))
    if match is None or error.ctx is None:
        return None
    options = {option for param in error.ctx.command.params for option in param.opts}
    if error.ctx.command.name == "chat":
        return f"unexpected argument: {match[1]}; turns are read line by line: echo {quoted(match[1])} | weft chat RUN"
    if "--prompt" not in options:
        return None
    return f"unexpected argument: {match[1]}; give the text to continue as --prompt {quoted(match[1])}"


def unknown_option(error: Any, arguments: Sequence[str]) -> str | None:
    """Return a message for an unknown option with what to write instead; None for other errors."""
    if type(error).__name__ != "NoSuchOption" or error.ctx is None:
        return None
    name: str = error.option_name
    params = error.ctx.command.get_params(error.ctx)
    options = {option for param in params for option in param.opts if option.startswith("--")}
    for known in (name.replace("_", "-"), *OPTIONS.get(name.replace("_", "-"), ())):
        if known in options:
            return f"no such option: {name}; use {known}"
    words = [param.metavar or "" for param in params if not param.opts[0].startswith("-")]
    for word in (name, *OPTIONS.get(name, ())):
        if any(word.lstrip("-").upper() in metavar.split("|") for metavar in words):
            return f"no such option: {name}; it is an argument: {error.ctx.command_path} {' '.join(words)}"
    if any(param.metavar == "KEY=VALUE" for param in params):
        word = name.lstrip("-").replace("-", "_")
        note = SYNONYMS.get(word, "").partition(": ")[2]
        if (key := recipe_key(word)) and note:  # the value given there means something else here
            return f"no such option: {name}; settings of a recipe are written key=value: {key}=VALUE; {note}"
        if key:
            value = _value(name, arguments)
            return f"no such option: {name}; settings of a recipe are written key=value: {key}={value}"
        if word in SYNONYMS:  # not a setting here
            return f"no such option: {name}; {SYNONYMS[word].removeprefix(': ')}"
    near = get_close_matches(name.lstrip("-"), [option[2:] for option in options], cutoff=0.7)
    meant = f"; did you mean {', '.join(f'--{each}' for each in near)}?" if near else ""
    return f"no such option: {name}{meant} (see {error.ctx.command_path} --help)"


def recipe_key(name: str) -> str | None:
    """Return the dotted key of the setting that a word names, in weft or in another program."""
    from weft.config import keys_of
    from weft.recipe.config import Recipe

    known = list(keys_of(Recipe, {"model": {"kind": "decoder"}}))
    if name in known:
        return name
    if name in SYNONYMS:
        return SYNONYMS[name].partition(":")[0]
    ends = (key for key in known if name in (key.replace(".", "_"), key.rpartition(".")[2]))
    return next(ends, name if f"{name}.kind" in known else None)


def _value(name: str, arguments: Sequence[str]) -> str:
    """Return the value that was given to an option."""
    for index, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if option == name:
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
            return value if equals else "true" if not following or following.startswith("--") else following
    return "VALUE"
