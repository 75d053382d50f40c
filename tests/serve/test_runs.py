"""The runs of a server's folders: known by name, read as they grow, and never more than a sentence when damaged."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serve.serving import RUNS, Served, served

from weft.runs.folder import RunFolder
from weft.runs.lines import checked_line, checked_lines
from weft.serve import runs as routes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(RUNS / "gpt", tmp_path / "runs" / "gpt")
    return tmp_path / "runs"


@pytest.fixture
def it(folder: Path) -> Iterator[Served]:
    with served(folder) as server:
        yield server


def names(it: Served, path: str = "/v1/runs") -> list[str]:
    found = it.get(path).json()
    return [each.get("name", each.get("id")) for each in found.get("runs", found.get("data"))]


def write_metrics(run: Path, steps: int) -> None:
    lines = [{"step": n, "loss": 9 / n, "lr": 0.1, "tokens": 8 * n, "epoch": 1.0} for n in range(1, steps + 1)]
    (run / "metrics.jsonl").write_text(checked_lines(lines))
    timed = [{"step": n, "seconds": 0.5, "steps": 1, "tokens_per_second": 16.0} for n in range(1, steps + 1)]
    (run / "timings.jsonl").write_text(checked_lines(timed))


def asked(it: Served, since: str = "") -> Any:
    return it.get(f"/v1/runs/gpt/metrics?since={since}").json()


def test_runs_come_and_go_while_the_server_runs(it: Served, folder: Path) -> None:
    assert names(it) == names(it, "/v1/models") == ["gpt"]
    shutil.copytree(RUNS / "lstm", folder / "later")
    assert set(names(it)) == set(names(it, "/v1/models")) == {"gpt", "later"}
    assert it.post("/v1/tokenize", {"model": "later", "input": "a"}).status_code == 200
    shutil.rmtree(folder / "later")
    assert names(it) == names(it, "/v1/models") == ["gpt"]
    gone = it.get("/v1/runs/later/metrics")
    assert gone.status_code == 404 and "there is no such run here" in gone.json()["error"]["message"]
    assert it.post("/v1/tokenize", {"model": "later", "input": "a"}).status_code == 404


def test_a_run_that_trains_now_is_listed_and_served_once_it_has_a_checkpoint(it: Served, folder: Path) -> None:
    young = folder / "young"
    young.mkdir()
    with open(young / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert {each["name"]: each["state"] for each in it.get("/v1/runs").json()["runs"]}["young"] == "running"
        shutil.copy(RUNS / "gpt" / "config.toml", young)
        write_metrics(young, 3)
        row = next(each for each in it.get("/v1/runs").json()["runs"] if each["name"] == "young")
        assert row["state"] == "running" and row["steps_done"] == 3
        assert names(it, "/v1/models") == ["gpt"]
        shutil.copytree(RUNS / "gpt" / "checkpoints", young / "checkpoints", symlinks=True)
        assert set(names(it, "/v1/models")) == {"gpt", "young"}


def test_a_server_of_one_run_keeps_to_it(folder: Path) -> None:
    with served(folder / "gpt") as it:
        shutil.copytree(RUNS / "lstm", folder / "later")
        assert names(it) == names(it, "/v1/models") == ["gpt"]
        assert it.get("/v1/runs/later/recipe").status_code == 404


def test_only_new_lines_are_sent(it: Served, folder: Path) -> None:
    write_metrics(folder / "gpt", 5)
    first = asked(it)
    assert first["series"]["loss"] == [[1, 2, 3, 4, 5], [9 / n for n in range(1, 6)]]
    assert first["series"]["seconds"][1] == [0.5, 1.0, 1.5, 2.0, 2.5] and first["flops_per_token"] > 0
    assert not first["reset"] and not first["more"] and "steps" not in first["series"]
    assert asked(it, first["next"])["series"] == {}
    with open(folder / "gpt" / "metrics.jsonl", "a") as file:
        file.write(checked_line({"step": 6, "validation_loss": 1.5}, 6) + '{"step": 7, "val')
    second = asked(it, first["next"])
    assert second["series"] == {"validation_loss": [[6], [1.5]]} and second["damaged"] == 0 and not second["reset"]
    write_metrics(folder / "gpt", 3)  # the run has gone back
    third = asked(it, second["next"])
    assert third["reset"] and third["series"]["loss"][0] == [1, 2, 3]


def test_a_run_that_logs_no_times_is_not_sent_anew_each_time(it: Served, folder: Path) -> None:
    write_metrics(folder / "gpt", 2)
    (folder / "gpt" / "timings.jsonl").write_text("")
    first = asked(it)
    assert asked(it, first["next"])["series"] == {} and not asked(it, first["next"])["reset"]


def test_long_journals_come_in_parts_and_keep_their_spikes(
    it: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"step": n, "gradient_norm": 99.0 if n == 777 else 1.0} for n in range(1, 1001)]
    (folder / "gpt" / "metrics.jsonl").write_text(checked_lines(lines))
    monkeypatch.setattr(routes, "MAX_STRETCH_BYTES", 20_000)
    monkeypatch.setattr(routes, "MAX_POINTS", 50)
    since, values, parts = "", list[float](), 0
    while True:
        part = asked(it, since)
        steps, some = part["series"]["gradient_norm"]
        assert len(steps) <= 50 and not part["reset"] and part["damaged"] == 0
        values, since, parts = values + some, part["next"], parts + 1
        if not part["more"]:
            break
    assert parts > 2 and max(values) == 99.0 and steps[-1] == 1000


def test_what_is_damaged_is_told_in_a_sentence(it: Served, folder: Path) -> None:
    run = folder / "gpt"
    (run / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": \x00\xff}\n{"step": 2, "lr": 0.5}\n')
    assert asked(it)["damaged"] == 1 and asked(it)["series"] == {"lr": [[2], [0.5]]}
    with open(run / "events.jsonl", "a") as file:
        file.write("no JSON\n")
    told = it.get("/v1/runs/gpt/events").json()
    assert "can't be read" in told["damage"] and str(folder) not in told["damage"]
    (run / "config.toml").write_text("steps = 'many'")
    refused = it.get("/v1/runs/gpt/recipe")
    assert refused.status_code == 409 and str(folder) not in refused.text and "steps" in refused.text
    (row,) = it.get("/v1/runs").json()["runs"]
    assert row["state"] == "damaged" and "steps" in row["problem"] and str(folder) not in json.dumps(row)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    refused = asked(it)
    assert refused["error"]["message"] == "run 'gpt': Is a directory"


@pytest.mark.parametrize("name", ["..", "%2e%2e", "..%2fruns%2fgpt", "gpt%00", ".", "x" * 3000, "%F0%9F%98%80"])
def test_no_path_comes_from_a_request(it: Served, name: str) -> None:
    for what in ("metrics", "events", "samples", "recipe"):
        assert it.get(f"/v1/runs/{name}/{what}").status_code in (404, 405)


@pytest.mark.parametrize("since", ["abc", "-1", "999999999999-00000000", "0-0,0-0", ",,,", "9" * 20, "5-zzzzzzzz"])
def test_a_place_that_is_none_reads_from_the_start(it: Served, folder: Path, since: str) -> None:
    write_metrics(folder / "gpt", 2)
    answer = it.get(f"/v1/runs/gpt/metrics?since={since}")
    assert answer.status_code == 200 and answer.json()["series"]["loss"][0] == [1, 2]


def test_events_and_samples_are_short(it: Served, folder: Path) -> None:
    run = RunFolder(folder / "gpt")
    run.event("samples", step=3, texts=["first", "y" * 9000])
    run.event("samples", step=3, texts=["<b>again</b>"])
    run.event("rollback", step=9, since=7, to=5, rate=0.5, tries=1, loss=3.0, abandoned=[[8, 2.0]])
    run.event("result", samples=["the end"], table=[["a"]], loss=2.0)
    found = it.get("/v1/runs/gpt/events").json()
    kinds = [each["event"] for each in found["events"]]
    assert kinds[-2:] == ["rollback", "result"] and "samples" not in kinds and found["damage"] is None
    assert found["events"][-2]["to"] == 5 and "abandoned" not in found["events"][-2]
    assert all("command" not in each for each in found["events"])
    written = it.get("/v1/runs/gpt/samples").json()
    assert written["samples"][-1] == {"step": 3, "texts": ["<b>again</b>"]} and written["final"] == ["the end"]
    recipe = it.get("/v1/runs/gpt/recipe").json()
    assert recipe["flat"]["model.layers"] == recipe["recipe"]["model"]["layers"]
