"""`POST /v1/explain/step` returns what `run.explain.step` does, for every kind of model."""

import pytest
from tests.serve.serving import RUNS, Served
from tests.spread import spread

from weft.api.load import load

KINDS = {"gpt": "decoder", "lstm": "recurrent", "ngram": "ngram", "bahdanau": "bahdanau", "pairs": "encoder_decoder"}
KINDS |= {"masked-next": "encoder", "classify": "encoder"}


@pytest.mark.parametrize(("model", "kind"), spread(KINDS.items(), 3))
def test_the_route_returns_the_step_of_the_run(server: Served, model: str, kind: str) -> None:
    response = server.json("/v1/explain/step", model=model, input="a b", place=1, temperature=0.8, top_k=7)
    expected = load(RUNS / model).explain.step("a b", place=1, temperature=0.8, top_k=7).answer()
    step = response["step"]
    assert response["model"] == model and step["kind"] == kind and step["place"] == 1
    assert [stage["id"] for stage in step["stages"]] == [stage["id"] for stage in expected["stages"]]
    assert step["pieces"] == expected["pieces"] and step["text"] == "a b"
    candidates, wanted = step["choice"]["candidates"], expected["choice"]["candidates"]
    assert [each["piece"] for each in candidates] == [each["piece"] for each in wanted]
    assert [each["final"] for each in candidates] == pytest.approx([each["final"] for each in wanted], rel=1e-4)
    if model == "classify":
        assert {each["piece"] for each in candidates} == set(load(RUNS / model).classify(["a"])[0])


def test_without_input_a_text_of_the_run_is_shown_and_greedy_keeps_one_candidate(server: Served) -> None:
    step = server.json("/v1/explain/step", model="gpt", temperature=0, top_k=5, layer=0)["step"]
    assert step["text"] and step["place"] == len(step["ids"]) - 1
    assert step["choice"]["kept"] == 1 and step["choice"]["candidates"][0]["final"] == 1.0
    assert step["choice"]["top_k"] is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": "a", "place": 99}, "place = 99"),
        ({"input": "a", "layer": 99}, "layer = 99"),
        ({"input": "a", "layer": -1}, "layer"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "target": "b"}, "target"),
        ({"input": "a" * 5000}, "longer than 4000 characters"),
        ({"input": "a", "head": 1}, "head"),
        ({"model": "lstm", "input": "a b " * 200}, "at most 256"),
    ],
)
def test_invalid_steps_are_refused(server: Served, body: dict[str, object], message: str) -> None:
    assert message in server.refused("/v1/explain/step", {"model": "gpt", **body})
