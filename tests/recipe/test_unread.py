"""Settings without effect are refused before anything is read or written."""

from pathlib import Path

import pytest

from weft.api import train as api
from weft.cli.main import run
from weft.config import Tree
from weft.errors import ConfigError
from weft.recipe.resolve import recipe_names, resolve
from weft.recipe.unread import refuse_unread

NONE = "data.validation.kind=none"
Capture = pytest.CaptureFixture[str]


def text(folder: Path) -> str:
    (folder / "book.txt").write_text("".join(f"the cat sat on mat number {n}\n" for n in range(400)))
    return str(folder / "book.txt")


@pytest.mark.parametrize(
    ("recipe", "words", "line"),
    [
        ("gpt-tiny", ['data.targets=["x"]'], "data.targets: objective 'next-token' learns from text only"),
        ("gpt-tiny", ["data.on_error=skip"], "data.on_error = 'skip': objective 'next-token' reads running text"),
        ("bert-tiny", ["data.on_error=skip"], "objective 'masked+next' reads running text"),
        ("bert-tiny", ["data.document_mask=true"], "data.document_mask: objective 'masked+next'"),
        ("vaswani-tiny", ["objective=spans", "data.document_mask=true"], "data.document_mask: objective 'spans'"),
        ("bert-tiny", ["objective=classify", "data.column=a"], "data.column = 'a': objective 'classify' names"),
        ("gpt-tiny", ["data.prepared=folder", NONE], "data.validation: a prepared folder has its own held-out split"),
        ("gpt-tiny", ["source_tokenizer=char"], "source_tokenizer: objective 'next-token' has no separate source"),
        ("vaswani-tiny", ["objective=spans", "source_tokenizer=char"], "source_tokenizer: objective 'spans'"),
        ("vaswani-tiny", ["objective.r_drop=2", "model.dropout=0"], "objective.r_drop = 2.0: two passes differ by"),
        ("gpt-tiny", ["evaluate.patience=3", NONE], "evaluate.patience = 3: nothing is held out"),
        ("gpt-tiny", ["evaluate.every=2", NONE], "evaluate.every = 2: nothing is held out"),
        ("gpt-tiny", ["evaluate.tokens=99", NONE], "evaluate.tokens = 99: nothing is held out"),
        ("gpt-tiny", ["evaluate.metric=perplexity", NONE], "evaluate.metric = 'perplexity': nothing is held out"),
        ("gpt-tiny", ["checkpoint.average=2", NONE], "checkpoint.average = 2: nothing is held out"),
        ("gpt-tiny", ["evaluate.metric=perplexty"], "'next-token' has no such metric; did you mean 'perplexity'?"),
        ("bert-tiny", ["objective=classify", "evaluate.metric=bleu"], "'classify' has no such metric; available:"),
        ("gpt-tiny", ["seed=9223372036854775807"], "seed = 9223372036854775807: expected at most"),
        ("ngram-3", ["steps=10"], "steps = 10: an n-gram model is counted in one pass"),
        ("ngram-3", ["objective.smoothing=0.1"], "objective.smoothing: an n-gram model is counted"),
        ("ngram-3", ["objective.z_loss=0.1"], "objective.z_loss: an n-gram model is counted"),
        ("ngram-3", ["evaluate.patience=2"], "evaluate.patience: an n-gram model is counted"),
        ("ngram-3", ["checkpoint.average=2"], "checkpoint.average: an n-gram model is counted"),
        ("ngram-3", ['data.mixture=[{sources=["a"]}]'], "data.mixture: an n-gram model counts one text"),
    ],
)
def test_settings_without_effect_are_refused(recipe: str, words: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unread(resolve(recipe, words))
    assert line in str(caught.value)


def test_every_setting_of_the_shipped_recipes_has_an_effect() -> None:
    for name in recipe_names():
        refuse_unread(resolve(name))


def test_refused_before_the_run_folder_exists(tmp_path: Path, capsys: Capture) -> None:
    book, folder = text(tmp_path), tmp_path / "run"
    assert run(["train", "gpt-tiny", "--data", book, "--targets", book, "--run", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("weft: data.targets: objective 'next-token' learns from text only")
    assert not folder.exists()


def test_n_grams_take_no_initial_weights_and_adapters_a_limited_rank(tmp_path: Path) -> None:
    book = text(tmp_path)
    small: Tree = {"model": {"layers": 1, "d_model": 16, "attention": {"heads": 2}, "feedforward": {"d_ff": 16}}}
    small |= {"steps": 1, "batch": {"length": 16, "size": 2}}
    for recipe, changes in (("ngram-3", Tree()), ("gpt-tiny", small)):
        api.train(recipe, data=book, run=tmp_path / recipe, changes=changes, log=lambda line: None)
    with pytest.raises(ConfigError, match="is counted in one pass, from scratch"):
        refuse_unread(resolve("ngram-3", {"init": str(tmp_path / "ngram-3")}))
    adapted = {"init": str(tmp_path / "gpt-tiny"), "adapter": {"kind": "lora", "rank": 17}}
    with pytest.raises(ConfigError, match=r"adapter\.rank = 17: no matrix of this model has a higher rank than 16"):
        refuse_unread(resolve("gpt-tiny", adapted))


def test_a_failed_start_leaves_no_folder(tmp_path: Path, capsys: Capture) -> None:
    small = ["model.layers=1", "model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=16", "steps=2"]
    small += ["batch.length=16", "batch.size=2", "tokenizer=byte"]
    folder = tmp_path / "run"
    assert run(["train", "gpt-tiny", "--data", text(tmp_path), "--run", str(folder), *small, "precision=fp8"]) == 2
    assert "precision = 'fp8'" in capsys.readouterr().err.splitlines()[-1]
    assert not folder.exists()
