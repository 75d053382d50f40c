"""`POST /v1/explain/step`: what `run.explain.step` gives, for every kind of model, and what it refuses."""

import pytest
from tests.serve.serving import RUNS, Served

from weft.api.load import load

KINDS = {
    "gpt": "decoder",
    "lstm": "recurrent",
    "ngram": "ngram",
    "bahdanau": "bahdanau",
    "pairs": "encoder_decoder",
    "masked-next": "encoder",
    "classify": "encoder",
}


@pytest.mark.parametrize(("model", "kind"), KINDS.items())
def test_the_route_answers_as_the_run_does(server: Served, model: str, kind: str) -> None:
    asked = {"temperature": 0.8, "top_k": 7}
    answer = server.post("/v1/explain/step", {"model": model, "input": "a b", "place": 1, **asked})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    wanted = load(RUNS / model).explain.step("a b", place=1, **asked).answer()
    assert found["model"] == model and found["step"]["kind"] == kind and found["step"]["place"] == 1
    assert [stage["id"] for stage in found["step"]["stages"]] == [stage["id"] for stage in wanted["stages"]]
    assert found["step"]["pieces"] == wanted["pieces"] and found["step"]["text"] == "a b"
    candidates = found["step"]["choice"]["candidates"]
    assert [each["piece"] for each in candidates] == [each["piece"] for each in wanted["choice"]["candidates"]]
    assert [each["final"] for each in candidates] == pytest.approx(
        [each["final"] for each in wanted["choice"]["candidates"]], rel=1e-4
    )
    if model == "classify":
        assert {each["piece"] for each in candidates} == set(load(RUNS / model).classify(["a"])[0])


def test_the_model_has_a_text_of_its_own_and_greedy_leaves_one(server: Served) -> None:
    found = server.post("/v1/explain/step", {"model": "gpt", "temperature": 0, "top_k": 5, "layer": 0}).json()["step"]
    assert found["text"] and found["place"] == len(found["ids"]) - 1
    assert found["choice"]["kept"] == 1 and found["choice"]["candidates"][0]["final"] == 1.0
    assert found["choice"]["top_k"] is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "a", "place": 99}, "place = 99"),
        ({"input": "a", "layer": 99}, "layer = 99"),
        ({"input": "a", "layer": -1}, "layer"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "target": "b"}, "target"),
        ({"input": "a" * 5000}, "at most 4000 characters"),
        ({"input": "a", "head": 1}, "head"),
    ],
)
def test_what_cannot_be_shown_is_refused(server: Served, body: dict[str, object], words: str) -> None:
    answer = server.post("/v1/explain/step", {"model": "gpt", **body})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_a_text_may_be_too_long_for_a_step(server: Served) -> None:
    answer = server.post("/v1/explain/step", {"model": "lstm", "input": "a b " * 300})
    assert answer.status_code == 400 and "at most 256" in answer.json()["error"]["message"]
