"""The recurrent language models: the same numbers as PyTorch's modules, and the contract of every model."""

from itertools import pairwise

import pytest
import torch
from pydantic import TypeAdapter
from tests.models.contract import SomeSource, check_causal, check_rows_are_independent, check_step_equals_forward
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
    embedding = nn.Embedding(V, 8)
    kind = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[cell]
    options = {"nonlinearity": activation} if cell == "elman" else {}
    stack = kind(8, 8, num_layers=2, **options)
    output = nn.Linear(8, V)
    embedding.load_state_dict(model.embedding.state_dict())
    stack.load_state_dict(model.recurrence.state_dict())
    table = model.embedding.weight if model.output is None else model.output
    output.load_state_dict({"weight": table.detach().clone(), "bias": model.output_bias.detach() + 0})
    x = tokens()
    expected = output(stack(embedding(x.T))[0]).transpose(0, 1)
    got = model(x)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    weigh = torch.randn(got.shape, generator=torch.Generator().manual_seed(0))
    (got * weigh).sum().backward()
    (expected * weigh).sum().backward()
    theirs = {f"recurrence.{name}": p.grad for name, p in stack.named_parameters()}
    theirs["embedding.weight"] = embedding.weight.grad + output.weight.grad if tied else embedding.weight.grad
    theirs["output_bias"] = output.bias.grad
    if not tied:
        theirs["output"] = output.weight.grad
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_sigmoid_stack_has_the_layout_and_the_loop_of_the_others() -> None:
    """The loop written for σ, with tanh in σ's place by 2σ(2x) − 1, gives what PyTorch's kernel gives for tanh."""
    ours, theirs = SigmoidElman(5, 4, 1), nn.RNN(5, 4, 1, batch_first=True)
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
def test_step_equals_forward(cell: str, activation: str) -> None:
    check_step_equals_forward(build(cell, activation), V)


@pytest.mark.parametrize(("cell", "activation"), KINDS)
def test_causal_and_rows_independent(cell: str, activation: str) -> None:
    model = build(cell, activation)
    check_causal(model, V)
    check_rows_are_independent(model, V)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("cell", "activation"), KINDS)
def test_documents_start_from_nothing(cell: str, activation: str, layers: int) -> None:
    """Each document of a packed row gets the logits it gets alone; gradients flow as if it were alone."""
    model = build(cell, activation, layers=layers).eval()
    x = tokens(batch=3, time=9)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [7] * 9, [1, 2, 2, 2, 2, 2, 2, 1, 1]])
    together = model(x, documents=documents)
    for row in range(3):
        ids = documents[row].tolist()
        cuts = [0, *(t for t in range(1, 9) if ids[t] != ids[t - 1]), 9]
        for start, end in pairwise(cuts):
            alone = model(x[row : row + 1, start:end])[0]
            torch.testing.assert_close(together[row, start:end], alone, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(together[0, 3:], model(x)[0, 3:])
    together[0, 3:5].sum().backward()
    outside = sorted(set(range(V)) - set(x[0, 3:5].tolist()))
    assert model.embedding.weight.grad[outside].abs().max() == 0


def test_parameters_are_counted_as_documented() -> None:
    """4 gates × (W_ax, W_ah, two biases) a layer, embeddings, output and its bias; tied, the table counts once."""
    model = build("lstm", "tanh", layers=2, d_embedding=6)
    gates = 4 * 8 * (6 + 8 + 2) + 4 * 8 * (8 + 8 + 2)
    assert sum(p.numel() for p in model.parameters()) == V * 6 + gates + V * 8 + V
    tied = build("elman", "relu", layers=1, tied=True)
    assert sum(p.numel() for p in tied.parameters()) == V * 8 + 8 * (8 + 8 + 2) + V
    assert "output" not in tied.state_dict()


def test_dropout_is_for_training_only() -> None:
    for cell, activation in KINDS:
        model = build(cell, activation, dropout=0.5)
        x = tokens()
        assert not torch.equal(model(x), model(x))
        model.eval()
        assert torch.equal(model(x), model(x))


def test_positions_mean_nothing() -> None:
    model, x = build("gru", "tanh"), tokens()
    assert torch.equal(model(x, positions=torch.arange(7).flip(0).expand(3, 7)), model(x))


def test_errors_say_what_would_be_right() -> None:
    model = build("gru", "tanh")
    with pytest.raises(ModelError, match=r"token id 13 is outside the vocabulary of 13"):
        model(torch.tensor([[1, 13]]))
    with pytest.raises(ModelError, match=r"0 \+ 3 tokens do not fit in the 2"):
        model.step(tokens(1, 3), model.start(1, 2))
    with pytest.raises(ModelError, match=r"cannot read a source; 'bahdanau' can"):
        model.start(1, 2, source=SomeSource(tokens()))
    with pytest.raises(ModelError, match=r"cannot read a source; 'bahdanau' can"):
        model(tokens(), source=SomeSource(tokens()))


def test_learns_to_count() -> None:
    """A few dozen steps teach every cell the sequence 0 1 2 … V−1 0 1 …"""
    x = (torch.arange(12)[None] + torch.arange(V)[:, None]) % V
    for cell, activation in KINDS:
        model = build(cell, activation, layers=1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        for _ in range(60):
            loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert (model(x[:, :-1]).argmax(-1) == x[:, 1:]).float().mean() > 0.95, (cell, activation, float(loss))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["recurrent", "bahdanau"])
def test_weights_are_drawn_as_the_settings_say(kind: str, tied: bool) -> None:
    sizes = {"kind": kind, "vocab_size": 500, "d_model": 64, "layers": 2}
    sizes |= {"tied": tied} if kind == "recurrent" else {"source_vocab_size": 500 if tied else None}
    drawn = {}
    for init in ({}, {"init": {"kind": "uniform"}}, {"init": {"kind": "orthogonal"}}):
        torch.manual_seed(0)
        model = build_model(TypeAdapter(config.Model).validate_python(sizes | init))
        drawn[init.get("init", {}).get("kind")] = dict(model.named_parameters())
        torch.manual_seed(0)
        model.reset_parameters()
        again = dict(model.named_parameters())
        assert all(weight.isfinite().all() and weight.shape == again[name].shape for name, weight in again.items())
    std = 1.0 if kind == "bahdanau" else 64**-0.5
    assert drawn[None]["embedding.weight"].std().item() == pytest.approx(std, rel=0.02)
    stack = "recurrence" if kind == "recurrent" else "decoder"
    assert drawn[None][f"{stack}.weight_hh_l1"].abs().max().item() == pytest.approx(64**-0.5, rel=0.01)
    for name, weight in drawn["uniform"].items():  # every one of them, and over the whole range
        assert weight.abs().max() <= 0.05, name
        assert weight.numel() < 500 or weight.std().item() == pytest.approx(0.05 / 3**0.5, rel=0.1), name
    for name, weight in drawn["orthogonal"].items():
        if "weight_hh" in name:
            for gate in weight.split(64):
                torch.testing.assert_close(gate @ gate.T, torch.eye(64), atol=1e-5, rtol=0)
        else:
            wanted = 0.0 if weight.dim() == 1 else 0.01
            assert weight.numel() < 500 or weight.std().item() == pytest.approx(wanted, rel=0.1), name


def test_layers_with_dropout_between_them_read_as_a_whole_stack() -> None:
    """On a GPU evaluation reads layer by layer, as training does, where dropouts lie between: with the same numbers."""
    model, x = build("lstm", "tanh", dropout=0.5).eval(), tokens(3, 9)
    with torch.no_grad():
        layer_by_layer = model.between.drop(None, on_gpu=True)
        assert layer_by_layer is not None and model.between.drop(None, on_gpu=False) is None
        inputs = model.embedding(x)
        found, expected = read(model.recurrence, inputs, None, layer_by_layer), read(model.recurrence, inputs)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
def test_weights_stay_in_one_piece(cell: str, dropout: float, recwarn: pytest.WarningsRecorder) -> None:
    """cuDNN says so when it has to copy them: not in training, evaluation, steps, nor after a move to and fro."""
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
    assert not [str(each.message) for each in recwarn if "contiguous" in str(each.message)]


@pytest.mark.gpu
@pytest.mark.parametrize(("cell", "activation"), KINDS)
def test_on_a_gpu_as_on_the_cpu(cell: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole sequences, packed documents and steps: cuDNN's kernels give what the CPU's give."""
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
