"""A run's folder, opened as a `Run`, its weights in the width that is asked for.

`quantize = "auto"` is the fastest width whose loss stays within 1 % of the loss as trained, by measurement. Losses are
measured once for a checkpoint, speeds once for each machine; RUN/quantized/auto.json keeps both.
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

from weft.api.arguments import checked
from weft.api.run import Run
from weft.costs.count import count
from weft.data.batch import Source
from weft.data.shards import noted_tokenizer
from weft.decode.fast import native
from weft.decode.fast.quantize import check_bits
from weft.decode.fast.rounding import Bits
from weft.decode.fast.stepper import Stepper
from weft.decode.prompt import context_window
from weft.errors import ConfigError, ModelError, RunError
from weft.evaluate.perplexity import token_losses, windows
from weft.machine import fingerprint, pick_device
from weft.models.base import LanguageModel, device_of
from weft.models.transformer import Transformer
from weft.objectives import table as objectives
from weft.objectives.frame import text_frame
from weft.objectives.next_token import NextToken
from weft.parallel.ranks import ALONE, Ranks
from weft.progress import bar, log_to_stderr, warn
from weft.runs import checkpoint
from weft.runs.folder import changed_files, open_run
from weft.storage.files import write_text
from weft.text.builtin import corpus
from weft.text.tokenizer import Tokenizer
from weft.training.objective import Objective
from weft.training.quantized import QuantizedRun
from weft.training.weights import inference_dtype, load_model

AUTO = "auto"
MAX_COST = 0.01  # of the loss, that small weights may cost
ALIKE = 1.05  # times as fast: no difference, on a machine that does other things as well
MAX_TOKENS, MIN_TOKENS = 20_000, 1024  # read to measure a loss; differences on the same text are known from few
WORK = 1.5e11  # weights times tokens that a CPU reads for it, unless MIN_TOKENS are more
WINDOW = 512  # tokens that are read together of Python's documentation
CHARACTERS = 8  # of it, that a token has at most on average
STEPS = 24  # of decoding, of which the quickest counts
NARROWER: tuple[Bits, ...] = ("bf16", "int8", "int4")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@checked
def load(
    run: Path | str,
    device: torch.device | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    ranks: Ranks = ALONE,
) -> Run:
    """A run's model with its best weights, and its tokenizer. Damaged checkpoints are passed over, with a warning.

    `dtype` is what a Transformer's weights are kept in. By default that is float32, but 16 bits on a GPU for one that
    writes and that learned in bf16 or fp8, or came in 16 bits: writing reads every weight for every token. With
    `quantize` ('bf16', 'int8', 'int4', or 'auto' for what is fastest at 1 % of loss) they have that many bits, and stay
    in the run's folder for the next time. Several `ranks` divide the model's matrices among them (Shoeybi et al. 2019);
    all of them call this, and then use the model in the same way at the same time.
    """
    width: str | None = None
    if quantize is not None:
        check_width(quantize)
        if not ranks.alone:
            raise ConfigError(f"quantize = {quantize!r}: not for a model that several processes divide")
    with ranks.leader_first():  # what is wrong with a run, the first process finds
        folder = open_run(run)
        recipe = folder.recipe()
    device = _device(device)
    if quantize == AUTO:
        small = QuantizedRun(folder, device, dtype)
        (model, measured), damage = checkpoint.find(folder.checkpoints, "best", lambda path: _choose(small, path))
        log_to_stderr(f"weft: {measured.line}")
        width = None if measured.chosen == measured.plain else measured.chosen
    elif quantize is not None:
        small, bits = QuantizedRun(folder, device, dtype), check_bits(quantize)
        model, damage = checkpoint.find(folder.checkpoints, "best", lambda path: small.load(path, bits))
        width = bits
    elif ranks.alone:
        model, damage = load_model(folder, device=device)
        if isinstance(model, Transformer):
            model.to(dtype or inference_dtype(recipe, model, device))
    else:
        from weft.training import sharded  # loads torch's own ways to split a model

        model, damage = sharded.load_shard(folder, ranks, device, dtype=dtype)
    for line in (*changed_files(folder), *damage) if ranks.leads else ():
        warn(line)
    with ranks.leader_first():
        loaded = Run(folder.path, recipe, model, Tokenizer.load(folder.path), width)
        loaded.objective.check_tokenizer(noted_tokenizer(folder.data))
    return loaded


def _device(given: torch.device | str | None) -> torch.device:
    try:
        device = torch.device(given or pick_device())
    except (RuntimeError, TypeError):
        raise ConfigError(f"device = {given!r}: expected a device, such as 'cpu' or 'cuda'") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device = '{device}': torch sees no such GPU here; `weft doctor` says what there is")
    return device


def check_width(asked: str) -> None:
    """Refuse what is neither a width nor 'auto'."""
    try:
        if asked != AUTO:
            check_bits(asked)
    except ConfigError as error:
        raise ConfigError(f"{error}; or 'auto', the fastest of them that costs at most 1 % of the loss") from None


@dataclass(frozen=True)
class Measured:
    """Losses and tokens a second by width, the one as trained first, and what the losses were measured on."""

    losses: Mapping[str, float]
    speeds: Mapping[str, float]
    tokens: int
    text: str

    @property
    def plain(self) -> str:
        """The width that needs no quantization."""
        return next(iter(self.losses))

    def cost(self, width: str) -> float:
        """The share by which the loss grows."""
        before, after = self.losses[self.plain], self.losses[width]
        return after / before - 1 if before else float(after > 0)

    def gain(self, width: str) -> float:
        """How many times as fast it is."""
        return self.speeds[width] / self.speeds[self.plain]

    @property
    def chosen(self) -> str:
        """The fastest that costs at most 1 %; of widths that are about as fast, the first."""
        best = self.plain
        for width in self.losses:
            if self.cost(width) <= MAX_COST and self.gain(width) > ALIKE * self.gain(best):
                best = width
        return best

    @property
    def line(self) -> str:
        plain, chosen = self.plain, self.chosen
        on = f"on {self.tokens:,} {self.text}"
        faster = (each for each in self.losses if self.gain(each) > ALIKE * self.gain(chosen))
        others = [each for each in faster if each not in (plain, chosen)]
        more = "".join(f"; {each} would be {_percent(self.cost(each))}" for each in others)
        if chosen == plain:
            why = "what is faster costs more than 1 %" if others else "nothing is faster"
            return f"quantize = {plain}: {why}; loss {self.losses[plain]:.4f} {on}{more}"
        speed = f"{self.gain(chosen):.1f} × as fast as {plain}"
        loss = f"loss {self.losses[chosen]:.4f} against {self.losses[plain]:.4f} ({_percent(self.cost(chosen))})"
        return f"quantize = {chosen}: {speed}, {loss} {on}{more}"


def _percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f} %"  # no −0.0


class Note(BaseModel):
    """What auto.json holds: losses by width, what they were measured on, and speeds by machine and width."""

    made_from: str
    speeds: dict[str, dict[str, Annotated[float, Field(gt=0)]]] = {}
    losses: dict[str, float] = {}
    tokens: int = 0
    text: str = ""

    def measured(self, here: str) -> Measured | None:
        """What was measured of this checkpoint on this machine, if it is all there."""
        speeds = self.speeds.get(here)
        if not speeds or speeds.keys() != self.losses.keys():
            return None
        return Measured(self.losses, speeds, self.tokens, self.text)


def _choose(wanted: QuantizedRun, path: Path) -> tuple[LanguageModel, Measured]:
    """A checkpoint's model in the best width, by what is known, or else is measured now."""
    file, made_from, here = wanted.run.quantized / "auto.json", wanted.origin(path), machine(wanted.device)
    note = Note(made_from=made_from)
    with suppress(ValidationError):  # damaged: all is measured again
        known = Note.model_validate(checkpoint.read_note(file))
        note = known if known.made_from == made_from else note
    measured = note.measured(here)
    if measured is not None:
        bits = measured.chosen
        return (wanted.plain(path) if bits == measured.plain else wanted.load(path, check_bits(bits))), measured
    text = None if note.losses else _text(wanted)
    losses, speeds = dict(note.losses), dict[str, float]()
    best: tuple[LanguageModel, dict[str, Tensor]] | None = None
    model = wanted.plain(path)
    if not isinstance(model, Transformer):
        raise ModelError(f"a model of kind '{wanted.recipe.model.kind}' can't be quantized; Transformers can")
    plain = NAMES[model.embedding.weight.dtype]
    widths = (plain, *(each for each in NARROWER if plain == "fp32" or each != "bf16"))
    with bar("measuring widths", len(widths)) as advance:
        for width in widths:
            made: dict[str, Tensor] = {}
            if width != plain:
                model, made = wanted.quantize(path, check_bits(width))
            speeds[width] = _speed(model)
            if text is not None:
                losses[width] = text.loss(model)
            if best is None or Measured({w: losses[w] for w in speeds}, speeds, 0, "").chosen == width:
                best = model, made
            advance(1)
    note.speeds[here] = speeds
    if text is not None:
        note.losses, note.tokens, note.text = losses, text.tokens, text.name
    measured = note.measured(here)
    assert measured is not None and best is not None
    if best[1]:
        wanted.store(check_bits(measured.chosen), made_from, best[1])
    with suppress(OSError):
        if not file.parent.is_symlink():  # not outside the run
            write_text(file, json.dumps(note.model_dump(), indent=1))
    return best[0], measured


class Text(NamedTuple):
    """What losses are measured on."""

    loss: Callable[[LanguageModel], float]
    tokens: int
    name: str


def _text(wanted: QuantizedRun) -> Text:
    """Some of what the run held out; where that isn't here, some of Python's own documentation."""
    recipe, max_tokens = wanted.recipe, MAX_TOKENS
    if wanted.device.type == "cpu":
        max_tokens = max(MIN_TOKENS, min(max_tokens, int(WORK / count(recipe.model).parameters)))
    own: Objective[Any] = objectives.build(recipe, wanted.run)
    with suppress(RunError):  # its text is gone or damaged
        if recipe.data.parts and own.holds_out:
            return _held_out(own, max_tokens)
    if not recipe.objective.continues:
        raise ConfigError("quantize = 'auto': this run has no held-out data to measure on; name a width instead")
    return _documentation(own, max_tokens)


def _held_out(own: Objective[Any], max_tokens: int) -> Text:
    if not isinstance(own, NextToken):
        return Text(lambda model: own.evaluate(model, max_tokens)["loss"], max_tokens, "held-out tokens at max_tokens")
    texts = own.tokens("validation")
    each = -(-max_tokens // len(texts))
    tokens = sum(min(each, len(text)) for text in texts)
    return Text(lambda model: own.score(model, texts, limit=each).loss, tokens, "held-out tokens")


def _documentation(own: Objective[Any], max_tokens: int) -> Text:
    text = "\n".join(corpus("builtin:python").documents)[: CHARACTERS * max_tokens]
    ids, before = own.tokenizer.encode(text)[:max_tokens], text_frame(own.recipe, own.tokenizer).begins

    def loss(model: LanguageModel) -> float:
        length = min(WINDOW, context_window(model) or own.length)
        tokens, nats = torch.tensor([*before, *ids], device=device_of(model)), 0.0
        for span in windows(len(tokens), length):
            row = tokens[span.start : span.start + span.length + 1]
            nats += float(token_losses(model, model.features(row[None, :-1])[0], row[1:]).double().sum())
        return nats / (len(tokens) - 1)

    return Text(torch.no_grad()(loss), len(ids), "tokens of Python's documentation, for no held-out text is here")


@torch.no_grad()
def _speed(model: LanguageModel) -> float:
    assert isinstance(model, Transformer)
    device, steps = model.embedding.weight.device, max(1, min(STEPS, model.config.context - 1))
    token = torch.zeros(1, dtype=torch.long, device=device)
    source = None if model.encoder is None else Source(token.expand(1, 8), token.expand(1, 8) == 0)
    stepper, best = Stepper(model, 1, 1, steps + 1, source), float("inf")
    stepper.read(token[None])
    for _ in range(steps):
        begun = time.perf_counter()
        stepper.step(token)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return 1 / best


def machine(device: torch.device) -> str:
    """What a speed depends on besides the model, hashed."""
    parts = [fingerprint(), str(native.library() is not None), str(torch.get_num_threads()), torch.__version__]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
