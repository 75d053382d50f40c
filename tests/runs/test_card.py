"""Model cards: what the run's records say, and nothing else."""

from typing import Any

import pytest

from weft.costs.count import count
from weft.models.build import build
from weft.recipe.config import Recipe
from weft.runs.card import model_card

RECIPE = Recipe.model_validate(
    {
        "name": "verse",
        "seed": 7,
        "precision": "fp32",
        "data": {"sources": ["verse.txt", "more|lines.txt"]},
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
        "objective": {"kind": "next-token"},
        "model": {
            "kind": "decoder",
            "layers": 4,
            "d_model": 128,
            "context": 64,
            "vocab_size": 300,
            "attention": {"heads": 4},
            "feedforward": {"kind": "gated", "d_ff": 256},
            "position": {"kind": "rotary"},
            "norm": {"kind": "rms"},
        },
        "batch": {"size": 16, "length": 64},
    }
)
EVENTS: list[dict[str, Any]] = [
    {
        "event": "start",
        "command": "weft train llama-tiny --data verse.txt 'x=```'",
        "corpus": ["ab" * 32],
        "weft": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "device": "2 CPU threads",
    },
    {"event": "model", "parameters": 1},
    {"event": "finish", "step": 300, "seconds": 100.0},
    {"event": "finish", "step": 400, "seconds": 80.0},
    {"event": "result", "loss": 1.25, "bits_per_byte": 1.8012345, "signature": "x", "samples": ["a ``` b"]},
]


def front(text: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    opening, matter, _ = text.split("---\n", 2)
    assert opening == ""
    return yaml.safe_load(matter)


def parameters_of(recipe: Recipe) -> int:
    """The parameters that the model has once it is built; a tied table is one."""
    return sum(parameter.numel() for parameter in build(recipe.model).parameters())


def test_an_adapter_is_counted_as_what_is_written() -> None:
    """Of a merged model the model's parameters, whatever was trained; of an adapter alone its own beside them."""
    recipe = RECIPE.replace(init="runs/base", adapter={"rank": 4})
    whole = parameters_of(RECIPE)
    assert f"| parameters | {whole:,} |" in model_card(recipe, EVENTS)
    text = model_card(recipe, EVENTS, adapter=1234)
    assert f"| parameters of the adapter | 1,234 |\n| parameters of its model | {whole:,} |" in text


def test_a_license_that_came_with_the_model() -> None:
    given = {"license": "other", "license_name": "deep-1.0", "license_link": "https://example.org/LICENSE"}
    text = model_card(RECIPE, EVENTS, given)
    assert front(text) == {**given, "tags": ["weft"], "pipeline_tag": "text-generation"}
    assert "`other`, `deep-1.0` (https://example.org/LICENSE): so say the files that the model came in." in text
    assert "Unknown" not in text


def test_a_trained_run() -> None:
    text = model_card(RECIPE, EVENTS)
    assert front(text) == {"license": "unknown", "tags": ["weft"], "pipeline_tag": "text-generation"}
    operations = 409600 * count(RECIPE.model, 64).training()
    for line in (
        "# verse",
        "A model of kind `decoder`: layers 4, d_model 128, vocab_size 300, context 64, rotary positions, rms norm",
        "Trained for `next-token`. Its tokenizer is of kind `bpe`.",
        f"| verse.txt, more\\|lines.txt | {'ab' * 32} |",
        f"| parameters | {parameters_of(RECIPE):,} |",
        "| steps | 400 |",
        "| tokens seen | 409,600 |",
        f"| operations in training | {operations:.2e} |",
        "| time | 3 minutes |",
        "| seed | 7 |",
        "| loss | 1.250 |",
        "| bits per byte | 1.801 |",
        "````text\nweft train llama-tiny --data verse.txt 'x=```'\n````",
        "````text\na ``` b\n````",
        "Made with weft 0.1.0, torch 2.13.0, python 3.11.7.",
        "Unknown: the people who made this model have not said how it may be used.",
    ):
        assert line in text
    assert "signature" not in text


def test_an_imported_model_says_no_more_than_is_known() -> None:
    model = {**RECIPE.model.model_dump(exclude={"ngrams"}), "kind": "encoder", "head": {"kind": "embedding"}}
    recipe = RECIPE.replace(model=model, data={}, objective={"kind": "contrastive"})
    events = [{"event": "import", "origin": "MiniLM (BERT, Hugging Face)", "parameters": 1}]
    text = model_card(recipe, events)
    assert "Imported from MiniLM (BERT, Hugging Face)." in text
    assert f"| parameters | {parameters_of(recipe):,} |" in text
    assert front(text)["pipeline_tag"] == "sentence-similarity"
    for absent in ("seed", "How to repeat", "Data", "Measured", "steps"):
        assert absent not in text


def test_a_mixture() -> None:
    mixture = [{"sources": ["a.txt"], "weight": 0.75}, {"prepared": "folder", "weight": 0.25}]
    text = model_card(RECIPE.replace(data={"mixture": mixture}), EVENTS[:1])
    assert f"| a.txt | 0.75 | {'ab' * 32} |\n| folder | 0.25 |  |" in text
