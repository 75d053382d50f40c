"""Many prompts from a file, their texts to a file: a line of JSON each, in order, and continued where it stopped."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.decode.writing import Completion
from weft.errors import DataError
from weft.files import sync

Complete = Callable[[Sequence[str], int], list[list[Completion]]]  # prompts, the first one's number → texts of each


def read_prompts(read: Iterable[str], name: str) -> list[str]:
    """One prompt a line; where `name` ends in .jsonl a line is a JSON string, or an object with a "prompt"."""
    lines = [line.removesuffix("\n").removesuffix("\r") for line in read]
    if not lines:
        raise DataError(f"{name}: holds no prompts")
    if not name.endswith(".jsonl"):
        return lines
    return [_prompt(line, f"{name}, line {number}") for number, line in enumerate(lines, start=1)]


def _prompt(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from None
    except RecursionError:
        raise DataError(f"{where}: JSON that is nested too deeply to be read") from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise DataError(f'{where}: expected a string, or an object like {{"prompt": "…"}}')
    return prompt


def as_json(completion: Completion) -> dict[str, Any]:
    """A text as a JSON object; score and logprobs only where there are any."""
    values: dict[str, Any] = {"text": completion.text, "tokens": completion.tokens, "finish": completion.finish}
    if completion.score is not None:
        values["score"] = completion.score
    if completion.scored:
        values["logprobs"] = [
            {
                "token": each.text,
                "id": each.id,
                "logprob": _finite(each.logprob),
                "top": [[text, _finite(value)] for text, value in each.top],
            }
            for each in completion.scored
        ]
    return values


def _finite(value: float) -> float | None:
    """JSON has no −∞, the log-probability of what a model excludes."""
    return value if math.isfinite(value) else None


def bulk(
    prompts: Sequence[str], complete: Complete, settings: dict[str, Any], *, batch: int, first: int = 0
) -> Iterator[list[str]]:
    """Lines of JSON, a batch at a time: the number of the prompt, the prompt, its texts, the settings."""
    for start in range(first, len(prompts), batch):
        some = prompts[start : start + batch]
        yield [
            json.dumps(
                {
                    "index": start + place,
                    "prompt": prompt,
                    "completions": [as_json(each) for each in texts],
                    "settings": settings,
                },
                ensure_ascii=False,
                allow_nan=False,
            )
            for place, (prompt, texts) in enumerate(zip(some, complete(some, start), strict=True))
        ]


class Results:
    """A file of such lines that grows. What a killed run left of a last line is cut off before it goes on."""

    def __init__(self, path: Path, prompts: Sequence[str], settings: dict[str, Any]):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._whole_lines()
            self.done = self._check(whole, prompts, settings)
            self.file = open(path, "ab")  # noqa: SIM115 — it stays open between batches
            self.file.truncate(len(whole))
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror}") from None

    def _whole_lines(self) -> bytes:
        content = self.path.read_bytes() if self.path.exists() else b""
        return content[: content.rfind(b"\n") + 1]

    def _check(self, whole: bytes, prompts: Sequence[str], settings: dict[str, Any]) -> int:
        """How many prompts are done; refuses a file that holds anything else than the first texts of this work."""
        lines = whole.splitlines()
        if len(lines) > len(prompts):
            raise DataError(f"{self.path}: holds {len(lines)} texts already, but there are {len(prompts)} prompts")
        for index, line in enumerate(lines):
            try:
                value = json.loads(line)
                known = (value["index"], value["prompt"], value["settings"])
            except (ValueError, TypeError, KeyError, RecursionError):
                raise DataError(
                    f"{self.path}, line {index + 1}: not a text of this command; name another file"
                ) from None
            if known[:2] != (index, prompts[index]):
                raise DataError(f"{self.path}, line {index + 1}: belongs to another prompt; name another file")
            if known[2] != settings:
                raise DataError(f"{self.path}: begun with other settings ({known[2]}); name another file")
        return len(lines)

    def close(self) -> None:
        self.file.close()

    def append(self, lines: Sequence[str]) -> None:
        """Add whole lines; they are on the disk when this returns."""
        try:
            self.file.write("".join(f"{line}\n" for line in lines).encode())
            sync(self.file)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written: {error.strerror}") from None
