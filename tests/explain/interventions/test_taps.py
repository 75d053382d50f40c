"""Taps of every family: listed with shapes, recorded and changed from Python, without changing a bit by looking."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.test_explain import RUNS
from tests.explain.small import sharp, small

import weft
from weft.errors import ModelError, WeftError
from weft.explain.capture import capture, taps
from weft.explain.interventions.recording import tap_shapes
from weft.explain.reading import SourceTokens
from weft.models.config import Bahdanau, Decoder, EncoderDecoder, Recurrent
from weft.nn.config import NoFeedForward

SMALL = small(40)
MODELS: dict[str, Any] = {
    "decoder": Decoder(**SMALL),
    "attention alone": Decoder(**SMALL | {"feedforward": NoFeedForward()}),
    "encoder-decoder": EncoderDecoder(**SMALL),
    "elman": Recurrent(vocab_size=40, d_model=16, layers=2, cell="elman"),
    "sigmoid": Recurrent(vocab_size=40, d_model=16, layers=1, cell="elman", activation="sigmoid"),
    "gru": Recurrent(vocab_size=40, d_model=16, layers=2, cell="gru"),
    "lstm": Recurrent(vocab_size=40, d_model=16, layers=2, cell="lstm", dropout=0.1),
    "bahdanau": Bahdanau(vocab_size=40, d_model=16, layers=2, cell="lstm"),
}


def inputs(config: Any, rows: int = 2) -> tuple[torch.Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 40, (rows, 6), generator=generator)
    source = SourceTokens(torch.randint(0, 40, (rows, 5), generator=generator))
    return tokens, {"source": source} if config.kind in ("encoder-decoder", "bahdanau") else {}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_looking_and_putting_back_change_no_bit(name: str) -> None:
    model, (tokens, options) = sharp(MODELS[name]), inputs(MODELS[name])
    plain = model(tokens, **options)
    with capture(model, *taps(model)) as captured:
        assert torch.equal(model(tokens, **options), plain)
    kept = {tap: iter(captured.calls(tap)) for tap in captured}
    with capture(model, replace={tap: lambda x, calls=calls: next(calls).clone() for tap, calls in kept.items()}):  # type: ignore[misc]
        assert torch.equal(model(tokens, **options), plain)


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("name", ["elman", "sigmoid", "gru", "lstm", "bahdanau"])
def test_a_changed_state_is_what_the_next_step_reads(name: str, layered: bool) -> None:
    """A state replaced by another text's makes the model continue like that text; with dropout, layers run singly."""
    config = MODELS[name]
    model, (tokens, options) = sharp(config), inputs(config)
    stack = "decoder" if name == "bahdanau" else "recurrence"
    model.train(layered)
    for module in model.modules():  # dropout that drops nothing
        if layered and hasattr(module, "p"):
            module.p = 1e-12
    other = tokens.clone()
    other[:, :3] = (other[:, :3] + 1) % 40
    states = [tap for tap in taps(model) if tap.startswith(stack) and tap.split(".")[-1] in ("hidden", "cell")]
    names = [*states, "attention"] if name == "bahdanau" else states
    with capture(model, *names) as captured:
        expected = model(other, **options)

    def third(tap: str) -> Any:
        calls = iter(captured.calls(tap))
        seen: list[int] = []

        def change(x: torch.Tensor) -> torch.Tensor:
            seen.append(1)
            return next(calls) if len(seen) == 3 else (next(calls), x)[1]

        return change

    with capture(model, replace={tap: third(tap) for tap in states}):
        patched = model(tokens, **options)
    torch.testing.assert_close(patched[:, 3:], expected[:, 3:], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(tokens, **options)[:, 3:], expected[:, 3:], atol=1e-3)


def test_shapes() -> None:
    shapes = tap_shapes(sharp(MODELS["decoder"]))
    assert shapes["decoder.1.residual"] == ("batch", "time", 32)
    assert shapes["decoder.0.attention.probabilities"] == ("batch", 4, "time", "time")
    both = tap_shapes(sharp(MODELS["encoder-decoder"]))
    assert both["decoder.1.cross.probabilities"] == ("batch", 4, "time", "source time")
    assert tap_shapes(sharp(MODELS["lstm"]))["recurrence.1.forget"] == ("batch", "time", 16)
    assert "decoder.0.feedforward" not in tap_shapes(sharp(MODELS["attention alone"]))
    assert tap_shapes(sharp(MODELS["bahdanau"]))["attention"] == ("batch", "time", 32)


def test_a_run_records_in_memory_and_in_a_file(tmp_path: Path) -> None:
    run = weft.load(RUNS / "gpt")
    texts = ["the cat sat", "a dog"]
    recorded = run.activations(texts, "blocks.*.attention.output")
    assert list(recorded) == [name for name in run.taps if name.endswith(".attention")]
    stored = run.activations(texts, "blocks.*.attention.output", file=tmp_path / "a.safetensors")
    lengths = [len(run.explain.reading(text).ids) for text in texts]
    for name, rows in recorded.items():
        assert [len(row) for row in rows] == lengths
        assert all(torch.equal(one, other) for one, other in zip(rows, stored[name], strict=True))
        assert torch.equal(run.activations(iter(texts), name)[name][1], rows[1])  # type: ignore[arg-type]
        assert torch.equal(load_file(tmp_path / "a.safetensors")[f"1/{name}"], rows[1])


def test_a_patch_is_undone_also_after_an_error() -> None:
    run = weft.load(RUNS / "gpt")
    settings: Any = {"temperature": 0.0, "max_tokens": 8}
    before = run.generate("the", **settings)
    with run.patch({"decoder.*.residual": torch.zeros_like}):
        assert run.perplexity("the cat sat") != pytest.approx(weft.load(RUNS / "gpt").perplexity("the cat sat"))
    with pytest.raises(ZeroDivisionError), run.patch({"decoder.0.residual": lambda x: x / (1 // 0)}):
        run.perplexity("the cat")
    assert run.generate("the", **settings) == before
    with (
        pytest.raises(ModelError, match=r"shape \(1, \d+, 1\), expected"),
        run.patch({"decoder.0": lambda x: x[..., :1]}),
    ):
        run.perplexity("the cat")


WRONG: dict[str, Any] = {
    "a float32 tensor of shape (1, 3, 1)": lambda x: x[..., :1],
    "a float64 tensor of shape (1, 3, 8)": lambda x: x.double(),
    "None": lambda x: None,
    "a value of type float": lambda x: 0.5,
}


@pytest.mark.parametrize("returned", WRONG)
def test_a_function_that_returns_something_else_is_named_by_its_tap(returned: str) -> None:
    run = weft.load(RUNS / "gpt")
    with pytest.raises(ModelError) as error, run.patch({"decoder.*.residual": WRONG[returned]}):
        run.perplexity("abc")
    expected = "a float32 tensor of shape (1, 3, 8)"
    assert str(error.value) == f"decoder.0.residual: the function returned {returned}, expected {expected}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "changes = {}: expected a tap and a function"),
        ({"decoder.*.residual": 0.5}, "decoder.0.residual: a value of type float is no function"),
        ({"decoder.0.residul": abs}, "did you mean 'decoder.0.residual'"),
        ({"decoder.blocks": abs}, "'decoder.blocks': nothing in this model has that name"),  # it computes nothing
    ],
)
def test_changes_that_can_not_be_made(changes: Any, message: str) -> None:
    with pytest.raises(WeftError) as error, weft.load(RUNS / "gpt").patch(changes):
        pass
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "tap"),
    [("gpt", "decoder.0.attention.probabilities"), ("gpt", "decoder.0.attention"), ("lstm", "recurrence.0.forget")],
)
def test_a_function_may_change_its_tensor_in_place(name: str, tap: str) -> None:
    run = weft.load(RUNS / name)
    found = [run.perplexity("the cat sat")]
    for change in (torch.zeros_like, torch.Tensor.zero_):
        with run.patch({tap: change}):
            found.append(run.perplexity("the cat sat"))
    assert found[1] == found[2] != found[0]


@torch.no_grad()
def test_the_states_of_padded_sources_come_as_rows() -> None:
    """The encoder reads several sources without their padding; a function gets them as rows in their order."""
    model, (tokens, options) = sharp(MODELS["bahdanau"]), inputs(MODELS["bahdanau"], rows=3)
    ids, lengths = options["source"].tokens, (2, 5, 2)
    source = SourceTokens(ids, torch.arange(5) < torch.tensor(lengths)[:, None])
    plain = model(tokens, source=source)
    with capture(model, "encoder") as captured:
        assert torch.equal(model(tokens, source=source), plain)
    for row, length in enumerate(lengths):
        with capture(model, "encoder") as alone:
            model(tokens[:1], source=SourceTokens(ids[row : row + 1, :length]))
        torch.testing.assert_close(captured["encoder"][row, :length], alone["encoder"][0], atol=1e-5, rtol=1e-5)
        assert not captured["encoder"][row, length:].any()
    with capture(model, replace={"encoder": lambda x: x.index_fill(0, torch.tensor([0]), 0.0)}):
        changed = model(tokens, source=source)
    assert torch.equal(changed[1:], plain[1:]) and not torch.allclose(changed[0], plain[0])
    run = weft.load(RUNS / "bahdanau")
    with run.patch({"encoder": lambda x: x}):
        assert run.translate(["the cat", "the"]) == weft.load(RUNS / "bahdanau").translate(["the cat", "the"])


def test_wrong_names_and_models_without_taps() -> None:
    run = weft.load(RUNS / "gpt")
    with pytest.raises(WeftError, match=r"did you mean .*decoder.0.attention"):
        run.activations("the", "decoder.0.atention")
    ngram = weft.load(RUNS / "ngram")
    for ask in (lambda: ngram.taps, lambda: ngram.activations("the", "*"), lambda: ngram.patch({})):
        with pytest.raises(ModelError, match="has counts and no layers, so it has no taps"):
            ask()
    with pytest.raises(WeftError, match="1 targets for 2 texts"):
        weft.load(RUNS / "pairs").activations(["a", "b"], "encoder.*.residual", targets=["c"])
