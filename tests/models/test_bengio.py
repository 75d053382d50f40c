"""The neural n-gram against its formula, stepped, with documents; its costs, anatomy, training and views."""

from pathlib import Path

import pytest
import torch
from tests.command import Cli
from torch import Tensor

import weft
from weft.costs.count import count
from weft.errors import ConfigError, ModelError
from weft.explain.anatomy.anatomy import anatomy
from weft.models.bengio import Bengio
from weft.models.build import build
from weft.models.config import Bengio as BengioConfig
from weft.models.presets import preset


def small(direct: bool = False, order: int = 4) -> Bengio:
    torch.manual_seed(0)
    config = BengioConfig(vocab_size=11, d_model=6, d_embedding=3, order=order, direct=direct)
    return build(config).double().eval()


def formula(model: Bengio, words: list[int]) -> Tensor:
    """y = b + W x + U tanh(d + H x), of the last order − 1 words; missing ones are zeros (Bengio et al. 2003, §2)."""
    width, D = model.config.order - 1, model.config.d_model
    last = [torch.zeros(3).double()] * width + [model.embedding.weight[word] for word in words]
    x = torch.cat(last[-width:])
    y = model.output_bias + model.output[:, :D] @ torch.tanh(model.hidden.bias + model.hidden.weight @ x)
    return y + model.output[:, D:] @ x if model.config.direct else y


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("order", [2, 4])
def test_logits_are_those_of_the_formula(direct: bool, order: int) -> None:
    model, words = small(direct, order), [3, 1, 4, 1, 5, 9, 2]
    logits = model(torch.tensor([words]))[0]
    for position in range(len(words)):
        torch.testing.assert_close(logits[position], formula(model, words[: position + 1]))


def test_documents_are_read_separately() -> None:
    model, words = small(), [3, 1, 4, 1, 5, 9, 2]
    logits = model(torch.tensor([words]), documents=torch.tensor([[0, 0, 0, 1, 1, 1, 1]]))[0]
    torch.testing.assert_close(logits[4], formula(model, words[3:5]))
    torch.testing.assert_close(logits[2], formula(model, words[:3]))


def test_stepping_rows_of_unequal_length_equals_reading_at_once() -> None:
    model, torch_tokens = small(True), torch.randint(0, 11, (2, 9))
    state = model.start(2, 7)
    model.step(torch_tokens[:, :4], state, torch.tensor([4, 2]))
    state.grow(9)
    second = model.step(torch_tokens[:, 4:7], state)
    whole = model(torch_tokens)
    torch.testing.assert_close(second[0], whole[0, 4:7])
    shorter = torch.cat([torch_tokens[1, :2], torch_tokens[1, 4:7]])
    torch.testing.assert_close(second[1], model(shorter[None])[0, 2:])
    state.truncate(3)
    state.reorder(torch.tensor([0, 0]))
    torch.testing.assert_close(model.step(torch_tokens[[0, 0], 3:4], state)[1, 0], whole[0, 3])
    with pytest.raises(ModelError, match="exceed the 9"):
        model.step(torch_tokens, state)


@pytest.mark.parametrize("name", ["bengio", "bengio-tiny"])
def test_counted_parameters_are_those_of_the_model(name: str) -> None:
    settings = preset(name)
    cost = count(settings)
    with torch.device("meta"):
        assert cost.parameters == sum(p.numel() for p in build(settings).parameters()) == anatomy(settings).parameters
    products = settings.d_input * settings.d_model + settings.vocab_size * settings.d_model
    products += settings.vocab_size * settings.d_input if settings.direct else 0
    assert cost.forward == 2 * products


def test_the_paper_s_model_has_the_paper_s_sizes() -> None:
    # |V|(1 + nm + h) + h(1 + (n − 1)m), with direct connections (Bengio et al. 2003, §2): the words of n positions
    # are the embeddings and the direct connections
    V, n, m, h = 17964, 6, 100, 60
    assert count(preset("bengio")).parameters == V * (1 + n * m + h) + h * (1 + (n - 1) * m)


def test_an_order_without_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.order"):
        weft.plan("bengio-tiny", changes={"model.order": 1})


def test_trains_continues_and_explains(tmp_path: Path, cli: Cli) -> None:
    changes: dict[str, object] = {
        "model.d_model": 16,
        "model.d_embedding": 8,
        "batch.size": 4,
        "batch.length": 16,
        "model.direct": True,
    }
    changes |= {"tokenizer": "char", "evaluate.every": 20, "checkpoint.every": 20, "optimizer.lr": 0.01, "steps": 80}
    run = weft.train("bengio-tiny", data="builtin:stories", run=tmp_path / "run", changes=changes)
    assert run.evaluate()["bits_per_byte"] < 4.5
    text = run.generate("The cat", max_tokens=12, temperature=0)
    assert text == run.generate("The cat", max_tokens=12, temperature=0)
    for view in ("step", "saliency", "surprise", "weights", "gradients"):
        assert cli("explain", run.path, "--only", view, "--text", "The cat sat")
    assert "hidden layer" in cli("explain", "bengio-tiny", "--only", "costs")
