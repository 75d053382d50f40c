"""Quantised weights kept with a run: bit-identical, rebuilt when stale or damaged; and the choice of a width."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.command import Cli, Patch
from tests.pairwise import each_once
from tests.spread import spread
from torch import Tensor
from torch.nn import functional as F

import weft
from weft.api import auto_width
from weft.api.auto_width import WidthMeasurements
from weft.cli.main import run as command
from weft.decode.fast.quantize import fill, quantize
from weft.decode.fast.quantized_weights import quantize_groups, quantize_rows, quantize_symmetric
from weft.models.build import build
from weft.models.presets import gpt, llama, vaswani
from weft.nn.init import empty_weights
from weft.runs.folder import RunFolder
from weft.training import quantized

Capture = pytest.CaptureFixture[str]
MODELS: dict[str, Any] = {
    "tied": llama(2, 64, 4, d_ff=96, context=32, vocab_size=80, kv_heads=2, tied=True),
    "odd": gpt(1, 36, 2, context=32, vocab_size=81),  # biases, and no groups of 32
    "seq2seq": vaswani(1, 64, 4, d_ff=96, dropout=0.0, vocab_size=80, context=32),
}


class SourceStub:
    tokens = torch.arange(12).view(2, 6)
    mask = None


def logits(model: Any) -> Tensor:
    options = {} if model.encoder is None else {"source": SourceStub()}
    with torch.no_grad():
        output: Tensor = model(torch.arange(16).view(2, 8), **options)
    return output


# ---- the layout


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("columns", "group"), [(96, 32), (32, 32), (14, 14)])
def test_int4_round_trip(columns: int, group: int, centred: bool) -> None:
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns)) + 0.2
    rounded = (quantize_groups if centred else quantize_symmetric)(weight, group)
    packed = rounded.pack("int4")
    assert packed.numbers.shape == (5, columns // 2) and packed.shape == (5, columns) and packed.bits == "int4"
    unpacked = packed.unpack()
    assert torch.equal(unpacked.dequantize(), rounded.dequantize())
    assert torch.equal(unpacked.numbers, rounded.numbers)
    # the first half of a group is in the lower four bits of its bytes
    first = int(packed.numbers[0, 0])
    assert (first & 15) - 8 == int(rounded.numbers[0, 0])
    assert (first >> 4) - 8 == int(rounded.numbers[0, group // 2])


def test_wrong_shapes_are_refused() -> None:
    packed = quantize_rows(torch.randn(6, 64)).pack("int8")
    assert packed.is_for("int8", 6, 64)
    assert packed.scales is not None
    for wrong in (
        packed._replace(scales=packed.scales[:3]),
        packed._replace(scales=packed.scales.bfloat16()),
        packed._replace(numbers=packed.numbers[:, :32].contiguous()),
        packed._replace(centres=packed.scales),
        packed._replace(scales=None),
    ):
        assert not wrong.is_for("int8", 6, 64)
    assert not packed.is_for("int4", 6, 64) and not packed.is_for("int8", 64, 6)


@pytest.mark.parametrize(("name", "bits"), each_once(MODELS, ["bf16", "int8", "int4"]))
def test_an_empty_model_is_filled_to_the_bit(name: str, bits: Any) -> None:
    torch.manual_seed(0)
    weights: dict[str, Tensor] = {}
    quantised = quantize(build(MODELS[name]), bits, weights)
    with empty_weights():
        filled: Any = build(MODELS[name])
    fill(filled, bits, weights)
    assert torch.equal(logits(filled), logits(quantised))
    for wrong in (
        {key: value for key, value in weights.items() if key != "embedding.weight"},
        {**weights, "embedding.weight": weights["embedding.weight"][:, :-1]},
        {**weights, "embedding.weight": weights["embedding.weight"].bfloat16()},
        {**weights, "more": torch.zeros(1)},
        {key: value for key, value in weights.items() if not key.endswith("numbers")},
    ):
        with empty_weights():
            other: Any = build(MODELS[name])
        with pytest.raises(ValueError, match="not "):
            fill(other, bits, wrong)


# ---- in a run's folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    pick = random.Random(0).choice
    lines = [f"{pick(['the cat', 'a dog'])} {pick(['sees', 'likes'])} {pick(['me', 'you'])}.\n" for _ in range(300)]
    (folder / "book.txt").write_text("".join(lines))
    words = ["model.layers=1", "model.d_model=32", "model.attention.heads=2", "model.feedforward.d_ff=64"]
    words += ["batch.length=16", "batch.size=8", "steps=20", "tokenizer.kind=byte"]
    assert command(["train", "llama-tiny", "--data", f"{folder}/book.txt", "--run", f"{folder}/run", *words]) == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(trained, tmp_path / "run", symlinks=True))


@pytest.fixture
def calls(monkeypatch: Patch) -> Mock:
    """Counts how often weights are quantised."""
    counted = Mock(side_effect=quantize)
    monkeypatch.setattr(quantized, "quantize", counted)
    return counted


def best(run: RunFolder) -> Path:
    return run.checkpoints / (run.checkpoints / "best").readlink()


@pytest.mark.parametrize("bits", spread(["bf16", "int8", "int4"], 1))
def test_the_second_load_uses_the_kept_weights(run: RunFolder, bits: str, calls: Mock) -> None:
    expected = logits(quantize(weft.load(run.path, "cpu").model, bits))
    first = weft.load(run.path, "cpu", quantize=bits)
    assert torch.equal(logits(first.model), expected)
    weights = best(run) / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))  # the float32 weights are no longer needed
    second = weft.load(run.path, "cpu", quantize=bits)
    assert calls.call_count == 1 and first.quantized == second.quantized == bits
    assert torch.equal(logits(second.model), expected)
    assert sorted(path.name for path in run.quantized.glob("[a-z]*")) == [f"{bits}.json", f"{bits}.safetensors"]


def test_stale_and_damaged_files_are_rebuilt(run: RunFolder, calls: Mock, monkeypatch: Patch) -> None:
    file, note = run.quantized / "int8.safetensors", run.quantized / "int8.json"
    expected = logits(weft.load(run.path, "cpu", quantize="int8").model)
    whole = file.read_bytes()

    harms: dict[str, Callable[[], object]] = {
        "cut": lambda: file.write_bytes(whole[:-40]),
        "flipped": lambda: file.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:]),
        "lost": file.unlink,
        "a damaged note": lambda: note.write_text("[" * 100_000),
        "an older format": lambda: monkeypatch.setattr(quantized, "FORMAT", quantized.FORMAT + 1),
    }
    for number, (name, harm) in enumerate(harms.items(), 2):
        harm()
        assert torch.equal(logits(weft.load(run.path, "cpu", quantize="int8").model), expected)
        assert calls.call_count == number, name
        assert file.read_bytes() == whole
    # other settings, another checkpoint
    config = run.config.read_text()
    run.config.write_text(config.replace("eps = 1e-05", "eps = 1e-01").replace("eps = 1e-06", "eps = 1e-01"))
    changed = weft.load(run.path, "cpu", quantize="int8")
    assert calls.call_count == 7 and not torch.equal(logits(changed.model), expected)


def test_a_folder_that_cannot_be_written_is_no_error(run: RunFolder, calls: Mock) -> None:
    run.quantized.write_text("in the way")
    expected = logits(quantize(weft.load(run.path, "cpu").model, "int8"))
    for number in (1, 2):
        assert torch.equal(logits(weft.load(run.path, "cpu", quantize="int8").model), expected)
        assert calls.call_count == number
    assert run.quantized.read_text() == "in the way"


def test_nothing_is_written_through_a_link(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    run.quantized.symlink_to(tmp_path / "elsewhere")
    weft.load(run.path, "cpu", quantize="auto")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_missing_checkpoint_is_still_an_error(run: RunFolder, cli: Cli) -> None:
    weft.load(run.path, "cpu", quantize="int8")
    shutil.rmtree(run.checkpoints)
    assert "no checkpoint yet" in cli.refused("generate", run.path, "--quantize", "int8")


def test_an_adapter_is_merged_and_its_base_checked(run: RunFolder, tmp_path: Path, calls: Mock) -> None:
    book, tuned = run.path.parent / "book.txt", tmp_path / "tuned"
    book.write_text("you see the cat.\n" * 200)
    words = [f"init={run.path}", "adapter.rank=2", "steps=3", "batch.size=4", "optimizer.lr=0.01"]
    assert command(["train", str(run.config), "--data", str(book), "--run", str(tuned), *words]) == 0
    expected = logits(quantize(weft.load(tuned, "cpu").model, "int4"))
    for _ in range(2):
        assert torch.equal(logits(weft.load(tuned, "cpu", quantize="int4").model), expected)
    assert calls.call_count == 1
    manifest = best(run) / "manifest.json"
    tree = json.loads(manifest.read_text())
    tree["files"]["model.safetensors"]["sha256"] = ["0" * 64]
    manifest.write_text(json.dumps(tree))
    with pytest.raises(weft.errors.RunError, match="which have changed since"):
        weft.load(tuned, "cpu", quantize="int4")


# ---- auto


def measured(losses: list[float], speeds: list[float]) -> WidthMeasurements:
    names = ["fp32", "bf16", "int8", "int4"]
    by_name = [dict(zip(names, values, strict=True)) for values in (losses, speeds)]
    return WidthMeasurements(losses=by_name[0], speeds=by_name[1], tokens=20_000, text="held-out tokens")


@pytest.mark.parametrize(
    ("losses", "speeds", "chosen"),
    [
        ([2.0, 2.0, 2.01, 2.019], [1.0, 2.0, 3.0, 4.0], "int4"),
        ([2.0, 2.0, 2.01, 2.021], [1.0, 2.0, 3.0, 4.0], "int8"),
        ([2.0, 2.1, 2.1, 2.1], [1.0, 2.0, 3.0, 4.0], "fp32"),
        ([2.0, 2.0, 2.0, 2.0], [1.0, 0.5, 0.7, 0.9], "fp32"),
        ([2.0, 2.0, 2.0, 2.0], [1.0, 1.01, 2.0, 2.02], "int8"),  # differences within the noise
        ([2.0, float("nan"), float("inf"), 1.9], [1.0, 3.0, 4.0, 2.0], "int4"),
        ([float("nan")] * 4, [1.0, 2.0, 3.0, 4.0], "fp32"),
    ],
)
def test_the_fastest_within_one_percent_is_chosen(losses: list[float], speeds: list[float], chosen: str) -> None:
    assert measured(losses, speeds).chosen == chosen


def test_the_choice_is_logged_with_its_reasons() -> None:
    assert measured([2.4109, 2.4109, 2.4131, 2.4543], [10.0, 15.0, 31.0, 45.0]).line == (
        "quantize = int8: 3.1 × as fast as fp32, loss 2.4131 against 2.4109 (+0.1%) on 20,000 held-out tokens; "
        "int4 would cost +1.8%"
    )
    assert measured([2.0] * 4, [10.0, 5.0, 9.0, 10.0]).line == (
        "quantize = fp32: nothing is faster; loss 2.0000 on 20,000 held-out tokens"
    )
    assert measured([2.0, 2.0, 2.1, 2.0], [10.0, 5.0, 20.0, 10.0]).line == (
        "quantize = fp32: faster widths cost more than 1%; loss 2.0000 on 20,000 held-out tokens; int8 would cost +5.0%"
    )


def test_auto_measures_once(run: RunFolder, calls: Mock, monkeypatch: Patch, cli: Cli, capsys: Capture) -> None:
    speeds = iter([100.0, 150.0, 310.0, 200.0])
    monkeypatch.setattr(auto_width, "_speed", lambda model: next(speeds))
    words = ["generate", str(run.path), "--prompt", "the", "--greedy", "--max-tokens", "6", "--quantize"]
    outputs = [(cli(*words, "auto"), cli.err) for _ in range(2)]
    assert calls.call_count == 3 and outputs[0] == outputs[1]
    assert cli.err.startswith("weft: quantize = int8: 3.1 × as fast as fp32, loss ")
    assert cli(*words, "int8") == outputs[0][0] and calls.call_count == 3
    note = json.loads((run.quantized / "auto.json").read_text())
    exact, small = (weft.load(run.path, "cpu", quantize=bits).evaluate()["loss"] for bits in (None, "int8"))
    assert note["losses"]["fp32"] == pytest.approx(exact, rel=1e-6)
    assert note["losses"]["int8"] == pytest.approx(small, rel=1e-6)
    # another machine has other speeds, and the same losses
    monkeypatch.setattr(auto_width, "machine_fingerprint", lambda device: "another")
    monkeypatch.setattr(auto_width, "_measured_text", None)
    speeds = iter([100.0, 90.0, 80.0, 70.0])
    assert weft.load(run.path, "cpu", quantize="auto").quantized is None
    assert "weft: quantize = fp32: nothing is faster" in capsys.readouterr().err
    assert json.loads((run.quantized / "auto.json").read_text())["losses"] == note["losses"]
    assert cli.json("evaluate", run.path, "--quantize", "auto")["loss"] == pytest.approx(exact, rel=1e-6)


def test_without_held_out_data_losses_are_measured_on_pythons_documentation(
    run: RunFolder, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(auto_width, "MIN_TOKENS", 200)
    monkeypatch.setattr(auto_width, "MAX_CPU_WORK", 0)
    corpus = weft.text.builtin.BuiltinCorpus(["The interpreter.\n" * 30], "")
    monkeypatch.setattr(auto_width, "corpus", lambda name: corpus)
    weft.load(run.path, "cpu").export("weft", tmp_path / "alone")
    capsys.readouterr()
    loaded = weft.load(tmp_path / "alone", "cpu", quantize="auto")
    line = capsys.readouterr().err
    assert "on 200 tokens of Python's documentation, as there is no held-out text" in line
    note = json.loads((tmp_path / "alone/quantized/auto.json").read_text())
    text = loaded.tokenizer.decode(loaded.tokenizer.encode("The interpreter.\n" * 30)[:200])
    plain = weft.load(tmp_path / "alone", "cpu")
    ids = torch.tensor([loaded.tokenizer.need("eos"), *loaded.tokenizer.encode(text)])
    windows = [ids[start : start + 17] for start in range(0, 200, 16)]  # the run's batch.length
    with torch.no_grad():
        nats = [F.cross_entropy(plain.model(row[None, :-1])[0], row[1:], reduction="none") for row in windows]
    assert note["losses"]["fp32"] == pytest.approx(float(torch.cat(nats).mean()), rel=1e-5)


def test_bad_widths_are_one_line(run: RunFolder, cli: Cli) -> None:
    for name in ("generate", "chat", "evaluate"):
        line = cli.refused(name, run.path, "--quantize", "int3")
        assert "quantize = 'int3': expected 'bf16', 'int8' or 'int4'; or 'auto'" in line
