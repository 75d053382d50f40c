"""lectures/transformer.py is weft's Transformer: logits, smoothed loss, gradients and learning rate."""

from functools import partial

import pytest
import torch
from tests.lectures.textbook import parity
from tests.lectures.textbook.lecture import load
from tests.lectures.textbook.parity import Tensors, linear, norm, split
from tests.pairwise import pairwise
from torch import Tensor

from weft.data.batch import Batch, Source
from weft.models.config import EncoderDecoder
from weft.models.presets import vaswani
from weft.nn.position import sinusoids
from weft.objectives.tokens import token_loss
from weft.recipe.objective import Pairs
from weft.training.schedule import noam

transformer = load("transformer")
PAD, VOCAB = transformer.PAD, 23


def attention(weights: Tensors, theirs: str, ours: str, d_model: int) -> dict[str, Tensor]:
    found = linear(weights, f"{theirs}.W_o", f"{ours}.out") | linear(weights, f"{theirs}.W_q", f"{ours}.q")
    found |= split(weights, theirs, ("W_q", "W_k", "W_v"), f"{ours}.qkv", [d_model] * 3)
    return found | split(weights, theirs, ("W_k", "W_v"), f"{ours}.kv", [d_model] * 2)


def rename(settings: EncoderDecoder, weights: Tensors) -> dict[str, Tensor]:
    found = linear(weights, "embedding", "embedding")
    sides = {"encoder": ("attention", "feedforward"), "decoder": ("attention", "cross", "feedforward")}
    for side, sublayers in sides.items():
        for n in range(settings.layers):
            ours, theirs = f"{side}.blocks.{n}", f"{side}.{n}"
            found |= attention(weights, f"{theirs}.self_attention", f"{ours}.attention", settings.d_model)
            found |= attention(weights, f"{theirs}.cross_attention", f"{ours}.cross", settings.d_model)
            found |= linear(weights, f"{theirs}.W1", f"{ours}.feedforward.up")
            found |= linear(weights, f"{theirs}.W2", f"{ours}.feedforward.down")
            for number, name in enumerate(sublayers, start=1):
                found |= norm(weights, f"{theirs}.norm{number}", f"{ours}.{name}_skip.norm")
    return found


def padded(batch: int, time: int) -> Tensor:
    """Padded rows of words, each shorter than the one before."""
    words = torch.randint(PAD + 1, VOCAB, (batch, time))
    lengths = (time - 2 * torch.arange(batch)).clamp(min=1)
    return words.masked_fill(torch.arange(time) >= lengths[:, None], PAD)


@pytest.mark.parametrize(
    ("layers", "shape", "batch", "times", "smoothing"),
    pairwise([1, 2], [(8, 1, 12), (24, 3, 40)], [1, 4], [(7, 5), (1, 1), (3, 11)], [0.0, 0.1]),
)
def test_logits_loss_and_gradients(
    layers: int, shape: tuple[int, int, int], batch: int, times: tuple[int, int], smoothing: float
) -> None:
    settings = vaswani(layers, *shape[:2], d_ff=shape[2], dropout=0.1, vocab_size=VOCAB)
    ours, theirs = parity.random_weights(settings), transformer.Transformer(VOCAB, layers, *shape).eval()
    theirs.load_state_dict(rename(settings, ours.state_dict()))
    read, written = padded(batch, times[0]), padded(batch, times[1] + 1)
    source, real = Source(read, read != PAD), written[:, 1:] != PAD
    real[0, 0] = True
    written[:, 1][real[:, 0]] = written[:, 1][real[:, 0]].clamp(min=PAD + 1)
    with torch.no_grad():
        logits = theirs.decode(written[:, :-1], *theirs.encode(read))
        torch.testing.assert_close(logits, ours(written[:, :-1], source=source), rtol=1e-5, atol=1e-5)
    given = Batch(written[:, :-1], written[:, 1:], loss_mask=real, source=source)

    def loss() -> Tensor:
        logits = theirs.decode(written[:, :-1], *theirs.encode(read))
        return transformer.smoothed_loss(logits, written[:, 1:], smoothing)

    weft = lambda features: token_loss(ours, features, given, settings=Pairs(smoothing=smoothing))  # noqa: E731
    parity.assert_same(ours, theirs, partial(rename, settings), given, (weft, loss))


@pytest.mark.parametrize(("d_model", "warmup"), [(512, 4000), (64, 300), (1024, 1)])
def test_the_learning_rate(d_model: int, warmup: int) -> None:
    for step in (1, 2, warmup - 1 or 1, warmup, warmup + 1, 100_000):
        assert transformer.lrate(step, d_model, warmup) == noam(step, d_model, warmup)


def test_the_sinusoids() -> None:
    torch.testing.assert_close(transformer.sinusoids(50, 12), sinusoids(torch.arange(50), 12), rtol=0, atol=1e-12)


def test_greedy_decoding() -> None:
    torch.manual_seed(0)
    model = transformer.Transformer(VOCAB, 2, 16, 4, 32).eval()
    source = [5, 9, 7, transformer.END]
    target, attn = transformer.translate(model, source)
    assert attn.shape == (len(target), len(source))
    torch.testing.assert_close(attn.sum(dim=-1), torch.ones(len(target)))
    with torch.no_grad():
        logits = model.decode(torch.tensor([[transformer.BEGIN, *target]]), *model.encode(torch.tensor([source])))
    assert logits[0, :-1].argmax(dim=-1).tolist() == target
