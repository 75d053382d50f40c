"""What a recipe leaves open, chosen from the amount of text and the kind of machine, with a reason for each choice.

The choices are a function of the recipe, the text's size and the kind of device alone, never of a measured speed: the
same text on another machine of the kind gives the same run.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from weft.config import Tree, merge, validate
from weft.errors import ConfigError
from weft.models.config import NGram, TransformerConfig
from weft.nn.config import Gated
from weft.recipe.config import Noam, Recipe
from weft.text.config import BPE, Unigram, WordPiece

# What a run may cost where the recipe doesn't say how long it is.
CPU_FLOPS = 5.5e12  # two or three minutes of two slow cores
GPU_FLOPS = 5e17  # half an hour or so of one large GPU
MEASURED = 64 << 20  # bytes of text that are read to size it up


@dataclass(frozen=True)
class Choice:
    """One setting that the recipe left open."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}: {self.why}"


@dataclass(frozen=True)
class TextFacts:
    """How much text there is; `whole` is False where reading stopped before its end. Rows are counted if there are."""

    bytes: int
    whole: bool = True
    rows: int | None = None

    def __str__(self) -> str:
        if self.rows is not None:
            return f"{self.rows:,} rows"
        size = f"{self.bytes / 1e6:,.1f} MB" if self.bytes >= 100_000 else f"{self.bytes:,} bytes"
        return size if self.whole else f"more than {size}"


def measure(texts: Iterable[str], most: int = MEASURED) -> TextFacts:
    """Size up a text; beyond `most` bytes the choices no longer depend on it, so reading stops."""
    total = 0
    for text in texts:
        total += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if total > most:
            return TextFacts(total, whole=False)
    return TextFacts(total)


# what matters where nothing is learned step by step; the rest has values too, which nobody needs to hear of
COUNTING = ("tokenizer", "tokenizer.vocab_size", "steps", "batch.length")


def settle(recipe: Recipe, text: TextFacts, device: str = "cpu") -> tuple[Recipe, list[Choice]]:
    """The recipe with nothing left open, and what was chosen. `device` is "cpu" or "cuda"."""
    chosen = _Choices(recipe)
    gpu = device == "cuda"
    _tokenizer(chosen, text, gpu)
    if isinstance(recipe.model, NGram):
        chosen.open("steps", 1, "n-grams are counted in one pass")
        chosen.open("batch.size", 1, "n-grams are counted in one pass")
        chosen.open("batch.length", 256, "the window that evaluation reads")
    tokens = round(0.9 * text.bytes / bytes_per_token(chosen.recipe))
    parameters = count_parameters(chosen.recipe)
    if recipe.objective.reads == "rows":
        _row_batch(chosen, text, gpu)
        _row_steps(chosen, text, tokens, parameters, gpu)
    else:
        _batch(chosen, tokens, parameters, gpu)
        _steps(chosen, tokens, parameters, gpu)
    _rates(chosen, parameters)
    steps = chosen.recipe.steps
    assert steps is not None
    chosen.open("precision", "bf16" if gpu else "fp32", "what this kind of device does well")
    chosen.open("compile", gpu and steps >= 500, "compiling takes a minute and pays on a long GPU run")
    chosen.open("evaluate.every", max(1, steps // 10), "ten times a run")
    every = chosen.recipe.evaluate.every
    if not gpu:
        chosen.open("evaluate.tokens", 32768, "enough to see the trend; the last evaluation reads everything")
    chosen.open("checkpoint.every", every, "with each evaluation")
    chosen.open("log.every", max(1, min(10, steps // 20)), "a smooth curve")
    if isinstance(recipe.model, NGram):
        return chosen.recipe, [choice for choice in chosen.made if choice.key in COUNTING]
    return chosen.recipe, chosen.made


def fit_vocabulary(recipe: Recipe, vocab_size: int, source: int | None = None) -> tuple[Recipe, list[Choice]]:
    """The recipe with a model as large as the trained tokenizer's vocabulary, and `source`'s where that has its own.

    A model's table may be longer than the vocabulary if it only rounds it up to a multiple of 64 or 128, which some
    kernels like; the extra rows are never a target.
    """
    model, made = recipe.model, []
    if not _covers(model.vocab_size, vocab_size):
        model = model.replace(vocab_size=vocab_size)
        made.append(Choice("model.vocab_size", vocab_size, "as many as the tokenizer has"))
    if recipe.source_tokenizer is not None and source is not None:
        now = getattr(model, "source_vocab_size", None)
        if now is None or not _covers(now, source):
            model = model.replace(source_vocab_size=source)
            made.append(Choice("model.source_vocab_size", source, "as many as the source's tokenizer has"))
    return (recipe.replace(model=model.model_dump(exclude_none=True)) if made else recipe), made


def _covers(now: int, vocab_size: int) -> bool:
    return now == vocab_size or any(now == -(-vocab_size // block) * block for block in (64, 128))


def unsettled(recipe: Recipe) -> list[str]:
    """The keys that `settle` would still choose."""
    tree = recipe.model_dump()
    keys = ["steps", "precision", "compile", "tokenizer", "batch.length"]
    keys += ["batch.size"] if recipe.batch.tokens is None else []
    keys += ["evaluate.every", "checkpoint.every", "log.every"]
    if not isinstance(recipe.schedule, Noam):
        keys += ["optimizer.lr", "schedule.warmup"]
    return [key for key in keys if _get(tree, key) is None]


def check_trainable(recipe: Recipe, vocab_size: int) -> None:
    """Refuse a model that this objective cannot teach, or that lacks rows for some tokens."""
    recipe.objective.check(recipe.model)
    if recipe.model.vocab_size < vocab_size:
        raise ConfigError(f"model.vocab_size = {recipe.model.vocab_size}: the tokenizer has {vocab_size} tokens")


def bytes_per_token(recipe: Recipe) -> float:
    """Roughly how many bytes of English a token covers."""
    tokenizer = recipe.tokenizer
    if isinstance(tokenizer, BPE | WordPiece | Unigram):
        return max(1.0, 0.35 * math.log2(max(2, tokenizer.vocab_size or 8192)) - 1.2)
    return {"word": 5.5, "pretrained": 4.0}.get(tokenizer.kind if tokenizer is not None else "", 1.0)


def count_parameters(recipe: Recipe) -> int:
    """Roughly how many weights multiply each token: layers and the output table, without norms and biases."""
    model = recipe.model
    if isinstance(model, NGram):
        return 0
    vocab_size = getattr(recipe.tokenizer, "vocab_size", None) or min(model.vocab_size, 8192)
    if isinstance(model, TransformerConfig):
        heads = model.attention
        d_all = model.d_head * heads.heads
        attention = 2 * model.d_model * (d_all + model.d_head * heads.groups)
        matrices = 3 if isinstance(model.feedforward, Gated) else 2
        per_layer = attention + matrices * model.d_model * model.feedforward.d_ff
    else:
        gates = {"elman": 1, "gru": 3, "lstm": 4}[model.cell]
        per_layer = gates * 2 * model.d_model**2
    return model.layers * per_layer + vocab_size * model.d_model


# ---- the choices, each filling what is open


class _Choices:
    """A recipe being settled."""

    def __init__(self, recipe: Recipe):
        self.tree: Tree = recipe.model_dump(mode="json", exclude_none=True)
        self.made: list[Choice] = []
        self.recipe = recipe

    def open(self, key: str, value: Any, why: str) -> None:
        """Set `key` if the recipe leaves it open."""
        if _get(self.tree, key) is None:
            table: Any = value
            for part in reversed(key.split(".")):
                table = {part: table}
            self.tree = merge(self.tree, table)
            self.recipe = validate(Recipe, self.tree)
            shown = value if not isinstance(value, dict) else value["kind"]
            self.made.append(Choice(key, shown, why))


def _get(tree: Tree, key: str) -> Any:
    here: Any = tree
    for part in key.split("."):
        here = here.get(part) if isinstance(here, dict) else None
    return here


def _tokenizer(chosen: _Choices, text: TextFacts, gpu: bool) -> None:
    goal, model = chosen.recipe.objective, chosen.recipe.model
    if model.kind == "encoder":
        chosen.open("tokenizer", {"kind": "wordpiece"}, "BERT's pieces of words, with the special tokens it reads")
    elif goal.kind == "spans":
        marks = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "extra": [f"<extra_id_{n}>" for n in range(100)]}
        chosen.open("tokenizer", {"kind": "bpe", "specials": marks}, "pieces of words, and marks for what was cut out")
    chosen.open("tokenizer", {"kind": "bpe"}, "pieces of words: no text it cannot spell, fewer steps than characters")
    if isinstance(chosen.recipe.tokenizer, BPE | WordPiece | Unigram):
        # each token should be met often enough to be learned: a doubling for every fourfold text
        size = 2 ** round(11 + 0.5 * math.log2(max(1, text.bytes) / 1.5e6))
        size = max(512, min(32768 if gpu else 8192, size))
        chosen.open("tokenizer.vocab_size", size, f"suits {text} of text")


def _batch(chosen: _Choices, tokens: int, parameters: int, gpu: bool) -> None:
    model = chosen.recipe.model
    context = getattr(model, "context", 256)
    most = context if gpu else min(context, 256)
    length = max(8, min(most, tokens // 8))
    chosen.open("batch.length", length, "the model's context" if length == context else "what fits text and device")
    length = chosen.recipe.batch.length
    assert length is not None
    if gpu:
        wanted = 2 ** round(math.log2(max(2**14, min(2**19, 2**19 * math.sqrt(max(1, parameters) / 1e8)))))
    else:
        wanted = 512  # where compute is short, many small steps learn more than few large ones
    size = max(1, min(wanted // length, max(1, tokens // (4 * length))))
    chosen.open("batch.size", size, f"{size * length:,} tokens a step")
    if gpu:
        width = getattr(model, "d_model", 1024)
        at_once = 2**15 if width <= 1024 else 2**14 if width <= 2048 else 2**13
        size = chosen.recipe.batch.size or size
        micro = max(1, min(size, at_once // length))
        if micro < size:
            chosen.open("batch.micro", micro, "what one pass holds in memory")


def _steps(chosen: _Choices, tokens: int, parameters: int, gpu: bool) -> None:
    batch, model = chosen.recipe.batch, chosen.recipe.model
    assert batch.size is not None and batch.length is not None
    per_step = batch.size * batch.length
    width, layers = getattr(model, "d_model", 0), getattr(model, "layers", 0)
    work = 6 * max(1, parameters) + 12 * width * layers * batch.length
    affordable = (GPU_FLOPS if gpu else CPU_FLOPS) / work
    epochs = 20 * max(1, tokens)
    wanted = min(affordable, epochs)
    steps = max(100, round(wanted / per_step / 50) * 50)
    if steps == 100 and affordable / per_step < 100:
        why = "few, because this model is large for this device; set steps= for a real run"
    elif affordable <= epochs:
        why = f"{'half an hour of a large GPU' if gpu else 'minutes on two slow cores'}; more steps, lower loss"
    else:
        why = f"{steps * per_step / max(1, tokens):.0f} times through the text"
    chosen.open("steps", steps, why)


def _row_batch(chosen: _Choices, text: TextFacts, gpu: bool) -> None:
    length = min(getattr(chosen.recipe.model, "context", 256), 512)
    chosen.open("batch.length", length, "longer rows are cut there")
    if chosen.recipe.batch.size is None and chosen.recipe.batch.tokens is None:
        if chosen.recipe.objective.kind in ("pairs", "chat"):
            chosen.open("batch.tokens", 8192 if gpu else 2048, "rows of like length, padding counted")
        else:
            size = max(1, min(32 if gpu else 16, (text.rows or 1) // 4))
            chosen.open("batch.size", size, "rows of like length")


def _row_steps(chosen: _Choices, text: TextFacts, tokens: int, parameters: int, gpu: bool) -> None:
    recipe = chosen.recipe
    rows = max(1, text.rows or 1)
    if recipe.batch.size is not None:
        per_epoch, per_step = rows / recipe.batch.size, recipe.batch.size * max(1, tokens / rows)
    else:
        assert recipe.batch.tokens is not None
        per_epoch, per_step = max(1.0, tokens / recipe.batch.tokens), float(recipe.batch.tokens)
    epochs = 3 if recipe.init is not None else 20
    affordable = (GPU_FLOPS if gpu else CPU_FLOPS) / (6 * max(1, parameters)) / per_step
    steps = max(50, round(min(epochs * per_epoch, affordable) / 10) * 10)
    if affordable < epochs * per_epoch:
        why = f"{'half an hour of a large GPU' if gpu else 'minutes on two slow cores'}; more steps, lower loss"
    else:
        why = f"about {steps / per_epoch:.0f} times through the rows"
    chosen.open("steps", steps, why)


def _rates(chosen: _Choices, parameters: int) -> None:
    if isinstance(chosen.recipe.schedule, Noam):
        return
    steps, batch = chosen.recipe.steps, chosen.recipe.batch
    assert steps is not None and batch.length is not None
    if chosen.recipe.init is not None:
        # BERT's 5e-5 at 110 M parameters (Devlin et al. 2019, §A.3); small additions bear ten times that
        gentle = 5e-5 * (max(1, parameters) / 1.1e8) ** -0.33 * (1 if chosen.recipe.adapter is None else 10)
        chosen.open("optimizer.lr", float(f"{min(2e-3, gentle):.2g}"), "gentle with weights that were trained before")
        chosen.open("schedule.warmup", max(1, steps // 10), "a tenth of the steps")
        return
    # GPT-3's table of rates (Brown et al. 2020, table 2.1) follows this power of the size closely
    rate = min(3e-3, 3e-3 * (max(1, parameters) / 1e6) ** -0.33)
    rate *= min(1.0, (batch.tokens or (batch.size or 1) * batch.length) / 2048) ** 0.25
    if chosen.recipe.optimizer.kind == "sgd":
        rate *= 100
    chosen.open("optimizer.lr", float(f"{rate:.2g}"), "smaller models and larger batches bear larger steps")
    chosen.open("schedule.warmup", min(2000, max(1, steps // 20)), "a twentieth of the steps")
