"""Routes about architectures, which load no weights, and about the comparisons in a server's folders."""

import json
import shutil
from collections.abc import Iterator

import pytest
from tests.compare.page_sample import comparison
from tests.serve.serving import RUNS, Served, refusal, served, until
from tests.spread import spread

import weft
from weft.compare.page import ComparisonPage
from weft.models.presets import PRESETS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    for name in ("gpt", "ngram"):
        shutil.copytree(RUNS / name, folder / "runs" / name)
    study = folder / "comparisons" / "four"
    (study / "runs").mkdir(parents=True)
    (study / "compare.json").write_text(json.dumps(ComparisonPage(comparison()).data()), encoding="utf-8")
    for name in ("gpt", "lstm"):
        (study / "runs" / name).mkdir()
        shutil.copy(RUNS / name / "config.toml", study / "runs" / name)
    (folder / "comparisons" / "odd").mkdir()
    (folder / "comparisons" / "odd" / "scale.json").write_text("[]")
    with served(folder / "runs", folder / "comparisons") as server:
        yield server


@pytest.mark.parametrize("view", spread(["anatomy", "costs", "growth", "graph"], 1))
def test_an_architecture_is_shown_without_loading_the_model(server: Served, view: str) -> None:
    until(lambda: server.library.ready)  # the newest model is loaded in any case
    before = server.library.models["gpt"].thread
    response = server.get(f"/v1/architecture/{view}?model=gpt")
    assert response.status_code == 200
    model = weft.load(RUNS / "gpt").model
    parameters = sum(weight.numel() for weight in model.parameters())
    data = response.json()
    checks = {
        "anatomy": lambda: data["parameters"] == parameters,
        "costs": lambda: data["bars"][0]["total"] == f"{parameters:,}" and len(data["tables"]) == 3,
        "growth": lambda: data["plots"][0]["x"]["label"] == "tokens of a text",
        "graph": lambda: {"embedding", "decoder"} <= {group["name"] for group in data["groups"]},
    }
    assert checks[view]()
    assert server.library.models["gpt"].thread is before


def test_presets_are_listed_and_paths_are_refused(server: Served) -> None:
    listed = server.get("/v1/presets").json()["data"]
    assert [each["name"] for each in listed] == list(PRESETS)
    assert {"ngram", "recurrent", "decoder"} <= {each["kind"] for each in listed}
    assert server.get("/v1/architecture/anatomy?preset=gpt2").json()["parameters"] == 124_439_808
    for query in ("preset=../runs/gpt/config.toml", "preset=gtp2", "model=../gpt", "model=nobody"):
        assert server.get(f"/v1/architecture/anatomy?{query}").status_code == 404
    assert "gpt2" in server.get("/v1/architecture/costs?preset=gtp2").json()["error"]["message"]
    for query in ("", "model=gpt&preset=gpt2"):
        refused = server.get(f"/v1/architecture/anatomy?{query}")
        assert refused.status_code == 400 and "give either model or preset" in refused.text


@pytest.mark.parametrize("view", ["costs", "growth", "graph"])
def test_an_ngram_model_has_no_such_view(server: Served, view: str) -> None:
    response = server.get(f"/v1/architecture/{view}?model=ngram")
    assert response.status_code == 400 and "ngram" in refusal(response).replace("-", "")


def test_comparisons_are_listed_and_returned(server: Served) -> None:
    listed = {each["name"]: each for each in server.get("/v1/comparisons").json()["data"]}
    assert list(listed) == ["four", "odd"] and "panels" not in listed["four"]
    assert listed["odd"]["problem"].startswith("comparison 'odd': its results are damaged")
    page = ComparisonPage(comparison())
    found = server.get("/v1/comparisons/four").json()
    assert found["result"] == page.result == listed["four"]["result"]
    bits = next(panel for panel in found["panels"] if panel["name"] == "ranking")["plots"][0]["series"]
    dots = [series["x"][0] for series in bits if len(series["x"]) == 1]
    assert dots == pytest.approx([ranked.bits for ranked in page.ranking])


def test_settings_that_differ_between_contenders(server: Served) -> None:
    settings = server.get("/v1/comparisons/four").json()["settings"]
    assert settings["model.kind"] == {"gpt": "decoder", "lstm": "recurrent"}
    assert not any(key.startswith(("data", "name", "seed")) for key in settings)
    assert all(len(set(row.values())) > 1 for row in settings.values())


@pytest.mark.parametrize("name", ["nobody", "..", "%2e%2e%2fruns", "four%2f..%2fodd"])
def test_a_request_cannot_name_a_path(server: Served, name: str) -> None:
    assert server.get(f"/v1/comparisons/{name}").status_code == 404


def test_a_damaged_comparison_is_refused_in_one_line(server: Served) -> None:
    refused = server.get("/v1/comparisons/odd")
    assert refused.status_code == 409 and "\n" not in refused.json()["error"]["message"]
