"""Speculation: guess some tokens cheaply, let the model check them all in one step, and keep what it agrees with.

A step of a large model takes as long for five tokens as for one, so every right guess is time won. What is written
follows the same distribution as without guessing (Leviathan et al. 2023, appendix A.1), and greedy text is the same.
Guesses come from a smaller model with the same vocabulary, or from the text itself, which often repeats.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.generate import (
    Constraint,
    Finish,
    Token,
    check_prompts,
    chosen_size,
    device_of,
    longest_text,
    max_room,
    reports,
)
from weft.decode.room import make_room, start
from weft.decode.sampling import check_logits, choose, draw, filtered
from weft.decode.shaping import Past, ban, check_ids, needs_past, shaped
from weft.decode.writing import Piece, Writer, has_begun, pieces, prompt_ids, stopper
from weft.errors import ModelError
from weft.models.base import LanguageModel, Source, State
from weft.text.tokenizer import Tokenizer

AHEAD = 5  # tokens guessed at once


class Guess(NamedTuple):
    """Tokens that may come next, and the distributions (guesses, V) they were drawn from; None: they were certain."""

    tokens: list[int]
    probabilities: Tensor | None


class Guesser(Protocol):
    def guess(self, text: Sequence[int], most: int) -> Guess:
        """Up to `most` tokens that may follow `text`."""
        ...


class LookUp:
    """Guesses that what followed these last tokens before follows them again: the longest match of up to `longest`."""

    def __init__(self, longest: int):
        if longest < 1:
            raise ModelError(f"lookup = {longest}: at least one token has to match")
        self.longest = longest
        self.after: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]  # n-gram → the place after it
        self.known = 0

    def guess(self, text: Sequence[int], most: int) -> Guess:
        # the n-grams that end the text get their place when the text has gone on: nothing follows them yet
        for end in range(self.known, len(text)):
            for n in range(1, min(self.longest, end) + 1):
                self.after[n - 1][tuple(text[end - n : end])] = end
        self.known = len(text)
        for n in range(min(self.longest, len(text)), 0, -1):
            place = self.after[n - 1].get(tuple(text[-n:]))
            if place is not None:
                return Guess(list(text[place : place + most]), None)
        return Guess([], None)


class Draft:
    """Guesses with a smaller model, which draws by the same settings or, where the text is greedy, takes the best."""

    def __init__(self, model: LanguageModel, settings: Sampling, vocab_size: int, room: int, seed: int):
        if model.training:
            raise ModelError("the draft model is in training mode; call model.eval() first")
        window = longest_text(model)
        self.model, self.settings, self.vocab_size = model, settings, vocab_size
        self.room = room if window is None else min(room, window)
        self.generator = torch.Generator().manual_seed(seed)
        self.state: State = start(model, 1, 1, self.room, device_of(model))
        self.read: list[int] = []
        self.agreed = 0  # tokens that were read and have been written: they stay

    def guess(self, text: Sequence[int], most: int) -> Guess:
        most = min(most, self.room - len(text) + 1)  # the last guess is never read
        if most < 1:
            return Guess([], None)
        logits = self._catch_up(text)
        tokens: list[int] = []
        rows: list[Tensor] = []
        while True:
            check_logits(logits)
            if self.settings.greedy:
                token = int(choose(logits, self.settings, [self.generator]))
            else:
                ready = filtered(logits, self.settings)
                uniform = torch.rand(1, dtype=torch.float64, generator=self.generator)
                token = int(draw(ready, uniform.to(ready.device)))
                rows.append(ready[0].double().softmax(dim=-1))
            tokens.append(token)
            if len(tokens) == most:
                return Guess(tokens, torch.stack(rows) if rows else None)
            logits = self._step([token])

    def _catch_up(self, text: Sequence[int]) -> Tensor:
        """Forget the guesses that were wrong, read what was written instead; logits (1, V) after the text."""
        same = self.agreed
        while same < min(len(self.read), len(text) - 1) and self.read[same] == text[same]:
            same += 1
        self.state.truncate(same)
        del self.read[same:]
        self.agreed = len(text) - 1
        return self._step(text[same:])

    def _step(self, tokens: Sequence[int]) -> Tensor:
        self.read += tokens
        make_room(self.state, len(tokens), self.room)
        return _read(self.model, tokens, self.state, 1)[:, : self.vocab_size]


def _read(model: LanguageModel, tokens: Sequence[int], state: State, last: int) -> Tensor:
    """Logits (last, V) after each of the last few of these tokens."""
    features = model.advance(torch.tensor([list(tokens)], device=device_of(model)), state)
    return model.head(features[:, -last:])[0]


def speculate(
    model: LanguageModel,
    guesser: Guesser,
    prompt: Sequence[int],
    settings: Sampling,
    *,
    eos_id: int | None = None,
    vocab_size: int | None = None,
    source: Source | None = None,
    stops: Callable[[int, int], bool] | None = None,
    constraint: Constraint | None = None,
) -> Iterator[Token]:
    """Continue one prompt as `generate` does, with guesses; the tokens come in bursts."""
    window = longest_text(model)
    check_prompts(model, [prompt], window)
    size = chosen_size(model, vocab_size)
    check_ids([settings], size)
    return _bursts(model, guesser, prompt, settings, window, eos_id, size, source, stops, constraint)


@torch.inference_mode()
def _bursts(
    model: LanguageModel,
    guesser: Guesser,
    prompt: Sequence[int],
    settings: Sampling,
    window: int | None,
    eos_id: int | None,
    vocab_size: int,
    source: Source | None,
    stops: Callable[[int, int], bool] | None,
    constraint: Constraint | None,
) -> Iterator[Token]:
    device = device_of(model)
    generator = torch.Generator().manual_seed(settings.seed)
    past = Past([prompt], vocab_size, device) if needs_past([settings]) else None
    room = max_room([len(prompt)], [settings], window)
    state = start(model, 1, len(prompt), room, device, source)
    text = list(prompt)
    count = known = 0  # tokens written; tokens of the text that the model has read
    while True:
        most = min(AHEAD, settings.max_tokens - count - 1, room - len(text))
        guess = guesser.guess(text, most) if most > 0 else Guess([], None)
        unread = [*text[known:], *guess.tokens]
        make_room(state, len(unread), room)
        logits = _read(model, unread, state, len(guess.tokens) + 1)[:, :vocab_size]
        for place in range(len(guess.tokens) + 1):
            here = logits[place : place + 1]
            ready = shaped(here, [settings], past, count, eos_id)
            if constraint is not None:
                ready = ban(ready, ~constraint.allowed().to(device))
            token = _decide(ready, guess, place, settings, generator)
            full = count + 1 == settings.max_tokens or (window is not None and len(text) == window)
            stopped = stops is not None and stops(0, token)
            if constraint is not None and token != eos_id:
                constraint.push(token)
                stopped = stopped or constraint.over
            finish: Finish | None = "eos" if token == eos_id else "stop" if stopped else "length" if full else None
            yield Token(0, token, finish, *reports(here, [token], [settings])[0])
            if finish is not None:
                return
            if past is not None:
                past.push(torch.tensor([token], device=device))
            text.append(token)
            count += 1
            if place < len(guess.tokens) and token != guess.tokens[place]:
                break
        known = len(text) - 1  # the newest token is the model's own and not read yet
        state.truncate(known)


def _decide(ready: Tensor, guess: Guess, place: int, settings: Sampling, generator: torch.Generator) -> int:
    """The next token from logits (1, V), which is the guess as often as it can be.

    A guess x from q is kept with probability min(1, p(x) / q(x)); otherwise the token is drawn from max(0, p − q),
    normalised. Together that is p. A guess that was certain needs none of this: a draw from p agrees with it or not.
    """
    if guess.probabilities is None or place == len(guess.tokens) or settings.greedy:
        return int(choose(ready, settings, [generator]))
    check_logits(ready)
    p = filtered(ready, settings)[0].double().softmax(dim=-1)
    q, x = guess.probabilities[place].to(p), guess.tokens[place]
    uniforms = torch.rand(2, dtype=torch.float64, generator=generator)
    if float(uniforms[0]) * float(q[x]) < float(p[x]):
        return x
    rest = (p - q).clamp(min=0.0)
    # p and q are the same but for rounding: then a draw from p is right
    rest = rest if float(rest.sum()) > 0.0 else p
    return int(draw(rest.log(), uniforms[1].to(rest.device)))


def write_ahead(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    settings: Sampling,
    *,
    draft: LanguageModel | None = None,
    lookup: int | None = None,
    constraint: Constraint | None = None,
) -> Iterator[Piece]:
    """Continue one text with guesses from a `draft` model or from a `lookup` of up to so many tokens."""
    assert (draft is None) != (lookup is None), "guesses come from one of the two"
    ids = prompt_ids(tokenizer, prompt)
    writers = [Writer(tokenizer, settings.stop, has_begun(tokenizer, prompt))]
    guesser: Guesser
    if draft is None:
        assert lookup is not None
        guesser = LookUp(lookup)
    else:
        # its draws must not be those that decide about them
        seed = (settings.seed * 2 + 1) % 2**63
        guesser = Draft(draft, settings, tokenizer.vocab_size, len(ids) + settings.max_tokens, seed)
    stream = speculate(
        model,
        guesser,
        ids,
        settings,
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
        stops=stopper(writers, tokenizer.eos_id),
        constraint=constraint,
    )
    return pieces(stream, writers)
