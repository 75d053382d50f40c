"""Weights in 8 or 4 bits are close to the originals, and every kernel is close to the definition."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.decode.fast.helpers import build_transformer
from tests.pairwise import each_once
from torch import Tensor
from torch.nn import functional as F

from weft.api import train as api
from weft.cli.main import run
from weft.data.batch import Source
from weft.decode.fast import matmul
from weft.decode.fast import quantized_weights as weights
from weft.decode.fast.quantize import QuantizedLinear, quantize
from weft.errors import ConfigError, ModelError
from weft.models.build import build
from weft.models.config import Recurrent
from weft.models.presets import bert, gpt, llama, vaswani
from weft.models.transformer import Transformer

CPU = torch.device("cpu")
WIDTHS: tuple[weights.Bits, ...] = ("int8", "int4")
KERNELS = [(bits, kernel) for bits in WIDTHS for kernel in (matmul.REFERENCE[bits], *matmul.KERNELS[bits])]


def matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# ---- weights


def test_8_bits_are_at_most_half_a_step_off() -> None:
    weight = matrix(20, 48)
    weight[3] = 0.0
    quantized = weights.quantize_rows(weight)
    numbers, scales, _ = quantized
    assert numbers.dtype == torch.int8 and int(numbers.abs().max()) == weights.MAX_INT8
    restored = quantized.dequantize()
    assert bool(((restored - weight).abs() <= scales / 2 * 1.0001).all())
    assert not restored[3].any()


@pytest.mark.parametrize("kind", ["normal", "outliers", "one-sided", "Q4_1"])
def test_centres_reduce_the_error_of_4_bits(kind: str) -> None:
    weight, max_ratio = matrix(64, 256), 0.95
    if kind == "outliers":
        weight[:, ::37] *= 6.0
        max_ratio = 0.97
    elif kind == "one-sided":
        weight, max_ratio = weight.abs() + 0.5, 0.5
    elif kind == "Q4_1":  # 16 even steps up from the lowest weight, in half precision
        codes = torch.randint(0, 16, (64, 8, 32), generator=torch.Generator().manual_seed(0)).float()
        codes[..., 0], codes[..., 1] = 0.0, 15.0
        step, lowest = matrix(64, 8).abs().half().float() + 0.1, matrix(64, 8).half().float() - 1.0
        weight, max_ratio = (codes * step.unsqueeze(-1) + lowest.unsqueeze(-1)).flatten(1), 0.02
    symmetric = (weights.quantize_symmetric(weight).dequantize() - weight).square().sum()
    centred = (weights.quantize_groups(weight).dequantize() - weight).square().sum()
    assert float(centred) < max_ratio**2 * float(symmetric)
    assert weights.centres_pay(weight) == (kind != "normal")


def quantize_group_by_group(weight: Tensor, centred: bool) -> Tensor:
    """Dequantised 4-bit weights by definition: for each group alone, the best of all candidates."""
    groups = []
    for w in weight.view(-1, weights.GROUP):
        candidates = []
        largest = w.max() if w.max() > -w.min() else w.min()
        steps = [(w.max() - w.min()) / 15 * fraction for fraction in weights.RANGE_FRACTIONS]
        for scale in steps if centred else [largest / peak for peak in weights.SYMMETRIC_PEAKS]:
            scale = scale.bfloat16().float() if scale else torch.ones(())
            middle = (w.max() + w.min()) / 2 + scale / 2 if centred else torch.zeros(())
            numbers = ((w - middle) / scale).round().clamp(-8, 7)
            centre = (w - numbers * scale).mean() if centred else torch.zeros(())
            restored = numbers * scale + centre
            candidates.append((float((w - restored).double().square().sum()), restored))
        groups.append(min(candidates, key=lambda candidate: candidate[0])[1])
    return torch.cat(groups).view_as(weight)


@pytest.mark.parametrize("centred", [False, True])
def test_4_bits_equal_the_definition_in_chunks_of_any_size(centred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(12, 96) * torch.linspace(0.01, 3.0, 12)[:, None] + 0.1
    weight[2, :32] = 0.0
    scheme = weights.quantize_groups if centred else weights.quantize_symmetric
    quantized = scheme(weight)
    numbers = quantized.numbers
    assert int(numbers.min()) == -8 and int(numbers.max()) <= 7 and quantized.scales.shape == (12, 3)
    expected = quantize_group_by_group(weight, centred)
    torch.testing.assert_close(quantized.dequantize(), expected, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(weights, "CHUNK", 5 * 96)
    chunked = scheme(weight)
    assert torch.equal(chunked.numbers, numbers) and torch.equal(chunked.dequantize(), quantized.dequantize())


# ---- products


@pytest.mark.parametrize(("bits", "kernel"), KERNELS, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("shape", [(64, 128), (48, 320)])
def test_each_kernel_equals_the_definition(bits: matmul.Bits, kernel: matmul.Kernel, shape: tuple[int, int]) -> None:
    is_int8 = bits == "int8"
    quantized = weights.quantize_rows(matrix(*shape)) if is_int8 else weights.quantize_groups(matrix(*shape) + 0.3)
    spec = matmul.MatrixSpec(*shape, quantized.scales.shape[1], CPU)
    if not (kernel.fits(spec) and matmul.works(kernel, bits, CPU, dtype=torch.float32)):
        pytest.skip("not on this processor")
    x = matrix(5, shape[1])
    tolerance = 1e-5 if kernel.name == "plain" else 0.015  # others may quantise x to 8 bits, or scales to 16
    assert error(kernel.make(quantized.pack(bits))(x), F.linear(x, quantized.dequantize())) < tolerance


def test_8_bit_numbers_are_two_signed_4_bit_digits() -> None:
    numbers = torch.arange(-weights.MAX_INT8, weights.MAX_INT8 + 1, dtype=torch.int8)
    upper, lower = matmul.split_digits(numbers)
    for digit in (upper, lower):
        assert int(digit.min()) >= -8 and int(digit.max()) <= 7
    assert torch.equal(upper.int() * 16 + lower.int(), numbers.int())


def test_odd_widths_are_stored_in_8_bits() -> None:
    layer = QuantizedLinear(matmul.pack_weight("int4", matrix(6, 7)), torch.ones(6), torch.float32)
    x = matrix(3, 7)
    assert error(layer(x), F.linear(x, matrix(6, 7), torch.ones(6))) < 0.02


# ---- models


MODELS = {
    "llama": llama(2, 64, 4, d_ff=96, context=32, vocab_size=80, kv_heads=2, tied=True),
    "untied": llama(2, 64, 4, d_ff=96, context=32, vocab_size=80),
    "gpt": gpt(2, 64, 4, context=32, vocab_size=80),
    "seq2seq": vaswani(1, 64, 4, d_ff=96, dropout=0.0, vocab_size=80, context=32),
}


def size_in_bytes(model: Transformer) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


@pytest.mark.parametrize(("name", "bits"), each_once(MODELS, ["int8", "int4"]))
def test_a_quantized_model_keeps_the_contract(name: str, bits: str) -> None:
    model = build_transformer(MODELS[name])
    tokens = torch.randint(80, (2, 9), generator=torch.Generator().manual_seed(1))
    source = Source(torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.bool)) if name == "seq2seq" else None
    options: dict[str, Any] = {} if source is None else {"source": source}
    with torch.no_grad():
        before, size = model(tokens, **options), size_in_bytes(model)
        quantize(model, bits)
        after = model(tokens, **options)
        assert error(after, before) < (0.03 if bits == "int8" else 0.2)
        assert size_in_bytes(model) < (0.5 if bits == "int8" else 0.3) * size  # the embeddings keep their dtype
        # step by step it agrees, up to how rows are rounded, also after rows are reordered
        state = model.start(2, 12, source)
        logits = [model.step(tokens[:, :4], state), model.step(tokens[:, 4:8], state)]
        state.reorder(torch.tensor([1, 0]))
        logits.append(model.step(tokens[[1, 0], 8:], state)[[1, 0]])
        assert error(torch.cat(logits, dim=1), after) < 0.03


def test_an_encoder_is_quantized_too() -> None:
    model = build_transformer(bert(1, 64, 4, vocab_size=80, context=32))
    tokens = torch.randint(80, (2, 9))
    with torch.no_grad():
        before = model.features(tokens)
        assert error(quantize(model, "int8").features(tokens), before) < 0.06


def test_unsupported_models_and_widths_are_refused() -> None:
    with pytest.raises(ModelError, match="kind 'recurrent' can't be quantized"):
        quantize(build(Recurrent(vocab_size=20, d_model=8)), "int8")
    with pytest.raises(ConfigError, match="quantize = 'int3': expected 'bf16', 'int8' or 'int4'"):
        quantize(build_transformer(MODELS["llama"]), "int3")


# ---- commands


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    pick = random.Random(0).choice
    lines = [f"{pick(['the cat', 'a dog'])} {pick(['sees', 'likes'])} {pick(['me', 'you'])}.\n" for _ in range(400)]
    (folder / "book.txt").write_text("".join(lines))
    settings = ["model.layers=1", "model.d_model=32", "model.attention.heads=2", "model.feedforward.d_ff=64"]
    settings += ["batch.length=16", "batch.size=8", "steps=60", "tokenizer.kind=byte"]
    command = ["train", "llama-tiny", "--data", str(folder / "book.txt"), "--run", str(folder / "run"), *settings]
    assert run(command) == 0
    return folder / "run"


def test_evaluate_reports_the_cost_of_quantization(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", str(trained), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    for bits, max_ratio in (("int8", 1.02), ("int4", 1.2)):
        assert run(["evaluate", str(trained), "--quantize", bits, "--json"]) == 0
        metrics = json.loads(capsys.readouterr().out)
        assert metrics["loss"] == plain["loss"]
        assert metrics[bits]["perplexity"] != plain["perplexity"]
        assert metrics[bits]["perplexity"] < max_ratio * plain["perplexity"]
    assert run(["evaluate", str(trained), "--quantize", "int8"]) == 0
    table = capsys.readouterr().out
    assert "int8" in table and "cost" in table
    assert run(["evaluate", str(trained), "--quantize", "int2"]) == 2
    assert "expected 'bf16', 'int8' or 'int4'" in capsys.readouterr().err


def test_generate_with_quantized_weights(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(trained), "--prompt", "the", "--greedy", "--max-tokens", "12"]
    assert run([*command, "--quantize", "int8"]) == 0
    text = api.load(trained, quantize="int8").generate("the", temperature=0.0, max_tokens=12)
    assert capsys.readouterr().out == f"the{text}\n"
    assert run([*command, "--quantize", "int9"]) == 2
    assert "quantize = 'int9'" in capsys.readouterr().err
