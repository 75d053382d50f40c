"""ELMo against plain torch.nn.LSTM, without leaks between the directions, trained, resumed and evaluated."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.command import Cli
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.api.run import Run
from weft.data.batch import Batch
from weft.errors import ConfigError, WeftError
from weft.models.build import build
from weft.models.config import ELMo as ELMoConfig
from weft.models.elmo import ELMo
from weft.objectives.bidirectional import whole_windows
from weft.text import builtin
from weft.text.grammars.sentences import SENSES

TINY = {
    "model.d_model": 16,
    "batch.size": 4,
    "batch.length": 16,
    "steps": 4,
    "evaluate.every": 2,
    "checkpoint.every": 2,
    "schedule.kind": "constant",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("elmo") / "run"
    return weft.train("elmo-tiny", data="builtin:stories", run=path, changes=TINY, log=lambda _: None)


def small(d_cell: int | None = None) -> ELMo:
    torch.manual_seed(0)
    return build(ELMoConfig(vocab_size=11, d_model=6, layers=2, d_cell=d_cell)).double().eval()


def reference_states(model: ELMo, tokens: Tensor) -> list[Tensor]:
    """States of all layers by new LSTMs with the same weights; the backward ones read the flipped text."""
    directions = []
    for layers, x in ((model.ahead, model.embedding(tokens)), (model.back, model.embedding(tokens.flip(1)))):
        states = [x]
        for number, layer in enumerate(layers):
            size = model.config.d_cell or 6
            lstm = nn.LSTM(6, size, batch_first=True, proj_size=6 if model.config.d_cell else 0).double()
            lstm.load_state_dict(layer.state_dict())
            h = lstm(states[-1])[0]
            states.append(h + states[-1] if number else h)
        directions.append(states)
    ahead, back = directions
    return [torch.cat([a, b.flip(1)], dim=-1) for a, b in zip(ahead, back, strict=True)]


@pytest.mark.parametrize("d_cell", [None, 10])
def test_states_and_losses_are_those_of_plain_lstms(d_cell: int | None, trained: Run) -> None:
    model, tokens = small(d_cell), torch.randint(11, (3, 7))
    expected = reference_states(model, tokens)
    torch.testing.assert_close(model.layer_states(tokens), torch.stack(expected))
    ahead, back = expected[-1].chunk(2, dim=-1)
    logits = [h @ model.output.T + model.output_bias for h in (ahead[:, :-1], back[:, 1:])]
    targets = (tokens[:, 1:], tokens[:, :-1])
    losses = [
        F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum") for z, y in zip(logits, targets, strict=True)
    ]
    batch = whole_windows(Batch(tokens[:, :-1], tokens[:, 1:]))
    loss, count, extras = trained.objective.loss(model, model.read(batch), batch)
    assert count == 18
    torch.testing.assert_close(
        [loss, extras["forward"], extras["backward"]],
        [sum(losses) / 2, *losses],
        check_dtype=False,
        rtol=1e-5,
        atol=1e-5,
    )


def test_no_state_sees_the_token_that_it_predicts() -> None:
    model, tokens = small(), torch.randint(11, (1, 9))
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 11
    same = (model.layer_states(tokens) == model.layer_states(changed))[:, 0].all(dim=0)  # (time, 2 · d_model)
    ahead, back = same.chunk(2, dim=-1)
    assert ahead[:4].all() and not ahead[4:].all(dim=1).any()
    assert back[5:].all() and not back[:5].all(dim=1).any()


def test_padding_and_other_documents_change_nothing() -> None:
    model, tokens = small(), torch.randint(11, (2, 8))
    mask = torch.arange(8) < torch.tensor([[5], [8]])
    alone = model.layer_states(tokens[:1, :5])
    torch.testing.assert_close(model.layer_states(tokens, mask)[:, :1, :5], alone)
    documents = torch.tensor([[0] * 5 + [1] * 3])
    packed = model.forward_features(tokens[:1], documents=documents)
    torch.testing.assert_close(packed[:, :5], alone[-1])
    torch.testing.assert_close(packed[:, 5:], model.forward_features(tokens[:1, 5:]))
    assert model.forward_features(tokens[:, :1], documents=documents[:, :1].expand(2, 1)).shape == (2, 1, 12)


def test_gradients() -> None:
    model, tokens = small(), torch.randint(11, (2, 4))
    names = ("embedding.weight", "ahead.1.weight_hh_l0", "back.0.weight_ih_l0")
    weights = tuple(map(model.get_parameter, names))
    torch.autograd.gradcheck(lambda *_: model.forward_features(tokens), weights, fast_mode=True)


def test_a_resumed_run_equals_an_uninterrupted_one(trained: Run, tmp_path: Path) -> None:
    half = {**TINY, "steps": 2}
    weft.train("elmo-tiny", data="builtin:stories", run=tmp_path / "b", changes=half, log=lambda _: None)
    again = weft.resume(tmp_path / "b", changes={"steps": 4}, log=lambda _: None)
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    metrics = trained.evaluate()
    assert {"loss", "perplexity", "forward_perplexity", "backward_perplexity"} <= set(metrics)
    assert metrics["perplexity"] == pytest.approx(
        (metrics["forward_perplexity"] * metrics["backward_perplexity"]) ** 0.5
    )


def test_bad_settings_in_one_line() -> None:
    for changes in (["model.d_cell=8"], ["objective=next-token"], ["batch.carry=true"], ["model.layers=0"]):
        with pytest.raises(ConfigError) as raised:
            weft.train("elmo-tiny", data="builtin:stories", changes=changes, log=lambda _: None)
        assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_senses_of_a_small_run(tmp_path: Path, cli: Cli) -> None:
    run = weft.train("senses-elmo", run=tmp_path / "run", changes={"steps": 2, "model.d_model": 8}, log=lambda _: None)
    output = cli(
        "neighbours", str(run.path), "--senses", "builtin:senses", "--json", "--map", str(tmp_path / "map.svg")
    )
    *_, total = map(json.loads, output.splitlines())
    assert total["word"] == "all" and total["senses"] == 18
    assert 0.35 < total["static"] < 0.5 and total["contextual"] < 0.65  # nothing is learned in two steps
    assert "<svg" in (tmp_path / "map.svg").read_text()


def test_words_of_senses_are_found_and_held_out() -> None:
    train, held_out = (list(builtin.task_rows("senses", side)) for side in ("train", "validation"))
    assert not {row["text"] for row in train} & {row["text"] for row in held_out}
    nouns = [x for senses in SENSES["words"].values() for sense in senses.values() for x in sense["x"]]
    told = Counter(" ".join(sorted(set(row["text"].split()) & set(nouns))) for row in held_out)
    assert sorted(told) == sorted(set(nouns)) and all(n == nouns.count(x) for x, n in told.items())  # each noun once
    assert all("[" not in text for text in builtin.corpus("senses").documents)


@pytest.mark.parametrize(
    ("word", "text"), [("bank", "the river"), ("[]", "the river bank"), (" ", "x"), ("[]", "the [ ] x")]
)
def test_a_word_that_is_not_there(word: str, text: str, trained: Run) -> None:
    with pytest.raises(WeftError) as raised:
        trained.embed([text], word=word)
    assert "\n" not in str(raised.value)


def test_vectors_of_words(trained: Run) -> None:
    texts = ["The cook boils the soup.", "The Soup, the soup."]
    vectors = trained.embed(texts, word="soup", normalise=False)
    assert vectors.shape == (3, 32)
    marked = trained.embed(["The cook boils the [soup].", "The [Soup], the [soup]."], word="[]", normalise=False)
    assert (vectors == marked).all()
    layers = [trained.embed(texts, word="soup", layer=layer, normalise=False) for layer in range(3)]
    torch.testing.assert_close(torch.tensor(vectors), torch.tensor(sum(layers) / 3))
    mixed = trained.embed(texts, word="soup", mix=[-1e9, 0, 0], normalise=False)
    torch.testing.assert_close(torch.tensor(mixed), torch.tensor((layers[1] + layers[2]) / 2))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["senses-elmo", "senses-bert"])
def test_senses_are_told_apart_over_five_seeds(recipe: str, tmp_path: Path, cli: Cli) -> None:
    for seed in range(5):
        run = weft.train(recipe, run=tmp_path / f"{seed}", changes={"seed": seed}, log=lambda _: None)
        output = cli("neighbours", str(run.path), "--senses", "builtin:senses", "--json")
        total = json.loads(output.splitlines()[-1])
        assert total["contextual"] >= 0.95 and 0.35 < total["static"] < 0.5
