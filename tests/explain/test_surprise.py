"""Surprisal of every kind of model, against evaluation and against a computation by hand; the page holds it."""

import math
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from markupsafe import escape
from tests.explain.small import page_data, sharp, small

from weft.errors import ConfigError, DataError, ModelError
from weft.evaluate.perplexity import surprisals
from weft.explain.reading import Reading, SourceTokens, text_tokens
from weft.explain.surprise import surprise
from weft.figures.page import page
from weft.figures.shaded import Token, lines_figure
from weft.models import config as configs
from weft.models import head_config
from weft.models.build import build
from weft.models.config import Decoder, Encoder, EncoderDecoder, NGram, Recurrent
from weft.models.smoothing import AddK, MaximumLikelihood
from weft.nn.config import RMSNorm
from weft.nn.position_config import Rotary
from weft.text.config import Byte, Specials
from weft.text.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(Byte(specials=Specials(bos="<s>", eos="</s>", mask="<mask>", cls="<cls>", sep="<sep>")))
V = TOKENIZER.vocab_size
TEXT = "A word,\n\nand 😀 <b>$x$</b>"
SMALL = small(V)
GPT = Decoder(**SMALL)
LLAMA = GPT.replace(position=Rotary(), norm=RMSNorm(), vocab_size=V + 7)
TRANSLATORS = [EncoderDecoder(**SMALL), EncoderDecoder(**SMALL, source_vocab_size=20)]


def read(model: Any, text: str = TEXT, source: tuple[int, ...] | None = None) -> Reading:
    return Reading(model, TOKENIZER, (TOKENIZER.need("eos"), *TOKENIZER.encode(text)), 1, source)


@pytest.mark.parametrize("config", [GPT, LLAMA, Recurrent(vocab_size=V, d_model=16)], ids=["gpt", "llama", "lstm"])
def test_it_agrees_with_evaluation(config: Any) -> None:
    model = sharp(config, 4.0)
    found = surprise(read(model), top=3)
    ids = TOKENIZER.encode(TEXT)
    assert found.nats == pytest.approx(surprisals(model, ids, [TOKENIZER.need("eos")], length=64), abs=1e-5)
    log_p = model(read(model).tokens)[0].log_softmax(-1)
    for row, id, rank, guesses in zip(log_p, ids, found.ranks, found.guesses, strict=False):
        assert rank == 1 + int((row > row[id]).sum())
        expected = row[:V].exp().sort(descending=True).values[:3].tolist()
        assert [guess.probability for guess in guesses] == pytest.approx(expected, abs=1e-6)
    assert found.guesses[0][0].piece == Reading(model, TOKENIZER, (int(log_p[0, :V].argmax()),)).pieces[0]
    assert found.perplexity == pytest.approx(math.exp(sum(found.scored) / len(ids)))
    assert found.bits_per_byte == pytest.approx(sum(found.scored) / math.log(2) / len(TEXT.encode()))


def test_nothing_predicts_a_first_token() -> None:
    model = sharp(GPT, 4.0)
    ids = TOKENIZER.encode(TEXT)
    found = surprise(Reading(model, TOKENIZER, tuple(ids)))
    assert found.nats[0] is None and found.ranks[0] is None and found.guesses[0] == ()
    assert found.nats[1:] == pytest.approx(surprisals(model, ids, [], length=64)[1:], abs=1e-5)
    assert len(found.scored) == len(ids) - 1
    with pytest.raises(DataError, match="nothing to score"):
        surprise(Reading(model, TOKENIZER, (ids[0],)))


@pytest.mark.parametrize("smoothing", [AddK(), MaximumLikelihood()])
def test_an_ngram_predicts_the_first_token_too(smoothing: Any) -> None:
    model: Any = build(NGram(vocab_size=V, order=3, smoothing=smoothing))
    model.fit(np.asarray(TOKENIZER.encode("abracadabra abracadabra and a cab")))
    ids = TOKENIZER.encode("abra cad")
    found = surprise(read(model, "abra cad"))
    assert found.nats == pytest.approx(surprisals(model, ids, [], length=64), abs=1e-5)
    assert found.nats[0] == pytest.approx(-model.head(torch.full((1, 1, 2), V))[0, 0, ids[0]].item())
    if isinstance(smoothing, MaximumLikelihood):  # an unseen bigram
        found = surprise(read(model, "az"))
        assert found.nats[1] == math.inf and found.measure.shades[1] == 1.0
        assert "∞" in found.text() and "∞" in found.html()


@pytest.mark.parametrize("config", [*TRANSLATORS, configs.Bahdanau(vocab_size=V, d_model=16)])
def test_a_target_is_scored_given_its_source(config: Any) -> None:
    model = sharp(config, 4.0)
    found = surprise(read(model, "target", source=(3, 5, 7)))
    ids = torch.tensor([[TOKENIZER.need("eos"), *TOKENIZER.encode("target")]])
    log_p = model(ids[:, :-1], source=SourceTokens(torch.tensor([[3, 5, 7]]))).log_softmax(-1)
    assert found.nats == pytest.approx((-log_p[0].gather(1, ids[0, 1:, None]))[:, 0].tolist(), abs=1e-5)
    assert "source" in found.about


def test_elmo_predicts_from_either_side() -> None:
    model = sharp(configs.ELMo(vocab_size=V, d_model=16), 4.0)
    found = surprise(read(model, "both sides"), top=2)
    ids = read(model, "both sides").ids
    states = model.directions(model.features(torch.tensor([ids])))
    ahead, back = (model.readout(h).logits()[0] for h in states)
    forward = [-ahead.log_softmax(-1)[n - 1, id].item() for n, id in enumerate(ids) if n]
    backward = [-back.log_softmax(-1)[n + 1, id].item() for n, id in enumerate(ids[:-1]) if n]
    assert found.directions[0].nats == pytest.approx(forward, abs=1e-5)
    assert found.directions[1].nats == pytest.approx([*backward, None], abs=1e-5)
    both = [(a + b) / 2 for a, b in zip(forward[:-1], backward, strict=True)]
    assert found.nats == pytest.approx([*both, forward[-1]], abs=1e-5)
    for top in found.guesses:
        assert top[0].probability >= top[1].probability
    assert "forward" in found.text() and "backward" in found.text()
    assert [section.title for section in found.sections()] == ["Surprise", "Surprise, forward", "Surprise, backward"]
    with pytest.raises(DataError, match="without the tokens after it"):
        surprise(read(model, "a"))


@pytest.mark.parametrize("head", [{}, {"head": head_config.PretrainingHead()}], ids=["masked-lm", "pretraining"])
def test_a_masked_model_sees_both_sides(head: dict[str, Any]) -> None:
    model = sharp(Encoder(**SMALL, **head), 4.0)
    ids = [TOKENIZER.need("cls"), *TOKENIZER.encode("both sides"), TOKENIZER.need("sep")]
    found = surprise(Reading(model, TOKENIZER, tuple(ids), 1))
    assert found.masked and "pseudo" in found.about and "pseudo-perplexity" in found.text()
    assert found.nats[-1] is None  # [SEP] is not part of the text
    for position in range(1, len(ids) - 1):
        hidden = torch.tensor([ids])
        hidden[0, position] = TOKENIZER.need("mask")
        logits = model(hidden)
        row = (logits if isinstance(logits, torch.Tensor) else logits.words)[0, position].log_softmax(-1)
        assert found.nats[position - 1] == pytest.approx(-row[ids[position]].item(), abs=1e-5)


def test_the_page_holds_its_numbers_and_can_be_read_without_a_script() -> None:
    found = surprise(read(sharp(GPT, 4.0)), top=2)
    html = found.html()
    data = page_data(html)
    assert data == found.data() and data["nats"] == pytest.approx(found.nats) and data["vocab_size"] == V
    assert "".join(token["text"] for token in data["tokens"]) == TEXT
    assert [guess["piece"] for guess in data["guesses"][0]] == [guess.piece for guess in found.guesses[0]]
    assert escape(found.text()) in html and "<b>" not in html
    assert 'data-module="surprise.js"' in page("x", found.sections())


def test_lines_of_the_figure_do_not_overlap() -> None:
    tokens = [Token(text, text) for text in [" word", " ", "ily"] * 40 + ["x" * 400, "\nlast"]]
    measure = surprise(read(sharp(GPT, 4.0))).measure
    figure = lines_figure("t", tokens, type(measure)("nats", [1.0] * len(tokens), 2.0))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes: dict[int, list[tuple[float, float, float]]] = {}
    for text in axes.texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width
        boxes.setdefault(round(text.get_position()[1]), []).append((text.get_position()[0], box.x0, box.x1))
    for line in boxes.values():
        assert all(left[2] <= right[1] + 2.0 for left, right in pairwise(sorted(line)))
    assert len(boxes) > 8
    long = [Token(" incomprehensibilities", "")] * 900
    note = lines_figure("t", long, type(measure)("nats", [1.0] * len(long), 2.0)).axes[0].texts[-1].get_text()
    assert re.search(r"the first [\d,]+ of 900 tokens", note)


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    tokens = text_tokens(TOKENIZER, [TOKENIZER.need("eos"), *TOKENIZER.encode("é!")])
    assert [token.text for token in tokens] == ["", "", "é", "!"]
    assert [token.piece for token in tokens] == ["</s>", "\\xc3", "\\xa9", "!"]


def test_bad_input() -> None:
    model = sharp(GPT, 4.0)
    with pytest.raises(ConfigError, match="top = 0"):
        surprise(read(model), top=0)
    with pytest.raises(DataError, match="empty"):
        surprise(Reading(model, TOKENIZER, (TOKENIZER.need("eos"),), 1))
    with pytest.raises(ModelError, match="'sequence' and predicts no tokens"):
        surprise(read(sharp(Decoder(**SMALL, head=head_config.ClassificationHead(labels=2)))))
