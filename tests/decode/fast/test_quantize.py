"""Weights in 8 or 4 bits: close to what they were, and every kernel close to the definition."""

import json
import random
from pathlib import Path

import pytest
import torch
from tests.pairwise import each_once
from torch.nn import functional as F

from weft.api import train as api
from weft.cli.main import run
from weft.decode.config import Sampling
from weft.decode.fast import products as small
from weft.decode.fast import quantize as quantized
from weft.decode.fast import rounding
from weft.decode.generate import generate
from weft.errors import ConfigError, ModelError
from weft.models.build import build
from weft.models.config import Recurrent
from weft.models.presets import bert, gpt, llama, vaswani
from weft.models.transformer import Transformer

CPU = torch.device("cpu")
KERNELS = [(bits, kernel) for bits in ("int8", "int4") for kernel in (small.PLAIN[bits], *small.KERNELS[bits])]


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


# ---- numbers


def test_eight_bits_are_at_most_half_a_step_off() -> None:
    weight = matrix(20, 48)
    weight[3] = 0.0
    rounded = rounding.quantize_rows(weight)
    numbers, scales, _ = rounded
    assert numbers.dtype == torch.int8 and int(numbers.abs().max()) == rounding.MAX_INT8
    back = rounded.dequantize()
    assert bool(((back - weight).abs() <= scales / 2 * 1.0001).all())
    assert not back[3].any()


def test_four_bits_choose_the_scale_with_the_smallest_error() -> None:
    weight = matrix(16, 96)
    weight[2, :32] = 0.0
    rounded = rounding.quantize_groups(weight)
    numbers, scales, centres = rounded
    assert centres is not None and scales.shape == centres.shape == (16, 3)
    assert int(numbers.min()) == -8 and int(numbers.max()) <= 7
    back = rounded.dequantize()
    assert not back[2, :32].any()
    groups = weight.view(16, 3, 32)
    plain = (groups.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-9)
    simple = ((groups / plain).round() * plain).view(16, 96)
    assert float((back - weight).square().sum()) < 0.95 * float((simple - weight).square().sum())
    # a group may be quantised alone: its neighbours don't matter
    alone, scale, _ = rounding.quantize_groups(weight[:, 32:64])
    assert torch.equal(alone, numbers[:, 32:64]) and torch.equal(scale[:, 0], scales[:, 1])


@pytest.mark.parametrize("kind", ["normal", "outliers", "one-sided", "blocks"])
def test_centres_bring_four_bits_closer(kind: str) -> None:
    weight = matrix(64, 256)
    most = 0.95
    if kind == "outliers":
        weight[:, ::37] *= 6.0
        most = 0.97
    elif kind == "one-sided":
        weight, most = weight.abs() + 0.5, 0.5
    elif kind == "blocks":  # as a Q4_1 file has them: 16 even steps from the lowest up, in half precision
        codes = torch.randint(0, 16, (64, 8, 32), generator=torch.Generator().manual_seed(0)).float()
        codes[..., 0], codes[..., 1] = 0.0, 15.0
        step, lowest = matrix(64, 8).abs().half().float() + 0.1, matrix(64, 8).half().float() - 1.0
        weight, most = (codes * step.unsqueeze(-1) + lowest.unsqueeze(-1)).flatten(1), 0.02
    before = (rounding.quantize_around_zero(weight).dequantize() - weight).square().sum()
    after = (rounding.quantize_groups(weight).dequantize() - weight).square().sum()
    assert float(after) < most**2 * float(before)
    assert rounding.centres_pay(weight) == (kind != "normal")


def group_by_group(weight: torch.Tensor, centred: bool) -> torch.Tensor:
    """Four bits as they are defined, one group after another: all that may be tried is, and the best is kept."""
    back = []
    for w in weight.view(-1, rounding.GROUP):
        tries = []
        largest = w.max() if w.max() > -w.min() else w.min()
        steps = [(w.max() - w.min()) / 15 * reach for reach in rounding.REACHES]
        for scale in steps if centred else [largest / most for most in rounding.SHRINKS]:
            scale = scale.bfloat16().float()
            middle = (w.max() + w.min()) / 2 + scale / 2 if centred else torch.zeros(())
            numbers = ((w - middle) / scale).round().clamp(-8, 7)
            centre = (w - numbers * scale).mean() if centred else torch.zeros(())
            tries.append((float((w - numbers * scale - centre).double().square().sum()), numbers * scale + centre))
        back.append(min(tries, key=lambda tried: tried[0])[1])
    return torch.cat(back).view_as(weight)


@pytest.mark.parametrize("centred", [False, True])
def test_chunks_and_scratch_space_change_nothing(centred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(12, 96) * torch.linspace(0.01, 3.0, 12)[:, None] + 0.1
    rounded = (rounding.quantize_groups if centred else rounding.quantize_around_zero)(weight)
    torch.testing.assert_close(rounded.dequantize(), group_by_group(weight, centred), rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(rounding, "CHUNK", 5 * 96)
    again = (rounding.quantize_groups if centred else rounding.quantize_around_zero)(weight)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(rounded, again, strict=True))  # type: ignore[arg-type]


# ---- products


@pytest.mark.parametrize(("bits", "kernel"), KERNELS, ids=lambda each: getattr(each, "name", each))
@pytest.mark.parametrize("shape", [(64, 128), (48, 320)])
def test_each_kernel_gives_what_the_definition_gives(
    bits: small.Bits, kernel: small.Kernel, shape: tuple[int, int]
) -> None:
    eight = bits == "int8"
    rounded = rounding.quantize_rows(matrix(*shape)) if eight else rounding.quantize_groups(matrix(*shape) + 0.3)
    case = small.Case(*shape, rounded.scales.shape[1], CPU)
    if not (kernel.fits(case) and small.works(kernel, bits, CPU, torch.float32)):
        pytest.skip("not on this processor")
    x = matrix(5, shape[1])
    # others than the definition may round x to 8 bits, or the scales to 16
    most = 1e-5 if kernel.name == "plain" else 0.015
    assert off(kernel.make(rounding.Packed.of(rounded, bits))(x), F.linear(x, rounded.dequantize())) < most


def test_every_eight_bit_number_survives_its_two_digits() -> None:
    numbers = torch.arange(-rounding.MAX_INT8, rounding.MAX_INT8 + 1, dtype=torch.int8)
    upper = (numbers + 8) >> 4
    lower = numbers - (upper << 4)
    for digit in (upper, lower):
        assert int(digit.min()) >= -8 and int(digit.max()) <= 7
    assert torch.equal(upper.int() * 16 + lower.int(), numbers.int())


def test_odd_widths_are_kept_in_eight_bits() -> None:
    part = quantized.QuantizedLinear(small.packed("int4", matrix(6, 7)), torch.ones(6), torch.float32)
    x = matrix(3, 7)
    assert off(part(x), F.linear(x, matrix(6, 7), torch.ones(6))) < 0.02


# ---- models


MODELS = {
    "llama": llama(2, 64, 4, d_ff=96, context=32, vocab_size=80, kv_heads=2, tied=True),
    "untied": llama(2, 64, 4, d_ff=96, context=32, vocab_size=80),
    "gpt": gpt(2, 64, 4, context=32, vocab_size=80),
    "seq2seq": vaswani(1, 64, 4, d_ff=96, dropout=0.0, vocab_size=80, context=32),
}


class Read:
    tokens = torch.arange(12).view(2, 6)
    mask = None


def bytes_of(model: Transformer) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def built(name: str) -> Transformer:
    torch.manual_seed(0)
    return build(MODELS[name]).eval()


@pytest.mark.parametrize(("name", "bits"), each_once(MODELS, ["int8", "int4"]))
def test_a_quantized_model_keeps_the_contract(name: str, bits: str) -> None:
    model = built(name)
    tokens = torch.randint(80, (2, 9), generator=torch.Generator().manual_seed(1))
    source = Read() if name == "seq2seq" else None
    given = {} if source is None else {"source": source}
    with torch.no_grad():
        before, size = model(tokens, **given), bytes_of(model)
        quantized.quantize(model, bits)
        whole = model(tokens, **given)
        assert off(whole, before) < (0.03 if bits == "int8" else 0.2)
        assert bytes_of(model) < (0.5 if bits == "int8" else 0.3) * size  # a table is still looked up
        # step by step it says the same, but for how rows are rounded; so do rows that change places
        state = model.start(2, 12, source)
        steps = [model.step(tokens[:, :4], state), model.step(tokens[:, 4:8], state)]
        state.reorder(torch.tensor([1, 0]))
        steps.append(model.step(tokens[[1, 0], 8:], state)[[1, 0]])
        assert off(torch.cat(steps, dim=1), whole) < 0.03


def test_a_quantized_model_writes() -> None:
    model = quantized.quantize(built("llama"), "int4")
    settings = Sampling(temperature=0.0, max_tokens=8)
    texts = [[token.id for token in generate(model, [[1, 2, 3]], settings)] for _ in "ab"]
    assert texts[0] == texts[1] and len(texts[0]) == 8


def test_an_encoder_is_quantized_too() -> None:
    model = build(bert(1, 64, 4, vocab_size=80, context=32)).eval()
    tokens = torch.randint(80, (2, 9))
    with torch.no_grad():
        before = model.features(tokens)
        assert off(quantized.quantize(model, "int8").features(tokens), before) < 0.06


def test_what_cannot_be_quantized_is_said() -> None:
    with pytest.raises(ModelError, match="kind 'recurrent' can't be quantized"):
        quantized.quantize(build(Recurrent(vocab_size=20, d_model=8)), "int8")
    with pytest.raises(ConfigError, match="quantize = 'int3': expected 'bf16', 'int8' or 'int4'"):
        quantized.quantize(built("llama"), "int3")


# ---- the commands


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    pick = random.Random(0).choice
    lines = [f"{pick(['the cat', 'a dog'])} {pick(['sees', 'likes'])} {pick(['me', 'you'])}.\n" for _ in range(400)]
    (folder / "book.txt").write_text("".join(lines))
    words = ["model.layers=1", "model.d_model=32", "model.attention.heads=2", "model.feedforward.d_ff=64"]
    words += ["batch.length=16", "batch.size=8", "steps=60", "tokenizer.kind=byte"]
    assert run(["train", "llama-tiny", "--data", str(folder / "book.txt"), "--run", str(folder / "run"), *words]) == 0
    return folder / "run"


def test_evaluate_says_what_small_weights_cost(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", str(trained), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    for bits, most in (("int8", 1.02), ("int4", 1.2)):
        assert run(["evaluate", str(trained), "--quantize", bits, "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures["loss"] == plain["loss"]
        assert figures[bits]["perplexity"] != plain["perplexity"]
        assert figures[bits]["perplexity"] < most * plain["perplexity"]
    assert run(["evaluate", str(trained), "--quantize", "int8"]) == 0
    table = capsys.readouterr().out
    assert "int8" in table and "cost" in table
    assert run(["evaluate", str(trained), "--quantize", "int2"]) == 2
    assert "expected 'bf16', 'int8' or 'int4'" in capsys.readouterr().err


def test_generate_writes_with_small_weights(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(trained), "--prompt", "the", "--greedy", "--max-tokens", "12"]
    assert run([*words, "--quantize", "int8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("the")
    written = api.load(trained, quantize="int8").generate("the", temperature=0.0, max_tokens=12)
    assert text == f"the{written}\n"
    assert run([*words, "--quantize", "int9"]) == 2
    assert "quantize = 'int9'" in capsys.readouterr().err
