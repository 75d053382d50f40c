"""Who has which block of a paged cache: counts of use, shared beginnings, and blocks that wait to be used again.

A block that is full is known by a key, a hash of its own tokens and of all before them. Another text that begins with
the same tokens uses the same block instead of reading them again. A known block that nobody uses keeps its content
until its room is needed; the one that was used longest ago goes first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

Key = bytes


class Table:
    """The blocks of one text, in order. `keys` are those of its full blocks; `read` tokens of it are in the blocks."""

    __slots__ = ("blocks", "keys", "promises", "read")

    def __init__(self, keys: list[Key]):
        self.blocks: list[int] = []
        self.keys = keys
        self.read = 0
        self.promises: set[Key] = set()


class Pool:
    """`blocks` blocks for `block` tokens each. It is all numbers: the content lies elsewhere (`nn/paging.py`)."""

    def __init__(self, blocks: int, block: int):
        assert blocks > 0 and block > 0
        self.block = block
        self.uses = [0] * blocks  # how many tables name each block
        self.free = list(range(blocks - 1, -1, -1))  # neither used nor known; the next one is the last
        self.known: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()  # known but unused, the longest unused first
        self.promised: set[Key] = set()  # keys of blocks that a text is being read into

    @property
    def available(self) -> int:
        """Blocks that can be had."""
        return len(self.free) + len(self.idle)

    def size(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block)

    def fits(self, tokens: int) -> bool:
        """Whether a text of so many tokens fits if it has the pool for itself."""
        return self.size(tokens) <= len(self.uses)

    def keys(self, tokens: Sequence[int], salt: bytes, known: list[Key]) -> list[Key]:
        """The keys of all full blocks of a text; `known` are the first of them. Texts of another salt share nothing."""
        for start in range(len(known) * self.block, len(tokens) - self.block + 1, self.block):
            content = array("q", tokens[start : start + self.block]).tobytes()
            known.append(blake2b((known[-1] if known else salt) + content, digest_size=16).digest())
        return known

    def shared(self, keys: Sequence[Key]) -> int:
        """How many of a text's first blocks are here already."""
        for count, key in enumerate(keys):
            if key not in self.known:
                return count
        return len(keys)

    def awaits(self, keys: Sequence[Key]) -> bool:
        """Whether the next block that this text lacks is being read just now, so that it would pay to wait."""
        count = self.shared(keys)
        return count < len(keys) and keys[count] in self.promised

    def admit(self, keys: list[Key], tokens: int, spare: int = 0) -> Table | None:
        """A table with room for a text of so many tokens, and known blocks in it as far as they go.

        `read` says how many tokens those hold, at least one less than all: what follows a text is known only by reading
        its last token. None, and nothing changed, where fewer than `spare` blocks would be left.
        """
        count = self.shared(keys)
        read = min(count * self.block, tokens - 1)
        partly = count - read // self.block  # 1 where the last shared block will be written into, hence copied
        woken = sum(1 for key in keys[:count] if not self.uses[self.known[key]])
        if self.size(tokens) - count + partly + spare > self.available - woken:
            return None
        table = Table(keys)
        table.read = read
        for key in keys[:count]:
            block = self.known[key]
            self.idle.pop(block, None)
            self.uses[block] += 1
            table.blocks.append(block)
        table.promises = {key for key in keys[count:] if key not in self.promised and key not in self.known}
        self.promised |= table.promises
        return table

    def reserve(self, table: Table, tokens: int) -> list[tuple[int, int]] | None:
        """Make room for a text to grow to so many tokens in blocks of its own.

        Blocks to copy, (from, to), before anything is written: those it shares, from the first that will be written
        into. None, and nothing changed, where the pool has too few.
        """
        first = table.read // self.block
        shared = [
            place
            for place in range(first, len(table.blocks))
            if self.uses[table.blocks[place]] > 1 or table.blocks[place] in self.key_of
        ]
        missing = max(0, self.size(tokens) - len(table.blocks))
        if missing + len(shared) > self.available:
            return None
        copies: list[tuple[int, int]] = []
        for place in shared:
            old, new = table.blocks[place], self._take()
            table.blocks[place] = new
            copies.append((old, new))
        for old, _ in copies:
            self._drop(old)
        table.blocks += [self._take() for _ in range(missing)]
        return copies

    def filled(self, table: Table, tokens: Sequence[int], read: int, salt: bytes = b"") -> None:
        """The first `read` of a text's tokens are in its blocks now; those that are full become known."""
        full, before = read // self.block, table.read // self.block
        table.read = read
        if full == before:
            return
        self.keys(tokens[: full * self.block], salt, table.keys)
        for place in range(before, full):
            key, block = table.keys[place], table.blocks[place]
            if key not in self.known and block not in self.key_of:
                self.known[key] = block
                self.key_of[block] = key
            self._keep(table, key)

    def release(self, table: Table) -> None:
        """The text needs its blocks no more; what is known in them may serve others."""
        for key in list(table.promises):
            self._keep(table, key)
        while table.blocks:  # the last first: a beginning is worth more than what followed it
            self._drop(table.blocks.pop())
        table.read = 0

    def _keep(self, table: Table, key: Key) -> None:
        """A promise is kept, or given up."""
        if key in table.promises:
            table.promises.remove(key)
            self.promised.remove(key)

    def _take(self) -> int:
        """A block for one use, its content forgotten."""
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.idle.popitem(last=False)
            del self.known[self.key_of.pop(block)]
        self.uses[block] = 1
        return block

    def _drop(self, block: int) -> None:
        """One use less."""
        assert self.uses[block] > 0, "a block is given back once"
        self.uses[block] -= 1
        if self.uses[block]:
            return
        if block in self.key_of:
            self.idle[block] = None
        else:
            self.free.append(block)
