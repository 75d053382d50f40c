"""What a recipe leaves open, chosen from the data and the kind of machine, with a reason for each choice.

The choices depend on the recipe, the amount of data and the kind of device: the same text on another machine of the
kind gives the same run. One alone follows a measured speed, the number format on a processor: some multiply bf16
several times as fast as fp32, others a hundred times as slowly. The tokenizer is chosen first, from the size of the
files; everything else once the data is tokens and its amount is known.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.config import Tree, merge, nested, validate
from weft.costs.count import writing_weights
from weft.models.config import NGram, TransformerConfig
from weft.recipe.config import Precision, Recipe, SettledRecipe
from weft.recipe.objective import LabelObjective
from weft.recipe.optimizer import Muon, Noam
from weft.recipe.resolve import rounded_up
from weft.text.config import BPE, TokenizerConfig, Unigram, WordPiece

# The operations of a run where the recipe doesn't say how long it is, and the time that they take.
CPU_BUDGET = (5.5e12, "minutes on two slow cores")  # two or three
GPU_BUDGET = (5e17, "half an hour on a large GPU")

EVALUATION_SHARE = 0.1  # of the operations of training, for the evaluations during it
MIN_EVALUATION_TOKENS, MAX_EVALUATION_TOKENS = 1024, 32768  # below, the curve is noise; above, it only costs time

CARRIED_LENGTH = 64  # of a row that is continued: about what Zaremba et al. 2014 and Merity et al. 2018 have

# Muon: the objectives and the widest layers for which it was measured to gain more than its rounds cost (on a GPU also
# by Jordan et al. 2024), how much higher its rate is than AdamW's, and what differs on a processor from its defaults
MUON_OBJECTIVES = {"cpu": ("next-token",), "cuda": ("next-token", "masked", "pairs")}
MAX_MUON_WIDTH = {"cpu": 256, "cuda": 1024}
MUON_RATE = 2.5
MUON = {"cpu": {"kind": "muon", "momentum": 0.9, "rounds": 3, "betas": [0.9, 0.99]}, "cuda": {"kind": "muon"}}

# Where a text is read so many times, a model learns it by heart unless its weights forget: rate × decay × steps is how
# often they do so in a run. Measured with Muon; in a processor's short runs it pays later than in a GPU's long ones
MANY_EPOCHS = {"cpu": 15, "cuda": 6}
TIMES_FORGOTTEN = 5
MIN_FORGETTING_STEPS = 100  # the shortest run it was measured in; in far shorter ones each step would forget too much

MIN_SPEEDUP = 1.5  # of bf16's products over fp32's: a step has more than these, and casts besides
MIN_PRODUCT_FLOPS = 2e8  # of a feed-forward product: below, a format changes little

# operations a second by number format, of products (rows, inputs) times (inputs, outputs)
Measure = Callable[[int, int, int], Mapping[str, float]]

# what matters for n-grams, which are counted; the other settings get values too, but nobody needs to see them
COUNTING = ("tokenizer", "tokenizer.vocab_size", "steps", "batch.length", "model.vocab_size")


@dataclass(frozen=True)
class Choice:
    """One setting that the recipe left open."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}: {self.why}"


RIPE = 20  # tokens a parameter after which weights are taken as trained (Hoffmann et al. 2022, table 3)


@dataclass(frozen=True)
class Facts:
    """What is known of the data once it is prepared: the training text in bytes, the size of the tokenizer's vocabulary
    and of the source's own where there is one, rows and labels where it has them. `trained` are the tokens that the
    weights of `init` have learned from; None where that isn't known, as of a published model."""

    bytes: int
    vocab_size: int
    source_vocab_size: int | None = None
    rows: int | None = None
    labels: tuple[str, ...] | None = None
    trained: int | None = None

    def __str__(self) -> str:
        return f"{size_of(self.bytes)} of text" if self.rows is None else f"{self.rows:,} rows"


def size_of(bytes_: int) -> str:
    return f"{bytes_ / 1e6:,.1f} MB" if bytes_ >= 100_000 else f"{bytes_:,} bytes"


def choose_tokenizer(recipe: Recipe, bytes_: int, device: str = "cpu") -> tuple[TokenizerConfig, list[Choice]]:
    """The tokenizer for about `bytes_` of text, and what was chosen of it. `device` is "cpu" or "cuda"."""
    chosen = _Choices(recipe)
    if recipe.model.kind == "encoder":
        chosen.choose("tokenizer", {"kind": "wordpiece"}, "BERT's pieces of words, with the special tokens it reads")
    elif recipe.objective.sentinels:
        extra = [f"<extra_id_{n}>" for n in range(recipe.objective.sentinels)]
        specials = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "extra": extra}
        chosen.choose("tokenizer", {"kind": "bpe", "specials": specials}, "pieces of words, and marks for what was cut")
    chosen.choose("tokenizer", {"kind": "bpe"}, "pieces of words: it can spell any text in fewer steps than characters")
    if isinstance(chosen.recipe.tokenizer, BPE | WordPiece | Unigram):
        # each token should occur often enough to be learned: twice as many for four times the text
        size = 2 ** round(11 + 0.5 * math.log2(max(1, bytes_) / 1.5e6))
        size = max(512, min(32768 if device == "cuda" else 8192, size))
        chosen.choose("tokenizer.vocab_size", size, f"suits {size_of(bytes_)} of text")
    assert chosen.recipe.tokenizer is not None
    return chosen.recipe.tokenizer, chosen.made


def settle(
    recipe: Recipe, facts: Facts, device: str = "cpu", measure: Measure | None = None
) -> tuple[SettledRecipe, list[Choice]]:
    """A recipe that has its tokenizer with nothing left open, and what was chosen. `device` is "cpu" or "cuda". A
    processor is measured for its number format; without `measure` that is fp32, which all of them multiply well."""
    chosen, gpu = _Choices(recipe), device == "cuda"
    if isinstance(recipe.model, NGram):
        chosen.choose("steps", 1, "n-grams are counted in one pass")
        chosen.choose("batch.size", 1, "n-grams are counted in one pass")
        chosen.choose("batch.length", 256, "the window that evaluation reads")
    vocab_size = getattr(recipe.tokenizer, "vocab_size", None) or min(recipe.model.vocab_size, 8192)
    weights = sum(writing_weights(recipe.model, vocab_size).values())
    bytes_per_token = {"word": 5.5, "pretrained": 4.0}.get(recipe.tokenizer.kind if recipe.tokenizer else "", 1.0)
    if isinstance(recipe.tokenizer, BPE | WordPiece | Unigram):  # roughly, of English
        bytes_per_token = max(1.0, 0.35 * math.log2(max(2, recipe.tokenizer.vocab_size or 8192)) - 1.2)
    tokens = round(0.9 * facts.bytes / bytes_per_token)
    if recipe.data.tokens is not None:
        tokens = min(tokens, recipe.data.tokens * max(1, len(recipe.data.parts)))
    known = recipe.adapter is None and facts.trained is not None
    ripe = 0.0 if recipe.init is None else min(1.0, (facts.trained or 0) / (RIPE * max(1, weights))) if known else 1.0
    scale = _Scale(tokens, weights, gpu, *(GPU_BUDGET if gpu else CPU_BUDGET), ripe)
    _optimizer(chosen, scale)
    if recipe.objective.reads == "rows":
        _row_batch(chosen, facts, gpu)
        _row_steps(chosen, facts, scale)
    else:
        _batch(chosen, scale)
        _steps(chosen, scale)
    _rates(chosen, scale)
    if recipe.optimizer is None and recipe.objective.kind == "next-token":
        _decay(chosen, scale)
    if gpu:
        chosen.choose("precision", "bf16", "what this kind of device does well")
    elif recipe.precision is None:
        chosen.choose("precision", *_precision(chosen, measure))
    steps = chosen.tree["steps"]
    chosen.choose("compile", gpu and steps >= 500, "compiling takes a minute and pays off in a long GPU run")
    chosen.choose("log.every", max(1, min(10, steps // 20)), "a smooth curve")
    _evaluations(chosen, facts, scale)
    _labels(chosen, facts)
    _vocabulary(chosen, facts)
    counted = isinstance(recipe.model, NGram)
    made = [choice for choice in chosen.made if not counted or choice.key in COUNTING]
    return validate(SettledRecipe, chosen.tree), made


def open_keys(recipe: Recipe) -> list[str]:
    """The keys that a recipe leaves open, which are chosen once its text is known."""
    tokenizer, chosen = choose_tokenizer(recipe, 1_000_000)
    whole = recipe.replace(tokenizer=tokenizer.model_dump(mode="json", exclude_none=True))
    facts = Facts(1_000_000, recipe.model.vocab_size, rows=1000, labels=("0", "1"))
    return [choice.key for choice in (*chosen, *settle(whole, facts)[1])]


@dataclass(frozen=True)
class _Scale:
    """How large the run is: tokens of training text, weights that multiply each of them, and what may be spent.

    `ripe` is how far the weights were trained before, from 0, not at all, to 1.
    """

    tokens: int
    parameters: int
    gpu: bool
    flops: float
    time: str
    ripe: float = 0.0


class _Choices:
    """A recipe being settled."""

    def __init__(self, recipe: Recipe):
        self.tree: Tree = recipe.model_dump(mode="json", exclude_none=True)
        self.made: list[Choice] = []
        self.recipe = recipe

    def choose(self, key: str, value: Any, why: str) -> Any:
        """Set `key` if the recipe leaves it open; what it is set to."""
        given: Any = self.tree
        for part in key.split("."):
            given = given.get(part) if isinstance(given, dict) else None
        if given is None:
            self.set(key, value, why)
        return value if given is None else given

    def set(self, key: str, value: Any, why: str = "") -> None:
        """Set `key`; with a reason, it is one of the choices made."""
        if why:
            self.made.append(Choice(key, value["kind"] if isinstance(value, dict) else value, why))
        self.tree = merge(self.tree, nested(key, value))
        self.recipe = validate(Recipe, self.tree)


def _optimizer(chosen: _Choices, scale: _Scale) -> None:
    """Muon for Transformers that norm first and start from nothing, where it was measured; AdamW elsewhere."""
    recipe, model, device = chosen.recipe, chosen.recipe.model, "cuda" if scale.gpu else "cpu"
    if recipe.optimizer is not None:
        return
    fresh = recipe.init is None and not recipe.parallel.splits and not isinstance(recipe.schedule, Noam)
    known = (
        isinstance(model, TransformerConfig)
        and model.placement == "pre"
        and model.d_model <= MAX_MUON_WIDTH[device]
        and recipe.objective.kind in MUON_OBJECTIVES[device]
    )
    if fresh and known:
        chosen.set("optimizer", MUON[device], "from fresh weights it learns more in the same time than adamw")
    else:
        chosen.set("optimizer", {"kind": "adamw"}, "what most models are trained with")


def _batch(chosen: _Choices, scale: _Scale) -> None:
    model = chosen.recipe.model
    context = getattr(model, "context", 256)
    length = max(8, min(context if scale.gpu else min(context, 256), scale.tokens // 8))
    why = "the model's context" if length == context else "suits the text and the device"
    if chosen.recipe.can_carry and chosen.recipe.batch.carry is not False and length > CARRIED_LENGTH:
        # states go on from row to row, so nothing is lost by short ones, and more of them are read at once
        length, why = CARRIED_LENGTH, "short rows, each of which continues the one before it"
    length = chosen.choose("batch.length", length, why)
    # where compute is scarce, many small steps learn more than few large ones; but Muon's have a cost of their own
    wanted = 1024 if isinstance(chosen.recipe.optimizer, Muon) else 512
    if scale.gpu:
        wanted = 2 ** round(math.log2(max(2**14, min(2**19, 2**19 * math.sqrt(max(1, scale.parameters) / 1e8)))))
    size = max(1, min(wanted // length, max(1, scale.tokens // (4 * length))))
    size = chosen.choose("batch.size", size, f"{size * length:,} tokens a step")
    if scale.gpu:
        width = getattr(model, "d_model", 1024)
        at_once = 2**15 if width <= 1024 else 2**14 if width <= 2048 else 2**13
        micro = max(1, min(size, at_once // length))
        if micro < size:
            chosen.choose("batch.micro", micro, "as many as one pass holds in memory")
    if chosen.recipe.can_carry:
        fits = 4 * size * length <= scale.tokens
        why = "each row continues the one before it" if fits else "there is too little text for rows that continue"
        chosen.choose("batch.carry", fits, why)


def _steps(chosen: _Choices, scale: _Scale) -> None:
    batch, model = chosen.tree["batch"], chosen.recipe.model
    per_step = batch["size"] * batch["length"]
    width, layers = getattr(model, "d_model", 0), getattr(model, "layers", 0)
    per_token = 6 * max(1, scale.parameters) + 12 * width * layers * batch["length"]
    if isinstance(chosen.recipe.optimizer, Muon):
        # a round multiplies a matrix (d_model, n) by its own transpose and back, and the square between them by itself
        in_layers = writing_weights(model, 0)["layers"]
        per_token += round(5 * chosen.recipe.optimizer.rounds * width * in_layers / per_step)
    affordable = scale.flops / per_token
    epochs = 20 * max(1, scale.tokens)
    steps = max(100, round(min(affordable, epochs) / per_step / 50) * 50)
    if steps == 100 and affordable / per_step < 100:
        why = "few, because this model is large for this device; set steps= for a real run"
    elif affordable <= epochs:
        why = f"{scale.time}; more steps, lower loss"
    else:
        why = f"{steps * per_step / max(1, scale.tokens):.0f} times through the text"
    chosen.choose("steps", steps, why)


def _row_batch(chosen: _Choices, facts: Facts, gpu: bool) -> None:
    length = min(getattr(chosen.recipe.model, "context", 256), 512)
    chosen.choose("batch.length", length, "longer rows are cut there")
    if chosen.recipe.batch.size is None and chosen.recipe.batch.tokens is None:
        if chosen.recipe.objective.by_tokens:
            chosen.choose("batch.tokens", 8192 if gpu else 2048, "rows of similar length, padding included")
        else:
            size = max(1, min(32 if gpu else 16, (facts.rows or 1) // 4))
            chosen.choose("batch.size", size, "rows of similar length")


def _row_steps(chosen: _Choices, facts: Facts, scale: _Scale) -> None:
    batch, rows = chosen.tree["batch"], max(1, facts.rows or 1)
    if "size" in batch:
        per_epoch, per_step = rows / batch["size"], batch["size"] * max(1, scale.tokens / rows)
    else:
        per_epoch, per_step = max(1.0, scale.tokens / batch["tokens"]), float(batch["tokens"])
    epochs = 20 ** (1 - scale.ripe) * 3**scale.ripe
    affordable = scale.flops / (6 * max(1, scale.parameters)) / per_step
    steps = max(50, round(min(epochs * per_epoch, affordable) / 10) * 10)
    if affordable < epochs * per_epoch:
        why = f"{scale.time}; more steps, lower loss"
    else:
        why = f"about {steps / per_epoch:.0f} times through the rows"
    chosen.choose("steps", steps, why)


def _rates(chosen: _Choices, scale: _Scale) -> None:
    recipe, steps, batch = chosen.recipe, chosen.tree["steps"], chosen.tree["batch"]
    if isinstance(recipe.schedule, Noam):
        return
    # GPT-3's table of rates (Brown et al. 2020, table 2.1) follows this power of the size closely
    rate = min(3e-3, 3e-3 * (max(1, scale.parameters) / 1e6) ** -0.33)
    rate *= min(1.0, (batch.get("tokens") or batch["size"] * batch["length"]) / 2048) ** 0.25
    assert recipe.optimizer is not None, "it is chosen first"
    rate *= {"sgd": 100, "muon": MUON_RATE}.get(recipe.optimizer.kind, 1)
    why = "smaller models and larger batches tolerate higher learning rates"
    warmup, share = min(2000, max(1, steps // 20)), "a twentieth of the steps"
    if getattr(recipe.model, "placement", "pre") == "post" and scale.ripe < 1:
        warmup = min(4000, max(1, steps // 5))
        share = "a fifth of the steps: with norms after each layer the first ones must be small (Xiong et al. 2020)"
    elif recipe.init is not None:
        warmup, share = max(1, steps // 10), "a tenth of the steps"
    if recipe.init is not None:
        # BERT's 5e-5 at 110 M parameters (Devlin et al. 2019, §A.3); small additions tolerate ten times that
        gentle = 5e-5 * (max(1, scale.parameters) / 1.1e8) ** -0.33 * (1 if recipe.adapter is None else 10)
        rate = rate ** (1 - scale.ripe) * min(2e-3, gentle) ** scale.ripe
        why = "gentle with weights that were trained before" + ("" if scale.ripe == 1 else ", though not for long")
    chosen.choose("optimizer.lr", float(f"{rate:.2g}"), why)
    chosen.choose("schedule.warmup", warmup, share)


def _decay(chosen: _Choices, scale: _Scale) -> None:
    """Muon's weight decay where the text is read many times."""
    steps, batch, optimizer = chosen.tree["steps"], chosen.tree["batch"], chosen.recipe.optimizer
    epochs = steps * batch["size"] * batch["length"] / max(1, scale.tokens)
    many = steps >= MIN_FORGETTING_STEPS and epochs >= MANY_EPOCHS["cuda" if scale.gpu else "cpu"]
    if many and isinstance(optimizer, Muon) and optimizer.lr:
        decay = float(f"{TIMES_FORGOTTEN / (optimizer.lr * steps):.2g}")
        if decay > optimizer.weight_decay:
            why = f"the text is read {epochs:.0f} times; weights that forget don't learn it by heart"
            chosen.set("optimizer.weight_decay", decay, why)


def _precision(chosen: _Choices, measure: Measure | None) -> tuple[Precision, str]:
    """The number format of a processor, which is measured where that can matter."""
    model, batch = chosen.recipe.model, chosen.tree["batch"]
    if measure is None:
        return "fp32", "what this kind of device does well"
    if not isinstance(model, TransformerConfig):
        return "fp32", "a processor gains little by bf16 in this kind of model"
    at_once = batch["micro"] if isinstance(batch.get("micro"), int) else batch.get("size", 1)
    sizes = batch.get("tokens") or at_once * batch["length"], model.d_model, model.feedforward.d_ff
    if 2 * math.prod(sizes) < MIN_PRODUCT_FLOPS:
        return "fp32", "in products as small as these no other format gains much"
    return faster_format(measure(*sizes))


def faster_format(rates: Mapping[str, float]) -> tuple[Precision, str]:
    """bf16 where a processor multiplies it clearly faster than fp32, else fp32; and why. `rates` as of `Measure`."""
    fp32, bf16 = rates["fp32"], rates["bf16"]
    speeds = f"({bf16 / 1e9:,.3g} against {fp32 / 1e9:,.3g} GFLOP/s)"
    if bf16 >= MIN_SPEEDUP * fp32:
        return "bf16", f"this processor multiplies it {bf16 / fp32:.1f} times as fast as fp32 {speeds}"
    if bf16 > fp32:
        return "fp32", f"this processor multiplies bf16 hardly faster {speeds}"
    return "fp32", f"this processor multiplies bf16 no faster {speeds}"


def _evaluations(chosen: _Choices, facts: Facts, scale: _Scale) -> None:
    """As many evaluations during training, of as many tokens, as a tenth of the training's operations pays for. Each
    reads the same tokens, so that they compare. A short run has fewer evaluations rather than tiny ones."""
    recipe, steps, batch = chosen.recipe, chosen.tree["steps"], chosen.tree["batch"]
    row = batch["length"] if recipe.objective.reads != "rows" else max(1.0, scale.tokens / max(1, facts.rows or 1))
    # evaluation is the forward pass alone, a third of a step; frozen weights need half of the backward pass
    passes = 3 if recipe.adapter is None else 2
    paid = EVALUATION_SHARE * passes * steps * (batch.get("tokens") or batch["size"] * row)
    paid /= max(1, len(recipe.data.parts))  # of each part of a mixture as much
    given = recipe.evaluate
    times = -(-steps // given.every) if given.every else min(10, paid // (given.tokens or MIN_EVALUATION_TOKENS))
    times = max(1, min(steps, max(2, int(times))))
    often = {1: "once, at the end", 2: "twice a run"}.get(times, f"{times} times a run")
    chosen.choose("evaluate.every", -(-steps // times), often)
    tokens, why = paid / times, f"{EVALUATION_SHARE:.0%} of the training at most"
    if isinstance(recipe.model, NGram) or (tokens >= MAX_EVALUATION_TOKENS and not scale.gpu):
        tokens, why = MAX_EVALUATION_TOKENS, "enough to see the trend"
    chosen.choose("evaluate.tokens", max(64, int(tokens)), f"{why}; at the end everything held out is read")
    chosen.choose("checkpoint.every", chosen.recipe.evaluate.every, "with each evaluation")


def _labels(chosen: _Choices, facts: Facts) -> None:
    if isinstance(chosen.recipe.objective, LabelObjective) and chosen.recipe.objective.labels is None:
        names = facts.labels or ()
        some = ", ".join(names[:8]) + (f" … ({len(names)})" if len(names) > 8 else "")
        chosen.set("objective.labels", list(names))
        chosen.made.append(Choice("objective.labels", some, "those of the training rows"))
    outputs = chosen.recipe.objective.outputs()
    if outputs is not None:
        chosen.set("model.head.labels", outputs)


def _vocabulary(chosen: _Choices, facts: Facts) -> None:
    """A model as large as the trained tokenizer's vocabulary, and the source's where that has its own."""
    sizes = {"vocab_size": (facts.vocab_size, "the tokenizer")}
    if facts.source_vocab_size is not None:
        sizes["source_vocab_size"] = (facts.source_vocab_size, "the source's tokenizer")
    for key, (size, tokenizer) in sizes.items():
        given = getattr(chosen.recipe.model, key, None)
        if not rounded_up(given, size):
            instead = "" if given is None else f", instead of the {given:,} in the recipe"
            chosen.set(f"model.{key}", size, f"as many as {tokenizer} has{instead}")
