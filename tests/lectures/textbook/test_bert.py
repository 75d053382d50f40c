"""lectures/bert.py is weft's BERT: logits, losses and gradients of both pretraining tasks, and of the classifier."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.lectures.textbook import parity
from tests.lectures.textbook.lecture import load
from tests.lectures.textbook.parity import Tensors, linear, split
from tests.pairwise import pairwise
from torch import Tensor, nn
from torch.nn import functional as F

from weft.data.batch import Batch
from weft.models.config import Encoder
from weft.models.head_config import ClassificationHead
from weft.models.presets import bert as preset
from weft.objectives.masked import masked_loss

bert = load("bert")
VOCAB, CONTEXT = 29, 20


def encoder(settings: Encoder, weights: Tensors) -> dict[str, Tensor]:
    found = linear(weights, "encoder.words", "embedding") | linear(weights, "encoder.positions", "encoder.position")
    found |= linear(weights, "encoder.segments", "segments")
    found |= linear(weights, "encoder.norm", "encoder.embedding_norm")
    names = {"W_o": "attention.out", "W1": "feedforward.up", "W2": "feedforward.down"}
    names |= {"norm1": "attention_skip.norm", "norm2": "feedforward_skip.norm"}
    for n in range(settings.layers):
        ours, theirs = f"encoder.blocks.{n}", f"encoder.layers.{n}"
        found |= split(weights, theirs, ("W_q", "W_k", "W_v"), f"{ours}.attention.qkv", [settings.d_model] * 3)
        for name, part in names.items():
            found |= linear(weights, f"{theirs}.{name}", f"{ours}.{part}")
    return found


def pretraining(settings: Encoder, weights: Tensors) -> dict[str, Tensor]:
    return {
        **encoder(settings, weights),
        **linear(weights, "head.W_d", "output.words.dense"),
        **linear(weights, "head.norm", "output.words.norm"),
        "head.b": weights["output.words.bias"],
        **linear(weights, "head.next_sentence.pooler", "output.next_sentence.pooler.dense"),
        **linear(weights, "head.next_sentence.out", "output.next_sentence.out"),
    }


def classifier(settings: Encoder, weights: Tensors) -> dict[str, Tensor]:
    found = encoder(settings, weights) | linear(weights, "head.pooler", "output.pooler.dense")
    return found | linear(weights, "head.out", "output.out")


def rows(batch: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, segments and labels of sentences of different lengths."""

    def words(length: int) -> list[int]:
        return torch.randint(bert.MASK + 1, VOCAB, (max(1, length),)).tolist()

    return bert.to_batch([(words(longest // 2 - n), words(longest // 2 - 2 * n), n % 2) for n in range(batch)])


SHAPES = pairwise([1, 3], [(8, 1), (24, 4)], [1, 5], [4, 16])


@pytest.mark.parametrize(("layers", "width", "batch", "longest"), SHAPES)
def test_both_tasks_of_pretraining(layers: int, width: tuple[int, int], batch: int, longest: int) -> None:
    settings = preset(layers, *width, vocab_size=VOCAB, context=CONTEXT)
    ours, parts = parity.random_weights(settings), bert.Encoder(VOCAB, CONTEXT, layers, *width)
    theirs = nn.ModuleDict({"encoder": parts, "head": bert.Pretraining(VOCAB, width[0])}).eval()
    theirs.load_state_dict(pretraining(settings, ours.state_dict()))
    words, segments, is_next = rows(batch, longest)
    tokens, chosen = bert.mask_words(words, VOCAB)
    chosen[:, 1] = True
    real = tokens != bert.PAD

    def logits() -> tuple[Tensor, Tensor]:
        return theirs["head"](parts(tokens, segments), parts.words.weight)

    with torch.no_grad():
        expected = ours(tokens, segments=segments, mask=real)
        torch.testing.assert_close(logits()[0][real], expected.words[real], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits()[1], expected.next_sentence, rtol=1e-5, atol=1e-5)
    weight = torch.full((batch,), float(chosen.sum()) / batch)
    given = Batch(tokens, words, loss_mask=chosen, mask=real, segments=segments)
    given = replace(given, next_sentence=is_next, next_sentence_weight=weight)
    losses = (
        lambda features: masked_loss(ours, features, given),
        lambda: bert.pretraining_loss(logits(), words, chosen, is_next),
    )
    parity.assert_same(ours, theirs, partial(pretraining, settings), given, losses)


@pytest.mark.parametrize(("layers", "width", "batch", "longest"), SHAPES)
def test_the_classifier(layers: int, width: tuple[int, int], batch: int, longest: int) -> None:
    settings = preset(layers, *width, vocab_size=VOCAB, context=CONTEXT).replace(head=ClassificationHead(labels=3))
    ours, parts = parity.random_weights(settings), bert.Encoder(VOCAB, CONTEXT, layers, *width)
    theirs = nn.ModuleDict({"encoder": parts, "head": bert.Classifier(width[0], 3)}).eval()
    theirs.load_state_dict(classifier(settings, ours.state_dict()))
    tokens, segments, labels = rows(batch, longest)
    given = Batch(tokens, labels, mask=tokens != bert.PAD, segments=segments)
    with torch.no_grad():
        expected = ours(tokens, segments=segments, mask=given.mask)
        torch.testing.assert_close(theirs["head"](parts(tokens, segments)), expected, rtol=1e-5, atol=1e-5)
    losses = (
        lambda features: (F.cross_entropy(ours.head(features, given.mask), labels, reduction="sum"), batch),
        lambda: F.cross_entropy(theirs["head"](parts(tokens, segments)), labels),
    )
    parity.assert_same(ours, theirs, partial(classifier, settings), given, losses)


def test_masking() -> None:
    """15 % of the words are chosen, of these 80, 10 and 10 %, never special tokens; within four standard errors."""
    torch.manual_seed(0)
    words = torch.randint(0, 10_000, (1000, 1000))
    tokens, chosen = bert.mask_words(words, 10_000)
    assert not chosen[words <= bert.MASK].any() and torch.equal(tokens[~chosen], words[~chosen])
    count = int(chosen.sum())
    assert count / int((words > bert.MASK).sum()) == pytest.approx(0.15, abs=0.0015)
    changed = chosen & (tokens != words)
    assert int((tokens == bert.MASK)[chosen].sum()) / count == pytest.approx(0.8, abs=0.005)
    assert int((changed & (tokens != bert.MASK)).sum()) / count == pytest.approx(0.1, abs=0.004)
    assert tokens[changed].min() == bert.MASK


def test_next_sentences() -> None:
    documents = [[[10 * n + m] for m in range(4)] for n in range(10)]
    drawn = [bert.next_sentence(documents) for _ in range(4000)]
    for (a,), (b,), is_next in drawn:
        assert b == a + 1 if is_next else a // 10 != b // 10
    assert sum(is_next for *_, is_next in drawn) == pytest.approx(2000, abs=130)


def test_rows_become_a_batch() -> None:
    tokens, segments, labels = bert.to_batch([([7, 8], [9], 1), ([7], [8, 9, 9], 0)])
    cls, sep, pad = bert.CLS, bert.SEP, bert.PAD
    assert tokens.tolist() == [[cls, 7, 8, sep, 9, sep, pad], [cls, 7, sep, 8, 9, 9, sep]]
    assert segments.tolist() == [[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1]] and labels.tolist() == [1, 0]
