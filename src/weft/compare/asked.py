"""What a command asks for, as a comparison's file would have it: contenders in words, values to vary, tokenizers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from weft.compare.config import Experiment, experiment, plain, tables_of
from weft.config import Tree, assignments, flat, merge, validate
from weft.data.config import Data, TextSource
from weft.errors import ConfigError, suggestion
from weft.models.presets import PRESETS
from weft.recipe.resolve import changed_tables, recipe_names, run_name
from weft.text.config import KINDS, Byte, TokenizerConfig, TrainedConfig
from weft.text.tokenizer import Tokenizer

LONGEST = 80  # characters of a folder's name


@dataclass(frozen=True)
class Asked:
    """The words and options of a command.

    `words` are contenders, or the one file or name of a comparison, and key=value settings for all of them. `options`
    are keys of an experiment; what is None there or in the `budget` wasn't given.
    """

    words: Sequence[str] = ()
    data: Sequence[str] = ()
    vary: Sequence[str] = ()
    tokenizers: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: Mapping[str, float | None] = field(default_factory=dict)

    @cached_property
    def named(self) -> list[str]:
        """The contenders."""
        return [word for word in self.words if "=" not in word.split(" ")[0] or _names_a_recipe(word)]

    @property
    def folder(self) -> str:
        """A name for what comes out."""
        return run_name("-".join(_stem(word.split(" ")[0]) for word in self.named))[:LONGEST]

    def comparison(self) -> Experiment:
        """An experiment with two contenders or more."""
        if not self.named:
            raise ConfigError(
                "compare what? give two presets or recipes or more, for instance: weft compare lstm transformer"
            )
        wanted = self.experiment()
        if len(wanted.contenders) < 2:
            raise ConfigError(
                f"{self.named[0]}: compared with what? name another contender, or vary a setting with --vary"
            )
        return wanted

    def experiment(self) -> Experiment:
        """Everything that was asked for, with what is varied written out."""
        file = tables_of(self.named[0]) if len(self.named) == 1 else None
        tree: Tree = {"budget": {}, "data": {}, **(file if file is not None else self._contenders())}
        above, vary = self._settings(), dict[str, list[Any]]()
        if "data" in above:  # the text is everybody's
            tree["data"] = merge(tree["data"], above.pop("data"))
        if above:
            tree["settings"] = merge(tree.get("settings", {}), above)
        for key, values in map(varied, self.vary):
            if key in vary:
                raise ConfigError(f"--vary {key}: given twice; give all of its values at once")
            vary[key] = values
        if vary:
            tree["vary"] = vary
        if self.tokenizers:
            tree["contenders"] = _with_tokenizers(tree["contenders"], self.tokenizers)
        tree |= _given(self.options)
        if _given(self.budget):
            tree["budget"] = _given(self.budget)
        return experiment(tree, self.named[0] if file is not None else "")

    def text(self) -> TextSource:
        """The text alone, where no model is named."""
        above = self._settings()
        read = validate(Data, above.pop("data", {}))
        if above:
            raise ConfigError(
                f"{next(iter(above))}: a model's setting, and no model is named; weft compare MODEL --tokenizers"
            )
        if not read.sources:
            raise ConfigError("there is no text to compare on; give it with --data, for instance --data book.txt")
        return read.text(read.parts[0])

    def _settings(self) -> Tree:
        """What is set for all contenders, the text among it."""
        above = changed_tables([word for word in self.words if word not in self.named])
        if not isinstance(above.get("data", {}), Mapping):
            raise ConfigError(f"data = {above['data']!r}: expected a table; text is given with --data")
        if self.data:
            above["data"] = merge(above.get("data", {}), {"sources": list(self.data)})
        return above

    def _contenders(self) -> Tree:
        found: Tree = {}
        for words in self.named:
            name, table = contender(words)
            if name in found:
                raise ConfigError(f"{name}: named twice; give one of them another name, as in other={words}")
            found[name] = table
        return {"contenders": found}


def _given(values: Mapping[str, Any]) -> Tree:
    return {key: value for key, value in values.items() if value is not None}


def _stem(recipe: str) -> str:
    return Path(recipe).name.removesuffix(".toml")


def _names_a_recipe(word: str) -> bool:
    """Whether a word such as wide=transformer names a contender; a setting's value is no recipe."""
    key, _, value = word.split(" ")[0].partition("=")
    known = value in PRESETS or value in recipe_names() or value.endswith(".toml")
    return known and "." not in key and key not in ("tokenizer", "model")


def contender(words: str) -> tuple[str, Tree]:
    """'transformer model.placement=pre', or 'wide=transformer model.d_model=512': its name and its table."""
    first, *changes = words.split() or [""]
    if not first:
        raise ConfigError(f"'{words}': expected a preset, a recipe or a .toml file")
    name, equals, recipe = first.partition("=")
    if not equals:
        recipe = first
        name = ",".join([run_name(_stem(recipe)), *(plain(change.removeprefix("model.")) for change in changes)])
    return name, {"recipe": recipe, "changes": changed_tables(changes)}


def varied(words: str) -> tuple[str, list[Any]]:
    """'model.placement=pre,post': the key and its values."""
    key, equals, values = words.partition("=")
    if not equals or not all(key.split(".")) or not all(values.split(",")):
        raise ConfigError(f"--vary {words}: expected KEY=VALUE,VALUE, for instance model.placement=pre,post")
    return key, [flat(assignments([f"value={value}"]))["value"] for value in values.split(",")]


# ---- tokenizers


def _with_tokenizers(contenders: Mapping[str, Any], specs: Sequence[str]) -> Tree:
    """The one contender with each of the tokenizers."""
    if len(contenders) != 1:
        raise ConfigError(f"--tokenizers: they are compared with one model, but {len(contenders)} are named")
    (base,) = contenders.values()
    found: Tree = {}
    for spec in specs:
        changes = merge(base["changes"], {"tokenizer": settings_of(spec)})
        if run_name(spec) in found:
            raise ConfigError(f"--tokenizers {spec}: it is named twice")
        found[run_name(spec)] = {**base, "changes": changes}
    return found


def settings_of(spec: str) -> Tree:
    """The tokenizer of a spec as a recipe has it."""
    chosen = choose(spec)
    if isinstance(chosen, Tokenizer):
        return {"kind": "pretrained", "path": spec}
    return chosen.model_dump(mode="json", exclude_none=True)


def choose(spec: str) -> TrainedConfig | Tokenizer:
    """The settings of a kind to train, or a finished tokenizer by its path."""
    kind, colon, size = spec.partition(":")
    if kind not in KINDS:
        if spec and Path(spec).exists():
            return Tokenizer.load(spec)
        near = suggestion(kind, KINDS, what="kinds")
        raise ConfigError(f"--tokenizers {spec}: neither a kind nor a file or folder; {near}; {ALLOWED}")
    settings: TrainedConfig = TypeAdapter(TokenizerConfig).validate_python({"kind": kind})  # type: ignore[assignment]
    if not colon:
        return settings
    if not re.fullmatch(r"[1-9][0-9]{0,8}", size):
        raise ConfigError(f"--tokenizers {spec}: '{size}' is no vocabulary size; {ALLOWED}")
    if isinstance(settings, Byte):
        raise ConfigError(f"--tokenizers {spec}: a byte tokenizer has a vocabulary of its own; write byte")
    return validate(type(settings), {"kind": kind, "vocab_size": int(size)}, "--tokenizers")


ALLOWED = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}, with a size as in bpe:8000, or a run or a tokenizer's file"
