"""Settings of a comparison: from words, from a file, and with the varied settings expanded."""

from pathlib import Path

import pytest

from weft.compare.config import Experiment, contender, experiment, parse_vary, shipped_comparisons, tables_of
from weft.config import Tree, merge
from weft.costs.count import count
from weft.errors import ConfigError
from weft.models.config import Decoder
from weft.models.presets import preset
from weft.nn.position_config import Sinusoidal
from weft.recipe.config import Recipe
from weft.recipe.resolve import resolve

BASE: Tree = {"data": {"sources": ["book.txt"]}, "budget": {"flops": 1e12}}
ONE: Tree = {**BASE, "contenders": {"transformer": {"recipe": "transformer"}}}


def shipped(name: str) -> tuple[Experiment, list[Recipe]]:
    """Return a comparison that is shipped with weft, and the recipes of its contenders."""
    tree = tables_of(name)
    assert tree is not None and name in shipped_comparisons()
    found = experiment({**tree, **BASE})
    return found, [resolve(each.recipe, merge(found.settings, each.changes)) for each in found.contenders.values()]


def test_contenders_and_varied_settings_are_parsed() -> None:
    assert contender("transformer") == ("transformer", {"recipe": "transformer", "changes": {}})
    changes = {"model": {"d_model": 512}}
    assert contender("wide=lstm model.d_model=512") == ("wide", {"recipe": "lstm", "changes": changes})
    assert contender("step=lstm schedule.hold=9 schedule=step")[1]["changes"]["schedule"] == {"kind": "step", "hold": 9}
    assert contender("my/own.toml model.layers=2")[0] == "own,layers=2"
    assert contender("transformer++")[0] == "transformer++"  # distinct from transformer
    assert parse_vary("model.layers=2,4") == ("model.layers", [2, 4])
    assert parse_vary("model.placement=pre,post") == ("model.placement", ["pre", "post"])
    for wrong in ("model.layers", "model.layers=", "=2,4", "model.layers=2,,4"):
        with pytest.raises(ConfigError, match="expected KEY=VALUE,VALUE"):
            parse_vary(wrong)


def test_all_combinations_or_one_change_at_a_time() -> None:
    vary = {"model.placement": ["post", "pre"], "model.layers": [2, 4, 6]}
    full = experiment({**ONE, "vary": vary})
    assert list(full.contenders) == [f"{place},layers={layers}" for place in ("post", "pre") for layers in (2, 4, 6)]
    assert full.contenders["pre,layers=4"].changes == {"model": {"placement": "pre", "layers": 4}}
    assert full.contenders["pre,layers=4"].levels == {"placement": "pre", "layers": "4"}
    assert full.varied == {"placement": ("post", "pre"), "layers": ("2", "4", "6")}
    single = experiment({**ONE, "vary": vary, "grid": "one"})
    assert list(single.contenders) == ["transformer", "placement=pre", "layers=4", "layers=6"]
    moments = {"optimizer.betas": [[0.9, 0.99], [0.9, 0.95]]}
    assert list(experiment({**ONE, "vary": moments}).contenders) == ["betas=0.9,0.99", "betas=0.9,0.95"]


def test_the_four_switches_lead_from_one_preset_to_the_other() -> None:
    _, recipes = shipped("four-switches")
    assert len(recipes) == 16
    assert (recipes[0].model, recipes[-1].model) == (preset("transformer"), preset("transformer++"))


def test_efficiency_compares_the_presets_at_one_size() -> None:
    found, recipes = shipped("efficiency")
    base, newer = (recipe.model for recipe in recipes)
    assert found.baseline == "transformer" and list(found.contenders) == ["transformer", "transformer++"]
    assert isinstance(base, Decoder) and isinstance(newer, Decoder)
    assert (base.placement, newer.placement) == ("post", "pre")
    assert isinstance(base.position, Sinusoidal) and base.position.amplitude == base.d_model**-0.5
    assert count(base).parameters == pytest.approx(count(newer).parameters, rel=0.01)


def test_the_minutes_lead_from_adamw_to_the_recipe_python_docs() -> None:
    """Each contender adds one change to the one before it; the last adds one to the recipe."""
    _, recipes = shipped("minutes")
    adamw, muon, untied, words, last, pairs = recipes
    assert [recipe.optimizer and recipe.optimizer.kind for recipe in recipes] == ["adamw", *["muon"] * 5]
    assert adamw.model == muon.model
    assert untied.model == muon.model.replace(head={"kind": "lm", "tied": False})
    assert (untied.model.vocab_size, words.model.vocab_size) == (2048, 4096)
    assert untied.model.replace(vocab_size=4096) == words.model
    d_ff = {**words.model.feedforward.model_dump(), "d_ff": 192}  # type: ignore[union-attr]
    assert words.model.replace(feedforward=d_ff) == last.model
    assert last.model.replace(ngrams={"rows": 16_384}) == pairs.model
    for recipe in (muon, untied, words, pairs):
        assert (recipe.optimizer, recipe.schedule, recipe.batch) == (last.optimizer, last.schedule, last.batch)
    assert (words.tokenizer, resolve("python-docs")) == (last.tokenizer, last.replace(name="python-docs"))


def test_tricks_decay_and_dropout_are_changes_to_python_docs() -> None:
    found, (first, *others) = shipped("tricks")
    assert first == resolve("python-docs") and first not in others
    levels = [each.levels for each in found.contenders.values()]
    assert all(sum(level != levels[0][key] for key, level in other.items()) == 1 for other in levels[1:])
    assert {"python-docs", "rounds=2", "betas=0.9,0.95", "attention=qk_norm.kind=rms"} <= found.contenders.keys()
    found, _ = shipped("epochs")
    assert found.settings == {"data": {"tokens": 60_000}}
    assert resolve("python-docs", found.contenders["weight_decay=0.1,dropout=0.0"].changes) == resolve("python-docs")
    assert len({repr(each.changes) for each in found.contenders.values()}) == 8


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'data = "book.txt"\nbudget = { tokens = 1000 }\nseeds = 2\n'
        '[contenders]\nsmall = "gpt-tiny"\nlarge = { recipe = "gpt-tiny", model.layers = 8 }\n'
    )
    tree = tables_of(str(path))
    assert tree is not None
    found = experiment(tree)
    assert found.contenders["large"].changes == {"model": {"layers": 8}}
    assert found.data.sources == ("book.txt",)
    assert found.shares == pytest.approx([1 / 27, 1 / 9, 1 / 3, 1])
    assert tables_of("gpt-tiny") is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"budget": {}}, "expected one of flops, tokens and minutes"),
        ({"budget": {"flops": 1e9, "minutes": 1}}, "found flops and minutes"),
        ({"budget": {"flops": -1}}, "budget.flops"),
        ({"seeds": 0}, "seeds = 0"),
        ({"baseline": "gpt"}, "baseline = 'gpt': not one of transformer"),
        ({"vary": {"model.layers": [2]}}, "vary.model.layers: give two values"),
        ({"vary": {"model.layers": [2, 2]}}, "two values of one setting are the same"),
        ({"runs": 4}, "runs"),
    ],
)
def test_mistakes_are_reported_in_one_line(changes: Tree, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        experiment({**ONE, **changes})
    assert "\n" not in str(caught.value)
