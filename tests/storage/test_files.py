"""Atomic writes, locks and checksums."""

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


def fail(written: int, error: type[BaseException]) -> None:
    assert written
    raise error


def test_a_file_is_replaced_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    files.write_text(path, "old\n")
    with files.replacing(path) as file:
        file.write(b"new ")
        assert path.read_text() == "old\n"
        file.seek(0)
        assert file.read() == b"new "
        file.write(b"text")
    assert path.read_bytes() == b"new text"
    assert names(path.parent) == ["file"]


def test_a_failed_write_leaves_only_the_old_file(tmp_path: Path) -> None:
    files.write_bytes(tmp_path / "file", b"old")
    for error in (KeyboardInterrupt, OSError):
        with pytest.raises(error), files.replacing(tmp_path / "file") as file:
            fail(file.write(b"half"), error)
    assert (tmp_path / "file").read_bytes() == b"old" and names(tmp_path) == ["file"]
    with pytest.raises(IsADirectoryError):
        files.write_text(tmp_path, "a folder is there")
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))


def test_files_and_folders_have_default_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "usual").mkdir()
    files.write_text(tmp_path / "file", "")
    with files.replacing_folder(tmp_path / "folder"):
        pass
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes["file"] == modes["plain"] and modes["folder"] == modes["usual"]


def test_everything_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(handle: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name.split(".")[-1])
        fsync(handle)

    def record_rename(source: Path, target: Path) -> None:
        calls.append("renamed")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_rename)
    files.write_text(tmp_path / "file", "text")
    assert calls[1:] == ["renamed", tmp_path.name.split(".")[-1]]
    calls.clear()
    with files.replacing_folder(tmp_path / "folder") as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "one").write_text("1")
        (temporary / "two").write_text("2")
        (temporary / "link").symlink_to("two")
    at = calls.index("renamed")
    assert {"inner", "one", "two"} < set(calls[:at]) and "link" not in calls and len(calls[:at]) == 4
    assert calls[at + 1 :] == [tmp_path.name.split(".")[-1]]


def test_a_folder_is_replaced_or_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt), files.replacing_folder(tmp_path / "folder") as temporary:
        fail((temporary / "file").write_text("half"), KeyboardInterrupt)
    assert not names(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with files.replacing_folder(Path()) as temporary:
        (temporary / "file").write_text("complete")
    assert (tmp_path / "empty" / "file").read_text() == "complete"
    with pytest.raises(OSError, match="not empty"), files.replacing_folder(tmp_path / "empty"):
        pass
    assert names(tmp_path) == ["empty"] and names(tmp_path / "empty") == ["file"]


def test_a_link_is_replaced_atomically(tmp_path: Path) -> None:
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


def test_a_file_removed_before_it_is_locked_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    locks = iter([lambda: lock.unlink(), lambda: None])
    real_lock = files._lock

    def remove_then_lock(handle: int) -> None:
        next(locks)()
        real_lock(handle)

    monkeypatch.setattr(files, "_lock", remove_then_lock)
    with files.locked(lock):
        assert lock.exists()


def test_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(3500)
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr(files, "CHECKSUM_BYTES", 1000)
    chunks = [data[start : start + 1000] for start in range(0, 3500, 1000)]
    assert files.checksums(tmp_path / "file") == [hashlib.sha256(chunk).hexdigest() for chunk in chunks]
    (tmp_path / "file").write_bytes(b"")
    assert files.checksums(tmp_path / "file") == [hashlib.sha256(b"").hexdigest()]


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder", "too large"])
def test_only_small_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    match kind:
        case "a pipe":
            os.mkfifo(path)
        case "a device":
            path.symlink_to("/dev/zero")
        case "a folder":
            path.mkdir()
        case "too large":
            path.write_bytes(b"0" * 11)
    with pytest.raises(OSError, match=r"regular file|directory|11 bytes; the limit is 10"):
        files.read_bytes(path, limit=10)
    assert files.is_locked(path) is False


WRITER = """
import os, sys
from pathlib import Path
from weft.storage import files
replacing = files.replacing_folder if sys.argv[2] == "folder" else files.replacing
with replacing(Path(sys.argv[1])):
    print("begun", flush=True)
    sys.stdin.read()
    os._exit(1)  # no cleanup, as when killed
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_next_writer_removes_what_a_killed_process_left(tmp_path: Path, kind: str) -> None:
    """Files that a live process is writing stay, and so do files with similar names."""
    path = tmp_path / "target"
    (tmp_path / ".other.0123abcd").touch()
    (tmp_path / ".target.txt").touch()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "begun\n"
        files.sweep(tmp_path, path.name)
        files.write_text(path, "first")
        [leftover] = [other for other in tmp_path.glob(".target.*") if other.suffix != ".txt"]
        writer.communicate()
    assert leftover.exists()
    files.write_text(path, "second")
    assert names(tmp_path) == [".other.0123abcd", ".target.txt", "target"]
    files.sweep(tmp_path)
    assert names(tmp_path) == [".target.txt", "target"]


def test_reading_does_not_allocate_the_limit(tmp_path: Path) -> None:
    (tmp_path / "small").write_text("text")
    assert files.read_text(tmp_path / "small", limit=1 << 60) == "text"


@pytest.mark.parametrize("replaced", ["note", ""])
def test_a_file_replaced_by_a_link_after_the_check_is_not_opened(tmp_path: Path, replaced: str) -> None:
    folder, outside = tmp_path / "runs" / "one", tmp_path / "outside"
    for each in (folder, outside):
        each.mkdir(parents=True)
        (each / "note").write_text(each.name)
    (folder / "second").symlink_to("note")
    assert files.link_out(folder, folder.parent) is None and files.read_text(folder / "second") == "one"
    (folder / replaced).rename(tmp_path / "moved")
    (folder / replaced).symlink_to(outside / replaced)
    with pytest.raises(OSError, match="A link out of its folder"):
        files.read_text(folder / "note")
    assert files.read_text(outside / "note") == "outside"


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    link = tmp_path / "device"
    link.symlink_to(os.devnull)
    files.write_text(link, "lost")
    assert link.is_symlink() and link.is_char_device() and link.read_bytes() == b""


def test_a_pipe_is_written_to_only_under_its_name_in_dev(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    files.write_text(tmp_path / "pipe", "text")  # without a reader
    assert (tmp_path / "pipe").is_file() and (tmp_path / "pipe").read_text() == "text"
    reader, writer = os.pipe()
    files.write_text(Path(f"/dev/fd/{writer}"), "text")
    os.close(writer)
    with open(reader) as file:
        assert file.read() == "text"
