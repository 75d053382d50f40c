"""The `weft` command: its subcommands, exit codes and error messages.

Each subcommand is in its own file and imports torch only when it is called, so that the help is fast.
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
from weft.cli import config, exercise
from weft.cli.console.help import TABLE, Command, CommandGroup, extra_words, unknown_option
from weft.cli.console.options import flag
from weft.errors import WeftError, out_of_memory, suggestion

HELP = "From a text file to a language model: train it, evaluate it, generate text with it."
MAX_MESSAGE_CHARACTERS = 4000  # a message may quote a name of any length from a file
RESUMABLE = ("prepare", "compare", "scale")  # commands that continue what was interrupted

app = typer.Typer(
    name="weft",
    help=HELP,
    epilog="Begin with: weft quickstart\n\nExit codes: 0 success; 2 a mistake, named in one line on standard error; "
    "130 interrupted by Ctrl-C; 128 plus the number of the signal that ended it, such as 143; 1 a bug in weft.",
    invoke_without_command=True,
    cls=CommandGroup,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# each subcommand is a function in a file of the same name
COMMANDS = {
    "Begin": "quickstart docs lecture doctor",
    "Train a model": "train evaluate compare scale import_ export runs",
    "Use a model": "generate chat translate classify embed serve",
    "Inspect and prepare": "explore explain presets plan neighbours tokenize prepare",
}
for panel, names in COMMANDS.items():
    for name in names.split():
        settings = {"allow_extra_args": name == "evaluate"}  # the shell expands `--data *.txt` to several words
        command = getattr(import_module(f"weft.cli.{name}"), name)
        app.command(name.rstrip("_"), cls=Command, rich_help_panel=panel, context_settings=settings)(command)
app.add_typer(config.app, name="config", rich_help_panel="Inspect and prepare")
app.add_typer(exercise.app, name="exercise", rich_help_panel="Teach")


@app.callback(help=HELP)
def _options(context: typer.Context, version: bool = flag("--version", "Show the version and exit.")) -> None:
    if version:
        typer.echo(f"weft {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


program = typer.main.get_command(app)

# the base of the command parser's errors, which typer re-exports
_UsageError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def limit_spinning() -> None:
    """Let idle OpenMP threads sleep after spinning for half a millisecond; set before torch is loaded.

    GNU's OpenMP spins 300,000 times by default. On x86 this takes 17 ms. If another program uses a core, the spinning
    threads take this time from the very thread that they wait for.
    """
    if platform.machine() == "x86_64" and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def main() -> None:
    """Run the command in sys.argv and exit: 0 success, 2 a mistake of the user, 130 interrupted."""
    # standard input or output may be closed
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 — open until the process ends
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for number in SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _exit_on_signal)
    if "RANK" in os.environ:  # torch's pages of warnings would bury the line that names the lost process
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    limit_spinning()
    try:
        code = run(sys.argv[1:])
    finally:
        _ignore_signals()  # the process is ending; cleaning up must not be interrupted
    sys.exit(code)


def _exit_on_signal(number: int, frame: object) -> None:
    """Exit as after Ctrl-C: unfinished files are removed, and a second signal doesn't interrupt that."""
    ranks = sys.modules.get("weft.parallel.ranks")
    if ranks is not None and ranks.ending():
        return  # torchrun has lost a process too, and this one is about to report which
    _ignore_signals()
    sys.exit(128 + number)


def _ignore_signals() -> None:
    for number in SIGNALS:
        if signal.getsignal(number) == _exit_on_signal:
            signal.signal(number, signal.SIG_IGN)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code. A mistake in the input is one line on stderr, without a traceback.

    WEFT_DEBUG=1 shows the traceback as well.
    """
    from weft.storage.files import is_text

    for number, word in enumerate(arguments, start=1):
        if not is_text(word):
            print(f"weft: argument {number}, {word!a}: not valid UTF-8", file=sys.stderr)
            return 2
    try:
        code = program.main(arguments, prog_name="weft", standalone_mode=False, obj=arguments)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:
        return _discard_output()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # the command parser turns it into an exit
            return _discard_output()
        raise
    except Exception as error:
        line = _message(error, arguments)
        if line is None or os.environ.get("WEFT_DEBUG"):
            raise
        if line:
            from weft.progress import log_to_stderr

            log_to_stderr(f"weft: {line}")
        return 2
    if code == 130 and os.environ.get("RANK", "0") == "0":
        resumable = "; the same command resumes" if _command(arguments) in RESUMABLE else ""
        print(f"weft: interrupted{resumable}", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _discard_output() -> int:
    """Discard all further output: its reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _message(error: Exception, arguments: Sequence[str] = ()) -> str | None:
    """Return the one-line message for an error, or None if it is a bug in weft."""
    if isinstance(error, WeftError):
        text = str(error)
    elif isinstance(error, _UsageError):
        text = unknown_option(error, arguments) or extra_words(error) or _usage(error, arguments)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif out_of_memory(error):
        advice = TABLE["memory"].get(_command(arguments), "try a smaller model, or fewer and shorter texts")
        text = f"out of memory; {advice}"
    else:
        return None
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE_CHARACTERS else f"{line[:MAX_MESSAGE_CHARACTERS]} …"


def _command(arguments: Sequence[str]) -> str:
    return next((word for word in arguments if not word.startswith("-")), "")


def _usage(error: Any, arguments: Sequence[str]) -> str:
    """Return the command parser's message in plain words, with the command whose help to read."""
    text: str = error.format_message()
    if not text:  # `weft config` alone has printed its help
        return ""
    for pattern, replacement in TABLE["parser"].items():
        text = re.sub(pattern, replacement, text)
    if choice := re.search(r"'([^']*)' is not one of (.*)", text):
        known = re.findall(r"'([^']*)'", choice[2])
        text = f"{text[: choice.start()]}'{choice[1]}'; {suggestion(choice[1], known, limit=len(known))}"
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else f"weft {_command(arguments)}".strip()
    return f"{text[0].lower()}{text[1:].rstrip('.')} (see {command} --help)"
