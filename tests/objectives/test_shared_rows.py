"""Several processes share the rows of a step: each makes its own, and together they are those of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.objectives.test_objectives import learn, rows, sentence, text, transformer
from torch import Tensor

from weft.data.batch import Batch, Source
from weft.parallel.ranks import Ranks
from weft.runs.folder import RunFolder
from weft.runs.lines import read_lines
from weft.training.loader import shared

ENCODER = transformer("encoder", head={"kind": "mlm+nsp"}, segments=2)
OBJECTIVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "masked": (ENCODER, {"size": 7}),
    "masked+next": (ENCODER, {"size": 7, "length": 40}),
    "spans": (transformer("encoder-decoder"), {"size": 7}),
    "pairs": (transformer("encoder-decoder"), {"tokens": 256}),
    "classify": (transformer("encoder"), {"size": 7}),
}


def fields(batch: Batch | Source) -> dict[str, Tensor]:
    """Every tensor of a batch by name."""
    found = {}
    for name, value in vars(batch).items():
        if isinstance(value, Source):
            found |= {f"source.{key}": tensor for key, tensor in fields(value).items()}
        elif isinstance(value, Tensor):
            found[name] = value
    return found


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_own_rows_are_a_part_of_all(tmp_path: Path, objective: str) -> None:
    model, batch = OBJECTIVES[objective]
    made = [{"text": sentence(n), "label": n % 2, "source": sentence(n, 2 + n % 9), "target": "x"} for n in range(60)]
    source = rows(tmp_path, made) if objective in ("pairs", "classify") else text(tmp_path)
    run = learn(
        tmp_path, source, model, objective={"kind": objective}, batch=batch, steps=1, schedule={"kind": "constant"}
    )
    loader, settled = run.objective.loader, RunFolder(run.path).settled_recipe()
    for step in (1, 4):
        for rank, part in enumerate(loader.batch(step).split(3)):
            own = shared(loader, settled, Ranks(rank, 3)).batch(step)
            assert (own.count, own.read) == (part.count, part.read)
            for name, tensor in fields(part).items():
                mine = fields(own)[name]
                kept = tensor[:, : mine.shape[1]] if tensor.dim() == 2 else tensor  # its own rows may need less padding
                assert torch.equal(mine, kept), name


def test_auto_begins_with_the_rows_of_a_step(tmp_path: Path) -> None:
    made = [{"text": sentence(n), "label": n % 2} for n in range(40)]
    batch = {"size": 6, "micro": "auto"}
    run = learn(tmp_path, rows(tmp_path, made), transformer("encoder"), objective={"kind": "classify"}, batch=batch)
    assert run.config.batch.micro == "auto"
    (event,) = [line for line in read_lines(RunFolder(run.path).events) if line["event"] == "preflight"]
    assert event["micro"] == 6
