"""Which text has which block of a paged cache: use counts, shared prefixes, and blocks that wait to be used again.

A block that is full is known by a key, a hash of its own tokens and of all before them. Another text with the same
prefix uses the same block instead of reading those tokens again. A known block that no text uses keeps its content
until the block is needed; the one that was used longest ago goes first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

Key = bytes


@dataclass
class BlockTable:
    """The blocks of one text, in order. `keys` are those of its full blocks; `read` tokens of it are in the blocks.

    `pending` are the keys of blocks that this text is the first to read.
    """

    keys: list[Key]
    read: int
    blocks: list[int] = field(default_factory=list)
    pending: set[Key] = field(default_factory=set)


class BlockPool:
    """`blocks` blocks for `block_size` tokens each. It is all numbers: the content lies in a `paging.BlockStore`."""

    def __init__(self, blocks: int, block_size: int):
        assert blocks > 0 and block_size > 0
        self.block_size = block_size
        self.uses = [0] * blocks  # how many tables name each block
        self.blank = list(range(blocks - 1, -1, -1))  # neither used nor known; the next one is the last
        self.known: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.unused: OrderedDict[int, None] = OrderedDict()  # known but unused, the longest unused first
        self.pending: set[Key] = set()  # keys of blocks that some text is being read into

    @property
    def free_blocks(self) -> int:
        """Blocks that can be had."""
        return len(self.blank) + len(self.unused)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_size)

    def keys(self, tokens: Sequence[int], end: int, known: list[Key]) -> list[Key]:
        """The keys of all blocks that a text's tokens before `end` fill; `known` are the first of them."""
        size = self.block_size
        for start in range(len(known) * size, end - size + 1, size):
            content = array("q", tokens[start : start + size]).tobytes()
            known.append(blake2b((known[-1] if known else b"") + content, digest_size=16).digest())
        return known

    def shared(self, keys: Sequence[Key]) -> int:
        """How many of a text's first blocks are here already."""
        return next((count for count, key in enumerate(keys) if key not in self.known), len(keys))

    def awaits(self, keys: Sequence[Key]) -> bool:
        """Whether the next block that this text lacks is being read just now, so that it pays to wait for it."""
        count = self.shared(keys)
        return count < len(keys) and keys[count] in self.pending

    def allocate(self, keys: list[Key], tokens: int, spare: int = 0) -> BlockTable | None:
        """A block table for a text of so many tokens, which begins with blocks that are known already.

        `keys` are those of its full blocks before its last token: what follows a text is known only by reading that
        one. None, and nothing changed, where fewer than `spare` free blocks would be left.
        """
        count = self.shared(keys)
        assert count * self.block_size < tokens, "a text's last token is never shared"
        woken = sum(1 for key in keys[:count] if not self.uses[self.known[key]])
        if self.blocks_for(tokens) - count + spare > self.free_blocks - woken:
            return None
        table = BlockTable(keys, count * self.block_size)
        for key in keys[:count]:
            block = self.known[key]
            self.unused.pop(block, None)
            self.uses[block] += 1
            table.blocks.append(block)
        table.pending = {key for key in keys[count:] if key not in self.pending and key not in self.known}
        self.pending |= table.pending
        self.extend(table, tokens)
        return table

    def extend(self, table: BlockTable, tokens: int) -> bool:
        """Let a text grow to so many tokens; False, and nothing changed, where the pool has too few blocks."""
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing > self.free_blocks:
            return False
        table.blocks += [self._take() for _ in range(missing)]
        return True

    def commit(self, table: BlockTable, tokens: Sequence[int], read: int) -> None:
        """The first `read` of a text's tokens are in its blocks now; those that are full become known."""
        full, before = read // self.block_size, table.read // self.block_size
        table.read = read
        if full == before:
            return
        self.keys(tokens, full * self.block_size, table.keys)
        for place in range(before, full):
            key, block = table.keys[place], table.blocks[place]
            if key not in self.known and block not in self.key_of:
                self.known[key] = block
                self.key_of[block] = key
            if key in table.pending:
                table.pending.remove(key)
                self.pending.remove(key)

    def release(self, table: BlockTable) -> None:
        """The text needs its blocks no more; what is known in them may serve others."""
        self.pending -= table.pending
        table.pending.clear()
        while table.blocks:  # the last first: a prefix is worth more than what followed it
            block = table.blocks.pop()
            assert self.uses[block] > 0, "a block is given back once"
            self.uses[block] -= 1
            if not self.uses[block] and block in self.key_of:
                self.unused[block] = None
            elif not self.uses[block]:
                self.blank.append(block)
        table.read = 0

    def _take(self) -> int:
        if self.blank:
            block = self.blank.pop()
        else:
            block, _ = self.unused.popitem(last=False)
            del self.known[self.key_of.pop(block)]
        self.uses[block] = 1
        return block
