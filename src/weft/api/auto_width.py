"""`quantize = "auto"`: the fastest width of the weights whose loss stays within 1 % of the unquantised loss.

Losses are measured once per checkpoint, speeds once per machine; RUN/quantized/auto.json keeps both.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from weft.costs.count import count
from weft.data.batch import Source
from weft.decode.fast import native
from weft.decode.fast.quantize import check_bits
from weft.decode.fast.quantized_weights import Bits
from weft.decode.fast.stepper import Stepper
from weft.decode.prompt import context_window
from weft.errors import ConfigError, ModelError, RunError
from weft.evaluate.perplexity import token_losses, windows
from weft.machine import fingerprint
from weft.models.base import LanguageModel, device_of
from weft.models.transformer import Transformer
from weft.objectives import table as objectives
from weft.objectives.frame import text_frame
from weft.objectives.next_token import NextToken
from weft.progress import bar
from weft.runs import checkpoint
from weft.storage.files import write_text
from weft.text.builtin import corpus
from weft.training.objective import Objective
from weft.training.quantized import QuantizedRun

MAX_COST = 0.01  # relative increase of the loss that a narrower width may cost
MIN_SPEEDUP = 1.05  # a smaller ratio of speeds is noise, on a machine that is not idle
MAX_TOKENS, MIN_TOKENS = 20_000, 1024  # tokens of text to measure a loss on; few suffice for differences on one text
MAX_CPU_WORK = 1.5e11  # parameters times tokens to read on a CPU, unless that is fewer than MIN_TOKENS
WINDOW = 512  # tokens per window of Python's documentation
MAX_CHARACTERS_PER_TOKEN = 8  # of Python's documentation, on average
TIMED_STEPS = 24  # decode steps, of which the fastest counts
NARROWER: tuple[Bits, ...] = ("bf16", "int8", "int4")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class WidthMeasurements:
    """Loss and tokens per second of each width, the unquantised one first, and the text that losses are measured on."""

    losses: Mapping[str, float]
    speeds: Mapping[str, float]
    tokens: int
    text: str

    @property
    def plain(self) -> str:
        """The width that needs no quantisation."""
        return next(iter(self.losses))

    def cost(self, width: str) -> float:
        """Return the relative increase of the loss."""
        before, after = self.losses[self.plain], self.losses[width]
        return after / before - 1 if before else float(after > 0)

    def speedup(self, width: str) -> float:
        return self.speeds[width] / self.speeds[self.plain]

    @property
    def chosen(self) -> str:
        """The fastest width that costs at most 1 %; of widths that are about as fast, the first."""
        best = self.plain
        for width in self.losses:
            if self.cost(width) <= MAX_COST and self.speedup(width) > MIN_SPEEDUP * self.speedup(best):
                best = width
        return best

    @property
    def line(self) -> str:
        """The choice and its reasons, for the log."""
        plain, chosen = self.plain, self.chosen
        text = f"on {self.tokens:,} {self.text}"
        faster = (width for width in self.losses if self.speedup(width) > MIN_SPEEDUP * self.speedup(chosen))
        others = [width for width in faster if width not in (plain, chosen)]
        rejected = "".join(f"; {width} would cost {_percent(self.cost(width))}" for width in others)
        if chosen == plain:
            why = "faster widths cost more than 1%" if others else "nothing is faster"
            return f"quantize = {plain}: {why}; loss {self.losses[plain]:.4f} {text}{rejected}"
        speed = f"{self.speedup(chosen):.1f} × as fast as {plain}"
        loss = f"loss {self.losses[chosen]:.4f} against {self.losses[plain]:.4f} ({_percent(self.cost(chosen))})"
        return f"quantize = {chosen}: {speed}, {loss} {text}{rejected}"


def _percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f}%"  # + 0.0 turns −0.0 into 0.0


class WidthRecord(BaseModel):
    """Content of auto.json: losses by width, the text that they are measured on, and speeds by machine and width."""

    made_from: str
    speeds: dict[str, dict[str, Annotated[float, Field(gt=0)]]] = {}
    losses: dict[str, float] = {}
    tokens: int = 0
    text: str = ""

    def measurements(self, machine: str) -> WidthMeasurements | None:
        """Return this checkpoint's measurements on a machine, if they are complete."""
        speeds = self.speeds.get(machine)
        if not speeds or speeds.keys() != self.losses.keys():
            return None
        return WidthMeasurements(self.losses, speeds, tokens=self.tokens, text=self.text)


def load_best_width(run: QuantizedRun, path: Path) -> tuple[LanguageModel, WidthMeasurements]:
    """Load a checkpoint's model in the best width; it is measured now unless auto.json has it."""
    file, made_from, machine = run.run.quantized / "auto.json", run.origin(path), machine_fingerprint(run.device)
    record = WidthRecord(made_from=made_from)
    with suppress(ValidationError):  # damaged: measure again
        known = WidthRecord.model_validate(checkpoint.read_json(file))
        record = known if known.made_from == made_from else record
    measured = record.measurements(machine)
    if measured is not None:
        width = measured.chosen
        return (run.plain(path) if width == measured.plain else run.load(path, check_bits(width))), measured
    text = None if record.losses else _measured_text(run)
    losses, speeds = dict(record.losses), dict[str, float]()
    best: tuple[LanguageModel, dict[str, Tensor]] | None = None
    model = run.plain(path)
    if not isinstance(model, Transformer):
        raise ModelError(f"a model of kind '{run.recipe.model.kind}' cannot be quantised; only Transformers can")
    plain = NAMES[model.embedding.weight.dtype]
    widths = (plain, *(width for width in NARROWER if plain == "fp32" or width != "bf16"))
    with bar("measuring widths", len(widths)) as advance:
        for width in widths:
            weights: dict[str, Tensor] = {}
            if width != plain:
                model, weights = run.quantize(path, check_bits(width))
            speeds[width] = _speed(model)
            if text is not None:
                losses[width] = text.loss(model)
            so_far = WidthMeasurements({w: losses[w] for w in speeds}, speeds, tokens=0, text="")
            if best is None or so_far.chosen == width:
                best = model, weights
            advance(1)
    record.speeds[machine] = speeds
    if text is not None:
        record.losses, record.tokens, record.text = losses, text.tokens, text.name
    measured = record.measurements(machine)
    assert measured is not None and best is not None
    if best[1]:
        run.store(check_bits(measured.chosen), made_from, best[1])
    with suppress(OSError):
        if not file.parent.is_symlink():  # never write outside the run
            write_text(file, json.dumps(record.model_dump(), indent=1))
    return best[0], measured


class MeasuredText(NamedTuple):
    """A text to measure losses on."""

    loss: Callable[[LanguageModel], float]
    tokens: int
    name: str


def _measured_text(run: QuantizedRun) -> MeasuredText:
    """Return a part of the run's held-out data, or of Python's documentation if there is none."""
    recipe, max_tokens = run.recipe, MAX_TOKENS
    if run.device.type == "cpu":
        max_tokens = max(MIN_TOKENS, min(max_tokens, int(MAX_CPU_WORK / count(recipe.model).parameters)))
    objective: Objective[Any] = objectives.build(recipe, run.run)
    with suppress(RunError):  # the data is missing or damaged
        if recipe.data.parts and objective.holds_out:
            return _held_out(objective, max_tokens)
    if not recipe.objective.continues:
        raise ConfigError("quantize = 'auto': this run has no held-out data to measure on; name a width instead")
    return _documentation(objective, max_tokens)


def _held_out(objective: Objective[Any], max_tokens: int) -> MeasuredText:
    if not isinstance(objective, NextToken):
        name = "held-out tokens at most"
        return MeasuredText(lambda model: objective.evaluate(model, max_tokens)["loss"], max_tokens, name)
    texts = objective.tokens("validation")
    limit = -(-max_tokens // len(texts))
    tokens = sum(min(limit, len(text)) for text in texts)
    return MeasuredText(lambda model: objective.score(model, texts, limit=limit).loss, tokens, "held-out tokens")


def _documentation(objective: Objective[Any], max_tokens: int) -> MeasuredText:
    text = "\n".join(corpus("builtin:python").documents)[: MAX_CHARACTERS_PER_TOKEN * max_tokens]
    ids = objective.tokenizer.encode(text)[:max_tokens]
    before = text_frame(objective.recipe, objective.tokenizer).begins

    @torch.no_grad()
    def loss(model: LanguageModel) -> float:
        length = min(WINDOW, context_window(model) or objective.length)
        tokens, nats = torch.tensor([*before, *ids], device=device_of(model)), 0.0
        for window in windows(len(tokens), length):
            row = tokens[window.start : window.start + window.length + 1]
            nats += float(token_losses(model, model.features(row[None, :-1])[0], row[1:]).double().sum())
        return nats / (len(tokens) - 1)

    return MeasuredText(loss, len(ids), "tokens of Python's documentation, as there is no held-out text")


@torch.no_grad()
def _speed(model: LanguageModel) -> float:
    """Return the tokens per second of the fastest of a few decode steps."""
    assert isinstance(model, Transformer)
    device, steps = model.embedding.weight.device, max(1, min(TIMED_STEPS, model.config.context - 1))
    token = torch.zeros(1, dtype=torch.long, device=device)
    source = None if model.encoder is None else Source(token.expand(1, 8), token.expand(1, 8) == 0)
    stepper, best = Stepper(model, 1, 1, limit=steps + 1, source=source), float("inf")
    stepper.read(token[None])
    for _ in range(steps):
        start = time.perf_counter()
        stepper.step(token)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 1 / best


def machine_fingerprint(device: torch.device) -> str:
    """Return a hash of everything that a speed depends on besides the model."""
    parts = [fingerprint(), str(native.library() is not None), str(torch.get_num_threads()), torch.__version__]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
