"""Inside a step: every value is that of `capture`, the model, or its formula, for every family and variant."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.cli.test_explain import RUNS
from tests.explain.small import sharp as scaled
from tests.explain.small import small
from tests.pairwise import each_once
from tests.spread import spread
from torch import Tensor

from weft.api.load import load
from weft.decode import sampling
from weft.decode.config import Sampling
from weft.errors import ConfigError, DataError, ModelError
from weft.explain.capture import capture
from weft.explain.reading import Reading
from weft.explain.step.stage import rounded
from weft.explain.step.step import MAX_TOKENS, StepPicture, step
from weft.models import config as configs
from weft.models import head_config
from weft.models.bahdanau import Bahdanau
from weft.models.build import build
from weft.models.config import Decoder, Encoder, EncoderDecoder, NGram, Recurrent
from weft.models.head_config import LMHead, PretrainingHead
from weft.models.smoothing import AddK, KneserNey, MaximumLikelihood, ModifiedKneserNey, StupidBackoff
from weft.nn.config import Attention, Gated, Latent, RMSNorm
from weft.nn.position_config import ALiBi, Concatenated, Disentangled, NoPosition, Relative, Rotary, Sinusoidal, T5Bias
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(Byte())
V = TOKENIZER.vocab_size
SMALL = small(V, layers=4)
GPT = Decoder(**SMALL)
TEXT = "to be or not"
SOURCE = tuple(TOKENIZER.encode("sein od"))
VARIANTS: dict[str, Any] = {
    "gpt": GPT,
    "llama": GPT.replace(position=Rotary(), norm=RMSNorm(), feedforward=Gated(d_ff=48), embedding_scale=True),
    "grouped": GPT.replace(position=Rotary(), attention=Attention(heads=4, kv_heads=2, qk_norm=RMSNorm(), bias="all")),
    "untied": GPT.replace(head=LMHead(tied=False, bias=True, scale=0.5, softcap=3.0)),
    "alibi": GPT.replace(position=ALiBi()),
    "t5": GPT.replace(position=T5Bias(), attention=Attention(heads=4, scale=1.0)),
    "2017": GPT.replace(placement="post", position=Sinusoidal(), embedding_norm=True),
    "concatenated": GPT.replace(position=Concatenated(), attention=Attention(heads=4, d_v=5)),
    "swish": GPT.replace(feedforward=Gated(d_ff=48, beta=2.0)),
    "relative": GPT.replace(position=Relative(max_distance=3)),
    "window": GPT.replace(attention=Attention(heads=4, window=4, softcap=2.0, clip=0.5), position=NoPosition()),
    "parallel": GPT.replace(sublayers="parallel"),
    "two norms": GPT.replace(sublayers="parallel-two-norms", position=Rotary(fraction=0.5)),
    "sandwich": GPT.replace(placement="sandwich", residual_scale=0.7),
    "res-post": GPT.replace(placement="res-post"),
    "latent": GPT.replace(
        position=Rotary(fraction=0.5), attention=Attention(heads=4, d_v=5, latent=Latent(rank=9, query_rank=7))
    ),
    "sinks": GPT.replace(attention=Attention(heads=4, sinks=True)),
    "opt": GPT.replace(d_embedding=16),
    "n-grams": GPT.replace(ngrams={"orders": [3, 2], "rows": 31, "width": 5}, embedding_scale=True),
    "pattern": GPT.replace(position=Rotary(), first_norm=False, pattern=({"window": 3}, {"position": NoPosition()})),
    "no skips": GPT.replace(residual=False),
    "disentangled": Encoder(**{**SMALL, "position": Disentangled(buckets=8, max_distance=32)}, head=PretrainingHead()),
    "separate": Encoder(**{**SMALL, "position": Disentangled(buckets=8, separate=True)}, head=PretrainingHead()),
    "longformer": Encoder(
        **{**SMALL, "attention": Attention(heads=4, window=3, global_tokens=1)}, head=PretrainingHead()
    ),
    "bert": Encoder(**{**SMALL, "placement": "post", "embedding_norm": True}, head=PretrainingHead()),
    "albert": Encoder(**SMALL, head=PretrainingHead(), distinct_layers=2, d_embedding=16, segments=2),
    "vaswani": EncoderDecoder(**{**SMALL, "placement": "post", "position": Sinusoidal()}),
}


def sharp(config: Any) -> Any:
    return scaled(config, noise=0.01)


def read(model: Any, text: str = TEXT) -> Reading:
    both = isinstance(model.config, EncoderDecoder | configs.Bahdanau)
    return Reading(model, TOKENIZER, tuple(TOKENIZER.encode(text)), 0, SOURCE if both else None)


def stage(found: StepPicture, id: str) -> Any:
    return next(stage for stage in found.stages if stage.id == id)


def values(found: StepPicture, id: str, name: str = "") -> Tensor:
    """A tensor of a stage, by default the first, of which candidates may be sent; null is −∞."""
    tensors = stage(found, id).tensors
    tensor = next(each for each in tensors if not name or each["name"] == name)
    array = np.array(tensor["values"], dtype=float)
    if tensor["axes"][0]["name"] == "candidate":
        cut = {"axis": 0, "of": tensor["shape"][0]}
        assert tensor["cut"] == (cut if tensor["shape"][0] > len(array) else None)
    else:
        assert tensor["cut"] is None and list(array.shape) == tensor["shape"]
    assert len(tensor["axes"]) == array.ndim
    return torch.from_numpy(np.where(np.isnan(array), -np.inf, array)).float()


def same(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Equal to the digits that are sent."""
    torch.testing.assert_close(found, expected.detach().float(), rtol=2e-5, atol=tolerance)


def logits_of(model: Any, reading: Reading) -> Tensor:
    out = model(reading.tokens, **reading.model_kwargs)
    return (out[0] if isinstance(out, tuple) else out)[0]


@torch.no_grad()
def test_printed_shapes_are_the_models() -> None:
    model = sharp(VARIANTS["gpt"])
    found = step(read(model))
    shapes = {row[0]: row[2:] for row in found.tables()[0].rows}
    logits = logits_of(model, found.reading)[-1][: TOKENIZER.vocab_size]
    expected = (str(TOKENIZER.vocab_size), f"{float(logits.norm()):.4g}")
    assert shapes["output.logits"] == expected and shapes["output.choice"][0] == expected[0]
    assert shapes["decoder.0"][0] == str(model.config.d_model)


@pytest.mark.parametrize(("variant", "layer", "position"), each_once(VARIANTS, [0, 1, 3], [5, 0, None]))
@torch.no_grad()
def test_a_transformer_shows_what_is_captured(variant: str, layer: int, position: int | None) -> None:
    config = VARIANTS[variant]
    model = sharp(config)
    found = step(read(model), position=position, layer=layer)
    reading, at, name = found.reading, found.position, "encoder" if isinstance(config, Encoder) else "decoder"
    parts = ["attention"] + ["cross"] * isinstance(config, EncoderDecoder)
    taps = ["residual", "feedforward", "feedforward.hidden"]
    taps += [f"{part}{tap}" for part in parts for tap in ("", ".probabilities", ".heads")]
    with capture(model, *(f"{name}.*.{tap}" for tap in taps)) as captured:
        logits = logits_of(model, reading)[at]
    block = f"{name}.{layer}"
    last = "residual" if config.sublayers != "sequential" else "feedforward.residual"
    last = "feedforward.norm" if config.placement == "post" else last
    same(values(found, f"{block}.{last}"), captured[f"{block}.residual"][0, at])
    same(values(found, f"{block}.feedforward.hidden"), captured[f"{block}.feedforward.hidden"][0, at])
    same(values(found, f"{block}.feedforward.down"), captured[f"{block}.feedforward"][0, at])
    for part in parts:
        probabilities = captured[f"{block}.{part}.probabilities"][0, :, at]
        same(values(found, f"{block}.{part}.softmax"), probabilities)
        sinks = getattr(model, name).layers[layer].attention.sinks if part == "attention" else None
        scores = values(found, f"{block}.{part}.mask")
        if sinks is not None:
            same(values(found, f"{block}.{part}.softmax", "sinks, scores of no key"), sinks)
            scores = torch.cat((scores, sinks[:, None]), dim=-1)
        same(scores.softmax(-1)[:, : probabilities.shape[-1]], probabilities)
        same(values(found, f"{block}.{part}.mix").flatten(), captured[f"{block}.{part}.heads"][0, at])
        same(values(found, f"{block}.{part}.out"), captured[f"{block}.{part}"][0, at])
    for summary in (f"{name}.{number}" for number in range(config.layers)):
        same(values(found, summary, "attention"), captured[f"{summary}.attention.probabilities"][0, :, at])
        same(values(found, summary, "residual"), captured[f"{summary}.residual"][0, at])
    assert found.choice is not None
    same(found.choice.logits, logits)
    candidates, likeliest = found.answer()["choice"]["candidates"], logits.softmax(-1).topk(40)
    assert [each["id"] for each in candidates] == logits.topk(40).indices.tolist()
    assert [each["probability"] for each in candidates] == pytest.approx(likeliest.values.tolist(), rel=1e-5)
    check_stages(found)


def check_stages(found: StepPicture) -> None:
    """Ids are unique, inputs come before, and everything is JSON."""
    known: set[str] = set()
    for each in found.stages:
        assert each.id not in known and set(each.inputs) <= known and each.about.endswith(".") and each.formula
        assert each.id == each.group or each.id.startswith(each.group)
        known.add(each.id)
        source = each.source
        if source is not None:
            assert source["file"].startswith("src/weft/") and 1 <= len(source["lines"]) <= 40 and source["first"] > 0
    json.dumps(found.answer(), allow_nan=False)


@pytest.mark.parametrize("name", ["gpt", "llama", "grouped", "alibi", "t5", "window", "vaswani"])
@torch.no_grad()
def test_scores_and_mixes_follow_the_formula(name: str) -> None:
    config = VARIANTS[name]
    found = step(read(sharp(config)), position=7, layer=1)
    block, attention = "decoder.1.attention", config.attention
    scores, rotary = values(found, f"{block}.scores"), isinstance(config.position, Rotary)
    q = values(found, f"{block}.rotary" if rotary else f"{block}.queries")
    k = values(found, f"{block}.rotary", "keys, rotated") if rotary else values(found, f"{block}.keys")
    repeats = attention.heads // attention.groups
    k, v = (each.repeat_interleave(repeats, 0) for each in (k, values(found, f"{block}.values")))
    raw = torch.einsum("hd,hkd->hk", q, k) * (attention.scale or config.d_head**-0.5)
    cap = attention.softcap
    same(scores, raw if cap is None else cap * (raw / cap).tanh(), 1e-4)
    same(values(found, f"{block}.mix"), torch.einsum("hk,hkd->hd", values(found, f"{block}.softmax"), v), 1e-5)
    if name in ("alibi", "t5"):
        bias = values(found, f"{block}.bias", "bias")
        same(values(found, f"{block}.bias"), scores + bias)
        scores = scores + bias
        if name == "alibi":
            slopes = 2.0 ** (-8 / 4 * torch.arange(1, 5))
            same(bias, -slopes[:, None] * (torch.arange(len(TEXT)) - 7).abs())
    first = 4 if name == "window" else 0
    visible = torch.tensor([first <= key <= 7 for key in range(len(TEXT))])
    same(values(found, f"{block}.mask"), scores.masked_fill(~visible, -torch.inf))
    assert values(found, f"{block}.mask", "seen").tolist() == visible.tolist()
    numbers = stage(found, f"{block}.mask").numbers
    assert numbers["future"] == len(TEXT) - 8 and numbers.get("window", 0) == first
    assert numbers["seen"] == int(visible.sum())


@torch.no_grad()
def test_embedding_norms_and_what_blocks_add() -> None:
    model = sharp(GPT)
    found = step(read(model), position=5)
    own = model.embedding.weight[found.reading.ids[5]]
    same(values(found, "embedding.row"), own)
    same(values(found, "embedding.position"), own + model.decoder.position.weight[5])
    same(values(found, "embedding.position", "position"), model.decoder.position.weight[5])
    normed = model.decoder.blocks[0].attention_skip.norm(own + model.decoder.position.weight[5])
    same(values(found, "decoder.0.attention.norm"), normed)
    with capture(model, "decoder.*.residual", "decoder.*.attention", "decoder.*.attention_skip") as captured:
        model(found.reading.tokens)
    for layer in range(1, 4):
        before, added = captured[f"decoder.{layer - 1}.residual"][0, 5], captured[f"decoder.{layer}.attention"][0, 5]
        middle = captured[f"decoder.{layer}.attention_skip"][0, 5]
        norms, cosines = values(found, f"decoder.{layer}", "norm added"), values(found, f"decoder.{layer}", "cosine")
        fed = captured[f"decoder.{layer}.residual"][0, 5] - middle
        same(norms, torch.stack([added.norm(), fed.norm()]))
        pairs = torch.stack([added, fed]), torch.stack([before, middle])
        same(cosines, torch.nn.functional.cosine_similarity(*pairs))
    same(values(found, "output.norm"), model.decoder.norm(captured["decoder.3.residual"][0, 5]))


@torch.no_grad()
def test_the_source_of_an_encoder_decoder() -> None:
    model = sharp(VARIANTS["vaswani"])
    found = step(read(model), position=5, layer=2)
    assert found.kind == "encoder_decoder" and found.source_position is not None
    taps = ("encoder.*.residual", "encoder.*.attention.probabilities", "decoder.*.cross.probabilities")
    with capture(model, *taps) as captured:
        model(found.reading.tokens, **found.reading.model_kwargs)
    at = found.source_position
    assert at == int(captured["decoder.3.cross.probabilities"][0, :, 5].mean(0).argmax())
    same(values(found, "encoder.2.attention.softmax"), captured["encoder.2.attention.probabilities"][0, :, at])
    same(values(found, "encoder.3", "residual"), captured["encoder.3.residual"][0, at])
    same(values(found, "decoder.1", "attention to the source"), captured["decoder.1.cross.probabilities"][0, :, 5])
    keys = stage(found, "decoder.2.cross.softmax").tensors[0]["axes"][1]["labels"]
    assert keys == found.answer()["source_pieces"] and stage(found, "decoder.2.cross.keys").inputs == ("encoder.3",)


@torch.no_grad()
def test_a_token_of_the_source_is_followed_through_the_encoder() -> None:
    model = sharp(VARIANTS["vaswani"])
    found = step(read(model), position=5, source_position=1, layer=2)
    assert found.source_position == 1 and found.threads is not None
    threads = found.threads["source"]["encoder"]
    with capture(model, "encoder.2.attention.probabilities", "encoder") as captured:
        model(found.reading.tokens, **found.reading.model_kwargs)
    rows, attention = threads["rows"], threads["block"]["attention"]
    same(torch.tensor(attention["weights"]), captured["encoder.2.attention.probabilities"][0][:, rows][..., rows])
    same(torch.tensor(threads["final"]), captured["encoder"][0, 1])
    same(values(found, "encoder.2.attention.softmax"), captured["encoder.2.attention.probabilities"][0, :, 1])
    with pytest.raises(ConfigError, match="source_place = 99: the source has"):
        step(read(model), source_position=99)


@torch.no_grad()
def test_following_a_step_changes_no_bit_and_leaves_no_hooks() -> None:
    model = sharp(VARIANTS["llama"])
    reading = read(model)
    before = model(reading.tokens)
    step(reading)
    assert torch.equal(model(reading.tokens), before)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
@pytest.mark.parametrize("position", [None, 0, 6])
@torch.no_grad()
def test_gates_and_states_of_a_recurrent_model(cell: str, position: int | None) -> None:
    model = sharp(Recurrent(vocab_size=V, d_model=12, d_embedding=12, layers=2, cell=cell))
    reading = read(model)
    found = step(reading, position=position)
    at, state = found.position, model.start(1, len(reading.ids))
    model.advance(reading.tokens, state)
    states = state.states[0]  # after n tokens: (n, parts, layers, d_model)
    for layer in range(2):
        for part, name in enumerate(("hidden", "cell")[: states.shape[1]]):
            same(values(found, f"recurrence.{layer}.previous", name), states[at, part, layer])
            same(values(found, f"recurrence.{layer}.state", name), states[at + 1, part, layer])
            same(values(found, f"recurrence.{layer}.state", f"{name} over time"), states[1:, part, layer])
        x = model.embedding(reading.tokens)[0, at] if layer == 0 else states[at + 1, 0, 0]
        W, U, b, c = model.recurrence.all_weights[layer]
        h, gates = states[at, 0, layer], values(found, f"recurrence.{layer}.gates")
        first = ((W @ x + b + U @ h + c)[:12]).sigmoid() if cell != "elman" else (W @ x + b + U @ h + c).tanh()
        same(gates[0], first)
        mean = values(found, f"recurrence.{layer}.gates", "gates over time, mean")
        same(mean[at], gates.mean(-1), 1e-5)
        before = values(found, f"recurrence.{layer}.before")
        tanh = [cell == "elman" or n == 2 for n in range(len(before))]
        same(gates, torch.stack([x.tanh() if t else x.sigmoid() for t, x in zip(tanh, before, strict=True)]), 1e-5)
    assert found.choice is not None
    same(found.choice.logits, model(reading.tokens)[0, at])
    check_stages(found)


@torch.no_grad()
def test_both_directions_of_elmo_and_the_mean_of_its_layers() -> None:
    model = sharp(configs.ELMo(vocab_size=V, d_model=10, layers=2))
    found = step(read(model), position=4)
    tokens, last = found.reading.tokens, len(found.reading.ids) - 1
    with capture(model, "embedding", "ahead.*", "back.*") as captured:
        logits = model(tokens)[0, 4]
    x, sums = captured["embedding"][0], []
    for name, stack, at in (("forward", "ahead", 4), ("backward", "back", last - 4)):
        low, high = captured[f"{stack}.0"][0], captured[f"{stack}.1"][0]
        same(values(found, f"{name}.0.state"), low[at])
        same(values(found, f"{name}.1.state"), high[at])
        same(values(found, f"{name}.1.previous"), high[at - 1])
        same(values(found, f"{name}.1.state", "hidden over time"), high)
        sums.append((x[4], low[at], low[at] + high[at]))
    layers = torch.stack([torch.cat(pair) for pair in zip(*sums, strict=True)])
    same(values(found, "mix.mean", "layers"), layers)
    same(values(found, "mix.mean"), layers.mean(0))
    assert found.choice is not None and found.threads is not None
    same(found.choice.logits, logits)
    before = model.readout(sums[1][2]).logits().softmax(-1)
    assert found.threads["before"]["probability"] == pytest.approx(float(before.max()), abs=1e-5)
    states = [layer["states"] for layer in found.threads["layers"]]
    rows = torch.tensor(found.threads["rows"])
    same(torch.tensor(states[3]), captured["back.1"][0, last - rows])
    check_stages(found)
    with pytest.raises(ModelError, match="d_cell is set"):
        step(read(sharp(configs.ELMo(vocab_size=V, d_model=10, d_cell=12))))


@torch.no_grad()
def test_other_activations_of_an_elman_network() -> None:
    for activation in ("relu", "sigmoid"):
        model = sharp(Recurrent(vocab_size=V, d_model=8, layers=1, cell="elman", activation=activation))
        found = step(read(model))
        same(values(found, "recurrence.0.state"), model.features(found.reading.tokens)[0, -1])
        assert stage(found, "recurrence.0.gates").formula.startswith(activation)


@pytest.mark.parametrize(("cell", "layers"), [("gru", 1), ("lstm", 2)])
@torch.no_grad()
def test_a_bahdanau_model_aligns(cell: str, layers: int) -> None:
    model = sharp(configs.Bahdanau(vocab_size=V, d_model=10, cell=cell, layers=layers))
    assert isinstance(model, Bahdanau)
    reading = read(model)
    found = step(reading, position=4)
    with capture(model, "attention.probabilities", "encoder") as captured:
        logits = model(reading.tokens, **reading.model_kwargs)[0, 4]
    alignment, annotations = captured["attention.probabilities"][0], captured["encoder"][0]
    same(values(found, "attention.alignment", "alignment so far"), alignment[:5])
    same(values(found, "attention.energies", "energies so far").softmax(-1), alignment[:5])
    same(values(found, "attention.context"), alignment[4] @ annotations)
    both = [values(found, "encoder.annotations", name) for name in ("forward", "backward")]
    same(torch.cat(both, dim=-1), annotations)
    encoded = model.encode(reading.model_kwargs["source"])
    same(values(found, "encoder.bridge"), encoded.state[0, -1, 0])
    state = model.start(1, len(reading.ids), reading.model_kwargs["source"])
    features = model.advance(reading.tokens, state)
    for layer in range(layers):
        same(values(found, f"decoder.{layer}.state"), state.states[0, 5, 0, layer])
        same(values(found, f"decoder.{layer}.previous"), state.states[0, 4, 0, layer])
    same(values(found, "attention.query"), state.states[0, 4, 0, -1])
    same(values(found, "output.maxout"), features[0, 4])
    assert found.kind == "bahdanau" and found.choice is not None
    same(found.choice.logits, logits)
    check_stages(found)


SMOOTHINGS = (MaximumLikelihood(), AddK(k=0.5), StupidBackoff(), KneserNey(), ModifiedKneserNey())


@pytest.mark.parametrize("smoothing", SMOOTHINGS, ids=lambda smoothing: smoothing.kind)
@torch.no_grad()
def test_every_order_of_an_ngram_model(smoothing: Any) -> None:
    """An order predicts what the model predicts after a context of that length; the counts are those of the text."""
    learned = TOKENIZER.encode("to be or not to be, that is the question: to bet or not to bet. " * 3)
    model: Any = build(NGram(vocab_size=V, order=4, smoothing=smoothing))
    model.fit(np.array(learned))
    for text in ("to be", "xto", "t", "qqq"):
        reading = read(model, text)
        found = step(reading)
        context, ids = list(reading.ids)[-3:], [each["id"] for each in found.answer()["choice"]["candidates"]]
        for n in range(1, 5):
            last = context[len(context) - n + 1 :] if n > 1 else []
            features = torch.tensor([V] * (3 - len(last)) + last)[None, None]
            same(values(found, f"order.{n}", "probability"), model.head(features)[0, 0, ids].exp())
            if len(last) == n - 1:
                grams = [tuple(learned[at : at + n]) for at in range(len(learned) - n + 1)]
                counts = [grams.count((*last, id)) for id in ids]
                assert values(found, f"order.{n}", "counts").tolist() == counts
                numbers = stage(found, f"order.{n}").numbers
                assert numbers["count of the context"] == sum(gram[:-1] == tuple(last) for gram in grams)
            if "γ(c)" in stage(found, f"order.{n}").numbers:
                parts = ("from its own counts", "from the shorter context")
                own, shorter = (values(found, f"order.{n}", part) for part in parts)
                same(own + shorter, values(found, f"order.{n}", "probability"), 1e-5)
        assert found.choice is not None
        same(found.choice.logits, model(reading.tokens)[0, -1])
        check_stages(found)


@torch.no_grad()
def test_discounts_are_kneser_and_neys() -> None:
    model: Any = build(NGram(vocab_size=V, order=2, smoothing=KneserNey(discount=0.75)))
    model.fit(np.array(TOKENIZER.encode("abcabdabcabd")))
    found = step(read(model, "ab"))
    c = [each["piece"] for each in found.answer()["choice"]["candidates"]].index("c")
    assert stage(found, "order.2").numbers["D₁"] == 0.75
    assert values(found, "order.2", "from its own counts")[c] == pytest.approx((2 - 0.75) / 4)
    assert stage(found, "order.2").numbers["γ(c)"] == pytest.approx(2 * 0.75 / 4)


SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.5, "top_p": 0.4}]
SAMPLINGS += [{"temperature": 0.5, "top_k": 20, "top_p": 0.9}, {"temperature": 0.0}]


@pytest.mark.parametrize("options", SAMPLINGS, ids=["plain", "k", "p", "both", "greedy"])
@torch.no_grad()
def test_the_choice_is_the_samplers(options: dict[str, Any]) -> None:
    model, settings = sharp(GPT), Sampling(**options)
    found = step(read(model), sampling=settings)
    logits = model(found.reading.tokens)[0, -1]
    choice = found.answer()["choice"]
    left = sampling.filter_logits(logits[None], [settings])[0]
    if settings.greedy:
        left = torch.full_like(left, -math.inf).index_fill(0, logits.argmax(), 0.0)
    finals = left.softmax(-1)
    assert choice["kept"] == int((left > -math.inf).sum()) and choice["vocab_size"] == V
    for each in choice["candidates"]:
        assert each["kept"] == bool(left[each["id"]] > -math.inf)
        assert each["final"] == pytest.approx(float(finals[each["id"]]), rel=1e-5, abs=1e-12)
        assert each["scaled"] == pytest.approx(float(logits[each["id"]]) / (settings.temperature or 1.0), rel=1e-5)
    draws = sampling.choose_tokens(logits.expand(200, -1), [settings] * 200, np.linspace(0, 0.999, 200).tolist())
    kept = {each["id"] for each in choice["candidates"] if each["kept"]}
    assert choice["kept"] > 40 or set(draws.tolist()) <= kept


@torch.no_grad()
def test_heads_that_predict_no_tokens() -> None:
    head = head_config.ClassificationHead(labels=3)
    model = sharp(Encoder(**SMALL, head=head))
    found = step(read(model), labels=("bad", "fair", "good"))
    assert found.position == 0 and found.choice is not None
    logits = model(found.reading.tokens)[0]
    same(found.choice.logits, logits)
    expected = [("bad", "fair", "good")[n] for n in logits.argsort(descending=True)]
    assert [each["piece"] for each in found.answer()["choice"]["candidates"]] == expected
    same(values(found, "output.pool"), model.features(found.reading.tokens)[0, 0])
    model = sharp(Encoder(**SMALL, head=head_config.EmbeddingHead()))
    found = step(read(model))
    assert found.answer()["choice"] is None
    same(values(found, "output.head"), model(found.reading.tokens)[0])
    assert "stage" in str(found.text()) and found.figure().axes
    check_stages(found)


def test_wrong_texts_positions_and_layers_are_refused() -> None:
    model, lstm = sharp(GPT.replace(context=400)), sharp(Recurrent(vocab_size=V, d_model=8, layers=1))
    with pytest.raises(DataError, match=f"300 tokens; a step is shown of at most {MAX_TOKENS}"):
        step(read(model, "a" * 300))
    with pytest.raises(ConfigError, match="place = 12: the text has 12 tokens"):
        step(read(model), position=12)
    assert step(read(model), position=-2).position == 10
    with pytest.raises(ConfigError, match="layer = 4: the model has 4 layers"):
        step(read(model), layer=4)
    with pytest.raises(ConfigError, match="only a Transformer"):
        step(read(lstm), layer=0)


@torch.no_grad()
def test_an_answer_stays_small() -> None:
    """Twelve layers of twelve heads over 128 tokens; long vectors are cut."""
    model = sharp(GPT.replace(layers=12, d_model=128, context=128, attention=Attention(heads=12, d_head=64)))
    found = step(read(model, "ab" * 64), layer=7)
    assert len(json.dumps(found.answer())) < 1_000_000
    down = stage(found, "decoder.7.feedforward.down").tensors[0]
    assert down["shape"] == [128] and down["cut"] == {"axis": 0, "of": 128} and len(down["values"]) == 64
    keys = stage(found, "decoder.7.attention.keys").tensors[0]
    assert keys["shape"] == [12, 128, 64] and keys["cut"] == {"axis": 2, "of": 64}
    with capture(model, "decoder.7.feedforward") as captured:
        model(found.reading.tokens)
    assert down["norm"] == pytest.approx(float(captured["decoder.7.feedforward"][0, -1].norm()), rel=1e-5)


def array(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=float)).float()


@pytest.mark.parametrize("name", spread(VARIANTS, 14))
@torch.no_grad()
def test_threads_are_captured_and_their_sums_can_be_checked(name: str) -> None:
    config = VARIANTS[name]
    model = sharp(config)
    found = step(read(model), layer=2)
    threads, at = found.threads, found.position
    assert threads is not None and threads["open"] == 2
    stack, rows = "encoder" if isinstance(config, Encoder) else "decoder", threads["rows"]
    block, here = f"{stack}.2", rows.index(at)
    taps = [f"{block}.{tap}" for tap in ("attention.probabilities", "attention.heads", "feedforward.hidden")]
    with capture(model, f"{stack}.*.residual", *taps) as captured:
        logits = logits_of(model, found.reading)[at]
    attention, fed = threads["block"]["attention"], threads["block"]["feedforward"]
    weights, scores = array(attention["weights"]), array(attention["scores"])
    same(weights, captured[f"{block}.attention.probabilities"][0][:, rows][..., rows])
    same(array(attention["outputs"]).flatten(), captured[f"{block}.attention.heads"][0, at])
    q, k, v = (array(attention[part]) for part in "qkv")
    k, v = (each.repeat_interleave(len(q) // len(k), 0) for each in (k, v))
    whole = len(rows) == len(found.reading.ids)
    if whole and name != "sinks":  # otherwise tokens that are not shown have weights too
        same(scores.nan_to_num(-torch.inf).softmax(-1), weights, 1e-5)
    if name not in ("alibi", "t5", "window", "relative", "disentangled", "separate", "longformer"):
        same((q @ k.mT * attention["scale"])[~scores.isnan()], scores[~scores.isnan()], 1e-4)
    if whole and name != "relative":
        same((weights[:, here, None] @ v)[:, 0], array(attention["outputs"]), 1e-5)
    same(array(fed["hidden"]), captured[f"{block}.feedforward.hidden"][0, at])
    bias = 0.0 if fed["bias"] is None else array(fed["bias"])
    same(array(fed["up"]) @ array(fed["read"]) + bias, array(fed["before"])[fed["units"]], 1e-4)
    for number, each in enumerate(threads["blocks"]):
        assert each["norms"][-1] == pytest.approx(float(captured[f"{stack}.{number}.residual"][0, at].norm()), rel=1e-4)
    same(array(threads["embedding"]["words"])[here], model.embed(found.reading.tokens, model.embedding)[0, at])
    factors = found.answer()["choice"]["factors"]
    product = array(factors["rows"]) @ array(factors["features"])
    product = product if factors["bias"] is None else product + array(factors["bias"])
    cap = config.head.softcap if isinstance(config.head, LMHead) else None
    same(product if cap is None else cap * (product / cap).tanh(), logits.topk(len(product)).values, 1e-4)


@torch.no_grad()
def test_long_texts_show_recent_and_attended_tokens_or_those_requested() -> None:
    model = sharp(GPT.replace(context=80))
    reading = read(model, "abcdefgh" * 8)
    found = step(reading, position=50)
    with capture(model, "decoder.0.attention.probabilities") as captured:
        model(reading.tokens)
    assert found.threads is not None
    rows = found.threads["rows"]
    assert len(rows) == 12 and rows == sorted(rows) and set(range(44, 51)) <= set(rows) and max(rows) == 50
    attended = captured["decoder.0.attention.probabilities"][0, :, 50].amax(0).argsort(descending=True).tolist()
    assert set(attended[:4]) <= set(rows)
    chosen = step(reading, position=50, threads=(3, 1, 50, 60)).threads
    assert chosen is not None and chosen["rows"] == [1, 3, 50, 60]
    with pytest.raises(ConfigError, match="threads: 99 is not a token of the text, which has 64"):
        step(reading, threads=(1, 99))
    choice = found.answer()["choice"]
    tail, candidates = ([each["id"] for each in choice[part]] for part in ("tail", "candidates"))
    assert len(tail) == 24 and not set(tail) & set(candidates)


@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
@torch.no_grad()
def test_threads_of_a_recurrent_model_are_its_states(cell: str) -> None:
    model = sharp(Recurrent(vocab_size=V, d_model=12, d_embedding=12, layers=2, cell=cell))
    reading = read(model)
    found = step(reading)
    state = model.start(1, len(reading.ids))
    model.advance(reading.tokens, state)
    states, threads = state.states[0], found.threads
    assert threads is not None
    for number, layer in enumerate(threads["layers"]):
        same(array(layer["states"]), states[1:, 0, number])
        same(array(layer["norms"]), states[1:, 0, number].norm(dim=-1))
        same(array(layer["previous"]), states[-2, :, number])
        same(array(layer["state"]), states[-1, :, number])
        same(array(layer["means"])[-1], array(layer["values"]).mean(-1), 1e-5)


def test_values_have_six_significant_digits() -> None:
    expected = [1234570.0, 0.000123457, -3.14159, 0.0, None]
    assert rounded([1234567.0, 0.000123456789, -math.pi, 0.0, math.inf]) == expected
    assert rounded(torch.tensor([True, False])) == [1, 0] and rounded(2.0**0.5) == 1.41421


@torch.no_grad()
def test_a_masked_model_does_not_see_the_token() -> None:
    run = load(RUNS / "masked-next")
    found = run.explain.step("the cat sat", place=2)
    answer, surprise = found.answer(), run.explain.surprise("the cat sat")
    assert answer["masked"] == surprise.tokens[1].piece and found.reading.ids[2] == run.tokenizer.mask_id
    assert found.choice is not None
    same(found.choice.logits, run.model(found.reading.tokens).words[0, 2][: len(found.choice.logits)])
    own = run.explain.reading("the cat sat").ids[2]
    nats = surprise.nats[1]
    assert nats is not None
    assert float(found.choice.probability[own]) == pytest.approx(math.exp(-nats), rel=1e-4)
    last = run.explain.step("the cat sat")
    assert last.position == 1 and last.masked == surprise.tokens[0].piece  # the longest
