"""F22 (lectures 1 and 3): Elman's network as a language model, h_t = σ(W_ah h_{t−1} + W_ax x_t + b_a)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.models.config import Recurrent
from weft.models.recurrent import Recurrent as Model

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid}
V, D, T = 7, 5, 6


def build(activation: str) -> Model:
    torch.manual_seed(4)
    settings = {"vocab_size": V, "d_model": D, "d_embedding": 4, "cell": "elman", "activation": activation}
    return Model(Recurrent.model_validate(settings)).double()


def the_slide(w: dict[str, Tensor], activation: str, tokens: list[int]) -> Tensor:
    """y_t for every t. PyTorch stores b_a as the sum of two vectors."""
    W_ax, W_ah = w["recurrence.weight_ih_l0"], w["recurrence.weight_hh_l0"]
    b_a = w["recurrence.bias_ih_l0"] + w["recurrence.bias_hh_l0"]
    h = torch.zeros(D, dtype=torch.float64)
    y = []
    for token in tokens:
        x = w["embedding.weight"][token]
        h = ACTIVATIONS[activation](W_ah @ h + W_ax @ x + b_a)
        y.append(torch.softmax(w["output"] @ h + w["output_bias"], 0))
    return torch.stack(y)


def text() -> tuple[Tensor, Tensor]:
    words = torch.randint(V, (T + 1,), generator=torch.Generator().manual_seed(0))
    return words[:-1], words[1:]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_f22_equals_the_slides_loop(activation: str) -> None:
    model = build(activation)
    tokens, _ = text()
    expected = the_slide(dict(model.named_parameters()), activation, tokens.tolist())
    torch.testing.assert_close(model(tokens[None])[0].softmax(-1), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_f22_gradients_equal_finite_differences(activation: str) -> None:
    """Every coordinate of every parameter, by central differences of the loss at float64."""
    model = build(activation)
    tokens, targets = text()

    def total() -> Tensor:
        """Σ_t −log p(w_t)."""
        return -model(tokens[None])[0].softmax(-1)[torch.arange(T), targets].log().sum()

    total().backward()
    step = 1e-6
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat = parameter.view(-1)
            differences = torch.empty_like(flat)
            for i in range(len(flat)):
                value = flat[i].item()
                flat[i] = value + step
                above = total()
                flat[i] = value - step
                differences[i] = (above - total()) / (2 * step)
                flat[i] = value
            assert parameter.grad is not None
            error = (differences - parameter.grad.view(-1)).abs().max()
            assert error < 1e-7, f"{name}: {error:.1e}"
