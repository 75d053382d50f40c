"""`weft plan` and `weft presets`, as a person calls them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.main import run
from weft.config import to_toml
from weft.explain.count import count
from weft.models.presets import PRESETS, preset
from weft.recipe.resolve import resolve


def test_presets_lists_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : lines.index("")]] == list(PRESETS)
    [gpt2] = [line for line in lines if line.startswith("gpt2 ")]
    assert "124.4M" in gpt2
    assert "12 × 768 (12)" in gpt2


def test_presets_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["presets", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["gpt2-xl"]["parameters"] == 1_557_611_200
    assert rows["llama3-8b"]["shape"] == "32 × 4096 (32/8)"
    assert set(rows) == set(PRESETS)


def test_presets_and_plan_import_no_torch() -> None:
    code = (
        "import sys; from weft.cli.main import run; run(['presets']); run(['plan', 'gpt2']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("name", ["gpt-tiny", "vaswani-base", "bert-base", "lstm", "bahdanau", "llama-65b"])
def test_plan_a_preset(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", name]) == 0
    out = capsys.readouterr().out
    assert f"{count(preset(name)).parameters:,}" in out
    assert "petaflop/s-days" in out
    assert "kWh" in out


def test_plan_an_ngram(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "ngram-3"]) == 0
    out = capsys.readouterr().out
    assert "counts, not weights" in out
    assert "kWh" not in out


def test_plan_with_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "gpt2", "model.layers=24", "--tokens", "300B", "--batch", "512", "--length", "512"]) == 0
    out = capsys.readouterr().out
    assert f"{count(preset('gpt2').replace(layers=24)).parameters:,}" in out
    assert "300B (as asked)" in out
    assert f"{-(-300 * 10**9 // (512 * 512)):,} of 512 × 512 tokens" in out


def test_plan_a_recipe_and_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = resolve("gpt-tiny", ["steps=50", "batch.size=4", "batch.length=64", "precision=fp32"])
    (tmp_path / "config.toml").write_text(to_toml(recipe), encoding="utf-8")
    for source in (str(tmp_path), str(tmp_path / "config.toml")):
        assert run(["plan", source, "--device", "cpu"]) == 0
        out = capsys.readouterr().out
        assert "12.8k (the recipe's steps)" in out
        assert "50 of 4 × 64 tokens" in out
        assert "fp32" in out


def test_more_devices_take_less_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama3-8b", "--batch", "8"]) == 0
    assert "too little for even one sequence at a time; 2 could share it" in " ".join(capsys.readouterr().out.split())
    assert run(["plan", "llama3-8b", "--batch", "8", "--gpus", "8"]) == 0
    out = capsys.readouterr().out
    assert "on each of 8 devices" in out
    assert "too little" not in out


def test_a_step_of_so_many_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "multi30k", "batch.tokens=4096", "batch.length=64"]) == 0
    assert "of 32 × 64 tokens" in capsys.readouterr().out  # of a pair both sides count
    assert run(["plan", "gpt-tiny", "objective=chat", "batch.tokens=4096", "batch.length=64"]) == 0
    assert "of 64 × 64 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["gpt2x"], "'gpt2x': no such recipe or preset; did you mean"),
        ([], "name a preset, a recipe or a run"),
        (["gpt2", "--tokens", "many"], "--tokens 'many': expected a number"),
        (["gpt2", "--device", "h2000"], "--device 'h2000': no such device"),
        (["gpt2", "--mfu", "1.5"], "--mfu 1.5: expected a share"),
        (["gpt2", "--length", "2048"], "length 2048: the model's positions end at model.context = 1024"),
        (["gpt2", "model.layerz=3"], "model.layerz: unknown key; did you mean 'model.layers'?"),
        (["gpt2", "--batch", "0"], "--batch"),
        (["gpt2", "--lecture", "opt"], "--lecture opt shows a fixed table"),
        (["--lecture", "gpt5"], "--lecture"),
        (["--lecture", "gpt3", "--device", "cpu"], "which no other option changes"),
        (
            ["gpt2", "model.layers=99999999999999999999"],
            "999: expected a number less than",
        ),
    ],
)
def test_mistakes_get_one_line(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_tables_of_the_lectures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--lecture", "gpt3"]) == 0
    out = capsys.readouterr().out
    assert "gpt3-175b     175B  174.6B" in out
    assert "gpt3-13b: table 2.1 prints d_model 5140" in out
    assert run(["plan", "--lecture", "opt"]) == 0
    assert "80.0" in capsys.readouterr().out
