"""`weft plan` and `weft presets`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command import Cli

import weft
from weft.config import to_toml
from weft.costs.count import count
from weft.models.presets import PRESETS, preset
from weft.recipe.resolve import resolve


def test_presets_as_json(cli: Cli) -> None:
    rows = {row["name"]: row for row in cli.json("presets")}
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
def test_plan_a_preset(name: str, cli: Cli) -> None:
    out = cli("plan", name)
    assert f"{count(preset(name)).parameters:,}" in out
    assert "petaflop/s-days" in out
    assert "kWh" in out


def test_plan_an_ngram(cli: Cli) -> None:
    out = cli("plan", "ngram-3")
    assert "counts instead of weights" in out
    assert "kWh" not in out


def test_plan_with_changes(cli: Cli) -> None:
    out = cli("plan", "gpt2", "model.layers=24", "--tokens", "300B", "--batch", "512", "--length", "512")
    assert f"{count(preset('gpt2').replace(layers=24)).parameters:,}" in out
    assert "300B (as requested)" in out
    assert f"{-(-300 * 10**9 // (512 * 512)):,} of 512 × 512 tokens" in out


def test_plan_a_recipe_and_a_run(tmp_path: Path, cli: Cli) -> None:
    recipe = resolve("gpt-tiny", ["steps=50", "batch.size=4", "batch.length=64", "precision=fp32"])
    (tmp_path / "config.toml").write_text(to_toml(recipe), encoding="utf-8")
    for source in (str(tmp_path), str(tmp_path / "config.toml")):
        out = cli("plan", source, "--device", "cpu")
        assert "12.8k (the recipe's steps)" in out
        assert "50 of 4 × 64 tokens" in out
        assert "fp32" in out


def test_more_devices_take_less_time_and_memory(cli: Cli) -> None:
    out = " ".join(cli("plan", "llama3-8b", "--batch", "8").split())
    assert "too little for even one sequence; 2 devices could share it" in out
    out = cli("plan", "llama3-8b", "--batch", "8", "--gpus", "8")
    assert "on each of 8 devices" in out
    assert "too little" not in out


def test_a_layout_is_chosen_and_the_others_are_explained(cli: Cli) -> None:
    arguments = ["plan", "gpt3-175b", "--gpus", "1024", "--device", "a100", "--interconnect", "ib-hdr"]
    out = cli(*arguments)
    assert "2,048 × 2,048 tokens per step over 1,024 GPUs" in out
    assert "fastest that fits" in out
    assert "does not fit: 2.86 TiB of 74.5 GiB" in out  # a copy on each
    assert "25 GB/s per GPU between machines (ib-hdr)" in out
    values = cli.json(*arguments)
    best, others = values["layouts"]["best"], values["layouts"]["others"]
    assert best["fits"]
    assert best["memory_bytes"]["peak"] < 80e9
    assert values["device"]["mfu"] == best["mfu"]
    steps = values["training"]["tokens"] / (2048 * 2048)
    assert values["training"]["seconds"] == pytest.approx(steps * best["seconds"]["step"])
    assert all(each["seconds"]["step"] >= best["seconds"]["step"] or not each["fits"] for each in others)


def test_a_requested_layout_is_shown_beside_the_fastest(cli: Cli) -> None:
    lines = cli("plan", "gpt2", "--gpus", "8", "--layout", "tensor=4,sequence=true").splitlines()
    [requested] = [line for line in lines if "slower: all-reduces" in line]
    assert requested.split()[:3] == ["2", "4", "seq"]
    assert "fastest of all" in lines[lines.index(requested) + 1]


def test_the_prediction_for_one_h200_is_close_to_the_measurement(cli: Cli) -> None:
    """59.6 ms and 14.1 GiB were measured."""
    best = cli.json("plan", "gpt2", "--device", "h200", "--batch", "32")["layouts"]["best"]
    assert best["seconds"]["step"] == pytest.approx(0.0596, rel=0.15)
    assert best["memory_bytes"]["peak"] / 2**30 == pytest.approx(14.1, rel=0.05)
    out = cli("plan", "gpt2", "--device", "h200", "--mfu", "0.3")
    assert "At 30.0% of the peak of 989 TFLOP/s (--mfu; the prediction for a step is 4" in out


def test_python_gives_the_same_plan(cli: Cli) -> None:
    shown = cli.json("plan", "gpt-tiny", "model.layers=2", "--gpus", "8", "--tokens", "1B")
    for recipe, changes in (("gpt-tiny", {"model.layers": 2}), (resolve("gpt-tiny", ["model.layers=2"]), {})):
        plan = weft.plan(recipe, changes, gpus=8, tokens="1B")
        assert json.loads(json.dumps(plan.record())) == shown
        assert "fastest that fits" in str(plan) and "kWh" in str(plan)


def test_published_steps(cli: Cli) -> None:
    out = cli("plan", "--published")
    assert "GPT 1008B" in out
    assert "LLaMA 3.1 405B" in out


def test_a_step_of_a_number_of_tokens(cli: Cli) -> None:
    assert "of 32 × 64 tokens" in cli("plan", "multi30k", "batch.tokens=4096", "batch.length=64")
    assert "of 64 × 64 tokens" in cli("plan", "gpt-tiny", "objective=chat", "batch.tokens=4096", "batch.length=64")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2x"], "'gpt2x': no such recipe or preset; did you mean"),
        ([], "name a preset, a recipe or a run"),
        (["gpt2", "--tokens", "many"], "--tokens 'many': expected a number"),
        (["gpt2", "--device", "h2000"], "--device 'h2000': no such device"),
        (["gpt2", "--mfu", "1.5"], "--mfu 1.5: expected a fraction"),
        (["gpt2", "--gpus", "8", "--interconnect", "ib-nrd"], "--interconnect 'ib-nrd': expected a number"),
        (["gpt2", "--gpus", "8", "--layout", "tensor=8"], "tensor = 8: model.attention.heads = 12 can't be divided"),
        (["gpt2", "--gpus", "8", "--layout", "tensor=3"], "tensor 3 needs 3 processes or a multiple"),
        (["gpt2", "--gpus", "8", "--layout", "tensr=2"], "tensr: unknown key; did you mean 'tensor'"),
        (["lstm", "--gpus", "8", "--layout", "shard=8"], "--layout: this model cannot be planned over several devices"),
        (["gpt2", "--gpus", "64", "--batch", "9"], "9 rows per step can't be divided over 64 GPUs"),
        (["gpt2", "--published"], "--published shows a fixed table; leave out 'gpt2'"),
        (["--published", "--lecture", "opt"], "leave out the other options"),
        (["gpt2", "--length", "2048"], "length 2048: the model's positions end at model.context = 1024"),
        (["gpt2", "model.layerz=3"], "model.layerz: unknown key; did you mean 'model.layers'?"),
        (["gpt2", "--batch", "0"], "--batch"),
        (["gpt2", "--lecture", "opt"], "--lecture opt shows a fixed table"),
        (["--lecture", "gpt5"], "--lecture"),
        (["--lecture", "gpt3", "--device", "cpu"], "leave out the other options"),
        (["gpt2", "model.layers=99999999999999999999"], "999: expected a number less than"),
    ],
)
def test_mistakes_get_one_line(arguments: list[str], message: str, cli: Cli) -> None:
    assert message in cli.refused("plan", *arguments)


def test_tables_of_the_lectures(cli: Cli) -> None:
    out = cli("plan", "--lecture", "gpt3")
    assert "gpt3-175b     175B  174.6B" in out
    assert "gpt3-13b: table 2.1 prints d_model 5140" in out
    assert "80 | 79.7" in cli("plan", "--lecture", "opt")
    assert re.search(r"gpt3-175b .* 3\.2M  0\.6e-4", out)
    compute = cli("plan", "--lecture", "compute")
    for row in re.findall(r"(?m)^(?:T5|BERT|RoBERTa|GPT-3).*?([\d.,]+) +([\d.,]+)$", compute):
        counted, published = (float(number.replace(",", "")) for number in row)
        assert counted == pytest.approx(published, rel=0.01)
    assert "the provider deletes the cluster" in cli("plan", "--lecture", "logbook")


def test_figures_of_the_lectures(cli: Cli, tmp_path: Path) -> None:
    for name in ("compute", "logbook"):
        cli("plan", "--lecture", name, "--out", tmp_path / f"{name}.svg")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    assert "only a table" in cli.refused("plan", "--lecture", "gpt3", "--out", "a.svg")
    assert "weft explain" in cli.refused("plan", "gpt2", "--out", "a.svg")
    assert "ending in" in cli.refused("plan", "--lecture", "compute", "--out", "a.txt")
