"""Routes about the runs in a server's folders: listed by name, read while they grow, one sentence when damaged."""

import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
from tests.serve.serving import RUNS, Served, served, until
from tests.spread import spread

from weft.errors import RunError
from weft.runs.folder import RunFolder
from weft.runs.lines import checked_line, checked_lines
from weft.serve.routes import runs as routes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(RUNS / "gpt", tmp_path / "runs" / "gpt")
    return tmp_path / "runs"


@pytest.fixture
def server(folder: Path) -> Iterator[Served]:
    with served(folder) as server:
        yield server


def names(server: Served, path: str = "/v1/runs") -> list[str]:
    response = server.get(path).json()
    return [row.get("name", row.get("id")) for row in response.get("runs", response.get("data"))]


def write_metrics(run: Path, steps: int) -> None:
    lines = [{"step": n, "loss": 9 / n, "lr": 0.1, "tokens": 8 * n, "epoch": 1.0} for n in range(1, steps + 1)]
    (run / "metrics.jsonl").write_text(checked_lines(lines))
    timings = [{"step": n, "seconds": 0.5, "steps": 1, "tokens_per_second": 16.0} for n in range(1, steps + 1)]
    (run / "timings.jsonl").write_text(checked_lines(timings))


def metrics(server: Served, since: str = "") -> Any:
    return server.get(f"/v1/runs/gpt/metrics?since={since}").json()


def test_runs_come_and_go_while_the_server_runs(server: Served, folder: Path) -> None:
    assert names(server) == names(server, "/v1/models") == ["gpt"]
    shutil.copytree(RUNS / "lstm", folder / "later")
    assert set(names(server)) == set(names(server, "/v1/models")) == {"gpt", "later"}
    assert server.post("/v1/tokenize", {"model": "later", "input": "a"}).status_code == 200
    shutil.rmtree(folder / "later")
    assert names(server) == names(server, "/v1/models") == ["gpt"]
    response = server.get("/v1/runs/later/metrics")
    assert response.status_code == 404 and "no such run on this server" in response.json()["error"]["message"]
    assert server.post("/v1/tokenize", {"model": "later", "input": "a"}).status_code == 404


def test_a_run_in_training_is_listed_and_served_from_its_first_checkpoint(server: Served, folder: Path) -> None:
    young = folder / "young"
    young.mkdir()
    with open(young / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert {row["name"]: row["state"] for row in server.get("/v1/runs").json()["runs"]}["young"] == "running"
        shutil.copy(RUNS / "gpt" / "config.toml", young)
        write_metrics(young, 3)
        row = next(row for row in server.get("/v1/runs").json()["runs"] if row["name"] == "young")
        assert row["state"] == "running" and row["steps_done"] == 3
        assert names(server, "/v1/models") == ["gpt"]
        shutil.copytree(RUNS / "gpt" / "checkpoints", young / "checkpoints", symlinks=True)
        assert set(names(server, "/v1/models")) == {"gpt", "young"}


def test_a_server_of_one_run_shows_no_other(folder: Path) -> None:
    with served(folder / "gpt") as server:
        shutil.copytree(RUNS / "lstm", folder / "later")
        assert names(server) == names(server, "/v1/models") == ["gpt"]
        assert server.get("/v1/runs/later/recipe").status_code == 404


def test_only_new_lines_are_sent(server: Served, folder: Path) -> None:
    write_metrics(folder / "gpt", 5)
    first = metrics(server)
    assert first["series"]["loss"] == {"steps": [1, 2, 3, 4, 5], "values": [9 / n for n in range(1, 6)]}
    assert first["series"]["seconds"]["values"] == [0.5, 1.0, 1.5, 2.0, 2.5] and first["flops_per_token"] > 0
    assert not first["reset"] and not first["more"] and "steps" not in first["series"]
    assert metrics(server, first["next"])["series"] == {}
    with open(folder / "gpt" / "metrics.jsonl", "a") as file:
        file.write(checked_line({"step": 6, "validation_loss": 1.5}, 6) + '{"step": 7, "val')
    second = metrics(server, first["next"])
    assert second["series"] == {"validation_loss": {"steps": [6], "values": [1.5]}}
    assert second["damaged"] == 0 and not second["reset"]
    write_metrics(folder / "gpt", 3)  # a rollback
    third = metrics(server, second["next"])
    assert third["reset"] and third["series"]["loss"]["steps"] == [1, 2, 3]
    (folder / "gpt" / "timings.jsonl").write_text("")  # a run that logs no times is not sent again and again
    fourth = metrics(server, metrics(server)["next"])
    assert fourth["series"] == {} and not fourth["reset"]


def test_long_journals_come_in_parts_and_keep_their_spikes(
    server: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"step": n, "gradient_norm": 99.0 if n == 777 else 1.0} for n in range(1, 1001)]
    (folder / "gpt" / "metrics.jsonl").write_text(checked_lines(lines))
    monkeypatch.setattr(routes, "MAX_JOURNAL_BYTES", 20_000)
    monkeypatch.setattr(routes, "MAX_POINTS", 50)
    since, values, parts = "", list[float](), 0
    while True:
        part = metrics(server, since)
        steps, norms = part["series"]["gradient_norm"]["steps"], part["series"]["gradient_norm"]["values"]
        assert len(steps) <= 50 and not part["reset"] and part["damaged"] == 0
        values, since, parts = values + norms, part["next"], parts + 1
        if not part["more"]:
            break
    assert parts > 2 and max(values) == 99.0 and steps[-1] == 1000


def test_damage_is_reported_in_one_sentence_without_paths(server: Served, folder: Path) -> None:
    run = folder / "gpt"
    (run / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": \x00\xff}\n{"step": 2, "lr": 0.5}\n')
    assert metrics(server)["damaged"] == 1 and metrics(server)["series"] == {"lr": {"steps": [2], "values": [0.5]}}
    with open(run / "events.jsonl", "a") as file:
        file.write("no JSON\n")
    damage = server.get("/v1/runs/gpt/events").json()["damage"]
    assert "can't be read" in damage and str(folder) not in damage
    (run / "config.toml").write_text("steps = 'many'")
    refused = server.get("/v1/runs/gpt/recipe")
    assert refused.status_code == 409 and "config.toml: not a valid recipe" in refused.text
    (row,) = server.get("/v1/runs").json()["runs"]
    assert row["state"] == "damaged" and "config.toml: not a valid recipe" in row["problem"]
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert metrics(server)["error"]["message"] == "run 'gpt': Is a directory"


@pytest.mark.parametrize(
    "name", spread(["..", "%2e%2e", "..%2fruns%2fgpt", "gpt%00", ".", "x" * 3000, "%F0%9F%98%80"], 4)
)
def test_a_request_cannot_name_a_path(server: Served, name: str) -> None:
    for view in ("metrics", "events", "samples", "recipe"):
        assert server.get(f"/v1/runs/{name}/{view}").status_code in (404, 405)


@pytest.mark.parametrize(
    "since", spread(["abc", "-1", "999999999999-00000000", "0-0,0-0", ",,,", "9" * 20, "5-zzzzzzzz"], 2)
)
def test_an_invalid_position_reads_from_the_start(server: Served, folder: Path, since: str) -> None:
    write_metrics(folder / "gpt", 2)
    response = server.get(f"/v1/runs/gpt/metrics?since={since}")
    assert response.status_code == 200 and response.json()["series"]["loss"]["steps"] == [1, 2]


def test_events_and_samples_are_short(server: Served, folder: Path) -> None:
    run = RunFolder(folder / "gpt")
    run.event("samples", step=3, texts=["first", "y" * 9000])
    run.event("samples", step=3, texts=["<b>again</b>"])
    run.event("rollback", step=9, since=7, to=5, rate=0.5, tries=1, loss=3.0, abandoned=[[8, 2.0]])
    run.event("result", samples=["the end"], table=[["a"]], loss=2.0)
    response = server.get("/v1/runs/gpt/events").json()
    events = response["events"]
    kinds = [event["event"] for event in events]
    assert kinds[-2:] == ["rollback", "result"] and "samples" not in kinds and response["damage"] is None
    assert events[-2]["to"] == 5 and "abandoned" not in events[-2]
    assert all("command" not in event for event in events)
    samples = server.get("/v1/runs/gpt/samples").json()
    assert samples["samples"][-1] == {"step": 3, "texts": ["<b>again</b>"]} and samples["final"] == ["the end"]
    recipe = server.get("/v1/runs/gpt/recipe").json()
    assert recipe["flat"]["model.layers"] == recipe["recipe"]["model"]["layers"]


SECRET = "secret = 'hunter2' #\n" * 3
LINKED = ("config.toml", "events.jsonl", "metrics.jsonl", "timings.jsonl", "tokenizer.json", "checkpoints", "data", "")


@pytest.mark.parametrize("name", spread(LINKED, 4))
def test_nothing_is_read_through_a_link_out_of_a_run(server: Served, folder: Path, tmp_path: Path, name: str) -> None:
    outside, linked = tmp_path / "outside", folder / "linked"
    if name in ("checkpoints", "tokenizer.json", "data"):  # a valid one
        shutil.copytree(RUNS / "gpt", linked, symlinks=True)
        shutil.move(linked / name, outside)
    elif name == "":
        shutil.copytree(RUNS / "gpt", outside, symlinks=True)
    else:
        shutil.copytree(RUNS / "gpt", linked, symlinks=True)
        (linked / name).unlink(missing_ok=True)
        outside.write_text(SECRET)
    (linked / name if name else linked).symlink_to(outside)
    row = next(row for row in server.get("/v1/runs").json()["runs"] if row["name"] in ("linked", "outside"))
    assert row["state"] == "damaged" and "a link, through which weft would read outside" in row["problem"]
    responses = [server.get(f"/v1/runs/{row['name']}/{view}") for view in ("metrics", "events", "samples", "recipe")]
    assert [response.status_code for response in responses] == [409] * 4
    responses += [server.get("/v1/runs"), server.get("/v1/models"), server.get("/v1/architecture/anatomy?model=linked")]
    responses += [server.post("/v1/tokenizers", {"input": "a"})]
    responses += [server.post("/v1/tokenize", {"model": each, "input": "a"}) for each in ("linked", "outside")]
    assert [response.status_code for response in responses[-2:]] == [404, 404]
    assert all("hunter2" not in each.text and str(tmp_path) not in each.text for each in responses)
    assert names(server, "/v1/models") == ["gpt"]


def test_a_link_made_after_the_start_is_refused(server: Served, folder: Path, tmp_path: Path) -> None:
    until(lambda: server.library.ready)
    weights = next((folder / "gpt" / "checkpoints").glob("*/model.safetensors"))
    shutil.move(weights, tmp_path / "weights")
    weights.symlink_to(tmp_path / "weights")
    server.library.models["gpt"].thread = None
    message = server.refused("/v1/tokenize", {"model": "gpt", "input": "a"})
    assert "model.safetensors: a link" in message and str(tmp_path) not in message


def test_a_run_with_a_link_out_of_it_is_not_served(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "gpt" / "tokenizer.json", tmp_path / "elsewhere.json")
    (folder / "gpt" / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    with (
        pytest.raises(RunError, match=r"tokenizer.json: a link, .* replace it with its target"),
        served(folder / "gpt"),
    ):
        pass


@pytest.mark.parametrize("name", ["config.toml", "tokenizer.json"])
def test_errors_quote_no_file(folder: Path, name: str) -> None:
    with TestCase().assertLogs("weft.serve") as logged, served(folder) as server:
        until(lambda: server.library.ready)
        (folder / "gpt" / name).write_text("steps = 'hunter2'" if name == "config.toml" else '{"version": "hunter2"}')
        server.library.models["gpt"].thread = None
        responses = [server.post("/v1/tokenize", {"model": "gpt", "input": "a"}), server.get("/v1/runs")]
        responses += [server.get("/v1/runs/gpt/recipe"), server.get("/v1/architecture/anatomy?model=gpt")]
        assert responses[0].status_code in (400, 409) and "the server's log has the details" in responses[0].text
        assert all("hunter2" not in response.text for response in responses)
    assert "hunter2" in "".join(logged.output)
