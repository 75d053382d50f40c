"""What a recipe may hold, and what is wrong with it in one line."""

import tomllib

import pytest

from weft.config import to_toml, validate
from weft.errors import ConfigError
from weft.recipe.config import Recipe
from weft.recipe.resolve import resolve


def test_toml_round_trip() -> None:
    recipe = resolve("llama-tiny", ["optimizer.clip=0", "steps=7", "tokenizer.vocab_size=300"], ["x.txt"])
    assert validate(Recipe, tomllib.loads(to_toml(recipe))) == recipe


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("gpt-tiny", ["model.lyers=3"], r"model\.lyers: unknown key; did you mean 'model.layers'"),
        ("gpt-tiny", ["optimiser.lr=3"], "optimiser.lr: unknown key; it is 'optimizer.lr' here"),
        ("gpt-tiny", ["optimizer.learning=3"], r"optimizer\.learning: unknown key"),
        ("gpt-tiny", ["optimizer.kind=adamx"], r"optimizer\.kind = 'adamx': unknown kind; did you mean 'adam"),
        ("gpt-tiny", ["precision=fp33"], "precision = 'fp33': did you mean 'fp32'"),
        ("gpt-tiny", ["steps=0"], r"steps = 0: expected"),
        ("gpt-tiny", ["steps=ten"], r"steps = 'ten': expected"),
        ("gpt-tiny", ["schedule=noam", "optimizer.lr=0.1"], "the noam schedule sets the learning rate"),
        ("gpt-tiny", ["steps=10", "schedule.warmup=20"], r"schedule\.warmup = 20 is longer"),
        ("gpt-tiny", ["batch.size=2", "batch.micro=3"], r"batch\.micro = 3 is more"),
        ("gpt-tiny", ["batch.length=4096"], r"batch\.length = 4096: the model's positions end at"),
        ("gpt-tiny", ["name=a/b"], "name = 'a/b'"),
    ],
)
def test_mistakes_are_one_clear_line(source: str, changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(source, changes)
    assert "\n" not in str(caught.value)
