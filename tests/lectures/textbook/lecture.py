"""How the tests beside this file load and run one of lectures/, and how its gradients are held against weft's."""

import importlib.util
import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from torch import Tensor

LECTURES = Path(__file__).parents[3] / "lectures"
TOLERANCE = 1e-5
NEGLIGIBLE = 1e-10  # a gradient that is 0 but for rounding, as that of the keys' biases
MAX_SECONDS = 300  # of processor time: three minutes on two cores


def load(name: str) -> ModuleType:
    """lectures/NAME.py as a module, which processes that it starts can import too."""
    spec = importlib.util.spec_from_file_location(f"lecture_{name}", LECTURES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: str) -> tuple[int, str, str]:
    """`python lectures/NAME.py ARGUMENTS`: exit code, stdout, stderr."""
    before = os.times()
    done = subprocess.run([sys.executable, LECTURES / f"{name}.py", *arguments], capture_output=True, text=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < MAX_SECONDS, f"{name}.py took {used:.0f} s of processor time"
    return done.returncode, done.stdout, done.stderr


def assert_refused(module: ModuleType, path: Path, problem: str) -> None:
    """One line that names the file and the problem, and exit code 2."""
    out, err = io.StringIO(), io.StringIO()
    arguments = mock.patch.object(sys, "argv", ["lecture.py", str(path)])
    with arguments, redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        module.main()
    assert (ended.value.code, out.getvalue()) == (2, "")
    assert err.getvalue().count("\n") == 1
    assert str(path) in err.getvalue()
    assert problem in err.getvalue()


def assert_figure(module: ModuleType, printed: str, pattern: str, rel: float) -> None:
    """The number that `pattern` finds in the docstring's figure is the last that it finds in what was printed."""
    assert module.__doc__ is not None
    figure = module.__doc__[module.__doc__.index("Figure:") :]
    stated, measured = re.findall(pattern, figure), re.findall(pattern, printed)
    assert stated, figure
    assert measured, printed
    assert float(measured[-1]) == pytest.approx(float(stated[0]), rel=rel)


def assert_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and each gradient within 1e-5 of the other, relative to its largest coordinate."""
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        bound = TOLERANCE * float(expected[name].abs().max()) + NEGLIGIBLE
        difference = float((gradient - expected[name]).abs().max())
        assert difference <= bound, f"{name}: {difference:.1e}"
