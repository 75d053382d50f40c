"""`weft exercise`: list the exercises, start and check one, grade a class, and rank runs."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import options
from weft.cli.console.help import Command, CommandGroup
from weft.cli.console.options import argument, flag, option
from weft.cli.console.terminal import echo, loading, print_json, print_tables
from weft.errors import ConfigError, RunError
from weft.figures.tables import Table
from weft.progress import bar

app = typer.Typer(cls=CommandGroup, invoke_without_command=True)

Own = Annotated[Path | None, option(..., "A folder with exercises of your own.", "--exercises", value="FOLDER")]


@app.callback()
def exercise(context: typer.Context, own: Own = None, as_json: options.AsJson = False) -> None:
    """List the exercises by lecture with your progress; start, check or grade them; rank runs.

    $ weft exercise start attention
    """
    if context.invoked_subcommand is not None:
        return
    from weft.course.exercises import exercises, progress

    found, done = exercises(own), progress()
    if as_json:
        data = [each.model_dump(mode="json", exclude={"folder", "mistakes"}) for each in found.values()]
        print_json([row | {"progress": done.get(row["name"])} for row in data])
        return
    shown = {name: "✓" if passed == cases else f"{passed}/{cases}" for name, (passed, cases) in done.items()}
    rows = [(str(e.lecture), e.name, e.title, str(e.minutes), shown.get(e.name, "")) for e in found.values()]
    print_tables(Table(("lecture", "name", "exercise", "minutes", "done"), rows, text=(1, 2, 4)))
    echo("\nweft exercise start NAME writes the file to complete; weft exercise check NAME.py checks it")


@app.command(cls=Command)
def start(
    name: str = argument("NAME", "The exercise; weft exercise lists them."),
    notebook: bool = flag("--notebook", "Write a notebook."),
    out: Path | None = option(None, "The file to write (default: NAME.py or NAME.ipynb here).", value="FILE"),
    own: Own = None,
) -> None:
    """Write the file of an exercise, with its text and a hole to fill.

    $ weft exercise start attention --notebook
    """
    from weft.course.exercises import exercise as find
    from weft.storage.files import write_text

    chosen = find(name, own)
    path = out or Path(f"{chosen.name}{'.ipynb' if notebook else '.py'}")
    if path.exists():
        raise ConfigError(f"{path}: exists already; choose another name with --out, or remove it")
    write_text(path, chosen.notebook() if notebook else chosen.starting_file())
    echo(f"{path}: {chosen.title}, about {chosen.minutes} minutes")


@app.command(cls=Command)
def check(
    file: Path = argument("FILE", "Your file or notebook."),
    name: str = argument("NAME", "The exercise (default: the file's name).", ""),
    own: Own = None,
    as_json: options.AsJson = False,
) -> None:
    """Check a solution; if it is wrong, show the first tensor that differs, its formula, and a known cause.

    $ weft exercise check attention.py
    """
    from weft.course.exercises import attempts, record_progress, solved_by, source_of
    from weft.course.exercises import exercise as find

    source, chosen = source_of(file), find(name, own) if name else solved_by(file, own)
    with attempts() as children:
        with loading():
            from weft.course.checker import check_file
            from weft.course.grades import weak_limits
        answer = check_file(chosen, source, children)
    record_progress(answer)
    if as_json:
        print_json(answer.summary())
    else:
        echo(str(answer))
    if weak := weak_limits([answer]):
        echo(f"weft: {weak}", err=True)
    if not answer.holds:
        raise typer.Exit(2)


@app.command(cls=Command)
def grade(
    folder: Path = argument("FOLDER", "A folder for each student, or the files of one."),
    names: list[str] | None = argument("NAME", "The exercises (default: those that anybody submitted).", None),
    out: list[Path] | None = option(
        None, "A file to write: .csv, .json (Gradescope's results.json) or .html. May be repeated.", value="FILE"
    ),
    secret: str = option("", "Draw other cases than students see: any text, which you keep to yourself.", value="TEXT"),
    seconds: int = option(10, "The CPU time for each file.", min=1),
    own: Own = None,
    as_json: options.AsJson = False,
) -> None:
    """Grade a folder of submissions, each in a process of its own with limited time, memory and rights.

    $ weft exercise grade submissions --secret "winter 7" --out grades.csv --out grades.html
    """
    from weft.course.exercises import exercise as find
    from weft.storage.files import check_writable

    chosen = [find(name, own) for name in names or []]
    with loading():
        from weft.course.grades import by_student, format_of, grade_table, submissions, weak_limits, write_grades
        from weft.course.grades import grade as grade_all

    for path in out or []:
        format_of(path)
        check_writable(path)
    found = submissions(folder, chosen, own)
    with bar("grading", len(found)) as advance:
        grades = grade_all(found, secret, advance, seconds=seconds)
    for path in out or []:
        write_grades(grades, path)
        echo(f"{path}", err=True)
    if as_json:
        print_json([{"student": e.student, "points": e.points} | e.answer.summary() for e in grades])
    elif not out:
        print_tables(grade_table(by_student(grades)))
    if weak := weak_limits([each.answer for each in grades]):
        echo(f"weft: {weak}", err=True)


@app.command(cls=Command)
def pack(
    names: list[str] = argument("NAME", "The exercises."),
    out: Path = option(Path("course.zip"), "The archive to write.", value="FILE"),
    checks: bool = flag("--with-checks", "Include the checks of your own exercises, which contain their solutions."),
    own: Own = None,
) -> None:
    """Pack exercises for students: texts, files to complete and notebooks.

    $ weft exercise pack attention multi_head rotary --out course.zip
    """
    from weft.course.exercises import exercise as find
    from weft.course.exercises import pack as write_pack

    chosen = [find(name, own) for name in names]
    write_pack(chosen, out, checks=checks)
    echo(f"{out}: {len(chosen)} exercises")


@app.command(cls=Command)
def board(
    runs: list[Path] = argument("RUN", "The runs that take part."),
    by: str = option("bits_per_byte", "The metric to rank by, such as bits_per_byte, bleu, accuracy or parameters."),
    within: float | None = option(None, "The largest training time that is allowed, in seconds.", value="SECONDS"),
    at_least: str | None = option(None, "A condition that runs must meet.", "--at-least", value="METRIC=X"),
    replay: bool = flag("--replay", "Train each run again and compare every step, bit for bit."),
    as_json: options.AsJson = False,
) -> None:
    """Rank runs for a task; each is verified from its folder: text, time, recipe, and files changed since.

    $ weft exercise board runs/* --by parameters --at-least accuracy=0.99
    """
    with loading():
        from weft.course.board import board_table, rank

    entries = rank(runs, by, within=within, at_least=at_least, replay=replay)
    if as_json:
        print_json([entry._asdict() for entry in entries])
    else:
        print_tables(board_table(entries, by))
    if replay and any(entry.difference for entry in entries):
        raise RunError("replay: a run was not repeated bit for bit")
