"""From a name, a file and changes to a recipe, with what they imply written out."""

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from weft.config import Tree, assignments, flat, merge, nested, read_toml, validate
from weft.errors import ConfigError, download_first, suggestion
from weft.models.presets import PRESETS, preset
from weft.progress import Log, log_to_stderr
from weft.recipe.config import SOURCE_TOKENIZER, Recipe, SettledRecipe
from weft.recipe.objective import OBJECTIVES, upgrade
from weft.recipe.optimizer import Noam

Changes = Iterable[str] | Mapping[str, Any]  # key=value words, or a table of dotted keys
ORIGINS = ("sources", "prepared", "mixture")  # of text, one of which a recipe's data has


def resolve(
    source: str | Path | Recipe, changes: Changes = (), data: Sequence[str] = (), log: Log = log_to_stderr
) -> Recipe:
    """The recipe that `source` names, with `changes` laid over it and `data` as its text.

    `source` is a .toml file, a run's folder, a recipe that comes with weft, or a preset; `changes` are key=value words
    or a table of dotted keys. `model` may be a preset's name, or a table with `preset = "…"` and what differs from it;
    for a setting that comes in kinds, the kind's name alone will do (`tokenizer=char`). Names of earlier versions are
    logged. With other text than its own, a run's folder stands for its weights, which are trained further. A Recipe is
    taken as it is, with the changes.
    """
    above = changed_tables(changes)
    if isinstance(source, Recipe):
        own = source.model_dump(mode="json", exclude_none=True)
        own = _without_data(own, above, log) if data else own
        tree = _with_warmup(merge(own, above), above, log)
        return _with_vocabulary(validate(Recipe, merge(tree, {"data": {"sources": list(data)}} if data else {})))
    source = str(source)
    tree, where = _find(source)
    if continues(source, above, data):
        tree = _continued(tree, source, above)
        text = ", ".join(data) or "the data given"
        log(f"fine-tuning the weights of {source} on {text}; {source} itself stays as it is")
    if data:
        tree = _without_data(tree, above, log)
    if "init" in above:  # that run's model and tokenizers, whatever the recipe was written for
        tree = {key: value for key, value in tree.items() if key not in ("model", "tokenizer", "source_tokenizer")}
    tree, notes = upgrade(merge(_expand(tree, where), above))
    for note in notes:
        log(note)
    blamed = "" if above else where
    _check_tables(tree, blamed)
    tree = _with_warmup(_with_head(_with_objective(_with_init(tree))), above, log)
    if data:
        tree["data"] = {**tree.get("data", {}), "sources": list(data)}
    return _with_vocabulary(validate(Recipe, merge(_kinds(tree), tree), blamed))


def continues(source: str, above: Mapping[str, Any], data: Sequence[str]) -> bool:
    """Whether a run's weights are to be trained further: its folder is named, with other text than its own."""
    given = above.get("data")
    named = bool(data) or (isinstance(given, Mapping) and any(given.get(key) for key in ORIGINS))
    return is_run(source) and named and "init" not in above


def is_run(source: str) -> bool:
    return (Path(source) / "config.toml").is_file()


def _continued(tree: Tree, run: str, above: Mapping[str, Any]) -> Tree:
    """A recipe that begins with a run's weights, with its tokenizer and objective. How long and how fast it learns, and
    in which batches, was chosen for fresh weights and for another text."""
    kept: Tree = {key: tree[key] for key in ("name", "seed", "objective", "adapter") if key in tree}
    own = tree.get("data", {})
    if "objective" not in above and isinstance(own, Mapping):  # another one reads its data another way
        kept["data"] = {key: own[key] for key in ("column", "on_error", "document_mask", "validation") if key in own}
    return {**kept, "init": run}


def _without_data(tree: Tree, above: Mapping[str, Any], log: Log) -> Tree:
    """A recipe's tables without its files, those of its validation included, as other text replaces them all."""
    own, changed = tree.get("data"), above.get("data")
    if not isinstance(own, Mapping):
        return tree
    gone = {*ORIGINS, "targets"}
    if any(own.get(key) for key in ORIGINS):
        gone.add("encoding")  # it was theirs
    validation = own.get("validation")
    if isinstance(validation, Mapping) and validation.get("kind") == "files":
        gone.add("validation")
        if not (isinstance(changed, Mapping) and "validation" in changed):
            files = ", ".join(map(str, validation.get("sources", ())))
            log(f"data.validation = hash: the recipe's own files ({files}) went with its text; a tenth is held out")
    return {**tree, "data": {key: value for key, value in own.items() if key not in gone}}


def recipe_names() -> list[str]:
    """The recipes that come with weft."""
    files = (entry.name for entry in shipped_recipes().iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def shipped_recipes() -> Traversable:
    """The folder with the recipes that come with weft."""
    return resources.files("weft") / "recipes"


def _find(source: str) -> tuple[Tree, str]:
    """The tables that a name stands for, and what to call them in errors."""
    path = Path(source)
    if path.suffix == ".toml":
        return {"name": run_name(path.stem), **read_toml(path)}, source
    if is_run(source):
        return read_toml(path / "config.toml"), source
    if source in recipe_names():
        with resources.as_file(shipped_recipes() / f"{source}.toml") as file:
            return {"name": source, **read_toml(file)}, source
    if source in PRESETS:
        return {"name": source, "model": source}, source
    if path.exists():
        what = f"{source}: neither a recipe (.toml) nor a run"
        raise ConfigError(f"{what}; a text to learn from is given so: weft train gpt-tiny --data {source}")
    if "://" in source:
        raise ConfigError(f"{download_first(source)}: weft train gpt-tiny --data FILE")
    runs = (str(config.parent) for config in Path("runs").glob("*/config.toml"))
    known = suggestion(source, [*recipe_names(), *PRESETS, *runs])
    raise ConfigError(f"'{source}': no such recipe or preset; {known}")


# what may change between the beginning of a run and its end: keys, and whole tables
EXTENDABLE = ("steps", "evaluate.every", "evaluate.patience", "batch.micro", "batch.recompute")
EXTENDABLE_TABLES = ("checkpoint", "log", "parallel")


def extended(recipe: SettledRecipe, changes: Changes) -> tuple[SettledRecipe, dict[str, str]]:
    """A run's recipe for going on, and a line for each key that differs; what makes it another run is refused."""
    above = changed_tables(changes)
    tree = recipe.model_dump(mode="json", exclude_none=True)
    steps, warmup = above.get("steps"), recipe.schedule.warmup or 0
    if isinstance(steps, int) and steps < warmup and not isinstance(recipe.schedule, Noam):
        raise ConfigError(f"steps = {steps}: the run's learning rate rises for {warmup} steps; give more")
    longer = validate(SettledRecipe, merge(tree, above))
    for key in flat(above):
        if key not in EXTENDABLE and key.partition(".")[0] not in EXTENDABLE_TABLES:
            can = ", ".join((*EXTENDABLE, *(f"{table}.*" for table in EXTENDABLE_TABLES)))
            other = "To train its weights in another way: weft train RUN --data FILE"
            raise ConfigError(f"{key}: can't change within a run; these can: {can}. {other}")
    before, after = flat(tree), flat(longer.model_dump(mode="json", exclude_none=True))
    differing = (key for key in flat(above) if before.get(key) != after.get(key))
    return longer, {key: f"{key} = {after.get(key)} instead of {before.get(key)}" for key in differing}


def changed_tables(changes: Changes) -> Tree:
    """The tables that key=value words, or a table of dotted keys, make. `tokenizer=char` stands before
    `tokenizer.lowercase=true`, which adds to it, whichever was written first."""
    tree: Tree = {}
    for change in sorted(changes, key=lambda change: str(change).partition("=")[0].count(".")):
        table = nested(change, changes[change]) if isinstance(changes, Mapping) else assignments([change])
        tree = merge(tree, _expand(table, "model"))
    return tree


def run_name(words: str) -> str:
    """Any words as the name of a run or of a folder, in which they can stand: letters, digits and . _ + -"""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", words).lstrip("-._+").rstrip("-._") or "run"  # transformer++ ends in one


def _expand(tree: Tree, where: str) -> Tree:
    """`model = "llama-tiny"` and `model.preset = "llama-tiny"` written out, and bare kinds as tables."""
    tree = dict(tree)
    for key in ("objective", "optimizer", "schedule", "tokenizer", "source_tokenizer"):
        if isinstance(tree.get(key), str):
            kind, _, size = tree[key].partition(":")  # bpe:8000
            sized = "tokenizer" in key and kind != "byte" and size.isdecimal()
            tree[key] = {"kind": kind, "vocab_size": int(size)} if sized else {"kind": tree[key]}
    model = tree.get("model")
    if isinstance(model, str):
        model = {"preset": model}
    if isinstance(model, Mapping) and "preset" in model:
        rest = {key: value for key, value in model.items() if key != "preset"}
        if not isinstance(model["preset"], str):
            raise ConfigError(f"{where}: model.preset = {model['preset']!r}: expected a preset's name")
        tree["model"] = merge(preset(model["preset"]).model_dump(mode="json", exclude_none=True), rest)
    return tree


def _check_tables(tree: Tree, source: str) -> None:
    """Refuse what can't be looked into, as is done before the whole is validated."""
    where = f"{source}: " if source else ""
    model = tree.get("model", {})
    tables = {"data": tree.get("data", {}), "objective": tree.get("objective", {}), "model": model}
    if isinstance(model, Mapping):
        tables["model.head"] = model.get("head", {})
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            files = "; files are given with --data, or as data.sources" if key == "data" else ""
            raise ConfigError(f"{where}{key} = {table!r}: expected a table{files}")
        if not isinstance(table.get("kind", ""), str):
            raise ConfigError(f"{where}{key}.kind = {table['kind']!r}: expected a kind's name")


def _with_init(tree: Tree) -> Tree:
    """The model and the tokenizers of the run that `init` names, where the recipe is silent."""
    init = tree.get("init")
    if not isinstance(init, str):
        return tree
    if not is_run(init):
        raise ConfigError(f"init = '{init}': not a run: there is no config.toml in it")
    earlier = read_toml(Path(init) / "config.toml")
    if not isinstance(earlier.get("model"), Mapping):
        raise ConfigError(f"init = '{init}': there is no model in its config.toml; it is no run's, or damaged")
    taken: Tree = {"tokenizer": {"kind": "pretrained", "path": init}}
    if "source_tokenizer" in earlier:
        taken["source_tokenizer"] = {"kind": "pretrained", "path": str(Path(init) / SOURCE_TOKENIZER)}
    return {**taken, **tree, "model": merge(earlier["model"], tree.get("model", {}))}


def _with_vocabulary(recipe: Recipe) -> Recipe:
    """A model of as many words as its tokenizer is asked to find, whatever its preset has."""
    for tokenizer, key in ((recipe.tokenizer, "vocab_size"), (recipe.source_tokenizer, "source_vocab_size")):
        size, model = getattr(tokenizer, "vocab_size", None), recipe.model
        if size is not None and hasattr(model, key) and not rounded_up(getattr(model, key), size):
            recipe = recipe.replace(model=model.replace(**{key: size}))
    return recipe


def rounded_up(table: Any, size: int) -> bool:
    """Whether a table of so many rows has one for each of `size` words, and at most a few more: some kernels like
    multiples of 64 or 128, and the extra rows are never a target."""
    return table in (size, -(-size // 64) * 64, -(-size // 128) * 128)


def _with_objective(tree: Tree) -> Tree:
    model, objective = tree.get("model", {}), tree.get("objective", {})
    if "kind" in objective:
        return tree
    usual = {"encoder-decoder": "pairs", "bahdanau": "pairs"}.get(model.get("kind", ""), "next-token")
    if model.get("kind") == "encoder":
        head = model.get("head", {}).get("kind")
        fitting = (kind for kind, its in OBJECTIVES.items() if its.kinds[0] == "encoder" and head == its.heads[0])
        usual = next(fitting, usual)
    return {**tree, "objective": {"kind": usual, **objective}}


def _with_head(tree: Tree) -> Tree:
    """A Transformer with the head that its objective needs, where it has another."""
    model, objective = tree.get("model", {}), OBJECTIVES.get(tree["objective"]["kind"])
    if objective is None or model.get("kind") not in ("encoder", "decoder") or model["kind"] not in objective.kinds:
        return tree
    pooling = tree["objective"].get("pooling")
    if model.get("head", {}).get("kind") in objective.heads:
        return {**tree, "model": {**model, "head": {**model["head"], "pooling": pooling}}} if pooling else tree
    kind, decodes = objective.heads[0], model["kind"] == "decoder"
    head: Tree = {"kind": kind}
    if kind in ("sequence", "token"):
        head["labels"] = 2  # until the rows are read
    if kind in ("sequence", "embedding") and decodes:
        head["pooling"] = "last"  # the last token has read all others, the first none
    if kind == "sequence" and decodes:
        head["pooler"] = False
    if pooling:
        head["pooling"] = pooling
    return {**tree, "model": {**model, "head": head}}


def _with_warmup(tree: Tree, above: Mapping[str, Any], log: Log) -> Tree:
    """A recipe with a shorter warmup than its own, where it is told to take fewer steps than that."""
    own, changed = flat(tree), flat(above)
    steps, warmup = changed.get("steps"), own.get("schedule.warmup")
    if not (isinstance(steps, int) and isinstance(warmup, int) and warmup > steps):
        return tree
    if "schedule.warmup" in changed or own.get("schedule.kind") == "noam":
        return tree
    shorter = max(1, steps // 10)
    log(f"schedule.warmup = {shorter} instead of {warmup}, which would be longer than the {steps} steps")
    return merge(tree, {"schedule": {"warmup": shorter}})


def _kinds(tree: Tree) -> Tree:
    """The default kinds, so that `optimizer.lr=…` alone is a setting of AdamW."""
    kinds: Tree = {"schedule": {"kind": "cosine"}}
    if "optimizer" in tree:
        kinds["optimizer"] = {"kind": "adamw"}
    if "tokenizer" in tree:
        encodes = tree.get("model", {}).get("kind") == "encoder"  # which needs the special tokens of WordPiece
        kinds["tokenizer"] = {"kind": "wordpiece" if encodes else "bpe"}
    if "validation" in tree.get("data", {}):
        kinds["data"] = {"validation": {"kind": "hash"}}
    return kinds
