"""lectures/gpt.py is weft's GPT: the same logits, loss and gradients, cache and filters."""

from functools import partial

import pytest
import torch
from tests.lectures.textbook import parity
from tests.lectures.textbook.lecture import load
from tests.lectures.textbook.parity import Tensors, linear, norm, split
from tests.pairwise import pairwise
from torch import Tensor

from weft.data.batch import Batch
from weft.decode import sampling
from weft.models.config import Decoder
from weft.models.presets import gpt as preset
from weft.objectives.tokens import token_loss
from weft.recipe.objective import NextToken

gpt = load("gpt")
VOCAB, CONTEXT = 23, 12


def rename(settings: Decoder, weights: Tensors) -> dict[str, Tensor]:
    d_model = settings.d_model
    found = linear(weights, "W", "embedding") | linear(weights, "p", "decoder.position")
    found |= norm(weights, "norm", "decoder.norm")
    for n in range(settings.layers):
        ours, theirs = f"decoder.blocks.{n}", f"layers.{n}"
        found |= split(weights, f"{theirs}.attention", ("W_q", "W_k", "W_v"), f"{ours}.attention.qkv", [d_model] * 3)
        found |= linear(weights, f"{theirs}.attention.W_o", f"{ours}.attention.out")
        found |= linear(weights, f"{theirs}.W1", f"{ours}.feedforward.up")
        found |= linear(weights, f"{theirs}.W2", f"{ours}.feedforward.down")
        found |= norm(weights, f"{theirs}.norm1", f"{ours}.attention_skip.norm")
        found |= norm(weights, f"{theirs}.norm2", f"{ours}.feedforward_skip.norm")
    return found


@pytest.mark.parametrize(
    ("layers", "width", "batch", "time"), pairwise([1, 3], [(8, 1), (16, 4), (24, 3)], [1, 3], [1, 5, CONTEXT])
)
def test_logits_loss_and_gradients(layers: int, width: tuple[int, int], batch: int, time: int) -> None:
    settings = preset(layers, *width, context=CONTEXT, vocab_size=VOCAB)
    ours, theirs = parity.random_weights(settings), gpt.GPT(VOCAB, CONTEXT, layers, *width)
    theirs.load_state_dict(rename(settings, ours.state_dict()))
    rows = torch.randint(VOCAB, (batch, time + 1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(rows[:, :-1]), ours(rows[:, :-1]), rtol=1e-5, atol=1e-5)
    given = Batch(rows[:, :-1], rows[:, 1:])
    losses = lambda features: token_loss(ours, features, given, settings=NextToken()), lambda: gpt.loss(theirs, rows)
    parity.assert_same(ours, theirs, partial(rename, settings), given, losses)


@pytest.mark.parametrize("parts", [[12], [1] * 12, [5, 1, 4, 2]])
def test_the_cache_gives_the_logits_of_a_whole_pass(parts: list[int]) -> None:
    torch.manual_seed(0)
    model, tokens = gpt.GPT(VOCAB, CONTEXT, 2, 16, 4), torch.randint(VOCAB, (3, CONTEXT))
    caches: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        stepped = torch.cat([model(part, caches) for part in tokens.split(parts, dim=1)], dim=1)
        torch.testing.assert_close(stepped, model(tokens), rtol=1e-5, atol=1e-5)
    assert all(kept.shape == (3, 4, CONTEXT, 4) for cache in caches for kept in cache)


def test_filters_are_wefts() -> None:
    torch.manual_seed(0)
    drawn = torch.randn(50, VOCAB) * 3
    rounded = drawn.round()  # with many ties
    for logits in (drawn, rounded):
        for temperature in (0.3, 1.0, 2.0):
            expected = sampling.apply_temperature(logits, temperature)
            assert torch.equal(gpt.with_temperature(logits, temperature), expected)
        for k in (1, 2, 7, VOCAB, VOCAB + 5):
            assert torch.equal(gpt.top_k(logits, k), sampling.top_k(logits, k))
        for p in (0.01, 0.3, 0.9, 0.999, 1.0):
            assert torch.equal(gpt.top_p(logits, p), sampling.top_p(logits, p))


def test_generation_follows_the_filter() -> None:
    torch.manual_seed(0)
    model, prompt = gpt.GPT(VOCAB, CONTEXT, 2, 16, 4), torch.randint(VOCAB, (2, 3))
    text = gpt.generate(model, prompt, 6, lambda logits: gpt.top_k(logits, 1))
    assert text.shape == (2, 9) and torch.equal(text[:, :3], prompt)
    with torch.no_grad():
        assert torch.equal(text[:, 3:], model(text)[:, 2:-1].argmax(dim=-1))
