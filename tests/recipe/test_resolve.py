"""From names, files, presets and changes to recipes, and what is wrong with them in one line."""

from pathlib import Path

import pytest

from weft.config import to_toml
from weft.data.config import FilesSplit, HashSplit
from weft.errors import ConfigError
from weft.models.presets import preset
from weft.recipe.optimizer import SGD, Cosine, Noam
from weft.recipe.resolve import recipe_names, resolve
from weft.text.config import BPE, Char


def test_a_preset_is_a_recipe() -> None:
    recipe = resolve("llama-tiny")
    assert recipe.name == "llama-tiny"
    assert recipe.model.kind == "decoder"
    assert recipe.steps is None


def test_every_shipped_recipe_resolves() -> None:
    assert "quickstart" in recipe_names()
    for name in recipe_names():
        assert resolve(name).name == name


def test_a_file_with_a_preset_and_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "my recipe.toml"
    file.write_text('steps = 5\n[model]\npreset = "llama-tiny"\nlayers = 3\n')
    recipe = resolve(str(file))
    assert (recipe.name, recipe.steps, recipe.model.layers, recipe.model.d_model) == ("my-recipe", 5, 3, 128)


def test_a_kind_or_preset_and_its_keys_come_in_any_order() -> None:
    words = ["tokenizer=char", "tokenizer.lowercase=true", "model=llama-tiny", "model.layers=2"]
    for order in (words, words[::-1]):
        recipe = resolve("gpt-tiny", order)
        assert recipe.tokenizer == Char(lowercase=True)
        assert recipe.model == preset("llama-tiny").replace(layers=2)
    assert resolve("bert-tiny", ["objective=contrastive", "objective.first=a"]).objective.first == "a"  # type: ignore[union-attr]


def test_pooling_is_that_of_the_objective(tmp_path: Path) -> None:
    words = ["objective=classify", "objective.pooling=mean"]
    assert resolve("bert-tiny", words).model.head.pooling == "mean"  # type: ignore[union-attr]
    (tmp_path / "config.toml").write_text(to_toml(resolve("bert-tiny", ["objective=classify"])))
    again = resolve("bert-tiny", [f"init={tmp_path}", *words])  # the head is there already
    assert again.model.head.pooling == "mean"  # type: ignore[union-attr]


def test_a_run_without_a_model_is_no_beginning(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("steps = 3\n")
    with pytest.raises(ConfigError, match=r"there is no model in its config\.toml"):
        resolve("gpt-tiny", [f"init={tmp_path}"])


def test_changes_are_laid_over() -> None:
    recipe = resolve("gpt-tiny", ["model.layers=2", "optimizer.lr=0.01", "schedule.floor=0.5", "batch.size=3"])
    assert recipe.model.layers == 2
    assert recipe.optimizer.kind == "adamw"
    assert recipe.optimizer.lr == 0.01
    assert recipe.schedule == Cosine(floor=0.5)
    assert recipe.batch.size == 3


def test_a_kind_may_be_named_alone() -> None:
    recipe = resolve("gpt-tiny", ["tokenizer=char", "optimizer=sgd", "schedule=noam", "model.position=none"][:3])
    assert recipe.tokenizer is not None
    assert recipe.tokenizer.kind == "char"
    assert isinstance(recipe.optimizer, SGD)
    assert isinstance(recipe.schedule, Noam)


def test_another_preset_replaces_the_model_whole() -> None:
    assert resolve("gpt-tiny", ["model=lstm"]).model == resolve("lstm").model
    changed = resolve("gpt-tiny", ["model.preset=lstm", "model.layers=1"]).model
    assert (changed.kind, changed.layers) == ("recurrent", 1)


def test_data_on_the_command_line_replaces_the_recipes(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('model = "gpt-tiny"\n[data]\nprepared = "x"\nvalidation = {kind = "tail", fraction = 0.2}\n')
    data = resolve(str(file), data=["a.txt", "b.txt"]).data
    assert data.sources == ("a.txt", "b.txt")
    assert data.prepared is None
    assert data.validation.kind == "tail"


def test_data_replaces_a_recipes_validation_files_too(tmp_path: Path) -> None:
    file, lines = tmp_path / "r.toml", list[str]()
    file.write_text(
        'model = "vaswani-tiny"\n[data]\nsources = ["a.en"]\ntargets = ["a.de"]\nencoding = "cp1252"\n'
        'on_error = "skip"\nvalidation = {kind = "files", sources = ["v.en"], targets = ["v.de"]}\n'
    )
    data = resolve(str(file), data=["b.tsv"], log=lines.append).data
    assert (data.sources, data.targets, data.encoding, data.on_error) == (("b.tsv",), (), "utf-8", "skip")
    assert data.validation == HashSplit()
    assert lines == ["data.validation = hash: the recipe's own files (v.en) went with its text; a tenth is held out"]
    lines.clear()
    given = ["data.validation.kind=files", 'data.validation.sources=["w.en"]', 'data.targets=["b.de"]']
    data = resolve(str(file), given, ["b.en"], lines.append).data
    assert data.validation == FilesSplit(sources=("w.en",))  # what is said beside --data wins
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
    ],
)
def test_what_names_nothing_is_one_clear_line(source: str, changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(source, changes)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_size_alone_leaves_a_models_own_kind_of_tokenizer() -> None:
    for name, kind in (("bert-tiny", "wordpiece"), ("gpt-tiny", "bpe")):
        tokenizer = resolve(name, ["tokenizer.vocab_size=300"]).tokenizer
        assert tokenizer is not None and (tokenizer.kind, tokenizer.vocab_size) == (kind, 300)  # type: ignore[union-attr]


def test_a_model_has_as_many_words_as_its_tokenizer_is_asked_for() -> None:
    assert resolve("quickstart").model.vocab_size == 4096  # its preset has 8,192
    assert resolve("gpt-tiny", ["tokenizer=bpe:1000"]).model.vocab_size == 1000
    rounded = resolve("gpt-tiny", ["tokenizer=bpe:1000", "model.vocab_size=1024"])
    assert rounded.model.vocab_size == 1024
    with pytest.raises(ConfigError, match=r"^tokenizer.vocab_size = -5: expected a number greater than or equal to 1$"):
        resolve("gpt-tiny", ["tokenizer=bpe", "tokenizer.vocab_size=-5"])
    pair = resolve("vaswani-tiny", ["tokenizer=bpe:1000", "source_tokenizer=bpe:700"])
    assert pair.model.model_dump(include={"vocab_size", "source_vocab_size"}) == {
        "vocab_size": 1000, "source_vocab_size": 700
    }  # fmt: skip


def test_a_tokenizers_kind_and_size_in_one_word() -> None:
    assert resolve("gpt-tiny", ["tokenizer=bpe:8000"]).tokenizer == BPE(vocab_size=8000)
    assert resolve("gpt-tiny", {"tokenizer": "char:50"}).tokenizer == Char(vocab_size=50)


def test_a_recipes_own_warmup_is_shortened_for_few_steps() -> None:
    lines: list[str] = []
    for source in ("dates", resolve("dates")):
        short = resolve(source, ["steps=50"], log=lines.append)
        assert (short.steps, short.schedule.warmup) == (50, 5)
        assert lines.pop() == "schedule.warmup = 5 instead of 500, which would be longer than the 50 steps"
    assert resolve("dates", ["steps=500"], log=lines.append).schedule.warmup == 500
    with pytest.raises(ConfigError, match=r"schedule\.warmup = 60 is longer than the 50 steps"):
        resolve("dates", ["steps=50", "schedule.warmup=60"])
    assert lines == []
