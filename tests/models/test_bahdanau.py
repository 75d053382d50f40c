"""The RNN encoder–decoder with additive attention: its formulas, its padding, and the contract of every model."""

import pytest
import torch
from tests.models.contract import SomeSource, check_causal, check_rows_are_independent, check_step_equals_forward
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.bahdanau import Bahdanau as Model
from weft.models.build import build as build_model
from weft.models.config import Bahdanau

V = 11
CELLS = ["elman", "lstm", "gru"]


def build(cell: str = "gru", **settings: object) -> Model:
    torch.manual_seed(2)
    config = {"vocab_size": V, "d_model": 6, "d_embedding": 5, "d_attention": 7, "cell": cell, **settings}
    return build_model(Bahdanau.model_validate(config)).eval()


def some_tokens(batch: int, time: int, seed: int = 0) -> Tensor:
    return torch.randint(V, (batch, time), generator=torch.Generator().manual_seed(seed))


def padded_source() -> SomeSource:
    """Padding on the right, on the left, and none."""
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    return SomeSource(some_tokens(3, 5), mask)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
def test_step_equals_forward(cell: str, layers: int) -> None:
    check_step_equals_forward(build(cell, layers=layers), V, padded_source(), examples=12)


@pytest.mark.parametrize("cell", CELLS)
def test_causal_and_rows_independent(cell: str) -> None:
    model = build(cell, layers=2)
    check_causal(model, V, padded_source(), time=5)
    check_rows_are_independent(model, V, padded_source())


def test_equals_the_formulas() -> None:
    """One GRU layer, one sentence, every formula of the paper's appendix written out with the model's weights."""
    model = build("gru").double()
    source, target = some_tokens(1, 4, seed=1), some_tokens(1, 3, seed=2)
    w = dict(model.named_parameters())

    def gru(prefix: str, suffix: str, x: Tensor, h: Tensor) -> Tensor:
        a = w[f"{prefix}.weight_ih_l0{suffix}"] @ x + w[f"{prefix}.bias_ih_l0{suffix}"]
        b = w[f"{prefix}.weight_hh_l0{suffix}"] @ h + w[f"{prefix}.bias_hh_l0{suffix}"]
        reset, update = torch.sigmoid(a[:6] + b[:6]), torch.sigmoid(a[6:12] + b[6:12])
        return (1 - update) * torch.tanh(a[12:] + reset * b[12:]) + update * h

    words = [w["embedding.weight"][i] for i in source[0]]
    forwards, backwards = [torch.zeros(6).double()], [torch.zeros(6).double()]
    for x in words:
        forwards.append(gru("encoder", "", x, forwards[-1]))
    for x in reversed(words):
        backwards.insert(0, gru("encoder", "_reverse", x, backwards[0]))
    annotations = [torch.cat([f, b]) for f, b in zip(forwards[1:], backwards[:-1], strict=True)]
    s = torch.tanh(w["bridge.weight"] @ backwards[0] + w["bridge.bias"])
    logits = []
    for i in target[0]:
        energies = [
            w["attention.scores.weight"][0]
            @ torch.tanh(w["attention.queries.weight"] @ s + w["attention.keys.weight"] @ h)
            for h in annotations
        ]
        alpha = torch.stack(energies).softmax(0)
        context = sum(a * h for a, h in zip(alpha, annotations, strict=True))
        y = w["embedding.weight"][i]
        s = gru("decoder", "", torch.cat([y, context]), s)
        t = w["maxout.weight"] @ torch.cat([s, context, y]) + w["maxout.bias"]
        maxout = torch.stack([torch.maximum(t[2 * k], t[2 * k + 1]) for k in range(6)])
        logits.append(w["output.weight"] @ maxout + w["output.bias"])
    got = model(target, source=SomeSource(source))
    torch.testing.assert_close(got[0], torch.stack(logits), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("cell", CELLS)
def test_source_padding_changes_nothing(cell: str) -> None:
    """Neither how much padding there is, nor its side, nor what token it holds."""
    model, target, source = build(cell), some_tokens(2, 4, seed=3), some_tokens(2, 3, seed=4)
    expected = model(target, source=SomeSource(source))
    for filler in (0, 9):
        pad = torch.full((2, 2), filler)
        keep, drop = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.bool)
        right = SomeSource(torch.cat([source, pad], 1), torch.cat([keep, drop], 1))
        left = SomeSource(torch.cat([pad, source], 1), torch.cat([drop, keep], 1))
        torch.testing.assert_close(model(target, source=right), expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(model(target, source=left), expected, atol=1e-6, rtol=1e-5)


def test_the_probabilities_are_seen_of_a_whole_reading_and_of_a_step() -> None:
    model, source, seen = build(), padded_source(), []
    model.attention.probabilities.watch(seen.append)
    target = some_tokens(3, 4)
    model(target, source=source)
    state = model.start(3, 4, source)
    model.step(target[:, :3], state)
    model.step(target[:, 3:], state)
    whole, first, last = seen
    assert whole.shape == (3, 4, 5)
    torch.testing.assert_close(torch.cat([first, last], 1), whole, atol=1e-6, rtol=1e-5)
    assert (whole.masked_select(~source.mask[:, None].expand_as(whole)) == 0).all()


def test_two_vocabularies() -> None:
    model = build(source_vocab_size=30)
    assert model.source_embedding.weight.shape == (30, 5)
    model(some_tokens(1, 2), source=SomeSource(torch.tensor([[29, 11]])))
    with pytest.raises(ModelError, match=r"token id 30 is outside the vocabulary of 30"):
        model(some_tokens(1, 2), source=SomeSource(torch.tensor([[30]])))


def test_every_parameter_gets_a_gradient() -> None:
    model = build("lstm", layers=2, source_vocab_size=V)
    logits = model(some_tokens(3, 4), source=padded_source())
    nn.functional.cross_entropy(logits.flatten(0, 1), some_tokens(3, 4, seed=8).flatten()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_errors_say_what_would_be_right() -> None:
    model = build()
    with pytest.raises(ModelError, match="needs a source"):
        model(some_tokens(1, 2))
    with pytest.raises(ModelError, match="needs a source"):
        model.start(1, 2)
    with pytest.raises(ModelError, match="packed documents have no sources"):
        model(some_tokens(3, 2), source=padded_source(), documents=torch.zeros(3, 2))
    with pytest.raises(ModelError, match="3 sources for 2 targets"):
        model.start(2, 2, padded_source())
    with pytest.raises(ModelError, match="source of row 1 is empty"):
        model.start(2, 2, SomeSource(some_tokens(2, 2), torch.tensor([[True, False], [False, False]])))


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS)
def test_on_a_gpu_as_on_the_cpu(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, source, target = build(cell, layers=2), padded_source(), some_tokens(3, 4)
    with torch.no_grad():
        expected = model(target, source=source)
        model.cuda()
        source = SomeSource(source.tokens.cuda(), source.mask.cuda())
        torch.testing.assert_close(model(target.cuda(), source=source).cpu(), expected, atol=1e-4, rtol=1e-4)
        steps = model.step(target.cuda(), model.start(3, 4, source))
        torch.testing.assert_close(steps.cpu(), expected, atol=1e-4, rtol=1e-4)
