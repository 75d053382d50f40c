"""What commands that write texts have in common: the runs they take, and what they say beside the text."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weft.cli.console.terminal import echo

if TYPE_CHECKING:
    from weft.api.run import Run
    from weft.decode.config import Beam, Sampling
    from weft.decode.constrain import Grammar


def say_defaults(run: "Run", settings: "Sampling | Beam", given: Mapping[str, Any]) -> None:
    """Say on stderr which settings are the checkpoint's own."""
    tokens = ("stop_ids", "forced", "banned", "last")  # which say nothing to a person
    shown = [key for key in run.defaults if key not in tokens and given.get(key) is None]
    taken = [f"{key} {run.defaults[key]:g}" for key in shown if getattr(settings, key, None) == run.defaults[key]]
    if taken:
        echo(f"weft: writing with {', '.join(taken)}, from the checkpoint's generation_config.json", err=True)


class Remarks:
    """Texts that were too long for the model's window, or that end before they match the pattern."""

    def __init__(self, run: "Run", settings: "Sampling | Beam", pattern: "Grammar | None" = None):
        from weft.decode.prompt import context_window

        self.window, self.most, self.pattern = context_window(run.model), settings.max_tokens, pattern
        self.seen = self.full = self.slid = self.unmatched = 0

    def look(self, text: str, tokens: int, finish: str | None, slid: bool) -> None:
        """Count a text that has ended."""
        self.seen += 1
        self.slid += slid
        self.full += finish == "length" and tokens < self.most
        self.unmatched += self.pattern is not None and not self.pattern.matches(text)

    def report(self) -> None:
        """Write to stderr what became of them, if anything did."""
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
    from weft.errors import ConfigError

    objective, usage = run.config.objective, run.objective.usage.format(run=run.path)
    if not objective.continues:
        raise ConfigError(f"{run.path}: this run is {objective.makes}; it can't continue a text; use it with {usage}")
