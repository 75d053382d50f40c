"""Sharded models generate what one process generates; rank 0 prints it, and each process holds its shard."""

import hashlib
import io
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.later import Later
from tests.parallel.test_layouts import FAMILIES, family, rows, shard_model
from tests.parallel.test_ranks import in_processes, note, noted
from tests.training.small import CPU
from torch import Tensor

from weft.api.load import load
from weft.cli import main
from weft.decode.config import Sampling
from weft.errors import ConfigError
from weft.layout import Layout
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.parallel import mesh
from weft.parallel.ranks import Ranks
from weft.recipe.resolve import resolve
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.runs.snapshot import snapshot
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

tensor, sharded = Later("weft.parallel.tensor"), Later("weft.training.sharded")
SMALL = ["model.layers=2", "model.d_model=32", "model.attention.heads=4", "model.context=64"]
RUNS = {
    "llama": ("llama-tiny", [*SMALL, "model.attention.kv_heads=2", "model.head.tied=false"], torch.float32),
    "gpt": ("gpt-tiny", SMALL, torch.bfloat16),  # a CPU widens it
}
# options of `weft generate`; the second run has some of them
OPTIONS = {
    "greedy": ["--greedy"],
    "sampled": ["--seed", "3", "--top-p", "0.9"],
    "beam": ["--beam", "3", "-n", "2"],
    "lookup": ["--greedy", "--lookup", "2"],
    "pattern": ["--regex", "[a-z ]*"],
    "several": ["-n", "3", "--json"],
}
CASES = [*(("llama", options) for options in OPTIONS), ("gpt", "greedy"), ("gpt", "sampled")]


def untrained_run(folder: Path, name: str) -> Path:
    """Write a run with random weights, large enough that the likeliest tokens are clear."""
    base, changes, dtype = RUNS[name]
    tokenizer = build_tokenizer(Byte(), [])
    recipe = resolve(base, [*changes, f"model.vocab_size={tokenizer.vocab_size}"])
    run = RunFolder(folder / name)
    run.path.mkdir()
    torch.manual_seed(1)
    model = build(recipe.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() == 2 else 1.0)
    run.write_config(recipe)
    tokenizer.save(run.path)
    checkpoint.write(run.checkpoints, snapshot(1, model.to(dtype), None, notes={"best_step": 1}), 1)
    return run.path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in RUNS:
        untrained_run(folder, name)
    checkpoints = RunFolder(shutil.copytree(folder / "llama", folder / "damaged", symlinks=True)).checkpoints
    shutil.copytree(checkpoints / "step-00000001", checkpoints / "step-00000000")
    for file in ("manifest.json", "state/state.json"):
        older = checkpoints / "step-00000000" / file
        older.write_text(older.read_text().replace('"step": 1', '"step": 0'))
    with open(checkpoints / "step-00000001/model.safetensors", "r+b") as weights:
        weights.seek(-4, 2)
        weights.write(b"\x00\x00\x80\x7f")
    return folder


def run_command(words: list[str], ranks: Ranks | None = None) -> tuple[Any, str, str]:
    """Return a command's exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code: Any = main.run(words)
        except SystemExit as end:
            code = end.code
    if ranks is not None and ranks.leads and code:
        ranks.barrier()  # the others wait until rank 0 has ended; here it continues
    return code, out.getvalue(), err.getvalue()


def _generate(ranks: Ranks, folder: Path, runs: Path) -> None:
    printed: dict[str, Any] = {}
    for name, options in CASES:
        words = ["generate", str(runs / name), "--prompt", "Once", "--max-tokens", "12", *OPTIONS[options]]
        printed[f"{name} {options}"] = run_command(words, ranks)
    llama = str(runs / "llama")
    if ranks.leads:  # the others have no standard input
        sys.stdin = io.TextIOWrapper(io.BytesIO(b"Hello\nAnd you?\n"))
    printed["chat"] = run_command(["chat", llama, "--max-tokens", "8"], ranks)
    for option in ("--quantize=int8", f"--draft={llama}", f"--amateur={llama}", f"--out={folder / 'out.jsonl'}"):
        printed[option.partition("=")[0]] = run_command(["generate", llama, "--prompt", "x", option], ranks)
    printed["ban"] = run_command(["generate", llama, "--prompt", "x", "--ban", "xyz"], ranks)

    loaded = load(llama, ranks=ranks)
    full = load(llama).model
    patterns, held = tensor.plan(loaded.model.config), {}
    for key, parameter in loaded.model.named_parameters():
        split = tensor.placement(key.rpartition(".")[0], patterns) is not None or key == "output.weight"
        held[key] = [split, parameter.nbytes, full.get_parameter(key).nbytes]
    with torch.no_grad():
        logits, expected = (model(torch.tensor([[5, 6, 7]])) for model in (loaded.model, full))
    seeds = "".join(chunk.text for chunk in loaded.write("Once", Sampling(seed=ranks.rank, max_tokens=12)))
    bits = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
    error = float((logits - expected).abs().max())
    dtype = str(next(load(runs / "gpt", ranks=ranks).model.parameters()).dtype)
    families = _family_errors(ranks)
    words = ["generate", str(runs / "damaged"), "--prompt", "Once", "--max-tokens", "12", "--greedy"]
    printed["damaged"] = run_command(words, ranks)
    values = {"seeds": seeds, "bits": bits, "error": error, "dtype": dtype, "families": families}
    note(folder, ranks, printed=printed, held=held, **values)
    ranks.barrier()


def steps(model: LanguageModel, settings: Any) -> Tensor:
    """Return the logits of a prompt and of two more tokens, of rows of unequal length."""
    tokens, _, inputs = rows(settings, slice(0, 2), torch.zeros(4))
    state = model.start(2, 8, inputs.get("source"))
    first = model.step(tokens[:, :4], state, torch.tensor([4, 3]))
    return torch.cat([first[:1], model.step(tokens[:, 4:5], state)[:1], model.step(tokens[:, 5:6], state)[:1]], dim=1)


def _family_errors(ranks: Ranks) -> dict[str, float]:
    """Return how far the logits of each family are from those of the full model."""
    errors = {}
    for name in (name for name in FAMILIES if name != "bert"):  # which generates nothing
        settings = family(name)
        torch.manual_seed(0)
        full = build(settings).eval()
        over = mesh.build(Layout(tensor=2), ranks, CPU)
        model = shard_model(settings, over, full).model
        tensor.keep_local(model.eval(), over)
        with torch.inference_mode():
            errors[name] = float((steps(model, settings) - steps(full, settings)).abs().max())
    return errors


@pytest.fixture(scope="module")
def divided(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("divided")
    assert in_processes(_generate, folder, runs) == [0, 0]
    assert not (folder / "out.jsonl").exists()
    return noted(folder)


@pytest.mark.slow
def test_two_processes_generate_what_one_generates(divided: list[dict[str, Any]], runs: Path) -> None:
    texts = set()
    for name, options in CASES:
        alone = run_command(["generate", str(runs / name), "--prompt", "Once", "--max-tokens", "12", *OPTIONS[options]])
        assert alone[0] == 0 and divided[0]["printed"][f"{name} {options}"] == list(alone), (name, options)
        assert divided[1]["printed"][f"{name} {options}"] == [0, "", ""], (name, options)
        texts.add(alone[1])
    assert len(texts) == len(CASES) - 1  # lookup does not change greedy text


@pytest.mark.slow
def test_a_conversation_reaches_all(divided: list[dict[str, Any]], runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\nAnd you?\n")))
    code, out, _ = run_command(["chat", str(runs / "llama"), "--max-tokens", "8"])
    assert code == 0 and divided[0]["printed"]["chat"] == [code, out, ""]  # an earlier command printed the warning
    assert divided[1]["printed"]["chat"] == [0, "", ""]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_by_all(divided: list[dict[str, Any]]) -> None:
    code, out, err = divided[0]["printed"]["damaged"]
    assert code == 0 and out == divided[0]["printed"]["llama greedy"][1]
    assert "step-00000001/model.safetensors: the checksum is wrong" in err
    assert divided[1]["printed"]["damaged"] == [0, "", ""]


@pytest.mark.slow
def test_a_process_holds_its_shard(divided: list[dict[str, Any]]) -> None:
    for one in divided:
        held = one["held"].values()
        assert sum(split for split, _, _ in held) == 2 + 2 * 4  # embedding, LM head, and four matrices of each block
        odd = 32 * 4  # the vocabulary is odd
        assert all(abs(2 * here - there) in (0, odd) if split else here == there for split, here, there in held)
    parts = [{key: here for key, (split, here, _) in one["held"].items() if split} for one in divided]
    for key, (split, _, there) in divided[0]["held"].items():
        assert not split or parts[0][key] + parts[1][key] == there
    assert [one["dtype"] for one in divided] == ["torch.float32"] * 2


@pytest.mark.slow
def test_all_get_the_same_bits_and_rank_0_chooses(divided: list[dict[str, Any]], runs: Path) -> None:
    first, second = divided
    assert first["bits"] == second["bits"] and max(first["error"], second["error"]) < 1e-4
    run = load(runs / "llama")
    chosen, other = ("".join(c.text for c in run.write("Once", Sampling(seed=seed, max_tokens=12))) for seed in (0, 1))
    assert chosen != other and first["seeds"] == second["seeds"] == chosen


@pytest.mark.slow
def test_every_family_steps_like_the_full_model(divided: list[dict[str, Any]]) -> None:
    for one in divided:
        assert len(one["families"]) == len(FAMILIES) - 1 and max(one["families"].values()) < 1e-5, one["families"]


@pytest.mark.slow
def test_unsupported_options_are_refused_by_rank_0(divided: list[dict[str, Any]]) -> None:
    for option in ("--quantize", "--draft", "--amateur", "--out"):
        code, out, err = divided[0]["printed"][option]
        assert code == 2 and not out and err.startswith(f"weft: {option} ") and "sharded over 2 processes" in err
        assert len(err.splitlines()) == 1
        assert divided[1]["printed"][option] == [2, "", ""]
    assert divided[0]["printed"]["ban"][0] == 2 and "--ban 'xyz': 3 tokens" in divided[0]["printed"]["ban"][2]
    assert divided[1]["printed"]["ban"] == [2, "", ""]


def test_indivisible_sizes_are_refused_before_anything_is_built(runs: Path, tmp_path: Path) -> None:
    run = RunFolder(runs / "llama")
    line = r"4 processes: its model.attention.kv_heads = 2 can't be divided .*; start 1 or 2 with torchrun"
    with pytest.raises(ConfigError, match=line):
        sharded.check_divides(run, run.recipe(), 4)
    sharded.check_divides(run, run.recipe(), 2)
    wide = resolve("gpt-tiny", [*SMALL, "model.attention.heads=16", "model.feedforward.d_ff=72"])
    with pytest.raises(ConfigError, match=r"16 processes: .*d_ff = 72 can't be divided .*; start 1, 2, 4 or 8 with"):
        sharded.check_divides(run, wide, 16)
    with pytest.raises(ConfigError, match="'ngram' has no matrices"):
        sharded.check_divides(run, resolve("ngram-3", []), 2)
    adapted = run.recipe().replace(init=str(run.path), adapter={"kind": "lora"})
    with pytest.raises(ConfigError, match=r"--to weft`, and start 2 processes"):
        sharded.check_divides(run, adapted, 2)
