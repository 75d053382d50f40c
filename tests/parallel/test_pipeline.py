"""Layers divided into stages: the same losses, gradients, dropouts and features as one process's."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.later import Later
from tests.parallel.test_ranks import note, noted, together
from torch import distributed

from weft.data.batch import Batch, Source
from weft.errors import ConfigError, ModelError
from weft.layout import Layout
from weft.models import config as models
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.presets import preset
from weft.models.stack import Stack
from weft.nn import config, position_config
from weft.nn.dropout import row_keys
from weft.nn.init import empty_weights
from weft.objectives.masked import masked_loss
from weft.objectives.rows import head_output
from weft.objectives.tokens import token_loss
from weft.parallel import mesh, stages
from weft.parallel.passes import Work
from weft.parallel.ranks import Ranks
from weft.recipe.objective import NextToken
from weft.training.objective import Loss
from weft.training.precision import autocast

apply, pipelining = Later("weft.parallel.apply"), Later("weft.parallel.pipeline")
WORDS, ROWS, TIME, PARTS, FACTOR = 37, 8, 8, 4, 1 / 7

# ---- models, and what each is trained with


def _small(name: str, **changes: Any) -> Any:
    sizes = {"vocab_size": WORDS, "d_model": 16, "context": 16, "dropout": 0.1, "layers": 2}
    attention = config.Attention(heads=2, dropout=0.1)
    return preset(name).replace(**{**sizes, "attention": attention, **changes})


MODELS: dict[str, Any] = {
    "tied": _small("gpt-tiny", layers=3, head=models.LMHead(tied=True)),
    "untied": _small("llama-tiny", head=models.LMHead(tied=False)),
    "bert": _small("bert-tiny"),
    "classifier": _small("bert-tiny", layers=3, head=models.ClassificationHead(labels=3, dropout=0.2)),
    "translator": _small("vaswani-tiny"),
    "two tables": _small("vaswani-tiny", layers=3, encoder_layers=1, source_vocab_size=23),
    "biases": _small("vaswani-tiny", position=position_config.T5Bias()),
}


def _words(model: LanguageModel, features: torch.Tensor, batch: Batch) -> Loss:
    return token_loss(NextToken(smoothing=0.1), model, features, batch)


def _classes(model: LanguageModel, features: torch.Tensor, batch: Batch) -> Loss:
    logits = head_output(model, features, batch)
    loss = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum")
    return loss, len(logits), {"nll": loss.detach()}


LOSSES: dict[str, Callable[[LanguageModel, torch.Tensor, Batch], Loss]] = {"bert": masked_loss, "classifier": _classes}


def _batch(name: str) -> Batch:
    rng = torch.Generator().manual_seed(1)

    def draw(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=rng)

    batch = Batch(draw(WORDS, ROWS, TIME), draw(WORDS, ROWS, TIME), keys=row_keys(3, torch.arange(ROWS)))
    real = torch.arange(TIME) < draw(TIME, ROWS)[:, None] + 1
    if name == "bert":
        weight = torch.full((ROWS,), 0.7)
        pairs = {"next_sentence": draw(2, ROWS), "next_sentence_weight": weight, "segments": draw(2, ROWS, TIME)}
        return replace(batch, mask=real, loss_mask=real & (draw(2, ROWS, TIME) > 0), **pairs)
    if name == "classifier":
        return replace(batch, targets=draw(3, ROWS), mask=real)
    if isinstance(MODELS[name], models.EncoderDecoder):
        return replace(batch, source=Source(draw(23, ROWS, 6), torch.arange(6) < draw(6, ROWS)[:, None] + 1))
    return replace(batch, documents=draw(2, ROWS, TIME).cumsum(1))


# ---- against one process


def _divided(name: str, over: mesh.Mesh, whole: LanguageModel) -> tuple[Any, Any]:
    stages.check(MODELS[name], over.layout)
    with empty_weights():
        model = build(MODELS[name])
    parallel = apply.lay_out(model, over, "fp32", False)
    parallel.root.to_empty(device="cpu")
    parallel.fill(whole.named_parameters())
    assert parallel.pipeline is not None
    return parallel, parallel.pipeline


def _compared(name: str, over: mesh.Mesh, parts: int = PARTS, recompute: bool = False) -> dict[str, Any]:
    """How far a step and an evaluation are from one process's, relative to the largest number."""
    torch.manual_seed(0)
    whole, loss, batch = build(MODELS[name]), LOSSES.get(name, _words), _batch(name)
    parallel, pipeline = _divided(name, over, whole)
    whole.train()
    expected, _, extras = loss(whole, whole.read(batch), batch)
    (expected * FACTOR).backward()
    model = parallel.model.train()
    for module in model.modules():
        if isinstance(module, Stack):
            module.recompute = recompute
    each = ROWS // over.readers.ranks
    mine = batch._each(lambda rows: rows[over.readers.rank * each :][:each])
    sums = pipeline.backward(mine.split(parts), Work(loss, lambda loss: loss * FACTOR, nullcontext))
    parallel.collect()
    if not pipeline.stage.is_last:
        assert [float(found) for found in sums] == [0.0, 0.0]
    for ranks in (over.readers, pipeline.line):
        ranks.sum_(sums)
    errors = {"loss": float(abs(sums[0] / expected.detach() - 1)), "nll": float(abs(sums[1] / extras["nll"] - 1))}
    gradients = {path: p.grad for path, p in whole.named_parameters()}
    for path, part in parallel.local.items():
        assert (part.grad is None) == (gradients[path] is None), path
        for piece in parallel.geometries[path].pieces if part.grad is not None else ():
            errors[path] = _apart(piece.of(part.grad), piece.cut(gradients[path]))
    errors |= _evaluated(whole, model, pipeline, batch)
    worst = max(errors, key=lambda path: errors[path])
    return {"worst": [name, worst, errors[worst]], "names": list(parallel.local), "layers": list(pipeline.stage.layers)}


def _evaluated(whole: LanguageModel, model: LanguageModel, pipeline: Any, batch: Batch) -> dict[str, float]:
    """Of other sizes than those of the step."""
    whole.eval(), model.eval()
    some = batch._each(lambda rows: rows[:3])
    here = [path for path, _ in model.named_parameters()]
    features = model.read(some)
    with pipeline.whole_head(), torch.no_grad():
        outputs = model.head(features, some.mask)
    assert here == [path for path, _ in model.named_parameters()], "the head is gone again"
    with torch.no_grad():
        expected = whole.read(some)
        answers = whole.head(expected, some.mask)
    several = (outputs, answers) if isinstance(answers, tuple) else ((outputs,), (answers,))
    heads = [_apart(found, wanted) for found, wanted in zip(*several, strict=True)]
    return {"features": _apart(features, expected), "head": max(heads)}


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


# ---- two processes


def _two(ranks: Ranks, folder: Path, names: list[str]) -> None:
    over = mesh.build(Layout(pipeline=2), ranks, torch.device("cpu"))
    worst = [_compared(name, over)["worst"] for name in names]
    worst.append(_compared("translator", over, recompute=True)["worst"])
    found = _compared("tied", over, parts=1)  # the pipeline is never full
    torch.manual_seed(0)
    whole, parts = build(MODELS["untied"]), _batch("untied").split(PARTS)
    _, pipeline = _divided("untied", over, whole)
    narrow = _narrow(pipeline, parts, whole)
    passes, sent = _watched(pipeline)
    pipeline.backward(parts, Work(_words, lambda loss: loss, nullcontext))
    note(
        folder,
        ranks,
        worst=[*worst, found["worst"]],
        names=found["names"],
        layers=found["layers"],
        passes=list(passes),
        sent=dict(sent),
        narrow=narrow,
        refused=_refused(pipeline, parts),
    )
    ranks.wait()


def _watched(pipeline: Any) -> tuple[list[str], dict[str, int]]:
    """The order of the passes of a stage, and how many tensors it has sent and received."""
    passes: list[str] = []
    sent = {"isend": 0, "irecv": 0}
    stage, operation = pipelining._TorchStage, distributed.P2POp.__init__

    def watched(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def watching(self: Any, number: int, *given: Any, **named: Any) -> Any:
            passes.append(f"{name}{number}")
            return step(self, number, *given, **named)

        return watching

    def counted(self: Any, op: Any, tensor: torch.Tensor, *given: Any, **named: Any) -> None:
        sent[op.__name__] += tensor.dim() == 3  # torch sends numbers of its own to begin with
        operation(self, op, tensor, *given, **named)

    stage.forward_one_chunk = watched("F", stage.forward_one_chunk)  # type: ignore[method-assign]
    stage.backward_one_chunk = watched("B", stage.backward_one_chunk)  # type: ignore[method-assign]
    distributed.P2POp.__init__ = counted  # type: ignore[method-assign]
    return passes, sent


def _narrow(pipeline: Any, parts: list[Batch], whole: LanguageModel) -> list[float]:
    """The loss in bf16, of the stages and of one process."""
    device = torch.device("cpu")
    sums = pipeline.backward(parts, Work(_words, lambda loss: loss, lambda: autocast("bf16", device)))
    pipeline.line.sum_(sums)
    total = torch.zeros(())
    for part in parts:
        with autocast("bf16", device):
            total += _words(whole, whole.train().read(part), part)[0].detach()
    return [float(sums[0]), float(total)]


def _refused(pipeline: Any, parts: list[Batch]) -> list[str]:
    """What is said of parts of several sizes, of a step in which the model refuses what it reads, and of generating."""

    def step(parts: list[Batch]) -> Any:
        return pipeline.backward(parts, Work(_words, lambda loss: loss, nullcontext))

    lines = []
    refused = [lambda: step(_batch("tied").split(3)), lambda: pipeline.model.start(1, 4)]
    if pipeline.stage.is_first:  # the other one would wait for it
        refused.append(lambda: step([replace(part, tokens=part.tokens + 99) for part in parts]))
    for call in refused:
        with pytest.raises((ConfigError, ModelError)) as error:
            call()
        lines.append(str(error.value))
    return lines


# the translator is compared with recomputed blocks, the tied model with one part, the one with biases in four processes
SOME = ["untied", "bert", "classifier", "two tables"]


@pytest.mark.parametrize("names", [SOME, pytest.param([*MODELS], marks=pytest.mark.slow)], ids=["some", "every"])
def test_two_stages_train_as_one_process(tmp_path: Path, names: list[str]) -> None:
    assert together(_two, tmp_path, names) == [0, 0]
    found = noted(tmp_path)
    for one in found:
        for model, what, error in one["worst"]:
            assert error < 1e-5, f"{model}: {what} differs by {error}"
        assert one["narrow"][0] == one["narrow"][1]
    # every parameter is somewhere, and the tied table on both stages
    names = [set(one["names"]) for one in found]
    assert names[0] | names[1] == {name for name, _ in build(MODELS["tied"]).named_parameters()}
    assert names[0] & names[1] == {"embedding.weight"}
    assert [one["layers"] for one in found] == [[0], [1, 2]]
    # 1F1B: the first stage is one part ahead; a part's hidden states go on once, and their gradients come back once
    assert found[0]["passes"] == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    assert found[1]["passes"] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
    assert [one["sent"] for one in found] == [{"isend": PARTS, "irecv": PARTS}] * 2
    sizes, generating, unread = found[0]["refused"]
    assert sizes.startswith("parallel.pipeline = 2: the parts of a batch") and "2 and 3 rows" in sizes
    assert found[1]["refused"] == [sizes, generating] and "cannot generate" in generating
    assert "is outside the vocabulary" in unread


# ---- four processes


def _four(ranks: Ranks, folder: Path, divided: list[str], sequences: list[str]) -> None:
    cpu = torch.device("cpu")
    worst = []
    tensors = mesh.build(Layout(pipeline=2, tensor=2), ranks, cpu)
    worst += [_compared(name, tensors)["worst"] for name in divided]
    tokens = mesh.build(Layout(pipeline=2, tensor=2, sequence=True), ranks, cpu)
    worst += [_compared(name, tokens)["worst"] for name in sequences]
    copies = mesh.build(Layout(pipeline=2), ranks, cpu)
    worst.append(_compared("tied", copies, parts=2)["worst"])
    found = _compared("biases", mesh.build(Layout(pipeline=4), ranks, cpu))
    note(folder, ranks, worst=[*worst, found["worst"]], names=found["names"], copies=copies.readers.ranks)
    ranks.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("divided", "sequences"),
    [
        (["bert"], ["translator"]),
        pytest.param(["tied", "bert", "translator"], ["untied", "biases"], marks=pytest.mark.slow),
    ],
    ids=["some", "every"],
)
def test_four_processes_in_stages(tmp_path: Path, divided: list[str], sequences: list[str]) -> None:
    assert together(_four, tmp_path, divided, sequences, count=4) == [0] * 4
    found = noted(tmp_path, 4)
    for one in found:
        assert one["copies"] == 2
        for model, what, error in one["worst"]:
            assert error < 1e-5, f"{model}: {what} differs by {error}"
    names = [set(one["names"]) for one in found]
    assert set.union(*names) == {name for name, _ in build(MODELS["biases"]).named_parameters()}
    holders = {name: [stage for stage in range(4) if name in names[stage]] for name in set.union(*names)}
    assert holders["embedding.weight"] == [0, 2, 3]  # of the source, of the target, and tied to the output
    assert holders["encoder.position.weight"] == [0, 1] and holders["decoder.position.weight"] == [2, 3]
    assert holders["decoder.blocks.1.cross.kv.weight"] == [3]


# ---- one process


@pytest.mark.parametrize(
    ("model", "layout", "line"),
    [
        (MODELS["tied"], Layout(pipeline=4), "the model has 3 layers"),
        (MODELS["two tables"], Layout(pipeline=5), "the model has 4 layers"),
        (_small("bert-tiny", head=models.EmbeddingHead()), Layout(pipeline=2), "compares the rows of a batch"),
        (MODELS["tied"], Layout(pipeline=2, shard=2), "together with parallel.shard = 2"),
        (MODELS["tied"], Layout(pipeline=2, context=2), "together with parallel.context = 2"),
    ],
)
def test_what_has_no_stages_is_refused(model: Any, layout: Layout, line: str) -> None:
    with pytest.raises(ConfigError, match=rf"^parallel\.pipeline = {layout.pipeline}: .*{line}"):
        stages.check(model, layout)
    stages.check(model, layout.replace(pipeline=1))
