from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.decode.fast import matmul, native
from weft.native import compiler


@pytest.fixture
def prefer_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose weft's C kernels whatever the clock says on a busy machine."""
    monkeypatch.setattr(matmul, "FIRST_CREDIT", 0.0)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder without compiled libraries, and a process that has loaded none."""

    def forget() -> None:
        for function in (compiler.load, native.library, matmul.works, matmul.seconds):
            function.cache_clear()

    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


@pytest.fixture
def older_cpu(request: pytest.FixtureRequest, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without instructions of newer CPUs: `request.param` is a compiler flag. Optimised less, to save time."""
    tuning = () if request.param.startswith("-march") else ("-march=native",)
    monkeypatch.setattr(compiler, "TUNING", ((*tuning, request.param),))
    monkeypatch.setattr(compiler, "FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in compiler.FLAGS))
    if native.library() is None:
        pytest.skip("the compiler does not know this flag")
