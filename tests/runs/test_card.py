"""Model cards: everything in the run's records, and nothing else."""

import tomllib
from typing import Any

import pytest

from weft.config import validate
from weft.costs.count import count
from weft.models.build import build
from weft.recipe.config import Recipe
from weft.runs.card import model_card

RECIPE = validate(
    Recipe,
    tomllib.loads("""
        name = "verse"
        seed = 7
        precision = "fp32"
        data.sources = ["verse.txt", "more|lines.txt"]
        tokenizer = {kind = "bpe", vocab_size = 300}
        batch = {size = 16, length = 64}
        [model]
        kind = "decoder"
        layers = 4
        d_model = 128
        context = 64
        vocab_size = 300
        attention.heads = 4
        feedforward = {kind = "gated", d_ff = 256}
        position.kind = "rotary"
        norm.kind = "rms"
    """),
)
COMMAND = "weft train llama-tiny --data verse.txt 'x=```'"
VERSIONS = {"weft": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}
EVENTS: list[dict[str, Any]] = [
    {"event": "start", "command": COMMAND, "corpus": ["ab" * 32], **VERSIONS, "device": "2 CPU threads"},
    {"event": "model", "parameters": 1},
    {"event": "finish", "step": 300, "seconds": 100.0},
    {"event": "finish", "step": 400, "seconds": 80.0},
    {"event": "result", "loss": 1.25, "bits_per_byte": 1.8012345, "signature": "x", "samples": ["a ``` b"]},
]


def front(text: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n", 2)[1])


def parameters_of(recipe: Recipe) -> int:
    """Return the number of parameters of the built model; tied weights count once."""
    return sum(parameter.numel() for parameter in build(recipe.model).parameters())


def test_the_exported_parameters_are_counted() -> None:
    """Those of the merged model, or those of the adapter alone with its model's."""
    recipe = RECIPE.replace(init="runs/base", adapter={"rank": 4})
    merged = parameters_of(RECIPE)
    assert f"| parameters | {merged:,} |" in model_card(recipe, EVENTS)
    text = model_card(recipe, EVENTS, adapter=1234)
    assert f"| parameters of the adapter | 1,234 |\n| parameters of its model | {merged:,} |" in text


def test_the_license_of_an_imported_model() -> None:
    license = {"license": "other", "license_name": "deep-1.0", "license_link": "https://example.org/LICENSE"}
    text = model_card(RECIPE, EVENTS, license)
    assert front(text) == {**license, "tags": ["weft"], "pipeline_tag": "text-generation"}
    assert "`other`, `deep-1.0` (https://example.org/LICENSE), according to the model's original files." in text
    assert "Unknown" not in text


def test_a_trained_run() -> None:
    text = model_card(RECIPE, EVENTS)
    assert front(text) == {"license": "unknown", "tags": ["weft"], "pipeline_tag": "text-generation"}
    flops = 409600 * count(RECIPE.model, 64).training()
    for line in (
        "# verse",
        "A model of kind `decoder`: layers 4, d_model 128, vocab_size 300, context 64, rotary positions, rms norm",
        "Trained for `next-token`. Its tokenizer is of kind `bpe`.",
        f"| verse.txt, more\\|lines.txt | {'ab' * 32} |",
        f"| parameters | {parameters_of(RECIPE):,} |",
        "| steps | 400 |",
        "| tokens seen | 409,600 |",
        f"| FLOPs of training | {flops:.2e} |",
        "| time | 3 minutes |",
        "| seed | 7 |",
        "| loss | 1.250 |",
        "| bits per byte | 1.801 |",
        f"````text\n{COMMAND}\n````",
        "````text\na ``` b\n````",
        "Made with weft 0.1.0, torch 2.13.0, python 3.11.7.",
        "Unknown: the authors of this model have not stated how it may be used.",
    ):
        assert line in text
    assert "signature" not in text


def test_an_imported_model_has_only_what_is_known() -> None:
    model = {**RECIPE.model.model_dump(exclude={"ngrams"}), "kind": "encoder", "head": {"kind": "embedding"}}
    recipe = RECIPE.replace(model=model, data={}, objective={"kind": "contrastive"})
    text = model_card(recipe, [{"event": "import", "origin": "MiniLM (BERT, Hugging Face)", "parameters": 1}])
    assert "Imported from MiniLM (BERT, Hugging Face)." in text
    assert f"| parameters | {parameters_of(recipe):,} |" in text
    assert front(text)["pipeline_tag"] == "sentence-similarity"
    for absent in ("seed", "How to reproduce", "Data", "Results", "steps"):
        assert absent not in text


def test_a_mixture() -> None:
    mixture = [{"sources": ["a.txt"], "weight": 0.75}, {"prepared": "folder", "weight": 0.25}]
    text = model_card(RECIPE.replace(data={"mixture": mixture}), EVENTS[:1])
    assert f"| a.txt | 0.75 | {'ab' * 32} |\n| folder | 0.25 |  |" in text
