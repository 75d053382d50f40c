"""Measure n-gram models: build time, memory, tokens per second on one core and perplexity; also nltk and KenLM.

    python benchmarks/ngram.py --file enwik8.gz --unit bpe --tokens 10000000
    python benchmarks/ngram.py --tokens 1000000                      # generated text, Zipf's law

The last twentieth of the text is held out. Run with OMP_NUM_THREADS=1: the work is single-threaded.
"""

import argparse
import gzip
import resource
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.models.build import build as build_model
from weft.models.config import NGram
from weft.models.ngram import NGram as Model
from weft.models.smoothing import AddK, KneserNey, MaximumLikelihood, ModifiedKneserNey, StupidBackoff

SMOOTHING = {
    "mle": MaximumLikelihood(),
    "add-k": AddK(),
    "stupid-backoff": StupidBackoff(),
    "kneser-ney": KneserNey(),
    "modified-kneser-ney": ModifiedKneserNey(),
}
Tokens = NDArray[np.int32]


def main() -> None:
    """Read or generate tokens, then build and score weft's model and the installed peers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="a text file, may be .gz; default: generated text")
    parser.add_argument("--unit", choices=["byte", "word", "bpe"], default="bpe", help="unit of a token")
    parser.add_argument("--vocab", type=int, default=8192, help="vocabulary size for word and bpe")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="maximum number of tokens")
    parser.add_argument("--order", type=int, default=5)
    parser.add_argument("--smoothing", choices=SMOOTHING, default="kneser-ney")
    parser.add_argument("--slice", type=int, default=50_000, help="tokens for nltk; 0: skip it")
    options = parser.parse_args()

    tokens, vocab_size = (
        read(options.file, options.unit, options.vocab, options.tokens) if options.file else generate(options.tokens)
    )
    held_out = max(1, len(tokens) // 20)
    train, test = tokens[:-held_out], tokens[-held_out:]
    print(f"{len(train):,} training tokens, {len(test):,} held out, {vocab_size:,} words, order {options.order}")
    model, seconds, peak = build(
        train, NGram(vocab_size=vocab_size, order=options.order, smoothing=SMOOTHING[options.smoothing])
    )
    size = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    entries = sum(model.entries)
    print(f"built in          {seconds:.1f} s on one core, {len(train) / seconds / 1e6:.2f} M tokens/s")
    print(f"distinct n-grams  {' + '.join(f'{n:,}' for n in model.entries)} = {entries:,}")
    print(f"tables            {size / 1e9:.2f} GB, {size / entries:.1f} bytes per n-gram")
    print(f"peak memory       {peak / 1e9:.2f} GB above the tokens, {peak / entries:.1f} bytes per n-gram")
    for name, text in (("held-out", test), ("training", train[: len(test)])):
        began = time.process_time()
        scores = model.log_prob(text)
        rate = len(text) / (time.process_time() - began)
        print(f"{name} text     {rate / 1e6:.2f} M tokens/s, perplexity {np.exp(-scores.mean(dtype=np.float64)):.2f}")
    if options.slice:
        time_nltk(train[: options.slice], test[:500], vocab_size, options.order)
    time_kenlm(train[:2_000_000], test, options.order)


def read(path: Path, unit: str, vocab: int, limit: int) -> tuple[Tokens, int]:
    """Up to `limit` tokens of a file, and the size of their vocabulary."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        if unit == "byte":
            return np.frombuffer(file.read(limit), dtype=np.uint8).astype(np.int32), 256
        text = file.read(limit * 6).decode("utf-8", errors="replace")
    if unit == "word":
        words = text.split()[:limit]
        kinds, ids, counts = np.unique(np.array(words, dtype=object), return_inverse=True, return_counts=True)
        rank = np.empty(len(kinds), dtype=np.int32)
        rank[np.argsort(-counts, kind="stable")] = np.arange(len(kinds))
        return np.minimum(rank[ids], vocab - 1).astype(np.int32), vocab  # the last id stands for all rarer words
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    lines = text.splitlines(keepends=True)
    tokenizer.train_from_iterator(lines[:: max(1, len(lines) // 100_000)], trainer)
    ids = [
        np.fromiter(
            (i for row in tokenizer.encode_batch_fast(lines[low : low + 10_000]) for i in row.ids), dtype=np.int32
        )
        for low in range(0, len(lines), 10_000)
    ]
    return np.concatenate(ids)[:limit], tokenizer.get_vocab_size()


def generate(limit: int, vocab_size: int = 8192) -> tuple[Tokens, int]:
    """Words by Zipf's law, half of them determined by the two before, so that long n-grams recur."""
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.2, limit), vocab_size).astype(np.int64) - 1
    for _ in range(2):
        follow = np.flatnonzero(rng.random(limit) < 0.5)
        follow = follow[follow >= 2]
        tokens[follow] = (tokens[follow - 1] * 31 + tokens[follow - 2] * 17) % vocab_size
    return tokens.astype(np.int32), vocab_size


def build(tokens: Tokens, config: NGram) -> tuple[Model, float, int]:
    """Fit a model; return it, the seconds of processor time, and the peak of additional memory in bytes."""
    before, stop, peak = resident(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.process_time()  # unaffected by other processes
    model = build_model(config)
    model.fit(tokens, progress=True)
    seconds = time.process_time() - began
    stop.set()
    watcher.join()
    return model, seconds, peak[0]


def resident() -> int:
    """Resident memory of this process in bytes; its peak on systems without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def time_nltk(train: Tokens, test: Tokens, vocab_size: int, order: int) -> None:
    """Time stupid back-off in nltk and weft; nltk's Kneser–Ney would take minutes here."""
    try:
        from nltk.lm import StupidBackoff as Peer
        from nltk.util import everygrams
    except ImportError:
        print("nltk              not installed")
        return
    began = time.process_time()
    peer = Peer(alpha=0.4, order=order)
    peer.fit([everygrams([str(t) for t in train], max_len=order)], [str(t) for t in range(vocab_size)])
    built = time.process_time()
    words = [str(t) for t in test]
    for i in range(order - 1, len(words)):
        peer.score(words[i], words[i - order + 1 : i])
    scored = time.process_time()
    ours = build_model(NGram(vocab_size=vocab_size, order=order, smoothing=StupidBackoff()))
    ours.fit(train)
    done = time.process_time()
    rate, our_rate = len(train) / (built - began), len(train) / (done - scored)
    print(f"nltk, {len(train):,} tokens: built at {rate:,.0f} tokens/s (weft {our_rate:,.0f}),", end=" ")
    print(f"scored at {len(test) / (scored - built):,.0f} tokens/s")


def time_kenlm(train: Tokens, test: Tokens, order: int) -> None:
    """Time KenLM's queries, if it and its `lmplz` are installed."""
    try:
        import kenlm
    except ImportError:
        print("kenlm             not installed")
        return
    import shutil
    import subprocess

    if shutil.which("lmplz") is None:
        print("kenlm             installed, but lmplz is not on the path")
        return
    with tempfile.TemporaryDirectory() as folder:
        arpa = Path(folder) / "model.arpa"
        began = time.perf_counter()
        text = " ".join(map(str, train.tolist())).encode()
        subprocess.run(["lmplz", "-o", str(order), "--arpa", str(arpa)], input=text, check=True, capture_output=True)
        built = time.perf_counter()
        model = kenlm.Model(str(arpa))
        loaded = time.perf_counter()
        model.score(" ".join(map(str, test.tolist())))
        seconds = time.perf_counter() - loaded
    rate = len(test) / seconds / 1e6
    print(f"kenlm, {len(train):,} tokens: built in {built - began:.1f} s, scored at {rate:.2f} M tokens/s")


if __name__ == "__main__":
    main()
