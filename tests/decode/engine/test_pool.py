"""The block pool: no block is lost or used twice, shared blocks hold the same tokens, and nothing stays reserved."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.decode.engine.paging import BlockKey, BlockPool, BlockTable

BLOCK = 3


class Model:
    """A pool, its texts, and what each block holds, which the pool itself does not know."""

    def __init__(self, blocks: int):
        self.pool = BlockPool(blocks, BLOCK)
        self.content: dict[int, list[int | None]] = {n: [None] * BLOCK for n in range(blocks)}
        self.texts: list[tuple[BlockTable, list[int]]] = []

    def admit(self, tokens: list[int], spare: int) -> None:
        before = self.pool.free_blocks
        table = self.pool.allocate(self.pool.extend_keys(tokens, len(tokens) - 1, []), len(tokens), spare)
        if table is None:
            assert self.pool.free_blocks == before
            return
        assert table.read < len(tokens)
        self.texts.append((table, tokens))
        assert self.pool.free_blocks >= spare
        self.check_content(table, tokens)  # shared blocks hold this very text

    def read(self, which: int, count: int) -> None:
        """Read the next tokens of a text; after its end, tokens are generated."""
        if not self.texts:
            return
        table, tokens = self.texts[which % len(self.texts)]
        end = table.read + count
        while len(tokens) < end:
            tokens.append(len(tokens) % 2)
        if not self.pool.extend(table, end):
            self.release(which)
            return
        for position in range(table.read, end):
            block = table.blocks[position // BLOCK]
            assert self.pool.uses[block] == 1, "no other text sees the write"
            self.content[block][position % BLOCK] = tokens[position]
        self.pool.commit(table, tokens, end)
        self.check_content(table, tokens)

    def release(self, which: int) -> None:
        if self.texts:
            table, _ = self.texts.pop(which % len(self.texts))
            self.pool.release(table)

    def check_content(self, table: BlockTable, tokens: list[int]) -> None:
        held = [token for block in table.blocks for token in self.content[block]]
        assert held[: table.read] == tokens[: table.read]

    def check(self) -> None:
        pool = self.pool
        used = Counter(block for table, _ in self.texts for block in table.blocks)
        assert pool.uses == [used[block] for block in range(len(pool.uses))]
        assert sorted([*pool.blank, *pool.unused, *used]) == list(range(len(pool.uses)))  # each is in one list, once
        assert {key: block for block, key in pool.key_of.items()} == pool.block_of
        assert set(pool.unused) <= set(pool.key_of)
        assert not set(pool.blank) & set(pool.key_of)
        assert pool.pending == {key for table, _ in self.texts for key in table.pending}
        for table, tokens in self.texts:
            self.check_content(table, tokens)


operations = st.one_of(
    st.tuples(st.just("admit"), st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(0, 2)),
    st.tuples(st.just("read"), st.integers(0, 9), st.integers(1, 7)),
    st.tuples(st.just("release"), st.integers(0, 9)),
)


@given(st.integers(1, 12), st.lists(operations, max_size=40))
@settings(max_examples=80, deadline=None)
def test_no_block_is_lost_or_used_twice(blocks: int, plan: list[tuple[object, ...]]) -> None:
    model = Model(blocks)
    for name, *arguments in plan:
        getattr(model, str(name))(*arguments)
        model.check()
    while model.texts:
        model.release(0)
    model.check()
    assert model.pool.free_blocks == blocks
    assert not model.pool.pending


def all_keys(pool: BlockPool, tokens: list[int]) -> list[BlockKey]:
    return pool.extend_keys(tokens, len(tokens), [])


def filled(pool: BlockPool, tokens: list[int]) -> BlockTable:
    table = pool.allocate(pool.extend_keys(tokens, len(tokens) - 1, []), len(tokens))
    assert table is not None
    pool.commit(table, tokens, len(tokens))
    return table


def test_full_blocks_of_a_common_prefix_are_shared() -> None:
    pool = BlockPool(10, BLOCK)
    first = filled(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    second = filled(pool, [1, 2, 3, 4, 5, 6, 9])
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert pool.free_blocks == 10 - 4


def test_the_last_block_of_a_cached_text_is_not_shared() -> None:
    """Its last token is read again, and must not be written into the other text's block."""
    pool = BlockPool(10, BLOCK)
    first = filled(pool, [1, 2, 3, 4, 5, 6])
    table = pool.allocate(pool.extend_keys([1, 2, 3, 4, 5, 6], 5, []), 6)
    assert table is not None and table.read == 3
    assert table.blocks[0] == first.blocks[0] and table.blocks[1] != first.blocks[1]


def test_released_blocks_stay_cached_until_they_are_needed() -> None:
    pool = BlockPool(4, BLOCK)
    pool.release(filled(pool, [1, 2, 3, 4, 5, 6]))
    assert pool.free_blocks == 4
    assert pool.shared_blocks(all_keys(pool, [1, 2, 3, 4, 5, 6, 7])) == 2
    filled(pool, [9] * 9)  # takes both blank blocks, and the end of the old text
    assert pool.shared_blocks(all_keys(pool, [1, 2, 3, 4, 5, 6, 7])) == 1


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(3, BLOCK)
    for tokens in ([1] * 3, [2] * 3, [3] * 3):
        pool.release(filled(pool, tokens))
    pool.release(filled(pool, [1] * 3 + [0]))  # reuses the first text's block, and takes the second's
    assert [n for n in (1, 2, 3) if pool.shared_blocks(all_keys(pool, [n] * 3))] == [1, 3]


def test_awaiting_a_prefix_that_another_text_is_reading() -> None:
    pool = BlockPool(8, BLOCK)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    keys = pool.extend_keys(tokens, len(tokens) - 1, [])
    first = pool.allocate(list(keys), 7)
    assert first is not None
    assert pool.awaits(keys)
    assert not pool.awaits(all_keys(pool, [1, 2]))
    pool.commit(first, tokens, 4)
    assert pool.awaits(keys)  # for the second block
    pool.commit(first, tokens, 6)
    assert not pool.awaits(keys)
    pool.release(first)
    other = pool.allocate(all_keys(pool, [7, 8, 9]), 3)
    assert other is not None
    assert pool.awaits(all_keys(pool, [7, 8, 9]))
    pool.release(other)  # before it was read
    assert not pool.awaits(all_keys(pool, [7, 8, 9]))


def test_a_failed_allocation_changes_nothing() -> None:
    pool = BlockPool(4, BLOCK)
    table = filled(pool, [1, 2, 3, 4])
    assert pool.allocate(all_keys(pool, [5] * 7), 7) is None
    assert pool.allocate(all_keys(pool, [5] * 6), 6, spare=1) is None
    assert not pool.extend(table, 13)
    assert pool.free_blocks == 2
    assert pool.blocks_for(12) == 4 and pool.blocks_for(13) == 5


def test_with_few_cached_blocks_the_same_memory_is_reused() -> None:
    pool = BlockPool(100, BLOCK, max_cached=3)
    used = set()
    for number in range(20):
        table = filled(pool, [number] * (2 * BLOCK + 1))
        used |= set(table.blocks)
        pool.release(table)
        assert len(pool.unused) <= 3
    assert pool.free_blocks == 100
    assert len(used) <= 6
