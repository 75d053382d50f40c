"""Regular expressions over bytes: whether a text that has begun can still become one that matches.

A pattern is read into a tree, the tree into states with arrows that carry bytes (Thompson 1968), and sets of such
states are followed byte by byte. Characters outside ASCII are spelled in UTF-8, so that half a character is a state
like any other. Every state leads to a match: a set that is not empty is a beginning of one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from weft.errors import ConfigError

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included
LARGEST = 0x10FFFF
MOST_STATES = 200_000
MOST_REPEATS = 10_000

DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}


def inverse(ranges: Ranges) -> Ranges:
    """All other code points, less the surrogates, which no text holds."""
    gaps: list[tuple[int, int]] = []
    start = 0
    for low, high in sorted((*ranges, (0xD800, 0xDFFF), (LARGEST + 1, LARGEST + 1))):
        if start < low:
            gaps.append((start, low - 1))
        start = max(start, high + 1)
    return tuple(gaps)


@dataclass(frozen=True)
class Set:
    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Choice:
    options: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    part: "Node"
    least: int
    most: int | None


Node = Set | Sequence | Choice | Repeat


class _Reader:
    """A pattern, read from left to right."""

    def __init__(self, pattern: str):
        self.pattern, self.place = pattern, 0

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"pattern {self.pattern!r}, character {self.place}: {what}")

    def peek(self) -> str:
        return self.pattern[self.place : self.place + 1]

    def take(self) -> str:
        letter = self.peek()
        if not letter:
            raise self.error("ends too early")
        self.place += 1
        return letter

    def choice(self) -> Node:
        options = [self.sequence()]
        while self.peek() == "|":
            self.take()
            options.append(self.sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeated())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def repeated(self) -> Node:
        node = self.atom()
        while (sign := self.peek()) and sign in "*+?{":
            self.take()
            if isinstance(node, Repeat) and sign in "+?*" and self.pattern[self.place - 2] in "*+?}":
                raise self.error("lazy and possessive repeats mean nothing here, where whole texts match")
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign) or self.braces()
            node = Repeat(node, least, most)
        return node

    def braces(self) -> tuple[int, int | None]:
        body = ""
        while (letter := self.take()) != "}":
            body += letter
        least, comma, most = body.partition(",")
        if not least.isdecimal() or (most and not most.isdecimal()):
            raise self.error("a repeat is written {2}, {2,} or {2,5}")
        if max(len(least), len(most)) > len(str(MOST_REPEATS)) or int(most or least) > MOST_REPEATS:
            raise self.error(f"at most {MOST_REPEATS} repeats")
        bounds = int(least), int(most) if most else None if comma else int(least)
        if bounds[1] is not None and bounds[1] < bounds[0]:
            raise self.error(f"{{{body}}} ends before it begins")
        return bounds

    def atom(self) -> Node:
        letter = self.take()
        if letter == "(":
            if self.peek() == "?":
                self.take()
                if self.take() != ":":
                    raise self.error("only groups (…) and (?:…) are supported")
            node = self.choice()
            if self.peek() != ")":
                raise self.error("a group is not closed")
            self.take()
            return node
        if letter == "[":
            return Set(self.bracket())
        if letter == ".":
            return Set(inverse(((0x0A, 0x0A),)))
        if letter == "\\":
            return Set(self.escape())
        if letter in "^$":
            raise self.error(f"{letter} is not needed: the whole text has to match")
        if letter in "*+?{":
            raise self.error(f"{letter} has nothing to repeat; write \\{letter} for the sign itself")
        return Set(_one(letter))

    def escape(self) -> Ranges:
        letter = self.take()
        sets = {"d": DIGITS, "w": WORD, "s": SPACE}
        if letter.lower() in sets:
            return sets[letter] if letter.islower() else inverse(sets[letter.lower()])
        if letter in CONTROLS:
            return _one(CONTROLS[letter])
        if letter in "xu":
            digits = "".join(self.take() for _ in range(2 if letter == "x" else 4))
            try:
                return _one(chr(int(digits, 16)))
            except ValueError:
                raise self.error(f"\\{letter}{digits} is no character") from None
        if letter.isalnum():
            raise self.error(f"\\{letter} is not supported")
        return _one(letter)

    def bracket(self) -> Ranges:
        negated = self.peek() == "^"
        if negated:
            self.take()
        ranges: list[tuple[int, int]] = []
        while self.peek() != "]" or not ranges:
            letter = self.take()
            low = self.escape() if letter == "\\" else _one(letter)
            if self.peek() == "-" and self.pattern[self.place + 1 : self.place + 2] not in ("]", ""):
                self.take()
                letter = self.take()
                high = self.escape() if letter == "\\" else _one(letter)
                if len(low) > 1 or len(high) > 1 or low[0][0] > high[0][0]:
                    raise self.error("a range goes from a lower character to a higher one")
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges += low
        self.take()
        return inverse(tuple(ranges)) if negated else tuple(ranges)


def _one(letter: str) -> Ranges:
    return ((ord(letter), ord(letter)),)


def parse(pattern: str) -> Node:
    """The tree of a pattern, or an error that names the place."""
    reader = _Reader(pattern)
    node = reader.choice()
    if reader.peek():
        raise reader.error("there is no group to close")
    return node


def spelled(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The UTF-8 spellings of the code points low … high, as sequences of byte ranges."""
    for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, LARGEST)):
        if low <= last and high >= first:
            yield from _same_length(chr(max(low, first)).encode(), chr(min(high, last)).encode())


def _same_length(low: bytes, high: bytes) -> Iterator[tuple[tuple[int, int], ...]]:
    """Byte ranges between two spellings of one length: split until all but the first differing byte are free."""
    if len(low) == 1 or low[0] == high[0]:
        rest = [()] if len(low) == 1 else _same_length(low[1:], high[1:])
        for each in rest:
            yield ((low[0], high[0]), *each)
        return
    free = len(low) - 1
    first, last = low[0], high[0]
    if low[1:] != b"\x80" * free:
        for each in _same_length(low[1:], b"\xbf" * free):
            yield ((first, first), *each)
        first += 1
    if high[1:] != b"\xbf" * free:
        for each in _same_length(b"\x80" * free, high[1:]):
            yield ((last, last), *each)
        last -= 1
    if first <= last:
        yield ((first, last), *((0x80, 0xBF),) * free)


@dataclass
class _Arrows:
    free: list[int] = field(default_factory=list)  # states reached without a byte
    bytes: list[tuple[int, int, int]] = field(default_factory=list)  # (lowest, highest, state)


State = frozenset[int]


class Automaton:
    """All texts that match a pattern, followed byte by byte. `start` is where every text begins."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self._arrows: list[_Arrows] = []
        self._end = self._state()
        try:
            first = self._build(parse(pattern), self._end)
        except RecursionError:
            raise ConfigError(f"pattern {pattern[:60]!r}: nested too deeply") from None
        self._steps: dict[tuple[State, int], State] = {}
        self.start = self._closed({first})

    def matches(self, state: State) -> bool:
        """Whether the text may end here."""
        return self._end in state

    def step(self, state: State, byte: int) -> State:
        """Where one more byte leads; the empty set if no match begins like this."""
        known = self._steps.get((state, byte))
        if known is None:
            reached = {to for one in state for low, high, to in self._arrows[one].bytes if low <= byte <= high}
            known = self._steps[state, byte] = self._closed(reached)
        return known

    def follow(self, state: State, text: bytes) -> State:
        """Where these bytes lead."""
        for byte in text:
            state = self.step(state, byte)
        return state

    def _state(self) -> int:
        if len(self._arrows) == MOST_STATES:
            raise ConfigError(f"pattern {self.pattern[:60]!r}: too large; repeat less often")
        self._arrows.append(_Arrows())
        return len(self._arrows) - 1

    def _build(self, node: Node, then: int) -> int:
        """The state from which `node` leads to the state `then`."""
        match node:
            case Set(ranges):
                first = self._state()
                for low, high in ranges:
                    for spelling in spelled(low, high):
                        self._spell(first, spelling, then)
                if not self._arrows[first].bytes:
                    raise ConfigError(f"pattern {self.pattern!r}: a set of characters is empty")
                return first
            case Sequence(parts):
                for part in reversed(parts):
                    then = self._build(part, then)
                return then
            case Choice(options):
                first = self._state()
                self._arrows[first].free += [self._build(option, then) for option in options]
                return first
            case Repeat(part, least, most):
                if most is None:
                    loop = self._state()
                    self._arrows[loop].free += [self._build(part, loop), then]
                    then = loop
                else:
                    after = then
                    for _ in range(most - least):
                        begin = self._build(part, then)
                        then = self._state()
                        self._arrows[then].free += [begin, after]
                for _ in range(least):
                    before, then = then, self._build(part, then)
                    if then == before:  # a part without characters
                        break
                return then

    def _spell(self, first: int, spelling: tuple[tuple[int, int], ...], then: int) -> None:
        for place, (low, high) in enumerate(spelling):
            to = then if place == len(spelling) - 1 else self._state()
            self._arrows[first].bytes.append((low, high, to))
            first = to

    def _closed(self, states: set[int]) -> State:
        """These states and all that are reached from them without a byte."""
        found, open_ones = set(states), list(states)
        while open_ones:
            for to in self._arrows[open_ones.pop()].free:
                if to not in found:
                    found.add(to)
                    open_ones.append(to)
        return frozenset(found)
