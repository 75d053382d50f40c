"""`weft chat`: talk to a trained model."""

import sys
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from weft.cli.console import generation, options
from weft.cli.console.distributed import distributed_command, load_sharded, refuse_sharded
from weft.cli.console.generation import DEFAULT_MAX_TOKENS, Settings, TextRemarks, generation_options
from weft.cli.console.options import flag, option
from weft.cli.console.terminal import echo, loading, terminal_width, wrap_words, write
from weft.decode.config import CHAT_DEFAULTS
from weft.errors import DataError, WeftError, suggestion

if TYPE_CHECKING:
    from weft.api.run import Run
    from weft.decode.config import Sampling

HELP = """/reset          forget the conversation
/system TEXT    set the system prompt; without a text, remove it
/help           show this list
/quit           leave, as exit and Ctrl-D do; Ctrl-C stops a reply"""
LEAVE = ("/quit", "/exit", "/bye", "exit", "quit")  # on a terminal; in a pipe, the bare words are for the model
Messages = list[dict[str, str]]


@distributed_command
@generation_options(
    "temperature top_p max_tokens slide seed stop",
    defaults={name: str(default) for name, default in CHAT_DEFAULTS.items()}
    | {"max_tokens": str(DEFAULT_MAX_TOKENS), "seed": "0"},
    panels={},
)
def chat(
    run: options.Run,
    settings: Settings,
    greedy: bool = flag("--greedy", "Always take the likeliest token."),
    system: str | None = option(None, "The system prompt."),
    special_tokens: options.SpecialTokens = False,
    quantize: options.Quantize = None,
) -> None:
    """Talk to a model, line by line; in a pipe, each line gets a reply.

    The tokenizer's chat template formats the turns; without one, the model continues the text so far. An imported
    checkpoint uses the settings of its generation_config.json unless an option overrides them.

    $ weft chat runs/talk --temperature 0.5
    """
    with loading():
        from weft.api.settings import sampling, with_defaults
        from weft.parallel.ranks import join

    settings = generation.with_greedy(settings, greedy)
    refuse_sharded(join(), {"--quantize": quantize})
    sampling(**settings)  # refuse invalid settings before anything is loaded
    loaded = load_sharded(run, special_tokens=special_tokens, quantize=quantize)
    loaded.objective.check_continues("continue a text")
    chosen = sampling(**with_defaults(settings, {"max_tokens": DEFAULT_MAX_TOKENS, **loaded.chat_defaults}))
    generation.log_checkpoint_defaults(loaded, chosen, settings)
    messages = [] if system is None else [{"role": "system", "content": system}]
    logged = False  # that a reply was too long for the window
    terminal = join().share(sys.stdin.isatty)
    if terminal:
        templated = loaded.tokenizer.chat_template is not None
        kind = "with its chat template" if templated else "not trained to chat, continues the text so far"
        echo(f"{loaded.path}, {kind}; /help lists the commands, /quit leaves", err=True)
    lines = _lines(terminal)
    # rank 0 reads, and shares the line with the other ranks
    while (line := join().share(lambda: next(lines, None))) is not None:
        if terminal and line.strip().lower() in LEAVE:
            return
        if line.startswith("/"):
            if not _run_command(line, messages):
                return
            continue
        try:
            replies = sum(message["role"] == "assistant" for message in messages)
            turn = chosen.replace(seed=(chosen.seed + replies) % 2**63)
            remarks = TextRemarks(loaded, turn)
            _reply(loaded, messages, line, settings=turn, remarks=remarks)
            if (remarks.full or remarks.slid) and not logged:
                logged = True
                remarks.log()
        except WeftError as error:
            if not terminal:
                raise
            echo(f"weft: {error}", err=True)


def _lines(terminal: bool) -> Iterator[str]:
    """Yield the user's lines, without blank ones."""
    from weft.parallel.ranks import join

    if terminal:
        import readline  # noqa: F401 — gives input() arrow keys and history
    for number in count(1):
        try:
            if terminal:
                line = input("> ")
            elif read := sys.stdin.buffer.readline():
                line = read.decode().removesuffix("\n").removesuffix("\r")
                line = line.removeprefix("\ufeff") if number == 1 else line  # a byte order mark
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


def _run_command(line: str, messages: Messages) -> bool:
    """Run one of the commands in HELP on the conversation; return whether to continue."""
    word, _, text = line.partition(" ")
    match word:
        case "/quit":
            return False
        case "/help":
            echo(HELP, err=True)
        case "/reset":
            messages[:] = [message for message in messages if message["role"] == "system"]
        case "/system":
            prompt = [{"role": "system", "content": text.strip()}] if text.strip() else []
            messages[:] = prompt + [message for message in messages if message["role"] != "system"]
        case _:
            echo(f"{word}: no such command; {suggestion(word, ['/help', '/reset', '/system', '/quit'])}", err=True)
    return True


def _reply(run: "Run", messages: Messages, line: str, *, settings: "Sampling", remarks: "TextRemarks") -> None:
    """Print a reply while it is written. Ctrl-C stops it, and the part so far stays in the conversation."""
    from weft.parallel.ranks import join

    question = {"role": "user", "content": line}
    reply: list[str] = []

    def stream() -> Iterator[str]:
        for text in remarks.counted(run.reply([*messages, question], settings)):
            reply.append(text)
            yield text

    try:
        for text in stream() if (width := terminal_width()) is None else wrap_words(stream(), width):
            write(text)
    except KeyboardInterrupt:
        if not join().alone:  # torchrun gets the signal too, and ends all processes
            raise
        echo(" …", nl=False)
    messages += [question, {"role": "assistant", "content": "".join(reply)}]
    write("\n")
