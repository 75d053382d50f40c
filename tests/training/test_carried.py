"""Recurrent models that carry their state from row to row: the order of the text, training, resuming, evaluating."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.data import held
from tests.training.small import CPU, Corpus, loader, next_token_loss, resume, settled, small, train

from weft.data.sampler import Lanes
from weft.errors import ConfigError, DataError
from weft.evaluate.perplexity import Score, ScoringOptions, token_scores
from weft.models.build import build
from weft.models.config import Recurrent
from weft.nn.dropout import Dropout, RowRng, row_keys
from weft.nn.recurrent import CarriedState
from weft.parallel.passes import Parallel
from weft.recipe.config import SettledRecipe
from weft.recipe.resolve import resolve
from weft.recipe.unread import refuse_unread
from weft.training.step import OptimisationStep

LSTM = Recurrent(vocab_size=11, d_model=8, layers=2, cell="lstm")


@pytest.mark.parametrize(("tokens", "length", "lanes"), [(101, 5, 4), (1000, 7, 3), (41, 10, 4), (12, 11, 1)])
def test_lanes_read_the_text_in_order(tokens: int, length: int, lanes: int) -> None:
    order = Lanes(tokens, length, lanes, seed=3)
    for step in range(3 * order.steps):
        starts = order.starts(step)
        assert (starts >= 0).all() and (starts + length < tokens).all()
        if order.begins(step):
            assert (np.diff(starts) == order.span).all()
        else:
            np.testing.assert_array_equal(starts, order.starts(step - 1) + length)
    assert order.steps * length <= order.span < (order.steps + 1) * length + length
    with pytest.raises(DataError, match=r"4 rows of 5 that continue each other need 21"):
        Lanes(20, 5, 4)


@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
def test_two_windows_with_a_carried_state_equal_one(cell: str) -> None:
    torch.manual_seed(0)
    model = build(LSTM.replace(cell=cell)).eval()
    tokens = torch.randint(0, 11, (3, 12))
    whole = model.features(tokens)
    carried = CarriedState()
    first = model.features(tokens[:, :5], carried=carried)
    assert carried.state is not None and not carried.state.requires_grad
    second = model.features(tokens[:, 5:], carried=carried)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, atol=1e-6, rtol=1e-5)
    assert torch.equal(model.features(tokens), whole)  # from zeros again


@pytest.mark.parametrize(("tokens", "batch"), [(2, 4), (50, 4), (700, 4), (703, 3), (1400, 8)])
def test_scores_are_those_of_the_whole_text(tokens: int, batch: int) -> None:
    """With one lane the sum is that of one long row; with several, that of one row each."""
    torch.manual_seed(1)
    model = build(LSTM).eval()
    ids = np.random.default_rng(0).integers(0, 11, tokens)
    text = held.tokens(ids)
    score = Score.of(token_scores(model, text, ScoringOptions(5, batch, first=0, carry=True)), text)
    row = torch.tensor([0, *ids])
    lanes = max(1, min(batch, tokens // (64 * 5)))
    size, expected = tokens // lanes, 0.0
    for lane in range(lanes):
        end = (lane + 1) * size if lane < lanes - 1 else tokens
        part = row[lane * size : end + 1]
        logits = model(part[None, :-1])[0].detach()
        expected += float(torch.nn.functional.cross_entropy(logits.double(), part[1:], reduction="sum"))
    assert score.tokens == tokens
    assert score.nats == pytest.approx(expected, rel=1e-6)


def carried(*changes: str) -> SettledRecipe:
    sizes = ("model.d_model=16", "model.layers=2", "model.dropout=0.1", "batch.size=6", "batch.length=16")
    return settled("lstm", *sizes, "log.every=5", "evaluate.every=20", "checkpoint.every=5", *changes)


def checkpoint_tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    files = sorted((run / "checkpoints" / f"step-{step:08d}").rglob("*.safetensors"))
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, corpus: Corpus) -> None:
    recipe = carried("steps=20", "checkpoint.keep=9")
    for name in ("whole", "again"):
        train(recipe, tmp_path / name, corpus=corpus, quiet=True)
    for step in (15, 20):
        shutil.rmtree(tmp_path / "again" / "checkpoints" / f"step-{step:08d}")
    resume(tmp_path / "again", corpus=corpus, quiet=True)
    whole, again = checkpoint_tensors(tmp_path / "whole", 20), checkpoint_tensors(tmp_path / "again", 20)
    (states,) = (name for name in whole if name.endswith("states/carried"))
    assert whole[states].shape == (2, 2, 6, 16) and whole[states].abs().sum() > 0
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


def test_every_step_has_one_shape(corpus: Corpus) -> None:
    """So a GPU captures the step."""
    rows = loader(carried(), corpus)
    assert rows.even and len({rows.batch(step).tokens.shape for step in range(1, 60)}) == 1


def test_micro_batches_carry_their_rows(tmp_path: Path, corpus: Corpus) -> None:
    one, parts, fresh = (
        train(carried("steps=12", *changes), tmp_path / name, corpus=corpus, quiet=True).model.state_dict()
        for name, changes in {"one": (), "parts": ("batch.micro=2",), "fresh": ("batch.carry=false",)}.items()
    )
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, parts[name], atol=2e-5, rtol=1e-4, msg=name)
    assert not torch.allclose(one["embedding.weight"], fresh["embedding.weight"], atol=1e-3)


def test_states_that_are_not_finite_restart_from_zeros(tmp_path: Path, corpus: Corpus) -> None:
    model = train(carried("steps=3"), tmp_path / "run", corpus=corpus, quiet=True).model
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    step = OptimisationStep(Parallel(model), optimizer, next_token_loss, CPU, lanes=6)
    (batch,) = loader(carried(), corpus).parts(2)
    step([batch], 0.0)
    assert step.state.carried is not None
    step.state.carried[:, :, 2] = float("nan")
    step([batch], 0.0)
    after = step.state.carried
    assert after.isfinite().all() and not after[:, :, 2].any() and after[:, :, 3].any()
    assert not optimizer.state


def test_carrying_is_chosen_for_recurrent_models_of_one_text_alone() -> None:
    assert carried().batch.carry and small().batch.carry is None
    assert carried("batch.carry=false").batch.carry is False
    for preset, changes in (("gpt-tiny", []), ("lstm", ["data.document_mask=true"])):
        with pytest.raises(ConfigError, match=r"batch\.carry: only a recurrent model"):
            refuse_unread(resolve(preset, ["batch.carry=true", *changes]))


@pytest.mark.parametrize("keyed", [False, True], ids=["generator", "row keys"])
def test_variational_dropout_is_the_same_at_all_positions_of_a_row(keyed: bool) -> None:
    """Rows differ, and over many the dropped fraction is p."""
    drop = Dropout(0.4, variational=True)
    x = torch.ones(200, 6, 50)
    out = drop(x, RowRng(row_keys(7, torch.arange(200))) if keyed else None)
    assert torch.equal(out, out[:, :1].expand_as(out))
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert (out[:, 0] == 0).float().mean() == pytest.approx(0.4, abs=0.02)
    assert not torch.equal(out[0], out[1])


def test_variational_dropout_between_layers() -> None:
    """A row that is one document drops the same values as a row without documents."""
    torch.manual_seed(0)
    model = build(LSTM.replace(dropout=0.5, variational=True, layers=3)).train()
    tokens = torch.randint(0, 11, (4, 9))
    rng = RowRng(row_keys(3, torch.arange(4)))
    plain = model.features(tokens, rng=rng)
    documents = model.features(tokens, documents=torch.zeros(4, 9, dtype=torch.long), rng=rng)
    torch.testing.assert_close(plain, documents, atol=1e-6, rtol=1e-5)
    for dropout in model.get_submodule("between").children():
        assert isinstance(dropout, Dropout)
        dropout.variational = False
    assert not torch.allclose(model.features(tokens, rng=rng), plain, atol=1e-3)
