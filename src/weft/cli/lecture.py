"""`weft lecture`: list what the lectures show, and run it."""

from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.console import options
from weft.cli.console.options import argument, flag, option
from weft.cli.console.terminal import echo, print_json, print_tables
from weft.errors import ConfigError, RunError
from weft.figures.tables import Table, wrap
from weft.progress import bar

if TYPE_CHECKING:
    from weft.course.exercises import Exercise
    from weft.course.lectures import Lecture
    from weft.course.workspace import EntryResult

FOLDER = Path("weft-lectures")


def lecture(
    number: int | None = argument("LECTURE", "The lecture, 1 to 5; without it, all are listed.", None),
    entry: int | None = argument("ENTRY", "The number of a figure, table or claim, to run it.", None),
    all_entries: bool = flag("--all", "Run everything and write one page, which takes some minutes."),
    out: Path | None = option(
        None, f"The folder for texts, models, figures and pages (default: {FOLDER}).", value="FOLDER"
    ),
    as_json: options.AsJson = False,
) -> None:
    """Show every figure, table and claim of the five lectures, with the command for each.

    $ weft lecture 3 --all --out lectures
    """
    from weft.course import lectures

    if out is not None and entry is None and not all_entries:
        raise ConfigError(f"--out {out}: nothing is written by a list; name an entry, or add --all")
    if number is None:
        if all_entries:
            raise ConfigError("--all: name a lecture, for instance: weft lecture 3 --all")
        _list_lectures(lectures.lectures(), as_json=as_json)
        return
    chosen = lectures.lecture(number)
    if entry is None and not all_entries:
        _list_entries(number, chosen, as_json=as_json)
        return
    if entry is not None and all_entries:
        raise ConfigError(f"--all runs every entry; leave out {entry}, or leave out --all")
    if entry is not None and not 1 <= entry <= len(chosen.entries):
        raise ConfigError(
            f"entry {entry}: lecture {number} has entries 1 to {len(chosen.entries)}; weft lecture {number} lists them"
        )
    from weft.course.workspace import Workspace

    folder = out or FOLDER
    workspace = Workspace(folder)
    entries = chosen.entries if entry is None else [chosen.entries[entry - 1]]
    with bar(f"lecture {number}", len(entries) + len(workspace.needs(entries))) as advance:
        results = workspace.run_all(entries, advance)
    if entry is None:
        _write_page(number, chosen, results, folder=folder)
    _report(results, as_json=as_json, whole=entry is None)
    if failed := [position for position, result in enumerate(results, entry or 1) if not result.holds]:
        numbers = ", ".join(map(str, failed))
        raise RunError(f"lecture {number}: {'entry' if len(failed) == 1 else 'entries'} {numbers} failed or differ")


def _write_page(number: int, chosen: "Lecture", results: "list[EntryResult]", *, folder: Path) -> None:
    from weft.course.page import lecture_page
    from weft.storage.files import write_text

    path = folder / f"lecture-{number}.html"
    write_text(path, lecture_page(number, chosen, results))
    echo(f"page: {path}", err=True)


def _exercises(number: int) -> "list[Exercise]":
    from weft.course.exercises import exercises

    return [each for each in exercises().values() if each.lecture == number]


def _list_lectures(found: "dict[int, Lecture]", *, as_json: bool) -> None:
    if as_json:
        print_json([{"lecture": number, **each.model_dump()} for number, each in found.items()])
        return
    counts = {number: [*each.counts().values(), len(_exercises(number))] for number, each in found.items()}
    rows = [(str(n), each.title, each.about, *map(str, counts[n])) for n, each in found.items()]
    totals = map(str, map(sum, zip(*counts.values(), strict=True)))
    header = ("", "lecture", "contents", "figures", "tables", "claims", "exercises")
    print_tables(Table(header, [*rows, ("", "all", "", *totals)], text=(0, 1, 2)))
    echo("\nweft lecture 3 lists one of them; weft lecture 3 7 runs an entry; weft lecture 3 --all runs everything")


def _list_entries(number: int, chosen: "Lecture", *, as_json: bool) -> None:
    tasks = _exercises(number)
    if as_json:
        print_json({"lecture": number, **chosen.model_dump(), "exercises": [each.name for each in tasks]})
        return
    rows = [(str(n), str(each.kind), each.title, each.shown) for n, each in enumerate(chosen.entries, start=1)]
    rows += [("", "exercise", each.title, f"weft exercise start {each.name}") for each in tasks]
    remark = f"Run one with weft lecture {number} ENTRY, or all of them with weft lecture {number} --all."
    print_tables(
        Table(("", "kind", "what", "command"), rows, f"Lecture {number}: {chosen.title}", [remark], text=(1, 2, 3))
    )


def _report(results: "list[EntryResult]", *, as_json: bool, whole: bool) -> None:
    """Print the results: in full for one entry, only what does not hold for a whole lecture."""
    from weft.course.page import summary, verdict_table

    if as_json:
        print_json([{**result._asdict(), "entry": result.entry.title, "holds": result.holds} for result in results])
        return
    for position, result in enumerate(results, start=1):
        if whole and result.holds:
            continue
        if not whole:
            echo("\n".join([result.entry.title, *wrap(result.entry.about), "", result.entry.text, ""]))
            echo(result.output)
        if result.error:
            echo(f"{f'{position}. {result.entry.title}: ' if whole else ''}failed: {result.error}", err=True)
        if result.verdicts:
            shown = verdict_table(result)
            echo("")
            print_tables(shown._replace(title=f"{position}. {result.entry.title}") if whole else shown)
    if whole:
        echo(summary(results))
