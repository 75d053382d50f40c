"""n-grams at scale: time and memory to build, tokens a second on one core, perplexity; nltk and KenLM beside them.

    python benchmarks/ngram.py --file enwik8.gz --unit bpe --tokens 10000000
    python benchmarks/ngram.py --tokens 1000000                      # a generated text, Zipf's law

The last twentieth of the text is held out. Run it with OMP_NUM_THREADS=1; numpy needs no more than one core.
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
    """Read or make the tokens, build, score, and do the same with what else is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="a text file, .gz too; without it a text is generated")
    parser.add_argument("--unit", choices=["byte", "word", "bpe"], default="bpe", help="what a token of the file is")
    parser.add_argument("--vocab", type=int, default=8192, help="the size of the vocabulary for words and bpe")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="how many tokens to take at most")
    parser.add_argument("--order", type=int, default=5)
    parser.add_argument("--smoothing", choices=SMOOTHING, default="kneser-ney")
    parser.add_argument("--slice", type=int, default=50_000, help="how many tokens nltk is given; 0 leaves it out")
    given = parser.parse_args()

    tokens, vocab_size = read(given.file, given.unit, given.vocab, given.tokens) if given.file else make(given.tokens)
    held_out = max(1, len(tokens) // 20)
    train, test = tokens[:-held_out], tokens[-held_out:]
    print(f"{len(train):,} tokens to count, {len(test):,} held out, {vocab_size:,} words, order {given.order}")
    model, seconds, peak = build(
        train, NGram(vocab_size=vocab_size, order=given.order, smoothing=SMOOTHING[given.smoothing])
    )
    size = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    entries = sum(model.entries)
    print(f"built in          {seconds:.1f} s on one core, {len(train) / seconds / 1e6:.2f} M tokens/s")
    print(f"distinct n-grams  {' + '.join(f'{n:,}' for n in model.entries)} = {entries:,}")
    print(f"tables            {size / 1e9:.2f} GB, {size / entries:.1f} bytes an n-gram")
    print(f"peak memory       {peak / 1e9:.2f} GB above the tokens, {peak / entries:.1f} bytes an n-gram")
    for name, text in (("held-out", test), ("training", train[: len(test)])):
        began = time.process_time()
        scores = model.log_prob(text)
        rate = len(text) / (time.process_time() - began)
        print(f"{name} text     {rate / 1e6:.2f} M tokens/s, perplexity {np.exp(-scores.mean(dtype=np.float64)):.2f}")
    if given.slice:
        beside_nltk(train[: given.slice], test[:500], vocab_size, given.order)
    beside_kenlm(train[:2_000_000], test, given.order)


def read(path: Path, unit: str, vocab: int, most: int) -> tuple[Tokens, int]:
    """Up to `most` tokens of a file, and the size of their vocabulary."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        if unit == "byte":
            return np.frombuffer(file.read(most), dtype=np.uint8).astype(np.int32), 256
        text = file.read(most * 6).decode("utf-8", errors="replace")
    if unit == "word":
        words = text.split()[:most]
        kinds, ids, counts = np.unique(np.array(words, dtype=object), return_inverse=True, return_counts=True)
        rank = np.empty(len(kinds), dtype=np.int32)
        rank[np.argsort(-counts, kind="stable")] = np.arange(len(kinds))
        return np.minimum(rank[ids], vocab - 1).astype(np.int32), vocab  # the last id is every rarer word
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
    return np.concatenate(ids)[:most], tokenizer.get_vocab_size()


def make(most: int, vocab_size: int = 8192) -> tuple[Tokens, int]:
    """Words by Zipf's law, half of them decided by the two before, so that long n-grams recur."""
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.2, most), vocab_size).astype(np.int64) - 1
    for _ in range(2):
        follow = np.flatnonzero(rng.random(most) < 0.5)
        follow = follow[follow >= 2]
        tokens[follow] = (tokens[follow - 1] * 31 + tokens[follow - 2] * 17) % vocab_size
    return tokens.astype(np.int32), vocab_size


def build(tokens: Tokens, config: NGram) -> tuple[Model, float, int]:
    """A fitted model, the seconds of processor time it took, and the most memory it held above what was there."""
    before, stop, peak = resident(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.process_time()  # of this process alone: others may be using the machine
    model = build_model(config)
    model.fit(tokens, progress=True)
    seconds = time.process_time() - began
    stop.set()
    watcher.join()
    return model, seconds, peak[0]


def resident() -> int:
    """Bytes of memory this process holds now, or held at most where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def beside_nltk(train: Tokens, test: Tokens, vocab_size: int, order: int) -> None:
    """Stupid back-off in both; nltk's Kneser–Ney walks every context of an order for every word, minutes for this."""
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
    rate, own = len(train) / (built - began), len(train) / (done - scored)
    print(f"nltk, {len(train):,} tokens: built at {rate:,.0f} tokens/s (weft {own:,.0f}),", end=" ")
    print(f"scored at {len(test) / (scored - built):,.0f} tokens/s")


def beside_kenlm(train: Tokens, test: Tokens, order: int) -> None:
    """KenLM's query speed on its own trie, where it and its `lmplz` are installed."""
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
