"""The `weft` command: its commands, and what a person reads when one fails.

Each command stands in a file of its own, which imports what it needs when it is called: the help answers at once.
"""

import os
import platform
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer

from weft import __version__
from weft.cli import config
from weft.cli.console.help import TABLE, Command, Group, extra_words, unknown_option
from weft.cli.console.options import flag
from weft.errors import WeftError, out_of_memory, suggestion

app = typer.Typer(
    name="weft",
    help="From a text file to a language model: train it, measure it, let it write.",
    epilog="Begin with: weft quickstart\n\nExit codes: 0 done; 2 a mistake, which one line on standard error names; "
    "130 interrupted by Ctrl-C; 128 and the signal's number, such as 143, when ended by one; 1 a fault of weft itself.",
    invoke_without_command=True,
    cls=Group,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# each is a function in a file of the same name
COMMANDS = {
    "Begin": "quickstart docs doctor",
    "Train a model": "train evaluate compare scale import_ export runs",
    "Use a model": "generate chat translate classify embed serve",
    "Look and prepare": "explore explain presets plan neighbours tokenize prepare",
}
for panel, names in COMMANDS.items():
    for name in names.split():
        more = {"allow_extra_args": name == "evaluate"}  # `--data *.txt` leaves words that no option takes
        command = getattr(import_module(f"weft.cli.{name}"), name)
        app.command(name.rstrip("_"), cls=Command, rich_help_panel=panel, context_settings=more)(command)
app.add_typer(config.app, name="config", rich_help_panel="Look and prepare")


@app.callback()
def _options(context: typer.Context, version: bool = flag("--version", "Show the version and exit.")) -> None:
    """From a text file to a language model: train it, measure it, let it write."""
    if version:
        typer.echo(f"weft {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


program = typer.main.get_command(app)

# typer re-exports the errors of the command parser it stands on; this is their root
_UsageError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def share_processors() -> None:
    """Have threads of torch sleep that have waited for another one for half a millisecond.

    GNU's OpenMP looks 300,000 times before that. On an x86 that takes 17 ms, and if another program has taken a
    processor, it is the thread waited for that can't run. It is told before torch is loaded.
    """
    if platform.machine() == "x86_64" and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def main() -> None:
    """Run the command in sys.argv and exit: 0 done, 2 a mistake that a person can fix, 130 interrupted."""
    # standard input or output may be closed: then there is nothing to read, and nobody wants the output
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 — as long as the process lives
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for number in ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, _leave)
    if "RANK" in os.environ:  # torch's own pages of warnings would bury the line that says which process is gone
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    share_processors()
    try:
        code = run(sys.argv[1:])
    finally:
        _ignore_signals()  # it ends already: what is put in order last must not be interrupted
    sys.exit(code)


def _leave(number: int, frame: object) -> None:
    """End as after Ctrl-C: what is being built is cleared away, and a second signal doesn't interrupt that."""
    ranks = sys.modules.get("weft.parallel.ranks")
    if ranks is not None and ranks.ending():
        return  # torchrun has lost a process too, and this one is about to say which
    _ignore_signals()
    sys.exit(128 + number)


def _ignore_signals() -> None:
    for each in ENDING:
        if signal.getsignal(each) == _leave:
            signal.signal(each, signal.SIG_IGN)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code. A mistake in the input gives one line on stderr, never a traceback.

    WEFT_DEBUG=1 shows the traceback all the same.
    """
    from weft.storage.files import is_text

    for number, word in enumerate(arguments, start=1):
        if not is_text(word):
            print(f"weft: argument {number}, {word!a}: not valid UTF-8", file=sys.stderr)
            return 2
    try:
        code = program.main(arguments, prog_name="weft", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:
        return _unread()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # the command parser has made an exit of it
            return _unread()
        raise
    except Exception as error:
        line = _one_line(error, arguments)
        if line is None or os.environ.get("WEFT_DEBUG"):
            raise
        if line:
            from weft.progress import log_to_stderr

            log_to_stderr(f"weft: {line}")
        return 2
    if code == 130 and os.environ.get("RANK", "0") == "0":  # of several processes the first one says so
        print("weft: interrupted" + GOES_ON * (_command(arguments) in CONTINUED), file=sys.stderr)
    return code if isinstance(code, int) else 0


def _unread() -> int:
    """The reader of our output has left, so nothing more is written, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _one_line(error: Exception, arguments: Sequence[str] = ()) -> str | None:
    """What a person should read about an error of a command, or None if it is a bug of ours."""
    if isinstance(error, WeftError):
        text = str(error)
    elif isinstance(error, _UsageError):
        text = unknown_option(error, arguments) or extra_words(error) or _usage(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif out_of_memory(error):
        less = TABLE["needs-less"].get(_command(arguments), "a smaller model, or fewer and shorter texts, need less")
        text = f"out of memory; {less}"
    else:
        return None
    line = " ".join(text.split())
    return line if len(line) <= MAX_LINE_CHARACTERS else f"{line[:MAX_LINE_CHARACTERS]} …"


def _command(arguments: Sequence[str]) -> str:
    return next((word for word in arguments if not word.startswith("-")), "")


def _usage(error: Any) -> str:
    """What the command parser says, and the command whose help says more. `weft config` alone has shown its help."""
    text: str = error.format_message()
    if not text:
        return ""
    for said, better in TABLE["parser"].items():
        text = re.sub(said, better, text)
    if choice := re.search(r"'([^']*)' is not one of (.*)", text):
        known = re.findall(r"'([^']*)'", choice[2])
        text = f"{text[: choice.start()]}'{choice[1]}'; {suggestion(choice[1], known, limit=len(known))}"
    where = error.ctx.command_path if getattr(error, "ctx", None) is not None else "weft"
    return f"{text[0].lower()}{text[1:].rstrip('.')} (see {where} --help)"


MAX_LINE_CHARACTERS = 4000  # of a message, into which a file may have put a name without end
CONTINUED = ("prepare", "compare", "scale")
GOES_ON = "; the same command continues"
