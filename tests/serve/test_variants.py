"""Variants of a model by name: a checkpoint (gpt@6), the model before training (gpt@0), and without a head."""

import pytest
from tests.serve.serving import RUNS, Served, served

import weft
from weft.explain.ablation import without_heads
from weft.serve.library import MAX_VARIANTS

TEXT = "A tale is told"


def surprisal(server: Served, model: str) -> float:
    nats = server.json("/v1/explain/surprise", model=model, input=TEXT)["surprise"]["nats"]
    return float(sum(each or 0.0 for each in nats))


def total(run: "weft.Run") -> float:
    return float(sum(each or 0.0 for each in run.explain.surprise(TEXT).nats))


def test_a_checkpoint_and_the_model_before_training() -> None:
    with served(RUNS) as server:
        folder = RUNS / "gpt"
        assert surprisal(server, "gpt@6") == pytest.approx(total(weft.load(folder, step=6)), rel=1e-5)
        assert surprisal(server, "gpt@0") == pytest.approx(total(weft.load(folder, step=0)), rel=1e-5)
        assert surprisal(server, "gpt@0") != pytest.approx(surprisal(server, "gpt@6"), rel=1e-3)
        assert server.json("/v1/completions", model="gpt@0", prompt=TEXT, max_tokens=3)["model"] == "gpt@0"
        known = {each["id"]: each["weft"] for each in server.get("/v1/models").json()["data"]}
        assert known["gpt"]["checkpoints"] == [0, 6] and known["ngram"]["checkpoints"] == [1]
        assert "gpt@0" not in known


def test_a_head_is_removed() -> None:
    run, heads = weft.load(RUNS / "gpt"), [("decoder", 0, 1)]
    without = without_heads(run.explain.reading(TEXT, None), heads).surprise  # type: ignore[arg-type]
    assert without is not None
    with served(RUNS) as server:
        expected = sum(each or 0.0 for each in without.nats)
        assert surprisal(server, "gpt~decoder.0.1") == pytest.approx(expected, rel=1e-5)
        assert surprisal(server, "gpt") == pytest.approx(total(run), rel=1e-5)  # the model itself is unchanged


@pytest.mark.parametrize(
    ("model", "status", "message"),
    [
        ("gpt@7", 404, "model 'gpt@7': no checkpoint of step 7; there are 6"),
        ("gpt@../../x", 404, "model 'gpt@../../x': "),
        ("nothing@6", 404, "model 'nothing@6': "),
        ("gpt~decoder.9.0", 400, "heads: layer 9 of decoder attention: this model has 0 to "),
        ("gpt~encoder.0.0", 400, "heads: 'encoder': this model has decoder attention"),
        ("bahdanau~cross.0.0", 400, "heads: layer 0 of cross attention has no output projection of its own"),
        ("ngram@0", 409, "model 'ngram@0' cannot be loaded"),
    ],
)
def test_what_there_is_not_is_refused_in_one_line(model: str, status: int, message: str) -> None:
    with served(RUNS) as server:
        refused = server.refused("/v1/score", {"model": model, "input": TEXT}, status)
        assert refused.startswith(message) and "\n" not in refused and str(RUNS) not in refused


def test_few_are_kept_in_memory() -> None:
    with served(RUNS) as server:
        names = [f"gpt~decoder.0.{head}{more}" for head in (0, 1) for more in ("", "~decoder.0.0", "~decoder.0.1")]
        for name in [*names, "gpt@0", "gpt@6"]:
            surprisal(server, name)
        assert len(server.library.variants) == MAX_VARIANTS
        assert list(server.library.variants)[-1] == "gpt@6" and names[0] not in server.library.variants
        assert surprisal(server, names[0]) == surprisal(server, names[1])


def test_a_step_is_loaded_in_full_width() -> None:
    with pytest.raises(weft.WeftError, match="step = 3: a checkpoint is loaded in full width"):
        weft.load(RUNS / "gpt", step=3, quantize="int8")
    with pytest.raises(weft.WeftError, match="no checkpoint of step 3; there are 6"):
        weft.load(RUNS / "gpt", step=3)
