"""Helpers of the tests in this folder: load and run a file of lectures/, and compare its gradients with weft's."""

import importlib.util
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from torch import Tensor, nn

LECTURES = Path(__file__).parents[3] / "lectures"
TOLERANCE = 1e-5
NEGLIGIBLE = 1e-10  # absolute tolerance of gradients that are 0 but for rounding, such as those of the keys' biases
MAX_SECONDS = 300  # of CPU time per file: less than three minutes on two cores


def load(name: str) -> ModuleType:
    """Import lectures/NAME.py, so that processes it starts can import it too."""
    return load_file(LECTURES / f"{name}.py", f"lecture_{name}")


def load_file(path: Path, name: str) -> ModuleType:
    """Import a file as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: str) -> tuple[int, str, str]:
    """Run `python lectures/NAME.py ARGUMENTS`; return exit code, stdout and stderr."""
    before = os.times()
    done = subprocess.run([sys.executable, LECTURES / f"{name}.py", *arguments], capture_output=True, text=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < MAX_SECONDS, f"{name}.py took {used:.0f} s of CPU time"
    return done.returncode, done.stdout, done.stderr


def assert_refused(module: ModuleType, path: Path, problem: str) -> None:
    """Check for one line that names the file and the problem, and exit code 2."""
    out, err = io.StringIO(), io.StringIO()
    arguments = mock.patch.object(sys, "argv", ["lecture.py", str(path)])
    with arguments, redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        sys.exit(module.main() if module.main.__code__.co_argcount == 0 else module.main(sys.argv[1:]))
    assert (ended.value.code, out.getvalue()) == (2, "")
    assert err.getvalue().count("\n") == 1
    assert str(path) in err.getvalue() and problem in err.getvalue()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of a model's parameters, by name."""
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def assert_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that names agree, and gradients within 1e-5 relative to their largest coordinate."""
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        bound = TOLERANCE * float(expected[name].abs().max()) + NEGLIGIBLE
        difference = float((gradient - expected[name]).abs().max())
        assert difference <= bound, f"{name}: {difference:.1e}"
