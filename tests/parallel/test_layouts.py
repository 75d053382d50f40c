"""Sharded models: the gradients, the curve and the end of one process on any mesh; checkpoints fit any other."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.later import Later
from tests.parallel.test_ranks import in_processes, note, noted
from tests.spread import slow
from tests.training.small import CPU
from tests.training.test_elastic import SAME, curve, on_step, resumed, started
from torch import Tensor

from weft.errors import ConfigError
from weft.layout import Layout
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.presets import preset
from weft.nn.dropout import RowRng, row_keys
from weft.nn.init import empty_weights
from weft.nn.loss import linear_cross_entropy
from weft.nn.mask import AttentionMask, Mask
from weft.parallel import mesh
from weft.parallel.ranks import ALONE, Ranks
from weft.recipe.resolve import resolve
from weft.runs import checkpoint
from weft.runs.folder import RunFolder, open_run
from weft.storage.tensors import load

apply, debug = Later("weft.parallel.apply"), Later("torch.distributed.tensor.debug")


# ---- gradients of every family

SMALL = {"layers": 2, "d_model": 32, "vocab_size": 37, "dropout": 0.1}
PATTERN = [{"window": 3}, {"position": {"kind": "none"}}]
CAPPED = {"attention": {"heads": 4, "softcap": 0.5, "dropout": 0.1}, "head": {"kind": "lm", "softcap": 1.0}}
MIXTURE = {"kind": "experts", "experts": 4, "chosen": 2, "d_ff": 24, "bias": True, "shared": "added"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt-tiny", SMALL),
    "llama": ("llama-tiny", {**SMALL, "attention": {"heads": 4, "kv_heads": 2, "dropout": 0.1}}),
    "alibi": ("gpt-tiny", {**SMALL, "position": {"kind": "alibi"}}),
    "t5": ("gpt-tiny", {**SMALL, "position": {"kind": "t5"}}),
    "relative": ("gpt-tiny", {**SMALL, "position": {"kind": "relative"}}),
    "qk-norm": ("llama-tiny", {**SMALL, "attention": {"heads": 4, "qk_norm": {"kind": "rms"}}}),
    "parallel": ("llama-tiny", {**SMALL, "sublayers": "parallel", "pattern": PATTERN}),
    "sandwich": ("llama-tiny", {**SMALL, **CAPPED, "placement": "sandwich", "residual_scale": 0.5}),
    "bert": ("bert-tiny", SMALL),
    "vaswani": ("vaswani-tiny", SMALL),
    "mixture": ("moe-tiny", {"layers": 2, "d_model": 32, "vocab_size": 37, "feedforward": MIXTURE}),
    "lstm": ("lstm", {"layers": 2, "d_model": 16, "vocab_size": 37}),
    "bahdanau": ("bahdanau-tiny", {"d_model": 16, "d_embedding": 8, "d_attention": 8, "vocab_size": 37}),
}


def family(name: str) -> Any:
    base, changes = FAMILIES[name]
    return preset(base).replace(**changes)


def rows(settings: Any, subset: slice, keys: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return tokens, targets, and other inputs: a source with padding if the model reads one."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, settings.vocab_size, (2, 4, 8), generator=generator)
    mask = torch.ones(4, 8, dtype=torch.bool)
    mask[:, -3:] = False
    source = SimpleNamespace(tokens=tokens.flip(1)[subset], mask=mask[subset])
    reads = settings.kind in ("encoder-decoder", "bahdanau")
    inputs = {"rng": RowRng(keys[subset])} | ({"source": source} if reads else {})
    return tokens[subset], targets[subset], inputs


def loss_of(model: LanguageModel, batch: tuple[Tensor, Tensor, dict[str, Any]]) -> Tensor:
    tokens, targets, inputs = batch
    features = model.features(tokens, **inputs)
    return linear_cross_entropy(model.readout(features), targets)[0]  # type: ignore[arg-type]


def shard_model(settings: Any, over: mesh.Mesh, full: LanguageModel) -> Any:
    """Return the `ShardedParallel` of a model over a mesh, with the weights of `full`."""
    with empty_weights():
        model = build(settings)
    parallel = apply.lay_out(model, over, "fp32", compile_=False)
    parallel.root.to_empty(device=CPU)
    parallel.fill(full.named_parameters())
    return parallel


def gradient_errors(parallel: Any, full: LanguageModel, *, relative: bool = True) -> dict[str, float]:
    """Return the largest difference of each parameter's local gradient from that of the full model, `relative` to its
    largest value or absolute."""
    errors = {}
    for name, local in parallel.local.items():
        expected: Any = full.get_parameter(name).grad
        assert not local.numel() or (local.grad is None) == (expected is None), name
        for chunk in parallel.geometries[name].chunks if local.grad is not None else ():
            difference = (chunk.of(local.grad) - chunk.cut(expected)).abs().max()
            errors[name] = float(difference / (expected.abs().max().clamp(min=1e-3) if relative else 1.0))
    return errors


def _gradients(ranks: Ranks, folder: Path, cases: list[tuple[str, dict[str, Any]]]) -> None:
    """Note how far the loss, the gradients and their norm are from those of the full model, case by case."""
    errors = []
    for name, sizes in cases:
        settings, keys = family(name), row_keys(3, torch.arange(4))
        torch.manual_seed(0)
        full = build(settings).train()
        expected = loss_of(full, rows(settings, slice(None), keys))
        expected.backward()
        over = mesh.build(Layout(**sizes), ranks, CPU)
        parallel = shard_model(settings, over, full)
        parallel.model.train()
        rank, readers = over.readers.rank, over.readers.ranks
        batch = rows(settings, slice(rank * 4 // readers, (rank + 1) * 4 // readers), keys)
        loss = parallel.forward(lambda model: loss_of(model, batch))  # noqa: B023
        loss.backward()
        parallel.finish_gradients()
        total = loss.detach()
        over.counters.sum_([total])
        norm = torch.nn.utils.get_total_norm([p.grad for p in full.parameters() if p.grad is not None])
        found = [
            abs(float(total / expected.detach()) - 1.0),
            max(gradient_errors(parallel, full).values()),
            abs(float(parallel.gradient_norm(parallel.local.values()) / norm) - 1.0),
        ]
        errors.append([name, sizes, found])
    note(folder, ranks, errors=errors)


SEQUENCES = ("gpt", "llama", "bert", "vaswani", "t5", "qk-norm", "parallel", "sandwich")
# a few families over each axis
SOME = {
    "tensor": ("gpt", "relative", "bahdanau"),
    "sequence": ("llama", "sandwich"),
    "shard": ("vaswani",),
    "experts": ("mixture",),
}
EVERY = {
    "tensor": tuple(name for name in FAMILIES if name != "mixture"),
    "sequence": SEQUENCES,
    "shard": ("gpt", "vaswani", "lstm", "bahdanau"),
    "experts": ("mixture",),
}


def cases_of(names: dict[str, tuple[str, ...]]) -> list[tuple[str, dict[str, Any]]]:
    axes = {
        "tensor": {"tensor": 2},
        "sequence": {"tensor": 2, "sequence": True},
        "shard": {"shard": 2},
        "experts": {"experts": 2},
    }
    return [(name, sizes) for axis, sizes in axes.items() for name in names[axis]]


def _steps(ranks: Ranks, folder: Path) -> None:
    """Run the tests without training runs in the same processes."""
    _gradients(ranks, folder / "gradients", cases_of(SOME))
    _collectives(ranks, folder / "collectives")


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    (folder / "gradients").mkdir()
    (folder / "collectives").mkdir()
    assert in_processes(_steps, folder) == [0, 0]
    return folder


def check_errors(folder: Path, cases: int, processes: int = 2) -> None:
    for one in noted(folder, processes):
        assert len(one["errors"]) == cases
        for name, sizes, errors in one["errors"]:
            assert max(errors) < (1e-6 if "experts" in sizes else 1e-5), (name, sizes, errors)


def test_gradients_are_those_of_one_process(steps: Path) -> None:
    check_errors(steps / "gradients", len(cases_of(SOME)))


BOTH: dict[str, Any] = {"tensor": 2, "shard": 2}
TWO_AXES: list[tuple[str, dict[str, Any]]] = [("llama", {**BOTH, "sequence": True}), ("vaswani", BOTH)]


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "count"), [(cases_of(EVERY), 2), ([*TWO_AXES, ("bert", {"tensor": 2})], 4)])
def test_every_gradient_is_that_of_one_process(tmp_path: Path, cases: list[Any], count: int) -> None:
    assert in_processes(_gradients, tmp_path, cases, count=count) == [0] * count
    check_errors(tmp_path, len(cases), count)


# ---- collectives


def _collectives(ranks: Ranks, folder: Path) -> None:
    traffic = {}
    for sequence in (False, True):
        settings = family("gpt")
        torch.manual_seed(0)
        over = mesh.build(Layout(tensor=2, sequence=sequence), ranks, CPU)
        stack = shard_model(settings, over, build(settings)).model.train().decoder
        block, x = stack.blocks[1], torch.randn(2, 4 if sequence else 8, 32, requires_grad=True)
        for name, run in {
            "attention": lambda h: block.attention(h, causal_mask(stack, 8)),  # noqa: B023
            "feedforward": block.feedforward,
        }.items():
            with debug.CommDebugMode() as seen:
                y = run(x)
                forward = counts(seen)
                y.sum().backward()
            traffic[f"{name} {sequence}"] = [forward, counts(seen)]
    note(folder, ranks, traffic=traffic)


def causal_mask(stack: Any, time: int) -> AttentionMask:
    positions = torch.arange(time)[None]
    angles = stack.position.angles(positions, time, torch.float32)
    return AttentionMask(Mask(causal=True), stack.position, positions, keys=positions, angles=angles)


def counts(seen: Any) -> dict[str, int]:
    return {str(kind).rpartition(".")[2]: number for kind, number in seen.get_comm_counts().items() if number}


def test_collectives_are_megatrons(steps: Path) -> None:
    """One all-reduce in each pass of a block's halves; with `sequence` a reduce-scatter and an all-gather (Shoeybi et
    al. 2019, §3; Korthikanti et al. 2022, §4.2.2)."""
    once, twice = {"all_reduce": 1}, {"all_reduce": 2}
    pair = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
    pairs = dict.fromkeys(pair, 2)
    for one in noted(steps / "collectives"):
        for half in ("attention", "feedforward"):
            assert one["traffic"][f"{half} False"] == [once, twice]
            assert one["traffic"][f"{half} True"] == [pair, pairs]


# ---- whole runs

LONG = [*SAME, "model.attention.heads=4", "model.d_model=32", "batch.length=12"]
LONG += ["steps=8", "optimizer=muon", "log.every=1", "evaluate.every=4", "checkpoint.every=3"]  # few: they are slow
SHORT = [*LONG, "steps=4", "evaluate.every=2"]


def _runs(ranks: Ranks, folder: Path, runs: dict[str, list[str]]) -> None:
    for name, changes in runs.items():
        if ranks.leads:
            (folder / name).mkdir()
        started(ranks, folder / name, *SHORT, *changes)
        ranks.barrier()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    started(ALONE, folder, *LONG)
    return folder / "run"


def weights(run: Path) -> dict[str, Tensor]:
    return load(checkpoint.newest_good(RunFolder(run).checkpoints)[0] / "model.safetensors")


RUNS = {
    "shard": ["parallel.shard=2"],
    "sequence": ["parallel.tensor=2", "parallel.sequence=true", "batch.micro=16", "batch.recompute=true"],
    "pipeline": ["parallel.pipeline=2", "batch.micro=8"],
    "context": ["parallel.context=2"],
}
MORE_RUNS = {
    "tensor": ["parallel.tensor=2", "batch.recompute=true"],
    "tokens": ["parallel.tensor=2", "parallel.sequence=true", "batch.micro=16"],
}
ALL_RUNS = [slow((name, RUNS | MORE_RUNS)) for name in ("muon", "adamw")]


@pytest.mark.parametrize(("optimizer", "runs"), [slow(("muon", RUNS)), ("adamw", {"shard": RUNS["shard"]}), *ALL_RUNS])
def test_curves_are_those_of_one_process(tmp_path: Path, runs: dict[str, list[str]], optimizer: str) -> None:
    runs = {name: [*changes, f"optimizer={optimizer}"] for name, changes in runs.items()}
    started(ALONE, tmp_path, *SHORT, f"optimizer={optimizer}")
    expected, ends = curve(tmp_path / "run"), weights(tmp_path / "run")
    assert len(expected) == 4 + 2  # steps and evaluations
    assert in_processes(_runs, tmp_path, runs) == [0, 0]
    for name in runs:
        assert np.allclose(curve(tmp_path / name / "run"), expected, rtol=1e-5, atol=1e-6), name
        for key, value in weights(tmp_path / name / "run").items():
            torch.testing.assert_close(value, ends[key], rtol=1e-4, atol=2e-5, msg=f"{name} {key}")


class StoppedError(Exception):
    pass


def stop_at(step: int | None) -> None:
    def stop(number: int, *args: object) -> None:
        if number == step:
            raise StoppedError

    on_step(stop)


def _stopped(ranks: Ranks, folder: Path, changes: list[str], at: int) -> None:
    """Start a run and end it in the middle of step `at`."""
    stop_at(at)
    try:
        started(ranks, folder, *LONG, *changes)
    except StoppedError:
        return
    raise AssertionError("the run was not stopped")


def _resumed(ranks: Ranks, folder: Path, sizes: dict[str, Any], at: int | None = None) -> None:
    """Resume a run over another mesh, and stop it again in step `at`, if any."""
    if at is not None:
        stop_at(at)
    if ranks.leads:
        run = open_run(folder / "run")
        run.write_config(run.settled_recipe().replace(parallel=sizes))
    ranks.barrier()
    try:
        resumed(ranks, folder)
    except StoppedError:
        assert at is not None


@pytest.mark.slow
def test_a_run_continues_over_other_meshes(tmp_path: Path, straight: Path) -> None:
    """Four processes, then two, then one, which finishes it."""
    both = ["parallel.tensor=2", "parallel.shard=2"]
    assert in_processes(_stopped, tmp_path, both, 5, count=4) == [0] * 4
    found = checkpoint.newest_good(RunFolder(tmp_path / "run").checkpoints)[0]
    assert checkpoint.step_of(found) == 4
    assert in_processes(_resumed, tmp_path, {"shard": 2}, 3) == [0, 0]
    assert checkpoint.step_of(checkpoint.newest_good(RunFolder(tmp_path / "run").checkpoints)[0]) == 6
    _resumed(ALONE, tmp_path, {})
    assert np.allclose(curve(tmp_path / "run"), curve(straight), rtol=1e-5, atol=1e-6)
    for key, value in weights(tmp_path / "run").items():
        torch.testing.assert_close(value, weights(straight)[key], rtol=1e-4, atol=2e-5, msg=key)


def _twice(ranks: Ranks, folder: Path, axis: str) -> None:
    """Train a run without stops, and one that is stopped and resumed over the same mesh."""
    sizes = [f"parallel.{axis}={ranks.ranks}"]
    if ranks.leads:
        (folder / "whole").mkdir()
        (folder / "cut").mkdir()
    ranks.barrier()
    started(ranks, folder / "whole", *LONG, *sizes)
    ranks.barrier()
    _stopped(ranks, folder / "cut", sizes, 6)
    stop_at(None)
    ranks.barrier()
    _resumed(ranks, folder / "cut", {axis: ranks.ranks})


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "count"), [("tensor", 2), ("replicate", 4)])
def test_a_run_resumes_to_the_bit_on_its_own_mesh(tmp_path: Path, axis: str, count: int) -> None:
    assert in_processes(_twice, tmp_path, axis, count=count) == [0] * count
    assert curve(tmp_path / "cut/run") == curve(tmp_path / "whole/run")
    whole, cut = weights(tmp_path / "whole/run"), weights(tmp_path / "cut/run")
    assert whole.keys() == cut.keys() and all(torch.equal(whole[key], cut[key]) for key in whole)


# ---- refused layouts


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["parallel.tensor=3"], "parallel.tensor = 3: model.attention.heads = 4 can't be divided by it; choose one of"),
        (["parallel.sequence=true"], "parallel.sequence: sequence parallelism extends tensor parallelism"),
        (["model=lstm", "parallel.pipeline=2"], "parallel.pipeline: only a Transformer can be split this way"),
        (["parallel.shard=2", "batch.micro=auto"], "batch.micro = 'auto'"),
        (["parallel.tensor=0"], "parallel.tensor = 0"),
        (["parallel.expert=2"], "parallel.expert"),
    ],
)
def test_invalid_layouts_are_refused(changes: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve("gpt-tiny", changes)
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_sizes_must_multiply_to_the_number_of_processes() -> None:
    assert Layout(tensor=2).over(8).replicate == 4
    assert Layout(replicate=2, shard=2, tensor=2).over(8).sizes["shard"] == 2
    for layout, processes in ((Layout(tensor=3), 8), (Layout(replicate=2, tensor=2), 8), (Layout(shard=4), 1)):
        with pytest.raises(ConfigError, match=r"^parallel: .* needs .*, but there (is|are) \d+; start that many"):
            layout.over(processes)
