"""Measure word2vec: words per second and per second of processor time, beside gensim, and how far neighbours agree.

    python benchmarks/word_vectors.py --file wiki.txt --threads 2
    python benchmarks/word_vectors.py                                # generated text, Zipf's law: speed only

The file has a document per line and words separated by spaces. Both programs get the same words in memory: reading and
tokenizing are not timed. They train in turns, so that other work on the machine affects both alike.
"""

import argparse
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from weft.models.config import Word2Vec
from weft.models.word2vec import Word2VecTraining

MIN_COUNT, WINDOW, NEGATIVES, SUBSAMPLE = 5, 5, 5, 1e-3
Vectors = NDArray[np.float32]


def main() -> None:
    """Train both programs with the same settings and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="a text with a document per line; default: generated words")
    parser.add_argument("--words", type=int, default=1_000_000, help="maximum number of words")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--cbow", action="store_true", help="instead of skip-gram")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    documents = read(options.file, options.words) if options.file else generate(options.words)
    counts = Counter(word for document in documents for word in document)
    words = [word for word, count in counts.most_common() if count >= MIN_COUNT]
    print(f"{sum(map(len, documents)):,} words, {len(words):,} of them distinct, {options.threads} threads")
    ours = train_weft(documents, words, options)
    try:
        import gensim  # noqa: F401
    except ImportError:
        print("gensim is not installed: pip install gensim")
        return
    theirs = train_gensim(documents, words, options, seed=1)
    if options.file:
        again = train_gensim(documents, words, options, seed=2)
        print(f"shared nearest 10 of the 1,000 most frequent words: weft and gensim {overlap(ours, theirs):.1%}")
        print(f"                                     gensim with two seeds {overlap(again, theirs):.1%}")


def read(path: Path, limit: int) -> list[list[str]]:
    documents, total = [], 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            documents.append(line.split()[: limit - total])
            total += len(documents[-1])
            if total >= limit:
                break
    return documents


def generate(count: int) -> list[list[str]]:
    words = np.minimum(np.random.default_rng(0).zipf(1.2, count), 50_000).astype(str).tolist()
    return [words[start : start + 1000] for start in range(0, count, 1000)]


def train_weft(documents: list[list[str]], words: list[str], options: argparse.Namespace) -> Vectors:
    index = {word: id for id, word in enumerate(words)}
    text = np.array([id for document in documents for id in (*(index[w] for w in document if w in index), -1)])
    settings = Word2Vec(
        vocab_size=len(words),
        d_model=options.width,
        window=WINDOW,
        negatives=NEGATIVES,
        subsample=SUBSAMPLE,
        architecture="cbow" if options.cbow else "skip-gram",
    )
    training = Word2VecTraining(settings, text.astype(np.int32), epochs=options.epochs, seed=0)
    begun = time.perf_counter(), time.process_time()
    for epoch in range(options.epochs):
        training.epoch(epoch, threads=options.threads, tick=lambda done: None)
    report("weft", documents, options, begun)
    return training.vectors


def train_gensim(documents: list[list[str]], words: list[str], options: argparse.Namespace, *, seed: int) -> Vectors:
    import gensim.models

    model = gensim.models.Word2Vec(
        vector_size=options.width,
        window=WINDOW,
        min_count=MIN_COUNT,
        negative=NEGATIVES,
        sample=SUBSAMPLE,
        sg=0 if options.cbow else 1,
        workers=options.threads,
        seed=seed,
    )
    model.build_vocab(documents)
    begun = time.perf_counter(), time.process_time()
    model.train(documents, total_examples=model.corpus_count, epochs=options.epochs)
    report(f"gensim {gensim.__version__}", documents, options, begun)
    return np.stack([model.wv[word] for word in words])


def report(name: str, documents: list[list[str]], options: argparse.Namespace, begun: tuple[float, float]) -> None:
    seconds, cpu = time.perf_counter() - begun[0], time.process_time() - begun[1]
    count = options.epochs * sum(map(len, documents))
    print(f"{name:<14} {count / seconds / 1e3:>8,.0f} k words/s  {count / cpu / 1e3:>8,.0f} k words per CPU second")


def overlap(a: Vectors, b: Vectors, words: int = 1000, top: int = 10) -> float:
    """Mean share of the nearest words that two tables have in common."""
    nearest = []
    for table in (a, b):
        unit = table / np.linalg.norm(table, axis=1, keepdims=True)
        cosines = unit[:words] @ unit.T
        np.fill_diagonal(cosines, -1)
        nearest.append(np.argpartition(-cosines, top, axis=1)[:, :top])
    return float(np.mean([len(set(x) & set(y)) / top for x, y in zip(*map(np.ndarray.tolist, nearest), strict=True)]))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
