"""`weft lecture`: its entries, how they are run, and the page they make."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.command import Cli

from weft.cli.main import program
from weft.course.lectures import EntryCheck, Lecture, LectureEntry, lectures, setups
from weft.course.page import lecture_page, summary
from weft.course.workspace import EntryResult, Workspace
from weft.errors import ConfigError

ENTRIES = [(number, entry) for number, lecture in lectures().items() for entry in lecture.entries]
SOURCES = [entry for _, entry in ENTRIES] + list(setups())


def parse(words: list[str]) -> None:
    """Parse a command of weft without running it; raises what the command line would report."""
    command: Any = program
    words = words[: words.index("<")] if "<" in words else words
    context = command.make_context("weft", list(words), obj=words)
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def claim(title: str, python: str, *checks: EntryCheck) -> LectureEntry:
    return LectureEntry(title=title, kind="claim", about=f"About {title}.", python=python, checks=checks)


def test_every_item_of_the_slides_has_an_entry() -> None:
    assert [len(lecture.entries) for lecture in lectures().values()] == [40, 35, 41, 23, 24]  # 163
    for number, lecture in lectures().items():
        titles = [entry.title for entry in lecture.entries]
        assert len(set(titles)) == len(titles), number


def test_every_command_parses() -> None:
    for source in SOURCES:
        assert all(line.startswith("weft ") for line in source.lines), source
        for words in source.commands:
            parse(words)
        compile(source.python, "entry", "exec")


def test_what_a_command_names_is_made() -> None:
    made = {setup.makes for setup in setups()}
    made |= {name for setup in setups() for name in re.findall(r'open\(f?"([\w.-]+)", "w"', setup.python)}
    for source in SOURCES:
        named = re.findall(r"\b(?:runs/[\w-]+|[\w-]+\.(?:txt|tsv|jsonl)\b)", source.text)
        assert set(named) <= made, source.text


def test_figures_have_names_of_their_own_and_every_entry_has_checks_that_can_fail() -> None:
    names = [name for _, entry in ENTRIES for name in entry.figures]
    assert len(set(names)) == len(names)
    for number, entry in ENTRIES:
        assert (entry.kind == "figure") == bool(entry.figures), entry.title
        assert all(name.startswith(f"{number}-") for name in entry.figures)
        assert entry.checks, entry.title
        for check in entry.checks:
            assert re.compile(check.find).groups >= (check.expected != "yes"), (entry.title, check.find)
            assert not any(check.verdict(text).holds for text in ("", entry.text)), (entry.title, check.about)


@pytest.mark.parametrize(
    ("check", "output", "holds"),
    [
        (EntryCheck(about="n", find="n = (.*)$", equals=1234.0), "n = 1,234", True),
        (EntryCheck(about="n", find="n = (.*)$", equals=-1.9, within=0.01), "n = −1.905", True),
        (EntryCheck(about="n", find="n = (.*)$", equals=-1.9, within=0.01), "n = 1.9", False),
        (EntryCheck(about="n", find=r"n = ([\d.e+-]+)", below=1e-6), "n = 2.2e-08.", True),
        (EntryCheck(about="n", find="n = (.*)$", above=0, below=3), "n = 3", False),
        (EntryCheck(about="n", find="n = (.*)$", above=0), "n = nan", False),
        (EntryCheck(about="n", find="n = (.*)$", above=0), "m = 1", False),
        (EntryCheck(about="n", find="^found"), "not\nfound", True),
    ],
)
def test_verdicts(check: EntryCheck, output: str, holds: bool) -> None:
    assert check.verdict(output).holds is holds


def test_a_failing_entry_does_not_stop_the_others(tmp_path: Path) -> None:
    entries = [
        claim("one", "print('n = 1')", EntryCheck(about="n", find=r"n = (\d)", equals=1)),
        claim("two", "raise SystemExit('it broke')"),
        claim("three", "print('n = 3')", EntryCheck(about="n", find=r"n = (\d)", equals=4)),
    ]
    done: list[int] = []
    one, two, three = results = Workspace(tmp_path / "new").run_all(entries, done.append)
    assert one.holds and one.output == "n = 1"
    assert not two.holds and "it broke" in two.error
    assert not three.holds and three.verdicts[0].found == "3"
    assert done == [1, 1, 1]
    assert Workspace(tmp_path / "new").needs(entries) == []
    assert summary(results) == "3 entries, 2 of them checked; 1 differ; 1 failed."


def test_a_text_is_made_once_and_again_if_it_is_lost(tmp_path: Path) -> None:
    reads = claim("reads", "print(open('henry.txt').read())")
    assert Workspace(tmp_path).run(reads).output.strip() == "Henry is giving a lecture on transformers"
    path = tmp_path / "henry.txt"
    path.write_text("changed by a reader")
    assert Workspace(tmp_path).run(reads).output == "changed by a reader"
    path.unlink()
    assert "Henry" in Workspace(tmp_path).run(reads).output


def test_what_was_made_from_another_version_is_made_again(tmp_path: Path) -> None:
    reads = claim("reads", "print(open('write.txt').readline())")
    first = Workspace(tmp_path).run(reads).output
    record = json.loads((tmp_path / "setup.json").read_text())
    record["read.txt"] = "an earlier script"
    (tmp_path / "setup.json").write_text(json.dumps(record))
    (tmp_path / "write.txt").write_text("made from that")
    assert Workspace(tmp_path).run(reads).output == first != "made from that"


@pytest.mark.slow
def test_a_failure_to_make_something_names_it(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    (tmp_path / "animals.txt").mkdir()
    (tmp_path / "animals.txt" / "kept").touch()
    (tmp_path / "runs").touch()
    result = workspace.run(claim("reads", "print('runs/words')"))
    assert result.error.startswith("runs/words could not be made: exit code 2: ")


def test_no_folder_of_another_kind_is_used(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        Workspace(tmp_path)
    (tmp_path / "setup.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        Workspace(tmp_path)


def test_the_page_holds_everything(tmp_path: Path) -> None:
    figure = tmp_path / "a.svg"
    figure.write_text('<?xml version="1.0"?><svg viewBox="0 0 9 9"><path fill="#2f6f9f"/></svg>')
    drawn = LectureEntry(title="Drawn", kind="figure", about="A figure.", run="weft plan gpt2 --out a.svg")
    said = claim("Said", "print('<b>')", EntryCheck(about="n", find="(n)", equals=1))
    lecture = Lecture(title="Test", about="Two entries.", page="x", entries=(drawn, said))
    results = [
        EntryResult(drawn, output="Figure: a.svg", figures=(figure,)),
        EntryResult(said, output="<b>", verdicts=(said.checks[0].verdict("n"),)),
        EntryResult(claim("Broken", "1/0"), error="exit code 1: ZeroDivisionError"),
    ]
    html = lecture_page(9, lecture, results)
    assert "Lecture 9: Test" in html and "1. Drawn" in html and "$ weft plan gpt2 <span>--out</span> a.svg" in html
    assert '<img src="data:image/svg+xml;base64,' in html
    assert (
        "&lt;b&gt;" in html and "<b>" not in html.partition("<body>")[2].replace("<b>", "", 0).partition("2. Said")[2]
    )
    assert "differs" in html and "Failed: exit code 1: ZeroDivisionError" in html
    assert "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html


def test_lists(cli: Cli) -> None:
    assert "Transformer language models" in cli("lecture")
    assert [len(each["entries"]) for each in cli.json("lecture")] == [40, 35, 41, 23, 24]
    listed = cli("lecture", 3)
    assert "weft plan --lecture gpt3" in listed and "Python, " in listed
    assert cli.json("lecture", 3)["title"] == "Learning and decoding"


def test_mistakes(cli: Cli, tmp_path: Path) -> None:
    assert "from 1 to 5" in cli.refused("lecture", 6)
    assert "entries 1 to 41" in cli.refused("lecture", 3, 42)
    assert "entries 1 to 41" in cli.refused("lecture", 3, 0)
    assert "name a lecture" in cli.refused("lecture", "--all")
    assert "leave out 7" in cli.refused("lecture", 3, 7, "--all")
    assert "nothing is written by a list" in cli.refused("lecture", 3, "--out", tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    assert "not empty" in cli.refused("lecture", 3, 7, "--out", tmp_path)


@pytest.mark.slow
def test_one_entry(cli: Cli, tmp_path: Path) -> None:
    number = next(
        n for n, entry in enumerate(lectures()[5].entries, 1) if entry.title == "Perplexity of four predictions"
    )
    out = cli("lecture", 5, number, "--out", tmp_path / "out")
    assert "mean 1.242 nats, perplexity 3.464" in out and out.count("holds") == 2
    (record,) = json.loads(cli("lecture", 5, number, "--out", tmp_path / "out", "--json"))
    assert record["holds"] is True and record["entry"] == "Perplexity of four predictions"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(1, 6))
def test_every_entry_runs(number: int, tmp_path: Path) -> None:
    results = Workspace(tmp_path).run_all(lectures()[number].entries, lambda done: None)
    assert not [(result.entry.title, result.error, result.verdicts) for result in results if not result.holds]
