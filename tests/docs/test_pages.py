"""A page as something that runs: which blocks it has, what decides whether they are run again, and what they print."""

import time
from pathlib import Path

import pytest

from ext import pages
from ext.pages import Block, Outcome, PageError

PAGE = """\
# A page

```{file} names.txt
Ada
```

- in a list

  ```{run}
  :lines: 2
  :figure: a.svg b.png

  cat names.txt
  ```

````{note}
```{run-python}
:quiet:
x = 3
```
````

```sh
never run
```
"""


def test_blocks_are_found_in_the_order_of_the_page() -> None:
    file, run, python = pages.parse(PAGE)
    assert file == Block("file", "Ada\n", 3, "names.txt")
    assert run == Block("run", "cat names.txt\n", 9, "", {"lines": "2", "figure": "a.svg b.png"})
    assert run.figures == ["a.svg", "b.png"] and run.status == 0 and run.needs is None
    assert python == Block("run-python", "x = 3\n", 17, "", {"quiet": ""})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```{run}\n:line: 3\nls\n```", "no option 'line'; it has quiet, hidden"),
        ("```{run}\n:lines: few\nls\n```", "lines = 'few': expected a whole number"),
        ("```{run}\n:needs:\nls\n```", "option 'needs' needs a value"),
        ("```{run-python}\n:quiet: yes\nls\n```", "option 'quiet' takes no value"),
        ("```{run} ls\n```", "takes no argument"),
        ("```{file}\ntext\n```", "needs the file's name"),
        ("```{file} ../book.txt\ntext\n```", "its own folder"),
    ],
)
def test_a_block_that_is_written_wrongly_is_an_error_at_its_line(text: str, said: str) -> None:
    with pytest.raises(PageError, match=said) as error:
        pages.parse(f"# A page\n\n{text}\n")
    assert error.value.line == 3


def test_the_readmes_blocks_are_those_of_sh_and_python() -> None:
    text = "```sh\nls\n```\n\n```toml\na = 1\n```\n\n"
    text += (
        "<!-- run: needs a GPU -->\n```sh\nweft train\n```\n\n<!-- run: first touch a -->\n```python\nopen('a')\n```\n"
    )
    assert [(block.kind, block.body, block.needs) for block in pages.parse_readme(text)] == [
        ("run", "ls\n", None),
        ("run", "weft train\n", "a GPU"),
        ("run", "touch a\n", None),
        ("run-python", "open('a')\n", None),
    ]


def test_the_hash_is_of_what_is_run_not_of_what_is_shown() -> None:
    plain = pages.digest(pages.parse("```{run}\nls\n```"))
    assert plain == pages.digest(pages.parse("Some words.\n\n```{run}\n:lines: 3\n:quiet:\nls\n```"))
    for other in ("```{run}\nls -l\n```", "```{run-python}\nls\n```", "```{run}\n:status: 2\nls\n```"):
        assert plain != pages.digest(pages.parse(other))


def test_the_last_lines_are_shown_with_an_ellipsis() -> None:
    outcome = Outcome("1\n2\n3")
    assert outcome.last(2) == "…\n2\n3" and outcome.last(3) == outcome.last(None) == "1\n2\n3"


def run(text: str, folder: Path) -> list[Outcome]:
    return pages.execute(pages.parse(text), folder)


def test_a_page_runs_from_top_to_bottom_in_a_folder_of_its_own(tmp_path: Path) -> None:
    text = """\
```{file} sub/names.txt
Ada
```
```{run}
:figure: sub/a.svg
cd sub; cat names.txt; echo wrong >&2; cp names.txt a.svg; variable=1
```
```{run}
echo "${variable:-none} $NO_COLOR $COLUMNS ${OMP_NUM_THREADS:-unset}"
pwd | sed 's/.*page/here/'; printf '1\\r2 \\033[1mbold\\033[0m  \\n'
```
```{run-python}
import os, sys
print(open("sub/names.txt").read(), end=""); print("error", file=sys.stderr); os.system("echo child")
```
```{run-python}
print(os.path.basename(os.getcwd()), "again")
```
```{run}
:needs: a GPU
exit 1
```
"""
    outputs = [outcome.output for outcome in run(text, tmp_path)]
    assert outputs == [
        "",
        "Ada\nwrong",
        "none 1 100 unset\nhere\n2 bold",
        "Ada\nerror\nchild",
        "page again",
        "",
    ]
    assert (tmp_path / "sub" / "a.svg").read_text() == "Ada\n"


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("```{run}\nfalse\necho after\n```", "exit code 1, expected 0"),
        ("```{run}\nfalse | true\n```", "exit code 1, expected 0"),
        ("```{run}\n:status: 2\ntrue\n```", "exit code 0, expected 2"),
        ("```{run}\n:figure: a.svg\ntrue\n```", "wrote no a.svg"),
        ("```{run-python}\n1 / 0\n```", "line 1, in <module>\n    1 / 0"),
        ("```{run-python}\nimport os\nos._exit(3)\n```", "Python ended with 3"),
    ],
)
def test_what_goes_wrong_names_the_line_and_what_was_printed(block: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(PageError, match=said.replace("/", "/")) as error:
        run(f"\n\n{block}\n", tmp_path)
    assert error.value.line == 3 and "after" not in str(error.value).split("echo after")[-1]


def test_expected_failures_are_none(tmp_path: Path) -> None:
    failing = "```{run}\n:status: 3\nexit 3\n```\n```{run-python}\n:status: 4\nraise SystemExit(4)\n```\n"
    assert [outcome.status for outcome in run(failing, tmp_path)] == [3, 4]


def test_what_a_block_leaves_running_ends_with_it(tmp_path: Path) -> None:
    began = time.monotonic()
    [outcome] = run("```{run}\nsleep 60 & echo started\n```", tmp_path)
    assert outcome.output == "started" and time.monotonic() - began < 30


def test_what_was_run_is_kept_until_the_blocks_change(tmp_path: Path) -> None:
    text = "```{run}\n:figure: a.svg\ndate +%N | tee a.svg\n```"
    first, folder = pages.kept("a/page", pages.parse(text), tmp_path)
    assert (folder / "a.svg").read_text().strip() == first[0].output
    again, _ = pages.kept("a/page", pages.parse(f"More words.\n\n{text}"), tmp_path)
    assert again == first
    anew, _ = pages.kept("a/page", pages.parse(text), tmp_path, anew=True)
    other, there = pages.kept("a/page", pages.parse(text.replace("date", "date -u")), tmp_path)
    assert len({first[0].output, anew[0].output, other[0].output}) == 3
    assert [path.parent for path in tmp_path.rglob("results.json")] == [there]  # the old ones are gone


def test_a_page_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(PageError):
        pages.kept("page", pages.parse("```{run}\nfalse\n```"), tmp_path)
    assert not list((tmp_path / "page").iterdir())


def test_sections_end_at_headings() -> None:
    text = "begin\n# One\na\n```sh\n# no heading\n```\n## Two\nb\n"
    assert list(pages.sections(text)) == ["begin\n", "# One\na\n```sh\n# no heading\n```\n", "## Two\nb\n"]
