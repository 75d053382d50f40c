"""Recurrent language models: the values of PyTorch's modules, and the stepping contract."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from tests.models.contract import PaddedSource, check_contract
from tests.spread import spread
from torch import nn

from weft.errors import ModelError
from weft.models import config
from weft.models.build import build as build_model
from weft.models.config import Recurrent
from weft.models.recurrent import Recurrent as Model
from weft.nn.recurrent import SigmoidElman, read

V = 13
KINDS = [("elman", "tanh"), ("elman", "relu"), ("elman", "sigmoid"), ("lstm", "tanh"), ("gru", "tanh")]


def build(cell: str, activation: str, layers: int = 2, **settings: object) -> Model:
    torch.manual_seed(3)
    config = {"vocab_size": V, "d_model": 8, "cell": cell, "activation": activation, "layers": layers, **settings}
    return build_model(Recurrent.model_validate(config))


def tokens(batch: int = 3, time: int = 7, seed: int = 5) -> torch.Tensor:
    return torch.randint(V, (batch, time), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("cell", "activation"), [k for k in KINDS if k[1] != "sigmoid"])
def test_equals_a_composition_of_pytorch_modules(cell: str, activation: str, tied: bool) -> None:
    """Logits and gradients are those of Embedding → RNN/LSTM/GRU → Linear with the same weights."""
    model = build(cell, activation, tied=tied)
    embedding, output = nn.Embedding(V, 8), nn.Linear(8, V)
    kind: Any = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[cell]
    stack = kind(8, 8, num_layers=2, **{"nonlinearity": activation} if cell == "elman" else {})
    embedding.load_state_dict(model.embedding.state_dict())
    stack.load_state_dict(model.recurrence.state_dict())
    table = model.embedding.weight if model.output is None else model.output
    output.load_state_dict({"weight": table.detach().clone(), "bias": model.output_bias.detach() + 0})
    x = tokens()
    expected = output(stack(embedding(x.T))[0]).transpose(0, 1)
    got = model(x)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(0))
    got.backward(upstream)
    expected.backward(upstream)
    assert embedding.weight.grad is not None and output.weight.grad is not None
    theirs = {f"recurrence.{name}": p.grad for name, p in stack.named_parameters()}
    theirs["embedding.weight"] = embedding.weight.grad + output.weight.grad if tied else embedding.weight.grad
    theirs |= {"output_bias": output.bias.grad} | ({} if tied else {"output": output.weight.grad})
    ours = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_the_sigmoid_stack_has_the_layout_and_loop_of_the_others() -> None:
    """The loop for σ, with tanh expressed as 2σ(2x) − 1, gives the output of PyTorch's kernel for tanh."""
    ours: Any = SigmoidElman(5, 4, 1)
    theirs: Any = nn.RNN(5, 4, 1, batch_first=True)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    x = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    # With g = (h + 1)/2 and tanh(z) = 2σ(2z) − 1, h = tanh(Wh + Ux + b) is g = σ(4Wg + 2Ux + 2b − 2W1).
    with torch.no_grad():
        W, U = theirs.weight_hh_l0, theirs.weight_ih_l0
        ours.weight_hh_l0.copy_(4 * W)
        ours.weight_ih_l0.copy_(2 * U)
        ours.bias_ih_l0.copy_(2 * (theirs.bias_ih_l0 + theirs.bias_hh_l0))
        ours.bias_hh_l0.copy_(-2 * W.sum(1))
        g, last = ours(x, torch.full((1, 2, 4), 0.5))
        h, final = theirs(x)
    torch.testing.assert_close(2 * g - 1, h, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(2 * last - 1, final, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("cell", "activation"), KINDS)
def test_every_cell_keeps_the_contract(cell: str, activation: str) -> None:
    check_contract(build(cell, activation), V)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("cell", "activation"), KINDS)
def test_documents_start_from_zeros(cell: str, activation: str, layers: int) -> None:
    """Each document of a packed row has the logits and the gradients that it has alone."""
    model = build(cell, activation, layers=layers).eval()
    x = tokens(batch=3, time=9)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [7] * 9, [1, 2, 2, 2, 2, 2, 2, 1, 1]])
    together = model(x, documents=documents)
    for row in range(3):
        ids = documents[row].tolist()
        for start, end in pairwise([0, *(t for t in range(1, 9) if ids[t] != ids[t - 1]), 9]):
            alone = model(x[row : row + 1, start:end])[0]
            torch.testing.assert_close(together[row, start:end], alone, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(together[0, 3:], model(x)[0, 3:])
    together[0, 3:5].sum().backward()
    outside = sorted(set(range(V)) - set(x[0, 3:5].tolist()))
    assert model.embedding.weight.grad is not None and model.embedding.weight.grad[outside].abs().max() == 0


def test_parameters_are_counted_as_documented() -> None:
    """4 gates × (W_ax, W_ah, two biases) per layer, embeddings, output and its bias; a tied table counts once."""
    model = build("lstm", "tanh", layers=2, d_embedding=6)
    gates = 4 * 8 * (6 + 8 + 2) + 4 * 8 * (8 + 8 + 2)
    assert sum(p.numel() for p in model.parameters()) == V * 6 + gates + V * 8 + V
    tied = build("elman", "relu", layers=1, tied=True)
    assert sum(p.numel() for p in tied.parameters()) == V * 8 + 8 * (8 + 8 + 2) + V
    assert "output" not in tied.state_dict()


@pytest.mark.parametrize(("cell", "activation"), KINDS)
def test_dropout_acts_only_in_training_and_positions_are_ignored(cell: str, activation: str) -> None:
    model, x = build(cell, activation, dropout=0.5), tokens()
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x, positions=torch.arange(7).flip(0).expand(3, 7)), model(x))


def test_errors_say_what_would_be_right() -> None:
    model = build("gru", "tanh")
    with pytest.raises(ModelError, match=r"token id 13 is outside the vocabulary of 13"):
        model(torch.tensor([[1, 13]]))
    with pytest.raises(ModelError, match=r"0 \+ 3 tokens exceed the 2"):
        model.step(tokens(1, 3), model.start(1, 2))
    for use in (lambda source: model.start(1, 2, source=source), lambda source: model(tokens(), source=source)):
        with pytest.raises(ModelError, match=r"cannot read a source; 'bahdanau' can"):
            use(PaddedSource(tokens()))


@pytest.mark.parametrize(("cell", "activation"), spread(KINDS, 2))
def test_every_cell_learns_to_count(cell: str, activation: str) -> None:
    x = (torch.arange(12)[None] + torch.arange(V)[:, None]) % V
    model = build(cell, activation, layers=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model(x[:, :-1]).argmax(-1) == x[:, 1:]).float().mean() > 0.95


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["recurrent", "bahdanau"])
def test_weights_are_drawn_as_the_settings_say(kind: str, tied: bool) -> None:
    sizes: dict[str, Any] = {"kind": kind, "vocab_size": 500, "d_model": 64, "layers": 2}
    sizes |= {"tied": tied} if kind == "recurrent" else {"source_vocab_size": 500 if tied else None}

    def draw(**init: Any) -> dict[str, nn.Parameter]:
        torch.manual_seed(0)
        return dict(build_model(TypeAdapter(config.Model).validate_python(sizes | init)).named_parameters())

    by_default, std = draw(), 1.0 if kind == "bahdanau" else 64**-0.5
    assert by_default["embedding.weight"].std().item() == pytest.approx(std, rel=0.02)
    stack = "recurrence" if kind == "recurrent" else "decoder"
    assert by_default[f"{stack}.weight_hh_l1"].abs().max().item() == pytest.approx(64**-0.5, rel=0.01)
    for name, weight in draw(init={"kind": "uniform"}).items():  # all weights, over the whole range
        assert weight.abs().max() <= 0.05, name
        assert weight.numel() < 500 or weight.std().item() == pytest.approx(0.05 / 3**0.5, rel=0.1), name
    for name, weight in draw(init={"kind": "orthogonal"}).items():
        if "weight_hh" in name:
            for gate in weight.split(64):
                torch.testing.assert_close(gate @ gate.T, torch.eye(64), atol=1e-5, rtol=0)
        else:
            std = 0.0 if weight.dim() == 1 else 0.01
            assert weight.numel() < 500 or weight.std().item() == pytest.approx(std, rel=0.1), name


def test_separate_layers_compute_the_whole_stack() -> None:
    """On a GPU, evaluation runs layer by layer like training, if there is dropout between them."""
    model, x = build("lstm", "tanh", dropout=0.5).eval(), tokens(3, 9)
    with torch.no_grad():
        layer_by_layer = model.between.drop(None, on_gpu=True)
        assert layer_by_layer is not None and model.between.drop(None, on_gpu=False) is None
        inputs = model.embedding(x)
        found, expected = read(model.recurrence, inputs, drop=layer_by_layer), read(model.recurrence, inputs)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
def test_weights_stay_contiguous(cell: str, dropout: float, recwarn: pytest.WarningsRecorder) -> None:
    """cuDNN does not warn of copied weights in training, evaluation or steps, or after a move to the CPU and back."""
    model, x = build(cell, "tanh", dropout=dropout).cuda(), tokens(3, 9).cuda()
    documents = torch.arange(9, device="cuda").expand(3, 9) // 4
    for _ in range(2):
        model.train()(x).sum().backward()
        with torch.autocast("cuda", torch.bfloat16):
            model(x, documents=documents).sum().backward()
        with torch.no_grad():
            model.eval()(x)
            model.step(x, model.start(3, 9))
        model.cpu().cuda()
    assert not [str(warning.message) for warning in recwarn if "contiguous" in str(warning.message)]


@pytest.mark.gpu
@pytest.mark.parametrize(("cell", "activation"), KINDS)
def test_a_gpu_agrees_with_the_cpu(cell: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole sequences, packed documents and steps, by cuDNN's kernels."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, x = build(cell, activation).eval(), tokens(3, 9)
    documents = torch.tensor([[0] * 4 + [1] * 5, [2] * 9, [3, 4, 4, 4, 4, 4, 5, 5, 5]])
    with torch.no_grad():
        expected = model(x), model(x, documents=documents)
        model.cuda()
        state = model.start(3, 9)
        steps = torch.cat([model.step(x[:, :4].cuda(), state), model.step(x[:, 4:].cuda(), state)], 1)
        torch.testing.assert_close(model(x.cuda()).cpu(), expected[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(steps.cpu(), expected[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model(x.cuda(), documents=documents.cuda()).cpu(), expected[1], atol=1e-4, rtol=1e-4)
