"""Mistakes in the input: exit code 2, one line on stderr, no traceback, nothing left behind."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command import Cli, Patch

from weft.cli.main import _message, program, run
from weft.recipe.resolve import recipe_names

TEXT = "The cat sat on the mat. The dog sat on the log, and the cat looked at the dog.\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "book.txt: contains no text"),
        (b"\x7fELF\x00\x01\x02\x00" * 50, "book.txt: looks like a program (ELF), not text"),
        (b"fine until \xff here\n" * 9, "book.txt: not valid UTF-8 at byte 11"),
        (b"hi", "book.txt: too short to train on"),
    ],
)
def test_texts_that_cannot_be_trained_on(folder: Path, cli: Cli, content: bytes, words: str) -> None:
    (folder / "book.txt").write_bytes(content)
    assert words in cli.refused("train", "llama-tiny", "--data", "book.txt")
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == ["book.txt"]


@pytest.mark.parametrize(
    ("command", "facts"),
    [
        ("train steps=5 --data book.txt", "no recipe … preset … weft train gpt-tiny"),
        ("train", "no recipe … preset"),
        ("train lama-tiny", "'lama-tiny' … 'llama-tiny'"),
        ("train llama-tiny modl.layers=3", "modl.layers … 'model.layers'"),
        ("train llama-tiny model.layrs=3", "model.layrs … 'model.layers'"),
        ("train --config x.toml", "no such option: --config … an argument: weft train PRESET|RECIPE|RUN"),
        ("chat runs/none hello", "hello … echo hello | weft chat RUN"),
        ("runs list", "list: no such folder … `weft runs` alone"),
        ("train llama-tiny steps=many", "steps = 'many' … a whole number"),
        ("train llama-tiny book.txt", "'book.txt' … key=value … --data"),
        ("train llama-tiny", "no text … --data"),
        ("train llama-tiny --data none.txt", "none.txt: no such file"),
        ("train llama-tiny --data -", "standard input can be read once"),
        ("train bert-tiny --data x.txt objective=next-token", "'encoder' … 'next-token' … decoder"),
        ("train gpt-tiny --data x.tsv objective=pairs", "'decoder' … 'pairs' … encoder-decoder"),
        ("train gpt-tiny init=nowhere", "init = 'nowhere' … not a run"),
        ("train --resume runs/none", "runs/none: not a run … no such folder"),
        ("train gpt-tiny --resume runs/none", "--resume runs/none … steps=3000 … weft train runs/none --data"),
        ("train gpt-tiny batch_size=4", "batch_size … 'batch.size'"),
        ("train gpt-tiny model.heads=4", "model.heads … 'model.attention.heads'"),
        ("train gpt-tiny learning_rate=1e-3", "learning_rate … 'optimizer.lr'"),
        ("train gpt-tiny --steps 5", "--steps … key=value … steps=5"),
        ("train gpt-tiny --lr=1e-3", "--lr … key=value … optimizer.lr=1e-3"),
        ("train gpt-tiny --output-dir x", "--output-dir … --run"),
        ("translate runs/none x.txt", "x.txt"),
        ("classify runs/none", "runs/none: not a run"),
        ("evaluate runs/none", "runs/none: not a run"),
        ("generate runs/none", "runs/none: not a run"),
        ("generate runs/none --temperature -1", "temperature = -1.0 … greater than"),
        ("generate runs/none --top-p 1.5", "top_p = 1.5 … less than or equal to 1"),
        ("generate runs/none --top-k 0", "top_k = 0 … greater than 0"),
        ("generate runs/none --max-tokens 0", "max_tokens = 0 … greater than 0"),
        ("generate runs/none --max-tokens some", "--max-tokens … a whole number … weft generate --help"),
        ("generate runs/none --stop ''", "stop"),
        ("generate runs/none --greedy --temperature 1", "--greedy … --temperature"),
        ("generate runs/none --greedy --top-k 3", "greedy … top_k"),
        ("generate", "'RUN'"),
        ("generate runs/\udcff", "argument 2, 'runs/\\udcff' … UTF-8"),
        ("generate x y", "argument: y … --prompt y"),
        ("generate x 'a b'", "argument: a b … --prompt 'a b'"),
        ("neighbours x y z", "argument: z"),
        ("compare lstm gpt-tiny --data x.txt", "expected one of flops, tokens and minutes … --flops 1e13"),
        ("train https://a.b/book.txt", "'https://a.b/book.txt' … not addresses … weft train gpt-tiny --data FILE"),
        ("train gpt-tiny --data ftp://a.b/book.txt", "'ftp://a.b/book.txt' … not addresses … give the file"),
        ("generate x --temp 1", "--temp … --temperature"),
        ("generate x --length 5", "--length … --max-tokens"),
        ("generate x --prompt", "'--prompt' requires … see weft generate --help"),
        ("evaluate x --test a.txt", "--test … --data"),
        ("explain x --view attention", "--view … --only"),
        ("train gpt-tiny --output x", "--output … --run"),
        ("translate x --output y", "--output … --out"),
        ("train gpt-tiny --gpu", "--gpu … CUDA_VISIBLE_DEVICES"),
        ("plan gpt-tiny --gpu h100", "--gpu … --device"),
        ("translate runs/none y.txt", "y.txt: no such file"),
        ("generate x --max_new_tokens 5", "--max_new_tokens … --max-tokens"),
        ("chat runs/none --greedy --seed 4", "--greedy … --seed"),
        ("prepare a.txt b.md.gz --column x --out o", "--column x … a.txt … plain text"),
        ("embed runs/none --file a.txt", "--file … weft embed RUN FILE"),
        ("config show gpt-tiny name=a/b", "name = 'a/b' … [A-Za-z0-9]"),
        ("config show quickstart steps", "'steps' … key=value"),
        ("quikstart", "'quikstart' … quickstart"),
        ("train gpt-tiny data=book.txt", "data = 'book.txt': expected a table … --data"),
        ("explain runs/none --only attension", "--only … 'attension' … did you mean 'attention'? … --help"),
        ("explain gpt2 --only zzz", "'zzz' … anatomy … weights"),
        ("plan gpt2 --precision bf17", "--precision … 'bf17' … 'bf16'"),
        ("explain gpt-tiny --only attention", "attention: 'gpt-tiny' has no weights yet … weft explain RUN"),
        ("train gpt-tiny --data x.txt device=cuda", "device: unknown key … CUDA_VISIBLE_DEVICES"),
        ("train gpt-tiny --data x.txt --device cuda", "--device … CUDA_VISIBLE_DEVICES"),
        ("train gpt-tiny --data x.txt --num-gpus 4", "--num-gpus … --processes"),
        ("train gpt-tiny --data x.txt steps", "'steps' … key=value … steps=VALUE"),
        ("train gpt-tiny --data x.txt learning_rate 1e-3", "'learning_rate' … optimizer.lr=VALUE"),
        ("train gpt-tiny tokenizer=byte:8000", "tokenizer.kind = 'byte:8000' … 'byte'"),
        ("--verbose", "--verbose"),
        ("gradients", "weft explain transformer --only gradients"),
        ("resume 'runs/a b'", "'resume' … weft train --resume 'runs/a b'"),
        ("sample runs/a --n 3", "'sample' … weft generate runs/a --n 3"),
        ("list", "'list' … weft runs"),
        ("train gpt-tiny --epochs 3", "--epochs … steps=VALUE; one epoch is"),
        ("train gpt-tiny model.d=128", "model.d: unknown key … 'model.d_model'"),
        ("generate gpt2", "gpt2: not a run: a preset … weft train gpt2 --data FILE"),
        ("import https://huggingface.co/a/b runs/b", "by its name: weft import a/b RUN"),
        ("import https://a.b/c.gguf runs/b", "not addresses … give the file"),
        ("train --model gpt-tiny --data x.txt", "--model … an argument: weft train PRESET|RECIPE|RUN"),
        ("generate --model runs/none --prompt a", "--model … an argument: weft generate RUN"),
        ("train gpt-tiny --input x.txt", "--input; use --data"),
        ("train gpt-tiny --tokenizer bpe", "--tokenizer … key=value: tokenizer=bpe"),
        ("train gpt-tiny learning-rate=1e-3", "learning-rate: unknown key; it is 'optimizer.lr'"),
        ("train gpt-tiny --data ''", "'': no such file"),
        ("translate runs/none --beam-size 4", "--beam-size; use --beam"),
        ("generate runs/none --stream", "no such option: --stream (see weft generate --help)"),
        ("generate runs/none --schema x", "did you mean --json-schema? (see weft generate --help)"),
    ],
)
def test_invalid_words_are_named_with_what_would_be_right(cli: Cli, command: str, facts: str) -> None:
    line, position = cli.refused(*shlex.split(command)), 0
    for fact in facts.split(" … "):
        assert fact in line[position:], line
        position = line.index(fact, position) + len(fact)


def test_messages_about_files_and_columns(folder: Path, cli: Cli) -> None:
    (folder / "a.csv").write_text("id,body\n1,hello there\n" * 20)
    line = cli.refused("train", "gpt-tiny", "--data", "a.csv")
    assert "'text'" in line and "id, body" in line and "data.column=NAME" in line and "--column NAME" in line
    line = cli.refused("train", "bert-tiny", "objective=classify", "--data", "a.csv", "objective.text=body")
    assert "'label'" in line and "id, body" in line and "objective.label=NAME" in line
    assert cli.refused("train", "gpt-tiny", "--data", "zzzzz").startswith("zzzzz: no such file; files here: a.csv")
    (folder / "old name.txt").write_bytes("Größe und Übermut\n".encode("latin1") * 50)
    line = cli.refused("train", "gpt-tiny", "--data", "old name.txt")
    for fact in ("old name.txt", "byte 2 (0xf6)", "data.encoding=cp1252", "--encoding cp1252", "iconv -f cp1252"):
        assert fact in line
    line = cli.refused("train", "gpt-tiny", "--data", "old name.txt", "data.encoding=cp12522")
    assert line.startswith("data.encoding: 'cp12522'") and "cp1252?" in line


def test_a_text_instead_of_a_recipe(folder: Path, cli: Cli) -> None:
    (folder / "book.txt").write_text(TEXT)
    (folder / "book.pdf").write_bytes(b"%PDF\x00\xff")
    (folder / "texts").mkdir()
    for command in ("train book.txt", "train book.pdf", "train texts", "config show book.txt"):
        source = command.split()[-1]
        line = cli.refused(*command.split())
        assert line.startswith(f"{source}: neither a recipe (.toml) nor a run")
        assert line.endswith(f"weft train gpt-tiny --data {source}")


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", ","), ("a.csv", "|")])
def test_a_table_with_other_separators(folder: Path, cli: Cli, name: str, separator: str) -> None:
    (folder / name).write_text(f"text{separator}label\nhello there{separator}1\n" * 20)
    for words in (["gpt-tiny"], ["bert-tiny", "objective=classify"]):
        line = cli.refused("train", *words, "--data", name)
        assert line.startswith(f"{name}: its columns are separated by {separator!r}; a .csv file needs commas")


def test_plain_text_instead_of_rows(folder: Path, cli: Cli) -> None:
    (folder / "book.txt").write_text(TEXT * 30)
    line = cli.refused("train", "vaswani-tiny", "--data", "book.txt")
    assert line.startswith("book.txt: plain text, but objective 'pairs' reads columns (source, target)")
    assert "--targets FILE" in line
    line = cli.refused("train", "bert-tiny", "--data", "book.txt", "objective=classify")
    assert "(text, label); give it a .tsv" in line and "--targets" not in line


@pytest.mark.parametrize("command", ["prepare", "compare", "scale", "train"])
def test_an_interrupted_command_says_whether_it_resumes(command: str, capsys: Capture, monkeypatch: Patch) -> None:
    def interrupted(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "main", interrupted)
    assert run([command, "x"]) == 130
    resumes = "" if command == "train" else "; the same command resumes"
    assert capsys.readouterr().err == f"weft: interrupted{resumes}\n"


def test_a_broken_row_names_the_option_to_skip_it(folder: Path, cli: Cli) -> None:
    (folder / "a.csv").write_text("text,label\nfine,1\n" + "bad\n" + "good,0\n")
    line = cli.refused("train", "bert-tiny", "objective=classify", "--data", "a.csv")
    assert line.endswith("a.csv:3: has 1 field, the header has 2; data.on_error=skip leaves such rows out")


def test_a_recipe_that_is_not_toml(folder: Path, cli: Cli) -> None:
    (folder / "bad.toml").write_text("steps = ")
    assert cli.refused("train", "bad.toml", "--data", "x").startswith("bad.toml: not valid TOML")
    assert "none.toml: no such recipe" in cli.refused("train", "none.toml")
    (folder / "old.toml").write_bytes("steps = 5".encode("utf-16"))
    assert cli.refused("train", "old.toml") == "old.toml: cannot be read: not UTF-8 text"
    (folder / "mark.toml").write_text("\ufeffsteps = 'many'\nbase = 'gpt-tiny'", encoding="utf-8")
    assert "steps" in cli.refused("train", "mark.toml", "--data", "x")
    (folder / "keys").write_bytes(b"\xff" * 20)
    assert cli.refused("serve", "runs/none", "--api-key-file", "keys") == "keys: cannot be read: not UTF-8 text"


def test_a_run_by_its_bare_name_or_misspelled(folder: Path, cli: Cli) -> None:
    (folder / "runs" / "old").mkdir(parents=True)
    (folder / "runs" / "old" / "config.toml").write_text("name = 'old'\n")
    assert cli.refused("generate", "old").endswith("old: not a run: no such folder; did you mean runs/old?")
    assert cli.refused("evaluate", "runs/odl").endswith("no such folder; did you mean runs/old?")
    assert cli.refused("explain", "runs/odl").endswith("did you mean 'runs/old'?")
    assert cli.refused("evaluate", "zebra").endswith("not a run: no such folder")


def test_paths_that_are_not_runs(folder: Path, cli: Cli) -> None:
    (folder / "runs" / "ö l" / "checkpoints").mkdir(parents=True)
    (folder / "runs" / "ö l" / "config.toml").write_text("name = 'old'\n")
    (folder / "book.txt").write_text(TEXT)
    (folder / "stale").symlink_to("gone")
    assert cli.refused("evaluate", "book.txt").endswith("not a run: a file; give the folder of a run")
    assert cli.refused("evaluate", "runs").endswith("not a run: a folder of runs; give one: runs/ö l")
    assert cli.refused("generate", "runs/ö l/checkpoints").endswith("a part of one; give runs/ö l")
    (folder / "runs" / "checkpoint").mkdir()
    (folder / "runs" / "checkpoint" / "config.toml").write_text("name = 'near'\n")
    assert cli.refused("generate", "runs/ö l/checkpoints").endswith("a part of one; give runs/ö l")
    assert cli.refused("generate", "stale").endswith("a link to gone, which is missing")
    assert "weft train --resume 'runs/ö l'" in cli.refused("train", "runs/ö l")
    assert cli.refused("train", "book.txt", "gpt-tiny").endswith("first: weft train gpt-tiny --data book.txt")


def test_a_refused_start_leaves_no_folder(folder: Path, cli: Cli) -> None:
    cli.refused("train", "gpt-tiny", "--data", "none.txt")
    cli.refused("train", "gpt-tiny", "--data", "none.txt", "--run", "far/away/run")
    assert list(folder.iterdir()) == []
    (folder / "runs" / "other").mkdir(parents=True)
    cli.refused("train", "gpt-tiny", "--data", "none.txt")
    assert [path.name for path in folder.rglob("*")] == ["runs", "other"]


@pytest.mark.parametrize("closed", [0, 1])
def test_closed_standard_streams_act_as_empty(closed: int) -> None:
    command = f"{sys.executable} -m weft tokenize - --tokenizer byte {closed}>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, input="hi", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_bug_is_not_hidden(monkeypatch: Patch) -> None:
    def broken(*arguments: object, **more: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("weft.recipe.resolve.resolve", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run(["config", "show", "quickstart"])


def test_weft_debug_shows_the_traceback(monkeypatch: Patch) -> None:
    monkeypatch.setenv("WEFT_DEBUG", "1")
    with pytest.raises(ValueError, match="no such recipe or preset"):
        run(["config", "show", "quikstart"])


def test_help_version_and_schema(cli: Cli) -> None:
    assert "quickstart" in cli()
    assert cli("--version").startswith("weft ")
    assert "optimizer" in json.loads(cli("config", "schema"))["properties"]
    assert run(["config"]) == 2


@pytest.mark.parametrize(
    ("error", "command", "line"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp:125] DefaultCPUAllocator: can't"), "generate", "--max-tokens"),
        (MemoryError(), "translate", "--beam"),
        (MemoryError(), "train", "batch.micro"),
        (MemoryError(), "embed", "a smaller model"),
    ],
)
def test_out_of_memory_names_the_commands_options(error: Exception, command: str, line: str) -> None:
    shown = _message(error, ["--option", command])
    assert shown is not None and shown.startswith("out of memory; ") and line in shown


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m weft presets | head -1; echo ${{PIPESTATUS[@]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 0" and done.stderr == ""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_lets_a_command_clean_up(name: str) -> None:
    code = f"""if True:
        import os, signal
        signal.signal(signal.{name}, signal.SIG_DFL)  # nohup would ignore it
        from weft.cli import main
        def work(words):
            try:
                os.kill(os.getpid(), signal.{name})
            finally:
                os.kill(os.getpid(), signal.{name})  # a second signal is ignored
                print("cleaned up")
        main.run = work
        main.main()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + getattr(signal, name), "cleaned up\n", "")


def test_presets_also_lists_recipes(cli: Cli) -> None:
    lines = cli("presets").splitlines()
    shown = {line.split()[0]: line for line in lines[lines.index("") + 2 :]}
    assert sorted(shown) == recipe_names()
    assert shown["dates"].endswith("built in") and "ISO 8601" in shown["dates"]
    assert shown["bert"].endswith("--data FILE") and shown["sst2"].endswith("sst2/train.tsv")
