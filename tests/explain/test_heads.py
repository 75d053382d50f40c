"""Statistics of heads against their definitions."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.explain.small import sharp, small
from torch import nn

from weft.errors import ModelError
from weft.explain.attention.maps import AttentionKind, attention_maps
from weft.explain.capture import capture, without_head
from weft.explain.heads import HeadTable, head_statistics, induction_scores
from weft.explain.reading import Reading
from weft.models.config import Bahdanau, Decoder, Encoder, EncoderDecoder
from weft.text.config import Char
from weft.text.tokenizer import build_tokenizer

TEXT = "the voting process is more difficult"
SMALL = small(300)
TOKENIZER = build_tokenizer(Char(), [TEXT])


def reading(config: Any, source: str | None = None) -> Reading:
    source_ids = None if source is None else tuple(TOKENIZER.encode(source))
    model = sharp(config, factor=1.0, noise=0.1)  # so that the heads differ
    return Reading(model, TOKENIZER, tuple(TOKENIZER.encode(TEXT)), source=source_ids)


@pytest.fixture(scope="module")
def decoder() -> Reading:
    return reading(Decoder(**SMALL))


@pytest.fixture(scope="module")
def table(decoder: Reading) -> HeadTable:
    return head_statistics(decoder)


def loss(read: Reading) -> float:
    with torch.no_grad():
        logits = read.model(read.tokens, **read.model_kwargs)
        return float(nn.functional.cross_entropy(logits[0, :-1], read.tokens[0, 1:]))


def test_statistics_of_the_probabilities(decoder: Reading, table: HeadTable) -> None:
    """In loops, token by token."""
    (part,) = attention_maps(decoder).parts
    T, of = len(part.queries), table.statistics["decoder"]
    for layer, head in np.ndindex(2, 4):
        p = part.probabilities[layer, head].astype(float)
        entropy = np.mean([-sum(w * np.log(w) for w in row if w > 0) for row in p])
        distance = np.mean([sum(p[t, s] * abs(t - s) for s in range(T)) for t in range(T)])
        assert of["entropy"][layer, head] == pytest.approx(entropy, abs=1e-5)
        assert of["distance"][layer, head] == pytest.approx(distance, abs=1e-4)
        assert of["first"][layer, head] == pytest.approx(np.mean(p[1:, 0]), abs=1e-6)
        for name, offset in (("previous", 1), ("itself", 0)):
            assert of[name][layer, head] == pytest.approx(np.mean([p[t, t - offset] for t in range(1, T)]), abs=1e-6)


def test_ablation_costs_are_the_increase_of_the_loss(decoder: Reading, table: HeadTable) -> None:
    whole = loss(decoder)
    for layer, head in np.ndindex(2, 4):
        with capture(decoder.model, replace={f"decoder.{layer}.attention.probabilities": without_head(head)}):
            without = loss(decoder)
        assert table.statistics["decoder"]["cost"][layer, head] == pytest.approx(without - whole, abs=1e-5)
    assert [each.cost for each in table.heads()] == sorted((each.cost for each in table.heads()), reverse=True)
    assert np.isnan(head_statistics(decoder, ablate=False).statistics["decoder"]["cost"]).all()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in decoder.model.modules())


def test_ablation_of_an_encoder_decoder() -> None:
    read = reading(EncoderDecoder(**SMALL), "voting more")
    found = head_statistics(read)
    whole = loss(read)
    kinds: list[tuple[AttentionKind, str, int]] = [("encoder", "attention", 0), ("decoder", "attention", 1)]
    for kind, part, layer in (*kinds, ("cross", "cross", 0)):
        stack = "encoder" if kind == "encoder" else "decoder"
        with capture(read.model, replace={f"{stack}.{layer}.{part}.probabilities": without_head(2)}):
            without = loss(read)
        assert found.statistics[kind]["cost"][layer, 2] == pytest.approx(without - whole, abs=1e-5)
    cross = found.statistics["cross"]
    assert np.isnan(cross["previous"]).all() and cross["entropy"].shape == (2, 4)
    assert "cross 0.2" in found.text() and found.figure().axes and "attention to the source: cost" in found.html()


def test_models_that_predict_no_next_token() -> None:
    encoder = head_statistics(reading(Encoder(**SMALL)))
    assert np.isnan(encoder.statistics["encoder"]["cost"]).all() and "cost" not in encoder.text()
    bahdanau = head_statistics(reading(Bahdanau(vocab_size=300, d_model=16), "more"))
    assert list(bahdanau.statistics) == ["cross"] and bahdanau.statistics["cross"]["entropy"].shape == (1, 1)
    with pytest.raises(ModelError, match="a model of kind 'encoder' has no induction score; it takes a decoder"):
        induction_scores(reading(Encoder(**SMALL)).model, 300)


def test_heads_are_named(monkeypatch: pytest.MonkeyPatch, decoder: Reading) -> None:
    """Constructed heads with one role each."""
    maps = attention_maps(decoder)
    (part,) = maps.parts
    T = len(part.queries)
    p = np.zeros_like(part.probabilities)
    p[0, 0, 0, 0] = 1
    p[0, 0, np.arange(1, T), np.arange(T - 1)] = 1  # previous token
    p[0, 1, :, 0] = 1  # first token
    p[0, 2] = np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]  # uniform
    p[0, 3] = np.eye(T)  # same token
    near = np.tril(np.ones((T, T))) - np.tril(np.ones((T, T)), -4)
    p[1, 0] = near / near.sum(-1, keepdims=True)  # local: itself and the three before
    p[1, 1:] = part.probabilities[1, 1:]
    scores = np.array([[0.1, 0.0, 0.0, 0.0], [0.0, 0.0, 0.45, 0.39]])
    monkeypatch.setattr("weft.explain.heads.induction_scores", lambda *_: scores)
    constructed = replace(maps, parts=(part._replace(probabilities=p),))
    names = head_statistics(decoder, ablate=False, maps=constructed).names["decoder"]
    assert names[0] == [("previous token",), ("first token (sink)",), ("uniform",), ("same token",)]
    assert names[1][0] == ("local",) and "induction" in names[1][2] and "induction" not in names[1][3]


def test_text_fits_a_terminal_and_the_page_is_a_table(table: HeadTable) -> None:
    text = table.text()
    assert text.startswith("What 8 heads do") and max(map(len, text.splitlines())) < 80
    html = table.html()
    assert html.count("<svg") == 8 and '<th scope="row">' in html and 'aria-label="cost of 2 layers' in html


def test_induction_scores_by_definition(decoder: Reading) -> None:
    once = torch.randint(300, (3, 10), generator=torch.Generator().manual_seed(4))
    with torch.no_grad(), capture(decoder.model, "decoder.1.attention.probabilities") as captured:
        decoder.model(once.repeat(1, 2))
    p = captured["decoder.1.attention.probabilities"].numpy()
    expected = [np.mean([p[row, head, i, i - 9] for row in range(3) for i in range(10, 20)]) for head in range(4)]
    np.testing.assert_allclose(induction_scores(decoder.model, 300, 10, rows=3, seed=4)[1], expected, atol=1e-6)


def test_a_long_distance_head_is_found_and_its_layer_drawn(decoder: Reading) -> None:
    maps = attention_maps(decoder)
    (part,) = maps.parts
    p = np.tril(np.ones_like(part.probabilities))
    p /= p.sum(-1, keepdims=True)
    p[1, 2, 8] = 0.0
    p[1, 2, 8, 2], p[1, 2, 8, 8] = 0.9, 0.1
    p[0, 0, 8] = 0.0
    p[0, 0, 8, 0] = 1.0  # the first token does not count
    constructed = replace(maps, parts=(part._replace(probabilities=p),))
    table = head_statistics(decoder, ablate=False, maps=constructed)
    assert [head.names.count("long distance") for head in table.heads()].count(1) == 1
    pair = f"{part.queries[8]} → {part.keys[2]}"
    assert f"long distance: 1 head: 1.2 {pair} 0.90" in table.html() and table.pairs["decoder"][1][2] == pair
    assert "layer 1" in constructed.follow(8).title
