"""The block pool: every block is somewhere, once; what is shared is the same text; nothing is left behind."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.decode.engine.paging import BlockPool, BlockTable

BLOCK = 3


class House:
    """A pool with some texts in it, and what lies in each block, which the pool itself doesn't know."""

    def __init__(self, blocks: int):
        self.pool = BlockPool(blocks, BLOCK)
        self.content: dict[int, list[int | None]] = {n: [None] * BLOCK for n in range(blocks)}
        self.texts: list[tuple[BlockTable, list[int]]] = []

    def admit(self, tokens: list[int], spare: int) -> None:
        pool = self.pool
        keys = pool.keys(tokens, len(tokens) - 1, [])
        before = pool.free_blocks
        table = pool.allocate(keys, len(tokens), spare)
        if table is None:
            assert pool.free_blocks == before
            return
        assert table.read < len(tokens)
        self.texts.append((table, tokens))
        assert pool.free_blocks >= spare
        self.check_content(table, tokens)  # the shared blocks hold this very text

    def read(self, which: int, count: int) -> None:
        """Read on; beyond the end of the text, tokens are written."""
        if not self.texts:
            return
        table, tokens = self.texts[which % len(self.texts)]
        upto = table.read + count
        while len(tokens) < upto:
            tokens.append(len(tokens) % 2)
        if not self.pool.extend(table, upto):
            self.release(which)
            return
        for place in range(table.read, upto):
            block = table.blocks[place // BLOCK]
            assert self.pool.uses[block] == 1, "nobody else sees what is written"
            self.content[block][place % BLOCK] = tokens[place]
        self.pool.commit(table, tokens, upto)
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
        assert sorted([*pool.blank, *pool.unused, *used]) == list(range(len(pool.uses)))  # each in one place, once
        assert {key: block for block, key in pool.key_of.items()} == pool.known
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
@settings(max_examples=300, deadline=None)
def test_no_block_is_lost_or_had_twice(blocks: int, plan: list[tuple[object, ...]]) -> None:
    house = House(blocks)
    for name, *given_ in plan:
        getattr(house, str(name))(*given_)
        house.check()
    while house.texts:
        house.release(0)
    house.check()
    assert house.pool.free_blocks == blocks
    assert not house.pool.pending


def keys(pool: BlockPool, tokens: list[int]) -> list[bytes]:
    """Those of all that a text fills."""
    return pool.keys(tokens, len(tokens), [])


def filled(pool: BlockPool, tokens: list[int]) -> BlockTable:
    table = pool.allocate(pool.keys(tokens, len(tokens) - 1, []), len(tokens))
    assert table is not None
    pool.commit(table, tokens, len(tokens))
    return table


def test_the_second_text_shares_the_whole_blocks_of_the_first() -> None:
    pool = BlockPool(10, BLOCK)
    first = filled(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    second = filled(pool, [1, 2, 3, 4, 5, 6, 9])
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert pool.free_blocks == 10 - 4


def test_a_text_that_is_all_there_gets_a_last_block_of_its_own() -> None:
    """Its last token is read again, and what is written then must not touch the other's block."""
    pool = BlockPool(10, BLOCK)
    first = filled(pool, [1, 2, 3, 4, 5, 6])
    table = pool.allocate(pool.keys([1, 2, 3, 4, 5, 6], 5, []), 6)
    assert table is not None
    assert table.read == 3
    assert table.blocks[0] == first.blocks[0] and table.blocks[1] != first.blocks[1]


def test_what_was_released_is_found_again_until_its_blocks_are_needed() -> None:
    pool = BlockPool(4, BLOCK)
    pool.release(filled(pool, [1, 2, 3, 4, 5, 6]))
    assert pool.free_blocks == 4
    assert pool.shared(keys(pool, [1, 2, 3, 4, 5, 6, 7])) == 2
    filled(pool, [9] * 9)  # takes both blank blocks and the one that matters least: the end of the old text
    assert pool.shared(keys(pool, [1, 2, 3, 4, 5, 6, 7])) == 1


def test_the_longest_unused_goes_first() -> None:
    pool = BlockPool(3, BLOCK)
    for tokens in ([1] * 3, [2] * 3, [3] * 3):
        pool.release(filled(pool, tokens))
    pool.release(filled(pool, [1] * 3 + [0]))  # uses the first again, and the second's block
    kept = [n for n in (1, 2, 3) if pool.shared(keys(pool, [n] * 3))]
    assert kept == [1, 3]


def test_a_text_may_await_what_another_is_reading() -> None:
    pool = BlockPool(8, BLOCK)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    own = pool.keys(tokens, len(tokens) - 1, [])
    first = pool.allocate(list(own), 7)
    assert first is not None
    assert pool.awaits(own)
    assert not pool.awaits(keys(pool, [1, 2]))
    pool.commit(first, tokens, 4)
    assert pool.awaits(own)  # for the second block
    pool.commit(first, tokens, 6)
    assert not pool.awaits(own)
    pool.release(first)
    other = pool.allocate(keys(pool, [7, 8, 9]), 3)
    assert other is not None
    assert pool.awaits(keys(pool, [7, 8, 9]))
    pool.release(other)  # given up before it was read
    assert not pool.awaits(keys(pool, [7, 8, 9]))


def test_what_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(4, BLOCK)
    table = filled(pool, [1, 2, 3, 4])
    assert pool.allocate(keys(pool, [5] * 7), 7) is None
    assert pool.allocate(keys(pool, [5] * 6), 6, spare=1) is None
    assert not pool.extend(table, 13)
    assert pool.free_blocks == 2
    assert pool.blocks_for(12) == 4 and pool.blocks_for(13) == 5


def test_few_blocks_stay_known_and_the_same_ones_are_written_again() -> None:
    pool = BlockPool(100, BLOCK, kept=3)
    written = set()
    for number in range(20):
        tokens = [number] * (2 * BLOCK + 1)
        table = pool.allocate(pool.keys(tokens, 2 * BLOCK, []), len(tokens))
        assert table is not None
        written |= set(table.blocks)
        pool.commit(table, tokens, len(tokens))
        pool.release(table)
        assert len(pool.unused) <= 3
    assert pool.free_blocks == 100
    assert len(written) <= 6
