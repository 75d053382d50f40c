"""Parts of a model's thread: the fair queue, throttled delivery, and the size of the KV cache."""

import asyncio
from typing import Any

import pytest

from weft.serve.config import Limits
from weft.serve.delivery import ThrottledDelivery
from weft.serve.engine import MIN_KV_BLOCKS, kv_blocks
from weft.serve.errors import RefusedError
from weft.serve.fair_queue import FairQueue
from weft.serve.tasks import TextTask


def test_clients_take_turns() -> None:
    queue = FairQueue[str](Limits())
    queue.put("a", ["a1", "a2", "a3"])
    queue.put("b", ["b1"])
    queue.put("c", ["c1", "c2"])
    assert queue.take() == "a1"
    queue.put("b", ["b2"])
    assert [queue.take() for _ in range(6)] == ["b1", "c1", "a2", "b2", "c2", "a3"]
    assert not queue and queue.arrivals == 7


@pytest.mark.parametrize(
    ("waiting", "tasks", "running", "status", "message"),
    [
        (0, 5, 0, 400, "5 texts in one request; this server accepts at most 4"),
        (5, 2, 0, 429, "5 requests are already waiting"),
        (0, 2, 3, 429, "3 of your texts are already waiting or in progress"),
    ],
)
def test_too_many_tasks_are_refused_all_together(
    waiting: int, tasks: int, running: int, status: int, message: str
) -> None:
    queue = FairQueue[int](Limits(queue=6, per_client=4, rows=2))
    for number in range(waiting):
        queue.put(f"client {number}", [number])
    with pytest.raises(RefusedError, match=message) as caught:
        queue.put("another", list(range(tasks)), running=running)
    assert caught.value.status == status and len(queue) == waiting
    assert caught.value.retry_after == (None if status == 400 else 1 + waiting // 2)
    assert queue.drop() == list(range(waiting)) and not queue


def task(index: int, queue: "asyncio.Queue[Any]") -> TextTask:
    loop: Any = asyncio.get_running_loop()
    nothing: Any = None
    return TextTask(index=index, prompt=nothing, settings=nothing, seed=0, client="a", outputs=queue, loop=loop)


def test_a_delivery_waits_until_the_loop_has_handled_the_last_one() -> None:
    async def deliver() -> None:
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        first, second = task(0, outputs), task(1, outputs)
        delivery = ThrottledDelivery()
        errors = [RefusedError(400, str(number)) for number in range(4)]
        delivery.add(first, errors[0])
        delivery.add(second, errors[1])
        delivery.flush(throttled=True)
        delivery.add(first, errors[2])
        delivery.flush(throttled=True)  # the first delivery is still on its way
        assert [await outputs.get(), await outputs.get()] == [(0, errors[0]), (1, errors[1])]
        assert outputs.empty()
        delivery.flush(throttled=False)
        assert await outputs.get() == (0, errors[2])

    asyncio.run(deliver())


@pytest.mark.parametrize(
    ("able", "max_length", "blocks"),
    [
        (10_000, 64, 3 * 4),  # three texts of the context of 64 tokens, 16 tokens a block
        (10_000, 1000, 63),  # one text beyond the context
        (9, 64, 9),  # what memory allows
        (4, 64, 4),  # less than MIN_KV_BLOCKS, but enough for one text
    ],
)
def test_kv_blocks_are_for_all_rows_or_the_longest_text(able: int, max_length: int, blocks: int) -> None:
    assert kv_blocks(able, max_length, rows=3, context=64) == blocks


def test_a_model_without_memory_for_its_cache_is_not_served() -> None:
    with pytest.raises(MemoryError):
        kv_blocks(3, 64, rows=3, context=64)
    with pytest.raises(MemoryError):
        kv_blocks(MIN_KV_BLOCKS - 1, 4096, rows=3, context=4096)
