"""Muon over matrices that processes hold in parts: the updates of one process."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parallel.test_layouts import BOTH, check_errors, family, shard_model
from tests.parallel.test_ranks import in_processes, note
from tests.training.small import CPU

from weft.layout import Layout
from weft.models.build import build
from weft.parallel import mesh
from weft.parallel.ranks import Ranks
from weft.recipe.optimizer import Muon
from weft.training import optimizer


def _updates(ranks: Ranks, folder: Path, cases: list[tuple[str, dict[str, Any]]]) -> None:
    """Note how far the weights are from those of the full model after three of Muon's updates, one of them skipped."""
    import_module("weft.parallel.sharding").ROUND_ELEMENTS = 4000  # type: ignore[attr-defined]
    errors = []
    for name, sizes in cases:
        settings, generator = family(name), torch.Generator().manual_seed(2)
        torch.manual_seed(0)
        full = build(settings)
        parallel = shard_model(settings, mesh.build(Layout(**sizes), ranks, CPU), full)
        pair = optimizer.build(Muon(), full), optimizer.build(Muon(), parallel.model, parallel)
        for skip in (0.0, 1.0, 0.0):
            for key, parameter in full.named_parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                if (local := parallel.local.get(key)) is not None:
                    local.grad = torch.zeros_like(local)
                    for chunk in parallel.geometries[key].chunks:
                        chunk.of(local.grad).copy_(chunk.cut(parameter.grad))
            for each in pair:
                optimizer.set_rate(each, 0.01)
                optimizer.update(each, torch.tensor(2.0), torch.tensor(skip))
        found = [0.0]
        for key, local in parallel.local.items():
            for chunk in parallel.geometries[key].chunks:
                found.append(float((chunk.of(local) - chunk.cut(full.get_parameter(key))).abs().max()))
        errors.append([name, sizes, [max(found)]])
    note(folder, ranks, errors=errors)


AXES: list[dict[str, Any]] = [{"shard": 2}, {"tensor": 2}, {"context": 2}, {"pipeline": 2}]
UPDATED = [
    (name, sizes) for name in ("llama", "vaswani") for sizes in AXES if name == "llama" or "context" not in sizes
]
TWO_MORE: list[dict[str, Any]] = [{"replicate": 2, "shard": 2}, {"pipeline": 2, "tensor": 2}, {"pipeline": 2}, BOTH]
UPDATED_BY_FOUR = [("llama", {"shard": 4}), *(("llama", sizes) for sizes in TWO_MORE), ("vaswani", BOTH)]


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "count"), [(UPDATED, 2), (UPDATED_BY_FOUR, 4)])
def test_muons_updates_are_those_of_one_process(tmp_path: Path, cases: list[Any], count: int) -> None:
    assert in_processes(_updates, tmp_path, cases, count=count) == [0] * count
    check_errors(tmp_path, len(cases), count)
