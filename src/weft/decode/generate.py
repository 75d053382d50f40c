"""Generation: read the prompts once, then one token at a time with what the model remembers.

`generate` works on token ids and yields each as it is chosen; `write` works on text. Rows of a batch are
independent: a row's text follows from its prompt, its seed and the settings, whoever its neighbours are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.sampling import choose
from weft.errors import ModelError
from weft.models.base import LanguageModel, Source
from weft.text.tokenizer import Tokenizer

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Token:
    """One token of one row. `finish` says why the row ends with it: the model ended the text itself ("eos"), the
    caller stopped it ("stop"), or the token limit or the model's window is reached ("length")."""

    row: int
    id: int
    finish: Finish | None


@dataclass(frozen=True)
class Piece:
    """Some text of one row, possibly empty; the row's last piece carries `finish`."""

    row: int
    text: str
    tokens: int
    finish: Finish | None


@dataclass(frozen=True)
class Completion:
    """The whole text of one row."""

    text: str
    tokens: int
    finish: Finish


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    settings: Sampling,
    *,
    eos_id: int | None = None,
    vocab_size: int | None = None,
    seeds: Sequence[int] | None = None,
    source: Source | None = None,
    stops: Callable[[int, int], bool] | None = None,
) -> Iterator[Token]:
    """Continue `prompts`, ragged lists of ids, none empty; tokens come step by step, rows in order within a step.

    A row ends with `eos_id`, after `settings.max_tokens`, where the model's window is full, or where
    `stops(row, id)` says so. Only ids below `vocab_size` are chosen: a model may have more rows than its tokenizer has
    tokens. Row i draws from a generator seeded with seeds[i], by default settings.seed + i.
    """
    window = _window(model)
    _check(model, prompts, window)
    seeds = [settings.seed + row for row in range(len(prompts))] if seeds is None else seeds
    assert len(seeds) == len(prompts), "one seed a prompt"
    return _steps(model, prompts, settings, window, eos_id, vocab_size, seeds, source, stops)


@torch.inference_mode()  # as a decorator: a `with` would stay in force in the caller, between two tokens
def _steps(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    settings: Sampling,
    window: int | None,
    eos_id: int | None,
    vocab_size: int | None,
    seeds: Sequence[int],
    source: Source | None,
    stops: Callable[[int, int], bool] | None,
) -> Iterator[Token]:
    device = _device(model)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    lengths = [len(prompt) for prompt in prompts]
    rows = list(range(len(prompts)))  # the prompts still being continued, by batch row
    room = max(lengths) + settings.max_tokens
    state = model.start(len(prompts), room if window is None else min(room, window), source)
    logits = _read_prompts(model, prompts, lengths, state, device)
    for count in range(1, settings.max_tokens + 1):
        chosen = choose(logits[:, :vocab_size], settings, [generators[row] for row in rows]).tolist()
        going: list[int] = []
        for place, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            # the newest token isn't read yet, so a full window still gave it
            full = count == settings.max_tokens or (window is not None and lengths[row] == window)
            stopped = stops is not None and stops(row, token)
            finish: Finish | None = "eos" if token == eos_id else "stop" if stopped else "length" if full else None
            yield Token(row, token, finish)
            if finish is None:
                going.append(place)
        if not going:
            return
        if len(going) < len(rows):
            state.reorder(torch.tensor(going, device=device))
            rows = [rows[place] for place in going]
            chosen = [chosen[place] for place in going]
            longest = max(lengths[row] for row in rows)
            if state.longest > longest:
                state.truncate(longest)  # forgets nothing: it gives the room of the ended rows to the others
        for row in rows:
            lengths[row] += 1
        tokens = torch.tensor(chosen, device=device).unsqueeze(1)
        logits = model.step(tokens, state)[:, -1]


def _read_prompts(
    model: LanguageModel, prompts: Sequence[Sequence[int]], lengths: list[int], state: Any, device: torch.device
) -> Tensor:
    """Logits (B, V) after the last token of each prompt. Only these places go through the head."""
    longest = max(lengths)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    last = torch.tensor(lengths, device=device)
    ragged = min(lengths) < longest
    features = model.advance(tokens.to(device), state, last if ragged else None)
    return model.head(features[torch.arange(len(prompts), device=device), last - 1].unsqueeze(1))[:, 0]


def write(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: Sampling,
    *,
    seeds: Sequence[int] | None = None,
) -> Iterator[Piece]:
    """Continue texts; the new text comes in pieces as it is written, without the prompts.

    A piece never holds half a character nor any part of a stop string. An empty prompt begins a new text.
    """
    writers = [_Writer(tokenizer, settings.stop) for _ in prompts]
    ids = [tokenizer.encode(prompt) or [opening(tokenizer)] for prompt in prompts]
    eos_id = tokenizer.eos_id

    def stops(row: int, token: int) -> bool:
        return token != eos_id and writers[row].push(token)

    stream = generate(model, ids, settings, eos_id=eos_id, vocab_size=tokenizer.vocab_size, seeds=seeds, stops=stops)
    return _pieces(stream, writers)


def _pieces(stream: Iterator[Token], writers: "list[_Writer]") -> Iterator[Piece]:
    counts = [0] * len(writers)
    for token in stream:
        counts[token.row] += 1
        writer = writers[token.row]
        if token.finish is not None and token.finish != "stop" and writer.end():
            yield Piece(token.row, writer.take(), counts[token.row], "stop")
        else:
            yield Piece(token.row, writer.take(), counts[token.row], token.finish)


def complete(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: Sampling,
    *,
    seeds: Sequence[int] | None = None,
) -> list[Completion]:
    """Continue texts and return the new text of each, without the prompts."""
    texts: list[list[str]] = [[] for _ in prompts]
    last: dict[int, Piece] = {}
    for piece in write(model, tokenizer, prompts, settings, seeds=seeds):
        texts[piece.row].append(piece.text)
        last[piece.row] = piece
    done: list[Completion] = []
    for row, parts in enumerate(texts):
        finish = last[row].finish
        assert finish is not None, "every row ends"
        done.append(Completion("".join(parts), last[row].tokens, finish))
    return done


def opening(tokenizer: Tokenizer) -> int:
    """The token an empty prompt starts from: what stands before a text in training.

    In weft's training data an end-of-text token stands between texts, so a new one begins after it. Tokenizers
    without one open with their begin token, a line end, or else their first token.
    """
    if tokenizer.eos_id is not None:
        return tokenizer.eos_id
    if tokenizer.bos_id is not None:
        return tokenizer.bos_id
    newline = tokenizer.encode("\n")
    return newline[-1] if newline else 0


class _Writer:
    """Turns the tokens of one row into text that may be shown, and notices stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self.stream = tokenizer.stream()
        self.stop = stop
        self.held = ""  # written, but it may be the beginning of a stop string
        self.ready = ""  # may be shown

    def push(self, token: int) -> bool:
        """Read a token; True if a stop string is complete."""
        return self._add(self.stream.push(token))

    def end(self) -> bool:
        """No token follows: what was held back is text after all, unless it completes a stop string."""
        stopped = self._add(self.stream.flush())
        if not stopped:
            self.ready += self.held
            self.held = ""
        return stopped

    def take(self) -> str:
        """The text that may be shown and hasn't been taken yet."""
        text, self.ready = self.ready, ""
        return text

    def _add(self, text: str) -> bool:
        self.held += text
        found = [place for stop in self.stop if (place := self.held.find(stop)) >= 0]
        if found:
            self.ready += self.held[: min(found)]
            self.held = ""
            return True
        keep = max((_overlap(self.held, stop) for stop in self.stop), default=0)
        self.ready += self.held[: len(self.held) - keep]
        self.held = self.held[len(self.held) - keep :]
        return False


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def _window(model: LanguageModel) -> int | None:
    """The most tokens the model can read, or None where nothing limits it."""
    return getattr(model.config, "longest", None)


def _device(model: LanguageModel) -> torch.device:
    for tensor in [*model.parameters(), *model.buffers()]:
        return tensor.device
    return torch.device("cpu")


def _check(model: LanguageModel, prompts: Sequence[Sequence[int]], window: int | None) -> None:
    assert prompts, "nothing to continue"
    if model.training:
        raise ModelError("the model is in training mode, where dropout changes what it writes; call model.eval() first")
    vocab_size: int = getattr(model.config, "vocab_size", 0)
    for row, prompt in enumerate(prompts):
        which = "the prompt" if len(prompts) == 1 else f"prompt {row}"
        if not prompt:
            raise ModelError(f"{which} is empty; it needs at least one token to start from")
        if window is not None and len(prompt) > window:
            raise ModelError(f"{which} is {len(prompt)} tokens long, but the model reads at most {window}")
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ModelError(f"{which} holds the id {wrong}, outside the model's vocabulary of {vocab_size}")
