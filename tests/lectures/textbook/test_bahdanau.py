"""lectures/bahdanau.py computes weft's Bahdanau model: logits, loss, gradients, alignment."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.lectures.textbook.lecture import TOLERANCE, assert_gradients, gradients, load
from torch import Tensor

from weft.data.batch import Source
from weft.models.build import build
from weft.models.presets import preset
from weft.nn.loss import linear_cross_entropy

bahdanau = load("bahdanau")

NAMES = {"embedding": "embedding", "source_embedding": "encoder.embedding", "encoder": "encoder.gru", "decoder": "gru"}
NAMES |= {"bridge": "W_s", "maxout": "U_o", "output": "W_o", "attention.queries": "attention.W_a"}
NAMES |= {"attention.keys": "attention.U_a", "attention.scores": "attention.v_a"}
SHAPES: list[dict[str, Any]] = [
    {"layers": 1, "d_model": 6, "d_embedding": 4, "d_attention": 5, "source_vocab_size": 9},
    {"layers": 2, "d_model": 4, "d_embedding": 4, "d_attention": 4, "source_vocab_size": None},
    {"layers": 1, "d_model": 5, "d_embedding": 7, "d_attention": 3, "source_vocab_size": None},
]


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{NAMES[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": value for name, value in weights.items()}


def pair(name: str, shape: dict[str, Any]) -> tuple[Any, Any]:
    """weft's preset at a small size, and the file's model with its weights, and with one table if weft has one."""
    torch.manual_seed(0)
    ours = build(preset(name).replace(vocab_size=11, dropout=0.0, **shape)).double()
    V_x, sizes = shape["source_vocab_size"] or 11, (shape["d_embedding"], shape["d_model"], shape["d_attention"])
    theirs = bahdanau.Bahdanau(V_x, 11, *sizes, shape["layers"]).double()
    if shape["source_vocab_size"] is None:
        theirs.encoder.embedding = theirs.embedding
    missing, unexpected = theirs.load_state_dict(renamed(ours.state_dict()), strict=False)
    assert not unexpected and set(missing) <= {"encoder.embedding.weight"}
    return ours, theirs


@pytest.mark.parametrize("name", ["bahdanau", "bahdanau-tiny"])
@pytest.mark.parametrize("shape", SHAPES, ids=["two tables", "two layers", "one table"])
@pytest.mark.parametrize("lengths", [[5], [4, 1, 6]], ids=str)
def test_logits_loss_gradients_and_alignment_are_wefts(name: str, shape: dict[str, Any], lengths: list[int]) -> None:
    ours, theirs = pair(name, shape)
    B, generator = len(lengths), torch.Generator().manual_seed(1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    x = torch.randint(1, 9, mask.shape, generator=generator).masked_fill(~mask, 0)
    y = torch.randint(1, 11, (B, 8), generator=generator)
    y[-1, 5:] = 0
    seen: list[Tensor] = []
    stop = ours.alignment.watch(seen.append)
    features = ours.forward_features(y[:, :-1], source=Source(x, mask))
    stop()
    logits, alpha = theirs(x, mask, y[:, :-1])
    torch.testing.assert_close(logits, ours.head(features), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(alpha, seen[0], rtol=0, atol=TOLERANCE)
    assert (alpha[~mask[:, None].expand_as(alpha)] == 0).all()
    targets, real = y[:, 1:], y[:, 1:] != 0
    total, _ = linear_cross_entropy(ours.readout(features), targets.flatten(), real.flatten())
    (total / real.sum()).backward()
    loss = bahdanau.loss(logits, targets)
    loss.backward()
    assert loss.item() == pytest.approx(total.item() / int(real.sum()), rel=TOLERANCE)
    expected = renamed(gradients(ours))
    if ours.source_embedding is None:  # the shared table has two names, of which torch reports the first
        expected["encoder.embedding.weight"] = expected.pop("embedding.weight")
    assert_gradients(gradients(theirs), expected)


def test_greedy_translation() -> None:
    """Each word is the likeliest, and the weights are those of a whole pass."""
    _, model = pair("bahdanau", SHAPES[0])
    x = torch.tensor([3, 1, 4, 5])
    words, alpha = model.translate(x, max_words=6)
    assert len(words) == 6 or words[-1] == bahdanau.END
    before = torch.tensor([[bahdanau.START, *words[:-1]]])
    logits, expected = model(x[None], torch.ones(1, 4, dtype=torch.bool), before)
    assert logits[0].argmax(-1).tolist() == words
    torch.testing.assert_close(alpha, expected[0])


def test_the_generated_french() -> None:
    pairs = {" ".join(x): " ".join(y) for x, y in bahdanau.make_pairs(500)}
    for x, y in pairs.items():
        assert len(x.split()) == len(y.split())
        assert ("cow" in x or "goat" in x) == ("la " in y)
