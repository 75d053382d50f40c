"""Time the first token from the command line: `weft generate` beside transformers, in separate processes.

    python benchmarks/startup.py [--rounds 3] [--folder /tmp/startup] [--threads N] [--profile] [--tiny]

The model has SmolLM2-135M's shape and random weights, in fp32; its tokenizer has 49,152 tokens and 48,896 merges.
transformers saves it, `weft import` makes a run of it, and each loads its own files from the page cache.

weft           `python -m weft generate RUN --prompt … --greedy --max-tokens 1`, from start to exit
weft, phases   the same work, timed by phase; --profile shows it by function
transformers   AutoTokenizer and AutoModelForCausalLM from_pretrained, then generate of one token

The processes take turns, and the best round of each counts. Importing torch is listed, but not part of the sums.
Processor time includes all threads; other load on the machine affects it less.
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
    """Time of each phase, by the clock and of processor time."""

    def __init__(self) -> None:
        self.laps: Laps = {}
        self.before = time.perf_counter(), time.process_time()

    def lap(self, name: str) -> None:
        now = time.perf_counter(), time.process_time()
        self.laps[name] = [after - before for after, before in zip(now, self.before, strict=True)]
        self.before = time.perf_counter(), time.process_time()


# ---- in a separate process


def bare(clock: Clock, path: str) -> None:
    """Import torch only."""
    import torch  # noqa: F401

    clock.lap("import torch")


def ours(clock: Clock, path: str) -> None:
    """Do the work of `weft generate`."""
    import weft.cli.main  # noqa: F401

    clock.lap("the command line")
    from weft.cli.console.terminal import loading

    with loading():
        bare(clock, path)
        from weft.api.load import load
        from weft.cli.console.generation import TextRemarks  # noqa: F401
        from weft.decode.config import Sampling
        from weft.text.tokenizer import Tokenizer
    clock.lap("import weft")
    Tokenizer.load(path)
    clock.lap("(the tokenizer alone)")
    run = load(path)
    clock.lap("load weights and tokenizer")
    next(run.write(PROMPT, Sampling(temperature=0.0, max_tokens=1)))
    clock.lap("the first token")


def profile(clock: Clock, path: str) -> None:
    """Profile the processor time of loading and the first token, by function."""
    import cProfile
    import pstats

    from weft.api.load import load
    from weft.decode.config import Sampling

    profiler = cProfile.Profile(time.process_time)
    with profiler:
        next(load(path).write(PROMPT, Sampling(temperature=0.0, max_tokens=1)))
    pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


def theirs(clock: Clock, path: str) -> None:
    """Load the model and generate a token with transformers."""
    bare(clock, path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    clock.lap("import transformers")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    clock.lap("load weights and tokenizer")
    model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=1, do_sample=False, pad_token_id=0)
    clock.lap("the first token")


WORK = {work.__name__: work for work in (bare, ours, profile, theirs)}


# ---- in the process that compares


def prepare(folder: Path, tiny: bool) -> tuple[Path, Path]:
    """Create a model in transformers' format, and a run imported from it."""
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
    """Seconds by the clock and of processor time of a process, and its output."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode:
        raise SystemExit(done.stderr)
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, used, done.stdout


def phases(work: str, path: Path, environment: dict[str, str]) -> Laps:
    """Run a process; return the time of its phases."""
    out = timed([sys.executable, __file__, "--work", work, "--folder", str(path)], environment)[2]
    laps: Laps = json.loads(out.splitlines()[-1])
    return laps


def best(rounds: list[Laps]) -> Laps:
    """Minimum of each phase over all rounds, by the clock and of processor time."""
    return {name: [min(laps[name][kind] for laps in rounds) for kind in (0, 1)] for name in rounds[0]}


def show(title: str, laps: Laps) -> None:
    """Print a table of phases, and their sum without torch's import and phases in parentheses."""
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
    parser.add_argument("--tiny", action="store_true", help="use a model of two layers, to check the script")
    parser.add_argument("--work", choices=WORK, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        clock = Clock()
        WORK[options.work](clock, str(options.folder))
        print(json.dumps(clock.laps))
        return
    saved, run = prepare(options.folder, options.tiny)
    environment: dict[str, Any] = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(options.threads))
    # allow bytecode to be cached, as for an installed package
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(options.folder / "bytecode")
    if options.profile:
        print(timed([sys.executable, __file__, "--work", "profile", "--folder", str(run)], environment)[2])
        return
    command = [sys.executable, "-m", "weft", "generate", str(run), "--prompt", PROMPT, "--greedy", "--max-tokens", "1"]
    whole, torch, mine, peer = [], [], [], []
    for turn in range(options.rounds + 1):  # the first turn compiles bytecode and fills the page cache
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
