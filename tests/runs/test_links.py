"""An untrusted run may hold links: nothing is written or removed through them."""

import shutil
from pathlib import Path

import pytest

from weft.cli.main import run
from weft.errors import RunError
from weft.runs import checkpoint
from weft.runs.folder import RunFolder, lock_run

EARLIER = Path(__file__).parent.parent / "api" / "runs-0.1" / "gpt"
WRITTEN = (
    "events.jsonl", "timings.jsonl", "metrics.jsonl", "report.html", "config.toml", "tokenizer.json", "base.json",
    ".lock", ".preflight", "checkpoints", "data", "tensorboard",
)  # fmt: skip


@pytest.fixture
def untrusted(tmp_path: Path) -> Path:
    return shutil.copytree(EARLIER, tmp_path / "run", symlinks=True)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("exists", [True, False])
def test_nothing_is_written_through_a_link(name: str, exists: bool, untrusted: Path, tmp_path: Path) -> None:
    path, outside = untrusted / name, tmp_path / "outside"
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if exists and path.suffix:
        outside.write_text("precious")
    elif exists:
        outside.mkdir()
        (outside / "kept.txt").write_text("precious")
    path.symlink_to(outside)
    message = f"{name}: a link, through which weft would write outside the run"
    with pytest.raises(RunError, match=message), lock_run(RunFolder(untrusted)):
        pass
    assert outside.exists() == exists
    assert not exists or "precious" in (outside if outside.is_file() else outside / "kept.txt").read_text()


def test_links_inside_folders_are_refused(untrusted: Path, tmp_path: Path) -> None:
    (untrusted / "data").mkdir(exist_ok=True)
    for folder in ("data", "checkpoints"):
        (untrusted / folder / "part").symlink_to(tmp_path)
        with pytest.raises(RunError, match=f"{folder}/part: a link"), lock_run(RunFolder(untrusted)):
            pass
        (untrusted / folder / "part").unlink()
    with lock_run(RunFolder(untrusted)):  # latest and best are links
        pass


def test_resuming_refuses_in_one_line(untrusted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (untrusted / "events.jsonl").unlink()
    (untrusted / "events.jsonl").symlink_to(tmp_path / "written-outside")
    assert run(["train", "--resume", str(untrusted)]) == 2
    assert "events.jsonl: a link" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "written-outside").exists()


@pytest.mark.parametrize("target", ["elsewhere", "step-00000002", "."])
def test_a_checkpoint_that_is_a_link_is_refused_in_one_line(
    target: str, untrusted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = untrusted / "checkpoints"
    (folder / "elsewhere").mkdir()
    (folder / "step-00000002").mkdir()
    (folder / "step-99999999").symlink_to(target)
    with pytest.raises(RunError, match="step-99999999: a link, where weft expects a checkpoint"):
        checkpoint.checkpoints(folder)
    assert run(["generate", str(untrusted), "--prompt", "a", "--max-tokens", "1"]) == 2
    assert "step-99999999: a link" in capsys.readouterr().err.splitlines()[-1]
