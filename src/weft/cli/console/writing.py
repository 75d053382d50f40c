"""What commands that write texts have in common: the runs they take, and what they say beside the text."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.console.terminal import echo
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.api.run import Run
    from weft.decode.config import Beam, Sampling
    from weft.decode.constrain import Grammar
    from weft.decode.text import Chunk

DEFAULT_MAX_TOKENS = 200


def given_settings(context: typer.Context, greedy: bool) -> dict[str, Any]:
    """The options of a command that are settings of sampling, by their names there; None where they are left out."""
    from weft.decode.config import Sampling

    given = {name: value for name, value in context.params.items() if name in Sampling.model_fields}
    given["stop"] = given["stop"] or None  # an option that may be repeated, and was not given, is an empty list
    given["slide"] = False if context.params["no_slide"] else None
    if greedy and context.params.get("beam") is None:
        for name in ("temperature", "seed"):
            if given[name] is not None:
                raise ConfigError(f"--greedy and --{name} exclude each other: greedy decoding draws nothing")
        given["temperature"] = 0.0
    return given


def log_defaults(run: "Run", settings: "Sampling | Beam", given: Mapping[str, Any]) -> None:
    """Print on stderr which settings are the checkpoint's own."""
    tokens = ("stop_ids", "forced", "banned", "last")  # which mean nothing to a person
    shown = [key for key in run.defaults if key not in tokens and given.get(key) is None]
    own = {key: run.defaults[key] for key in shown if getattr(settings, key, None) == run.defaults[key]}
    taken = [f"{key} {', '.join(map(repr, value)) if key == 'stop' else f'{value:g}'}" for key, value in own.items()]
    if taken:
        echo(f"weft: writing with {', '.join(taken)}, from the checkpoint's generation_config.json", err=True)


class Remarks:
    """Texts that were too long for the model's window, or that end before they match the pattern."""

    def __init__(self, run: "Run", settings: "Sampling | Beam", pattern: "Grammar | None" = None):
        from weft.decode.prompt import context_window

        self.window, self.max_tokens, self.pattern = context_window(run.model), settings.max_tokens, pattern
        self.seen = self.full = self.slid = self.unmatched = 0

    def look(self, text: str, tokens: int, finish: str | None, slid: bool) -> None:
        self.seen += 1
        self.slid += slid
        self.full += finish == "length" and tokens < self.max_tokens
        self.unmatched += self.pattern is not None and not self.pattern.matches(text)

    def passing(self, chunks: "Iterable[Chunk]") -> Iterator[str]:
        """What the chunks of a text add to it; once it has ended it is counted."""
        text = ""
        for chunk in chunks:
            text += chunk.text
            yield chunk.text
            if chunk.finish is not None:
                self.look(text, chunk.tokens, chunk.finish, chunk.slid)

    def report(self) -> None:
        if self.slid:
            which = "the text is" if self.seen == 1 else f"{self.slid} of {self.seen} texts are"
            line = f"longer than the model's window of {self.window} tokens and continued over the last of them"
            echo(f"weft: {which} {line}; --no-slide stops there", err=True)
        if self.full:
            which = "" if self.seen == 1 else f"{self.full} of {self.seen} texts "
            echo(f"weft: {which}stopped at the model's {self.window} positions, before --max-tokens", err=True)
        if self.unmatched:
            which = "the text ends" if self.seen == 1 else f"{self.unmatched} of {self.seen} texts end"
            echo(f"weft: {which} before matching the pattern; a larger --max-tokens gives it more tokens", err=True)


def check_writes(run: "Run") -> None:
    """Refuse a run that doesn't continue texts, and say what it is for."""
    if not run.config.objective.continues:
        raise run.objective.cannot("continue a text")
