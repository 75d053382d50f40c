"""What the checker says about faults other than a wrong formula."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.course.exercises import exercise
from weft.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))


def attend(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor) -> Tensor:
    return (Q @ K.mT / math.sqrt(Q.shape[-1])).masked_fill(~mask, -math.inf).softmax(-1) @ V


def test_a_right_answer_with_other_names() -> None:
    answer = weft.check(lambda q, k, v, m: attend(q, k, v, m), "attention")
    assert answer.holds and "right" in str(answer) and "#2e8b57" in answer._repr_html_()
    assert repr(answer) == str(answer), "what a prompt shows has no tensors"


def test_numpy_needs_no_gradients() -> None:
    def attention(Q: Any, K: Any, V: Any, mask: Any) -> Any:
        q, k, v = Q.numpy(), K.numpy(), V.numpy()
        scores = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
        return torch.from_numpy(scores).masked_fill(~mask, -math.inf).softmax(-1).numpy() @ v

    assert weft.check(attention, "attention").holds


def test_a_change_in_place_is_named() -> None:
    def attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor) -> Tensor:
        Q /= math.sqrt(Q.shape[-1])
        return (Q @ K.mT).masked_fill(~mask, -math.inf).softmax(-1) @ V

    assert "changes its argument Q in place" in str(weft.check(attention, "attention"))


def test_global_randomness_is_named() -> None:
    before = random.getstate(), torch.get_rng_state()
    answer = weft.check(lambda *args: attend(*args) + torch.rand(()), "attention")
    assert "global randomness" in answer.problem
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.slow
def test_dependence_on_other_rows_is_named() -> None:
    def attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor) -> Tensor:
        scores = Q @ K.mT / math.sqrt(Q.shape[-1])
        scores = scores.masked_fill(~mask, -math.inf)  # the name is used twice
        output = scores.softmax(-1) @ V
        return 2 * output - output.mean(0)

    answer = weft.check(attention, "attention")
    assert "depends on the other rows" in answer.problem and answer.text.startswith("return")


def test_detached_gradients_and_lost_digits_are_named() -> None:
    def detached(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor) -> Tensor:
        return attend(Q.detach(), K, V, mask)

    answer = weft.check(detached, "attention")
    assert "∂/∂Q" in answer.problem and "detached" in answer.problem
    answer = weft.check(
        lambda *args: attend(*(a.float() if a.is_floating_point() else a for a in args)).double(), "attention"
    )
    assert "float32" in answer.problem


def test_a_wrong_shape_is_named() -> None:
    answer = weft.check(lambda *args: attend(*args).mT, "attention")
    assert "shape is" in answer.problem and answer.tensor == "output"
    assert "expected 2 results, post, pre" in str(weft.check(lambda x, W1, W2: x, "pre_post_norm"))


def test_a_quadratic_loop_is_named_where_it_is_forbidden() -> None:
    right = exercise("mle").reference().mle

    def mle(texts: list[list[str]], N: int) -> Any:
        for text in texts:
            for a in text:
                for b in text:
                    assert a and b
        return right(texts, N)

    answer = weft.check(mle, "mle")
    assert answer.passed == answer.cases and not answer.holds and "square" in answer.problem


def test_errors_have_their_line_and_the_first_wrong_step() -> None:
    def attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor) -> Tensor:
        scores = Q @ K.mT
        return scores @ V[0, 0, :2]

    answer = weft.check(attention, "attention")
    assert answer.tensor == "scores" and answer.text == "scores = Q @ K.mT" and "Error" in answer.problem


@pytest.mark.slow
def test_results_in_another_order_and_names_with_another_meaning() -> None:
    def lstm(x: Tensor, h: Tensor, c: Tensor, W: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, shown = (torch.cat([x, h], 1) @ W.T + b).chunk(4, 1)  # before the activations
        c_new = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return c_new, shown.sigmoid() * c_new.tanh()

    assert "another order: return h_new, c_new" in weft.check(lstm, "lstm").problem
    answer = weft.check(lambda *args: (lstm(*args)[1] + 1, lstm(*args)[0]), "lstm")
    assert answer.tensor == "h_new"


@pytest.mark.slow
def test_lost_digits_and_nan_are_told_from_other_differences() -> None:
    def attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor) -> Tensor:
        A = (Q @ K.mT / math.sqrt(Q.shape[-1])).masked_fill(~mask, -math.inf).softmax(0)
        return A @ V

    assert "A contains NaN" in weft.check(attention, "attention").problem
    answer = weft.check(lambda words, *_: torch.zeros(2, 2) @ torch.zeros(2, 2).double(), "attention")
    assert "make float32 unless given a dtype" in answer.problem


@pytest.mark.slow
def test_a_mean_over_the_batch_is_no_dependence_between_rows() -> None:
    right = exercise("bptt").reference().bptt
    answer = weft.check(lambda x, *args: tuple(each / len(x) for each in right(x, *args)), "bptt")
    assert answer.tensor == "g_W" and "other rows" not in answer.problem


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a function"):
        weft.check(3, "attention")
    with pytest.raises(ConfigError, match="did you mean 'attention'"):
        weft.check(attend, "atention")


@pytest.mark.slow
def test_values_of_other_kinds_are_named() -> None:
    for value, problem in {10**400: "expected float, got int", None: "expected float, got None"}.items():
        assert problem in weft.check(lambda *_, value=value: value, "warmup").problem
    answer = weft.check(lambda step, d_model, warmup: float("nan"), "warmup")
    assert "rate contains NaN" in answer.problem
    generator = weft.check(lambda *args: (each for each in args), "warmup")
    assert "expected float, got generator" in generator.problem


def test_a_variable_of_another_name_is_followed_from_the_return() -> None:
    def word2vec(v: Tensor, u: Tensor, negatives: Tensor) -> Any:
        positive, negative = torch.nn.functional.logsigmoid(u @ v), torch.nn.functional.logsigmoid(-negatives @ v).sum()
        slope = (torch.sigmoid(u @ v) - 1) * u + torch.sigmoid(negatives @ v).sum() * negatives.sum(0)
        return -(positive + negative), slope

    answer = weft.check(word2vec, "word2vec")
    assert answer.tensor == "g_v" and answer.text.startswith("slope =")


def test_a_right_variable_that_is_not_returned() -> None:
    def adamw(theta: Any, g: Any, m: Any, v: Any, t: int, lr: float, beta1: float, beta2: float, *rest: float) -> Any:
        eps, decay = rest
        old, m, v = (m, v), beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        step = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
        return theta - lr * step - lr * decay * theta, *old

    assert weft.check(adamw, "adamw").text.startswith("return")


def test_the_line_that_changes_an_argument_is_named() -> None:
    def adamw(theta: Any, g: Any, m: Any, v: Any, t: int, lr: float, beta1: float, beta2: float, *rest: float) -> Any:
        eps, decay = rest
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v = beta2 * v + (1 - beta2) * g**2
        step = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
        return theta - lr * step - lr * decay * theta, m, v

    answer = weft.check(adamw, "adamw")
    assert "changes its argument m in place" in answer.problem and answer.text.startswith("m.mul_"), answer


def test_what_remains_from_earlier_calls_is_named() -> None:
    def mle(texts: Any, N: int, counts: Any = {}) -> Any:  # noqa: B006
        for text in texts:
            for at in range(len(text) - N + 1):
                own = counts.setdefault(tuple(text[at : at + N - 1]), {})
                own[text[at + N - 1]] = own.get(text[at + N - 1], 0) + 1
        return {h: {w: n / sum(own.values()) for w, n in own.items()} for h, own in counts.items()}

    assert "it keeps something from earlier calls" in weft.check(mle, "mle").problem


def test_a_loop_that_is_not_entered_does_not_blame_what_precedes_it() -> None:
    def flash(Q: Tensor, K: Tensor, V: Tensor, block: int) -> Any:
        m = torch.full((len(Q), 1), -math.inf, dtype=Q.dtype)
        l, O = torch.zeros_like(m), torch.zeros(len(Q), V.shape[1], dtype=Q.dtype)  # noqa: E741
        for start in range(0, len(K) - block + 1, block):  # leaves out a shorter block at the end
            S = Q @ K[start : start + block].T / math.sqrt(Q.shape[1])
            new = torch.maximum(m, S.amax(1, keepdim=True))
            p, scale, m = (S - new).exp(), (m - new).exp(), new
            l, O = l * scale + p.sum(1, keepdim=True), O * scale + p @ V[start : start + block]  # noqa: E741
        return O / l, (m + l.log())[:, 0]

    answer = weft.check(flash, "flash")
    assert answer.tensor == "l" and not answer.line, answer
