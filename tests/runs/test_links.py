"""A run from elsewhere may hold links: nothing is written or removed through them."""

import shutil
from pathlib import Path

import pytest

from weft.cli.main import run
from weft.errors import RunError
from weft.runs import checkpoint
from weft.runs.folder import RunFolder, held

EARLIER = Path(__file__).parent.parent / "api" / "runs-0.1" / "gpt"
WRITTEN = (
    "events.jsonl", "timings.jsonl", "metrics.jsonl", "report.html", "config.toml", "tokenizer.json", "base.json",
    ".lock", ".preflight", "checkpoints", "data", "tensorboard",
)  # fmt: skip


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return shutil.copytree(EARLIER, tmp_path / "run", symlinks=True)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("there", [True, False])
def test_what_is_written_is_no_link(name: str, there: bool, theirs: Path, tmp_path: Path) -> None:
    place, outside = theirs / name, tmp_path / "outside"
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    if there and place.suffix:
        outside.write_text("precious")
    elif there:
        outside.mkdir()
        (outside / "kept.txt").write_text("precious")
    place.symlink_to(outside)
    message = f"{name}: a link, through which weft would write outside the run"
    with pytest.raises(RunError, match=message), held(RunFolder(theirs)):
        pass
    assert outside.exists() == there
    assert not there or "precious" in (outside if outside.is_file() else outside / "kept.txt").read_text()


def test_links_inside_folders_are_found(theirs: Path, tmp_path: Path) -> None:
    (theirs / "data").mkdir(exist_ok=True)
    for folder in ("data", "checkpoints"):
        (theirs / folder / "part").symlink_to(tmp_path)
        with pytest.raises(RunError, match=f"{folder}/part: a link"), held(RunFolder(theirs)):
            pass
        (theirs / folder / "part").unlink()
    with held(RunFolder(theirs)):  # latest and best are links
        pass


def test_resuming_refuses_in_one_line(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (theirs / "events.jsonl").unlink()
    (theirs / "events.jsonl").symlink_to(tmp_path / "written-outside")
    assert run(["train", "--resume", str(theirs)]) == 2
    assert "events.jsonl: a link" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "written-outside").exists()


@pytest.mark.parametrize("target", ["elsewhere", "step-00000002", "."])
def test_a_checkpoint_that_is_a_link_is_one_line(
    target: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = theirs / "checkpoints"
    (folder / "elsewhere").mkdir()
    (folder / "step-00000002").mkdir()
    (folder / "step-99999999").symlink_to(target)
    with pytest.raises(RunError, match="step-99999999: a link, where weft keeps a checkpoint"):
        checkpoint.checkpoints(folder)
    assert run(["generate", str(theirs), "--prompt", "a", "--max-tokens", "1"]) == 2
    assert "step-99999999: a link" in capsys.readouterr().err.splitlines()[-1]
