"""Import randomly corrupted model files: each must import, or be refused with one line, within time and memory limits.

    python benchmarks/mutated.py --files 2000

Small models are written in each format that weft imports. Then one file is changed at a time: bytes, lengths and
integers, the structure of JSON, truncation; or the file becomes a link, a folder or a pipe. A separate process imports
each model and, if that succeeds, uses its tokenizer. It must end within 10 seconds and 2 GiB, with exit code 0, or with
2 and one printable line on standard error.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "RUST_BACKTRACE": "0"}

import torch
from safetensors.torch import load_file

import weft.api.import_model
import weft.costs.count  # noqa: F401 — imported before forking, so that children don't have to
from weft.cli.main import run as command
from weft.interop.bundle import ModelBundle
from weft.interop.gguf import gguf
from weft.interop.hf import hf
from weft.models.build import build
from weft.models.presets import preset
from weft.text.config import BPE, Unigram, Word
from weft.text.token_bytes import byte_tokens
from weft.text.tokenizer import Tokenizer, build_tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.interop import ctranslate2_models as ct2
from tests.text import test_sentencepiece as sp

MAX_SECONDS, MAX_BYTES = 10, 2 << 30  # for one import
TEXT = "the cat sat on the mat, and the dog ate the rat in the hat of the man who ran from the van to the barn. " * 4
Files = dict[str, bytes]


# ---- intact models, each as its files; `weft import` gets the first file or its folder


def _files(folder: Path, first: str) -> Files:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {first: files[first], **files}


def _bundle(name: str, tokenizer: Tokenizer, **changes: Any) -> ModelBundle:
    small = {"vocab_size": tokenizer.vocab_size, "d_model": 16, "layers": 1, "context": 16, **changes}
    base = preset(name)
    model = base.replace(**small, attention={**base.attention.model_dump(), "heads": 2})
    weights = build(model).state_dict()
    return ModelBundle(model, {key: (lambda w=weight: w) for key, weight in weights.items()}, tokenizer, "here")


def _hf(name: str, tokenizer: Tokenizer, **changes: Any) -> Callable[[Path], Files]:
    def write(folder: Path) -> Files:
        (folder / "m").mkdir()
        hf.write(_bundle(name, tokenizer, **changes), folder / "m")
        return _files(folder, "m/config.json")

    return write


def _gguf(folder: Path) -> Files:
    gguf.write(_bundle("llama-tiny", build_tokenizer(BPE(vocab_size=300), [TEXT])), folder / "m.gguf", None)
    return _files(folder, "m.gguf")


def _llama2c(folder: Path) -> Files:
    d, hidden, layers, heads, vocab, context = 8, 12, 1, 2, 262, 8
    count = vocab * d + layers * (2 * d + 4 * d * d + 3 * d * hidden) + d + context * d // heads
    head = struct.pack("<7i", d, hidden, layers, heads, heads, vocab, context)
    (folder / "m.bin").write_bytes(head + torch.randn(count).numpy().tobytes())
    tokens = ["<unk>", "\n<s>\n", "\n</s>\n", *byte_tokens(), "a", "b", "ab"]
    parts = [struct.pack("<fi", -1.0, len(token)) + token.encode() for token in tokens]
    (folder / "tokenizer.bin").write_bytes(struct.pack("<i", 6) + b"".join(parts))
    return _files(folder, "m.bin")


def _nanogpt(old: bool) -> Callable[[Path], Files]:
    def write(folder: Path) -> Files:
        tokenizer = build_tokenizer(Word(vocab_size=20), [TEXT])
        size = tokenizer.vocab_size
        shapes = {"wte": (size, 8), "wpe": (16, 8), "h.0.ln_1": (8,), "h.0.ln_2": (8,), "h.0.attn.c_attn": (24, 8)}
        shapes |= {"h.0.attn.c_proj": (8, 8), "h.0.mlp.c_fc": (32, 8), "h.0.mlp.c_proj": (8, 32), "ln_f": (8,)}
        state = {f"transformer.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
        args = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 16, "vocab_size": size, "bias": False}
        stored = {"model": state, "model_args": args | {"dropout": 0.0}, "iter_num": 5, "config": {"lr": 1e-3}}
        torch.save(stored, folder / "m.pt", _use_new_zipfile_serialization=not old)
        tokenizer.save(folder / "tok")
        return _files(folder, "m.pt")

    return write


def _ctranslate2(folder: Path) -> Files:
    binary = ct2.binary(*ct2.variables(ct2.random_model(ct2.MODELS["marian"])))
    ct2.folder(folder / "m", binary)
    return _files(folder, "m/model.bin")


def _ctranslate2_first(folder: Path) -> Files:
    """Write format version 1: no model kind, OpenNMT-tf's names."""
    variables, aliases = ct2.variables(ct2.random_model(ct2.MODELS["opennmt"]))
    ct2.folder(folder / "m", ct2.first_binary(ct2.first_names(variables, aliases)))
    (folder / "m/config.json").unlink()
    return _files(folder, "m/model.bin")


def _argos(folder: Path) -> Files:
    """Write a zipped package with a handmade SentencePiece model."""
    (folder / "m").mkdir()
    ct2.folder(folder / "m/model", ct2.binary(*ct2.variables(ct2.random_model(ct2.MODELS["marian"])), version=5))
    kinds = (sp.UNKNOWN, sp.CONTROL, sp.CONTROL, *[sp.NORMAL] * len(ct2.TOKENS))
    pieces = b"".join(sp.piece(token, -1.0, kind) for token, kind in zip(ct2.TOKENS, kinds, strict=False))
    (folder / "m/sentencepiece.model").write_bytes(pieces + sp.PLAIN)
    with zipfile.ZipFile(folder / "m.argosmodel", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted((folder / "m").rglob("*.*")):
            archive.write(file, str(file.relative_to(folder)))
    shutil.rmtree(folder / "m")
    return _files(folder, "m.argosmodel")


def _pickled(name: str, tokenizer: Tokenizer) -> Callable[[Path], Files]:
    def write(folder: Path) -> Files:
        _hf(name, tokenizer)(folder)
        torch.save(load_file(folder / "m/model.safetensors"), folder / "m/pytorch_model.bin")
        (folder / "m/model.safetensors").unlink()
        return _files(folder, "m/config.json")

    return write


def models() -> dict[str, Callable[[Path], Files]]:
    """Writers by format; each writes a model to a folder and returns its files."""
    bpe, words = build_tokenizer(BPE(vocab_size=300), [TEXT]), build_tokenizer(Word(vocab_size=20), [TEXT])
    bpe.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    unigram = build_tokenizer(Unigram(), [TEXT])
    return {
        "gpt2": _hf("gpt-tiny", bpe),
        "llama": _hf("llama-tiny", unigram),
        "bert": _hf("bert-tiny", words),
        "gguf": _gguf,
        "llama2c": _llama2c,
        "nanogpt": _nanogpt(False),
        "nanogpt-old": _nanogpt(True),
        "ctranslate2": _ctranslate2,
        "ctranslate2-1": _ctranslate2_first,
        "argos": _argos,
        "gpt2-bin": _pickled("gpt-tiny", bpe),
    }


# ---- mutations

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**18, -(2**70), 1e308, float("nan"), float("inf"), 0.5, "", "a",
    "a" * 100_000, "\x1b]0;title\x07\x1b[31m[red]", "\ud800", "../../x", [], {}, [[]], {"a": 1}, [1] * 999,
]  # fmt: skip
DEEP = "[" * 100_000  # deeper than any parser's recursion limit
INTEGERS = (0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)


def _entries(tree: Any) -> list[tuple[Any, Any]]:
    """Pairs (container, key) of a JSON value, at most 40 per container."""
    entries, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        for key in keys[:40]:
            entries.append((node, key))
            if isinstance(node[key], dict | list):
                waiting.append(node[key])
    return entries


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Change, remove or duplicate random values of the tree."""
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 3))):
        entries = _entries(tree)
        if not entries:
            break
        node, key = rng.choice(entries)
        match rng.randrange(6):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[rng.choice(("", "x", "type", "id", "\x1b[2J"))] = node[key]
            case 2:
                node[key] = "DEEP"
                return json.dumps(tree).replace('"DEEP"', DEEP, 1).encode()
            case 3 if isinstance(node[key], int):
                node[key] = rng.choice((node[key] + 1, node[key] - 1, node[key] * 1000, -node[key], str(node[key])))
            case _:
                node[key] = deepcopy(rng.choice(VALUES))  # a later mutation must not change VALUES
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change, remove or insert bytes, mostly near the beginning, where sizes are stored."""
    if not data:
        return b"\0"
    out = bytearray(data)
    near = min(len(out), rng.choice((64, 1024, 8192, len(out))))
    offset = rng.randrange(near) if rng.random() < 0.8 else max(0, len(out) - 1 - rng.randrange(near))
    match rng.randrange(6):
        case 0 | 1:
            for _ in range(rng.choice((1, 1, 4, 32))):
                out[min(len(out) - 1, offset + rng.randrange(16))] = rng.randrange(256)
        case 2:
            width = rng.choice((1, 2, 4, 8))
            out[offset : offset + width] = (rng.choice(INTEGERS) % 256**width).to_bytes(width, "little")
        case 3:
            del out[offset:]
        case 4:
            del out[offset : offset + rng.choice((1, 8, 100))]
        case _:
            out[offset:offset] = bytes(rng.choices(range(256), k=rng.choice((1, 8, 100))))
    return bytes(out)


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    """Mutate the JSON header of a safetensors file and correct its length."""
    length = int.from_bytes(data[:8], "little")
    header = mutate_json(data[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def write_mutated(path: Path, data: bytes, rng: random.Random) -> str:
    """Write a corrupt version of a file; return the name of the mutation."""
    if rng.random() < 0.03:
        kind = rng.choice(("itself", "nowhere", "zero", "folder", "pipe", "missing"))
        targets = {"itself": path.name, "nowhere": "/nowhere/at/all", "zero": "/dev/zero"}
        if kind in targets:
            path.symlink_to(targets[kind])
        elif kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        return kind
    structured = {".json": mutate_json, ".safetensors": mutate_header}.get(path.suffix)
    mutate = structured if structured is not None and rng.random() < 0.75 else mutate_bytes
    path.write_bytes(mutate(data, rng))
    return mutate.__name__


# ---- one import


def attempt(files: Files, seed: int, folder: Path) -> tuple[str, str]:
    """Corrupt one of a model's files and import it in a subprocess; return the outcome and the reason."""
    rng = random.Random(seed)
    broken = rng.choice(list(files))
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name != broken:
            (folder / name).write_bytes(data)
    mutation = f"{broken}: {write_mutated(folder / broken, files[broken], rng)}"
    first = next(iter(files))
    source = folder / first if "/" not in first else (folder / first).parent
    log, begin = folder / "stderr", time.monotonic()
    child = os.fork()
    if child == 0:
        _import(source, folder, log)
    _, status, used = os.wait4(child, 0)
    printed = log.read_text("utf-8", "replace") if log.exists() else ""
    seconds = time.monotonic() - begin
    if os.WIFSIGNALED(status):
        return "killed", f"{mutation}: signal {os.WTERMSIG(status)} after {seconds:.1f} s; {printed[-300:]}"
    code = os.WEXITSTATUS(status)
    lines = printed.splitlines()
    if code not in (0, 2) or "Traceback" in printed:
        return "traceback", f"{mutation}: exit {code}: {printed[-1500:]}"
    if code == 2 and (len(lines) != 1 or not lines[0].startswith("weft: ") or not lines[0].isprintable()):
        return "not one line", f"{mutation}: {printed[-600:]!r}"
    if used.ru_maxrss * 1024 > MAX_BYTES:
        return "memory", f"{mutation}: {used.ru_maxrss >> 10} MiB"
    return ("imported", "") if code == 0 else ("refused", lines[0] if lines else "")


def _import(source: Path, folder: Path, log: Path) -> None:
    """Import a model and use its tokenizer, then exit; runs in the child process."""
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(MAX_SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (_virtual() + 2 * MAX_BYTES,) * 2)
        out = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(out, 2)
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        extra = ["--tokenizer", str(folder / "tok")] if (folder / "tok").is_dir() else []
        code = command(["import", str(source), str(folder / "run"), *extra])
        if code == 0:
            tokenizer = Tokenizer.load(folder / "run")
            ids = tokenizer.encode("the cat, the dog")
            tokenizer.decode(ids)
            assert tokenizer.frame is not None
    except ValueError as error:
        code = 2 if type(error).__module__ == "weft.errors" else 1
        print(f"weft: {error}" if code == 2 else traceback.format_exc(), file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def sweep(count: int, seed: int = 0, only: str | None = None) -> tuple[Counter[str], list[str]]:
    """Corrupt and import `count` models, formats in turn; return the number of each outcome and the failures."""
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as parent:
        intact = {}
        for name, write in models().items():
            (Path(parent) / name).mkdir()
            intact[name] = write(Path(parent) / name)
        names = [only] if only else list(intact)
        for number in range(count):
            name = names[number % len(names)]
            folder = Path(parent) / "try"
            folder.mkdir()
            outcome, reason = attempt(intact[name], seed + number, folder)
            shutil.rmtree(folder)
            outcomes[f"{name}: {outcome}"] += 1
            if outcome not in ("imported", "refused"):
                wrong.append(f"{name}, seed {seed + number}: {outcome}: {reason}")
                print(wrong[-1], flush=True)
    return outcomes, wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one format")
    options = parser.parse_args()
    started = time.monotonic()
    outcomes, failures = sweep(options.files, options.seed, options.only)
    print(", ".join(f"{count} {name}" for name, count in sorted(outcomes.items())))
    print(f"{options.files} files in {time.monotonic() - started:.0f} s: {len(failures)} wrong")
    sys.exit(bool(failures))
