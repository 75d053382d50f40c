"""Attention maps hold what the model computes, and show it: heat map, grid, lines, rollout, page."""

import base64
import io
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.explain.small import page_data, small
from tests.spread import slow

from weft.errors import ConfigError, DataError, ModelError
from weft.explain.attention.lines import gaps
from weft.explain.attention.maps import MAX_PAGE_BYTES, AttentionMaps, KindMaps, attention_maps
from weft.explain.capture import capture
from weft.explain.reading import Reading
from weft.figures.heatmap import max_pool
from weft.models.build import build
from weft.models.config import Bahdanau, Decoder, Encoder, EncoderDecoder, NGram, Recurrent
from weft.text.config import Char
from weft.text.tokenizer import build_tokenizer

TEXT = "it is making the voting process more difficult"
SMALL = small(300, context=600, layers=3)
TOKENIZER = build_tokenizer(Char(), [TEXT + " <>&$\n"])


def reading(config: Any, text: str = TEXT, source: str | None = None) -> Reading:
    torch.manual_seed(0)
    source_ids = None if source is None else tuple(TOKENIZER.encode(source))
    return Reading(build(config).eval(), TOKENIZER, tuple(TOKENIZER.encode(text)), source=source_ids)


@pytest.fixture(scope="module")
def decoder() -> Reading:
    return reading(Decoder(**SMALL))


@pytest.fixture(scope="module")
def maps(decoder: Reading) -> AttentionMaps:
    return attention_maps(decoder)


def unpacked(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)


def test_a_decoders_probabilities_are_those_of_the_formula(decoder: Reading, maps: AttentionMaps) -> None:
    (part,) = maps.parts
    T, p = len(decoder.ids), part.probabilities
    assert part.kind == "decoder" and p.shape == (3, 4, T, T) and p.dtype == np.float32
    with torch.no_grad(), capture(decoder.model, "decoder.1.attention.qkv") as captured:
        decoder.model.features(decoder.tokens)
    q, k, _ = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in captured["decoder.1.attention.qkv"].chunk(3, -1))
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    np.testing.assert_allclose(p[1], scores.softmax(-1)[0], atol=1e-6)
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-6)
    assert (p[..., *np.triu_indices(T, 1)] == 0).all()


def test_encoders_encoder_decoders_and_bahdanau() -> None:
    (part,) = attention_maps(reading(Encoder(**SMALL))).parts
    assert part.kind == "encoder" and part.queries == part.keys == [char.replace(" ", "␣") for char in TEXT]
    both = attention_maps(reading(EncoderDecoder(**SMALL), "the more", "voting"))
    assert [part.kind for part in both.parts] == ["encoder", "decoder", "cross"]
    assert [part.probabilities.shape for part in both.parts] == [(3, 4, 6, 6), (3, 4, 8, 8), (3, 4, 8, 6)]
    assert both.part().queries == [*"he␣more", "…"] and both.part().keys == list("voting")
    assert both.head(2, 3, "encoder").probabilities.shape == (6, 6)
    bahdanau = attention_maps(reading(Bahdanau(vocab_size=300, d_model=16), "the", "is it"))
    assert [each.kind for each in bahdanau.parts] == ["cross"] and bahdanau.part().probabilities.shape == (1, 1, 3, 5)
    assert bahdanau.head(0, 0).title == "Attention to the source"  # one map: no layers and heads to tell apart
    assert bahdanau.follow(0).title.endswith("attends to: attention to the source")
    for part in (*both.parts, *bahdanau.parts):
        np.testing.assert_allclose(part.probabilities.sum(-1), 1, atol=1e-5)
    with pytest.raises(ModelError, match="needs layers of self-attention"):
        bahdanau.rollout()
    with pytest.raises(ConfigError, match="kind 'decoder': this model has cross attention"):
        bahdanau.head(0, 0, "decoder")
    with pytest.raises(ConfigError, match="--head 1: this model has one head, number 0"):
        bahdanau.head(0, 1)


@pytest.mark.parametrize("config", [NGram(vocab_size=300), Recurrent(vocab_size=40, d_model=8)])
def test_models_without_attention(config: Any) -> None:
    with pytest.raises(ModelError, match=f"a model of kind '{config.kind}' has no attention; it takes a Transformer"):
        attention_maps(reading(config))


def test_head_and_zoom(maps: AttentionMaps) -> None:
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


def test_follow(maps: AttentionMaps) -> None:
    lines = maps.follow("making", 1)
    assert lines.chosen == list(range(6, 12)) and lines.heads == [0, 1, 2, 3]
    np.testing.assert_array_equal(lines.probabilities, maps.parts[0].probabilities[1][:, 6:12])
    one = maps.follow("Voting process", 1, head=2)
    assert one.probabilities.shape == (1, 14, 46) and "head  2" in one.text()
    assert maps.follow(4, 0).chosen == [4]
    assert maps.follow("i", 0).chosen == [0] and "the first of 6" in maps.follow("i", 0).about  # part of a word
    with pytest.raises(DataError, match="'makjn' is not in the text; did you mean 'making'"):
        maps.follow("makjn", 1)
    with pytest.raises(DataError, match="token 46: the text has 46 tokens, 0 to 45"):
        maps.follow(46, 1)
    with pytest.raises(ConfigError, match="--layer 3"):
        maps.follow("making", 3)


def test_rollout_is_the_sum_over_all_paths_through_the_layers(maps: AttentionMaps) -> None:
    means = maps.parts[0].probabilities.astype(np.float64).mean(1)
    one, two, three = (0.5 * each + 0.5 * np.eye(46) for each in means)
    rollout = maps.rollout().probabilities
    np.testing.assert_allclose(rollout, np.einsum("ij,jk,kl->il", three, two, one), atol=1e-6)
    np.testing.assert_allclose(rollout.sum(-1), 1, atol=1e-5)


def test_pooling_keeps_thin_lines() -> None:
    weights = np.zeros((2, 401, 303), np.float32)
    weights[1, 400, 302] = weights[0, 17, 5] = 0.7
    small, block = max_pool(weights, 100)
    assert block == 5 and small.shape == (2, 81, 61)
    assert small[1, 80, 60] == small[0, 3, 1] == np.float32(0.7) and np.count_nonzero(small) == 2
    assert max_pool(weights, 401)[0] is weights
    assert gaps([1, 2, 5, 6, 9]) == [1, 3]


@pytest.mark.parametrize("tokens", [slow(14), 2, slow(400)])
def test_figures(tokens: int) -> None:
    maps = attention_maps(reading(Decoder(**SMALL), ((TEXT + " <$x$\n") * 20)[:tokens]))
    for picture in (maps, maps.head(1, 2), maps.follow(1, 0), maps.rollout()):
        assert picture.title and picture.about and picture.text()
        figure = picture.figure()
        figure.savefig(io.BytesIO(), format="svg")
        assert max(figure.get_size_inches()) < 20
    axes = maps.head(1, 2).figure().axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) == tokens if tokens <= 60 else 30 <= len(labels) <= 60
    cells = axes.images[0].get_array()
    assert cells is not None and cells.shape == ((200, 200) if tokens == 400 else (tokens, tokens))


def test_the_page_holds_the_probabilities(maps: AttentionMaps, tmp_path: Path) -> None:
    html = maps.html()
    (data,) = page_data(html)["parts"]
    quantised = unpacked(data["weights"]).reshape(3, 4, -1)
    expected = maps.parts[0].probabilities[:, :, *np.tril_indices(46)]
    np.testing.assert_allclose((quantised / data["levels"]) ** 2, expected, atol=0.003)
    assert data["past"] and data["block"] == 1 and data["queries"] == maps.parts[0].queries
    notebook = maps._repr_html_()
    assert "data-module" in notebook and "https://" not in notebook.replace("http://www.w3.org", "")
    assert "layer  2  mostly to" in html  # shown without scripts
    text = maps.save(tmp_path / "page.html").read_text("utf-8")  # two sections, explained once
    assert len(maps.sections()) == 2 and text.count(f'<p class="soft about">{maps.about[:40]}') == 1
    assert text.count(maps.about[:40]) == 1


def test_the_page_of_a_long_text_is_pooled_and_keeps_the_strongest_keys() -> None:
    maps = attention_maps(reading(Decoder(**SMALL), (TEXT + " ") * 6))
    (data,) = page_data(maps.html())["parts"]
    p, T = maps.parts[0].probabilities, len(maps.parts[0].queries)
    assert data["block"] == 3 and data["rows"] == 94 and "a block of 3 × 3 tokens" in maps.html()
    best = unpacked(data["best"]).astype(int).reshape(3, data["count"], 3, 4, T)
    keys = best[0] + 256 * best[1]
    order = np.moveaxis(np.sort(p, -1)[..., ::-1][..., : data["count"]], -1, 0)
    np.testing.assert_array_equal(np.moveaxis(np.take_along_axis(p, np.moveaxis(keys, 0, -1), -1), -1, 0), order)
    np.testing.assert_allclose((best[2] / data["levels"]) ** 2, order, atol=0.01)


def test_the_page_of_many_heads_stays_small_and_escapes() -> None:
    """The worst case: 12 × 12 heads over both sides, with incompressible probabilities."""
    p = np.random.default_rng(0).dirichlet(np.full(128, 0.3), (12, 12, 128)).astype(np.float32)
    labels = ["</script><b>", *(f"w{n}" for n in range(127))]
    html = AttentionMaps("", "", (KindMaps("encoder", p, labels, labels),)).html()
    assert len(html) < 1.1 * MAX_PAGE_BYTES and "</script><b>" not in html
    (data,) = page_data(html)["parts"]
    assert data["queries"][0] == labels[0] and data["rows"] == 128
    stored = (unpacked(data["weights"]).reshape(p.shape) / data["levels"]) ** 2
    np.testing.assert_allclose(stored, p, atol=1.01 / data["levels"])


def test_a_text_that_is_too_long() -> None:
    read = reading(Decoder(**{**SMALL, "context": 6000}), TEXT * 110)
    with pytest.raises(DataError, match=r"all 12 heads over 5060 tokens is too large; give at most 4729"):
        attention_maps(read)
