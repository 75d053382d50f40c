"""Options and messages of the commands that generate text. The options are made from `weft.decode.config`."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, get_origin

from weft.cli.console.options import option
from weft.cli.console.terminal import echo
from weft.decode.config import Parameter, parameters
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.api.run import Run
    from weft.decode.config import Beam, Sampling
    from weft.decode.constrain import Grammar
    from weft.decode.text import Chunk

DEFAULT_MAX_TOKENS = 200
PANELS = {"sampling": "Sampling", "beam": "Beam search", "rules": "Constraints"}
MAX_BOUND = 10**9  # larger bounds are not worth mentioning
TOKEN_SETTINGS = ("stop_ids", "forced", "banned", "last")  # settings by token id, which mean little to a reader
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
Settings = dict[str, Any]  # settings of generation by name, without those that the user left out


def generation_options(
    names: str, *, defaults: Mapping[str, str] | None = None, panels: Mapping[str, str] = PANELS
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `settings` by one option for each of the named settings of generation.

    The command receives them by name, without those that the user left out. `defaults` are those of the command, in
    words; `panels` are the headings of the help by group.
    """
    described = {parameter.name: parameter for parameter in parameters()}
    chosen = [described[name] for name in names.split()]
    texts = defaults or {}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_settings(**arguments: Any) -> None:
            values = {parameter.name: arguments.pop(parameter.name) for parameter in chosen}
            settings = {name: value for name, value in values.items() if value is not None and value != []}
            command(**arguments, settings=settings)

        signature = inspect.signature(command)
        declared: list[inspect.Parameter] = []
        for each in signature.parameters.values():
            if each.name == "settings":
                declared += [_declared(parameter, texts.get(parameter.name), panels) for parameter in chosen]
            else:
                declared.append(each)
        vars(with_settings)["__signature__"] = signature.replace(parameters=declared)
        return with_settings

    return decorate


def _declared(parameter: Parameter, default: str | None, panels: Mapping[str, str]) -> inspect.Parameter:
    assert parameter.option is not None
    kind: Any = float if parameter.name == "length_penalty" else parameter.type
    if get_origin(kind) is tuple:
        kind = list[str]
    repeated = " May be repeated." if kind == list[str] else ""
    default = default or _shown_default(parameter)
    notes = "; ".join(filter(None, (_bounds(parameter), default and f"default: {default}")))
    help = f"{parameter.description}{repeated}" + (f" ({notes})" if notes else "")
    declaration = option(None, help, parameter.option, rich_help_panel=panels.get(parameter.group))
    return inspect.Parameter(
        parameter.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=declaration, annotation=kind | None
    )


def _bounds(parameter: Parameter) -> str:
    """Return a number's bounds in words, unless they are only those of any count."""
    bounds = parameter.bounds
    if not bounds or max(bounds.values()) >= MAX_BOUND:
        return ""
    return ", ".join(f"{SIGNS[key]}\N{NO-BREAK SPACE}{value:g}" for key, value in bounds.items())


def _shown_default(parameter: Parameter) -> str:
    if parameter.name == "length_penalty":
        return f"{parameter.default.alpha:g}"
    if isinstance(parameter.default, bool):
        return str(parameter.option).partition("/")[0]
    return f"{parameter.default:g}" if isinstance(parameter.default, int | float) and parameter.default else ""


def with_greedy(settings: Settings, greedy: bool) -> Settings:
    """Return the settings with `--greedy` as temperature 0."""
    if not greedy:
        return settings
    for name in ("temperature", "seed"):
        if name in settings:
            raise ConfigError(f"--greedy and --{name} exclude each other: greedy decoding draws nothing")
    return {**settings, "temperature": 0.0}


def log_checkpoint_defaults(run: "Run", settings: "Sampling | Beam", options: Mapping[str, Any]) -> None:
    """Log which settings come from the checkpoint's generation_config.json, not from the user's options."""
    used = [
        f"{key} {', '.join(map(repr, value)) if key == 'stop' else f'{value:g}'}"
        for key, value in run.defaults.items()
        if key not in (*TOKEN_SETTINGS, *options) and getattr(settings, key, None) == value
    ]
    if used:
        echo(f"weft: using {', '.join(used)}, from the checkpoint's generation_config.json", err=True)


class TextRemarks:
    """Counts texts that reached the model's window, or ended before they matched a pattern."""

    def __init__(self, run: "Run", settings: "Sampling | Beam", pattern: "Grammar | None" = None):
        from weft.decode.prompt import context_window

        self.window, self.max_tokens, self.pattern = context_window(run.model), settings.max_tokens, pattern
        self.texts = self.full = self.slid = self.unmatched = 0

    def count(self, text: str, tokens: int, finish: str | None, *, slid: bool) -> None:
        """Count a finished text."""
        self.texts += 1
        self.slid += slid
        self.full += finish == "length" and tokens < self.max_tokens
        self.unmatched += self.pattern is not None and not self.pattern.matches(text)

    def counted(self, chunks: "Iterable[Chunk]") -> Iterator[str]:
        """Yield the texts of chunks, and count the text when it is finished."""
        text = ""
        for chunk in chunks:
            text += chunk.text
            yield chunk.text
            if chunk.finish is not None:
                self.count(text, chunk.tokens, chunk.finish, slid=chunk.slid)

    def log(self) -> None:
        """Log the counts, if there are any."""
        if self.slid:
            subject = "the text is" if self.texts == 1 else f"{self.slid} of {self.texts} texts are"
            line = f"longer than the model's window of {self.window} tokens and continued from the last of them"
            echo(f"weft: {subject} {line}; --no-slide stops there", err=True)
        if self.full:
            subject = "" if self.texts == 1 else f"{self.full} of {self.texts} texts "
            echo(f"weft: {subject}stopped at the model's {self.window} positions, before --max-tokens", err=True)
        if self.unmatched:
            subject = "the text ends" if self.texts == 1 else f"{self.unmatched} of {self.texts} texts end"
            echo(f"weft: {subject} before matching the pattern; a larger --max-tokens may help", err=True)
