"""Processes that run a comparison's jobs: what they write, and how they end."""

import json
import sys
from pathlib import Path

import pytest

from weft.compare import pools
from weft.compare.config import contender, experiment
from weft.compare.contenders import ReadyContender, make_ready
from weft.compare.jobs import Job, Sweep
from weft.compare.runner import Machine, Runner
from weft.errors import RunError

# in place of a process that trains: a job is over at once, with more warnings than a pipe holds
WARNS = """
import json, pathlib, sys
for line in sys.stdin:
    folder = pathlib.Path(json.loads(line))
    sys.stderr.write("UserWarning: this again\\n" * 9000)
    names = json.loads((folder / "job.json").read_text())["names"]
    cost = dict(steps=1, tokens=8, flops=0.0, seconds=0.1, parameters=5, nats=[3.0], bytes=[2.0])
    (folder / "outcome.json").write_text(json.dumps(names | cost))
    print(json.dumps(str(folder)).join(['{"folder": ', "}"]), flush=True)
"""
DIES = (
    "import sys; sys.stdin.readline(); sys.stderr.write('a warning\\n' * 9000 + 'MemoryError: 9 GB\\n\\n'); sys.exit(1)"
)


@pytest.fixture
def counts(tmp_path: Path) -> ReadyContender:
    """A contender that takes no time to make ready."""
    book = tmp_path / "book.txt"
    book.write_text("".join(f"frog {n} sat by the river {n * n % 97}\n" for n in range(1200)))
    tree = {"data": {"sources": [str(book)]}, "budget": {"tokens": 1000}, "settings": {"tokenizer": {"kind": "byte"}}}
    wanted = experiment({**tree, "contenders": dict([contender("ngram-3")])})
    return make_ready(wanted, tmp_path / "data", "cpu", print)[0]


def run(counts: ReadyContender, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Runner:
    monkeypatch.setattr(pools, "WORKER", (sys.executable, "-c", script))
    folder.mkdir()
    jobs = Runner(folder, {counts.name: counts}, Machine(1, 1), None)
    jobs.run([Sweep(counts.name, (), (), (1 / 3, 1.0), (0,))], lambda progress: None)
    return jobs


@pytest.mark.timeout(60)
def test_warnings_hold_nobody_up(counts: ReadyContender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = run(counts, tmp_path / "out", monkeypatch, WARNS)
    assert set(jobs.outcomes) == {Job("ngram-3", 1 / 3, None, 0), Job("ngram-3", 1.0, None, 0)}
    lines = (tmp_path / "out/results.jsonl").read_text().splitlines()
    assert [json.loads(line)["nats"] for line in lines] == [[3.0], [3.0]]


@pytest.mark.timeout(60)
def test_a_process_that_dies_is_quoted(counts: ReadyContender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"^ngram-3, .*: the process that ran it died: MemoryError: 9 GB; start again"):
        run(counts, tmp_path / "out", monkeypatch, DIES)
