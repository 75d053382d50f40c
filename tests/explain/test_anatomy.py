"""The model on one page: every parameter is in one part, and every part shows the lines that compute it."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from tests.explain.small import page_data
from tests.spread import spread
from torch import nn

from weft.costs.count import count
from weft.explain.anatomy.anatomy import anatomy
from weft.explain.anatomy.parts import ModelPart, source_lines
from weft.models import head_config, smoothing
from weft.models.build import build
from weft.models.config import Encoder
from weft.models.presets import PRESETS, preset
from weft.nn.attention import SelfAttention
from weft.nn.config import Attention, Gated, Latent, LayerNorm, Plain, RMSNorm
from weft.nn.init import empty_weights
from weft.nn.position_config import ALiBi, Concatenated, LayeredT5, NoPosition, Relative, Rotary, Sinusoidal, T5Bias
from weft.nn.scaled_dot_product import reference_attention

SMALL = preset("gpt-tiny")
ENCODER: Encoder = preset("bert-tiny")
LATENT = Attention(heads=4, latent=Latent(rank=9))
VARIANTS = {
    "relative": SMALL.replace(position=Relative()),
    "t5": SMALL.replace(position=T5Bias()),
    "alibi": SMALL.replace(position=ALiBi()),
    "rotary": SMALL.replace(position=Rotary(pairs="adjacent")),
    "concatenated": SMALL.replace(position=Concatenated(), attention=Attention(heads=4, d_v=24)),
    "swish": SMALL.replace(feedforward=Gated(d_ff=32, beta=1.5)),
    "sinusoidal": SMALL.replace(position=Sinusoidal()),
    "none": SMALL.replace(position=NoPosition(), placement="none"),
    "no skips": SMALL.replace(residual=False),
    "qk_norm": SMALL.replace(attention=Attention(heads=4, kv_heads=2, qk_norm=RMSNorm(), window=16)),
    "no bias": SMALL.replace(norm=LayerNorm(bias=False)),
    "no gain": SMALL.replace(norm=LayerNorm(gain=False, bias=False), sublayers="parallel"),
    "two norms": SMALL.replace(sublayers="parallel-two-norms", position=Rotary(fraction=0.5), residual_scale=0.5),
    "sandwich": SMALL.replace(placement="sandwich", attention=Attention(heads=4, softcap=9.0), embedding_scale=2.0),
    "norms after": SMALL.replace(
        placement="res-post", attention=Attention(heads=4, kv_heads=2, qk_norm=RMSNorm(), qk_norm_over="heads")
    ),
    "latent": SMALL.replace(position=Rotary(fraction=0.5), attention=LATENT),
    "latent queries": SMALL.replace(
        position=Rotary(fraction=0.5), attention=LATENT.replace(latent=Latent(rank=9, query_rank=5), d_v=7)
    ),
    "sinks": SMALL.replace(attention=Attention(heads=4, sinks=True)),
    "n-grams": SMALL.replace(ngrams={"orders": [2, 3], "rows": 99}),
    "narrow n-grams": SMALL.replace(ngrams={"rows": 99, "width": 8}, d_embedding=16),
    "layers differ": SMALL.replace(pattern=[{"window": 9}, {}], head=head_config.LMHead(softcap=5.0)),
    "untied": SMALL.replace(head=head_config.LMHead(tied=False, bias=True)),
    "transformed": SMALL.replace(head=head_config.LMHead(transform=head_config.Transform(bias=False)), segments=2),
    "xielu": SMALL.replace(feedforward=Plain(d_ff=32, activation="xielu"), position=LayeredT5()),
    "late classes": ENCODER.replace(head=head_config.ClassificationHead(labels=3, pooled_late=True)),
    "plain mlm": ENCODER.replace(head=head_config.MaskedLMHead(dense=False)),
    "classes": ENCODER.replace(head=head_config.ClassificationHead(labels=3)),
    "tags": ENCODER.replace(head=head_config.TaggingHead(labels=5)),
    "mlm": ENCODER.replace(head=head_config.MaskedLMHead()),
    "nsp": ENCODER.replace(head=head_config.NextSentenceHead()),
    "vector": ENCODER.replace(head=head_config.EmbeddingHead()),
    "two tables": preset("vaswani-tiny").replace(source_vocab_size=77, encoder_layers=5),
    "pre": preset("vaswani-tiny").replace(placement="pre", attention=Attention(heads=4, qk_norm=RMSNorm())),
    "sources": preset("bahdanau-tiny").replace(source_vocab_size=99, layers=3, cell="lstm"),
    "sigmoid": preset("elman").replace(activation="sigmoid", layers=3),
    "add-k": preset("ngram-3").replace(smoothing=smoothing.AddK()),
    "backoff": preset("ngram-3").replace(smoothing=smoothing.StupidBackoff()),
    "mle": preset("ngram-3").replace(smoothing=smoothing.MaximumLikelihood()),
}


PAGES = ("two tables", "nsp", "sources", "add-k")  # a page takes a second


def leaves(part: ModelPart) -> list[ModelPart]:
    return [leaf for inside in part.parts for leaf in leaves(inside)] if part.parts else [part]


@pytest.mark.parametrize("name", spread(PRESETS, 10))
def test_parts_sum_to_the_preset(name: str) -> None:
    assert anatomy(preset(name)).parameters == count(preset(name)).parameters


@pytest.mark.parametrize("name", VARIANTS)
def test_parts_sum_to_the_built_variant(name: str) -> None:
    settings = VARIANTS[name]
    with empty_weights():
        model = build(settings)
    found = anatomy(settings)
    assert found.parameters == sum(weight.numel() for weight in model.parameters())
    assert max(map(len, found.text().splitlines())) <= 80
    if name in PAGES:
        assert found.figure().axes[0].texts
        parts = sum(count_parts(column) for column in found.columns)
        assert len([each for column in page_data(found.html())["columns"] for each in records(column)]) == parts


def records(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield part
    for inside in part["parts"]:
        yield from records(inside)


def count_parts(part: ModelPart) -> int:
    return 1 + sum(map(count_parts, part.parts))


def test_attention_states_its_formula_with_its_numbers() -> None:
    text = anatomy(preset("gpt2")).text()
    shapes = "(B, T, 768) → (B, T, 2304) → q (B, 12, T, 64), k, v (B, 12, T, 64)"
    for line in ("softmax(0.125 · q kᵀ + mask) v; d_k = 64, 1/√64 = 0.125", shapes, "124,439,808", "12 × 7,087,872"):
        assert line in text


def test_parts_are_in_the_order_of_computation() -> None:
    names = [part.name for part in anatomy(preset("gpt2")).columns[0].parts]
    assert names == ["token embedding", "positions, learned", "block", "last norm, LayerNorm", "logits"]
    pre = [part.name for part in anatomy(preset("gpt2")).columns[0].parts[2].parts]
    post = [part.name for part in anatomy(preset("bert-base")).columns[0].parts[4].parts]
    assert pre[:3] == ["norm, LayerNorm", "masked multi-head self-attention", "skip"]
    assert post[:3] == ["multi-head self-attention", "skip", "norm, LayerNorm"]
    encoder, decoder = anatomy(preset("vaswani-base")).columns
    assert [part.repeats for part in (encoder.parts[2], decoder.parts[2])] == [6, 6]
    assert "multi-head attention to the source" in [part.name for part in decoder.parts[2].parts]


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "bert-base", "vaswani-base", "lstm", "bahdanau", "ngram-3"])
def test_every_part_names_its_source(name: str) -> None:
    found = anatomy(preset(name))
    assert [part.name for column in found.columns for part in leaves(column) if not part.code] == []


def test_a_page_has_all_source_lines() -> None:
    found = anatomy(preset("vaswani-base"))
    sent = [code for column in page_data(found.html())["columns"] for part in records(column) for code in part["code"]]
    shown = {each.place: each.text for column in found.columns for part in leaves(column) for each in part.code}
    assert len(shown) > 10 and shown.items() <= {code["place"]: code["text"] for code in sent}.items()


@pytest.mark.parametrize("name", ["gpt2", "vaswani-base", "bahdanau"])
def test_a_box_of_the_drawing_names_its_part(name: str) -> None:
    found = anatomy(preset(name))
    data = page_data(found.html())
    assert len(data["diagrams"]) == (1 if len(found.columns) == 1 else 1 + len(found.columns))
    for diagram in data["diagrams"]:
        boxes = [shape for shape in diagram["shapes"] if shape["kind"] == "box"]
        texts = {shape["text"] for shape in diagram["shapes"]}
        assert boxes
        for column, *path in (box["part"] for box in boxes):
            part, record = found.columns[column], data["columns"][column]
            for place in path:
                part, record = part.parts[place], record["parts"][place]
            assert part.name == record["name"] and part.parameters == record["parameters"]
            assert any(text.startswith(part.title) for text in texts)


def test_source_lines_are_those_of_the_file() -> None:
    shown = source_lines(SelfAttention.forward)
    file, line = shown.place.split(":")
    assert file == "weft/nn/attention.py"
    lines, start = inspect.getsourcelines(SelfAttention.forward)
    assert int(line) == start
    assert shown.text.splitlines()[0] == lines[0].strip()
    assert "softmax(q kᵀ · scale)v" in source_lines(reference_attention).text
    assert source_lines(nn.LayerNorm.forward).place.startswith("torch/nn/modules/normalization.py:")


def test_settings_that_chose_a_part_are_named() -> None:
    parts = [part for column in page_data(anatomy(preset("llama3-8b")).html())["columns"] for part in records(column)]
    keys = {key for part in parts for key in part["settings"]}
    assert {'model.norm.kind = "rms"', "model.attention.kv_heads = 8", "model.position.base = 500000"} <= keys
    assert any("each head of k, v serves 4 of q" in part["formula"] + part["note"] for part in parts)


def test_a_page_has_the_text_without_scripts_and_everything_is_escaped() -> None:
    page = anatomy(preset("ngram-3")).html()
    data, text = page[: page.index("</script>")], page[page.index("</script>") :]
    assert "weft/models/ngram.py:" in data and "<" not in data[data.index("{") :]
    assert "<pre>" in text and "weft/models/ngram.py:" in text


@pytest.mark.parametrize(("name", "hidden"), [("elman", {"h₁", "h_T", "h₀ = 0"}), ("lstm", {"h₁⁽⁰⁾", "h_T⁽¹⁾"})])
def test_a_recurrent_network_is_drawn_over_time(name: str, hidden: set[str]) -> None:
    over_time = anatomy(preset(name)).data()["unrolled"]
    assert {"x₁", "x_T", "y₂", "ℓ₁", "ℓ_T"} | hidden <= {shape["text"] for shape in over_time["shapes"]}
    for shape in over_time["shapes"]:
        assert all(
            0 <= point["x"] <= over_time["width"] and 0 <= point["y"] <= over_time["height"]
            for point in shape["points"]
        )
    assert "unrolled" not in anatomy(preset("gpt-tiny")).data()
