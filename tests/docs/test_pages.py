"""A page as something that runs: its blocks, their options, their outputs, and where these are recorded."""

import time
from pathlib import Path

import pytest

from ext import pages
from ext.execute import execute
from ext.pages import Block, PageError

PAGE = """\
# A page

`names.txt`:

```toml
Ada
```

<!-- run: lines 2, varies numbers -->
```sh
cat names.txt
```

```output
Ada
```

Text.

<!-- run python
x = 3
-->

```bash
never run
```

```output
belongs to no block
```

<!-- run: needs a GPU, and two minutes -->
```python
x + 1
```
"""


def test_blocks_are_found_in_the_order_of_the_page() -> None:
    file, shell, hidden, python = pages.parse(PAGE)
    assert file == Block("file", "Ada\n", 5, 8, "names.txt", recorded_end=8)
    options = {"lines": "2", "varies": "numbers"}
    assert shell == Block("sh", "cat names.txt\n", 10, 13, options=options, recorded="Ada", recorded_end=17)
    assert hidden == Block("python", "x = 3\n", 20, 23, hidden=True, recorded_end=23)
    assert python.options == {"needs": "a GPU, and two minutes"} and python.recorded is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- run: line 3 -->\n```sh\nls\n```", "no option 'line'; expected quiet, lines"),
        ("<!-- run: lines few -->\n```sh\nls\n```", "lines 'few'"),
        ("<!-- run: quiet yes -->\n```sh\nls\n```", "quiet 'yes': expected no value"),
        ("<!-- run: varies words -->\n```sh\nls\n```", "varies 'words'"),
        ("`../book.txt`:\n\n```text\nls\n```", "inside the page's folder"),
        ("- in a list\n\n  ```sh\n  ls\n  ```", "in a list or a quotation"),
    ],
)
def test_an_invalid_block_is_an_error_with_its_line(text: str, message: str) -> None:
    with pytest.raises(PageError, match=message) as error:
        pages.parse(f"# A page\n\n{text}\n")
    assert 3 < error.value.line < 7


def test_outputs_are_written_below_their_blocks_and_replaced() -> None:
    blocks = pages.parse(PAGE)
    recorded = pages.with_outputs(PAGE, blocks, ["", "Grace\n```\n", "", "ignored"])
    assert (
        "cat names.txt\n```\n\n````output\nGrace\n```\n````\n\nText." in recorded and "Ada\n```\n\nText" not in recorded
    )
    assert "ignored" not in recorded and "belongs to no block" in recorded
    again = pages.parse(recorded)
    assert [block.body for block in again] == [block.body for block in blocks] and again[1].recorded == "Grace\n```"
    assert pages.with_outputs(recorded, again, ["", "Ada", "", ""]) == PAGE


def test_the_last_lines_are_shown_with_an_ellipsis() -> None:
    block = Block("sh", "", 1, 2, options={"lines": "2"})
    assert block.shown("1\n2\n3") == "…\n2\n3" and block.shown("1\n2") == "1\n2"
    assert (
        Block("sh", "", 1, 2, hidden=True).shown("1") == Block("sh", "", 1, 2, options={"quiet": ""}).shown("1") == ""
    )


def test_figures_are_the_images_below_the_folder_of_the_page() -> None:
    text = "![a](../figures/guides/train/a.svg) ![b](../explorer.png)\n\n![c](../figures/guides/serve/c.svg)"
    assert pages.figures_of("guides/train", text) == ["a.svg"]


def test_a_page_runs_from_top_to_bottom_in_an_empty_folder() -> None:
    text = """\
`sub/names.txt`:

```text
Ada
```

```sh
cd sub; cat names.txt; echo wrong >&2; cp names.txt a.svg; variable=1
```

```sh
echo "${variable:-none} $NO_COLOR $COLUMNS ${OMP_NUM_THREADS:-unset}"
pwd | sed 's/.*page/here/'; printf '1\\r2 \\033[1mbold\\033[0m  \\n'; echo "$PWD/sub"
```

```python
import os, sys
print(open("sub/names.txt").read(), end=""); print("error", file=sys.stderr); os.system("echo child")
```

```python
print(os.path.basename(os.getcwd()), "again")
```

<!-- run: needs a GPU -->
```sh
exit 1
```
"""
    outputs, files = execute(pages.parse(text), ["sub/a.svg"])
    assert outputs == [
        "",
        "Ada\nwrong",
        "none 1 100 unset\nhere\n2 bold\nsub",
        "Ada\nerror\nchild",
        "page again",
        "",
    ]
    assert files == [b"Ada\n"]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("```sh\nfalse\necho after\n```", "exit code 1, expected 0"),
        ("```sh\nfalse | true\n```", "exit code 1, expected 0"),
        ("```sh\ntrue\n```", "wrote no a.svg"),
        ("```python\n1 / 0\n```", "line 1, in <module>\n    1 / 0"),
        ("```python\nimport os\nos._exit(3)\n```", "Python exited with 3"),
    ],
)
def test_a_failure_names_the_line_and_the_output(block: str, message: str) -> None:
    with pytest.raises(PageError, match=message) as error:
        execute(pages.parse(f"\n\n{block}\n"), ["a.svg"])
    assert error.value.line == 3 and "after" not in str(error.value).split("echo after")[-1]


def test_another_exit_code_can_be_expected() -> None:
    failing = (
        "<!-- run: status 3 -->\n```sh\nexit 3\n```\n\n<!-- run: status 4 -->\n```python\nraise SystemExit(4)\n```\n"
    )
    execute(pages.parse(failing))
    with pytest.raises(PageError, match="exit code 3, expected 4"):
        execute(pages.parse(failing.replace("status 3", "status 4")))


def test_background_processes_end_with_their_block() -> None:
    began = time.monotonic()
    assert execute(pages.parse("```sh\nsleep 60 & echo started\n```"))[0] == ["started"]
    assert time.monotonic() - began < 30


def test_every_page_has_a_path() -> None:
    names = pages.page_names()
    assert {"README", "guides/train", "notebooks/attention"} <= set(names)
    assert all(pages.page_path(name).is_file() for name in [*names, "../README"])
    assert pages.page_path("../README").resolve() == Path(__file__).parents[2] / "README.md"
