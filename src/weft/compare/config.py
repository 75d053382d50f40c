"""Settings of a comparison, from a command or a TOML file: the contenders, the text and the compute budget."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, TypeAdapter, model_validator

from weft.config import Config, Tree, assignments, flat, merge, nested, read_toml, validate
from weft.costs.units import short
from weft.data.config import Data, TextSource
from weft.errors import ConfigError, suggestion
from weft.models.presets import PRESETS, preset
from weft.recipe.resolve import changed_tables, recipe_names, run_name
from weft.text.config import KINDS, Byte, TokenizerConfig, TrainedConfig
from weft.text.tokenizer import Tokenizer

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+,=-]{0,149}")  # valid names of contenders, which are also file names
MAX_FOLDER_NAME = 80  # characters of a comparison's folder name
PLAN, LADDER = "plan.json", "ladder"  # the file with the request, and the subfolder with the runs of a scaling law
CONTENDER_DATA = ("document_mask", "tokens")  # keys of `data` that a contender may set for itself
TOKENS_PER_PARAMETER = 20  # compute-optimal number of training tokens (Hoffmann et al. 2022, table 3)
RUNG_RATIO = 3  # budget of a rung, relative to the one below
RATE_RATIO = 2.0  # learning rate in the sweep, relative to the next lower one
SEARCH_SHARES = tuple(float(RUNG_RATIO) ** -rung for rung in (3, 2, 1))  # shares of the budget in the sweep's rounds


class Budget(Config):
    """Budget of each contender: FLOPs of training, tokens read, or minutes."""

    flops: Annotated[float, Field(gt=0, le=1e30)] | None = None
    tokens: PositiveInt | None = None
    minutes: PositiveFloat | None = None

    @model_validator(mode="after")
    def _check_unit(self) -> Self:
        units = self.model_dump(exclude_none=True)
        if len(units) != 1:
            hint = "give --flops 1e13, for instance, or flops = 1e13 in a file"
            found = " and ".join(units) or "none"
            raise ValueError(f"expected one of flops, tokens and minutes, found {found}; {hint}")
        return self

    @property
    def unit(self) -> str:
        return next(iter(self.model_dump(exclude_none=True)))

    @property
    def amount(self) -> float:
        return float(self.flops or self.tokens or self.minutes or 0.0)

    def __str__(self) -> str:
        if self.flops is not None:
            return re.sub(r"e\+0?", "e", f"{self.flops:.3g} FLOPs")
        return f"{self.tokens:,} tokens" if self.tokens is not None else f"{self.minutes:g} minutes"


class Contender(Config):
    """A preset, a recipe or a .toml file, with changes."""

    recipe: Annotated[str, Field(min_length=1)]
    parameters: PositiveFloat | None = None  # choose width and depth to have about this many
    changes: dict[str, Any] = Field(default_factory=dict)
    levels: dict[str, str] = Field(default_factory=dict)  # values of the varied settings, as shown
    year: int | None = None  # of publication, if a comparison is in the order of time
    about: str = ""  # what was new then
    family: str = ""  # contender of which this is one size
    shares: tuple[float, ...] = ()  # of the budget; absent: those of the experiment


class Experiment(Config):
    """Contenders that train on one text, each with the same budget, and are evaluated on the same held-out text.

    Every contender is trained at `rungs` shares of the budget, each a third of the next, up to the whole budget, with
    `seeds` seeds. Its learning rate is the best of `rates`, each twice the one below, around the recipe's. With
    `sizes = "budget"` its width and depth are chosen for the budget. Several `budgets`, in FLOPs, replace the rungs;
    with `sizes = "best"`, each of them has the best of three sizes, around the one that suits it. `settings` are
    changes to every contender. `vary` maps settings to values: with `grid = "full"` every combination is a contender,
    with "one" those that differ from the first in one setting.
    """

    contenders: dict[str, Contender]
    data: Data
    budget: Budget
    seeds: Annotated[int, Field(ge=1, le=100)] = 3
    rungs: Annotated[int, Field(ge=1, le=8)] = 4
    rates: Annotated[int, Field(ge=1, le=25)] = 5
    sizes: Literal["fixed", "budget", "best"] = "fixed"
    budgets: tuple[Annotated[float, Field(gt=0, le=1e30)], ...] = ()
    baseline: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    vary: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    grid: Literal["full", "one"] = "full"
    held_out: PositiveInt | None = None  # bytes of held-out text to evaluate on

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name in self.contenders:
            if not NAME.fullmatch(name):
                expected = "letters, digits and . _ + , = - (150 at most); give it another, as in wide=transformer"
                raise ValueError(f"contenders: '{name}' can't be a name: expected {expected}")
        names = {*self.contenders, *(each.family for each in self.contenders.values())}
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(f"baseline = '{self.baseline}': not one of {', '.join(self.contenders)}")
        if self.budgets and (len(set(self.budgets)) < 2 or self.budget.flops != max(self.budgets)):
            raise ValueError("budgets: give two different numbers of FLOPs or more, the largest of which is the budget")
        if self.sizes == "best" and not self.budgets:
            raise ValueError("sizes = best: give several budgets, as in --flops 1e10 1e11")
        for key, values in self.vary.items():
            if len(values) < 2:
                raise ValueError(f"vary.{key}: give two values or more to compare")
        return self

    @property
    def shares(self) -> list[float]:
        """Shares of the budget, ascending."""
        if self.budgets:
            return [flops / max(self.budgets) for flops in sorted(set(self.budgets))]
        return [float(RUNG_RATIO) ** -rung for rung in reversed(range(self.rungs))]

    @property
    def varied(self) -> dict[str, tuple[str, ...]]:
        """Varied settings and their values, as shown."""
        return {name: _labels(self.vary[key]) for key, name in self._short_keys.items()}

    @property
    def _short_keys(self) -> dict[str, str]:
        """Last word of each varied key that isn't `kind` (model.position.kind → position), or the key if ambiguous."""
        short = {key: [part for part in key.split(".") if part != "kind"][-1] for key in self.vary}
        return {key: name if list(short.values()).count(name) == 1 else key for key, name in short.items()}

    def expanded(self) -> "Experiment":
        """Return the experiment with one contender per combination of the varied settings, or per size."""
        if self.sizes == "best" and not any(each.family for each in self.contenders.values()):
            return self.replace(contenders=self._by_size())
        if not self.vary:
            return self
        if len(self.contenders) != 1:
            raise ConfigError(f"vary: it changes one contender, but there are {len(self.contenders)}")
        ((base_name, base),) = self.contenders.items()
        short, labels = self._short_keys, {key: _labels(values) for key, values in self.vary.items()}
        first = dict.fromkeys(self.vary, 0)
        if self.grid == "full":
            counts = (range(len(values)) for values in self.vary.values())
            combinations = [dict(zip(self.vary, indices, strict=True)) for indices in product(*counts)]
        else:
            single = ({**first, key: index} for key, values in self.vary.items() for index in range(1, len(values)))
            combinations = [first, *single]
        contenders = {}
        for indices in combinations:
            changes = base.changes
            for key, index in indices.items():
                changes = merge(changes, nested(key, self.vary[key][index]))
            levels = {short[key]: labels[key][index] for key, index in indices.items()}
            named = [key for key, index in indices.items() if self.grid == "full" or index]
            # in a full grid, a word speaks for itself, but a number needs the name of its setting
            words = {key for key in named if self.grid == "full" and isinstance(self.vary[key][0], str | Mapping)}
            parts = [levels[short[key]] if key in words else f"{short[key]}={levels[short[key]]}" for key in named]
            contenders[",".join(parts or [base_name])] = {"recipe": base.recipe, "changes": changes, "levels": levels}
        if len(contenders) < len(combinations):
            raise ConfigError("vary: two values of one setting are the same")
        return validate(Experiment, {**self.model_dump(exclude_none=True), "contenders": contenders})

    def _by_size(self) -> dict[str, Any]:
        """Return a contender for each budget, of the size that suits it; it is also trained with the budgets beside it.

        The size is that of Hoffmann et al. 2022. An n-gram model has one size, and counts the whole text.
        """
        contenders, shares = dict[str, Any](), self.shares
        for name, base in self.contenders.items():
            if base.recipe in PRESETS and preset(base.recipe).kind == "ngram":
                contenders[name] = {**base.model_dump(), "family": name, "shares": (1.0,)}
                continue
            for index, share in enumerate(shares):
                parameters = math.sqrt(share * self.budget.amount / (6 * TOKENS_PER_PARAMETER))
                sized = {"family": name, "parameters": parameters, "shares": shares[max(0, index - 1) : index + 2]}
                contenders[f"{name}-{short(round(parameters))}"] = base.model_dump() | sized
        return contenders


def experiment(tree: Mapping[str, Any], source: str = "") -> Experiment:
    """Build an experiment from tables, with one contender per combination of the varied settings."""
    return validate(Experiment, tree, source).expanded()


def _labels(values: Sequence[Any]) -> tuple[str, ...]:
    """Return a short label per value of a setting: a table's kind, or else how it differs from the first value."""
    first = flat(values[0]) if isinstance(values[0], Mapping) else {}

    def differing(value: Any) -> Any:
        if not isinstance(value, Mapping) or "kind" in value:
            return value
        return {key: item for key, item in flat(value).items() if first.get(key) != item} or value

    return tuple(_label(differing(value)) for value in values)


def _label(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("kind", "")) or "+".join(f"{key}={_label(item)}" for key, item in flat(value).items())
    if isinstance(value, list | tuple):
        return ",".join(map(_label, value))
    return str(value).lower() if isinstance(value, bool) else _valid_name(str(value))


def _valid_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+,=-]+", "-", text)


def shipped_comparisons() -> dict[str, Traversable]:
    """Return the files of the comparisons shipped with weft, by name."""
    folder = resources.files("weft") / "recipes" / "compare"
    return {entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")}


def tables_of(source: str) -> Tree | None:
    """Return the tables of a comparison's file or of one shipped with weft; None if `source` is neither."""
    if source in (shipped := shipped_comparisons()):
        with resources.as_file(shipped[source]) as file:
            tree = read_toml(file)
    elif source.endswith(".toml") and Path(source).is_file():
        tree = read_toml(Path(source))
    else:
        return None
    if "contenders" not in tree:
        return None
    data = tree.get("data", {})
    tree["data"] = {"sources": [data] if isinstance(data, str) else data} if isinstance(data, str | list) else data
    for key in ("contenders", "data", "settings"):
        if not isinstance(tree.get(key, {}), Mapping):
            raise ConfigError(f"{key} = {tree[key]!r}: expected a table")
    for name, value in tree["contenders"].items():  # a recipe's name, or a table of `recipe` and changes
        table = {"recipe": value} if isinstance(value, str) else value
        if not isinstance(table, Mapping) or not isinstance(table.get("recipe"), str):
            raise ConfigError(f'contenders.{name}: expected a recipe\'s name, or a table with recipe = "…"')
        fields = {key: table[key] for key in ("recipe", "parameters", "year", "about") if key in table}
        changes = {key: item for key, item in table.items() if key not in fields}
        tree["contenders"][name] = {**fields, "changes": changes}
    if isinstance(tree.get("vary"), Mapping):  # dotted keys or nested tables, down to the lists of values
        tree["vary"] = flat(tree["vary"])
    return tree


@dataclass(frozen=True)
class ComparisonRequest:
    """Arguments and options of a command. In `options` and `budget`, None means not given."""

    words: Sequence[str] = ()  # contenders, or the file or name of a comparison, and key=value settings for all
    data: Sequence[str] = ()
    vary: Sequence[str] = ()
    tokenizers: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of an experiment
    budget: Mapping[str, float | None] = field(default_factory=dict)

    @cached_property
    def contenders(self) -> list[str]:
        """Words that name contenders, also as wide=transformer: no setting has a recipe as its value."""
        contenders = []
        for word in self.words:
            if word in self._budgets:
                continue
            key, equals, value = word.split(" ")[0].partition("=")
            is_recipe = value in PRESETS or value in recipe_names() or value.endswith(".toml")
            if not equals or (is_recipe and "." not in key and key not in ("tokenizer", "model")):
                contenders.append(word)
        return contenders

    @cached_property
    def _budgets(self) -> dict[str, float]:
        """Further numbers after --flops, which the shell hands over as words."""
        found = {}
        for word in self.words:
            with suppress(ValueError):
                found[word] = float(word)
        if found and self.budget.get("flops") is None:
            raise ConfigError(f"{next(iter(found))}: a number; several budgets are given as in --flops 1e10 1e11")
        return found

    @property
    def folder(self) -> str:
        """Default name of the output folder."""
        return run_name("-".join(_stem(word.split(" ")[0]) for word in self.contenders))[:MAX_FOLDER_NAME]

    def comparison(self) -> Experiment:
        """Return the requested experiment, which must have two contenders or more."""
        if not self.contenders:
            raise ConfigError("compare what? give two or more presets or recipes, as in: weft compare lstm transformer")
        experiment = self.experiment()
        if len(experiment.contenders) < 2:
            first = self.contenders[0]
            raise ConfigError(f"{first}: compare it with what? name another contender, or --vary a setting")
        return experiment

    def experiment(self) -> Experiment:
        """Return the requested experiment, with one contender per combination of the varied settings."""
        file = tables_of(self.contenders[0]) if len(self.contenders) == 1 else None
        tree: Tree = {"budget": {}, "data": {}, **(file or {"contenders": {}})}
        for words in self.contenders if file is None else ():
            name, table = contender(words)
            if name in tree["contenders"]:
                raise ConfigError(f"{name}: named twice; give one of them another name, as in other={words}")
            tree["contenders"][name] = table
        above = self._settings()
        if "data" in above:  # the text is shared; some settings of how it is read belong to the contenders
            data = above.pop("data")
            tree["data"] = merge(tree["data"], {key: item for key, item in data.items() if key not in CONTENDER_DATA})
            if own := {key: data[key] for key in CONTENDER_DATA if key in data}:
                above["data"] = own
        if above:
            tree["settings"] = merge(tree.get("settings", {}), above)
        if self.vary:
            tree["vary"] = {}
        for key, values in map(parse_vary, self.vary):
            if key in tree["vary"]:
                raise ConfigError(f"--vary {key}: given twice; give all of its values in one option")
            tree["vary"][key] = values
        if self.tokenizers:
            tree["contenders"] = _with_tokenizers(tree["contenders"], self.tokenizers)
        tree |= {key: value for key, value in self.options.items() if value is not None}
        if budget := {key: value for key, value in self.budget.items() if value is not None}:
            budgets = sorted({budget.get("flops", 0.0), *self._budgets.values()})
            tree["budget"], tree["budgets"] = budget, []
            if len(budgets) > 1:
                tree["budget"], tree["budgets"] = budget | {"flops": budgets[-1]}, budgets
        elif tree.get("budgets"):
            tree["budget"] = {"flops": max(tree["budgets"])}
        return experiment(tree, self.contenders[0] if file is not None else "")

    def text(self) -> TextSource:
        """Return the text to compare tokenizers on, if no model is named."""
        above = self._settings()
        data = validate(Data, above.pop("data", {}))
        if above:
            key = next(iter(above))
            raise ConfigError(f"{key}: a model's setting, but no model is named; weft compare MODEL --tokenizers")
        if not data.sources:
            raise ConfigError(NO_TEXT)
        return data.text(data.parts[0])

    def _settings(self) -> Tree:
        above = changed_tables([word for word in self.words if word not in (*self.contenders, *self._budgets)])
        if not isinstance(above.get("data", {}), Mapping):
            raise ConfigError(f"data = {above['data']!r}: expected a table; text is given with --data")
        if self.data:
            above["data"] = merge(above.get("data", {}), {"sources": list(self.data)})
        return above


NO_TEXT = "there is no text to compare on; give it with --data, for instance --data book.txt"


def _stem(recipe: str) -> str:
    return Path(recipe).name.removesuffix(".toml")


def contender(words: str) -> tuple[str, Tree]:
    """Parse 'transformer model.placement=pre' or 'wide=transformer model.d_model=512' to a name and a table."""
    first, *changes = words.split() or [""]
    if not first:
        raise ConfigError(f"'{words}': expected a preset, a recipe or a .toml file")
    name, equals, recipe = first.partition("=")
    if not equals:
        recipe = first
        name = ",".join([run_name(_stem(recipe)), *(_valid_name(change.removeprefix("model.")) for change in changes)])
    return name, {"recipe": recipe, "changes": changed_tables(changes)}


def parse_vary(option: str) -> tuple[str, list[Any]]:
    """Parse 'model.placement=pre,post' to the key and its values."""
    key, equals, values = option.partition("=")
    if not equals or not all(key.split(".")) or not all(values.split(",")):
        raise ConfigError(f"--vary {option}: expected KEY=VALUE,VALUE, for instance model.placement=pre,post")
    return key, [flat(assignments([f"value={value}"]))["value"] for value in values.split(",")]


def _with_tokenizers(contenders: Mapping[str, Any], specs: Sequence[str]) -> Tree:
    if len(contenders) != 1:
        raise ConfigError(f"--tokenizers: they are compared with one model, but {len(contenders)} are named")
    (base,) = contenders.values()
    by_tokenizer: Tree = {}
    for spec in specs:
        parsed, trained = parse_tokenizer(spec), {"kind": "pretrained", "path": spec}
        tokenizer = trained if isinstance(parsed, Tokenizer) else parsed.model_dump(mode="json", exclude_none=True)
        if run_name(spec) in by_tokenizer:
            raise ConfigError(f"--tokenizers {spec}: named twice")
        by_tokenizer[run_name(spec)] = {**base, "changes": merge(base["changes"], {"tokenizer": tokenizer})}
    return by_tokenizer


def parse_tokenizer(spec: str) -> TrainedConfig | Tokenizer:
    """Return the settings of a kind to train, or the trained tokenizer at a path."""
    kind, colon, size = spec.partition(":")
    if kind not in KINDS:
        if spec and Path(spec).exists():
            return Tokenizer.load(spec)
        near = suggestion(kind, KINDS, what="kinds")
        raise ConfigError(f"--tokenizers {spec}: neither a kind nor a file or folder; {near}; {TOKENIZER_SPECS}")
    settings: TrainedConfig = TypeAdapter(TokenizerConfig).validate_python({"kind": kind})  # type: ignore[assignment]
    if not colon:
        return settings
    if not re.fullmatch(r"[1-9][0-9]{0,8}", size):
        raise ConfigError(f"--tokenizers {spec}: '{size}' is not a vocabulary size; {TOKENIZER_SPECS}")
    if isinstance(settings, Byte):
        raise ConfigError(f"--tokenizers {spec}: a byte tokenizer has a fixed vocabulary; write byte")
    return validate(type(settings), {"kind": kind, "vocab_size": int(size)}, "--tokenizers")


TOKENIZER_SPECS = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}, with a size as in bpe:8000, or a run or a tokenizer's file"
