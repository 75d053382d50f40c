"""AWD-LSTM (Merity et al. 2018): dropped weights and words, a narrow last layer, varied rows, and penalties."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.training.small import Corpus, TextInMemory, next_token_loss, resume, settled, train
from torch.nn import functional as F

from weft.costs.count import count
from weft.data.batch import Batch
from weft.data.sampler import Lanes
from weft.errors import ConfigError
from weft.explain.interventions.cells import unrolled
from weft.models.build import build
from weft.models.config import Recurrent as Settings
from weft.models.recurrent import Recurrent
from weft.nn.dropout import RowRng, row_keys
from weft.nn.recurrent import CarriedState
from weft.recipe.config import SettledRecipe
from weft.recipe.resolve import resolve

V = 13
AWD = Settings(
    vocab_size=V, layers=2, d_model=10, d_embedding=6, d_last=6, tied=True, weight_drop=0.4, word_dropout=0.3
)


def rng(rows: int, first: int = 0) -> RowRng:
    keys = row_keys(3, torch.arange(first, first + rows))
    return RowRng(keys, step=torch.full((rows,), 77, dtype=torch.int32))


def tokens(rows: int = 4, time: int = 9) -> torch.Tensor:
    return torch.randint(V, (rows, time), generator=torch.Generator().manual_seed(1))


def make(settings: Settings = AWD) -> Recurrent:
    torch.manual_seed(0)
    return build(settings)


def lstm(model: Recurrent, tokens: torch.Tensor, rng: RowRng) -> torch.Tensor:
    """Hidden states of the formula, token by token, with masks of weights and words from the step's key."""
    words = model.word_dropout(torch.ones(1, V, 1), rng.of_step())[0]
    x = (model.embedding.weight * words)[tokens]
    for layer, (W, U, b, c) in enumerate(model.recurrence.all_weights):
        dropped, outputs = model.weight_drop[layer](U[None], rng.of_step())[0], []
        assert 0.2 < (dropped == 0).float().mean() < 0.6
        h = cell = x.new_zeros(len(x), U.shape[1])
        for t in range(x.shape[1]):
            i, f, g, o = (F.linear(x[:, t], W, b) + F.linear(h, dropped, c)).chunk(4, dim=-1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            h = o.sigmoid() * cell.tanh()
            outputs.append(h)
        x = torch.stack(outputs, 1)
    return x


def test_dropped_weights_and_words_follow_the_formula() -> None:
    model = make().train()
    features = model.features(tokens(), rng=rng(4))
    expected = lstm(model, tokens(), rng(4))
    assert features.shape == (4, 9, 6)
    torch.testing.assert_close(features, expected, atol=1e-6, rtol=1e-5)
    names, weights = zip(*model.named_parameters(), strict=True)
    ours = torch.autograd.grad(features.square().sum(), weights[1:])
    theirs = torch.autograd.grad(expected.square().sum(), weights[1:])
    torch.testing.assert_close(dict(zip(names[1:], ours, strict=True)), dict(zip(names[1:], theirs, strict=True)))


def test_rows_share_the_masks_however_they_are_divided() -> None:
    model, x = make(AWD.replace(variational=True, dropout=0.3)).train(), tokens()
    whole = model.features(x, rng=rng(4))
    parts = [model.features(x[:1], rng=rng(1)), model.features(x[1:], rng=rng(3, first=1))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(model.features(x, rng=rng(4)._replace(step=rng(4).keys)), whole)
    assert not torch.allclose(model.features(x), model.features(x))  # torch's generator, without keys
    assert torch.equal(model.eval().features(x, rng=rng(4)), model.features(x))


def test_a_narrow_last_layer_carries_its_state() -> None:
    model, x, carried = make().eval(), tokens(), CarriedState()
    first = model.features(x[:, :4], carried=carried)
    assert carried.state is not None and carried.state.shape == (2, 2, 4, 10)
    assert not carried.state[:, 1, :, 6:].any() and carried.state[:, 0].all()
    second = model.features(x[:, 4:], carried=carried)
    torch.testing.assert_close(torch.cat([first, second], 1), model.features(x), atol=1e-6, rtol=1e-5)
    state = model.start(4, 9)
    stepped = torch.cat([model.step(x[:, :4], state), model.step(x[:, 4:], state)], 1)
    torch.testing.assert_close(stepped, model(x), atol=1e-6, rtol=1e-5)
    layers = unrolled(model.recurrence, model.embedding(x).transpose(0, 1))
    torch.testing.assert_close(layers[-1].states[:, 0].transpose(0, 1), model.features(x), atol=1e-6, rtol=1e-5)
    documents = torch.tensor([[0] * 4 + [1] * 5] * 4)
    apart = torch.cat([model.features(x[:, :4]), model.features(x[:, 4:])], 1)
    torch.testing.assert_close(model.features(x, documents=documents), apart, atol=1e-6, rtol=1e-5)


def test_the_sizes_are_those_of_the_paper() -> None:
    settings = resolve("awd-lstm", []).model
    assert sum(part.parameters for part in count(settings).components) == 24_221_600  # "24M", table 1
    tiny = resolve("awd-lstm-tiny", ["tokenizer=byte", f"model.vocab_size={V}"]).model
    assert sum(p.numel() for p in build(tiny).parameters()) == sum(part.parameters for part in count(tiny).components)


def test_varied_rows_read_the_text_in_order() -> None:
    order, plain, widths = Lanes(3001, 28, 3, seed=1, varied=True), Lanes(3001, 28, 3, seed=1), set()
    for step in range(3 * order.steps):
        starts, width = order.starts(step), order.width(step)
        assert (starts >= 0).all() and (starts + width < 3001).all()
        if order.begins(step):
            np.testing.assert_array_equal(starts, plain.starts(step))
        else:
            np.testing.assert_array_equal(starts, order.starts(step - 1) + order.width(step - 1))
        widths.add(width)
    assert widths == set(range(20, 37, 2)) and {plain.width(step) for step in range(99)} == {28}
    assert [order.width(step) for step in range(35)] != [order.width(step + order.steps) for step in range(35)]


def test_the_penalties_are_means_over_the_output() -> None:
    model, x, targets = make().eval(), tokens(), tokens()
    recipe = awd("objective.activation_penalty=2", "objective.temporal_penalty=0.5", f"model.vocab_size={V}")
    objective = TextInMemory(recipe, [])
    batch, features = Batch(x, targets), model.features(x)
    loss, number, extras = objective.loss(model, features, batch)
    plain, _, _ = next_token_loss(model, features, batch)
    change = (features[:, 1:] - features[:, :-1]).square().mean()
    torch.testing.assert_close(loss, plain + 36 * (2 * features.square().mean() + 0.5 * change))
    assert number == 36 and extras["nll"].item() == pytest.approx(plain.item())


def awd(*changes: str) -> SettledRecipe:
    model = ("d_model=16", "d_embedding=8", "d_last=8", "dropout=0.2")
    sizes = (*(f"model.{setting}" for setting in model), "batch.size=6", "batch.length=28", "batch.vary_length=true")
    penalties = ("objective.activation_penalty=2", "objective.temporal_penalty=1")
    return settled(
        "awd-lstm-tiny", *sizes, *penalties, "log.every=5", "evaluate.every=20", "checkpoint.every=5", *changes
    )


def checkpoint_tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    files = sorted((run / "checkpoints" / f"step-{step:08d}").rglob("*.safetensors"))
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, corpus: Corpus) -> None:
    recipe = awd("steps=20", "checkpoint.keep=9")
    for name in ("whole", "again"):
        train(recipe, tmp_path / name, corpus=corpus, quiet=True)
    for step in (15, 20):
        shutil.rmtree(tmp_path / "again" / "checkpoints" / f"step-{step:08d}")
    resume(tmp_path / "again", corpus=corpus, quiet=True)
    whole, again = checkpoint_tensors(tmp_path / "whole", 20), checkpoint_tensors(tmp_path / "again", 20)
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


def test_micro_batches_do_not_change_the_run(tmp_path: Path, corpus: Corpus) -> None:
    one, parts, fixed = (
        train(awd("steps=12", *changes), tmp_path / name, corpus=corpus, quiet=True).model.state_dict()
        for name, changes in {"one": (), "parts": ("batch.micro=2",), "fixed": ("batch.vary_length=false",)}.items()
    )
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, parts[name], atol=5e-5, rtol=1e-3, msg=name)
    assert not torch.allclose(one["embedding.weight"], fixed["embedding.weight"], atol=1e-3)


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("awd-lstm", ["model.cell=gru"], "d_last = 400: only the last layer of an lstm"),
        ("awd-lstm", ["model.d_last=300"], "tied embeddings need d_embedding = d_last = 300, not 400"),
        ("awd-lstm-tiny", ["data.document_mask=true"], "data.document_mask: packed documents are read without"),
        ("lstm", ["batch.vary_length=true", "batch.carry=false"], "batch.vary_length: for rows of at least 14 tokens"),
        ("gpt-tiny", ["batch.vary_length=true"], "batch.vary_length: for rows of at least 14 tokens"),
        ("gpt-tiny", ["objective.temporal_penalty=1"], "for the hidden states of a recurrent model"),
        ("lstm", ["model.cell=elman", "model.activation=sigmoid", "model.weight_drop=0.5"], "has no kernel that takes"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(preset: str, changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(preset, changes)
