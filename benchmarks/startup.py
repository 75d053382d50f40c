"""From the command line to the first token: `weft generate` beside transformers, each in a process of its own.

    python benchmarks/startup.py [--rounds 3] [--folder /tmp/startup] [--threads N] [--profile] [--tiny]

The model has SmolLM2-135M's shape and random weights, in fp32; its tokenizer 49,152 tokens, of which 48,896 are merges.
transformers saves it, `weft import` makes a run of it, and both read their own files, which are in the page cache.

weft           `python -m weft generate RUN --prompt … --greedy --max-tokens 1`, from start to exit
weft, phases   the same work with a clock between its phases; --profile shows it by function
transformers   AutoTokenizer and AutoModelForCausalLM from_pretrained, then generate of one token

The processes take turns, and the best round of each counts. torch's own import is stated, and taken off the sums.
Processor time is that of all threads, and is disturbed less by what else the machine does.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT = "Once upon a time there was"
Laps = dict[str, list[float]]  # seconds by the clock and of processor time, by phase


class Clock:
    """What passes between two phases."""

    def __init__(self) -> None:
        self.laps: Laps = {}
        self.before = time.perf_counter(), time.process_time()

    def lap(self, name: str) -> None:
        now = time.perf_counter(), time.process_time()
        self.laps[name] = [after - before for after, before in zip(now, self.before, strict=True)]
        self.before = time.perf_counter(), time.process_time()


# ---- in a process of its own


def bare(clock: Clock, place: str) -> None:
    """torch alone."""
    import torch  # noqa: F401

    clock.lap("import torch")


def ours(clock: Clock, place: str) -> None:
    """What `weft generate` does."""
    import weft.cli.main  # noqa: F401

    clock.lap("the command line")
    from weft.cli.console.terminal import loading

    with loading():
        bare(clock, place)
        from weft.api.load import load
        from weft.cli.console.generation import TextRemarks  # noqa: F401
        from weft.decode.config import Sampling
        from weft.text.tokenizer import Tokenizer
    clock.lap("import weft")
    Tokenizer.load(place)
    clock.lap("(the tokenizer alone)")
    run = load(place)
    clock.lap("load weights and tokenizer")
    next(run.write(PROMPT, Sampling(temperature=0.0, max_tokens=1)))
    clock.lap("the first token")


def profile(clock: Clock, place: str) -> None:
    """Where loading and the first token spend processor time, by function."""
    import cProfile
    import pstats

    from weft.api.load import load
    from weft.decode.config import Sampling

    watch = cProfile.Profile(time.process_time)
    with watch:
        next(load(place).write(PROMPT, Sampling(temperature=0.0, max_tokens=1)))
    pstats.Stats(watch).sort_stats("tottime").print_stats(20)


def theirs(clock: Clock, place: str) -> None:
    """The same with transformers."""
    bare(clock, place)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    clock.lap("import transformers")
    tokenizer = AutoTokenizer.from_pretrained(place)
    model = AutoModelForCausalLM.from_pretrained(place)
    clock.lap("load weights and tokenizer")
    model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=1, do_sample=False, pad_token_id=0)
    clock.lap("the first token")


WORK = {work.__name__: work for work in (bare, ours, profile, theirs)}


# ---- in the process that compares


def prepare(folder: Path, tiny: bool) -> tuple[Path, Path]:
    """A model as transformers saves it, and the run that weft makes of it."""
    saved, run = folder / "hf", folder / "run"
    if not (run / "config.toml").exists():
        import torch
        import transformers
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        pairs = [(a, b) for a in letters for b in letters][: 256 if tiny else 48_896]
        vocab = {piece: id for id, piece in enumerate([*letters, *(a + b for a, b in pairs)])}
        tokenizer = Tokenizer(models.BPE(vocab, pairs))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        tokenizer.add_special_tokens([AddedToken(letters[0] * 2, special=True)])
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=letters[0] * 2).save_pretrained(
            saved
        )
        layers, width, d_ff = (2, 64, 96) if tiny else (30, 576, 1536)
        settings = transformers.LlamaConfig(
            vocab_size=len(vocab),
            hidden_size=width,
            intermediate_size=d_ff,
            num_hidden_layers=layers,
            num_attention_heads=width // 64 if not tiny else 2,
            num_key_value_heads=3 if not tiny else 1,
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=vocab[letters[0] * 2],
        )
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(settings).save_pretrained(saved)
        subprocess.run([sys.executable, "-m", "weft", "import", str(saved), str(run)], check=True)
    return saved, run


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, float, str]:
    """Seconds by the clock and of processor time of a process, and what it printed."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode:
        raise SystemExit(done.stderr)
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, used, done.stdout


def phases(work: str, place: Path, environment: dict[str, str]) -> Laps:
    """The laps of one process."""
    out = timed([sys.executable, __file__, "--work", work, "--folder", str(place)], environment)[2]
    found: Laps = json.loads(out.splitlines()[-1])
    return found


def best(rounds: list[Laps]) -> Laps:
    """The least that each phase took, by the clock and in processor time."""
    return {name: [min(one[name][kind] for one in rounds) for kind in (0, 1)] for name in rounds[0]}


def show(title: str, laps: Laps) -> None:
    """A table of phases, and their sum without torch's import and what was measured beside."""
    print(f"\n{title:30} {'clock':>8} {'processor':>10}")
    for name, (wall, used) in laps.items():
        print(f"  {name:28} {wall:7.2f} s {used:8.2f} s")
    counted = [taken for name, taken in laps.items() if name != "import torch" and not name.startswith("(")]
    wall, used = (sum(taken[kind] for taken in counted) for kind in (0, 1))
    print(f"  {'without torch':28} {wall:7.2f} s {used:8.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "weft-startup")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, to try the benchmark itself")
    parser.add_argument("--work", choices=WORK, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        clock = Clock()
        WORK[given.work](clock, str(given.folder))
        print(json.dumps(clock.laps))
        return
    saved, run = prepare(given.folder, given.tiny)
    environment: dict[str, Any] = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(given.threads))
    # as where a package is installed: compiled once, whatever this shell says
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(given.folder / "bytecode")
    if given.profile:
        print(timed([sys.executable, __file__, "--work", "profile", "--folder", str(run)], environment)[2])
        return
    command = [sys.executable, "-m", "weft", "generate", str(run), "--prompt", PROMPT, "--greedy", "--max-tokens", "1"]
    whole, torch, mine, peer = [], [], [], []
    for turn in range(given.rounds + 1):  # the first compiles, and fills the page cache
        whole.append({"weft generate": list(timed(command, environment)[:2])})
        torch.append(phases("bare", run, environment))
        mine.append(phases("ours", run, environment))
        peer.append(phases("theirs", saved, environment))
        print(f"turn {turn}: weft generate {whole[-1]['weft generate'][0]:.2f} s", flush=True)
    wall, used = best(whole[1:])["weft generate"]
    torch_wall, torch_used = best(torch[1:])["import torch"]
    print(f"\nweft generate, start to exit    {wall:7.2f} s {used:8.2f} s of processor time")
    print(f"  without torch's import        {wall - torch_wall:7.2f} s {used - torch_used:8.2f} s")
    show("weft, phases", best(mine[1:]))
    show("transformers", best(peer[1:]))


if __name__ == "__main__":
    main()
