"""Commands in a shell or a script: examples that parse, pure JSON on standard output, colours, completion."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.command import Cli, Patch, on_a_terminal

from weft.cli.console.options import complete_runs
from weft.cli.main import program, run

Capture = pytest.CaptureFixture[str]
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;\d]*m")
TEXT = "The cat sat on the mat. The dog sat on the log, and the cat looked at the dog.\n" * 60
SMALL = ["model.layers=1", "model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=32"]
SMALL += ["batch.length=16", "batch.size=4", "steps=4", "tokenizer.kind=byte"]


def commands(group: Any = program, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every command by its name, including those of groups."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*above, name))
        else:
            yield " ".join((*above, name)), command


EVERY = dict(commands())


def examples(command: Any) -> list[list[str]]:
    """Return the words of each `$ weft …` in a command's help, without redirections."""
    lines = re.findall(r"^\$ weft (.*)$", command.help, flags=re.MULTILINE)
    return [shlex.split(re.sub(r"\s[<>|].*", "", line)) for line in lines]


@pytest.mark.parametrize("name", EVERY)
def test_every_help_has_an_example_that_parses(name: str) -> None:
    found = examples(EVERY[name])
    assert found, f"weft {name} --help has no example"
    for words in found:
        assert words[: len(name.split())] == name.split()
        EVERY[name].make_context(name, words[len(name.split()) :])


# commands that print no result, or always JSON
WITHOUT_JSON = {"chat", "serve", "explore", "docs", "embed", "config schema", "config slurm"} | {
    "exercise start",
    "exercise pack",
}


@pytest.mark.parametrize("name", [name for name in EVERY if name not in WITHOUT_JSON])
def test_commands_with_a_result_have_a_json_option(name: str) -> None:
    assert "--json" in [option for param in EVERY[name].params for option in param.opts]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shell")
    (folder / "book.txt").write_text(TEXT)
    (folder / "lines.txt").write_text("the cat\na dog\n")
    words = ["train", "llama-tiny", "--data", str(folder / "book.txt"), "--run", str(folder / "runs" / "a"), *SMALL]
    assert run(words) == 0
    assert run(["export", str(folder / "runs" / "a"), str(folder / "hf"), "--to", "hf"]) == 0
    return folder


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("train ngram-3 --data book.txt --run runs/new --json tokenizer=byte", "run bits_per_byte"),
        ("evaluate runs/a --json", "loss perplexity"),
        ("generate runs/a --prompt cat --max-tokens 3 --json", "prompt completions"),
        ("embed runs/a lines.txt", "text vector"),
        ("neighbours runs/a c --json", "word neighbours"),
        ("tokenize cat --tokenizer runs/a --json", "tokens pieces"),
        ("prepare book.txt --out tokens --tokenizer byte --json", "path vocab_size sha256 splits"),
        ("plan gpt2 --json", "parameters"),
        ("config show gpt-tiny --json", "model optimizer"),
        ("export runs/a new --to weft --json", "path format written"),
        ("import hf imported --json", "run parameters vocab_size"),
        ("explain runs/a --only surprise --text 'the cat' --json", "title note"),
        ("explain gpt-tiny --only costs --json", "title note"),
        ("runs runs --json", ""),
        ("runs diff gpt2 llama-7b --json", ""),
        ("presets --json", ""),
    ],
)
def test_standard_output_is_only_json(trained: Path, command: str, keys: str, cli: Cli, monkeypatch: Patch) -> None:
    monkeypatch.chdir(trained)
    out = cli(*shlex.split(command))
    try:
        found = json.loads(out)
    except json.JSONDecodeError:
        found = next(json.loads(line) for line in out.splitlines())  # a line for each text
    if keys:
        assert set(keys.split()) <= set(found)
    else:
        assert isinstance(found, list) and found


def test_exit_codes_are_in_the_help(cli: Cli) -> None:
    out = " ".join(cli("--help").split())
    assert "Exit codes: 0 success; 2 a mistake" in out
    assert "130 interrupted" in out
    assert run(["config", "show", "quikstart"]) == 2


SHOW = """if True:
    import time
    from weft.cli.main import run
    from weft.progress import bar
    run(["plan", "--help"])
    run(["plan", "gpt2"])
    run(["tokenize", "a cat", "--tokenizer", "byte"])
    run(["plan", "gtp2"])
    with bar("reading", 4) as go:
        go(1)
        time.sleep(0.3)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no pty")
def test_no_color_is_honoured_on_a_terminal() -> None:
    plain = on_a_terminal("-c", SHOW, NO_COLOR="1")
    # without colours, │ separates tokens
    for part in ("Usage: ", "embeddings", "a│ │c│a│t", "weft: 'gtp2'", "reading"):
        assert part in plain
    assert not COLOUR.search(plain)


@pytest.mark.slow
def test_a_terminal_has_colours() -> None:
    assert len(COLOUR.findall(on_a_terminal("-c", SHOW))) > 10


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True])
def test_force_color_is_honoured_in_a_pipe_unless_no_color_is_set(both: bool) -> None:
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    environment = {**kept, "FORCE_COLOR": "1", **({"NO_COLOR": "1"} if both else {})}
    done = subprocess.run([sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True)
    assert bool(COLOUR.search(done.stdout)) == (not both)
    assert ("\x1b[1mgpt2" in done.stdout) == (not both)
    assert "reading" not in done.stderr  # a progress bar needs a terminal


def completed(shell: str, words: str, capsys: Capture, monkeypatch: Patch) -> str:
    """Return the completions that a shell gets for some words."""
    typed = {"_WEFT_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words, "COMP_WORDS": words}
    typed |= {"COMP_CWORD": str(words.count(" ")), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    for name, value in typed.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run([])
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete(shell: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    (tmp_path / "runs" / "book").mkdir(parents=True)
    (tmp_path / "runs" / "book" / "config.toml").touch()
    monkeypatch.chdir(tmp_path)

    def offered(words: str) -> str:
        return completed(shell, words, capsys, monkeypatch)

    assert {"train", "translate"} <= set(re.findall(r"\w+", offered("weft tra")))
    assert "sentiment" in offered("weft train senti") and "optimizer.lr=" in offered("weft train gpt-tiny optim")
    assert "runs/book" in offered("weft generate ")
    assert "runs/book" in offered("weft generate runs/book --draft ")
    assert "--max-tokens" in offered("weft generate runs/book --max")
    assert "transformer++" in offered("weft compare lstm transf")
    assert "model.layers=" in offered("weft compare lstm model.lay")
    # a single key comes with its value, so that no space follows the =
    assert re.findall(r"steps=\w*", offered("weft train dates step")) == ["steps=", "steps=5000"]


def test_only_matches_are_completed(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    (tmp_path / "runs" / "book").mkdir(parents=True)
    (tmp_path / "runs" / "book" / "config.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert completed("bash", "weft tra", capsys, monkeypatch).split() == ["train", "translate"]
    assert completed("bash", "weft generate ", capsys, monkeypatch).split() == ["runs/book"]
    assert complete_runs(None, f"{tmp_path}/ru") == [f"{tmp_path}/runs"]
    assert "--install-completion" in [option for param in program.params for option in param.opts]


def test_completion_imports_no_torch() -> None:
    typed = {"_WEFT_COMPLETE": "complete_bash", "COMP_WORDS": "weft train gpt-tiny optim", "COMP_CWORD": "3"}
    code = "import sys; from weft.cli.main import run\ntry:\n    run([])\nfinally:\n    print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **typed}, capture_output=True, text=True, check=False
    )
    assert "optimizer.lr=" in done.stdout.split() and done.stdout.split()[-1] == "False"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_can_be_shown(shell: str, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    with pytest.raises(SystemExit) as ended:
        run(["--show-completion"])
    assert ended.value.code == 0
    assert f"_WEFT_COMPLETE=complete_{shell}" in capsys.readouterr().out
