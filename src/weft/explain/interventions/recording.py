"""A model's taps: their shapes, their activations on texts, in memory or in a file, and changes at them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.explain.capture import Change, capture, join_steps, matching, taps
from weft.explain.reading import Reading, SourceTokens, unsupported
from weft.models.base import LanguageModel, evaluating
from weft.models.config import Bahdanau, EncoderDecoder
from weft.models.ngram import NGram
from weft.models.word_table import WordTable
from weft.progress import bar
from weft.storage import files, tensors

# Two passes of different sizes show which dimensions of a tensor are which.
PROBE_SIZES = {"batch": (2, 3), "time": (3, 4), "source time": (4, 6)}

Shape = tuple[int | str, ...]


def require_activations(model: LanguageModel) -> None:
    """Raise ModelError for a model that has no layers to look into."""
    if isinstance(model, NGram | WordTable):
        has = "counts" if isinstance(model, NGram) else "a table of vectors"
        raise unsupported(model, f"{has} and no layers, so it has no taps", "name a run with a neural language model")


@torch.no_grad()
def tap_shapes(model: LanguageModel) -> dict[str, Shape]:
    """Return the names of all taps that a pass over a text reaches, with their shapes: ("batch", "time", 64)."""
    require_activations(model)
    named, all_taps = {sizes: name for name, sizes in PROBE_SIZES.items()}, taps(model)
    seen: list[dict[str, tuple[int, ...]]] = []
    with evaluating(model) as device:
        for rows, time, source in zip(*PROBE_SIZES.values(), strict=True):
            tokens, options = torch.zeros(rows, time, dtype=torch.long, device=device), {}
            if isinstance(model.config, EncoderDecoder | Bahdanau):
                options["source"] = SourceTokens(tokens.new_zeros(rows, source))
            with capture(model, *all_taps) as captured:
                model(tokens, **options)
            seen.append({name: tuple(captured.joined(name).shape) for name in captured})
    first, second = seen
    pairs = {name: zip(shape, second[name], strict=True) for name, shape in first.items()}
    return {name: tuple(a if a == b else named.get((a, b), "*") for a, b in both) for name, both in pairs.items()}


def patched(
    model: LanguageModel, changes: Mapping[str, Change], *, reached: Mapping[str, Shape]
) -> AbstractContextManager[object]:
    """Change the tensors at taps that a pass has `reached` while the context is open; one line for a wrong change."""
    if not changes:
        raise ConfigError("changes = {}: expected a tap and a function, such as {'embedding': lambda x: 0 * x}")
    for pattern, change in changes.items():
        names = matching(pattern, reached)
        if not callable(change):
            found = f"a value of type {type(change).__name__}"
            raise ConfigError(f"{names[0]}: {found} is no function; give one that gets and returns a tensor")
    # a function may change its tensor in place, but what reads the tensor compares the result with it
    copied = {pattern: lambda x, change=change: change(x.clone()) for pattern, change in changes.items()}
    return capture(model, replace=copied)


@torch.no_grad()
def record(reading: Reading, names: Sequence[str]) -> dict[str, Tensor]:
    """Return activations of a text without the batch dimension; each is moved to the CPU once it is computed."""
    all_taps, calls = taps(reading.model), dict[str, list[Tensor]]()

    def keep(name: str, x: Tensor) -> Tensor:
        before = calls.get(name, []) if all_taps[name].by_step else []
        calls[name] = [*before, x.detach().to("cpu", copy=True)]
        return x

    with evaluating(reading.model), capture(reading.model, replace={name: partial(keep, name) for name in names}):
        reading.model(reading.tokens, **reading.model_kwargs)
    return {name: join_steps(each)[0] if all_taps[name].by_step else each[-1][0] for name, each in calls.items()}


def record_texts(
    readings: Sequence[Callable[[], Reading]], model: LanguageModel, *, patterns: Sequence[str], file: Path | None
) -> dict[str, list[Tensor]]:
    """Return the activations of each text, by name; with `file`, one text's are in memory at a time, and the result is
    mapped from the file, where tap `name` of text n is stored as `n/name`."""
    reached = tap_shapes(model)
    names = list(dict.fromkeys(name for pattern in patterns for name in matching(pattern, reached)))
    with bar("reading texts", len(readings)) as advance:
        if file is None:
            recorded = []
            for read in readings:
                recorded.append(record(read(), names))
                advance(1)
        else:
            files.check_writable(file)
            held = dict[int, dict[str, Tensor]]()

            def tensor(text: int, name: str) -> Tensor:
                if text not in held:
                    held.clear()
                    held[text] = record(readings[text](), names)
                    advance(1)
                return held[text][name]

            order = [(text, name) for text in range(len(readings)) for name in names]
            with files.replacing(file) as opened:
                tensors.write(
                    Path(opened.name), {f"{text}/{name}": partial(tensor, text, name) for text, name in order}
                )
            stored = tensors.load(file)
            recorded = [{name: stored[f"{text}/{name}"] for name in names} for text in range(len(readings))]
    return {name: [each[name] for each in recorded] for name in names}
