"""How fast `weft prepare` is beside the tokenizer alone, on the same text, cores and run; and its peak memory.

`weft` encodes in its own process, on all cores, `weft 2` in two processes of one thread each.

python benchmarks/prepare.py                 repeats the built-in corpus to 64 MB
python benchmarks/prepare.py --megabytes 1000
python benchmarks/prepare.py --file text.txt --jobs 1 2 4
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from weft.data import prepare as preparing
from weft.data.config import HashSplit, TextSource
from weft.data.encode import BATCH
from weft.data.prepare import prepare
from weft.data.sources import read_documents
from weft.data.split import section_for
from weft.text import builtin
from weft.text.config import BPE
from weft.text.tokenizer import Tokenizer, build_tokenizer

DIRECT = ("encode_batch", "encode_batch_fast")  # the fast one leaves offsets out; weft calls that one


def generate(file: Path, megabytes: int) -> None:
    """The built-in corpus over and over."""
    corpus = "\n".join(builtin.corpus("python").documents).encode()
    with file.open("wb") as stream:
        left = megabytes * 1_000_000
        while left > 0:
            left -= stream.write(corpus[:left].decode(errors="ignore").encode() or b".")


def direct(file: Path, tokenizer: Path, method: str) -> int:
    """A method of `tokenizers.Tokenizer` on the same sections in the same batches, ids dropped at once: tokens."""
    import tokenizers

    encode = getattr(tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json")), method)
    batch: list[str] = []
    size = tokens = 0
    for document in read_documents([str(file)], section=section_for([str(file)])):
        batch.append(document.text)
        size += len(document.text)
        if size >= BATCH:
            tokens += sum(len(encoding) for encoding in encode(batch, add_special_tokens=False))
            batch, size = [], 0
    return tokens + sum(len(encoding) for encoding in encode(batch, add_special_tokens=False))


def weft(file: Path, tokenizer: Path, jobs: int | None) -> int:
    text, there = TextSource([str(file)], HashSplit()), Tokenizer.load(tokenizer)
    with tempfile.TemporaryDirectory(dir=file.parent) as out:
        preparing.MIN_SHARED_BYTES = file.stat().st_size + 1  # several processes only where they are asked for
        shards = prepare(text, Path(out) / "out", there, jobs=jobs)
        return sum(shard.tokens for shard in shards.index.shards)


def measured(what: str, file: Path, tokenizer: Path) -> tuple[float, int, int]:
    """Seconds, tokens and peak bytes of a way to encode, in a process of its own; its start isn't counted."""
    command = [sys.executable, __file__, "--measure", what, "--file", str(file), "--tokenizer", str(tokenizer)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, tokens, peak = done.stdout.split()
    return float(seconds), int(tokens), int(peak)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--file", type=Path, help="a text file to use instead")
    options.add_argument("--megabytes", type=int, default=64)
    options.add_argument("--vocab", type=int, default=8192)
    options.add_argument("--rounds", type=int, default=2, help="the ways take turns; the fastest round counts")
    options.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer.json; one is trained if not given")
    options.add_argument("--jobs", type=int, nargs="*", default=[1, 2], help="how many processes encode")
    options.add_argument("--measure", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.measure:
        start = time.perf_counter()
        way, _, jobs = chosen.measure.partition(" ")
        if way == "weft":
            tokens = weft(chosen.file, chosen.tokenizer, int(jobs) if jobs else None)
        else:
            tokens = direct(chosen.file, chosen.tokenizer, way)
        seconds = time.perf_counter() - start
        # a process of the largest, of which there are `jobs`
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * int(jobs or 0)
        print(seconds, tokens, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + largest) * 1024)
        return
    with tempfile.TemporaryDirectory() as scratch:
        file = chosen.file or Path(scratch) / "text.txt"
        if chosen.file is None:
            generate(file, chosen.megabytes)
        tokenizer = chosen.tokenizer or Path(scratch) / "tokenizer"
        if chosen.tokenizer is None:
            texts = (document.text for document, _ in zip(read_documents([str(file)]), range(512), strict=False))
            build_tokenizer(BPE(vocab_size=chosen.vocab), texts).save(tokenizer)
        ways = (*DIRECT, "weft", *(f"weft {jobs}" for jobs in chosen.jobs))
        best: dict[str, tuple[float, int, int]] = {}
        for _ in range(chosen.rounds):
            for what in ways:
                best[what] = min(best.get(what, (float("inf"), 0, 0)), measured(what, file, tokenizer))
        size = file.stat().st_size
    table = Table("way", "seconds", "MB/s", "tokens/s", "peak MiB", "of encode_batch", box=None)
    for what, (seconds, tokens, peak) in best.items():
        rate = f"{best[DIRECT[0]][0] / seconds:.0%}"
        row = f"{seconds:.1f}", f"{size / seconds / 1e6:.2f}", f"{tokens / seconds:,.0f}", f"{peak / 2**20:.0f}", rate
        table.add_row(what, *row)
    Console().print(f"{size / 1e6:.0f} MB of text", table)


if __name__ == "__main__":
    main()
