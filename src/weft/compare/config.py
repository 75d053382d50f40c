"""A comparison's settings, from a command or a TOML file: who is compared, on which text, with how much compute."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, TypeAdapter, model_validator

from weft.config import Config, Tree, assignments, flat, merge, nested, read_toml, validate
from weft.data.config import Data, TextSource
from weft.errors import ConfigError, suggestion
from weft.models.presets import PRESETS
from weft.recipe.resolve import changed_tables, recipe_names, run_name
from weft.text.config import KINDS, Byte, TokenizerConfig, TrainedConfig
from weft.text.tokenizer import Tokenizer

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+,=-]{0,149}")  # of a contender, and of its files
MAX_FOLDER_NAME = 80  # characters
PLAN, LADDER = "plan.json", "ladder"  # what was asked for, and the folder of a scaling law's sizes
OWN = ("document_mask", "tokens")  # what of `data` a contender may have of its own
RATIO = 3  # of the budgets of one rung and the next
STEP = 2.0  # of one learning rate and the next in the sweep
SEARCH_SHARES = tuple(float(RATIO) ** -rung for rung in (3, 2, 1))  # of the budget, in the three rounds of the sweep


class Budget(Config):
    """What every contender may use: floating-point operations of training, tokens that are read, or minutes."""

    flops: Annotated[float, Field(gt=0, le=1e30)] | None = None
    tokens: PositiveInt | None = None
    minutes: PositiveFloat | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = self.model_dump(exclude_none=True)
        if len(given) != 1:
            found = " and ".join(given) or "none"
            options = "give --flops 1e13, say, or flops = 1e13 in a file"
            raise ValueError(f"expected one of flops, tokens and minutes, found {found}; {options}")
        return self

    @property
    def axis(self) -> str:
        return next(iter(self.model_dump(exclude_none=True)))

    @property
    def amount(self) -> float:
        return float(self.flops or self.tokens or self.minutes or 0.0)

    def __str__(self) -> str:
        if self.flops is not None:
            return re.sub(r"e\+0?", "e", f"{self.flops:.3g} FLOPs")
        return f"{self.tokens:,} tokens" if self.tokens is not None else f"{self.minutes:g} minutes"


class Contender(Config):
    """A preset, a recipe or a .toml file, and what is changed in it. `levels` names its values of what is varied.

    With `parameters` its width and depth are chosen so that it has about as many.
    """

    recipe: Annotated[str, Field(min_length=1)]
    parameters: PositiveFloat | None = None
    changes: dict[str, Any] = Field(default_factory=dict)
    levels: dict[str, str] = Field(default_factory=dict)


class Experiment(Config):
    """Contenders that learn from one text, each with the same budget, and are measured on the same held-out part.

    Every contender is trained at `rungs` shares of the budget, each a third of the next, with `seeds` seeds; the last
    is the whole. Its learning rate is the best of `rates`, each twice the one before it, around the recipe's own. With
    `sizes = "budget"` its width and depth are chosen for the budget. `settings` are changes to every contender's
    recipe. `vary` has settings and their values: with `grid = "full"` every combination is a contender, with "one"
    those that differ from the first contender in one of them.
    """

    contenders: dict[str, Contender]
    data: Data
    budget: Budget
    seeds: Annotated[int, Field(ge=1, le=100)] = 3
    rungs: Annotated[int, Field(ge=1, le=8)] = 4
    rates: Annotated[int, Field(ge=1, le=25)] = 5
    sizes: Literal["fixed", "budget"] = "fixed"
    baseline: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    vary: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    grid: Literal["full", "one"] = "full"
    held_out: PositiveInt | None = None  # bytes of held-out text that are measured

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for name in self.contenders:
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"contenders: '{name}' can't be a name: expected letters, digits and . _ + , = - (150 at most); "
                    "give it another, as in wide=transformer"
                )
        if self.baseline is not None and self.baseline not in self.contenders:
            raise ValueError(f"baseline = '{self.baseline}': not one of {', '.join(self.contenders)}")
        for key, values in self.vary.items():
            if len(values) < 2:
                raise ValueError(f"vary.{key}: give two values or more to compare")
        return self

    @property
    def shares(self) -> list[float]:
        """The rungs' shares of the budget, ascending."""
        return [float(RATIO) ** -rung for rung in reversed(range(self.rungs))]

    @property
    def varied(self) -> dict[str, tuple[str, ...]]:
        """The names of what is varied, and of the values."""
        return {name: _labels(self.vary[key]) for key, name in self._short_keys.items()}

    @property
    def _short_keys(self) -> dict[str, str]:
        """model.position.kind → position: the last word that isn't `kind`; whole keys where two would be the same."""
        short = {key: [part for part in key.split(".") if part != "kind"][-1] for key in self.vary}
        return {key: name if list(short.values()).count(name) == 1 else key for key, name in short.items()}

    def expanded(self) -> "Experiment":
        """The same with every combination of what is varied as a contender of its own."""
        if not self.vary:
            return self
        if len(self.contenders) != 1:
            raise ConfigError(f"vary: it changes one contender, but there are {len(self.contenders)}")
        ((name, base),) = self.contenders.items()
        short, labels = self._short_keys, {key: _labels(values) for key, values in self.vary.items()}
        first = dict.fromkeys(self.vary, 0)
        if self.grid == "full":
            counts = (range(len(values)) for values in self.vary.values())
            combinations = [dict(zip(self.vary, places, strict=True)) for places in product(*counts)]
        else:
            single = ({**first, key: place} for key, values in self.vary.items() for place in range(1, len(values)))
            combinations = [first, *single]
        contenders = {}
        for places in combinations:
            changes = base.changes
            for key, place in places.items():
                changes = merge(changes, nested(key, self.vary[key][place]))
            levels = {short[key]: labels[key][place] for key, place in places.items()}
            shown = [key for key, place in places.items() if self.grid == "full" or place]
            # in a full grid a word has its place and says what it is; a number never does
            alone = {key for key in shown if self.grid == "full" and isinstance(self.vary[key][0], str | Mapping)}
            words = [levels[short[key]] if key in alone else f"{short[key]}={levels[short[key]]}" for key in shown]
            called = ",".join(words or [name])
            contenders[called] = {"recipe": base.recipe, "changes": changes, "levels": levels}
        if len(contenders) < len(combinations):
            raise ConfigError("vary: two values of one setting are the same")
        return validate(Experiment, {**self.model_dump(exclude_none=True), "contenders": contenders})


def experiment(tree: Mapping[str, Any], source: str = "") -> Experiment:
    """Tables as an experiment, with everything that is varied written out."""
    return validate(Experiment, tree, source).expanded()


def _labels(values: Sequence[Any]) -> tuple[str, ...]:
    """Values of one setting in a word each: of a table its kind, or else what the first doesn't have so."""
    first = flat(values[0]) if isinstance(values[0], Mapping) else {}

    def own(value: Any) -> Any:
        if not isinstance(value, Mapping) or "kind" in value:
            return value
        return {key: each for key, each in flat(value).items() if first.get(key) != each} or value

    return tuple(_label(own(value)) for value in values)


def _label(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("kind", "")) or "+".join(f"{key}={_label(each)}" for key, each in flat(value).items())
    if isinstance(value, list | tuple):
        return ",".join(map(_label, value))
    return str(value).lower() if isinstance(value, bool) else _name_signs(str(value))


def _name_signs(words: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+,=-]+", "-", words)


def shipped() -> list[str]:
    """The comparisons that come with weft."""
    folder = resources.files("weft") / "recipes" / "compare"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def tables_of(source: str) -> Tree | None:
    """A comparison's tables, from a file or by the name of one that comes with weft; None where it is neither.
    Contenders that are a recipe's name, or a table with `recipe` and changes beside it, become tables with both."""
    if source in shipped():
        with resources.as_file(resources.files("weft") / "recipes" / "compare" / f"{source}.toml") as file:
            tree = read_toml(file)
    elif source.endswith(".toml") and Path(source).is_file():
        tree = read_toml(Path(source))
    else:
        return None
    if "contenders" not in tree:
        return None
    data = tree.get("data", {})
    if isinstance(data, str | list):
        data = {"sources": [data] if isinstance(data, str) else data}
    written = {**tree, "data": data}
    for key in ("contenders", "data", "settings"):
        if not isinstance(written.get(key, {}), Mapping):
            raise ConfigError(f"{key} = {written[key]!r}: expected a table")
    contenders: Tree = {}
    for name, each in tree["contenders"].items():
        table = {"recipe": each} if isinstance(each, str) else each
        if not isinstance(table, Mapping) or not isinstance(table.get("recipe"), str):
            raise ConfigError(f'contenders.{name}: expected a recipe\'s name, or a table with recipe = "…"')
        own = {key: table[key] for key in ("recipe", "parameters") if key in table}
        contenders[name] = {**own, "changes": {key: value for key, value in table.items() if key not in own}}
    written["contenders"] = contenders
    if isinstance(tree.get("vary"), Mapping):  # dotted keys or tables of them, down to the list of values
        written["vary"] = flat(tree["vary"])
    return written


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
        """The contenders; wide=transformer names one as well, since no setting has a recipe as its value."""
        found = []
        for word in self.words:
            key, equals, value = word.split(" ")[0].partition("=")
            known = value in PRESETS or value in recipe_names() or value.endswith(".toml")
            if not equals or (known and "." not in key and key not in ("tokenizer", "model")):
                found.append(word)
        return found

    @property
    def folder(self) -> str:
        """A name for what comes out."""
        return run_name("-".join(_stem(word.split(" ")[0]) for word in self.named))[:MAX_FOLDER_NAME]

    def comparison(self) -> Experiment:
        """An experiment with two contenders or more."""
        if not self.named:
            raise ConfigError("compare what? give two or more presets or recipes, as in: weft compare lstm transformer")
        wanted = self.experiment()
        if len(wanted.contenders) < 2:
            raise ConfigError(f"{self.named[0]}: compared with what? name another contender, or --vary a setting")
        return wanted

    def experiment(self) -> Experiment:
        """Everything that was asked for, with what is varied written out."""
        file = tables_of(self.named[0]) if len(self.named) == 1 else None
        tree: Tree = {"budget": {}, "data": {}, **(file or {"contenders": {}})}
        for words in self.named if file is None else ():
            name, table = contender(words)
            if name in tree["contenders"]:
                raise ConfigError(f"{name}: named twice; give one of them another name, as in other={words}")
            tree["contenders"][name] = table
        above = self._settings()
        if "data" in above:  # the text is everybody's; how it is read is a contender's
            given = above.pop("data")
            tree["data"] = merge(tree["data"], {key: value for key, value in given.items() if key not in OWN})
            own = {key: given[key] for key in OWN if key in given}
            above |= {"data": own} if own else {}
        if above:
            tree["settings"] = merge(tree.get("settings", {}), above)
        if self.vary:
            tree["vary"] = {}
        for key, values in map(varied, self.vary):
            if key in tree["vary"]:
                raise ConfigError(f"--vary {key}: given twice; give all of its values at once")
            tree["vary"][key] = values
        if self.tokenizers:
            tree["contenders"] = _with_tokenizers(tree["contenders"], self.tokenizers)
        tree |= {key: value for key, value in self.options.items() if value is not None}
        budget = {key: value for key, value in self.budget.items() if value is not None}
        return experiment(tree | ({"budget": budget} if budget else {}), self.named[0] if file is not None else "")

    def text(self) -> TextSource:
        """The text alone, where no model is named."""
        above = self._settings()
        read = validate(Data, above.pop("data", {}))
        if above:
            key = next(iter(above))
            raise ConfigError(f"{key}: a model's setting, and no model is named; weft compare MODEL --tokenizers")
        if not read.sources:
            raise ConfigError("there is no text to compare on; give it with --data, for instance --data book.txt")
        return read.text(read.parts[0])

    def _settings(self) -> Tree:
        above = changed_tables([word for word in self.words if word not in self.named])
        if not isinstance(above.get("data", {}), Mapping):
            raise ConfigError(f"data = {above['data']!r}: expected a table; text is given with --data")
        if self.data:
            above["data"] = merge(above.get("data", {}), {"sources": list(self.data)})
        return above


def _stem(recipe: str) -> str:
    return Path(recipe).name.removesuffix(".toml")


def contender(words: str) -> tuple[str, Tree]:
    """'transformer model.placement=pre', or 'wide=transformer model.d_model=512': its name and its table."""
    first, *changes = words.split() or [""]
    if not first:
        raise ConfigError(f"'{words}': expected a preset, a recipe or a .toml file")
    name, equals, recipe = first.partition("=")
    if not equals:
        recipe = first
        name = ",".join([run_name(_stem(recipe)), *(_name_signs(change.removeprefix("model.")) for change in changes)])
    return name, {"recipe": recipe, "changes": changed_tables(changes)}


def varied(words: str) -> tuple[str, list[Any]]:
    """'model.placement=pre,post': the key and its values."""
    key, equals, values = words.partition("=")
    if not equals or not all(key.split(".")) or not all(values.split(",")):
        raise ConfigError(f"--vary {words}: expected KEY=VALUE,VALUE, for instance model.placement=pre,post")
    return key, [flat(assignments([f"value={value}"]))["value"] for value in values.split(",")]


def _with_tokenizers(contenders: Mapping[str, Any], specs: Sequence[str]) -> Tree:
    if len(contenders) != 1:
        raise ConfigError(f"--tokenizers: they are compared with one model, but {len(contenders)} are named")
    (base,) = contenders.values()
    found: Tree = {}
    for spec in specs:
        chosen = choose(spec)
        finished = {"kind": "pretrained", "path": spec}
        tokenizer = finished if isinstance(chosen, Tokenizer) else chosen.model_dump(mode="json", exclude_none=True)
        if run_name(spec) in found:
            raise ConfigError(f"--tokenizers {spec}: it is named twice")
        found[run_name(spec)] = {**base, "changes": merge(base["changes"], {"tokenizer": tokenizer})}
    return found


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
