"""Attention maps hold what the model computes, and show it: heat map, grid, lines, rollout, page."""

import base64
import io
import json
import math
import re
import zlib

import numpy as np
import pytest
import torch
from tests.explain.small import small
from torch import nn

from weft.errors import ConfigError, DataError, ModelError
from weft.explain.attention.lines import gaps
from weft.explain.attention.maps import MAX_PAGE_BYTES, AttentionMaps, KindMaps, attention_maps
from weft.explain.capture import capture
from weft.explain.reading import Reading, SourceTokens
from weft.figures.heatmap import pooled
from weft.models.build import build
from weft.models.config import Bahdanau, Decoder, Encoder, EncoderDecoder, NGram, Recurrent
from weft.text.config import Char
from weft.text.tokenizer import build_tokenizer

TEXT = "it is making the voting process more difficult"
SMALL = small(300, context=600, layers=3)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(Char(), [TEXT + " <>&$\n"])


def reading(config, tokenizer, text: str = TEXT, source: str | None = None) -> Reading:
    torch.manual_seed(0)
    other = None if source is None else tuple(tokenizer.encode(source))
    return Reading(build(config).eval(), tokenizer, tuple(tokenizer.encode(text)), source=other)


@pytest.fixture(scope="module")
def decoder(tokenizer) -> Reading:
    return reading(Decoder(**SMALL), tokenizer)


@pytest.fixture(scope="module")
def maps(decoder) -> AttentionMaps:
    return attention_maps(decoder)


def data_of(html: str):
    return json.loads(re.search(r'class="data">(.*?)</script>', html, re.DOTALL)[1])["parts"]


def unpacked(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)


def test_a_decoders_weights_are_those_of_the_formula(decoder, maps) -> None:
    (part,) = maps.parts
    T = len(decoder.ids)
    assert (
        part.kind == "decoder" and part.probabilities.shape == (3, 4, T, T) and part.probabilities.dtype == np.float32
    )
    with torch.no_grad(), capture(decoder.model, "decoder.1.attention.qkv") as seen:
        decoder.model.features(decoder.tokens)
    q, k, _ = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in seen["decoder.1.attention.qkv"].chunk(3, -1))
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    np.testing.assert_allclose(part.probabilities[1], scores.softmax(-1)[0], atol=1e-6)
    np.testing.assert_allclose(part.probabilities.sum(-1), 1, atol=1e-6)
    assert (part.probabilities[..., *np.triu_indices(T, 1)] == 0).all()


def test_encoders_pairs_and_bahdanau(tokenizer) -> None:
    (part,) = attention_maps(reading(Encoder(**SMALL), tokenizer)).parts
    assert part.kind == "encoder" and part.queries == part.keys == [sign.replace(" ", "␣") for sign in TEXT]
    both = attention_maps(reading(EncoderDecoder(**SMALL), tokenizer, "the more", "voting"))
    assert both.kinds == ["encoder", "decoder", "cross"]
    assert [part.probabilities.shape for part in both.parts] == [(3, 4, 6, 6), (3, 4, 8, 8), (3, 4, 8, 6)]
    assert both.part().queries == [*"he␣more", "…"] and both.part().keys == list("voting")
    assert both.head(2, 3, "encoder").probabilities.shape == (6, 6)
    old = attention_maps(reading(Bahdanau(vocab_size=300, d_model=16), tokenizer, "the", "is it"))
    assert old.kinds == ["cross"] and old.part().probabilities.shape == (1, 1, 3, 5)
    for each in (both, old):
        for one in each.parts:
            np.testing.assert_allclose(one.probabilities.sum(-1), 1, atol=1e-5)
    with pytest.raises(ModelError, match="needs layers of self-attention"):
        old.rollout()
    with pytest.raises(ConfigError, match="kind 'decoder': this model has cross attention"):
        old.head(0, 0, "decoder")
    with pytest.raises(ConfigError, match="--head 1: this model has one head, number 0"):
        old.head(0, 1)


@pytest.mark.parametrize("config", [NGram(vocab_size=300), Recurrent(vocab_size=40, d_model=8)])
def test_models_without_attention(config, tokenizer) -> None:
    with pytest.raises(ModelError, match=f"a model of kind '{config.kind}' has no attention; it takes a Transformer"):
        attention_maps(reading(config, tokenizer))


@pytest.mark.slow
def test_bahdanau_that_copies_looks_along_the_diagonal(tokenizer) -> None:
    """Rows are named by what is written, so that a copy is a diagonal with the same token on both sides."""
    torch.manual_seed(0)
    model, rng = build(Bahdanau(vocab_size=9, d_model=32, cell="elman")), torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(200):
        tokens, lengths = torch.randint(8, (32, 6), generator=rng), torch.randint(3, 7, (32, 1), generator=rng)
        mask = torch.arange(6) < lengths
        inputs = torch.cat([torch.full((32, 1), 8), tokens[:, :-1]], dim=1)
        logits = model(inputs, source=SourceTokens(tokens, mask))
        loss = nn.functional.cross_entropy(logits[mask], tokens[mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    text = (3, 1, 4, 0, 5, 2)
    read = Reading(model, tokenizer, (8, *text), source=text)
    part = attention_maps(read).part()
    assert part.queries[:-1] == part.keys == read.source_pieces
    assert part.probabilities[0, 0, :6].argmax(-1).tolist() == list(range(6))


def test_head_and_zoom(maps) -> None:
    whole = maps.head(2, 1)
    assert whole.title == "Decoder self-attention, layer 2, head 1"
    np.testing.assert_array_equal(whole.probabilities, maps.parts[0].probabilities[2, 1])
    part = maps.head(2, 1, zoom=(6, 12))
    assert "".join(part.queries) == "making" and part.keys == part.queries
    np.testing.assert_array_equal(part.probabilities, whole.probabilities[6:12, 6:12])
    assert "   6  m  → " in part.text()
    with pytest.raises(ConfigError, match="--layer 99: this model has 3 layers, 0 to 2"):
        maps.head(99, 0)
    with pytest.raises(ConfigError, match="--head -1: this model has 4 heads, 0 to 3"):
        maps.head(0, -1)
    with pytest.raises(DataError, match="tokens 5 to 3: the text has 46 tokens"):
        maps.head(0, 0, zoom=(5, 3))


def test_follow(maps) -> None:
    lines = maps.follow("making", 1)
    assert lines.chosen == list(range(6, 12)) and lines.heads == [0, 1, 2, 3]
    np.testing.assert_array_equal(lines.probabilities, maps.parts[0].probabilities[1][:, 6:12])
    one = maps.follow("Voting process", 1, head=2)
    assert one.probabilities.shape == (1, 14, 46) and "head  2" in one.text()
    assert maps.follow(4, 0).chosen == [4]
    assert maps.follow("i", 0).chosen == [0] and "the first of 6" in maps.follow("i", 0).about  # no word of its own
    with pytest.raises(DataError, match="'makjn' is not in the text; did you mean 'making'"):
        maps.follow("makjn", 1)
    with pytest.raises(DataError, match="token 46: the text has 46 tokens, 0 to 45"):
        maps.follow(46, 1)
    with pytest.raises(ConfigError, match="--layer 3"):
        maps.follow("making", 3)


def test_rollout(maps) -> None:
    """By hand: the sum over all paths through the layers."""
    weights = maps.parts[0].probabilities.astype(np.float64).mean(1)
    one, two, three = (0.5 * each + 0.5 * np.eye(46) for each in weights)
    np.testing.assert_allclose(maps.rollout().probabilities, np.einsum("ij,jk,kl->il", three, two, one), atol=1e-6)
    np.testing.assert_allclose(maps.rollout().probabilities.sum(-1), 1, atol=1e-5)


def test_pooling_keeps_thin_lines() -> None:
    weights = np.zeros((2, 401, 303), np.float32)
    weights[1, 400, 302] = weights[0, 17, 5] = 0.7
    small, block = pooled(weights, 100)
    assert block == 5 and small.shape == (2, 81, 61)
    assert small[1, 80, 60] == small[0, 3, 1] == np.float32(0.7) and np.count_nonzero(small) == 2
    assert pooled(weights, 401)[0] is weights
    assert gaps([1, 2, 5, 6, 9]) == [1, 3]


@pytest.mark.parametrize("tokens", [2, 14, pytest.param(400, marks=pytest.mark.slow)])
def test_figures(tokens: int, tokenizer) -> None:
    text = (TEXT + " <$x$\n") * 20
    found = attention_maps(reading(Decoder(**SMALL), tokenizer, text[:tokens]))
    for picture in (found, found.head(1, 2), found.follow(1, 0), found.rollout()):
        assert picture.title and picture.about and picture.text()
        figure = picture.figure()
        figure.savefig(io.BytesIO(), format="svg")
        assert max(figure.get_size_inches()) < 20
    axes = found.head(1, 2).figure().axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) == tokens if tokens <= 60 else 30 <= len(labels) <= 60
    assert axes.images[0].get_array().shape == ((200, 200) if tokens == 400 else (tokens, tokens))


def test_page_holds_the_weights(maps) -> None:
    html = maps.html()
    (found,) = data_of(html)
    bytes_ = unpacked(found["weights"]).reshape(3, 4, -1)
    expected = maps.parts[0].probabilities[:, :, *np.tril_indices(46)]
    np.testing.assert_allclose((bytes_ / found["levels"]) ** 2, expected, atol=0.003)
    assert found["past"] and found["block"] == 1 and found["queries"] == maps.parts[0].queries
    page = maps._repr_html_()
    assert "data-module" in page and "https://" not in page.replace("http://www.w3.org", "")
    assert "layer  2  mostly to" in html  # what is left without a script


def test_a_page_of_two_sections_tells_once_what_it_shows(maps, tmp_path) -> None:
    text = maps.save(tmp_path / "page.html").read_text("utf-8")
    assert len(maps.sections()) == 2 and text.count(f'<p class="soft about">{maps.about[:40]}') == 1
    assert text.count(maps.about[:40]) == 1


def test_page_of_a_long_text_is_pooled_and_keeps_the_strongest_keys(tokenizer) -> None:
    found = attention_maps(reading(Decoder(**SMALL), tokenizer, (TEXT + " ") * 6))
    (kept,) = data_of(found.html())
    weights, T = found.parts[0].probabilities, len(found.parts[0].queries)
    assert kept["block"] == 3 and kept["rows"] == 94 and "a block of 3 × 3 tokens" in found.html()
    best = unpacked(kept["best"]).astype(int).reshape(3, kept["count"], 3, 4, T)
    keys = best[0] + 256 * best[1]
    order = np.moveaxis(np.sort(weights, -1)[..., ::-1][..., : kept["count"]], -1, 0)
    taken = np.take_along_axis(weights, np.moveaxis(keys, 0, -1), -1)
    np.testing.assert_array_equal(np.moveaxis(taken, -1, 0), order)
    np.testing.assert_allclose((best[2] / kept["levels"]) ** 2, order, atol=0.01)


def test_page_of_many_heads_stays_small_and_escapes() -> None:
    """The worst case: 12 × 12 heads that see both sides, whose weights nothing can pack."""
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.full(128, 0.3), (12, 12, 128)).astype(np.float32)
    labels = ["</script><b>", *(f"w{n}" for n in range(127))]
    part = KindMaps("encoder", weights, labels, labels)
    html = AttentionMaps("", "", (*[part],)).html()
    assert len(html) < 1.1 * MAX_PAGE_BYTES and "</script><b>" not in html
    (found,) = data_of(html)
    assert found["queries"][0] == labels[0] and found["rows"] == 128
    stored = (unpacked(found["weights"]).reshape(weights.shape) / found["levels"]) ** 2
    np.testing.assert_allclose(stored, weights, atol=1.01 / found["levels"])


def test_a_text_that_is_too_long(tokenizer) -> None:
    read = reading(Decoder(**{**SMALL, "context": 6000}), tokenizer, TEXT * 110)
    with pytest.raises(DataError, match=r"all 12 heads over 5060 tokens is too much; give at most 4729 tokens"):
        attention_maps(read)
