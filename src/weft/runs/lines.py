"""Lines of JSON that a run appends to its .jsonl files, and how they are read back.

The last key of a line, `check`, is its number and the CRC-32 of the rest: a line that was changed, lost, repeated or
moved is noticed, left out and reported, and never changes a metric unseen. A last line without an end is what a killed
process leaves, or a file that was cut: of events it is reported, for nothing writes them again. Lines of weft 0.1 have
no `check`; what they hold is checked by its type.
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

MAX_JOURNAL_BYTES = 1 << 32
_CHECK = re.compile(rb', "check": "(\d+)-([0-9a-f]{8})"\}$')
_END = re.compile(r"\d{1,15}-[0-9a-f]{8}")
TAIL_BYTES = 64  # before a place in a file, by which it is known again
_appending = threading.Lock()  # checkpoints are written, and noted, by a thread of their own


def record(values: Mapping[str, Any]) -> str:
    """A line of a .jsonl file, or what `--json` prints. JSON has no NaN and no infinity; null stands for them."""
    return json.dumps(finite(values), ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    """A value as JSON has it: null for what is not finite, names of files and the like as text."""
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


def checked(values: Mapping[str, Any], number: int) -> str:
    """The same as line `number` of a file, with its check and its end."""
    line = record(values)
    return f'{line[:-1]}, "check": "{number}-{zlib.crc32(line.encode()):08x}"}}\n'


def all_checked(lines: Iterable[Mapping[str, Any]]) -> str:
    """A whole file of lines."""
    return "".join(checked(values, number) for number, values in enumerate(lines, 1))


def append(path: Path, values: Mapping[str, Any]) -> None:
    """Add a line to a file; the part of one that a killed process or a full disk left there gives way."""
    with _appending, open(path, "a+b") as file:
        file.seek(0)
        there = file.read()
        end = there.rfind(b"\n") + 1
        if end < len(there):
            file.truncate(end)
        file.write(checked(values, there.count(b"\n") + 1).encode())


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Step(_Line):
    """A line of metrics.jsonl or timings.jsonl: numbers by name."""

    step: int
    __pydantic_extra__: dict[str, float | None]


def _line(base: type[_Line], **fields: Any) -> type[_Line]:
    """What lines hold, as far as anybody reads it: by key its type, and its value where it may be left out."""
    given: dict[str, Any] = {key: field if isinstance(field, tuple) else (field, ...) for key, field in fields.items()}
    return create_model("Line", __base__=base, **given)


_LOGGED = _line(_Step, loss=float | None, tokens=int, epoch=float)
_TIMED = _line(_Step, seconds=float, tokens_per_second=float)
_EVENT = _line(_Line, time=str, event=str)
_Point = Annotated[tuple[int, float | None], Strict(False)]  # JSON has no tuples
_EVENTS = {
    "start": _line(_EVENT, id=(str | None, None), command=(str | None, None), corpus=(list[str], []), device=(str, "")),
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


def _kind(path: Path, values: Mapping[str, Any]) -> type[_Line]:
    match path.name:
        case "events.jsonl":
            return _EVENTS.get(str(values.get("event")), _EVENT)
        case "results.jsonl":  # a comparison's, which checks what they hold
            return _Line
        case "timings.jsonl":
            return _TIMED
    return _LOGGED if "loss" in values else _Step


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a .jsonl file; what is damaged is left out, with a warning."""
    lines, damage = read(path)
    if damage is not None:
        warn(damage)
    return lines


def read(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The whole lines of a .jsonl file, none where there is no file, and a message about damage."""
    try:
        text = files.read_bytes(path, MAX_JOURNAL_BYTES)
    except FileNotFoundError:
        begun = path.name == "events.jsonl" and (path.parent / "config.toml").exists()  # every run notes its start
        return [], f"{path}: missing; what it said of the run is left out" if begun or path.is_symlink() else None
    except OSError as error:
        return [], f"{path}: cannot be read: {error.strerror}; left out"
    found, damaged, sealed = list[dict[str, Any]](), list[int](), False
    at = missing = waiting = 0  # the number of the last good line; lines lost in between; damaged ones since then
    for place, line in enumerate(text.split(b"\n")[:-1], 1):
        values, number = _parsed(path, line)
        # once there are checks, every line has one
        good = values is not None and (number is not None or not sealed) and (number is None or number > at)
        if values is None or not good:
            damaged.append(place)
            waiting += 1
            continue
        if number is None:
            at += 1
        else:
            missing += max(0, number - at - 1 - waiting)
            at, waiting, sealed = number, 0, True
        found.append(values)
    words = [f"{counted(len(damaged), 'line')} can't be read (first: line {damaged[0]})"] if damaged else []
    if path.name == "events.jsonl" and text[-1:] not in (b"", b"\n"):
        words.append("the last line is cut short")
    if missing:
        words.append(f"{counted(missing, 'line')} {'is' if missing == 1 else 'are'} missing")
    return found, f"{path}: {' and '.join(words)}; left out" if words else None


class Stretch(NamedTuple):
    """Lines of a file that grows, and how many of them were damaged and left out.

    `end` says how far was read and what stood there. Where that is no longer so, because a run went back and writes
    its lines anew, the lines are those from the beginning: `anew`. `more` follow.
    """

    lines: list[dict[str, Any]]
    damaged: int
    end: str
    anew: bool
    more: bool


def read_on(path: Path, after: str, limit: int) -> Stretch:
    """The lines that follow the `end` of an earlier stretch ("": all), as far as `limit` bytes reach. OSError where
    the file can't be read."""
    with files.open_regular(path) as file:
        start = int(after.partition("-")[0]) if _END.fullmatch(after) else 0
        if anew := bool(after) and _end(file, start) != after:
            start = 0
        file.seek(start)
        text = file.read(limit)
        whole = text.rfind(b"\n") + 1 or (len(text) if len(text) == limit else 0)  # a line without end is no line
        found = [_parsed(path, line)[0] for line in text[:whole].split(b"\n")[:-1]]
        lines = [line for line in found if line is not None]
        end = _end(file, start + whole)
    return Stretch(lines, len(found) - len(lines), end, anew, len(text) == limit)


def _end(file: IO[bytes], place: int) -> str:
    """A place in a file, with a checksum of the end of the line before it, where that line's own check stands."""
    file.seek(max(0, place - TAIL_BYTES))
    tail = file.read(min(place, TAIL_BYTES))
    return f"{file.tell()}-{zlib.crc32(tail):08x}"  # another place, where the file ends before it


def _parsed(path: Path, line: bytes) -> tuple[dict[str, Any] | None, int | None]:
    """What a line holds, None where it is damaged; and its number, None where it has no check."""
    if (check := _CHECK.search(line)) is not None:
        line = line[: check.start()] + b"}"
        if zlib.crc32(line) != int(check[2], 16):
            return None, None
    try:
        values = json.loads(line, parse_constant=_refuse)
        if not isinstance(values, dict) or "check" in values:
            return None, None
        _kind(path, values).model_validate(values)
    except (ValueError, RecursionError, ValidationError):
        return None, None
    return values, None if check is None else int(check[1])


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and its like are no JSON, and no line of ours has them
