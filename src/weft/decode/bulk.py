"""Generation for many prompts: texts as lines of JSON, in order; an interrupted output file is resumed."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from weft.decode.beam import search_texts
from weft.decode.config import Beam, Sampling
from weft.decode.constrain import Grammar
from weft.decode.engine.blocks import EngineLimits
from weft.decode.generate import completions, engine_completions
from weft.decode.prompt import Prompt
from weft.decode.text import Completion
from weft.errors import ConfigError, DataError, os_errors
from weft.models.base import LanguageModel
from weft.progress import bar
from weft.storage import files
from weft.storage.files import sync
from weft.storage.untrusted import parse_json
from weft.text.tokenizer import Tokenizer

MAX_OUTPUT_BYTES = 1 << 34  # of an output file that is resumed
MAX_BATCHES = 64  # of prompts that are tokenized and scheduled together


def read_prompts(lines: Iterable[str], name: str) -> list[str]:
    """Return one prompt per line; if `name` ends in .jsonl, a line is a JSON string or an object with a "prompt"."""
    lines = [line.removesuffix("\n").removesuffix("\r") for line in lines]
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
    """Return a text as a JSON object; score, slid and logprobs only where present."""
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
    """None for −∞, the log-probability of a token that the model excludes: JSON has no infinities."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class BulkJob:
    """Settings of generation for many prompts: `n` texts for each, `batch` prompts at a time."""

    settings: Sampling | Beam
    n: int = 1
    batch: int = 16
    grammar: Grammar | None = None
    out: Path | None = None
    quantize_cache: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("batch", self.batch), ("n", self.n)):
            if value < 1:
                raise ConfigError(f"{name} = {value}: expected 1 or more")

    def noted(self, run: str, notes: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the texts depend on, apart from the prompts: the run, the settings and other `notes`."""
        noted = {"run": run, "n": self.n, **self.settings.model_dump(mode="json", exclude_defaults=True), **notes}
        noted |= {} if self.grammar is None else self.grammar.notes
        return noted | ({} if self.quantize_cache is None else {"quantize_cache": self.quantize_cache})


def generate_many(
    model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[str], *, job: BulkJob, first: int = 0
) -> Iterator[list[Completion]]:
    """Yield n samples for each prompt, or the n best of beam search, best first.

    Samples depend on the seed and the number of the prompt; `first` is the number of the first one.
    """
    settings, n, bits = job.settings, job.n, job.quantize_cache
    if bits not in (None, "int8"):
        raise ConfigError(f"quantize_cache = '{bits}': expected 'int8'")
    if isinstance(settings, Beam):
        if bits is not None:
            raise ConfigError("quantize_cache: not supported with beam search, whose texts share their cache")
        for start in range(0, len(prompts), job.batch):
            batch = [Prompt.of(tokenizer, text, job.grammar) for text in prompts[start : start + job.batch]]
            yield from search_texts(model, batch, settings)
        return
    rows = job.batch * n
    for start in range(0, len(prompts), job.batch * MAX_BATCHES):
        texts = prompts[start : start + job.batch * MAX_BATCHES]
        repeated = [prompt for text in texts for prompt in [Prompt.of(tokenizer, text, job.grammar)] * n]
        seed = settings.seed + (first + start) * n
        seeds = range(seed, seed + len(repeated))
        if bits is None:
            results = completions(model, repeated, settings, seeds=seeds, rows=rows)
        else:
            limits = EngineLimits(rows=rows, bits="int8")
            results = engine_completions(model, repeated, settings, seeds=seeds, limits=limits)
        for _ in texts:
            yield [next(results) for _ in range(n)]


def bulk(
    model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[str], *, job: BulkJob, notes: dict[str, Any]
) -> Iterator[str]:
    """Yield a line of JSON per prompt: its index, the prompt, its texts, and `notes` as its settings.

    With `job.out`, lines are appended to that file first, a batch at a time, and prompts that it holds are skipped.
    """
    existing = b"" if job.out is None else _existing_lines(job.out, prompts, notes)
    done = existing.count(b"\n")
    left = prompts[done:]
    texts = zip(left, generate_many(model, tokenizer, left, job=job, first=done), strict=True)
    rows = (
        {"index": index, "prompt": prompt, "completions": [as_json(each) for each in results], "settings": notes}
        for index, (prompt, results) in enumerate(texts, start=done)
    )
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
    if job.out is not None:
        with os_errors(job.out, verb="written"):
            job.out.parent.mkdir(parents=True, exist_ok=True)
            with open(job.out, "ab") as file:
                file.truncate(len(existing))
    with bar("writing", len(left)) as advance:
        while batch := list(islice(lines, job.batch)):
            if job.out is not None:
                with os_errors(job.out, verb="written"), open(job.out, "ab") as file:
                    file.write("".join(f"{line}\n" for line in batch).encode())
                    sync(file)
            advance(len(batch))
            yield from batch


def _existing_lines(path: Path, prompts: Sequence[str], notes: dict[str, Any]) -> bytes:
    """Return the complete lines of an output file; refuse lines that don't belong to this job."""
    with os_errors(path, verb="written"):
        content = files.read_bytes(path, MAX_OUTPUT_BYTES) if path.exists() else b""
    complete = content[: content.rfind(b"\n") + 1]  # without the partial line of a killed run
    lines = complete.splitlines()
    if len(lines) > len(prompts):
        raise DataError(f"{path}: holds {len(lines)} texts already, but there are {len(prompts)} prompts")
    for index, line in enumerate(lines):
        try:
            value = json.loads(line)
            record = (value["index"], value["prompt"], value["settings"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DataError(f"{path}, line {index + 1}: not a text of this command; name another file") from None
        if record[:2] != (index, prompts[index]):
            raise DataError(f"{path}, line {index + 1}: belongs to another prompt; name another file")
        if record[2] != notes:
            raise DataError(f"{path}: begun with other settings ({record[2]}); name another file")
    return complete
