"""Settings chosen for small and large texts; a choice never overrides the recipe."""

from dataclasses import replace
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.models.config import NGram
from weft.recipe.config import Recipe, SettledRecipe
from weft.recipe.draft import ChosenSetting
from weft.recipe.resolve import resolve
from weft.recipe.settle import Facts, choose_tokenizer, settle
from weft.text.config import Byte, TokenizerConfig


def facts(size: int, tokenizer: TokenizerConfig, vocab_size: int | None = None) -> Facts:
    """Facts about a text of `size` bytes, with a tokenizer that reached the requested vocabulary size."""
    return Facts(size, vocab_size or getattr(tokenizer, "vocab_size", None) or 257)


def settled(recipe: Recipe, size: int, device: str = "cpu") -> tuple[SettledRecipe, list[ChosenSetting]]:
    """Choose the tokenizer, then everything else, as `weft train` does."""
    tokenizer, chosen = choose_tokenizer(recipe, size, device)
    result, choices = settle(recipe.replace(tokenizer=tokenizer.model_dump()), facts(size, tokenizer), device)
    return result, [*chosen, *choices]


@pytest.mark.parametrize("size", [300, 20_000, 1_100_000, 90_000_000])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("preset", ["gpt-tiny", "llama-mini", "lstm", "gpt2", "ngram-3", "llama-7b"])
def test_nothing_is_left_open(preset: str, size: int, device: str) -> None:
    recipe, choices = settled(resolve(preset), size, device)
    assert all(choice.why for choice in choices)
    if not isinstance(recipe.model, NGram):
        assert recipe.batch.size is not None and recipe.optimizer.lr is not None
    assert choose_tokenizer(recipe, 5_000) == (recipe.tokenizer, [])
    assert settle(recipe, facts(size, recipe.tokenizer), device) == (recipe, []) or device == "cuda"


def test_choices_never_override_the_recipe() -> None:
    words = ["steps=77", "batch.size=5", "batch.length=64", "optimizer.lr=0.5", "tokenizer=char", "log.every=9"]
    recipe, choices = settled(resolve("gpt-tiny", words), 1_000_000)
    assert (recipe.steps, recipe.batch.size, recipe.batch.length) == (77, 5, 64)
    assert (recipe.optimizer.lr, recipe.tokenizer.kind) == (0.5, "char")
    assert not {"steps", "batch.size", "optimizer.lr", "tokenizer"} & {choice.key for choice in choices}


def test_only_settings_with_effect_are_shown_for_n_grams() -> None:
    recipe, choices = settled(resolve("ngram-3"), 1_000_000)
    assert recipe.optimizer.lr is not None
    keys = ["tokenizer", "tokenizer.vocab_size", "steps", "batch.length", "model.vocab_size"]
    assert [choice.key for choice in choices] == keys


def test_more_text_gets_a_larger_vocabulary() -> None:
    chosen = [choose_tokenizer(resolve("gpt-tiny"), size)[0] for size in (10**5, 10**7, 10**9)]
    sizes = [tokenizer.vocab_size for tokenizer in chosen]  # type: ignore[union-attr]
    assert sizes[0] < sizes[1] < sizes[2]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("preset", "words", "kind"),
    [("gpt-tiny", (), "bpe"), ("bert-tiny", (), "wordpiece"), ("vaswani-tiny", ("objective=spans",), "bpe")],
)
def test_a_tokenizer_suits_the_model(preset: str, words: tuple[str, ...], kind: str) -> None:
    recipe = resolve(preset, words)
    tokenizer, choices = choose_tokenizer(recipe, 10**6)
    assert tokenizer.kind == kind
    assert [choice.key for choice in choices] == ["tokenizer", "tokenizer.vocab_size"]
    assert len(tokenizer.specials.extra) == recipe.objective.sentinels  # type: ignore[union-attr]


def test_larger_models_get_lower_learning_rates() -> None:
    presets = [resolve(name, ["optimizer=adamw"]) for name in ("gpt-tiny", "gpt2", "gpt3-6.7b")]
    rates = [settled(preset, 10**8, "cuda")[0].optimizer.lr for preset in presets]
    assert rates == sorted(rates, reverse=True)  # type: ignore[type-var]
    assert rates[1] == pytest.approx(6e-4, rel=0.2)  # GPT-3's table for 125 M


def test_the_model_gets_the_tokenizers_vocabulary_size() -> None:
    recipe, choices = settle(resolve("gpt-tiny", ["tokenizer=byte"]), facts(10**6, Byte(), 300))
    assert recipe.model.vocab_size == 300 and choices[-1].key == "model.vocab_size"
    _, choices = settle(resolve("gpt-tiny", ["tokenizer=byte", "model.vocab_size=1"]), facts(10**6, Byte(), 330))
    assert choices[-1].why == "the vocabulary of the tokenizer, instead of the recipe's 1"
    # an embedding table padded for the kernels stays unchanged
    padded, choices = settle(resolve("gpt-tiny", ["tokenizer=byte", "model.vocab_size=384"]), facts(10**6, Byte(), 330))
    assert padded.model.vocab_size == 384
    assert "model.vocab_size" not in [choice.key for choice in choices]


def test_a_separate_source_vocabulary_sets_its_embedding_table() -> None:
    recipe = resolve("vaswani-tiny", ["source_tokenizer=char", "tokenizer=byte"])
    result, choices = settle(recipe, Facts(10**5, 300, source_vocab_size=40, rows=900))
    assert (result.model.vocab_size, result.model.source_vocab_size) == (300, 40)  # type: ignore[union-attr]
    assert [choice.key for choice in choices][-2:] == ["model.vocab_size", "model.source_vocab_size"]


def test_the_head_has_an_output_for_each_label() -> None:
    recipe = resolve("bert-tiny", ["objective=classify", "tokenizer=byte"])
    result, choices = settle(recipe, Facts(10**5, 300, rows=900, labels=("bad", "good", "odd")))
    assert result.objective.labels == ("bad", "good", "odd")  # type: ignore[attr-defined]
    assert result.model.head.labels == 3  # type: ignore[union-attr]
    assert "objective.labels = bad, good, odd: those of the training rows" in map(str, choices)
    named = resolve("bert-tiny", ["objective=classify", "tokenizer=byte", 'objective.labels=["a", "b", "c", "d"]'])
    assert settle(named, Facts(10**5, 300, rows=900))[0].model.head.labels == 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("objective", "change", "message"),
    [
        ("next-token", {}, r"model\.kind = 'encoder': objective 'next-token' needs a model of kind decoder"),
        ("masked+next", {"head": {"kind": "mlm"}}, r"model\.head\.kind = 'mlm': objective .* of kind mlm.nsp"),
    ],
)
def test_a_model_that_cannot_learn_the_objective_is_refused(objective: str, change: Any, message: str) -> None:
    recipe = resolve("bert-tiny", [f"objective={objective}"])
    with pytest.raises(ConfigError, match=message):
        recipe.objective.check(recipe.model.replace(**change))


@pytest.mark.parametrize("steps", [2, 10, 40, 200, 2000, 20_000])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_evaluations_cost_a_tenth_of_the_training(steps: int, device: str) -> None:
    """A token costs three times as many FLOPs in training as in evaluation."""
    recipe, choices = settled(resolve("gpt-tiny", [f"steps={steps}"]), 1_000_000, device)
    times = -(-steps // recipe.evaluate.every)
    assert 2 <= times <= 10
    evaluated = times * recipe.evaluate.tokens  # type: ignore[operator]
    trained = steps * recipe.batch.size * recipe.batch.length  # type: ignore[operator]
    assert 0.005 * trained <= evaluated / 3 <= 0.1 * trained
    assert {"evaluate.every", "evaluate.tokens"} <= {choice.key for choice in choices}


def test_evaluations_of_rows_and_of_adapters_cost_a_tenth_too() -> None:
    rows = resolve("bert-tiny", ["objective=classify", "tokenizer=byte", "steps=100", "batch.size=16"])
    recipe, _ = settle(rows, Facts(90_000, 300, rows=900, labels=("a", "b")))
    times = -(-100 // recipe.evaluate.every)
    assert times * recipe.evaluate.tokens / 3 <= 0.1 * 100 * 16 * 100  # type: ignore[operator]
    full = resolve("gpt-tiny", ["tokenizer=byte", "steps=100"]).replace(init="x")
    small, large = (settle(r, Facts(10**6, 257))[0] for r in (full.replace(adapter={"rank": 4}), full))
    assert small.evaluate.tokens == pytest.approx(large.evaluate.tokens * 2 / 3, abs=1)  # type: ignore[operator]
    assert small.optimizer.kind == large.optimizer.kind == "adamw"  # trained weights are fine-tuned with AdamW


def test_the_recipes_evaluations_are_kept() -> None:
    words = ["tokenizer=byte", "steps=40", "evaluate.every=4", "evaluate.tokens=32768"]
    recipe, choices = settle(resolve("gpt-tiny", words), Facts(10**6, 257))
    assert (recipe.evaluate.every, recipe.evaluate.tokens, recipe.checkpoint.every) == (4, 32768, 4)
    assert not [choice for choice in choices if choice.key.startswith("evaluate")]
    often, _ = settle(resolve("gpt-tiny", words[:3]), Facts(10**6, 257))
    per_step = often.batch.size * often.batch.length  # type: ignore[operator]
    assert often.evaluate.tokens * 10 / 3 <= 0.1 * 40 * per_step  # type: ignore[operator]


def test_facts_are_shown_as_an_amount_of_data() -> None:
    shown = [str(Facts(1_115_394, 257)), str(Facts(800, 257)), str(Facts(800, 257, rows=12_000))]
    assert shown == ["1.1 MB of text", "800 bytes of text", "12,000 rows"]


@pytest.mark.parametrize(
    ("bf16", "chosen", "why"),
    [
        (747e9, "bf16", "this CPU multiplies bf16 3.4 times as fast as fp32 (747 against 217 GFLOP/s)"),
        (300e9, "fp32", "this CPU multiplies bf16 hardly faster (300 against 217 GFLOP/s)"),
        (0.12e9, "fp32", "this CPU multiplies bf16 no faster (0.12 against 217 GFLOP/s)"),
        (0.0, "fp32", "this CPU multiplies bf16 no faster (0 against 217 GFLOP/s)"),
    ],
)
def test_the_number_format_follows_the_measured_speed(bf16: float, chosen: str, why: str) -> None:
    shapes: list[tuple[int, int, int]] = []

    def measure(rows: int, inputs: int, outputs: int) -> dict[str, float]:
        shapes.append((rows, inputs, outputs))
        return {"fp32": 217e9, "bf16": bf16}

    words = ["tokenizer=byte", "model.d_model=384", "model.attention.heads=6", "model.feedforward.d_ff=1536"]
    words += ["batch.size=8", "batch.micro=4", "batch.length=128"]
    recipe, choices = settle(resolve("gpt-tiny", words), Facts(10**6, 257), "cpu", measure=measure)
    assert recipe.precision == chosen
    assert shapes == [(4 * 128, 384, 1536)]  # the shape of the run's feed-forward product
    assert [choice.why for choice in choices if choice.key == "precision"] == [why]
    assert settle(recipe, Facts(10**6, 257), "cpu", measure=measure)[0].precision == chosen
    assert len(shapes) == 1  # a settled recipe is not measured again


@pytest.mark.parametrize(
    ("preset", "words", "device"),
    [
        ("gpt-tiny", ["model.d_model=64", "batch.size=2"], "cpu"),
        ("gpt2", ["precision=fp32"], "cpu"),
        ("lstm", [], "cpu"),
        ("ngram-3", [], "cpu"),
        ("gpt2", [], "cuda"),
    ],
)
def test_nothing_is_measured_unless_it_matters(preset: str, words: list[str], device: str) -> None:
    def measure(rows: int, inputs: int, outputs: int) -> dict[str, float]:
        raise AssertionError((rows, inputs, outputs))

    recipe, _ = settle(resolve(preset, ["tokenizer=byte", *words]), Facts(10**6, 257), device, measure=measure)
    assert recipe.precision == ("fp32" if device == "cpu" else "bf16")


def test_the_rate_follows_how_far_the_weights_were_trained() -> None:
    """Briefly trained weights learn a task as fresh ones do; a published model, of unknown training, is fine-tuned."""
    fresh = resolve("bert-tiny", ["tokenizer=byte", "objective=classify"])
    rows = Facts(10_000, 256, rows=600, labels=("a", "b"))

    def chosen(recipe: Recipe, tokens: int | None = None) -> SettledRecipe:
        return settle(recipe, replace(rows, trained_tokens=tokens))[0]

    new, known = chosen(fresh), chosen(fresh.replace(init="x"))
    little, more, much = (chosen(fresh.replace(init="x"), tokens) for tokens in (10_000, 3_000_000, 10**10))
    assert 0.9 * new.optimizer.lr < little.optimizer.lr <= new.optimizer.lr  # type: ignore[operator]
    assert little.optimizer.lr > more.optimizer.lr > much.optimizer.lr == known.optimizer.lr  # type: ignore[operator]
    assert new.steps >= little.steps > more.steps > much.steps == known.steps
    assert (little.schedule.warmup, known.schedule.warmup) == (little.steps // 5, known.steps // 10)


@pytest.mark.parametrize(
    ("preset", "words", "device", "kind"),
    [
        ("gpt-tiny", (), "cpu", "muon"),
        ("llama-tiny", (), "cpu", "muon"),
        ("gpt-tiny", (), "cuda", "muon"),
        ("gpt2", (), "cuda", "muon"),
        ("gpt2-xl", (), "cuda", "adamw"),  # wider than Muon was measured for
        ("vaswani-tiny", ("schedule=cosine",), "cuda", "adamw"),  # post-norm
        ("vaswani-tiny", ("schedule=cosine", "model.placement=pre"), "cuda", "muon"),
        ("gpt-mini", (), "cpu", "adamw"),  # Muon's iterations would take longer than the rest of a step
        ("transformer", (), "cpu", "adamw"),  # post-norm
        ("lstm", (), "cpu", "adamw"),
        ("ngram-3", (), "cpu", "adamw"),
        ("gpt-tiny", ("schedule=noam",), "cpu", "adamw"),  # sets Adam's learning rate itself
        ("gpt-tiny", ("optimizer.lr=0.001",), "cpu", "adamw"),
        ("gpt-tiny", ("optimizer=sgd",), "cpu", "sgd"),
    ],
)
def test_the_chosen_optimizer_suits_the_run(preset: str, words: tuple[str, ...], device: str, kind: str) -> None:
    recipe, choices = settled(resolve(preset, words), 1_000_000, device)
    assert recipe.optimizer.kind == kind
    shown = "optimizer" in {choice.key for choice in choices}
    assert shown == (preset != "ngram-3" and not any("optimizer" in word for word in words))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("axis", ["replicate", "shard", "tensor", "context", "pipeline"])
def test_choices_do_not_depend_on_the_layout(axis: str, device: str) -> None:
    for preset in ("gpt-tiny", "llama-tiny", "gpt2"):
        for size in (1_000_000,) if axis == "context" else (3001, 1_000_000):
            one, choices = settled(resolve(preset), size, device)
            two, same = settled(resolve(preset, [f"parallel.{axis}=2"]), size, device)
            assert two.replace(parallel={}) == one
            assert same == choices


def test_rows_that_processes_divide_have_a_fitting_length() -> None:
    one, two = (settled(resolve("gpt-tiny", words), 900)[1] for words in ([], ["parallel.context=2"]))
    (length,) = (choice.value for choice in one if choice.key == "batch.length")
    (choice,) = (choice for choice in two if choice.key == "batch.length")
    assert length % 4 and choice.value == length // 4 * 4
    assert choice.why == "so that the processes of parallel.context can divide a row"


@pytest.mark.parametrize(("device", "many", "few"), [("cpu", 100_000, 200_000), ("cuda", 10_000_000, 10**9)])
def test_weight_decay_is_raised_for_many_epochs(device: str, many: int, few: int) -> None:
    recipe, choices = settled(resolve("gpt-tiny"), many, device)
    rate, decay = recipe.optimizer.lr or 0.0, recipe.optimizer.weight_decay  # type: ignore[union-attr]
    assert rate * decay * recipe.steps == pytest.approx(5, rel=0.05)
    (choice,) = (choice for choice in choices if choice.key == "optimizer.weight_decay")
    assert "times" in choice.why
    part, _ = settled(resolve("gpt-tiny", ["data.tokens=20000"]), few, device)  # the rest of the text isn't read
    assert part.optimizer.weight_decay > 0.1  # type: ignore[union-attr]
    short = ["steps=4", "batch.size=4096"]  # many epochs in four steps: too few for a strong decay
    for words, size in (([], few), (["optimizer=muon"], many), (["steps=100"], 10**7), (short, 10_000)):
        recipe, choices = settled(resolve("gpt-tiny", words), size, device)
        assert recipe.optimizer.weight_decay == 0.1  # type: ignore[union-attr]
        assert "optimizer.weight_decay" not in {choice.key for choice in choices}


def test_muons_iterations_are_part_of_the_budget() -> None:
    words = [["optimizer=muon", f"optimizer.rounds={rounds}"] for rounds in (1, 3, 9)]
    most, middle, fewest = (settled(resolve("gpt-tiny", changes), 10**7)[0].steps for changes in words)
    assert most > middle > fewest > 0.6 * most
    assert middle == pytest.approx((most + fewest) / 2, rel=0.2)
