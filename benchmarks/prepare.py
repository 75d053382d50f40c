"""Time `weft prepare` beside the tokenizer alone, on the same text and cores, and measure its peak memory.

`weft` encodes in one process on all cores, `weft 2` in two processes of one thread each.

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

DIRECT = ("encode_batch", "encode_batch_fast")  # the fast one computes no offsets; weft calls it


def generate(file: Path, megabytes: int) -> None:
    """Write the built-in corpus repeatedly, up to `megabytes`."""
    corpus = "\n".join(builtin.corpus("python").documents).encode()
    with file.open("wb") as stream:
        left = megabytes * 1_000_000
        while left > 0:
            left -= stream.write(corpus[:left].decode(errors="ignore").encode() or b".")


def direct(file: Path, tokenizer: Path, method: str) -> int:
    """Encode weft's batches with a method of `tokenizers.Tokenizer`; return the number of tokens."""
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
    text, loaded = TextSource([str(file)], HashSplit()), Tokenizer.load(tokenizer)
    with tempfile.TemporaryDirectory(dir=file.parent) as out:
        preparing.MIN_SHARED_BYTES = file.stat().st_size + 1  # only `jobs` starts several processes
        shards = prepare(text, Path(out) / "out", loaded, jobs=jobs)
        return sum(shard.tokens for shard in shards.index.shards)


def measure(method: str, file: Path, tokenizer: Path) -> tuple[float, int, int]:
    """Seconds, tokens and peak bytes of an encoding method in a separate process, without its start."""
    command = [sys.executable, __file__, "--measure", method, "--file", str(file), "--tokenizer", str(tokenizer)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, tokens, peak = done.stdout.split()
    return float(seconds), int(tokens), int(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="text file; default: the built-in corpus")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2, help="all methods take turns; the fastest round counts")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json; default: train one")
    parser.add_argument("--jobs", type=int, nargs="*", default=[1, 2], help="numbers of processes to try")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        start = time.perf_counter()
        method, _, jobs = options.measure.partition(" ")
        if method == "weft":
            tokens = weft(options.file, options.tokenizer, int(jobs) if jobs else None)
        else:
            tokens = direct(options.file, options.tokenizer, method)
        seconds = time.perf_counter() - start
        # RUSAGE_CHILDREN is the largest process; assume all `jobs` are as large
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * int(jobs or 0)
        print(seconds, tokens, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + largest) * 1024)
        return
    with tempfile.TemporaryDirectory() as scratch:
        file = options.file or Path(scratch) / "text.txt"
        if options.file is None:
            generate(file, options.megabytes)
        tokenizer = options.tokenizer or Path(scratch) / "tokenizer"
        if options.tokenizer is None:
            texts = (document.text for document, _ in zip(read_documents([str(file)]), range(512), strict=False))
            build_tokenizer(BPE(vocab_size=options.vocab), texts).save(tokenizer)
        methods = (*DIRECT, "weft", *(f"weft {jobs}" for jobs in options.jobs))
        best: dict[str, tuple[float, int, int]] = {}
        for _ in range(options.rounds):
            for method in methods:
                best[method] = min(best.get(method, (float("inf"), 0, 0)), measure(method, file, tokenizer))
        size = file.stat().st_size
    table = Table("method", "seconds", "MB/s", "tokens/s", "peak MiB", "of encode_batch", box=None)
    for method, (seconds, tokens, peak) in best.items():
        rate = f"{best[DIRECT[0]][0] / seconds:.0%}"
        row = f"{seconds:.1f}", f"{size / seconds / 1e6:.2f}", f"{tokens / seconds:,.0f}", f"{peak / 2**20:.0f}", rate
        table.add_row(method, *row)
    Console().print(f"{size / 1e6:.0f} MB of text", table)


if __name__ == "__main__":
    main()
