"""Other programs' names for settings lead to keys that exist."""

from contextlib import suppress
from itertools import product

import pytest

from weft.config import keys_of
from weft.errors import ConfigError, WeftError
from weft.models.presets import PRESETS
from weft.recipe.config import Recipe
from weft.recipe.resolve import resolve
from weft.recipe.synonyms import SYNONYMS

FILES = ["data.validation.kind=files", "data.validation.sources=['a']"]


def every_key() -> set[str]:
    keys: set[str] = {"model"}
    for name, changes in product(PRESETS, ([], FILES, ["optimizer=sgd"])):
        with suppress(WeftError):
            keys |= set(keys_of(Recipe, resolve(name, ["tokenizer=bpe", *changes]).model_dump()))
    return keys


def test_every_synonym_leads_to_a_key_and_is_none() -> None:
    known = every_key()
    assert {meant.partition(": ")[0] for meant in SYNONYMS.values()} <= {"", *known}  # "": a hint without a key
    assert not set(SYNONYMS) & known


@pytest.mark.parametrize(
    ("preset", "change", "advice"),
    [
        ("gpt-tiny", "training.steps=5", "did you mean 'steps'?"),
        ("gpt-tiny", "model.window=3", "did you mean 'model.attention.window'?"),
        ("gpt-tiny", "model.attention.head=3", "did you mean 'model.attention.heads'"),
        ("gpt-tiny", "optimizer.momentum=0.9", "the keys here are kind, lr, betas"),
        ("lstm", "heads=4", "it is 'model.attention.heads' here, but not in a recipe of this kind"),
        ("gpt-tiny", "val_file=a", "it is 'data.validation.sources' here, with data.validation.kind = 'files'"),
    ],
)
def test_unknown_keys_are_explained(preset: str, change: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(preset, [change])
    assert f"{change.partition('=')[0]}: unknown key; {advice}" in str(caught.value)
