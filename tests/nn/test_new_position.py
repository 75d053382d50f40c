"""A new position encoding with weights is one settings class and one class; nothing else in the tree is edited."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

PACKAGE = Path(__file__).parents[2] / "src" / "weft"

SETTINGS = '''

class Bins(PositionConfig):
    """Trained vector for every `width` positions, and trained slope per head for the distance between tokens."""

    bounded: ClassVar[bool] = True
    kind: Literal["bins"] = "bins"
    width: PositiveInt = 4

    def parameters(self, sizes: Sizes) -> int:
        """Number of weights: vectors and slopes."""
        return -(-sizes.context // self.width) * sizes.d_model + sizes.heads
'''

CLASS = '''

class Bins(Position, settings=config.Bins):
    """Adds vectors to the embeddings and distances to the scores."""

    def __init__(self, settings: config.Bins, sizes: config.Sizes):
        super().__init__()
        self.width = settings.width
        self.weight = nn.Parameter(torch.empty(-(-sizes.context // settings.width), sizes.d_model))
        self.slopes = nn.Parameter(torch.empty(sizes.heads))

    def reset_parameters(self, init: Initialiser) -> None:
        """Draw vectors like embeddings, and set a small slope."""
        init.table(self.weight)
        nn.init.constant_(self.slopes, 0.1)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the vectors of bins to x (batch, time, d_model)."""
        return x + nn.functional.embedding(positions // self.width, self.weight)

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Bias (batch or 1, heads, time, source time)."""
        return -self.slopes[:, None, None] * (keys[:, None, :] - queries[:, :, None]).abs()[:, None]
'''

RECIPE = """
[model]
kind = "decoder"
vocab_size = 300
context = 32
layers = 2
d_model = 16
attention = {heads = 2}
feedforward = {kind = "plain", d_ff = 32}
norm = {kind = "layer"}
position = {kind = "bins", width = 3}

[tokenizer]
kind = "byte"
"""

# one process for building, planning, training and generating: most of the time goes into its start
SCRIPT = """
import contextlib, io
import torch
from weft.cli.main import run
from weft.errors import ConfigError
from weft.models.build import build
from weft.nn.position_config import Bins
from weft.recipe.resolve import resolve

settings = resolve("recipe.toml").model
assert isinstance(settings.position, Bins) and settings.position.width == 3
model = build(settings).eval()
assert all(parameter.isfinite().all() for parameter in model.parameters())
assert 0 < model.decoder.position.weight.std() < 0.04
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
tokens = torch.randint(0, settings.vocab_size, (2, 9))
whole = model(tokens)
state = model.start(2, 9)
steps = [model.step(part, state) for part in tokens.split([4, 1, 1, 3], dim=1)]
assert torch.allclose(whole, torch.cat(steps, dim=1), atol=1e-4)
print(sum(parameter.numel() for parameter in model.parameters()))
try:
    resolve("recipe.toml", ["model.position.kind=bin"])
except ConfigError as error:
    print(error)
assert run(["plan", "recipe.toml"]) == 0
out = io.StringIO()
with contextlib.redirect_stdout(out):
    train = ["train", "recipe.toml", "--data", "text.txt", "--run", "run", "steps=2", "checkpoint.every=1"]
    assert run([*train, "batch.size=2", "batch.length=16"]) == 0
    assert run(["generate", "run", "--prompt", "the frog", "--max-tokens", "4"]) == 0
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the package with the two classes, and a recipe that uses them."""
    root = tmp_path_factory.mktemp("tree")
    package = root / "src" / "weft"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in (("nn/position_config.py", SETTINGS), ("nn/position.py", CLASS)):
        with (package / file).open("a", encoding="utf-8") as handle:
            handle.write(text)
    (root / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    (root / "text.txt").write_text("the frog sat on the log and sang to the moon. " * 60, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def printed(tree: Path) -> str:
    """Output of the script."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "COLUMNS": "120"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plan_counts_its_weights(printed: str) -> None:
    built, _, plan = printed.split("\n\n")[0].split("\n", 2)
    rows = dict(re.findall(r"^(\w+) +([\d,]+)", plan, flags=re.MULTILINE))
    assert int(rows["positions"].replace(",", "")) == 11 * 16 + 2
    assert int(rows["all"].replace(",", "")) == int(built)


def test_it_is_trained_and_saved(tree: Path, printed: str) -> None:
    folders = (tree / "run" / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    for name in ("decoder.position.weight", "decoder.position.slopes"):
        assert first[name].isfinite().all()
        assert not torch.equal(first[name], second[name])


def test_an_unknown_kind_suggests_the_new_one(printed: str) -> None:
    assert "model.position.kind = 'bin': unknown kind; did you mean 'bins'" in printed.splitlines()[1]
