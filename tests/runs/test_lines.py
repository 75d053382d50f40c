"""Lines of a run's .jsonl files: damage is detected, reported once and left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from weft.runs.lines import append, checked_lines, read, read_lines

METRICS = [{"step": n, "loss": 3.25 - n / 8, "tokens": 64 * n, "epoch": n / 4, "lr": 1e-3} for n in range(1, 7)]
EVENTS: list[dict[str, Any]] = [
    {"time": "t", "event": "start", "corpus": ["ab"], "device": "2 CPU threads"},
    {"time": "t", "event": "samples", "step": 3, "texts": ["“Was?”"]},
    {"time": "t", "event": "finish", "step": 6, "seconds": 1.5},
    {"time": "t", "event": "result", "loss": 1.25, "samples": []},
]


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    file = tmp_path / "metrics.jsonl"
    file.write_text(checked_lines(METRICS))
    return file


def test_lines_read_back(tmp_path: Path, metrics: Path) -> None:
    assert read(metrics) == (METRICS, None)
    for event in EVENTS:
        append(tmp_path / "events.jsonl", event)
    assert read(tmp_path / "events.jsonl") == (EVENTS, None)
    assert read(tmp_path / "timings.jsonl") == ([], None)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_every_changed_bit_is_detected(metrics: Path) -> None:
    """Including those in the check itself, and those that turn a byte into the end of the line."""
    original = metrics.read_bytes()
    line = original.split(b"\n")[2]
    begin = original.index(line)
    for at in range(begin, begin + len(line)):
        for bit in (1, 16, 128):
            metrics.write_bytes(original[:at] + bytes([original[at] ^ bit]) + original[at + 1 :])
            lines, damage = read(metrics)
            assert damage is not None and "metrics.jsonl" in damage
            assert all(line in METRICS for line in lines) and len(lines) >= 5


@pytest.mark.parametrize(
    ("order", "kept", "message"),
    [
        ([1, 2, 4, 5, 6], [1, 2, 4, 5, 6], "1 line is missing"),
        ([1, 2, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], "1 line can't be read (first: line 3)"),
        ([1, 3, 2, 4, 5, 6], [1, 3, 4, 5, 6], "1 line can't be read (first: line 3)"),
        ([3, 4, 5, 6], [3, 4, 5, 6], "2 lines are missing"),
    ],
)
def test_lost_repeated_and_moved_lines(metrics: Path, order: list[int], kept: list[int], message: str) -> None:
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[number - 1] for number in order))
    found, damage = read(metrics)
    assert [line["step"] for line in found] == kept
    assert damage is not None and message in damage


@pytest.mark.parametrize(
    "line",
    [
        *(b"\xff\xfe\x00", b"[1]", b"3", b"{}", b'{"step": 4, "lo', b"[" * 100_000),
        b'{"step": "4", "loss": 1.0, "tokens": 3, "epoch": 0.1}',
        b'{"step": 4, "loss": NaN, "tokens": 3, "epoch": 0.1}',
        b'{"step": 4, "loss": "low", "tokens": 3, "epoch": 0.1}',
        b'{"step": 4, "loss": 1.0}',
    ],
)
def test_lines_of_0_1_are_checked_by_type(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "metrics.jsonl"
    good = [json.dumps(values).encode() for values in METRICS]
    file.write_bytes(b"\n".join([*good[:3], line, *good[4:]]) + b"\n")
    assert read(file) == (METRICS[:3] + METRICS[4:], f"{file}: 1 line can't be read (first: line 4); left out")


def test_events_with_wrong_types_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    bad = [
        {"time": "t", "event": "rollback", "step": 9, "since": "<script>", "to": 3, "rate": 0.5, "tries": 1},
        {"time": "t", "event": "discarded"},
        {"time": "t", "event": "samples", "step": 3, "texts": None},
        {"time": "t", "event": "finish", "step": 3, "seconds": "long"},
        {"event": "start"},
    ]
    file.write_text("".join(json.dumps(event) + "\n" for event in (*EVENTS, *bad)))
    found, damage = read(file)
    assert found == EVENTS and damage is not None and "5 lines can't be read (first: line 5)" in damage


def test_an_incomplete_last_event_is_reported_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    for event in EVENTS:
        append(file, event)
    original = file.read_bytes()
    start = original.rindex(b"\n", 0, -1) + 1
    for cut in range(start, len(original)):
        file.write_bytes(original[:cut])
        assert read(file) == (EVENTS[:3], f"{file}: the last line is incomplete; left out" if cut > start else None)
        append(file, EVENTS[3])
        assert file.read_bytes() == original


def test_the_warning_comes_once(metrics: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics.write_bytes(metrics.read_bytes().replace(b"2.75", b"2.25"))
    for _ in range(2):
        assert len(read_lines(metrics)) == 5
    assert capsys.readouterr().err == f"weft: {metrics}: 1 line can't be read (first: line 4); left out\n"
