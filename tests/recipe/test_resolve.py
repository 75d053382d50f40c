"""Names, files, presets and overrides resolve to recipes, and mistakes are reported in one line."""

import tomllib
from pathlib import Path

import pytest

from weft.config import to_toml, validate
from weft.data.config import FilesSplit, HashSplit
from weft.errors import ConfigError
from weft.models.presets import preset
from weft.recipe.config import Recipe
from weft.recipe.objective import Contrastive
from weft.recipe.optimizer import SGD, AdamW, Cosine, Noam
from weft.recipe.resolve import recipe_names, resolve
from weft.text.config import BPE, Char, WordPiece


def test_a_preset_is_a_recipe_and_every_shipped_recipe_resolves() -> None:
    recipe = resolve("llama-tiny")
    assert (recipe.name, recipe.model.kind, recipe.steps) == ("llama-tiny", "decoder", None)
    assert "quickstart" in recipe_names()
    for name in recipe_names():
        assert resolve(name).name == name


def test_toml_round_trip() -> None:
    recipe = resolve("llama-tiny", ["optimizer.clip=0", "steps=7", "tokenizer.vocab_size=300"], ["x.txt"])
    assert validate(Recipe, tomllib.loads(to_toml(recipe))) == recipe


def test_a_file_overrides_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "my recipe.toml"
    file.write_text('steps = 5\n[model]\npreset = "llama-tiny"\nlayers = 3\n')
    recipe = resolve(str(file))
    assert (recipe.name, recipe.steps, recipe.model) == ("my-recipe", 5, preset("llama-tiny").replace(layers=3))


def test_a_kind_or_preset_and_its_keys_come_in_any_order() -> None:
    words = ["tokenizer=char", "tokenizer.lowercase=true", "model=llama-tiny", "model.layers=2"]
    for order in (words, words[::-1]):
        recipe = resolve("gpt-tiny", order)
        assert recipe.tokenizer == Char(lowercase=True)
        assert recipe.model == preset("llama-tiny").replace(layers=2)
    objective = resolve("bert-tiny", ["objective=contrastive", "objective.first=a"]).objective
    assert objective == Contrastive(first="a")


def test_the_objective_sets_the_pooling(tmp_path: Path) -> None:
    words = ["objective=classify", "objective.pooling=mean"]
    (tmp_path / "config.toml").write_text(to_toml(resolve("bert-tiny", ["objective=classify"])))
    for changes in (words, [f"init={tmp_path}", *words]):  # with a new head, and with the head of an earlier run
        assert resolve("bert-tiny", changes).model.head.pooling == "mean"  # type: ignore[union-attr]


def test_init_needs_a_run_with_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("steps = 3\n")
    with pytest.raises(ConfigError, match=r"there is no model in its config\.toml"):
        resolve("gpt-tiny", [f"init={tmp_path}"])


def test_overrides_are_applied() -> None:
    recipe = resolve("gpt-tiny", ["model.layers=2", "optimizer.lr=0.01", "schedule.floor=0.5", "batch.size=3"])
    assert recipe.model == preset("gpt-tiny").replace(layers=2)
    assert (recipe.optimizer, recipe.schedule, recipe.batch.size) == (AdamW(lr=0.01), Cosine(floor=0.5), 3)
    # a kind may be named alone
    recipe = resolve("gpt-tiny", ["tokenizer=char", "optimizer=sgd", "schedule=noam"])
    assert (recipe.tokenizer, recipe.optimizer, recipe.schedule) == (Char(), SGD(), Noam())


def test_another_preset_replaces_the_model() -> None:
    assert resolve("gpt-tiny", ["model=lstm"]).model == resolve("lstm").model
    assert resolve("gpt-tiny", ["model.preset=lstm", "model.layers=1"]).model == preset("lstm").replace(layers=1)


def test_data_on_the_command_line_replaces_the_recipes(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('model = "gpt-tiny"\n[data]\nprepared = "x"\nvalidation = {kind = "tail", fraction = 0.2}\n')
    data = resolve(str(file), data=["a.txt", "b.txt"]).data
    assert (data.sources, data.prepared, data.validation.kind) == (("a.txt", "b.txt"), None, "tail")


def test_data_replaces_a_recipes_validation_files_too(tmp_path: Path) -> None:
    file, lines = tmp_path / "r.toml", list[str]()
    file.write_text(
        'model = "vaswani-tiny"\n[data]\nsources = ["a.en"]\ntargets = ["a.de"]\nencoding = "cp1252"\n'
        'on_error = "skip"\nvalidation = {kind = "files", sources = ["v.en"], targets = ["v.de"]}\n'
    )
    data = resolve(str(file), data=["b.tsv"], log=lines.append).data
    assert (data.sources, data.targets, data.encoding, data.on_error) == (("b.tsv",), (), "utf-8", "skip")
    assert data.validation == HashSplit()
    hash_split = "data.validation = hash: a tenth is held out"
    assert lines == [f"{hash_split}; the recipe's validation files (v.en) go with its text"]
    lines.clear()
    changes = ["data.validation.kind=files", 'data.validation.sources=["w.en"]', 'data.targets=["b.de"]']
    data = resolve(str(file), changes, ["b.en"], log=lines.append).data
    assert data.validation == FilesSplit(sources=("w.en",))  # an override next to --data wins
    assert (data.targets, lines) == (("b.de",), [])
    assert resolve(str(file)).data.validation == FilesSplit(sources=("v.en",), targets=("v.de",))


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("llama-tny", [], r"'llama-tny': no such recipe or preset; did you mean 'llama-tiny'"),
        ("quikstart", [], "did you mean 'quickstart'"),
        ("nothing.toml", [], r"nothing\.toml: no such recipe"),
        ("gpt-tiny", ["model=gpt3"], "'gpt3': no such preset"),
        ("gpt-tiny", ["model=3"], "model = 3: expected a table"),
        ("gpt-tiny", ["data=3"], "data = 3: expected a table"),
        ("gpt-tiny", ["objective=3"], "objective = 3: expected a table"),
        ("bert-tiny", ["model.head=3"], r"model\.head = 3: expected a table"),
        ("gpt-tiny", ["objective.kind=[1]"], r"objective\.kind = \[1\]: expected a kind's name"),
        ("gpt-tiny", ["model.lyers=3"], r"model\.lyers: unknown key; did you mean 'model.layers'"),
        ("gpt-tiny", ["optimiser.lr=3"], "optimiser.lr: unknown key; it is 'optimizer.lr' here"),
        ("gpt-tiny", ["optimizer.learning=3"], r"optimizer\.learning: unknown key"),
        ("gpt-tiny", ["optimizer.kind=adamx"], r"optimizer\.kind = 'adamx': unknown kind; did you mean 'adam"),
        ("gpt-tiny", ["precision=fp33"], "precision = 'fp33': did you mean 'fp32'"),
        ("gpt-tiny", ["steps=0"], r"steps = 0: expected"),
        ("gpt-tiny", ["steps=ten"], r"steps = 'ten': expected"),
        ("gpt-tiny", ["schedule=noam", "optimizer.lr=0.1"], "the noam schedule sets the learning rate"),
        ("gpt-tiny", ["steps=10", "schedule.warmup=20"], r"schedule\.warmup = 20 is longer"),
        ("dates", ["steps=50", "schedule.warmup=60"], r"schedule\.warmup = 60 is longer than the 50 steps"),
        ("gpt-tiny", ["batch.size=2", "batch.micro=3"], r"batch\.micro = 3 is more"),
        ("gpt-tiny", ["batch.length=4096"], r"batch\.length = 4096: the model's positions end at"),
        ("gpt-tiny", ["name=a/b"], "name = 'a/b'"),
        ("gpt-tiny", ["tokenizer.vocab_size=-5"], "^tokenizer.vocab_size = -5: expected a number greater than or"),
    ],
)
def test_mistakes_are_reported_in_one_line(source: str, changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(source, changes)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_size_alone_keeps_the_models_kind_of_tokenizer() -> None:
    for name, tokenizer in (("bert-tiny", WordPiece(vocab_size=300)), ("gpt-tiny", BPE(vocab_size=300))):
        assert resolve(name, ["tokenizer.vocab_size=300"]).tokenizer == tokenizer
    assert resolve("gpt-tiny", ["tokenizer=bpe:8000"]).tokenizer == BPE(vocab_size=8000)  # both in one word
    assert resolve("gpt-tiny", {"tokenizer": "char:50"}).tokenizer == Char(vocab_size=50)


def test_the_model_has_the_vocabulary_size_of_its_tokenizer() -> None:
    assert resolve("python-docs").model.vocab_size == 4096  # its preset has 8,192
    assert resolve("gpt-tiny", ["tokenizer=bpe:1000"]).model.vocab_size == 1000
    padded = resolve("gpt-tiny", ["tokenizer=bpe:1000", "model.vocab_size=1024"])
    assert padded.model.vocab_size == 1024
    pair = resolve("vaswani-tiny", ["tokenizer=bpe:1000", "source_tokenizer=bpe:700"]).model
    assert (pair.vocab_size, pair.source_vocab_size) == (1000, 700)  # type: ignore[union-attr]


def test_a_recipes_warmup_is_shortened_for_few_steps() -> None:
    lines: list[str] = []
    for source in ("dates", resolve("dates")):
        short = resolve(source, ["steps=50"], log=lines.append)
        assert (short.steps, short.schedule.warmup) == (50, 5)
        assert lines.pop() == "schedule.warmup = 5 instead of 500, which would be longer than the 50 steps"
    assert resolve("dates", ["steps=500"], log=lines.append).schedule.warmup == 500
    assert lines == []
