"""What is chosen for small and large texts, and that a choice never overrides the recipe."""

from dataclasses import replace

import pytest

from weft.errors import ConfigError
from weft.models.config import NGram
from weft.recipe.config import Recipe, SettledRecipe
from weft.recipe.resolve import resolve
from weft.recipe.settle import Choice, Facts, choose_tokenizer, settle
from weft.text.config import Byte, TokenizerConfig


def facts(size: int, tokenizer: TokenizerConfig, vocab_size: int | None = None) -> Facts:
    """A text of so many bytes, and a tokenizer that found as many tokens as it was asked for."""
    return Facts(size, vocab_size or getattr(tokenizer, "vocab_size", None) or 257)


def settled(recipe: Recipe, size: int, device: str = "cpu") -> tuple[SettledRecipe, list[Choice]]:
    """Both halves, as `weft train` goes through them."""
    tokenizer, chosen = choose_tokenizer(recipe, size, device)
    done, more = settle(recipe.replace(tokenizer=tokenizer.model_dump()), facts(size, tokenizer), device)
    return done, [*chosen, *more]


@pytest.mark.parametrize("size", [300, 20_000, 1_100_000, 90_000_000])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("preset", ["gpt-tiny", "llama-mini", "lstm", "gpt2", "ngram-3", "llama-7b"])
def test_nothing_is_left_open_whatever_the_text(preset: str, size: int, device: str) -> None:
    recipe, choices = settled(resolve(preset), size, device)
    assert all(choice.why for choice in choices)
    if not isinstance(recipe.model, NGram):
        assert recipe.batch.size is not None and recipe.optimizer.lr is not None
    again = settle(recipe, facts(size, recipe.tokenizer), device)
    assert again == (recipe, []) or device == "cuda"


def test_choosing_for_a_settled_recipe_chooses_nothing() -> None:
    recipe, _ = settled(resolve("gpt-tiny"), 1_000_000)
    assert choose_tokenizer(recipe, 5_000) == (recipe.tokenizer, [])


def test_the_recipe_has_the_last_word() -> None:
    words = ["steps=77", "batch.size=5", "batch.length=64", "optimizer.lr=0.5", "tokenizer=char", "log.every=9"]
    recipe, choices = settled(resolve("gpt-tiny", words), 1_000_000)
    assert (recipe.steps, recipe.batch.size, recipe.batch.length) == (77, 5, 64)
    assert recipe.optimizer.lr == 0.5
    assert recipe.tokenizer.kind == "char"
    assert not {"steps", "batch.size", "optimizer.lr", "tokenizer"} & {choice.key for choice in choices}


def test_no_learning_rate_is_shown_for_what_is_counted() -> None:
    recipe, choices = settled(resolve("ngram-3"), 1_000_000)
    assert recipe.optimizer.lr is not None
    keys = [choice.key for choice in choices]
    assert keys == ["tokenizer", "tokenizer.vocab_size", "steps", "batch.length", "model.vocab_size"]


def test_more_text_has_a_larger_vocabulary() -> None:
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
    marks = tokenizer.specials.extra  # type: ignore[union-attr]
    assert len(marks) == recipe.objective.sentinels  # what was cut out of a text needs marks


def test_larger_models_learn_slower() -> None:
    presets = [resolve(name, ["optimizer=adamw"]) for name in ("gpt-tiny", "gpt2", "gpt3-6.7b")]
    rates = [settled(preset, 10**8, "cuda")[0].optimizer.lr for preset in presets]
    assert rates == sorted(rates, reverse=True)  # type: ignore[type-var]
    assert rates[1] == pytest.approx(6e-4, rel=0.2)  # GPT-3's table for 125 M


def test_the_model_takes_the_tokenizers_vocabulary() -> None:
    recipe, choices = settle(resolve("gpt-tiny", ["tokenizer=byte"]), facts(10**6, Byte(), 300))
    assert recipe.model.vocab_size == 300
    assert choices[-1].key == "model.vocab_size"
    _, choices = settle(resolve("gpt-tiny", ["tokenizer=byte", "model.vocab_size=1"]), facts(10**6, Byte(), 330))
    assert choices[-1].why == "as many as the tokenizer has, instead of the 1 in the recipe"
    # a table that was rounded up for the kernels stays as it is
    padded, choices = settle(resolve("gpt-tiny", ["tokenizer=byte", "model.vocab_size=384"]), facts(10**6, Byte(), 330))
    assert padded.model.vocab_size == 384
    assert "model.vocab_size" not in [choice.key for choice in choices]


def test_a_source_with_its_own_vocabulary_has_a_table_of_its_own() -> None:
    recipe = resolve("vaswani-tiny", ["source_tokenizer=char", "tokenizer=byte"])
    done, choices = settle(recipe, Facts(10**5, 300, source_vocab_size=40, rows=900))
    assert (done.model.vocab_size, done.model.source_vocab_size) == (300, 40)  # type: ignore[union-attr]
    assert [choice.key for choice in choices][-2:] == ["model.vocab_size", "model.source_vocab_size"]


def test_the_head_has_an_output_for_each_label() -> None:
    recipe = resolve("bert-tiny", ["objective=classify", "tokenizer=byte"])
    done, choices = settle(recipe, Facts(10**5, 300, rows=900, labels=("bad", "good", "odd")))
    assert done.objective.labels == ("bad", "good", "odd")  # type: ignore[attr-defined]
    assert done.model.head.labels == 3  # type: ignore[union-attr]
    assert "objective.labels = bad, good, odd: those of the training rows" in map(str, choices)
    given = resolve("bert-tiny", ["objective=classify", "tokenizer=byte", 'objective.labels=["a", "b", "c", "d"]'])
    assert settle(given, Facts(10**5, 300, rows=900))[0].model.head.labels == 4  # type: ignore[union-attr]


def test_a_model_that_cannot_learn_the_objective_is_refused() -> None:
    both_sides = resolve("bert-tiny", ["objective=next-token"])
    with pytest.raises(
        ConfigError, match=r"model\.kind = 'encoder': objective 'next-token' needs a model of kind decoder"
    ):
        both_sides.objective.check(both_sides.model)
    words = resolve("bert-tiny", ["objective=masked+next"])
    other_head = words.model.replace(head={"kind": "mlm"})
    with pytest.raises(
        ConfigError, match=r"model\.head\.kind = 'mlm': objective 'masked\+next' needs .* of kind mlm.nsp"
    ):
        words.objective.check(other_head)


@pytest.mark.parametrize("steps", [2, 10, 40, 200, 2000, 20_000])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_evaluations_cost_a_tenth_of_the_training(steps: int, device: str) -> None:
    """A token costs three times as much in training as in evaluation; each evaluation reads the same tokens."""
    recipe, choices = settled(resolve("gpt-tiny", [f"steps={steps}"]), 1_000_000, device)
    times = -(-steps // recipe.evaluate.every)
    assert 2 <= times <= 10
    read = times * recipe.evaluate.tokens  # type: ignore[operator]
    trained = steps * recipe.batch.size * recipe.batch.length  # type: ignore[operator]
    assert read / 3 <= 0.1 * trained
    assert read / 3 >= 0.005 * trained  # and no less than is useful
    assert {"evaluate.every", "evaluate.tokens"} <= {choice.key for choice in choices}


def test_evaluations_of_rows_and_of_adapters_cost_a_tenth_too() -> None:
    rows = resolve("bert-tiny", ["objective=classify", "tokenizer=byte", "steps=100", "batch.size=16"])
    recipe, _ = settle(rows, Facts(90_000, 300, rows=900, labels=("a", "b")))
    times = -(-100 // recipe.evaluate.every)
    assert times * recipe.evaluate.tokens / 3 <= 0.1 * 100 * 16 * 100  # type: ignore[operator]
    whole = resolve("gpt-tiny", ["tokenizer=byte", "steps=100"]).replace(init="x")
    lora = whole.replace(adapter={"rank": 4})
    small, large = (settle(each, Facts(10**6, 257))[0].evaluate.tokens for each in (lora, whole))
    assert small == pytest.approx(large * 2 / 3, abs=1)  # type: ignore[operator]


def test_what_is_said_of_evaluations_is_kept() -> None:
    both = ["tokenizer=byte", "steps=40", "evaluate.every=4", "evaluate.tokens=32768"]
    recipe, choices = settle(resolve("gpt-tiny", both), Facts(10**6, 257))
    assert (recipe.evaluate.every, recipe.evaluate.tokens) == (4, 32768)
    assert not [choice for choice in choices if choice.key.startswith("evaluate")]
    often, _ = settle(resolve("gpt-tiny", both[:3]), Facts(10**6, 257))
    per_step = often.batch.size * often.batch.length  # type: ignore[operator]
    assert often.evaluate.tokens * 10 / 3 <= 0.1 * 40 * per_step  # type: ignore[operator]


def test_checkpoints_come_with_the_evaluations() -> None:
    recipe, _ = settled(resolve("gpt-tiny", ["steps=1000", "evaluate.every=250"]), 1_000_000)
    assert recipe.checkpoint.every == 250


def test_an_amount_of_data_is_given_in_words() -> None:
    assert str(Facts(1_115_394, 257)) == "1.1 MB of text"
    assert str(Facts(800, 257)) == "800 bytes of text"
    assert str(Facts(800, 257, rows=12_000)) == "12,000 rows"


@pytest.mark.parametrize(
    ("bf16", "chosen", "why"),
    [
        (747e9, "bf16", "this processor multiplies it 3.4 times as fast as fp32 (747 against 217 GFLOP/s)"),
        (300e9, "fp32", "this processor multiplies bf16 hardly faster (300 against 217 GFLOP/s)"),
        (0.12e9, "fp32", "this processor multiplies bf16 no faster (0.12 against 217 GFLOP/s)"),
        (0.0, "fp32", "this processor multiplies bf16 no faster (0 against 217 GFLOP/s)"),
    ],
)
def test_the_number_format_follows_what_the_processor_multiplies_fast(bf16: float, chosen: str, why: str) -> None:
    asked: list[tuple[int, int, int]] = []

    def measure(rows: int, inputs: int, outputs: int) -> dict[str, float]:
        asked.append((rows, inputs, outputs))
        return {"fp32": 217e9, "bf16": bf16}

    words = ["tokenizer=byte", "model.d_model=384", "model.attention.heads=6", "model.feedforward.d_ff=1536"]
    words += ["batch.size=8", "batch.micro=4", "batch.length=128"]
    recipe, choices = settle(resolve("gpt-tiny", words), Facts(10**6, 257), "cpu", measure)
    assert recipe.precision == chosen
    assert asked == [(4 * 128, 384, 1536)]  # a pass of the run's own products
    assert [choice.why for choice in choices if choice.key == "precision"] == [why]
    assert settle(recipe, Facts(10**6, 257), "cpu", measure)[0].precision == chosen  # a run keeps what was chosen
    assert len(asked) == 1


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
def test_nothing_is_measured_where_it_would_change_nothing(preset: str, words: list[str], device: str) -> None:
    def measure(rows: int, inputs: int, outputs: int) -> dict[str, float]:
        raise AssertionError((rows, inputs, outputs))

    recipe, _ = settle(resolve(preset, ["tokenizer=byte", *words]), Facts(10**6, 257), device, measure)
    assert recipe.precision == ("fp32" if device == "cpu" else "bf16")


def test_the_rate_follows_how_far_the_weights_were_trained() -> None:
    """What has read little learns a task as fresh weights do; a published model, whose tokens nobody knows, gently."""
    fresh = resolve("bert-tiny", ["tokenizer=byte", "objective=classify"])
    rows = Facts(10_000, 256, rows=600, labels=("a", "b"))

    def chosen(recipe: Recipe, trained: int | None = None) -> SettledRecipe:
        return settle(recipe, replace(rows, trained=trained))[0]

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
        ("gpt2-xl", (), "cuda", "adamw"),  # wider than any that it was tried with
        ("vaswani-tiny", ("schedule=cosine",), "cuda", "adamw"),  # norms behind the sums
        ("vaswani-tiny", ("schedule=cosine", "model.placement=pre"), "cuda", "muon"),
        ("gpt-mini", (), "cpu", "adamw"),  # so wide that the rounds would take longer than the rest of a step
        ("transformer", (), "cpu", "adamw"),  # norms behind the sums
        ("lstm", (), "cpu", "adamw"),
        ("ngram-3", (), "cpu", "adamw"),
        ("gpt-tiny", ("schedule=noam",), "cpu", "adamw"),  # which sets the rate itself, for Adam
        ("gpt-tiny", ("parallel.shard=2",), "cpu", "adamw"),
        ("gpt-tiny", ("optimizer.lr=0.001",), "cpu", "adamw"),
        ("gpt-tiny", ("optimizer=sgd",), "cpu", "sgd"),
    ],
)
def test_an_optimizer_that_is_left_open_suits_the_run(
    preset: str, words: tuple[str, ...], device: str, kind: str
) -> None:
    recipe, choices = settled(resolve(preset, words), 1_000_000, device)
    assert recipe.optimizer.kind == kind
    said = "optimizer" in {choice.key for choice in choices}
    assert said == (preset != "ngram-3" and not any("optimizer" in word for word in words))


def test_weights_that_were_trained_before_keep_to_adamw() -> None:
    fresh = resolve("gpt-tiny", ["tokenizer=byte"])
    assert [settle(each, Facts(10**6, 257))[0].optimizer.kind for each in (fresh, fresh.replace(init="x"))] == [
        "muon",
        "adamw",
    ]


@pytest.mark.parametrize(("device", "many", "few"), [("cpu", 100_000, 200_000), ("cuda", 10_000_000, 10**9)])
def test_weights_forget_where_a_text_is_read_many_times(device: str, many: int, few: int) -> None:
    recipe, choices = settled(resolve("gpt-tiny"), many, device)
    rate, decay = recipe.optimizer.lr or 0.0, recipe.optimizer.weight_decay  # type: ignore[union-attr]
    assert rate * decay * recipe.steps == pytest.approx(5, rel=0.05)
    (choice,) = (choice for choice in choices if choice.key == "optimizer.weight_decay")
    assert "times" in choice.why
    part, _ = settled(resolve("gpt-tiny", ["data.tokens=20000"]), few, device)  # as if that were all
    assert part.optimizer.weight_decay > 0.1  # type: ignore[union-attr]
    short = ["steps=4", "batch.size=4096"]  # as many times in four steps: each would undo more than all that is there
    for words, size in (([], few), (["optimizer=muon"], many), (["steps=100"], 10**7), (short, 10_000)):
        recipe, choices = settled(resolve("gpt-tiny", words), size, device)
        assert recipe.optimizer.weight_decay == 0.1  # type: ignore[union-attr]
        assert "optimizer.weight_decay" not in {choice.key for choice in choices}


def test_the_rounds_of_muon_take_their_part_of_the_time() -> None:
    """A run of a chosen length lasts as long with them: more rounds, fewer steps."""
    words = [["optimizer=muon", f"optimizer.rounds={rounds}"] for rounds in (1, 3, 9)]
    few, some, many = (settled(resolve("gpt-tiny", each), 10**7)[0].steps for each in words)
    assert few > some > many > 0.6 * few
    assert some == pytest.approx((few + many) / 2, rel=0.2)
