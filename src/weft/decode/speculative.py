"""Speculation: guess some tokens cheaply, let the model check them all in one step, and keep what it agrees with.

A step of a large model takes as long for five tokens as for one, so every right guess is time won. What is written
follows the same distribution as without guessing (Leviathan et al. 2023, appendix A.1), and greedy text is the same.
Guesses come from a smaller model with the same vocabulary, or from the text itself, which often repeats.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.fast.stepper import Stepper
from weft.decode.generate import max_length
from weft.decode.prompt import Prompt, check_prompts, choices, context_window, slid
from weft.decode.sampling import check_logits, draw, filtered, greedy, picked
from weft.decode.text import Chunk, Text, adjusted, reports
from weft.errors import ModelError
from weft.models.base import LanguageModel, device_of
from weft.models.transformer import Transformer

AHEAD = 5  # tokens guessed at once


class Guess(NamedTuple):
    """Tokens that may come next, and the distributions (guesses, V) they were drawn from; None: they were certain."""

    tokens: list[int]
    probabilities: Tensor | None


class LookUp:
    """Guesses that what followed these last tokens before follows them again: the longest match of up to `longest`."""

    def __init__(self, longest: int):
        if longest < 1:
            raise ModelError(f"lookup = {longest}: at least one token has to match")
        self.longest, self.known = longest, 0
        self.after: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]  # n-gram → the place after it

    def guess(self, text: Sequence[int], most: int) -> Guess:
        """Up to `most` tokens that may follow a text."""
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

    def __init__(self, model: LanguageModel, prompt: Prompt, settings: Sampling):
        if model.training:
            raise ModelError("the draft model is in training mode; call model.eval() first")
        self.model, self.settings = model, settings
        self.vocab_size = choices(model, prompt.vocab_size)
        self.window, self.stays = context_window(model), prompt.last(context_window(model))[1]
        self.limit = max_length([prompt.ids], settings.max_tokens, model)
        # its draws must not be those that decide about them
        self.rng = torch.Generator().manual_seed((settings.seed * 2 + 1) % 2**63)
        self.left_out = -1  # tokens of the text before those that are read

    def guess(self, text: Sequence[int], most: int) -> Guess:
        seen = slid(text, self.window, self.stays)
        if self.left_out != len(text) - len(seen):  # in a new window everything is read again
            self.left_out = len(text) - len(seen)
            self.stepper = Stepper(self.model, 1, prompt_tokens=1, limit=self.limit)
            self.read: list[int] = []
            self.agreed = 0  # tokens that were read and have been written: they stay
        most = min(most, self.limit - len(seen) + 1)  # the last guess is never read
        if most < 1:
            return Guess([], None)
        logits = self._catch_up(seen)
        tokens: list[int] = []
        rows: list[Tensor] = []
        while True:
            check_logits(logits)
            if self.settings.greedy:
                tokens.append(int(greedy(logits)))
            else:
                ready = filtered(logits, [self.settings])
                uniform = torch.rand(1, dtype=torch.float64, generator=self.rng)
                tokens.append(int(draw(ready, uniform.to(ready.device))))
                rows.append(ready[0].double().softmax(dim=-1))
            if len(tokens) == most:
                return Guess(tokens, torch.stack(rows) if rows else None)
            logits = self._step(tokens[-1:])

    def _catch_up(self, text: Sequence[int]) -> Tensor:
        """Forget the guesses that were wrong, read what was written instead; logits (1, V) after the text."""
        same = self.agreed
        while same < min(len(self.read), len(text) - 1) and self.read[same] == text[same]:
            same += 1
        self.stepper.truncate(same)
        del self.read[same:]
        self.agreed = len(text) - 1
        return self._step(text[same:])

    def _step(self, tokens: Sequence[int]) -> Tensor:
        self.read += tokens
        return _read(self.stepper, tokens, 1)[:, : self.vocab_size]


def _read(stepper: Stepper, tokens: Sequence[int], last: int) -> Tensor:
    features = stepper.read(torch.tensor([list(tokens)], device=device_of(stepper.model)))
    return stepper.model.head(features[:, -last:])[0]


def speculate(
    model: LanguageModel, guesser: LookUp | Draft, prompt: Prompt | Sequence[int], settings: Sampling
) -> Iterator[Chunk]:
    """Continue one prompt as `generate` does, with guesses; the chunks come in bursts."""
    prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    check_prompts(model, [prompt], [settings])
    return _bursts(model, guesser, Text(prompt, settings, context_window(model), settings.seed))


@torch.inference_mode()
def _bursts(model: LanguageModel, guesser: LookUp | Draft, text: Text) -> Iterator[Chunk]:
    vocab_size = choices(model, text.prompt.vocab_size)
    limit = max_length([text.ids], text.settings.max_tokens, model)
    stepper = Stepper(model, 1, prompt_tokens=len(text.ids), limit=limit)
    whole = list(text.prompt.ids)
    known = 0  # of the text's ids, those that the model has read
    # a guess beyond such a length would have the tokens before it read by other angles
    switches = model.decoder.switches if isinstance(model, Transformer) and model.decoder is not None else []
    while True:
        if text.full:
            text.slide()
            stepper, known = Stepper(model, 1, prompt_tokens=len(text.ids), limit=limit), 0
        most = min(AHEAD, text.settings.max_tokens - text.written - 1, limit - len(text.ids))
        most = min([most, *(each - len(text.ids) for each in switches if each >= len(text.ids))])
        guess = guesser.guess(whole, most) if most > 0 else Guess([], None)
        logits = _read(stepper, [*text.ids[known:], *guess.tokens], len(guess.tokens) + 1)[:, :vocab_size]
        for place in range(len(guess.tokens) + 1):
            here = logits[place : place + 1]
            token = model.agree(_decide(text, adjusted([text], here), guess, place))
            chunk = text.push(token, reports(here, [token], [text.settings])[0])
            yield chunk
            if chunk.finish is not None:
                return
            whole.append(token)
            if place < len(guess.tokens) and token != guess.tokens[place]:
                break
        known = len(text.ids) - 1  # the newest token is the model's own and not read yet
        stepper.truncate(known)


def _decide(text: Text, ready: Tensor, guess: Guess, place: int) -> int:
    """The next token from logits (1, V), which is the guess as often as it can be.

    A guess x from q is kept with probability min(1, p(x) / q(x)); otherwise the token is drawn from max(0, p − q),
    normalised. Together that is p. A guess that was certain needs none of this: a draw from p agrees with it or not.
    """
    settings = text.settings
    if guess.probabilities is None or place == len(guess.tokens) or settings.greedy:
        return int(picked(ready, [settings], [0.0 if settings.greedy else text.uniform()]))
    p = filtered(ready, [settings])[0].double().softmax(dim=-1)
    q, x = guess.probabilities[place].to(p), guess.tokens[place]
    accept, again = text.uniform(), text.uniform()
    if accept * float(q[x]) < float(p[x]):
        return x
    rest = (p - q).clamp(min=0.0)
    # p and q are the same but for rounding: then a draw from p is right
    rest = rest if float(rest.sum()) > 0.0 else p
    return int(draw(rest.log(), torch.tensor(again, dtype=torch.float64, device=rest.device)))
