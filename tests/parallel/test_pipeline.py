"""Pipeline stages: the losses, gradients, dropouts and features of one process."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.later import Later
from tests.parallel.test_layouts import gradient_errors, shard_model
from tests.parallel.test_ranks import in_processes, note, noted
from tests.training.small import CPU
from torch import distributed

from weft.data.batch import Batch, Source
from weft.errors import ConfigError, ModelError
from weft.layout import Layout
from weft.models import config as models
from weft.models import head_config
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.presets import preset
from weft.models.stack import Stack
from weft.nn import config, position_config
from weft.nn.dropout import row_keys
from weft.objectives.masked import masked_loss
from weft.objectives.rows import head_output
from weft.objectives.tokens import token_loss
from weft.parallel import mesh
from weft.parallel.passes import LossFunction
from weft.parallel.ranks import Ranks
from weft.recipe.objective import NextToken
from weft.training.objective import Loss
from weft.training.precision import autocast

pipelining = Later("weft.parallel.pipeline")
VOCAB, ROWS, TIME, PARTS = 37, 8, 8, 4
ONE, SEVENTH = torch.ones(()), torch.tensor(1 / 7)  # gradients that backward passes begin with
PLAIN = nullcontext()

# ---- models, losses and batches


def _small(name: str, **changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "d_model": 16, "context": 16, "dropout": 0.1, "layers": 2}
    attention = config.Attention(heads=2, dropout=0.1)
    return preset(name).replace(**{**sizes, "attention": attention, **changes})


MODELS: dict[str, Any] = {
    "tied": _small("gpt-tiny", layers=3, head=head_config.LMHead(tied=True)),
    "untied": _small("llama-tiny", head=head_config.LMHead(tied=False)),
    "bert": _small("bert-tiny"),
    "classifier": _small("bert-tiny", layers=3, head=head_config.ClassificationHead(labels=3, dropout=0.2)),
    "translator": _small("vaswani-tiny"),
    "two tables": _small("vaswani-tiny", layers=3, encoder_layers=1, source_vocab_size=23),
    "biases": _small("vaswani-tiny", position=position_config.T5Bias()),
}


_token_loss = partial(token_loss, settings=NextToken(smoothing=0.1))


def _classify_loss(model: LanguageModel, features: torch.Tensor, batch: Batch) -> Loss:
    logits = head_output(model, features, batch)
    loss = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum")
    return loss, len(logits), {"nll": loss.detach()}


LOSSES: dict[str, LossFunction] = {"bert": masked_loss, "classifier": _classify_loss}


def _batch(name: str) -> Batch:
    rng = torch.Generator().manual_seed(1)

    def draw(end: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, end, shape, generator=rng)

    batch = Batch(draw(VOCAB, ROWS, TIME), draw(VOCAB, ROWS, TIME), keys=row_keys(3, torch.arange(ROWS)))
    real = torch.arange(TIME) < draw(TIME, ROWS)[:, None] + 1
    if name == "bert":
        weight = torch.full((ROWS,), 0.7)
        pairs: dict[str, Any] = {"next_sentence": draw(2, ROWS), "next_sentence_weight": weight}
        pairs["segments"] = draw(2, ROWS, TIME)
        return replace(batch, mask=real, loss_mask=real & (draw(2, ROWS, TIME) > 0), **pairs)
    if name == "classifier":
        return replace(batch, targets=draw(3, ROWS), mask=real)
    if isinstance(MODELS[name], models.EncoderDecoder):
        return replace(batch, source=Source(draw(23, ROWS, 6), torch.arange(6) < draw(6, ROWS)[:, None] + 1))
    return replace(batch, documents=draw(2, ROWS, TIME).cumsum(1))


# ---- against one process


def _compared(name: str, over: mesh.Mesh, parts: int = PARTS, recompute: bool = False) -> dict[str, Any]:
    """Return how far a step and an evaluation are from one process's, relative to the largest value."""
    torch.manual_seed(0)
    full, loss, batch = build(MODELS[name]), LOSSES.get(name, _token_loss), _batch(name)
    pipelining.check_stages(MODELS[name], over.layout)
    parallel = shard_model(MODELS[name], over, full)
    pipeline = parallel.pipeline
    full.train()
    expected, _, extras = loss(full, full.read(batch), batch)
    expected.backward(SEVENTH)
    model = parallel.model.train()
    for module in model.modules():
        if isinstance(module, Stack):
            module.recompute = recompute
    rows = ROWS // over.readers.ranks
    local = batch.map_tensors(lambda tensor: tensor[over.readers.rank * rows :][:rows])
    sums = parallel.backward(local.split(parts), loss, SEVENTH, autocast=PLAIN)
    parallel.finish_gradients()
    if not pipeline.stage.is_last:
        assert [float(total) for total in sums] == [0.0, 0.0]
    for ranks in (over.readers, pipeline.line):
        ranks.sum_(sums)
    errors = {"loss": float(abs(sums[0] / expected.detach() - 1)), "nll": float(abs(sums[1] / extras["nll"] - 1))}
    errors |= gradient_errors(parallel, full) | _evaluated(full, model, pipeline, batch)
    worst = max(errors, key=lambda path: errors[path])
    return {"worst": [name, worst, errors[worst]], "names": list(parallel.local), "layers": list(pipeline.stage.layers)}


def _evaluated(full: Any, model: Any, pipeline: Any, batch: Batch) -> dict[str, float]:
    """Return the errors of an evaluation, with another number of rows than the step."""
    full.eval(), model.eval()
    subset = batch.map_tensors(lambda rows: rows[:3])
    names = [name for name, _ in model.named_parameters()]
    features = model.read(subset)
    with pipeline.shared_head(), torch.no_grad():
        outputs = model.head(features, subset.mask)
    assert names == [name for name, _ in model.named_parameters()], "the head is removed again"
    with torch.no_grad():
        expected = full.read(subset)
        answers = full.head(expected, subset.mask)
    pairs = zip(outputs, answers, strict=True) if isinstance(answers, tuple) else [(outputs, answers)]
    return {"features": _error(features, expected), "head": max(_error(*pair) for pair in pairs)}


def _error(output: torch.Tensor, expected: torch.Tensor) -> float:
    assert output.shape == expected.shape
    return float((output - expected).abs().max() / expected.abs().max().clamp(min=1.0))


# ---- two processes


def _two(ranks: Ranks, folder: Path, names: list[str]) -> None:
    over = mesh.build(Layout(pipeline=2), ranks, CPU)
    worst = [_compared(name, over)["worst"] for name in names]
    worst.append(_compared("translator", over, recompute=True)["worst"])
    found = _compared("tied", over, parts=1)  # the pipeline is never full
    torch.manual_seed(0)
    full, parts = build(MODELS["untied"]), _batch("untied").split(PARTS)
    pipeline = shard_model(MODELS["untied"], over, full).pipeline
    narrow = _narrow(pipeline, parts, full)
    passes, sent = _watched()
    pipeline.backward(parts, _token_loss, ONE, autocast=PLAIN)
    found |= {"worst": [*worst, found["worst"]], "passes": list(passes), "sent": dict(sent), "narrow": narrow}
    note(folder, ranks, **found, refused=_refused(pipeline, parts))
    ranks.barrier()


def _watched() -> tuple[list[str], dict[str, int]]:
    """Record the order of a stage's passes, and the numbers of tensors that it sends and receives."""
    passes: list[str] = []
    sent = {"isend": 0, "irecv": 0}
    stage, operation = pipelining._NumberedStage, distributed.P2POp.__init__

    def watched(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def watching(self: Any, number: int, *args: Any, **kwargs: Any) -> Any:
            passes.append(f"{name}{number}")
            return step(self, number, *args, **kwargs)

        return watching

    def counted(self: Any, op: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        sent[op.__name__] += tensor.dim() == 3  # torch's first messages have fewer dimensions
        operation(self, op, tensor, *args, **kwargs)

    stage.forward_one_chunk = watched("F", stage.forward_one_chunk)
    stage.backward_one_chunk = watched("B", stage.backward_one_chunk)
    distributed.P2POp.__init__ = counted  # type: ignore[method-assign]
    return passes, sent


def _narrow(pipeline: Any, parts: list[Batch], full: LanguageModel) -> list[float]:
    """Return the loss in bf16 of the stages, and of one process."""
    bf16 = autocast("bf16", CPU)
    sums = pipeline.backward(parts, _token_loss, ONE, autocast=bf16)
    pipeline.line.sum_(sums)
    total = torch.zeros(())
    for part in parts:
        with bf16:
            total += _token_loss(full, full.train().read(part), part)[0].detach()
    return [float(sums[0]), float(total)]


def _refused(pipeline: Any, parts: list[Batch]) -> list[str]:
    """Return the messages for micro-batches of several sizes, for generating, and for invalid tokens."""

    def step(parts: list[Batch]) -> Any:
        return pipeline.backward(parts, _token_loss, ONE, autocast=PLAIN)

    lines = []
    refused = [lambda: step(_batch("tied").split(3)), lambda: pipeline.model.start(1, 4)]
    if pipeline.stage.number == 0:  # the other stage would wait for this one
        refused.append(lambda: step([replace(part, tokens=part.tokens + 99) for part in parts]))
    for call in refused:
        with pytest.raises((ConfigError, ModelError)) as error:
            call()
        lines.append(str(error.value))
    return lines


# `_two` has the translator with recomputation and the tied model with one micro-batch, `_four` the one with biases
SOME = ["untied", "bert", "classifier", "two tables"]


@pytest.mark.parametrize("names", [SOME, pytest.param([*MODELS], marks=pytest.mark.slow)], ids=["some", "every"])
def test_two_stages_train_as_one_process(tmp_path: Path, names: list[str]) -> None:
    assert in_processes(_two, tmp_path, names) == [0, 0]
    found = noted(tmp_path)
    for one in found:
        for model, what, error in one["worst"]:
            assert error < 1e-5, f"{model}: {what} differs by {error}"
        assert one["narrow"][0] == one["narrow"][1]
    # every parameter is on a stage, and the tied embedding on both
    first, second = (set(one["names"]) for one in found)
    assert first | second == {name for name, _ in build(MODELS["tied"]).named_parameters()}
    assert first & second == {"embedding.weight"}
    assert [one["layers"] for one in found] == [[0], [1, 2]]
    # 1F1B: the first stage is one micro-batch ahead; hidden states are sent once, and their gradients back once
    assert found[0]["passes"] == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    assert found[1]["passes"] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
    assert [one["sent"] for one in found] == [{"isend": PARTS, "irecv": PARTS}] * 2
    sizes, generating, unread = found[0]["refused"]
    assert sizes.startswith("parallel.pipeline = 2: all micro-batches of a step must") and "2 and 3 rows" in sizes
    assert found[1]["refused"] == [sizes, generating] and "cannot generate" in generating
    assert "is outside the vocabulary" in unread


# ---- four processes


def _four(ranks: Ranks, folder: Path, divided: list[str], sequences: list[str]) -> None:
    worst = []
    tensors = mesh.build(Layout(pipeline=2, tensor=2), ranks, CPU)
    worst += [_compared(name, tensors)["worst"] for name in divided]
    tokens = mesh.build(Layout(pipeline=2, tensor=2, sequence=True), ranks, CPU)
    worst += [_compared(name, tokens)["worst"] for name in sequences]
    copies = mesh.build(Layout(pipeline=2), ranks, CPU)
    worst.append(_compared("tied", copies, parts=2)["worst"])
    found = _compared("biases", mesh.build(Layout(pipeline=4), ranks, CPU))
    note(folder, ranks, worst=[*worst, found["worst"]], names=found["names"], copies=copies.readers.ranks)
    ranks.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("divided", "sequences"),
    [(["bert"], ["translator"]), (["tied", "bert", "translator"], ["untied", "biases"])],
    ids=["some", "every"],
)
def test_four_processes_in_stages(tmp_path: Path, divided: list[str], sequences: list[str]) -> None:
    assert in_processes(_four, tmp_path, divided, sequences, count=4) == [0] * 4
    found = noted(tmp_path, 4)
    for one in found:
        assert one["copies"] == 2
        for model, what, error in one["worst"]:
            assert error < 1e-5, f"{model}: {what} differs by {error}"
    names = [set(one["names"]) for one in found]
    assert set.union(*names) == {name for name, _ in build(MODELS["biases"]).named_parameters()}
    holders = {name: [stage for stage in range(4) if name in names[stage]] for name in set.union(*names)}
    assert holders["embedding.weight"] == [0, 2, 3]  # of the source, of the target, and tied to the LM head
    assert holders["encoder.position.weight"] == [0, 1] and holders["decoder.position.weight"] == [2, 3]
    assert holders["decoder.blocks.1.cross.kv.weight"] == [3]


# ---- one process


@pytest.mark.parametrize(
    ("model", "layout", "line"),
    [
        (MODELS["tied"], Layout(pipeline=4), "the model has 3 layers"),
        (MODELS["two tables"], Layout(pipeline=5), "the model has 4 layers"),
        (_small("bert-tiny", head=head_config.EmbeddingHead()), Layout(pipeline=2), "compares the rows of a batch"),
        (MODELS["tied"], Layout(pipeline=2, shard=2), "combined with parallel.shard = 2"),
        (MODELS["tied"], Layout(pipeline=2, context=2), "combined with parallel.context = 2"),
    ],
)
def test_models_and_layouts_without_stages_are_refused(model: Any, layout: Layout, line: str) -> None:
    with pytest.raises(ConfigError, match=rf"^parallel\.pipeline = {layout.pipeline}: .*{line}"):
        pipelining.check_stages(model, layout)
    pipelining.check_stages(model, layout.replace(pipeline=1))
