"""Text in, text out: tokens become text as they come, and stop strings end it without ever showing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from weft.decode.config import Sampling
from weft.decode.generate import Constraint, Finish, Token, generate
from weft.models.base import LanguageModel, Source
from weft.text.tokenizer import Tokenizer

TAIL = 64  # characters, or tokens, of a prompt that tell how it ends


@dataclass(frozen=True)
class Piece:
    """Some text of one row, possibly empty, with the token that brought it; the row's last piece carries `finish`."""

    row: int
    text: str
    tokens: int
    finish: Finish | None
    token: Token


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability and the likeliest tokens in its place, as (text, log-probability)."""

    id: int
    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Completion:
    """The whole text of one row. `scored` is filled if log-probabilities were asked for; `score` by beam search."""

    text: str
    tokens: int
    finish: Finish
    scored: tuple[Scored, ...] = field(default=(), repr=False)
    score: float | None = None


def write(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    settings: Sampling | Sequence[Sampling],
    *,
    copies: int = 1,
    seeds: Sequence[int] | None = None,
    source: Source | None = None,
    constraints: Sequence[Constraint] | None = None,
    ends: frozenset[int] = frozenset(),
    apart: bool = False,
) -> Iterator[Piece]:
    """Continue texts, or ids; the new text comes in pieces as it is written, without the prompts.

    A piece never holds half a character nor any part of a stop string. An empty prompt begins a new text, and with
    `apart` what is written counts as a text of its own after any prompt. Rows are numbered as in `generate`: with
    `copies` the first ones belong to the first prompt. Ids in `ends` stop a row too.
    """
    several = [settings] * len(prompts) if isinstance(settings, Sampling) else list(settings)
    writers = [
        Writer(tokenizer, each.stop, not apart and has_begun(tokenizer, prompt))
        for prompt, each in zip(prompts, several, strict=True)
        for _ in range(copies)
    ]
    stream = generate(
        model,
        [prompt_ids(tokenizer, prompt) for prompt in prompts],
        several,
        copies=copies,
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
        seeds=seeds,
        source=source,
        stops=stopper(writers, tokenizer.eos_id, ends),
        constraints=constraints,
    )
    return pieces(stream, writers)


def complete(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    settings: Sampling | Sequence[Sampling],
    *,
    copies: int = 1,
    seeds: Sequence[int] | None = None,
    source: Source | None = None,
    constraints: Sequence[Constraint] | None = None,
) -> list[Completion]:
    """Continue texts and return the new text of each row, without the prompts. No prompts give no texts."""
    if not prompts:
        return []
    stream = write(
        model, tokenizer, prompts, settings, copies=copies, seeds=seeds, source=source, constraints=constraints
    )
    return gather(stream, tokenizer, [has_begun(tokenizer, prompt) for prompt in prompts for _ in range(copies)])


def gather(stream: Iterator[Piece], tokenizer: Tokenizer, begun: Sequence[bool]) -> list[Completion]:
    """The whole text of each row of a stream that has run to its end; `begun` says which rows go on with a text."""
    parts: list[list[Piece]] = [[] for _ in begun]
    for piece in stream:
        parts[piece.row].append(piece)
    done: list[Completion] = []
    for row, going_on in zip(parts, begun, strict=True):
        last = row[-1]
        assert last.finish is not None, "every row ends"
        text = "".join(piece.text for piece in row)
        done.append(Completion(text, last.tokens, last.finish, _scored(row, text, tokenizer, going_on)))
    return done


def _scored(row: Sequence[Piece], text: str, tokenizer: Tokenizer, begun: bool) -> tuple[Scored, ...]:
    """The tokens of a row with their log-probabilities; those that lie wholly in a stop string don't show either."""
    scored: list[Scored] = []
    stream = tokenizer.stream(begun=begun)
    before = 0  # characters before the token
    for piece in row:
        token = piece.token
        if token.logprob is None or (row[-1].finish == "stop" and before >= len(text)):
            break
        top = tuple((_spelled(tokenizer, id), value) for id, value in token.top)
        scored.append(Scored(token.id, _spelled(tokenizer, token.id), token.logprob, top))
        before += len(stream.push(token.id))
    return tuple(scored)


def _spelled(tokenizer: Tokenizer, id: int) -> str:
    """A token as a reader would see it in a running text; special ones by their names."""
    if id in tokenizer.special_tokens.values():
        return tokenizer.token(id)
    return tokenizer.token_bytes(id).decode("utf-8", "replace")


def prompt_ids(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> Sequence[int]:
    """The ids to continue; never none. A text begins as the tokenizer's own file has it begin."""
    ids = [*tokenizer.leading, *tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt
    return ids or [opening(tokenizer)]


def has_begun(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> bool:
    """Whether what follows a prompt goes on with a text, so that its first word keeps its leading space.

    Where the prompt ends in a space that the tokenizer doesn't keep, that space is the first word's.
    """
    # how it ends is all that is asked, and a prompt may be long: its last words will do
    first = max(0, len(prompt) - TAIL)
    if isinstance(prompt, str):
        text = tokenizer.decode(tokenizer.encode(prompt[prompt.rfind(" ", 0, first) + 1 :]))
    else:
        text = tokenizer.decode(prompt[first:])
    lost = isinstance(prompt, str) and prompt[-1:].isspace() and not text[-1:].isspace()
    return bool(text) and not lost


def told(tokenizer: Tokenizer, ids: Sequence[int], begun: bool) -> str:
    """The text of ids, which go on with a text that has `begun` or begin one."""
    stream = tokenizer.stream(begun=begun)
    return stream.extend(ids) + stream.flush()


def stopper(
    writers: "Sequence[Writer]", eos_id: int | None, ends: frozenset[int] = frozenset()
) -> Callable[[int, int], bool]:
    """Feeds each row's writer and says whether a stop string is complete, or one of `ends` came."""
    return lambda row, token: token != eos_id and (token in ends or writers[row].push(token))


def pieces(stream: Iterator[Token], writers: "Sequence[Writer]") -> Iterator[Piece]:
    """The text that each token completes."""
    counts = [0] * len(writers)
    for token in stream:
        counts[token.row] += 1
        yield piece(token, writers[token.row], counts[token.row])


def piece(token: Token, writer: "Writer", count: int) -> Piece:
    """The text that a row's token number `count` completes; the row's writer has been fed it."""
    finish = token.finish
    # a row may end by a constraint ("stop") with text still held back
    if finish is not None and not writer.stopped and writer.end():
        finish = "stop"
    return Piece(token.row, writer.take(), count, finish, token)


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


class Writer:
    """Turns the tokens of one row into text that may be shown, and notices stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], begun: bool = False):
        self.stream = tokenizer.stream(begun=begun)
        self.stop = stop
        self.held = ""  # written, but it may be the beginning of a stop string
        self.ready = ""  # may be shown
        self.stopped = False  # a stop string is complete

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
            self.stopped = True
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
