"""Many prompts from a file, their texts to a file: a line of JSON each, in order, and continued where it stopped."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from weft.decode.beam import search_texts
from weft.decode.config import Beam, Sampling
from weft.decode.constrain import Grammar
from weft.decode.engine.blocks import EngineLimits
from weft.decode.generate import by_engine, completions
from weft.decode.prompt import Prompt
from weft.decode.text import Completion
from weft.errors import ConfigError, DataError
from weft.models.base import LanguageModel
from weft.progress import bar
from weft.storage import files
from weft.storage.files import sync
from weft.storage.untrusted import parse_json
from weft.text.tokenizer import Tokenizer

MAX_WRITTEN_BYTES = 1 << 34  # of a file of texts that is gone on with
STRETCH = 64  # batches of prompts that are looked at together


def read_prompts(read: Iterable[str], name: str) -> list[str]:
    """One prompt a line; where `name` ends in .jsonl a line is a JSON string, or an object with a "prompt"."""
    lines = [line.removesuffix("\n").removesuffix("\r") for line in read]
    if not lines:
        raise DataError(f"{name}: holds no prompts")
    if not name.endswith(".jsonl"):
        return lines
    prompts: list[str] = []
    for number, line in enumerate(lines, start=1):
        value = parse_json(line, f"{name}, line {number}", DataError)
        prompt = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(prompt, str):
            raise DataError(f'{name}, line {number}: expected a string, or an object like {{"prompt": "…"}}')
        prompts.append(prompt)
    return prompts


def as_json(completion: Completion) -> dict[str, Any]:
    """A text as a JSON object; score, slid and logprobs only where there are any."""
    values: dict[str, Any] = {"text": completion.text, "tokens": completion.tokens, "finish": completion.finish}
    if completion.score is not None:
        values["score"] = completion.score
    if completion.slid:
        values["slid"] = True
    if completion.scored:
        values["logprobs"] = [
            {"token": t.text, "id": t.id, "logprob": _finite(t.logprob), "top": [[s, _finite(p)] for s, p in t.top]}
            for t in completion.scored
        ]
    return values


def _finite(value: float) -> float | None:
    """JSON has no −∞, the log-probability of what a model excludes."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Job:
    """Texts for many prompts: `n` for each, `batch` prompts at a time."""

    settings: Sampling | Beam
    n: int = 1
    batch: int = 16
    grammar: Grammar | None = None
    out: Path | None = None
    quantize_cache: str | None = None


def texts_of(
    model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[str], job: Job, first: int = 0
) -> Iterator[list[Completion]]:
    """For each prompt n samples, or the n best of beam search, best first. What is drawn for a prompt depends on the
    seed and its number, which is `first` for the first one."""
    settings, n, bits = job.settings, job.n, job.quantize_cache
    if bits not in (None, "int8"):
        raise ConfigError(f"quantize_cache = '{bits}': expected 'int8'")
    if isinstance(settings, Beam):
        if bits is not None:
            raise ConfigError("quantize_cache: not for beam search, whose texts share and reorder what they keep")
        for start in range(0, len(prompts), job.batch):
            some = [Prompt.of(tokenizer, text, job.grammar) for text in prompts[start : start + job.batch]]
            yield from search_texts(model, some, settings)
        return
    for start in range(0, len(prompts), job.batch * STRETCH):
        stretch = prompts[start : start + job.batch * STRETCH]
        asked = [prompt for text in stretch for prompt in [Prompt.of(tokenizer, text, job.grammar)] * n]
        seed = settings.seed + (first + start) * n
        given, rows = (model, asked, settings, range(seed, seed + len(asked))), job.batch * n
        found = completions(*given, rows) if bits is None else by_engine(*given, EngineLimits(rows=rows, bits="int8"))
        for _ in stretch:
            yield [next(found) for _ in range(n)]


def bulk(
    model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[str], job: Job, settings: dict[str, Any]
) -> Iterator[str]:
    """Lines of JSON: the number of a prompt, the prompt, its texts, and the `settings` as they are to be noted. Where
    the job has an `out` they are written there first, a batch at a time, and what is there already is left out."""
    written = b"" if job.out is None else _written(job.out, prompts, settings)
    done = written.count(b"\n")
    left = prompts[done:]
    texts = enumerate(zip(left, texts_of(model, tokenizer, left, job, done), strict=True), start=done)
    rows = (
        {"index": index, "prompt": prompt, "completions": [as_json(each) for each in found], "settings": settings}
        for index, (prompt, found) in texts
    )
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
    if job.out is not None:
        with _refusing(job.out):
            job.out.parent.mkdir(parents=True, exist_ok=True)
            with open(job.out, "ab") as file:
                file.truncate(len(written))
    with bar("writing", len(left)) as advance:
        while some := list(islice(lines, job.batch)):
            if job.out is not None:
                with _refusing(job.out), open(job.out, "ab") as file:
                    file.write("".join(f"{line}\n" for line in some).encode())
                    sync(file)
            advance(len(some))
            yield from some


def _written(path: Path, prompts: Sequence[str], settings: dict[str, Any]) -> bytes:
    """The whole lines of a file; refuses one that holds anything else than the first texts of this work."""
    with _refusing(path):
        content = files.read_bytes(path, MAX_WRITTEN_BYTES) if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]  # what a killed run left of a last line is cut off
    lines = whole.splitlines()
    if len(lines) > len(prompts):
        raise DataError(f"{path}: holds {len(lines)} texts already, but there are {len(prompts)} prompts")
    for index, line in enumerate(lines):
        try:
            value = json.loads(line)
            known = (value["index"], value["prompt"], value["settings"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DataError(f"{path}, line {index + 1}: not a text of this command; name another file") from None
        if known[:2] != (index, prompts[index]):
            raise DataError(f"{path}, line {index + 1}: belongs to another prompt; name another file")
        if known[2] != settings:
            raise DataError(f"{path}: begun with other settings ({known[2]}); name another file")
    return whole


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None
