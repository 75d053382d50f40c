"""RNN encoder–decoder with additive attention: its formulas, padding, and the stepping contract."""

import pytest
import torch
from tests.models.contract import PaddedSource, check_contract
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


def random_tokens(batch: int, time: int, seed: int = 0) -> Tensor:
    return torch.randint(V, (batch, time), generator=torch.Generator().manual_seed(seed))


def padded_source() -> PaddedSource:
    """Rows with padding on the right, on the left, and none."""
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    return PaddedSource(random_tokens(3, 5), mask)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_keeps_the_contract(cell: str, layers: int) -> None:
    model = build(cell, layers=layers)
    check_contract(model, V, padded_source())


def test_equals_the_formulas() -> None:
    """One GRU layer and one sentence: every formula of the paper's appendix, with the model's weights."""
    model = build("gru").double()
    source, target = random_tokens(1, 4, seed=1), random_tokens(1, 3, seed=2)
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
        W_q, W_k, v = (w[f"attention.{name}.weight"] for name in ("queries", "keys", "scores"))
        energies = [v[0] @ torch.tanh(W_q @ s + W_k @ h) for h in annotations]
        alpha = torch.stack(energies).softmax(0)
        context = sum(a * h for a, h in zip(alpha, annotations, strict=True))
        y = w["embedding.weight"][i]
        s = gru("decoder", "", torch.cat([y, context]), s)
        t = w["maxout.weight"] @ torch.cat([s, context, y]) + w["maxout.bias"]
        maxout = torch.stack([torch.maximum(t[2 * k], t[2 * k + 1]) for k in range(6)])
        logits.append(w["output.weight"] @ maxout + w["output.bias"])
    got = model(target, source=PaddedSource(source))
    torch.testing.assert_close(got[0], torch.stack(logits), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("cell", CELLS)
def test_source_padding_changes_nothing(cell: str) -> None:
    """The amount of padding, its side and its token make no difference."""
    model, target, source = build(cell), random_tokens(2, 4, seed=3), random_tokens(2, 3, seed=4)
    expected = model(target, source=PaddedSource(source))
    real, padded = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.bool)
    for pad in (torch.full((2, 2), token) for token in (0, 9)):
        for tokens, masks in (([source, pad], [real, padded]), ([pad, source], [padded, real])):
            padded_logits = model(target, source=PaddedSource(torch.cat(tokens, 1), torch.cat(masks, 1)))
            torch.testing.assert_close(padded_logits, expected, atol=1e-6, rtol=1e-5)


def test_probabilities_of_a_whole_pass_and_of_steps_can_be_watched() -> None:
    model, source = build(), padded_source()
    seen: list[Tensor] = []
    model.alignment.watch(seen.append)
    target = random_tokens(3, 4)
    model(target, source=source)
    state = model.start(3, 4, source)
    model.step(target[:, :3], state)
    model.step(target[:, 3:], state)
    whole, first, last = seen
    assert whole.shape == (3, 4, 5)
    torch.testing.assert_close(torch.cat([first, last], 1), whole, atol=1e-6, rtol=1e-5)
    assert source.mask is not None and (whole.masked_select(~source.mask[:, None].expand_as(whole)) == 0).all()


def test_two_vocabularies() -> None:
    model = build(source_vocab_size=30)
    assert model.get_parameter("source_embedding.weight").shape == (30, 5)
    model(random_tokens(1, 2), source=PaddedSource(torch.tensor([[29, 11]])))
    with pytest.raises(ModelError, match=r"token id 30 is outside the vocabulary of 30"):
        model(random_tokens(1, 2), source=PaddedSource(torch.tensor([[30]])))


def test_every_parameter_gets_a_gradient() -> None:
    model = build("lstm", layers=2, source_vocab_size=V)
    logits = model(random_tokens(3, 4), source=padded_source())
    nn.functional.cross_entropy(logits.flatten(0, 1), random_tokens(3, 4, seed=8).flatten()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_errors_say_what_would_be_right() -> None:
    model, empty = build(), PaddedSource(random_tokens(2, 2), torch.tensor([[True, False], [False, False]]))
    with pytest.raises(ModelError, match="packed documents have none"):
        model(random_tokens(3, 2), source=padded_source(), documents=torch.zeros(3, 2))
    with pytest.raises(ModelError, match="needs a source"):
        model(random_tokens(1, 2))
    wrong = {"needs a source": None, "3 sources for 2 targets": padded_source(), "source of row 1 is empty": empty}
    for message, source in wrong.items():
        with pytest.raises(ModelError, match=message):
            model.start(2, 2, source)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS)
def test_a_gpu_agrees_with_the_cpu(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, source, target = build(cell, layers=2), padded_source(), random_tokens(3, 4)
    with torch.no_grad():
        expected = model(target, source=source)
        model.cuda()
        assert source.mask is not None
        source = PaddedSource(source.tokens.cuda(), source.mask.cuda())
        torch.testing.assert_close(model(target.cuda(), source=source).cpu(), expected, atol=1e-4, rtol=1e-4)
        steps = model.step(target.cuda(), model.start(3, 4, source))
        torch.testing.assert_close(steps.cpu(), expected, atol=1e-4, rtol=1e-4)
