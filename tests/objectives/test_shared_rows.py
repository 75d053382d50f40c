"""Several processes divide the rows of a step: each makes its part, and together these are the rows of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.objectives.test_objectives import learn, rows, sentence, text, transformer
from tests.spread import spread
from tests.training.small import events
from torch import Tensor

from weft.data.batch import Batch, Source
from weft.parallel.ranks import Ranks
from weft.runs.folder import RunFolder
from weft.training.loader import shard_loader

ENCODER = transformer("encoder", head={"kind": "mlm+nsp"}, segments=2)
OBJECTIVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "masked": (ENCODER, {"size": 7}),
    "masked+next": (ENCODER, {"size": 7, "length": 40}),
    "spans": (transformer("encoder-decoder"), {"size": 7}),
    "pairs": (transformer("encoder-decoder"), {"tokens": 256}),
    "classify": (transformer("encoder"), {"size": 7}),
}


def fields(batch: Batch | Source) -> dict[str, Tensor]:
    """Return every tensor of a batch by name."""
    tensors: dict[str, Tensor] = {}
    for name, value in vars(batch).items():
        if isinstance(value, Source):
            tensors |= {f"source.{key}": tensor for key, tensor in fields(value).items()}
        elif isinstance(value, Tensor):
            tensors[name] = value
    return tensors


@pytest.mark.parametrize("objective", spread(OBJECTIVES, 2))
def test_local_rows_are_a_part_of_all(tmp_path: Path, objective: str) -> None:
    model, batch = OBJECTIVES[objective]
    data = [{"text": sentence(n), "label": n % 2, "source": sentence(n, 2 + n % 9), "target": "x"} for n in range(60)]
    source = rows(tmp_path, data) if objective in ("pairs", "classify") else text(tmp_path)
    settings: dict[str, Any] = {"batch": batch, "steps": 1, "schedule": {"kind": "constant"}}
    run = learn(tmp_path, source, model, objective={"kind": objective}, **settings)
    loader, settled = run.objective.loader, RunFolder(run.path).settled_recipe()
    for step in (1, 4):
        for rank, part in enumerate(loader.batch(step).split(3)):
            local = shard_loader(loader, settled, Ranks(rank, 3)).batch(step)
            assert (local.count, local.read) == (part.count, part.read)
            for name, tensor in fields(part).items():
                ours = fields(local)[name]
                expected = tensor[:, : ours.shape[1]] if tensor.dim() == 2 else tensor  # with less padding
                assert torch.equal(ours, expected), name


def test_auto_begins_with_the_rows_of_a_step(tmp_path: Path) -> None:
    examples = [{"text": sentence(n), "label": n % 2} for n in range(40)]
    batch = {"size": 6, "micro": "auto"}
    run = learn(tmp_path, rows(tmp_path, examples), transformer("encoder"), objective={"kind": "classify"}, batch=batch)
    assert run.config.batch.micro == "auto"
    (event,) = events(run.path, "preflight")
    assert event["micro"] == 6
