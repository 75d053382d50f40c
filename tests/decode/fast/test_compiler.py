"""C sources are compiled once, and what is damaged or untrusted is compiled again."""

import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.decode.fast.helpers import amplified

from weft.decode.config import Sampling
from weft.decode.fast import matmul, native
from weft.decode.fast.native_step import NativeStep
from weft.decode.fast.quantize import quantize
from weft.decode.generate import generate
from weft.models.presets import llama
from weft.native import compiler

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler")


@needs_compiler
def test_a_library_open_to_others_is_compiled_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in compiler.FLAGS))
    path = compiler.compiled(native.SOURCE, "a step")
    assert path.parent == empty_cache / "compiled" and [file.name for file in path.parent.iterdir()] == [path.name]
    first = path.stat()
    assert compiler.compiled(native.SOURCE, "a step").stat().st_mtime_ns == first.st_mtime_ns
    path.write_bytes(b"somebody else's")
    path.chmod(0o777)
    assert compiler.compiled(native.SOURCE, "a step").stat().st_size == first.st_size
    assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.unlink()
    match how:
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.touch()
        case "another program":
            path.write_bytes(Path("/bin/sh").read_bytes())
        case "a link":
            target = path.with_name("elsewhere.so")
            target.write_bytes(content)
            path.symlink_to(target)
        case "a pipe":
            os.mkfifo(path, 0o700)
        case "endless":
            path.symlink_to("/dev/zero")
    if path.is_file() and not path.is_symlink():
        path.chmod(0o700)


@needs_compiler
@pytest.mark.parametrize("how", ["truncated", "empty", "another program", "a link", "a pipe", "endless"])
def test_a_damaged_library_is_compiled_again(how: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_compile", lambda *arguments: b"a library" * 500)
    path = compiler.compiled(native.SOURCE, "a step")
    content = path.read_bytes()
    damage(path, how)
    assert compiler.compiled(native.SOURCE, "a step") == path
    assert path.read_bytes() == content and not path.is_symlink()


@pytest.mark.parametrize("how", ["a link", "open to all"])
def test_a_folder_that_others_can_write_to_is_not_trusted(how: str, empty_cache: Path) -> None:
    folder, other = empty_cache / "compiled", empty_cache / "other"
    other.mkdir()
    if how == "a link":
        folder.symlink_to(other)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    assert native.library() is None and not list(other.iterdir())


@needs_compiler
def test_flags_from_the_environment_are_part_of_the_name(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_nothing = Mock(return_value=b"a library")
    monkeypatch.setattr(compiler, "_compile", compile_nothing)
    paths = {compiler.compiled(native.SOURCE, "a step")}
    monkeypatch.setenv("WEFT_NATIVE_FLAGS", "-g -fsanitize=undefined")
    paths.add(compiler.compiled(native.SOURCE, "a step"))
    first, second = (call.args[0] for call in compile_nothing.call_args_list)
    assert len(paths) == 2 and second == [*first, "-g", "-fsanitize=undefined"]


@pytest.mark.parametrize("obstacle", ["no compiler", "one that fails", "disabled"])
def test_everything_works_without_it(obstacle: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if obstacle == "no compiler":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CC", raising=False)
    elif obstacle == "one that fails":
        monkeypatch.setattr(compiler.shutil, "which", lambda name: "/bin/false")
    else:
        monkeypatch.setenv("WEFT_NATIVE", "0")
    assert native.library() is None and not list(empty_cache.rglob("*.so"))
    model = amplified(llama(2, 96, 3, d_ff=160, context=40, vocab_size=50, kv_heads=1))
    assert not NativeStep.fits(model, model.start(1, 8))
    quantize(model, "int8")
    assert not any(isinstance(part, matmul.NativeMatmul) for part in model.modules())
    assert len(list(generate(model, [[1, 2]], Sampling(temperature=0.0, max_tokens=4)))) == 4
