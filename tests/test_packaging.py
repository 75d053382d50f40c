"""The wheel, the source archive, the dependencies and the public names."""

import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAX_WHEEL_BYTES, MAX_SDIST_BYTES = 5 << 20, 6 << 20
DEVELOPMENT_TOOLS = {"pytest", "mypy", "ruff", "hypothesis", "pre-commit", "transformers", "playwright", "hatchling"}
NAMES = sorted(
    ["Run", "__version__", "architecture", "beam", "check", "load", "plan", "prepare", "resume", "sampling", "train"]
    + [
        f"{name}Error"
        for name in ("Config", "Damage", "Data", "Diverged", "Interop", "Lost", "Model", "Run", "Tokenizer", "Weft")
    ]
)


def test_the_public_names_are_these() -> None:
    """Adding or removing a name belongs in the changelog."""
    assert sorted(weft.__all__) == NAMES
    for name in NAMES:
        assert getattr(weft, name) is not None
    assert dir(weft) == NAMES


def test_versions_agree() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert weft.__version__ == PROJECT["version"] == (cited and cited[1])


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert found
    return found[0].lower()


def test_a_plain_install_brings_no_tools() -> None:
    needed = {name_of(each) for each in PROJECT["dependencies"]}
    assert not needed & DEVELOPMENT_TOOLS
    assert {"torch", "fastapi", "uvicorn", "matplotlib"} <= needed  # train, explain and serve work immediately


def test_make_install_pins_every_version() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {name_of(line) for line in lines if not line.startswith("#")}
    extras = [each for name in ("dev", "notebooks") for each in PROJECT["optional-dependencies"][name]]
    required = {name_of(each) for each in [*PROJECT["dependencies"], *extras]} - {"weft"}
    assert {name.replace("_", "-") for name in required} <= {name.replace("_", "-") for name in pinned}


def test_workflows_and_templates_are_yaml_of_the_right_shape() -> None:
    yaml = pytest.importorskip("yaml")
    for path in (ROOT / ".github").rglob("*.yml"):
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict), path
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= cited.keys()
    test = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    commands = [step.get("run", "") for step in test["jobs"]["test"]["steps"]]
    assert {"make lint", "make test"} <= set(commands)


@pytest.mark.slow
def test_contents_of_the_wheel_and_the_source_archive(tmp_path: Path) -> None:
    if importlib.util.find_spec("hatchling") is None or not (ROOT / ".git").exists():
        pytest.skip("needs hatchling, and a checkout")
    for target in ("wheel", "sdist"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(tmp_path)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    tracked = [name for name in listed.stdout.splitlines() if not (ROOT / name).is_symlink()]  # an archive has no links
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/weft/")}
    site = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/weft/site").rglob("*") if path.is_file()}

    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        metadata = next(name for name in inside if name.endswith(".dist-info/METADATA"))
        requirements = archive.read(metadata).decode().splitlines()
    assert {name for name in inside if not name.startswith("weft-")} == package | site
    assert {"weft/py.typed", "weft/recipes/quickstart.toml", "weft/web/explorer.html"} <= inside
    plain = [line.removeprefix("Requires-Dist: ") for line in requirements if line.startswith("Requires-Dist: ")]
    assert not {name_of(line) for line in plain if "extra ==" not in line} & DEVELOPMENT_TOOLS
    assert wheel.stat().st_size < MAX_WHEEL_BYTES

    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("src/", "tests/", "lectures/", "benchmarks/", "docs/", "Makefile", "constraints.txt", "pyproject.toml")
    needed = {name for name in tracked if name.startswith(folders)}
    assert needed <= names
    assert names - set(tracked) <= {"PKG-INFO"}
    assert source.stat().st_size < MAX_SDIST_BYTES
