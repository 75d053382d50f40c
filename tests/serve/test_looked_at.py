"""What a server tells of architectures, without weights, and of the comparisons in its folders."""

import json
import shutil
from collections.abc import Iterator

import pytest
from tests.compare.page_sample import comparison
from tests.serve.serving import RUNS, Served, served, until

import weft
from weft.compare.page import ComparisonPage
from weft.models.presets import PRESETS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("looked")
    for name in ("gpt", "ngram"):
        shutil.copytree(RUNS / name, place / "runs" / name)
    study = place / "comparisons" / "four"
    (study / "runs").mkdir(parents=True)
    (study / "compare.json").write_text(json.dumps(ComparisonPage(comparison()).data()), encoding="utf-8")
    for name in ("gpt", "lstm"):
        (study / "runs" / name).mkdir()
        shutil.copy(RUNS / name / "config.toml", study / "runs" / name)
    (place / "comparisons" / "odd").mkdir()
    (place / "comparisons" / "odd" / "scale.json").write_text("[]")
    with served(place / "runs", place / "comparisons") as it:
        yield it


@pytest.mark.parametrize("view", ["anatomy", "costs", "growth", "graph"])
def test_a_model_is_told_without_being_loaded(server: Served, view: str) -> None:
    until(lambda: server.library.ready)  # the newest is loaded in any case
    before = server.library.shelves["gpt"].worker
    found = server.get(f"/v1/architecture/{view}?model=gpt")
    assert found.status_code == 200
    model = weft.load(RUNS / "gpt").model
    parameters = sum(weight.numel() for weight in model.parameters())
    data = found.json()
    told = {
        "anatomy": lambda: data["parameters"] == parameters,
        "costs": lambda: data["bars"][0]["total"] == f"{parameters:,}" and len(data["tables"]) == 3,
        "growth": lambda: data["plots"][0]["x"]["label"] == "tokens of a text",
        "graph": lambda: {"embedding", "decoder"} <= {group[2] for group in data["groups"]},
    }
    assert told[view]()
    assert server.library.shelves["gpt"].worker is before


def test_every_preset_is_known_and_no_path_is_one(server: Served) -> None:
    listed = server.get("/v1/presets").json()["data"]
    assert [each["name"] for each in listed] == list(PRESETS)
    assert {"ngram", "recurrent", "decoder"} <= {each["kind"] for each in listed}
    assert server.get("/v1/architecture/anatomy?preset=gpt2").json()["parameters"] == 124_439_808
    for asked in ("preset=../runs/gpt/config.toml", "preset=gtp2", "model=../gpt", "model=nobody"):
        assert server.get(f"/v1/architecture/anatomy?{asked}").status_code == 404
    assert "gpt2" in server.get("/v1/architecture/costs?preset=gtp2").json()["error"]["message"]
    for asked in ("", "model=gpt&preset=gpt2"):
        refused = server.get(f"/v1/architecture/anatomy?{asked}")
        assert refused.status_code == 400 and "give a model or a preset" in refused.text


@pytest.mark.parametrize("view", ["costs", "growth", "graph"])
def test_a_model_that_has_no_such_view_says_why(server: Served, view: str) -> None:
    found = server.get(f"/v1/architecture/{view}?model=ngram")
    assert found.status_code == 400 and "n-gram" in found.json()["error"]["message"]


def test_comparisons_are_listed_and_told(server: Served) -> None:
    listed = {each["name"]: each for each in server.get("/v1/comparisons").json()["data"]}
    assert list(listed) == ["four", "odd"] and "panels" not in listed["four"]
    assert listed["odd"]["problem"].startswith("comparison 'odd': its results are damaged")
    page = ComparisonPage(comparison())
    found = server.get("/v1/comparisons/four").json()
    assert found["result"] == page.result == listed["four"]["result"]
    bits = next(panel for panel in found["panels"] if panel["name"] == "ranking")["plots"][0]["series"]
    dots = [series["x"][0] for series in bits if len(series["x"]) == 1]
    assert dots == pytest.approx([ranked.bits for ranked in page.ranking])


def test_recipes_of_contenders_are_compared(server: Served) -> None:
    settings = server.get("/v1/comparisons/four").json()["settings"]
    assert settings["model.kind"] == {"gpt": "decoder", "lstm": "recurrent"}
    assert not any(key.startswith(("data", "name", "seed")) for key in settings)
    assert all(len(set(row.values())) > 1 for row in settings.values())


@pytest.mark.parametrize("name", ["nobody", "..", "%2e%2e%2fruns", "four%2f..%2fodd"])
def test_no_path_comes_from_a_request(server: Served, name: str) -> None:
    assert server.get(f"/v1/comparisons/{name}").status_code == 404


def test_a_damaged_comparison_is_refused_in_one_line(server: Served) -> None:
    refused = server.get("/v1/comparisons/odd")
    assert refused.status_code == 409 and "\n" not in refused.json()["error"]["message"]
