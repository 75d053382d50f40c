"""Find what computes the answer in five families, and measure how much of the accuracy it explains.

    python benchmarks/circuits.py [--only induction lstm bahdanau bert transformer] [--seeds 1]

Models of minutes' training: random letters repeated (attention alone), and words written backwards (the others). For
each the nodes that suffice are found on half of the pairs of texts; the other half shows what they explain.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import weft

LETTERS, WORD, CHANGED, PAIRS = "abcdefghijklmnopqrstuvwxyz", 6, 2, 1000
BEFORE = "abcd=dcba\n\n"  # an LSTM that carries its state is not used to the beginning of a text
SMALL = {"evaluate.every": 500, "compile": False}
CHARS = {"tokenizer": {"kind": "char", "fallback": "unk"}}
SPECIALS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "induction": ("induction", {}),
    "lstm": (
        "lstm",
        CHARS | {"steps": 1500, "model.d_model": 128, "model.layers": 1, "model.dropout": 0.0}
        | {"optimizer": {"kind": "adam", "lr": 0.003}, "batch": {"size": 64, "length": 32}},
    ),
    "bert": (
        "bert-tiny",
        {"tokenizer": {"kind": "char", "fallback": "unk", "specials": SPECIALS}, "steps": 2500}
        | {"data.document_mask": True}
        | {"model": {"layers": 2, "d_model": 64, "context": 32, "dropout": 0.0, "position": {"kind": "rotary"}}}
        | {"model.attention": {"heads": 4, "dropout": 0.0}, "model.feedforward.d_ff": 256}
        | {"objective": {"kind": "masked", "rate": 0.3}, "optimizer": {"kind": "adamw", "lr": 0.003}}
        | {"batch": {"size": 64, "length": 32}},
    ),
    "bahdanau": ("copy-bahdanau", {"steps": 300}),
    "transformer": ("reverse", {"steps": 1000}),
}  # fmt: skip


def word(rng: random.Random, low: int = WORD) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(low, WORD)))


def data(family: str, folder: Path) -> list[str]:
    """Write the training text of words and their reversals, and return its sources; none for a built-in corpus."""
    if family == "induction":
        return []
    rng, path = random.Random(0), folder / f"{family}.{'tsv' if family in ('bahdanau', 'transformer') else 'txt'}"
    words = [word(rng, 3) for _ in range(20_000)]
    if path.suffix == ".tsv":
        path.write_text("source\ttarget\n" + "".join(f"{each}\t{each[::-1]}\n" for each in words))
    else:
        path.write_text("".join(f"{each}={each[::-1]}\n\n" for each in words))
    return [str(path)]


def pairs(family: str, folder: Path) -> str:
    """Write pairs of texts whose words differ in one letter, and return the table's name."""
    if family == "induction":
        return "builtin:induction"
    rng, rows = random.Random(1), []
    while len(rows) < PAIRS:
        clean = word(rng)
        other = rng.choice(LETTERS)
        corrupt, written = f"{clean[:CHANGED]}{other}{clean[CHANGED + 1 :]}", clean[CHANGED + 1 :][::-1]
        if other == clean[CHANGED]:
            continue
        rest = clean[:CHANGED][::-1]
        form = {"lstm": f"{BEFORE}{{}}={written}", "bert": f"{{}}={written}[MASK]{rest}"}.get(family, "{}")
        row = {"clean": form.format(clean), "corrupt": form.format(corrupt), "answer": clean[CHANGED], "wrong": other}
        rows.append(row | ({"target": written} if form == "{}" else {}))
    path = folder / f"{family}-pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print("model, seed        train s  accuracy  nodes kept  circuit alone  explained  strongest nodes")
        for family in arguments.only:
            preset, changes = MODELS[family]
            for seed in range(arguments.seeds):
                begin, path = time.perf_counter(), folder / f"{family}-{seed}"
                sources = data(family, folder)
                given = {"data": sources} if sources else {}
                if not path.exists():
                    weft.train(preset, run=path, changes={**SMALL, **changes, "seed": seed}, **given)
                seconds = time.perf_counter() - begin
                found: Any = weft.load(path).explain.patch(pairs=pairs(family, folder))
                circuit = found.circuit
                whole, alone = (circuit.accuracies[name].likeliest for name in ("whole model", "circuit alone"))
                strongest = ", ".join(f"{each.name} {100 * each.recovered:.0f} %" for each in found.nodes[:3])
                kept = f"{len(circuit.kept)} of {circuit.nodes}"
                scores = f"{100 * whole:7.1f} % {kept:>11} {100 * alone:12.1f} % {100 * circuit.explained:8.1f} %"
                print(f"{f'{family}, {seed}':<17} {seconds:8.0f} {scores}  {strongest}", flush=True)


if __name__ == "__main__":
    main()
