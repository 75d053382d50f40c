"""Whole texts: what the chunks of a stream make together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.decode.ending import Finish
from weft.decode.prompt import Prompt
from weft.decode.text import Chunk
from weft.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its log-probability and the likeliest tokens in its place, as (text, log-probability)."""

    id: int
    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Completion:
    """The whole text of one row. `scored` is filled if log-probabilities were asked for; `score` by beam search.

    `slid`: prompt and text were longer than the model's window, and it went on over the last tokens.
    """

    text: str
    tokens: int
    finish: Finish
    scored: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    score: float | None = None
    slid: bool = False


def gather(stream: Iterable[Chunk], prompts: Sequence[Prompt]) -> list[Completion]:
    """The whole text of each row of a stream that has run to its end."""
    rows: list[list[Chunk]] = [[] for _ in prompts]
    for chunk in stream:
        rows[chunk.row].append(chunk)
    return [completion_of(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]


def completion_of(chunks: Sequence[Chunk], prompt: Prompt) -> Completion:
    """The whole text that its chunks make."""
    last = chunks[-1]
    assert last.finish is not None, "every text ends"
    text = "".join(chunk.text for chunk in chunks)
    scored = () if prompt.tokenizer is None else _scored(chunks, text, prompt.tokenizer, prompt.begun)
    return Completion(text, last.tokens, last.finish, scored, slid=last.slid)


def _scored(chunks: Sequence[Chunk], text: str, tokenizer: Tokenizer, begun: bool) -> tuple[TokenLogprob, ...]:
    """The tokens of a text with their log-probabilities; those that lie wholly in a stop string don't show either."""
    scored: list[TokenLogprob] = []
    stream = tokenizer.stream(begun=begun)
    before = 0  # characters before the token
    for chunk in chunks:
        if chunk.logprob is None or (chunks[-1].finish == "stop" and before >= len(text)):
            break
        top = tuple((spelled(tokenizer, id), value) for id, value in chunk.top)
        scored.append(TokenLogprob(chunk.id, spelled(tokenizer, chunk.id), chunk.logprob, top))
        before += len(stream.push(chunk.id))
    return tuple(scored)


def spelled(tokenizer: Tokenizer, id: int) -> str:
    """A token as a reader would see it in a running text; special ones by their names."""
    if id in tokenizer.special_tokens.values():
        return tokenizer.token(id)
    return tokenizer.token_bytes(id).decode("utf-8", "replace")
