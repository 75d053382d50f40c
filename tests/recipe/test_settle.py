"""What is chosen for small and large texts, and that a choice never overrides the recipe."""

import pytest

from weft.errors import ConfigError
from weft.models.build import build
from weft.recipe.resolve import resolve
from weft.recipe.settle import TextFacts, check_trainable, count_parameters, fit_vocabulary, measure, settle, unsettled


@pytest.mark.parametrize("size", [300, 20_000, 1_100_000, 90_000_000])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("preset", ["gpt-tiny", "llama-mini", "lstm", "gpt2", "ngram-3", "llama-7b"])
def test_nothing_is_left_open_whatever_the_text(preset: str, size: int, device: str) -> None:
    recipe, choices = settle(resolve(preset), TextFacts(size), device)
    assert unsettled(recipe) == []
    assert all(choice.why for choice in choices)
    assert settle(recipe, TextFacts(size), device) == (recipe, []) or device == "cuda"


def test_the_recipe_has_the_last_word() -> None:
    words = ["steps=77", "batch.size=5", "batch.length=64", "optimizer.lr=0.5", "tokenizer=char", "log.every=9"]
    recipe, choices = settle(resolve("gpt-tiny", words), TextFacts(1_000_000))
    assert (recipe.steps, recipe.batch.size, recipe.batch.length) == (77, 5, 64)
    assert recipe.optimizer.lr == 0.5
    assert recipe.tokenizer is not None
    assert recipe.tokenizer.kind == "char"
    assert not {"steps", "batch.size", "optimizer.lr", "tokenizer"} & {choice.key for choice in choices}


def test_what_is_counted_hears_of_no_learning_rate() -> None:
    recipe, choices = settle(resolve("ngram-3"), TextFacts(1_000_000))
    assert recipe.optimizer.lr is not None
    assert [choice.key for choice in choices] == ["tokenizer", "tokenizer.vocab_size", "steps", "batch.length"]


def test_more_text_has_a_larger_vocabulary() -> None:
    sizes = [settle(resolve("gpt-tiny"), TextFacts(n))[0].tokenizer.vocab_size for n in (10**5, 10**7, 10**9)]  # type: ignore[union-attr]
    assert sizes[0] < sizes[1] < sizes[2]


def test_larger_models_learn_slower() -> None:
    rates = [
        settle(resolve(name), TextFacts(10**8), "cuda")[0].optimizer.lr for name in ("gpt-tiny", "gpt2", "gpt3-6.7b")
    ]
    assert rates == sorted(rates, reverse=True)  # type: ignore[type-var]
    assert rates[1] == pytest.approx(6e-4, rel=0.2)  # GPT-3's table for 125 M


def test_a_text_is_sized_up_in_bytes() -> None:
    assert measure(["abc", "ü"]).bytes == 5
    assert measure(["x" * 10] * 5, most=25) == TextFacts(30, whole=False)


def test_the_model_takes_the_tokenizers_vocabulary() -> None:
    recipe, choices = fit_vocabulary(resolve("gpt-tiny"), 300)
    assert recipe.model.vocab_size == 300
    assert choices[0].key == "model.vocab_size"
    padded = resolve("gpt-tiny", ["model.vocab_size=384"])
    assert fit_vocabulary(padded, 330) == (padded, [])


def test_parameters_are_estimated_within_a_tenth() -> None:
    recipe = resolve("llama-tiny", ["tokenizer.vocab_size=8192"])
    assert count_parameters(recipe) == pytest.approx(sum(p.numel() for p in build(recipe.model).parameters()), rel=0.1)


def test_a_model_that_sees_both_sides_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.kind = 'encoder': the goal 'next-token' needs"):
        check_trainable(resolve("bert-tiny", ["objective=next-token"]), 100)
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 10: the tokenizer has 11"):
        check_trainable(resolve("gpt-tiny", ["model.vocab_size=10"]), 11)


def test_checkpoints_come_with_the_evaluations() -> None:
    recipe, _ = settle(resolve("gpt-tiny", ["steps=1000", "evaluate.every=250"]), TextFacts(1_000_000))
    assert recipe.checkpoint.every == 250
