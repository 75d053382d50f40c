"""Models that several processes divide write what one process writes; the first one speaks, and each holds its part."""

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
from tests.parallel.test_layouts import FAMILIES, family, rows
from tests.parallel.test_ranks import note, noted, together
from torch import Tensor

from weft.api.load import load
from weft.cli import main
from weft.decode.config import Sampling
from weft.errors import ConfigError
from weft.layout import Layout
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.nn.init import empty_weights
from weft.parallel import mesh
from weft.parallel.ranks import Ranks
from weft.recipe.resolve import resolve
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.runs.snapshot import snapshot
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

apply, tensor = Later("weft.parallel.apply"), Later("weft.parallel.tensor")
splitting = Later("weft.training.sharded")
CPU = torch.device("cpu")
SMALL = ["model.layers=2", "model.d_model=32", "model.attention.heads=4", "model.context=64"]
RUNS = {
    "llama": ("llama-tiny", [*SMALL, "model.attention.kv_heads=2", "model.head.tied=false"], torch.float32),
    "gpt": ("gpt-tiny", SMALL, torch.bfloat16),  # which a CPU widens
}
# what is asked of the first run, and a part of it of the second
WORDS = {
    "greedy": ["--greedy"],
    "drawn": ["--seed", "3", "--top-p", "0.9"],
    "beam": ["--beam", "3", "-n", "2"],
    "guessed": ["--greedy", "--lookup", "2"],
    "pattern": ["--regex", "[a-z ]*"],
    "several": ["-n", "3", "--json"],
}
ASKED = [*(("llama", how) for how in WORDS), ("gpt", "greedy"), ("gpt", "drawn")]


def made(folder: Path, name: str) -> Path:
    """A run whose weights nobody has trained, but whose words differ clearly."""
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
        made(folder, name)
    checkpoints = RunFolder(shutil.copytree(folder / "llama", folder / "damaged", symlinks=True)).checkpoints
    shutil.copytree(checkpoints / "step-00000001", checkpoints / "step-00000000")
    for file in ("manifest.json", "state/state.json"):
        older = checkpoints / "step-00000000" / file
        older.write_text(older.read_text().replace('"step": 1', '"step": 0'))
    with open(checkpoints / "step-00000001/model.safetensors", "r+b") as weights:
        weights.seek(-4, 2)
        weights.write(b"\x00\x00\x80\x7f")
    return folder


def asked(words: list[str], ranks: Ranks | None = None) -> tuple[Any, str, str]:
    """What a command ends with, and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code: Any = main.run(words)
        except SystemExit as end:
            code = end.code
    if ranks is not None and ranks.leads and code:
        ranks.wait()  # the others wait until the first one has ended; here it goes on
    return code, out.getvalue(), err.getvalue()


def _write(ranks: Ranks, folder: Path, runs: Path) -> None:
    found: dict[str, Any] = {}
    for name, how in ASKED:
        given = ["generate", str(runs / name), "--prompt", "Once", "--max-tokens", "12", *WORDS[how]]
        found[f"{name} {how}"] = asked(given, ranks)
    llama = str(runs / "llama")
    if ranks.leads:  # who alone has a standard input
        sys.stdin = io.TextIOWrapper(io.BytesIO(b"Hello\nAnd you?\n"))
    found["chat"] = asked(["chat", llama, "--max-tokens", "8"], ranks)
    for option in ("--quantize=int8", f"--draft={llama}", f"--amateur={llama}", f"--out={folder / 'out.jsonl'}"):
        found[option.partition("=")[0]] = asked(["generate", llama, "--prompt", "x", option], ranks)
    found["ban"] = asked(["generate", llama, "--prompt", "x", "--ban", "xyz"], ranks)

    loaded = load(llama, ranks=ranks)
    whole = load(llama).model
    patterns, held = tensor.plan(loaded.model.config), {}
    for key, parameter in loaded.model.named_parameters():
        split = tensor.placement(key.rpartition(".")[0], patterns) is not None or key == "output.weight"
        held[key] = [split, parameter.nbytes, whole.get_parameter(key).nbytes]
    with torch.no_grad():
        logits, expected = (model(torch.tensor([[5, 6, 7]])) for model in (loaded.model, whole))
    seeds = "".join(chunk.text for chunk in loaded.write("Once", Sampling(seed=ranks.rank, max_tokens=12)))
    bits = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
    apart = float((logits - expected).abs().max())
    wide = str(next(load(runs / "gpt", ranks=ranks).model.parameters()).dtype)
    ways = _ways(ranks)
    damaged = asked(["generate", str(runs / "damaged"), "--prompt", "Once", "--max-tokens", "12", "--greedy"], ranks)
    found["damaged"] = damaged
    note(folder, ranks, found=found, held=held, seeds=seeds, bits=bits, apart=apart, wide=wide, ways=ways)
    ranks.wait()


def steps(model: LanguageModel, settings: Any) -> Tensor:
    """Logits of a prompt and two tokens more, of rows of unequal length."""
    tokens, _, given = rows(settings, slice(0, 2), torch.zeros(4))
    state = model.start(2, 8, given.get("source"))
    first = model.step(tokens[:, :4], state, torch.tensor([4, 3]))
    return torch.cat([first[:1], model.step(tokens[:, 4:5], state)[:1], model.step(tokens[:, 5:6], state)[:1]], dim=1)


def _ways(ranks: Ranks) -> dict[str, float]:
    """How far the logits of each family are from those of the whole model."""
    found = {}
    for name in FAMILIES:
        settings = family(name)
        if name == "bert":  # writes nothing
            continue
        torch.manual_seed(0)
        whole = build(settings).eval()
        over = mesh.build(Layout(tensor=2), ranks, CPU)
        with empty_weights():
            model = build(settings)
        parallel = apply.lay_out(model, over, "fp32", False)
        parallel.root.to_empty(device=CPU)
        parallel.fill(whole.named_parameters())
        tensor.keep_local(model.eval(), over)
        with torch.inference_mode():
            found[name] = float((steps(model, settings) - steps(whole, settings)).abs().max())
    return found


@pytest.fixture(scope="module")
def divided(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("divided")
    assert together(_write, folder, runs) == [0, 0]
    assert not (folder / "out.jsonl").exists()
    return noted(folder)


def test_two_processes_write_what_one_writes(divided: list[dict[str, Any]], runs: Path) -> None:
    texts = set()
    for name, how in ASKED:
        alone = asked(["generate", str(runs / name), "--prompt", "Once", "--max-tokens", "12", *WORDS[how]])
        assert alone[0] == 0 and divided[0]["found"][f"{name} {how}"] == list(alone), (name, how)
        assert divided[1]["found"][f"{name} {how}"] == [0, "", ""], (name, how)
        texts.add(alone[1])
    assert len(texts) == len(ASKED) - 1  # greedy text is the same with guesses


def test_a_conversation_is_heard_by_all(
    divided: list[dict[str, Any]], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\nAnd you?\n")))
    alone = asked(["chat", str(runs / "llama"), "--max-tokens", "8"])
    assert alone[0] == 0 and divided[0]["found"]["chat"] == list(alone)
    assert divided[1]["found"]["chat"] == [0, "", ""]


def test_a_damaged_checkpoint_is_passed_over_by_all(divided: list[dict[str, Any]]) -> None:
    code, out, err = divided[0]["found"]["damaged"]
    assert code == 0 and out == divided[0]["found"]["llama greedy"][1]
    assert "step-00000001/model.safetensors: the checksum is wrong" in err
    assert divided[1]["found"]["damaged"] == [0, "", ""]


def test_a_process_holds_its_part(divided: list[dict[str, Any]]) -> None:
    for one in divided:
        held = one["held"].values()
        assert sum(split for split, _, _ in held) == 2 + 2 * 4  # words in and out, and four matrices of each block
        odd = 32 * 4  # there is one word more than two processes can divide
        assert all(abs(2 * here - there) in (0, odd) if split else here == there for split, here, there in held)
    parts = [{key: here for key, (split, here, _) in one["held"].items() if split} for one in divided]
    for key, (split, _, there) in divided[0]["held"].items():
        assert not split or parts[0][key] + parts[1][key] == there
    assert [one["wide"] for one in divided] == ["torch.float32"] * 2


def test_all_get_the_same_bits_and_the_first_one_chooses(divided: list[dict[str, Any]], runs: Path) -> None:
    first, second = divided
    assert first["bits"] == second["bits"] and max(first["apart"], second["apart"]) < 1e-4
    run = load(runs / "llama")
    chosen, other = ("".join(c.text for c in run.write("Once", Sampling(seed=seed, max_tokens=12))) for seed in (0, 1))
    assert chosen != other and first["seeds"] == second["seeds"] == chosen


def test_every_family_steps_as_a_whole_one(divided: list[dict[str, Any]]) -> None:
    for one in divided:
        assert len(one["ways"]) == len(FAMILIES) - 1 and max(one["ways"].values()) < 1e-5, one["ways"]


def test_what_cannot_be_divided_is_refused_by_the_first(divided: list[dict[str, Any]]) -> None:
    for option in ("--quantize", "--draft", "--amateur", "--out"):
        code, out, err = divided[0]["found"][option]
        assert code == 2 and not out and err.startswith(f"weft: {option} ") and "sharded over 2 processes" in err
        assert len(err.splitlines()) == 1
        assert divided[1]["found"][option] == [2, "", ""]
    assert divided[0]["found"]["ban"][0] == 2 and "--ban 'xyz': 3 tokens" in divided[0]["found"]["ban"][2]
    assert divided[1]["found"]["ban"] == [2, "", ""]


def test_sizes_that_do_not_divide_are_refused_before_anything_is_built(runs: Path, tmp_path: Path) -> None:
    run = RunFolder(runs / "llama")
    line = r"4 processes: its model.attention.kv_heads = 2 can't be divided .*; start 1 or 2 with torchrun"
    with pytest.raises(ConfigError, match=line):
        splitting.check_divides(run, run.recipe(), 4)
    splitting.check_divides(run, run.recipe(), 2)
    wide = resolve("gpt-tiny", [*SMALL, "model.attention.heads=16", "model.feedforward.d_ff=72"])
    with pytest.raises(ConfigError, match=r"16 processes: .*d_ff = 72 can't be divided .*; start 1, 2, 4 or 8 with"):
        splitting.check_divides(run, wide, 16)
    with pytest.raises(ConfigError, match="an n-gram model has no matrices"):
        splitting.check_divides(run, resolve("ngram-3", []), 2)
    adapted = run.recipe().replace(init=str(run.path), adapter={"kind": "lora"})
    with pytest.raises(ConfigError, match=r"--to weft`, and start 2 processes"):
        splitting.check_divides(run, adapted, 2)
