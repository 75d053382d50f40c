"""`weft chat`: talk to a trained model."""

import sys
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

import typer

from weft.cli.console import options
from weft.cli.console.distributed import load_together, refuse_together, together
from weft.cli.console.options import flag, option
from weft.cli.console.terminal import broken_between_words, echo, loading, terminal_width, write
from weft.cli.console.writing import DEFAULT_MAX_TOKENS, Remarks, check_writes, given_settings, log_defaults
from weft.errors import DataError, WeftError, suggestion

if TYPE_CHECKING:
    from weft.api.run import Run
    from weft.decode.config import Sampling

HELP = """/reset          forget what was said
/system TEXT    set the system prompt; without a text, remove it
/help           this list
/quit           leave, as exit and Ctrl-D do; Ctrl-C stops a reply"""
LEAVE = ("/quit", "/exit", "/bye", "exit", "quit")  # on a terminal; in a pipe the bare words are said to the model


@together
def chat(
    context: typer.Context,
    run: options.Run,
    greedy: bool = flag("--greedy", "Always take the likeliest token."),
    temperature: float | None = option(None, "Below 1: safer; above 1: bolder (default: the checkpoint's, or 0.7)."),
    top_p: float | None = option(
        None, "Draw from the fewest tokens reaching this probability (default: the checkpoint's, or 0.9)."
    ),
    max_tokens: int | None = option(None, "End a reply after this many tokens (default: 200)."),
    no_slide: bool = flag("--no-slide", "End a reply when the model's window is full instead of continuing it."),
    seed: int | None = option(None, "The same seed and the same words give the same replies (default: 0)."),
    stop: list[str] | None = option(None, "End a reply before this text; may be repeated."),
    system: str | None = option(None, "The system prompt."),
    special_tokens: options.SpecialTokens = False,
    quantize: str | None = option(None, "Use smaller weights: bf16, int8, int4 or auto.", value="BITS"),
) -> None:
    """Talk to a model, line by line; from a pipe, each line gets a reply.

    A tokenizer with a chat template frames the turns; without one the model continues the text so far. An imported
    checkpoint replies as its generation_config.json has it, where no option says otherwise.

    $ weft chat runs/talk --temperature 0.5
    """
    with loading():
        from weft.api.settings import sampling, with_defaults
        from weft.parallel.ranks import join

    given = given_settings(context, greedy)
    refuse_together(join(), {"--quantize": quantize})
    sampling(**given)  # what can't be is refused before anything is loaded
    loaded = load_together(run, quantize=quantize)
    loaded = loaded.reading_specials() if special_tokens else loaded
    check_writes(loaded)
    settings = sampling(**with_defaults(given, {"max_tokens": DEFAULT_MAX_TOKENS, **loaded.chat_defaults}))
    log_defaults(loaded, settings, given)
    messages = [] if system is None else [{"role": "system", "content": system}]
    reported = False  # that a reply was too long for the window
    terminal = join().share(sys.stdin.isatty)
    if terminal:
        templated = loaded.tokenizer.chat_template is not None
        frame = "with its chat template" if templated else "which never learned to chat and continues the text so far"
        echo(f"{loaded.path}, {frame}; /help lists the commands, /quit leaves", err=True)
    lines = _lines(terminal)
    # where several processes reply together, the first one reads, and passes on what was said
    while (line := join().share(lambda: next(lines, None))) is not None:
        if terminal and line.strip().lower() in LEAVE:
            return
        if line.startswith("/"):
            if not _command(line, messages):
                return
            continue
        try:
            replies = sum(message["role"] == "assistant" for message in messages)
            turn = settings.replace(seed=(settings.seed + replies) % 2**63)
            remarks = Remarks(loaded, turn)
            _reply(loaded, messages, line, turn, remarks)
            if (remarks.full or remarks.slid) and not reported:
                reported = True
                remarks.report()
        except WeftError as error:
            if not terminal:
                raise
            echo(f"weft: {error}", err=True)


def _lines(terminal: bool) -> Iterator[str]:
    from weft.parallel.ranks import join

    if terminal:
        import readline  # noqa: F401 — arrow keys and history, from here on
    for number in count(1):
        try:
            if terminal:
                line = input("> ")
            elif read := sys.stdin.buffer.readline():
                line = read.decode().removesuffix("\n").removesuffix("\r")
                line = line.removeprefix("\ufeff") if number == 1 else line  # some programs put one before the first
            else:
                return
        except UnicodeDecodeError as error:
            raise DataError(f"standard input, line {number}: not valid UTF-8: {error.reason}") from None
        except EOFError:
            echo("")
            return
        except KeyboardInterrupt:
            if not terminal or not join().alone:
                raise
            echo("\n/quit leaves", err=True)
            continue
        if line.strip():
            yield line


def _command(line: str, messages: list[dict[str, str]]) -> bool:
    word, _, rest = line.partition(" ")
    match word:
        case "/quit":
            return False
        case "/help":
            echo(HELP, err=True)
        case "/reset":
            messages[:] = [message for message in messages if message["role"] == "system"]
        case "/system":
            new = [{"role": "system", "content": rest.strip()}] if rest.strip() else []
            messages[:] = new + [message for message in messages if message["role"] != "system"]
        case _:
            echo(f"{word}: no such command; {suggestion(word, ['/help', '/reset', '/system', '/quit'])}", err=True)
    return True


def _reply(run: "Run", messages: list[dict[str, str]], line: str, settings: "Sampling", remarks: "Remarks") -> None:
    """Write a reply as it comes. Ctrl-C ends it where it is, and what was written stays part of the conversation."""
    from weft.parallel.ranks import join

    said = {"role": "user", "content": line}
    reply: list[str] = []

    def heard() -> Iterator[str]:
        for text in remarks.passing(run.reply([*messages, said], settings)):
            reply.append(text)
            yield text

    try:
        for text in heard() if (width := terminal_width()) is None else broken_between_words(heard(), width):
            write(text)
    except KeyboardInterrupt:
        if not join().alone:  # torchrun has heard it too, and ends all processes
            raise
        echo(" …", nl=False)
    messages += [said, {"role": "assistant", "content": "".join(reply)}]
    write("\n")
