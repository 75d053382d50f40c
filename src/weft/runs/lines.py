"""JSON lines of a run's .jsonl files: appending, reading back, detecting damage.

The last key of a line, `check`, holds its line number and the CRC-32 of the rest. So a line that was changed, lost,
repeated or moved is detected, left out and reported. An incomplete last line comes from a killed process or a truncated
file; for events it is reported, because they are never written again. Lines of weft 0.1 have no `check`; their values
are validated by type.
"""

import json
import math
import re
import threading
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Strict, ValidationError, create_model

from weft.errors import counted
from weft.progress import warn
from weft.storage import files

MAX_JOURNAL_BYTES = 1 << 32  # refuse to read a larger file
_CHECK = re.compile(rb', "check": "(\d+)-([0-9a-f]{8})"\}$')
_END = re.compile(r"\d{1,15}-[0-9a-f]{8}")
TAIL_BYTES = 64  # bytes before a file offset whose checksum tells whether the file still holds the same lines
_appending = threading.Lock()  # checkpoints are written, and recorded, by a separate thread


def record(values: Mapping[str, Any]) -> str:
    """Format values as one line of JSON, with null for NaN and infinity."""
    return json.dumps(to_json(values), ensure_ascii=False, allow_nan=False)


def to_json(value: Any) -> Any:
    """Convert a value to what JSON can hold: null for NaN and infinity, text for paths and other types."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


def checked_line(values: Mapping[str, Any], number: int) -> str:
    """Format values as line `number` of a file, with its check and a newline."""
    line = record(values)
    return f'{line[:-1]}, "check": "{number}-{zlib.crc32(line.encode()):08x}"}}\n'


def checked_lines(lines: Iterable[Mapping[str, Any]]) -> str:
    """Format all lines of a file."""
    return "".join(checked_line(values, number) for number, values in enumerate(lines, 1))


def append(path: Path, values: Mapping[str, Any]) -> None:
    """Append a line to a file, replacing an incomplete last line that a killed process or a full disk left."""
    with _appending, open(path, "a+b") as file:
        file.seek(0)
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)
        file.write(checked_line(values, content.count(b"\n") + 1).encode())


class _JsonLine(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _StepLine(_JsonLine):
    """Line of metrics.jsonl or timings.jsonl: numbers by name."""

    step: int
    __pydantic_extra__: dict[str, float | None]


def _line(base: type[_JsonLine], **fields: Any) -> type[_JsonLine]:
    """Declare a kind of line by the keys that are read: each a type, or a type and the default if it is optional."""
    types: dict[str, Any] = {key: field if isinstance(field, tuple) else (field, ...) for key, field in fields.items()}
    return create_model("Line", __base__=base, **types)


_LOGGED = _line(_StepLine, loss=float | None, tokens=int, epoch=float)
_TIMED = _line(_StepLine, seconds=float, tokens_per_second=float)
_EVENT = _line(_JsonLine, time=str, event=str)
_Point = Annotated[tuple[int, float | None], Strict(False)]  # JSON has no tuples
_Source = create_model("_Source", name=str, tokens=int, weight=float)
_EVENTS = {
    "start": _line(
        _EVENT,
        id=(str | None, None),
        command=(str | None, None),
        corpus=(list[str], []),
        device=(str, ""),
        sources=(list[_Source], []),
    ),
    "recipe": _line(_EVENT, step=int, command=(str, "")),
    "checkpoint": _line(_EVENT, step=int),
    "evaluation": _line(_EVENT, step=int),
    "samples": _line(_EVENT, step=int, texts=list[str]),
    "rollback": _line(_EVENT, step=int, since=int, to=int, rate=float, tries=int, abandoned=(list[_Point], [])),
    "discarded": _line(_EVENT, steps=list[int]),
    "model": _line(_EVENT, parameters=int),
    "import": _line(_EVENT, id=(str | None, None), parameters=int),
    "preflight": _line(_EVENT, micro=int, memory=int),
    "finish": _line(_EVENT, step=int, seconds=float),
    "result": _line(_EVENT, samples=(list[str], [])),
    "files": _line(_EVENT, sha256=dict[str, str]),
}


def _kind(path: Path, values: Mapping[str, Any]) -> type[_JsonLine]:
    match path.name:
        case "events.jsonl":
            return _EVENTS.get(str(values.get("event")), _EVENT)
        case "results.jsonl":  # validated by weft.compare
            return _JsonLine
        case "timings.jsonl":
            return _TIMED
    return _LOGGED if "loss" in values else _StepLine


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the intact lines of a .jsonl file; warn about damaged ones."""
    lines, damage = read(path)
    if damage is not None:
        warn(damage)
    return lines


def read(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """Return the intact lines of a .jsonl file, none if it doesn't exist, and a message if some are damaged."""
    try:
        text = files.read_bytes(path, MAX_JOURNAL_BYTES)
    except FileNotFoundError:
        expected = path.name == "events.jsonl" and (path.parent / "config.toml").exists()  # every run records its start
        return [], f"{path}: missing; its records are left out" if expected or path.is_symlink() else None
    except OSError as error:
        return [], f"{path}: cannot be read: {error.strerror}; left out"
    lines, damaged, has_checks = list[dict[str, Any]](), list[int](), False
    last = missing = skipped = 0  # number of the last intact line; lines lost in between; damaged lines since then
    for line_number, line in enumerate(text.split(b"\n")[:-1], 1):
        values, number = _parse(path, line)
        # after the first line with a check, every line must have one, with increasing numbers
        if values is None or (has_checks if number is None else number <= last):
            damaged.append(line_number)
            skipped += 1
            continue
        if number is None:
            last += 1
        else:
            missing += max(0, number - last - 1 - skipped)
            last, skipped, has_checks = number, 0, True
        lines.append(values)
    problems = [f"{counted(len(damaged), 'line')} can't be read (first: line {damaged[0]})"] if damaged else []
    if path.name == "events.jsonl" and text[-1:] not in (b"", b"\n"):
        problems.append("the last line is incomplete")
    if missing:
        problems.append(f"{counted(missing, 'line')} {'is' if missing == 1 else 'are'} missing")
    return lines, f"{path}: {' and '.join(problems)}; left out" if problems else None


class LineChunk(NamedTuple):
    """Lines read from a growing file."""

    lines: list[dict[str, Any]]
    damaged: int  # lines that were left out
    end: str  # identifies the file offset reached and the bytes before it
    restarted: bool  # the run rolled back and rewrote its lines: these are from the beginning of the file
    more: bool  # lines follow


def read_after(path: Path, end: str, limit: int) -> LineChunk:
    """Read up to `limit` bytes of lines after the `end` of an earlier chunk ("": from the start); may raise OSError."""
    with files.open_regular(path) as file:
        start = int(end.partition("-")[0]) if _END.fullmatch(end) else 0
        if restarted := bool(end) and _end(file, start) != end:
            start = 0
        file.seek(start)
        text = file.read(limit)
        size = text.rfind(b"\n") + 1 or (len(text) if len(text) == limit else 0)  # without an incomplete last line
        parsed = [_parse(path, line)[0] for line in text[:size].split(b"\n")[:-1]]
        lines = [line for line in parsed if line is not None]
        end = _end(file, start + size)
    return LineChunk(lines, damaged=len(parsed) - len(lines), end=end, restarted=restarted, more=len(text) == limit)


def _end(file: IO[bytes], offset: int) -> str:
    """Return a file offset with a checksum of the bytes before it, which include the last line's check."""
    file.seek(max(0, offset - TAIL_BYTES))
    tail = file.read(min(offset, TAIL_BYTES))
    return f"{file.tell()}-{zlib.crc32(tail):08x}"  # a smaller offset if the file is shorter


def _parse(path: Path, line: bytes) -> tuple[dict[str, Any] | None, int | None]:
    """Return a line's values, None if it is damaged, and its number, None if it has no check."""
    if (check := _CHECK.search(line)) is not None:
        line = line[: check.start()] + b"}"
        if zlib.crc32(line) != int(check[2], 16):
            return None, None
    try:
        values = json.loads(line, parse_constant=_refuse_constant)
        if not isinstance(values, dict) or "check" in values:
            return None, None
        _kind(path, values).model_validate(values)
    except (ValueError, RecursionError, ValidationError):
        return None, None
    return values, None if check is None else int(check[1])


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and infinity are not valid JSON, and weft never writes them
