"""Predictions and defaults of decoding: every route returns what the Python API and the commands return."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.serve.predicting import train_predictors
from tests.serve.serving import Served, served
from tests.spread import spread
from typer.testing import CliRunner

import weft
from weft.cli.main import app
from weft.decode.config import CHAT_DEFAULTS, TRANSLATION_DEFAULTS, Beam

TEXT, CONTEXT = "Grace likes Oslo", "Here Grace is in Lima. Ken is in Rome."
SOURCES = ("a b c", "c b a d", "b", "d d a b c a")


@pytest.fixture(scope="module")
def predictors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_predictors(tmp_path_factory.mktemp("predict"))


@pytest.fixture(scope="module")
def predicting(predictors: Path) -> Iterator[Served]:
    with served(predictors) as server:
        yield server


def predicted(server: Served, model: str, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.json("/v1/explain/prediction", model=model, **body)["prediction"]
    return answer


def test_predictions_are_those_of_the_run(predicting: Served, predictors: Path) -> None:
    runs = {path.name: weft.load(path) for path in predictors.iterdir()}
    labels = predicted(predicting, "classify", input=TEXT)["labels"]
    assert labels == pytest.approx(runs["classify"].classify([TEXT])[0])
    assert list(labels.values()) == sorted(labels.values(), reverse=True)
    pair = predicted(predicting, "entail", input=TEXT, second=CONTEXT)
    assert pair["labels"] == pytest.approx(runs["entail"].classify([TEXT], [CONTEXT])[0])
    score = predicted(predicting, "regress", input=TEXT)
    assert score["score"] == pytest.approx(runs["regress"].rate([TEXT])[0]) and score["range"][0] < score["range"][1]
    words = predicted(predicting, "tag", input=TEXT)["words"]
    assert [word["text"] for word in words] == TEXT.split()
    tagged = runs["tag"].tag([TEXT.split()])[0]
    assert [word["tag"] for word in words] == [tag for tag, _ in tagged]
    assert [word["probability"] for word in words] == pytest.approx([p for _, p in tagged])
    answer = predicted(predicting, "answer", input="where is Ken?", second=CONTEXT)["answer"]
    assert answer == pytest.approx(runs["answer"].answer(["where is Ken?"], [CONTEXT])[0]._asdict())
    nearest = predicted(predicting, "contrastive", input=TEXT)["nearest"]
    query, *others = runs["contrastive"].embed([TEXT, *(each["text"] for each in nearest)])
    assert [each["cosine"] for each in nearest] == pytest.approx(np.stack(others) @ query, abs=1e-5)
    compared = predicted(predicting, "contrastive", input=TEXT, second=CONTEXT)["nearest"]
    vectors = runs["contrastive"].embed([TEXT, CONTEXT])
    assert [each["cosine"] for each in compared] == pytest.approx([float(vectors[0] @ vectors[1])], abs=1e-5)


def test_the_command_prints_the_same_numbers(predicting: Served, predictors: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text(f"{TEXT}\n")
    result = CliRunner().invoke(app, ["classify", str(predictors / "classify"), str(lines), "--json"])
    record = json.loads(result.stdout)
    assert record["labels"] == pytest.approx(predicted(predicting, "classify", input=TEXT)["labels"], abs=1e-6)


@pytest.mark.parametrize("model", ["classify", "entail", "regress", "tag", "answer"])
def test_gradients_predict_the_effect_of_a_small_change(predictors: Path, model: str) -> None:
    run, second = weft.load(predictors / model), CONTEXT if model in ("entail", "answer") else None
    before = run.explain.prediction(TEXT, second)
    sides, step = before["saliency"]["sides"], 1e-3
    texts = ["".join(token["text"] for token in side["tokens"]) for side in sides]
    with torch.no_grad():  # every embedding of the texts grows by the same fraction
        ids = {id for text in texts for id in run.tokenizer.encode(text)}
        run.model.get_parameter("embedding.weight")[sorted(ids)] *= 1 + step
    output = before.get("word", before["saliency"]["target"] if "labels" in before else None)
    after = run.explain.prediction(TEXT, second, output=output)["saliency"]
    expected = sum(sum(side["times_input"]) for side in sides)
    assert (after["value"] - before["saliency"]["value"]) / step == pytest.approx(expected, rel=0.05, abs=2e-3)


@pytest.mark.parametrize("model", spread(["classify", "entail", "regress", "tag", "answer", "contrastive"], 2))
def test_without_a_text_the_held_out_data_is_shown(predicting: Served, model: str) -> None:
    shown = predicted(predicting, model)
    assert shown["origin"] == "from the held-out data" and all(shown["texts"])
    assert len(shown["texts"]) == (2 if model in ("entail", "answer") else 1)
    empty = predicted(predicting, model, input="", **({"second": ""} if len(shown["texts"]) == 2 else {}))
    assert empty["texts"] == [""] * len(shown["texts"]) and empty["origin"] is None


def test_refused_predictions(predicting: Served, server: Served) -> None:
    path = "/v1/explain/prediction"
    assert "not a label" in predicting.refused(path, {"model": "classify", "input": TEXT, "output": "none"})
    assert "0 … 2" in predicting.refused(path, {"model": "tag", "input": TEXT, "output": 3})
    assert "two texts" in predicting.refused(path, {"model": "entail", "input": TEXT})
    assert "one text" in predicting.refused(path, {"model": "regress", "input": TEXT, "second": TEXT})
    assert "expects question and context" in predicting.refused(path, {"model": "answer", "input": TEXT})
    assert "expects words" in predicting.refused(path, {"model": "tag", "input": TEXT, "second": TEXT})
    assert "longer than" in predicting.refused(path, {"model": "tag", "input": "a " * 3000})
    assert "a language model" in server.refused(path, {"model": "gpt", "input": TEXT})


# ---- defaults of decoding


@pytest.mark.parametrize("model", spread(["pairs", "bahdanau"], 1))
def test_every_route_translates_alike(server: Served, runs: Path, model: str) -> None:
    run = weft.load(runs / model)
    translations = run.translate(SOURCES)
    assert server.json("/v1/translate", model=model, input=list(SOURCES))["translations"] == translations
    for source, translation in zip(SOURCES, translations, strict=True):
        best = server.json("/v1/beams", model=model, input=source)["texts"][0]["ids"]
        assert run.tokenizer.decode(best).strip() == translation.strip()
        chat = {"model": model, "messages": [{"role": "user", "content": source}]}
        reply = server.json("/v1/chat/completions", **chat)["choices"][0]["message"]["content"]
        assert reply == translation
        assert run.explain.reading(source).ids == run.explain.reading(source, translation).ids


def test_a_model_has_one_default_of_decoding(server: Served, runs: Path) -> None:
    decoding = {
        name: server.get(f"/v1/settings?model={name}").json()["decoding"] for name in ("gpt", "pairs", "classify")
    }
    assert decoding["classify"] == {}
    assert {name: decoding["pairs"]["translate"][name] for name in TRANSLATION_DEFAULTS} == TRANSLATION_DEFAULTS
    assert {name: decoding["gpt"]["chat"][name] for name in CHAT_DEFAULTS} == CHAT_DEFAULTS
    assert decoding["gpt"]["generate"]["temperature"] == 1.0
    run = weft.load(runs / "pairs")
    assert Beam(**decoding["pairs"]["translate"]) == run.decoding["translate"]
    assert [len(tree.nodes) > 0 for tree in run.explain.search("a b").trees] == [True] * 3
    assert server.get("/v1/settings?model=none").status_code == 404
