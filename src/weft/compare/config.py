"""A comparison's settings: who is compared, on which text, with how much compute.

They come from the command line or from a TOML file; both are the same to what follows.
"""

import re
from collections.abc import Iterator, Mapping
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from weft.config import Config, Tree, flat, merge, nested, read_toml, validate
from weft.data.config import Data
from weft.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+,=-]{0,149}")  # of a contender, and of its files
RATIO = 3  # of the budgets of one rung and the next
STEP = 2.0  # of one learning rate and the next in the sweep


class Budget(Config):
    """What every contender may use: floating-point operations of training, tokens that are read, or minutes."""

    flops: Annotated[float, Field(gt=0, le=1e30)] | None = None
    tokens: PositiveInt | None = None
    minutes: PositiveFloat | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [key for key in ("flops", "tokens", "minutes") if getattr(self, key) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"expected one of flops, tokens and minutes, for instance flops = 1e13; found {found}")
        return self

    @property
    def axis(self) -> Literal["flops", "tokens", "minutes"]:
        """Which of them it is."""
        return "flops" if self.flops is not None else "tokens" if self.tokens is not None else "minutes"

    @property
    def amount(self) -> float:
        """How much of it."""
        return float(self.flops or self.tokens or self.minutes or 0.0)

    def __str__(self) -> str:
        flops = re.sub(r"e\+0?", "e", f"{self.amount:.3g} FLOPs")
        words = {"flops": flops, "tokens": f"{self.amount:,.0f} tokens"}
        return words.get(self.axis, f"{self.amount:g} minutes")


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
    def search_shares(self) -> list[float]:
        """Those of the three rounds of the search for a learning rate."""
        return [float(RATIO) ** -3, float(RATIO) ** -2, float(RATIO) ** -1]

    def expanded(self) -> "Experiment":
        """The same with every combination of what is varied as a contender of its own."""
        if not self.vary:
            return self
        if len(self.contenders) != 1:
            raise ConfigError(f"vary: it changes one contender, but there are {len(self.contenders)}")
        (base,) = self.contenders.values()
        names = _short(list(self.vary))
        combinations = list(self._combinations())
        contenders = {}
        for levels in combinations:
            changes = merge(base.changes, _together(levels))
            labels = {names[key]: _label(value) for key, value in levels.items()}
            contenders[",".join(labels.values())] = Contender(recipe=base.recipe, changes=changes, levels=labels)
        if len(contenders) < len(combinations):
            raise ConfigError("vary: two values of one setting are the same")
        changes = {"contenders": {name: each.model_dump() for name, each in contenders.items()}}
        return validate(Experiment, {**self.model_dump(exclude_none=True), **changes})

    @property
    def varied(self) -> dict[str, tuple[str, ...]]:
        """The names of what is varied, and of the values."""
        names = _short(list(self.vary))
        return {names[key]: tuple(map(_label, values)) for key, values in self.vary.items()}

    def _combinations(self) -> Iterator[dict[str, Any]]:
        keys = list(self.vary)
        if self.grid == "full":
            yield from (dict(zip(keys, values, strict=True)) for values in product(*self.vary.values()))
            return
        base = {key: values[0] for key, values in self.vary.items()}
        yield base
        yield from ({**base, key: value} for key, values in self.vary.items() for value in values[1:])


def _together(levels: Mapping[str, Any]) -> Tree:
    tree: Tree = {}
    for key, value in levels.items():
        tree = merge(tree, nested(key, value))
    return tree


def _short(keys: list[str]) -> dict[str, str]:
    """model.position.kind → position: the last word that isn't `kind`; the whole key where two would be the same."""
    short = {key: [part for part in key.split(".") if part != "kind"][-1] for key in keys}
    return {key: name if list(short.values()).count(name) == 1 else key for key, name in short.items()}


def plain(words: str) -> str:
    """Words with signs that no contender's name has replaced."""
    return re.sub(r"[^A-Za-z0-9._+,=-]+", "-", words)


def _label(value: Any) -> str:
    """A value in a word: a table's kind and, if that is all there is to tell, nothing else."""
    if isinstance(value, Mapping):
        kind = str(value.get("kind", ""))
        rest = [f"{key}={_label(each)}" for key, each in flat(value).items() if key != "kind"]
        return kind or "+".join(rest)
    return str(value).lower() if isinstance(value, bool) else plain(str(value))


# ---- from a file


def shipped() -> list[str]:
    """The comparisons that come with weft."""
    folder = resources.files("weft") / "recipes" / "compare"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def tables_of(source: str) -> Tree | None:
    """A comparison's tables, from a file or by the name of one that comes with weft; None where it is neither."""
    if source in shipped():
        with resources.as_file(resources.files("weft") / "recipes" / "compare" / f"{source}.toml") as file:
            return _written_out(read_toml(file))
    path = Path(source)
    if path.suffix == ".toml" and path.is_file():
        tree = read_toml(path)
        return _written_out(tree) if "contenders" in tree else None
    return None


def _written_out(tree: Tree) -> Tree:
    """Contenders that are a recipe's name, or a table with `recipe` and changes beside it, as tables with both."""
    data = tree.get("data", {})
    if isinstance(data, str | list):
        data = {"sources": [data] if isinstance(data, str) else data}
    written = {**tree, "data": data}
    for key in ("contenders", "data", "settings"):
        if not isinstance(written.get(key, {}), Mapping):
            raise ConfigError(f"{key} = {written[key]!r}: expected a table")
    contenders: Tree = {}
    for name, each in tree["contenders"].items():
        if isinstance(each, str):
            each = {"recipe": each}
        if not isinstance(each, Mapping) or not isinstance(each.get("recipe"), str):
            raise ConfigError(f'contenders.{name}: expected a recipe\'s name, or a table with recipe = "…"')
        own = {key: each[key] for key in ("recipe", "parameters") if key in each}
        contenders[name] = {**own, "changes": {key: value for key, value in each.items() if key not in own}}
    written["contenders"] = contenders
    if isinstance(tree.get("vary"), Mapping):  # dotted keys or tables of them, down to the list of values
        written["vary"] = flat(tree["vary"])
    return written


def experiment(tree: Mapping[str, Any], source: str = "") -> Experiment:
    """Tables as an experiment, with everything that is varied written out."""
    return validate(Experiment, tree, source).expanded()
