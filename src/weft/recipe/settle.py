"""Choose every setting that a recipe leaves open, from the data and the kind of device, with a reason for each.

The same text gives the same run on any machine of the same kind. One choice alone follows a measured speed: the number
format on a CPU, as some multiply bf16 several times as fast as fp32, others a hundred times as slowly. The tokenizer is
chosen first, from the size of the files; everything else once the data is tokenized and its amount is known.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.config import validate
from weft.costs.count import decoding_weights
from weft.models.config import NGram, StaticVectors, TransformerConfig, Word2Vec
from weft.recipe.config import Precision, Recipe, SettledRecipe
from weft.recipe.draft import ChosenSetting, Draft
from weft.recipe.objective import LabelObjective
from weft.recipe.optimizer import Muon, Noam
from weft.recipe.resolve import covers_vocabulary
from weft.text.config import BPE, TokenizerConfig, Unigram, WordPiece

# FLOPs of a run whose recipe sets no `steps`, and how long they take
CPU_BUDGET = (5.5e12, "a few minutes on two slow cores")
GPU_BUDGET = (5e17, "half an hour on a large GPU")
MAX_EPOCHS = 20  # passes over the data in a run of chosen length, from fresh weights
FINE_TUNING_EPOCHS = 3  # passes over the rows when fully trained weights are fine-tuned (Devlin et al. 2019, §A.3)

EVALUATION_SHARE = 0.1  # FLOPs of all evaluations during training, as a share of the training's
MIN_EVALUATION_TOKENS = 1024  # per evaluation; with fewer, the curve is noise
MAX_EVALUATION_TOKENS = 32768  # per evaluation; more only cost time

CARRIED_LENGTH = 64  # tokens per row if rows continue; Zaremba et al. 2014 use 35, Merity et al. 2018 use 70

# Muon: the objectives and maximum d_model for which it was measured to gain more than its iterations cost (on a GPU
# also by Jordan et al. 2024), its learning rate relative to AdamW's, and its settings on each device
MUON_OBJECTIVES = {"cpu": ("next-token",), "cuda": ("next-token", "masked", "pairs")}
MAX_MUON_WIDTH = {"cpu": 256, "cuda": 1024}
RECURRENT_KINDS = ("recurrent", "bahdanau", "elmo")
MUON_RATE = 2.5
MUON = {"cpu": {"kind": "muon", "momentum": 0.9, "rounds": 3, "betas": [0.9, 0.99]}, "cuda": {"kind": "muon"}}

# Muon's weight decay against memorisation, where a text is read for this many epochs. Weights decay with a lifetime of
# 1 / (learning rate · weight decay) steps. All three were measured with Muon on small texts.
MEMORISING_EPOCHS = {"cpu": 15, "cuda": 6}
DECAY_LIFETIMES = 5  # lifetimes per run: learning rate · weight decay · steps
MIN_DECAY_STEPS = 100  # steps of the shortest measured run; in far shorter ones each step would decay too much

MIN_BF16_SPEEDUP = 1.5  # of matrix products over fp32; a smaller gain is lost to casts and the rest of a step
MIN_PRODUCT_FLOPS = 2e8  # FLOPs of a feed-forward product below which the number format hardly matters

TOKENS_PER_TRAINED_PARAMETER = 20  # weights that have read as many count as trained (Hoffmann et al. 2022, table 3)

# (rows, inputs, outputs) of a matrix product → FLOP/s by number format
Measure = Callable[[int, int, int], Mapping[str, float]]

# choices worth showing for models that take no gradient steps; the other settings get values too, but have no effect
NGRAM_KEYS = ("tokenizer", "tokenizer.vocab_size", "steps", "batch.length", "model.vocab_size")
WORD_VECTOR_KEYS = ("tokenizer", "tokenizer.min_count", "steps", "model.vocab_size")

# word2vec and GloVe: epochs over a large text, and words that a small one is read for in all
EPOCHS, MAX_WORD_EPOCHS = {"word2vec": 5, "glove": 25}, 100
TRAINED_WORDS = 5_000_000
# bytes of text from which words that occur less often have no vector: rarer ones teach too little
MIN_COUNTS = {1_000_000: 5, 100_000: 2, 0: 1}


@dataclass(frozen=True)
class Facts:
    """Facts about the prepared data, and the number of tokens that the weights of `init` were trained on, if known."""

    bytes: int
    vocab_size: int
    source_vocab_size: int | None = None
    rows: int | None = None
    labels: tuple[str, ...] | None = None
    trained_tokens: int | None = None

    def __str__(self) -> str:
        return f"{size_of(self.bytes)} of text" if self.rows is None else f"{self.rows:,} rows"


def size_of(bytes_: int) -> str:
    return f"{bytes_ / 1e6:,.1f} MB" if bytes_ >= 100_000 else f"{bytes_:,} bytes"


def choose_tokenizer(recipe: Recipe, bytes_: int, device: str = "cpu") -> tuple[TokenizerConfig, list[ChosenSetting]]:
    """Return the tokenizer for about `bytes_` of text, and what was chosen. `device` is "cpu" or "cuda"."""
    draft = Draft(recipe)
    if recipe.model.kind == "encoder":
        draft.choose("tokenizer", {"kind": "wordpiece"}, "BERT's subword tokenizer, with its special tokens")
    elif isinstance(recipe.model, StaticVectors):
        words = {"kind": "word", "lowercase": True, "split": "punctuation"}
        draft.choose("tokenizer", words, "a vector for each whole word")
        if draft.recipe.tokenizer is not None and draft.recipe.tokenizer.kind == "word":
            least = next(count for size, count in MIN_COUNTS.items() if bytes_ >= size)
            draft.choose("tokenizer.min_count", least, "rarer words have no vector")
    elif recipe.objective.sentinels:
        extra = [f"<extra_id_{n}>" for n in range(recipe.objective.sentinels)]
        specials = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "extra": extra}
        draft.choose("tokenizer", {"kind": "bpe", "specials": specials}, "subwords, with sentinels for masked spans")
    draft.choose("tokenizer", {"kind": "bpe"}, "subwords can spell any text, in fewer tokens than characters")
    if isinstance(draft.recipe.tokenizer, BPE | WordPiece | Unigram):
        # each token should occur often enough to be learned: four times the text, twice the vocabulary
        size = 2 ** round(11 + 0.5 * math.log2(max(1, bytes_) / 1.5e6))
        size = max(512, min(32768 if device == "cuda" else 8192, size))
        draft.choose("tokenizer.vocab_size", size, f"suits {size_of(bytes_)} of text")
    assert draft.recipe.tokenizer is not None
    return draft.recipe.tokenizer, draft.choices


def settle(
    recipe: Recipe, facts: Facts, device: str = "cpu", *, measure: Measure | None = None
) -> tuple[SettledRecipe, list[ChosenSetting]]:
    """Complete a recipe that has a tokenizer, and return it with what was chosen. `device` is "cpu" or "cuda".

    On a CPU, `measure` decides the number format; without it that is fp32, which is fast on every CPU.
    """
    draft, gpu = Draft(recipe), device == "cuda"
    shown_keys: tuple[str, ...] | None = None
    if isinstance(recipe.model, NGram):
        shown_keys = NGRAM_KEYS
        draft.choose("steps", 1, "n-grams are counted in one pass")
        draft.choose("batch.size", 1, "n-grams are counted in one pass")
        draft.choose("batch.length", 256, "the window that evaluation reads")
    vocab_size = getattr(recipe.tokenizer, "vocab_size", None) or min(recipe.model.vocab_size, 8192)
    parameters = sum(decoding_weights(recipe.model, vocab_size).values())
    bytes_per_token = {"word": 5.5, "pretrained": 4.0}.get(recipe.tokenizer.kind if recipe.tokenizer else "", 1.0)
    if isinstance(recipe.tokenizer, BPE | WordPiece | Unigram):  # an estimate for English
        bytes_per_token = max(1.0, 0.35 * math.log2(max(2, recipe.tokenizer.vocab_size or 8192)) - 1.2)
    tokens = round(0.9 * facts.bytes / bytes_per_token)  # a tenth is held out
    if recipe.data.tokens is not None:
        tokens = min(tokens, recipe.data.tokens * max(1, len(recipe.data.parts)))
    if isinstance(recipe.model, StaticVectors):
        shown_keys = WORD_VECTOR_KEYS
        _choose_epochs(draft, tokens)
    maturity = 0.0 if recipe.init is None else 1.0
    if recipe.init is not None and recipe.adapter is None and facts.trained_tokens is not None:
        maturity = min(1.0, facts.trained_tokens / (TOKENS_PER_TRAINED_PARAMETER * max(1, parameters)))
    flops, duration = GPU_BUDGET if gpu else CPU_BUDGET
    size = _RunSize(tokens=tokens, parameters=parameters, gpu=gpu, flops=flops, duration=duration, maturity=maturity)
    _choose_optimizer(draft, size)
    if recipe.objective.reads == "rows":
        _choose_row_batch(draft, facts, gpu)
        _choose_row_steps(draft, facts, size)
    else:
        _choose_batch(draft, size)
        _choose_steps(draft, size)
    _choose_rates(draft, size)
    if recipe.optimizer is None and recipe.objective.kind == "next-token":
        _choose_weight_decay(draft, size)
    if gpu:
        draft.choose("precision", "bf16", "fast on a GPU")
    elif recipe.precision is None:
        draft.choose("precision", *_cpu_precision(draft, measure))
    steps = draft.tree["steps"]
    if gpu and recipe.model.kind in RECURRENT_KINDS:
        draft.choose("compile", False, "a recurrent model's kernels are cuDNN's, and its steps are captured whole")
    draft.choose("compile", gpu and steps >= 500, "compiling takes a minute, which pays off in a long run on a GPU")
    draft.choose("log.every", max(1, min(10, steps // 20)), "enough points for a smooth curve")
    _choose_evaluations(draft, facts, size)
    _set_labels(draft, facts)
    _set_vocabulary(draft, facts)
    shown = [choice for choice in draft.choices if shown_keys is None or choice.key in shown_keys]
    return validate(SettledRecipe, draft.tree), shown


def open_keys(recipe: Recipe) -> list[str]:
    """Return the keys that a recipe leaves open until its text is known."""
    tokenizer, choices = choose_tokenizer(recipe, 1_000_000)
    recipe = recipe.replace(tokenizer=tokenizer.model_dump(mode="json", exclude_none=True))
    facts = Facts(1_000_000, recipe.model.vocab_size, rows=1000, labels=("0", "1"))
    return [choice.key for choice in (*choices, *settle(recipe, facts)[1])]


@dataclass(frozen=True)
class _RunSize:
    """Size of a run, in what decides how long and how fast it trains."""

    tokens: int  # of training text
    parameters: int  # that multiply each token
    gpu: bool
    flops: float  # to spend
    duration: str  # of these FLOPs, in words
    maturity: float  # how far the initial weights were trained before: 0, not at all, to 1


def _choose_optimizer(draft: Draft, size: _RunSize) -> None:
    """Choose Muon for pre-norm Transformers with fresh weights, as far as it was measured; AdamW elsewhere."""
    recipe, model, device = draft.recipe, draft.recipe.model, "cuda" if size.gpu else "cpu"
    if recipe.optimizer is not None:
        return
    fresh = recipe.init is None and not isinstance(recipe.schedule, Noam)
    measured = (
        isinstance(model, TransformerConfig)
        and model.placement == "pre"
        and model.d_model <= MAX_MUON_WIDTH[device]
        and recipe.objective.kind in MUON_OBJECTIVES[device]
    )
    if fresh and measured:
        draft.set("optimizer", MUON[device], "from fresh weights it learns more than adamw in the same time")
    else:
        draft.set("optimizer", {"kind": "adamw"}, "the usual optimizer for this kind of training")


def _choose_batch(draft: Draft, run: _RunSize) -> None:
    model = draft.recipe.model
    context = getattr(model, "context", 256)
    length = max(8, min(context if run.gpu else min(context, 256), run.tokens // 8))
    why = "the model's context" if length == context else "suits the text and the device"
    if draft.recipe.can_carry and draft.recipe.batch.carry is not False and length > CARRIED_LENGTH:
        # states carry over from row to row, so short rows lose nothing, and a batch holds more of them
        length, why = CARRIED_LENGTH, "short rows suffice, because each continues the one before it"
    if 0 < (excess := length % draft.recipe.parallel.row_unit) < length:
        length, why = length - excess, "so that the processes of parallel.context can divide a row"
    length = draft.choose("batch.length", length, why)
    # with little compute, many small steps learn more than a few large ones; but each of Muon's has a fixed cost
    tokens = 1024 if isinstance(draft.recipe.optimizer, Muon) else 512
    if run.gpu:
        tokens = 2 ** round(math.log2(max(2**14, min(2**19, 2**19 * math.sqrt(max(1, run.parameters) / 1e8)))))
    size = max(1, min(tokens // length, max(1, run.tokens // (4 * length))))
    size = draft.choose("batch.size", size, f"{size * length:,} tokens per step")
    if run.gpu:
        width = getattr(model, "d_model", 1024)
        max_tokens = 2**15 if width <= 1024 else 2**14 if width <= 2048 else 2**13
        micro = max(1, min(size, max_tokens // length))
        if micro < size:
            draft.choose("batch.micro", micro, "as many sequences as should fit in GPU memory at a time")
    if draft.recipe.can_carry:
        enough = 4 * size * length <= run.tokens
        why = "each row continues the one before it" if enough else "the text is too short for rows that continue"
        draft.choose("batch.carry", enough, why)


def _choose_epochs(draft: Draft, tokens: int) -> None:
    """Choose the number of epochs of word2vec or GloVe, which are its steps."""
    least = EPOCHS[draft.recipe.model.kind]
    epochs = max(least, min(MAX_WORD_EPOCHS, TRAINED_WORDS // max(1, tokens)))
    what = "the text" if isinstance(draft.recipe.model, Word2Vec) else "all pairs of words"
    draft.choose("steps", epochs, f"epochs over {what}" + ("; a small text is read more often" * (epochs > least)))
    draft.choose("batch.size", 1, "words are read one by one")
    draft.choose("batch.length", 256, "words are read one by one")
    draft.choose("log.every", 1, "every epoch")
    draft.choose("evaluate.every", draft.tree["steps"], "once, at the end")
    draft.choose("checkpoint.every", -(-draft.tree["steps"] // 5), "five times per run")


def _choose_steps(draft: Draft, size: _RunSize) -> None:
    batch, model = draft.tree["batch"], draft.recipe.model
    tokens_per_step = batch["size"] * batch["length"]
    width, layers = getattr(model, "d_model", 0), getattr(model, "layers", 0)
    flops_per_token = 6 * max(1, size.parameters) + 12 * width * layers * batch["length"]
    if isinstance(draft.recipe.optimizer, Muon):
        # an iteration multiplies a matrix (d_model, n) by its transpose and back, and squares the product in between
        in_layers = decoding_weights(model, 0)["layers"]
        flops_per_token += round(5 * draft.recipe.optimizer.rounds * width * in_layers / tokens_per_step)
    affordable = size.flops / flops_per_token
    max_tokens = MAX_EPOCHS * max(1, size.tokens)
    steps = max(100, round(min(affordable, max_tokens) / tokens_per_step / 50) * 50)
    if steps == 100 and affordable / tokens_per_step < 100:
        why = "only a trial, because this model is large for this device; set steps= for a real run"
    elif affordable <= max_tokens:
        why = f"{size.duration}; more steps give a lower loss"
    else:
        why = f"{steps * tokens_per_step / max(1, size.tokens):.0f} epochs over the text"
    draft.choose("steps", steps, why)


def _choose_row_batch(draft: Draft, facts: Facts, gpu: bool) -> None:
    length = min(getattr(draft.recipe.model, "context", 256), 512)
    draft.choose("batch.length", length, "longer rows are truncated there")
    if draft.recipe.objective.by_tokens and draft.recipe.batch.size is None:
        draft.choose("batch.tokens", 8192 if gpu else 2048, "rows of similar length, padding included")
    elif draft.recipe.batch.tokens is None:
        size = max(1, min(32 if gpu else 16, (facts.rows or 1) // 4))
        draft.choose("batch.size", size, "rows of similar length")


def _choose_row_steps(draft: Draft, facts: Facts, size: _RunSize) -> None:
    batch, rows = draft.tree["batch"], max(1, facts.rows or 1)
    if "size" in batch:
        steps_per_epoch, tokens_per_step = rows / batch["size"], batch["size"] * max(1, size.tokens / rows)
    else:
        steps_per_epoch, tokens_per_step = max(1.0, size.tokens / batch["tokens"]), float(batch["tokens"])
    epochs = MAX_EPOCHS ** (1 - size.maturity) * FINE_TUNING_EPOCHS**size.maturity
    affordable = size.flops / (6 * max(1, size.parameters)) / tokens_per_step
    steps = max(50, round(min(epochs * steps_per_epoch, affordable) / 10) * 10)
    if affordable < epochs * steps_per_epoch:
        why = f"{size.duration}; more steps give a lower loss"
    else:
        why = f"about {steps / steps_per_epoch:.0f} epochs over the rows"
    draft.choose("steps", steps, why)


def _choose_rates(draft: Draft, size: _RunSize) -> None:
    recipe, steps, batch = draft.recipe, draft.tree["steps"], draft.tree["batch"]
    if isinstance(recipe.schedule, Noam):
        return
    # GPT-3's learning rates (Brown et al. 2020, table 2.1) closely follow this power of the number of parameters
    rate = min(3e-3, 3e-3 * (max(1, size.parameters) / 1e6) ** -0.33)
    rate *= min(1.0, (batch.get("tokens") or batch["size"] * batch["length"]) / 2048) ** 0.25
    assert recipe.optimizer is not None, "the optimizer is chosen first"
    rate *= {"sgd": 100, "muon": MUON_RATE}.get(recipe.optimizer.kind, 1)
    why = "smaller models and larger batches tolerate higher learning rates"
    warmup, share = min(2000, max(1, steps // 20)), "a twentieth of the steps"
    if getattr(recipe.model, "placement", "pre") == "post" and size.maturity < 1:
        warmup = min(4000, max(1, steps // 5))
        share = "a fifth of the steps: a post-norm Transformer needs small steps at first (Xiong et al. 2020)"
    elif recipe.init is not None:
        warmup, share = max(1, steps // 10), "a tenth of the steps"
    if recipe.init is not None:
        # BERT is fine-tuned with 5e-5 at 110 M parameters (Devlin et al. 2019, §A.3); adapters tolerate ten times that
        fine_tuning = 5e-5 * (max(1, size.parameters) / 1.1e8) ** -0.33 * (1 if recipe.adapter is None else 10)
        rate = rate ** (1 - size.maturity) * min(2e-3, fine_tuning) ** size.maturity
        why = "lower than for fresh weights, to preserve what these have learned"
    draft.choose("optimizer.lr", float(f"{rate:.2g}"), why)
    draft.choose("schedule.warmup", warmup, share)


def _choose_weight_decay(draft: Draft, size: _RunSize) -> None:
    """Raise Muon's weight decay if the text is read for many epochs."""
    steps, batch, optimizer = draft.tree["steps"], draft.tree["batch"], draft.recipe.optimizer
    epochs = steps * batch["size"] * batch["length"] / max(1, size.tokens)
    memorises = steps >= MIN_DECAY_STEPS and epochs >= MEMORISING_EPOCHS["cuda" if size.gpu else "cpu"]
    if memorises and isinstance(optimizer, Muon) and optimizer.lr:
        decay = float(f"{DECAY_LIFETIMES / (optimizer.lr * steps):.2g}")
        if decay > optimizer.weight_decay:
            why = f"the text is read {epochs:.0f} times; stronger decay keeps the model from memorising it"
            draft.set("optimizer.weight_decay", decay, why)


def _cpu_precision(draft: Draft, measure: Measure | None) -> tuple[Precision, str]:
    """Return the number format on a CPU, measured where it can matter, and why."""
    model, batch = draft.recipe.model, draft.tree["batch"]
    if measure is None:
        return "fp32", "fast on every CPU"
    if not isinstance(model, TransformerConfig):
        return "fp32", "bf16 gains little on a CPU with this kind of model"
    sequences = batch["micro"] if isinstance(batch.get("micro"), int) else batch.get("size", 1)
    shape = batch.get("tokens") or sequences * batch["length"], model.d_model, model.feedforward.d_ff
    if 2 * math.prod(shape) < MIN_PRODUCT_FLOPS:
        return "fp32", "matrices this small gain little from another format"
    return faster_format(measure(*shape))


def faster_format(rates: Mapping[str, float]) -> tuple[Precision, str]:
    """Return bf16 if a CPU multiplies it clearly faster than fp32, else fp32; and why. `rates` are FLOP/s by format."""
    fp32, bf16 = rates["fp32"], rates["bf16"]
    speeds = f"({bf16 / 1e9:,.3g} against {fp32 / 1e9:,.3g} GFLOP/s)"
    if bf16 >= MIN_BF16_SPEEDUP * fp32:
        return "bf16", f"this CPU multiplies bf16 {bf16 / fp32:.1f} times as fast as fp32 {speeds}"
    return "fp32", f"this CPU multiplies bf16 {'hardly' if bf16 > fp32 else 'no'} faster {speeds}"


def _choose_evaluations(draft: Draft, facts: Facts, size: _RunSize) -> None:
    """Choose how often to evaluate and on how many tokens, within EVALUATION_SHARE of the training's FLOPs. A short run
    has fewer evaluations rather than tiny ones. All read the same tokens, so that their results are comparable."""
    recipe, steps, batch = draft.recipe, draft.tree["steps"], draft.tree["batch"]
    row = batch["length"] if recipe.objective.reads != "rows" else max(1.0, size.tokens / max(1, facts.rows or 1))
    # evaluation is only the forward pass, a third of a step's FLOPs; frozen weights halve the backward pass
    passes = 3 if recipe.adapter is None else 2
    affordable = EVALUATION_SHARE * passes * steps * (batch.get("tokens") or batch["size"] * row)
    affordable /= max(1, len(recipe.data.parts))  # each part of a mixture is evaluated separately
    every, tokens = recipe.evaluate.every, recipe.evaluate.tokens
    times = -(-steps // every) if every else min(10, affordable // (tokens or MIN_EVALUATION_TOKENS))
    times = max(1, min(steps, max(2, int(times))))
    often = {1: "once, at the end", 2: "twice per run"}.get(times, f"{times} times per run")
    draft.choose("evaluate.every", -(-steps // times), often)
    max_tokens, why = affordable / times, f"at most {EVALUATION_SHARE:.0%} of the training's compute"
    if isinstance(recipe.model, NGram) or (max_tokens >= MAX_EVALUATION_TOKENS and not size.gpu):
        max_tokens, why = MAX_EVALUATION_TOKENS, "enough to see the trend"
    draft.choose("evaluate.tokens", max(64, int(max_tokens)), f"{why}; the final evaluation reads all held-out data")
    draft.choose("checkpoint.every", draft.recipe.evaluate.every, "after each evaluation")


def _set_labels(draft: Draft, facts: Facts) -> None:
    """Set the labels, and the number of the head's outputs, from the training rows."""
    if isinstance(draft.recipe.objective, LabelObjective) and draft.recipe.objective.labels is None:
        names = facts.labels or ()
        shown = ", ".join(names[:8]) + (f" … ({len(names)})" if len(names) > 8 else "")
        draft.set("objective.labels", list(names))
        draft.choices.append(ChosenSetting("objective.labels", shown, "those of the training rows"))
    outputs = draft.recipe.objective.outputs()
    if outputs is not None:
        draft.set("model.head.labels", outputs)


def _set_vocabulary(draft: Draft, facts: Facts) -> None:
    """Set the model's vocabulary sizes to those of the trained tokenizers."""
    sizes = {"vocab_size": (facts.vocab_size, "the tokenizer")}
    if facts.source_vocab_size is not None:
        sizes["source_vocab_size"] = (facts.source_vocab_size, "the source tokenizer")
    for key, (size, tokenizer) in sizes.items():
        current = getattr(draft.recipe.model, key, None)
        if not covers_vocabulary(current, size):
            instead = "" if current is None else f", instead of the recipe's {current:,}"
            draft.set(f"model.{key}", size, f"the vocabulary of {tokenizer}{instead}")
