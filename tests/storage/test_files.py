"""Files that are whole or absent, locks and checksums."""

import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from weft.storage import files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stop(written: int, error: type[BaseException]) -> None:
    assert written
    raise error


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "file"
    files.write_text(place, "old\n")
    with files.replacing(place) as file:
        file.write(b"new ")
        assert place.read_text() == "old\n"
        file.seek(0)
        assert file.read() == b"new "
        file.write(b"text")
    assert place.read_bytes() == b"new text"
    assert names(place.parent) == ["file"]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    files.write_bytes(tmp_path / "file", b"old")
    for error in (KeyboardInterrupt, OSError):
        with pytest.raises(error), files.replacing(tmp_path / "file") as file:
            stop(file.write(b"half"), error)
    assert (tmp_path / "file").read_bytes() == b"old" and names(tmp_path) == ["file"]
    with pytest.raises(IsADirectoryError):
        files.write_text(tmp_path, "a folder is there")
    assert names(tmp_path.parent) == [tmp_path.name] or not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))


def test_files_and_folders_have_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "usual").mkdir()
    files.write_text(tmp_path / "file", "")
    with files.replacing_folder(tmp_path / "folder"):
        pass
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes["file"] == modes["plain"] and modes["folder"] == modes["usual"]


def test_everything_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def syncing(handle: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name.split(".")[-1])
        fsync(handle)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("renamed"), replace(a, b)))
    files.write_text(tmp_path / "file", "text")
    assert done[1:] == ["renamed", tmp_path.name.split(".")[-1]]
    done.clear()
    with files.replacing_folder(tmp_path / "folder") as beside:
        (beside / "inner").mkdir()
        (beside / "inner" / "one").write_text("1")
        (beside / "two").write_text("2")
        (beside / "link").symlink_to("two")
    at = done.index("renamed")
    assert {"inner", "one", "two"} < set(done[:at]) and "link" not in done and len(done[:at]) == 4
    assert done[at + 1 :] == [tmp_path.name.split(".")[-1]]


def test_a_folder_takes_its_place_or_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt), files.replacing_folder(tmp_path / "folder") as beside:
        stop((beside / "file").write_text("half"), KeyboardInterrupt)
    assert not names(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with files.replacing_folder(Path()) as beside:
        (beside / "file").write_text("whole")
    assert (tmp_path / "empty" / "file").read_text() == "whole"
    with pytest.raises(OSError, match="not empty"), files.replacing_folder(tmp_path / "empty"):
        pass
    assert names(tmp_path) == ["empty"] and names(tmp_path / "empty") == ["file"]


def test_a_link_is_replaced_in_one_step(tmp_path: Path) -> None:
    for target in ("one", "two"):
        files.replace_link(tmp_path / "latest", target)
        assert os.readlink(tmp_path / "latest") == target
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        files.replace_link(tmp_path / "folder", "one")
    assert names(tmp_path) == ["folder", "latest"]


HOLDER = """
import sys, time
from pathlib import Path
from weft.storage.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_holds_a_lock_until_it_ends(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError), files.locked(lock):
            pass
        other.kill()
        other.wait()
    with files.locked(lock):
        with pytest.raises(BlockingIOError), files.locked(lock):
            pass
        lock.unlink()
    assert not names(tmp_path)


def test_a_lock_on_a_file_that_was_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    real, removed = files._lock, []

    def late(handle: int) -> None:
        if not removed:
            removed.append(lock.unlink())
        real(handle)

    monkeypatch.setattr(files, "_lock", late)
    with files.locked(lock):
        assert lock.exists()


def test_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(3500)
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr(files, "CHECKSUM_BYTES", 1000)
    pieces = [data[start : start + 1000] for start in range(0, 3500, 1000)]
    assert files.checksums(tmp_path / "file") == [hashlib.sha256(piece).hexdigest() for piece in pieces]
    (tmp_path / "file").write_bytes(b"")
    assert files.checksums(tmp_path / "file") == [hashlib.sha256(b"").hexdigest()]


@pytest.mark.parametrize("how", ["a pipe", "a device", "a folder", "too large"])
def test_what_is_no_small_file_is_not_read(how: str, tmp_path: Path) -> None:
    place = tmp_path / "note.json"
    match how:
        case "a pipe":
            os.mkfifo(place)
        case "a device":
            place.symlink_to("/dev/zero")
        case "a folder":
            place.mkdir()
        case "too large":
            place.write_bytes(b"0" * 11)
    with pytest.raises(OSError, match=r"regular file|directory|11 bytes, where 10 are the most"):
        files.read_bytes(place, limit=10)
    assert files.is_locked(place) is False


WRITER = """
import os, sys
from pathlib import Path
from weft.storage import files
make = files.replacing_folder if sys.argv[2] == "folder" else files.replacing
with make(Path(sys.argv[1])) as place:
    print("begun", flush=True)
    sys.stdin.read()
    os._exit(1)  # as one that is killed
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_process_left_is_swept_by_who_writes_there_next(tmp_path: Path, kind: str) -> None:
    """But not what a living one is writing, nor what only looks like it."""
    place, other = tmp_path / "place", tmp_path / ".other.0123abcd"
    other.touch()
    (tmp_path / ".place.txt").touch()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(place), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "begun\n"
        files.sweep(tmp_path, place.name)
        files.write_text(place, "mine")
        left = [path.name for path in tmp_path.glob(".place.*") if path.suffix != ".txt"]
        assert len(left) == 1
        writer.communicate()
    assert (tmp_path / left[0]).exists()
    files.write_text(place, "mine again")
    assert names(tmp_path) == [".other.0123abcd", ".place.txt", "place"]
    files.sweep(tmp_path)
    assert names(tmp_path) == [".place.txt", "place"]


def test_reading_takes_the_memory_of_the_file_and_not_of_the_limit(tmp_path: Path) -> None:
    (tmp_path / "small").write_text("text")
    assert files.read_text(tmp_path / "small", limit=1 << 60) == "text"
