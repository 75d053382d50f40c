"""`weft chat`: talk to a trained model."""

import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.terminal import echo, write

if TYPE_CHECKING:
    from weft.api.run import Run
    from weft.cli.generate import CutShort
    from weft.decode.chat import Conversation
    from weft.decode.config import Sampling

HELP = """/reset          forget what was said
/system TEXT    words that stand before everything; without a text they are taken away
/help           this list
/quit           leave, as Ctrl-D does; Ctrl-C stops a reply"""


def chat(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Below 1 safer, above 1 bolder (default: 1).")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the fewest tokens with this probability.")] = None,
    max_tokens: Annotated[int, typer.Option(help="The longest reply.")] = 200,
    seed: Annotated[
        int | None, typer.Option(help="The same seed and the same words give the same replies (default: 0).")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End a reply before this text; may be given again.")] = None,
    system: Annotated[str | None, typer.Option(help="Words that stand before everything.")] = None,
    quantize: Annotated[str | None, typer.Option(metavar="BITS", help="Smaller weights: int8 or int4.")] = None,
) -> None:
    """Talk to a model, line by line; from a pipe, each line gets a reply.

    A tokenizer with a chat template frames the turns; without one the model goes on with the text so far.
    """
    from weft.api.run import load, sampling
    from weft.cli.generate import CutShort, check_writes
    from weft.decode.chat import Conversation
    from weft.decode.prompt import context_window
    from weft.errors import ConfigError, WeftError

    for name, value in (("temperature", temperature), ("seed", seed)):
        if greedy and value is not None:
            raise ConfigError(f"--greedy and --{name} exclude each other: greedy decoding draws nothing")
    settings = sampling(
        temperature=0.0 if greedy else temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, stop=stop
    )
    loaded = load(run, quantize=quantize)
    check_writes(loaded)
    conversation = Conversation(loaded.tokenizer, context_window(loaded.model), max_tokens, system)
    reported = False  # that a reply was cut short
    terminal = sys.stdin.isatty()
    if terminal:
        frame = "with its chat template" if conversation.templated else "going on with the text so far"
        echo(f"{loaded.path}, {frame}. /help lists what else there is.", err=True)
    for line in _lines(terminal):
        if line.startswith("/"):
            if not _command(line, conversation):
                return
            continue
        try:
            turn = settings.replace(seed=(settings.seed + len(conversation.turns)) % 2**63)
            cut = CutShort(loaded, turn)
            _reply(loaded, conversation, line, turn, cut)
            if cut.full and not reported:
                reported = True
                cut.report()
        except WeftError as error:
            if not terminal:
                raise
            echo(f"weft: {error}", err=True)


def _lines(terminal: bool) -> Iterator[str]:
    """What the person says, until they leave. Empty lines say nothing."""
    from weft.errors import DataError

    if terminal:
        import readline  # noqa: F401 — arrow keys and history, from here on
    for number in count(1):
        try:
            line = input("> ") if terminal else _piped(number)
        except UnicodeDecodeError as error:
            raise DataError(f"standard input, line {number}: not valid UTF-8: {error.reason}") from None
        except EOFError:
            if terminal:
                echo("")
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            echo("\n/quit leaves", err=True)
            continue
        if line.strip():
            yield line


def _piped(number: int) -> str:
    """A line of standard input, less its end and the byte order mark that some programs put before the first one."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    text = line.decode().removesuffix("\n").removesuffix("\r")
    return text.removeprefix("\ufeff") if number == 1 else text


def _command(line: str, conversation: "Conversation") -> bool:
    """Do what a line with a slash says; False to leave."""
    from weft.errors import suggestion

    word, _, rest = line.partition(" ")
    match word:
        case "/quit":
            return False
        case "/help":
            echo(HELP, err=True)
        case "/reset":
            conversation.reset()
        case "/system":
            conversation.system = rest.strip() or None
        case _:
            echo(f"{word}: {suggestion(word, ['/help', '/reset', '/system', '/quit'])}", err=True)
    return True


def _reply(run: "Run", conversation: "Conversation", line: str, settings: "Sampling", cut: "CutShort") -> None:
    """Write a reply as it comes. Ctrl-C ends it where it is, and what was written stays part of the conversation."""
    from weft.decode.generate import generate

    reply = ""
    try:
        for chunk in generate(run.model, [conversation.prompt(line)], settings):
            reply += chunk.text
            write(chunk.text)
            if chunk.finish is not None:
                cut.look(reply, chunk.tokens, chunk.finish)
    except KeyboardInterrupt:
        echo(" …", nl=False)
    conversation.add(line, reply)
    write("\n")
