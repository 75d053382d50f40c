"""Resolve a name, a file and overrides to a recipe, with everything they imply made explicit."""

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from weft.config import Tree, assignments, flat, merge, nested, read_toml, validate
from weft.errors import ConfigError, download_first, quoted, suggestion
from weft.models.presets import PRESETS, preset
from weft.progress import Log, log_to_stderr
from weft.recipe.config import SOURCE_TOKENIZER, Recipe, SettledRecipe
from weft.recipe.objective import OBJECTIVES, upgrade
from weft.recipe.optimizer import Noam

Changes = Iterable[str] | Mapping[str, Any]  # key=value overrides, or a table of dotted keys
DEFAULT_OBJECTIVES = {
    "encoder-decoder": "pairs",
    "bahdanau": "pairs",
    "elmo": "bidirectional",
    "word2vec": "word-vectors",
    "glove": "word-vectors",
}
ORIGINS = ("sources", "prepared", "mixture")  # keys of `data` that say where text comes from; a recipe sets one


def resolve(
    source: str | Path | Recipe, changes: Changes = (), data: Sequence[str] = (), *, log: Log = log_to_stderr
) -> Recipe:
    """Return the recipe that `source` names, with `changes` applied and `data` as its text.

    `source` is a .toml file, a run's folder, a recipe shipped with weft, a preset, or a Recipe. `changes` are key=value
    overrides or a table of dotted keys. `model` may be a preset's name, or a table with `preset = "…"` and the settings
    that differ. A setting with variants may be given by the kind alone (`tokenizer=char`). Names from earlier versions
    are accepted and logged. A run's folder together with other text means fine-tuning that run's weights.
    """
    above = changed_tables(changes)
    if isinstance(source, Recipe):
        tree = source.model_dump(mode="json", exclude_none=True)
        tree = _without_data(tree, above, log) if data else tree
        tree = _with_warmup(merge(tree, above), above, log)
        return _with_vocabulary(validate(Recipe, merge(tree, {"data": {"sources": list(data)}} if data else {})))
    source = str(source)
    tree, where = _find(source)
    if fine_tunes(source, above, data):
        tree = _fine_tuning(tree, source, above)
        text = ", ".join(data) or "the given data"
        log(f"fine-tuning the weights of {source} on {text}; {source} itself stays unchanged")
    if data:
        tree = _without_data(tree, above, log)
    if "init" in above:  # that run's model and tokenizers replace the recipe's
        tree = {key: value for key, value in tree.items() if key not in ("model", "tokenizer", "source_tokenizer")}
    tree, notes = upgrade(merge(_expand(tree, where), above))
    for note in notes:
        log(note)
    blamed = "" if above else where
    _check_tables(tree, blamed)
    tree = _with_warmup(_with_head(_with_objective(_with_init(tree))), above, log)
    if data:
        tree["data"] = {**tree.get("data", {}), "sources": list(data)}
    return _with_vocabulary(validate(Recipe, merge(_default_kinds(tree), tree), blamed))


def fine_tunes(source: str, above: Mapping[str, Any], data: Sequence[str]) -> bool:
    """Return whether a run's weights are fine-tuned: its folder is named together with other text."""
    changed = above.get("data")
    has_text = bool(data) or (isinstance(changed, Mapping) and any(changed.get(key) for key in ORIGINS))
    return is_run(source) and has_text and "init" not in above


def is_run(source: str) -> bool:
    return (Path(source) / "config.toml").is_file()


def _fine_tuning(tree: Tree, run: str, above: Mapping[str, Any]) -> Tree:
    """Return a recipe that starts from a run's weights, with its tokenizer and objective. Steps, learning rate and
    batches are left open: the run's were chosen for fresh weights and another text."""
    kept: Tree = {key: tree[key] for key in ("name", "seed", "objective", "adapter") if key in tree}
    data = tree.get("data", {})
    if "objective" not in above and isinstance(data, Mapping):  # these settings depend on the objective
        kept["data"] = {key: data[key] for key in ("column", "on_error", "document_mask", "validation") if key in data}
    return {**kept, "init": run}


def _without_data(tree: Tree, above: Mapping[str, Any], log: Log) -> Tree:
    """Remove a recipe's files, including its validation files, because other text replaces them."""
    data, changed = tree.get("data"), above.get("data")
    if not isinstance(data, Mapping):
        return tree
    removed = {*ORIGINS, "targets"}
    if any(data.get(key) for key in ORIGINS):
        removed.add("encoding")  # describes those files
    validation = data.get("validation")
    if isinstance(validation, Mapping) and validation.get("kind") == "files":
        removed.add("validation")
        if not (isinstance(changed, Mapping) and "validation" in changed):
            files = ", ".join(map(str, validation.get("sources", ())))
            hash_split = "data.validation = hash: a tenth is held out"
            log(f"{hash_split}; the recipe's validation files ({files}) go with its text")
    return {**tree, "data": {key: value for key, value in data.items() if key not in removed}}


def recipe_names() -> list[str]:
    """Return the names of the recipes shipped with weft."""
    files = (entry.name for entry in shipped_recipes().iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def shipped_recipes() -> Traversable:
    """Return the folder of the recipes shipped with weft."""
    return resources.files("weft") / "recipes"


def _find(source: str) -> tuple[Tree, str]:
    """Return the tables of a named recipe, and the name to use for them in errors."""
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
        problem = f"{source}: neither a recipe (.toml) nor a run"
        raise ConfigError(f"{problem}; to train on a text: weft train gpt-tiny --data {quoted(source)}")
    if "://" in source:
        raise ConfigError(f"{download_first(source)}: weft train gpt-tiny --data FILE")
    runs = (str(config.parent) for config in Path("runs").glob("*/config.toml"))
    known = suggestion(source, [*recipe_names(), *PRESETS, *runs])
    raise ConfigError(f"'{source}': no such recipe or preset; {known}")


# settings that may change when a run is resumed: single keys, and whole tables
EXTENDABLE = ("steps", "evaluate.every", "evaluate.patience", "batch.micro", "batch.recompute")
EXTENDABLE_TABLES = ("checkpoint", "log", "parallel")


def extend_recipe(recipe: SettledRecipe, changes: Changes) -> tuple[SettledRecipe, dict[str, str]]:
    """Return a run's recipe with changes for resuming it, and a message per changed key; refuse all other changes."""
    above = changed_tables(changes)
    tree = recipe.model_dump(mode="json", exclude_none=True)
    steps, warmup = above.get("steps"), recipe.schedule.warmup or 0
    if isinstance(steps, int) and steps < warmup and not isinstance(recipe.schedule, Noam):
        raise ConfigError(f"steps = {steps}: the run's learning rate warms up for {warmup} steps; set more")
    extended = validate(SettledRecipe, merge(tree, above))
    for key in flat(above):
        if key not in EXTENDABLE and key.partition(".")[0] not in EXTENDABLE_TABLES:
            allowed = ", ".join((*EXTENDABLE, *(f"{table}.*" for table in EXTENDABLE_TABLES)))
            hint = "To train its weights differently: weft train RUN --data FILE"
            raise ConfigError(f"{key}: can't change within a run; these can: {allowed}. {hint}")
    before, after = flat(tree), flat(extended.model_dump(mode="json", exclude_none=True))
    changed = (key for key in flat(above) if before.get(key) != after.get(key))
    return extended, {key: f"{key} = {after.get(key)} instead of {before.get(key)}" for key in changed}


def changed_tables(changes: Changes) -> Tree:
    """Return key=value overrides, or a table of dotted keys, as nested tables.

    Shorter keys come first, so that `tokenizer.lowercase=true` adds to `tokenizer=char` whichever was written first.
    """
    tree: Tree = {}
    for change in sorted(changes, key=lambda change: str(change).partition("=")[0].count(".")):
        table = nested(change, changes[change]) if isinstance(changes, Mapping) else assignments([change])
        tree = merge(tree, _expand(table, "model"))
    return tree


def run_name(text: str) -> str:
    """Turn any text into a valid name of a run or folder, of letters, digits and . _ + -"""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).lstrip("-._+").rstrip("-._") or "run"  # keep transformer++'s plus


def _expand(tree: Tree, where: str) -> Tree:
    """Expand `model = "llama-tiny"` or `model.preset = "llama-tiny"` to the preset's settings, bare kinds to tables."""
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
        overrides = {key: value for key, value in model.items() if key != "preset"}
        if not isinstance(model["preset"], str):
            raise ConfigError(f"{where}: model.preset = {model['preset']!r}: expected a preset's name")
        tree["model"] = merge(preset(model["preset"]).model_dump(mode="json", exclude_none=True), overrides)
    return tree


def _check_tables(tree: Tree, source: str) -> None:
    """Refuse values that aren't tables where tables are read before the whole recipe is validated."""
    where = f"{source}: " if source else ""
    model = tree.get("model", {})
    tables = {"data": tree.get("data", {}), "objective": tree.get("objective", {}), "model": model}
    if isinstance(model, Mapping):
        tables["model.head"] = model.get("head", {})
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            hint = "; files are given with --data, or as data.sources" if key == "data" else ""
            raise ConfigError(f"{where}{key} = {table!r}: expected a table{hint}")
        if not isinstance(table.get("kind", ""), str):
            raise ConfigError(f"{where}{key}.kind = {table['kind']!r}: expected a kind's name")


def _with_init(tree: Tree) -> Tree:
    """Fill in the model and the tokenizers of the run that `init` names, unless the recipe sets them."""
    init = tree.get("init")
    if not isinstance(init, str):
        return tree
    if not is_run(init):
        raise ConfigError(f"init = '{init}': not a run: there is no config.toml in it")
    earlier = read_toml(Path(init) / "config.toml")
    if not isinstance(earlier.get("model"), Mapping):
        raise ConfigError(f"init = '{init}': there is no model in its config.toml; it isn't a run's, or is damaged")
    tokenizers: Tree = {"tokenizer": {"kind": "pretrained", "path": init}}
    if "source_tokenizer" in earlier:
        tokenizers["source_tokenizer"] = {"kind": "pretrained", "path": str(Path(init) / SOURCE_TOKENIZER)}
    return {**tokenizers, **tree, "model": merge(earlier["model"], tree.get("model", {}))}


def _with_vocabulary(recipe: Recipe) -> Recipe:
    """Set the model's vocabulary size to that of its tokenizer, replacing the preset's."""
    for tokenizer, key in ((recipe.tokenizer, "vocab_size"), (recipe.source_tokenizer, "source_vocab_size")):
        size, model = getattr(tokenizer, "vocab_size", None), recipe.model
        if size is not None and hasattr(model, key) and not covers_vocabulary(getattr(model, key), size):
            recipe = recipe.replace(model=model.replace(**{key: size}))
    return recipe


def covers_vocabulary(rows: Any, size: int) -> bool:
    """Return whether an embedding table has one row per token, or is padded to a multiple of 64 or 128 for faster
    kernels. Padding rows are never a target."""
    return rows in (size, -(-size // 64) * 64, -(-size // 128) * 128)


def _with_objective(tree: Tree) -> Tree:
    """Set the default objective of the kind of model."""
    model, objective = tree.get("model", {}), tree.get("objective", {})
    if model.get("kind") in ("word2vec", "glove") and "validation" not in tree.get("data", {}):
        # their loss is no measure of the vectors, so nothing is held out for it
        tree = {**tree, "data": {**tree.get("data", {}), "validation": {"kind": "none"}}}
    if "kind" in objective:
        return tree
    default = DEFAULT_OBJECTIVES.get(model.get("kind", ""), "next-token")
    if model.get("kind") == "encoder":
        head = model.get("head", {}).get("kind")
        fitting = (kind for kind, its in OBJECTIVES.items() if its.kinds[0] == "encoder" and head == its.heads[0])
        default = next(fitting, default)
    return {**tree, "objective": {"kind": default, **objective}}


def _with_head(tree: Tree) -> Tree:
    """Give a Transformer the head that its objective needs, unless it has one that fits."""
    model, objective = tree.get("model", {}), OBJECTIVES.get(tree["objective"]["kind"])
    if objective is None or model.get("kind") not in ("encoder", "decoder") or model["kind"] not in objective.kinds:
        return tree
    pooling = tree["objective"].get("pooling")
    if model.get("head", {}).get("kind") in objective.heads:
        return {**tree, "model": {**model, "head": {**model["head"], "pooling": pooling}}} if pooling else tree
    kind, is_decoder = objective.heads[0], model["kind"] == "decoder"
    head: Tree = {"kind": kind}
    if kind in ("sequence", "token"):
        head["labels"] = 2  # placeholder until the rows are read
    if kind == "sequence" and is_decoder:
        head["pooler"] = False
    if pooling or (kind in ("sequence", "embedding") and is_decoder):
        head["pooling"] = pooling or "last"  # only the last token of a decoder attends to all others
    return {**tree, "model": {**model, "head": head}}


def _with_warmup(tree: Tree, above: Mapping[str, Any], log: Log) -> Tree:
    """Shorten the recipe's warm-up if `steps` was overridden with fewer steps than that."""
    settings, changed = flat(tree), flat(above)
    steps, warmup = changed.get("steps"), settings.get("schedule.warmup")
    fixed = "schedule.warmup" in changed or settings.get("schedule.kind") == "noam"
    if fixed or not (isinstance(steps, int) and isinstance(warmup, int) and warmup > steps):
        return tree
    shorter = max(1, steps // 10)
    log(f"schedule.warmup = {shorter} instead of {warmup}, which would be longer than the {steps} steps")
    return merge(tree, {"schedule": {"warmup": shorter}})


def _default_kinds(tree: Tree) -> Tree:
    """Return the default kinds of tables that have variants, so that `optimizer.lr=…` alone is a setting of AdamW."""
    kinds: Tree = {"schedule": {"kind": "cosine"}}
    if "optimizer" in tree:
        kinds["optimizer"] = {"kind": "adamw"}
    if "tokenizer" in tree:
        fitting = {"encoder": "wordpiece", "word2vec": "word", "glove": "word"}  # an encoder needs [CLS] and [SEP]
        kinds["tokenizer"] = {"kind": fitting.get(tree.get("model", {}).get("kind", ""), "bpe")}
    if "validation" in tree.get("data", {}):
        kinds["data"] = {"validation": {"kind": "hash"}}
    return kinds
