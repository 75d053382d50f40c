"""A thread that a model belongs to: texts are written side by side there, and other questions answered in between.

A decoder's texts are written by the engine, which reads all of them in one step. Texts of other models are written in
turn, a token each. Who waits is served in turn by client, so that one who asks for much keeps nobody waiting.
"""

import asyncio
import gc
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from weft.api.run import Run
from weft.decode.config import Sampling
from weft.decode.engine.blocks import Request
from weft.decode.engine.engine import Counts, Engine
from weft.decode.engine.engine import Limits as Held
from weft.decode.engine.paging import block_bytes
from weft.decode.generate import BLOCK_SIZE, MAX_ENGINE_LENGTH, check_quantized_cache, engine_supports, generate
from weft.decode.prompt import Prompt, check_prompts, context_window
from weft.decode.text import Chunk
from weft.errors import WeftError
from weft.machine import free_memory
from weft.models.base import Source, device_of
from weft.serve.config import Limits
from weft.serve.errors import RefusedError, as_refused

CACHE_SHARE = 0.5  # of the memory that is free once a model is loaded, for keys and values
MAX_KEPT_BYTES = 128 << 20  # of keys and values of texts that have ended, on a CPU, which takes memory as it is written
MIN_BLOCKS = 16  # that a model without memory for them is not served with
MODEL_SHARE = 4.0  # times as long as event loops take for what was written, before they get more
TURN_SECONDS = 0.05  # that a model on a GPU, which works meanwhile, leaves the interpreter to an event loop at most
COLLECT_AFTER = 50_000  # new objects, before Python looks for what is no longer used: it looks at all that is young

T = TypeVar("T")
log = logging.getLogger("weft.serve")
Arrived = Chunk | RefusedError


@dataclass(eq=False)
class Ticket:
    """A text that somebody waits for: its chunks arrive in the client's event loop, with the `index` of the text."""

    index: int
    prompt: Prompt
    settings: Sampling
    seed: int
    client: str
    arrived: "asyncio.Queue[tuple[int, Arrived]]"
    loop: asyncio.AbstractEventLoop
    source: Source | None = None
    deadline: float = 0.0
    cancelled: bool = False
    request: Request | None = None
    stream: Iterator[Chunk] | None = None


@dataclass(eq=False)
class Question:
    """A function of the model that somebody waits for."""

    function: Callable[[], Any]
    client: str
    deadline: float
    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[Any]"
    cancelled: bool = False

    def settle(self, value: Any, error: RefusedError | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(error) if error is not None else self.answer.set_result(value)


Task = Ticket | Question


class Worker(threading.Thread):
    """The thread of one model."""

    def __init__(self, name: str, run: Run, limits: Limits):
        super().__init__(name=f"weft {name}", daemon=True)
        self.loaded, self.limits = run, limits
        self.counts = Counts()
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Task]] = OrderedDict()  # by client, who was served longest ago first
        self._active: list[Ticket] = []
        self._out: list[tuple[Ticket, Arrived]] = []  # of this step
        self._ended = False
        self._delivering, self._next_delivery = False, 0.0
        self._queued = 0  # tasks so far
        self._loop: asyncio.AbstractEventLoop | None = None  # of the last of them
        self._on_gpu = device_of(run.model).type == "cuda"
        self._engine = self._make_engine()
        if self._engine is not None:
            self.counts = self._engine.counts
        keep_loaded()
        self.start()

    # ---- asked from an event loop

    def write(self, tickets: Sequence[Ticket]) -> None:
        """Ask for texts, all or none; `cancel` them when nobody waits any more."""
        for ticket in tickets:
            ticket.deadline = time.monotonic() + self.limits.seconds
        self._queue(tickets)

    async def ask(self, function: Callable[[], T], client: str) -> T:
        """What a function of the model returns, called where nothing else uses it."""
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + self.limits.seconds
        question = Question(function, client, deadline, loop, loop.create_future())
        self._queue([question])
        try:
            async with asyncio.timeout(self.limits.seconds):
                answer: T = await question.answer
                return answer
        except TimeoutError:
            raise RefusedError(408, f"not done within {self.limits.seconds:.0f} seconds") from None
        finally:
            question.cancelled = True

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        with self._changed:
            for ticket in tickets:
                ticket.cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """End the thread; whoever still waits is refused."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self.join()

    @property
    def waiting(self) -> int:
        return sum(map(len, list(self._waiting.values())))

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of keys and values in use, and all."""
        if self._engine is None:
            return 0, 0
        blocks = self._engine.manager.store.blocks
        return blocks - self._engine.manager.pool.free_blocks, blocks

    def _queue(self, tasks: Sequence[Task]) -> None:
        client, most = tasks[0].client, min(self.limits.queue, self.limits.per_client)
        if len(tasks) > most:
            raise RefusedError(400, f"{len(tasks)} texts in one request; this server takes at most {most}")
        with self._changed:
            own = len(self._waiting.get(client, ())) + sum(each.client == client for each in self._active)
            if self.waiting + len(tasks) > self.limits.queue:
                raise RefusedError(429, f"{self.waiting} requests are waiting already", retry_after=self._patience())
            if own + len(tasks) > self.limits.per_client:
                raise RefusedError(429, f"{own} of your texts are waiting or written", retry_after=self._patience())
            self._waiting.setdefault(client, deque()).extend(tasks)
            self._queued, self._loop = self._queued + len(tasks), tasks[0].loop
            self._changed.notify()

    def _patience(self) -> int:
        return 1 + self.waiting // self.limits.rows

    # ---- on the thread

    def warm_up(self) -> None:
        """Write two tokens for nobody: what a GPU needs for it is compiled and captured once, before somebody waits."""
        if self._engine is not None and self._on_gpu:
            self._engine.submit(Prompt.of(self.loaded.tokenizer, [0]), Sampling(max_tokens=2, temperature=0.0), 0)
            while self._engine.step():
                pass

    def run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._active or self._ended):
                    self._changed.wait()
            if self._on_gpu:
                self._let_in()
            with self._changed:
                if self._ended:
                    break
                fresh = self._next()
            for task in fresh:
                self._begin(task)
            self._drop()
            self._step()
            self._hand_over()
        with self._changed:
            left = [*self._active, *(task for tasks in self._waiting.values() for task in tasks)]
            self._waiting.clear()
            self._active = []
        for task in left:
            self._refuse(task, RefusedError(503, "the model was unloaded", retry_after=1))
        self._hand_over()

    def _next(self) -> list[Task]:
        """Who is served now: one of each client in turn, as long as there are rows."""
        fresh: list[Task] = []
        while self._waiting and len(self._active) + len(fresh) < self.limits.rows:
            client, tasks = self._waiting.popitem(last=False)
            fresh.append(tasks.popleft())
            if tasks:
                self._waiting[client] = tasks
            if isinstance(fresh[-1], Question):
                break  # texts go on after each
        return fresh

    def _begin(self, task: Task) -> None:
        if task.cancelled:
            return
        try:
            if time.monotonic() > task.deadline:
                raise RefusedError(408, f"not begun within {self.limits.seconds:.0f} seconds")
            if isinstance(task, Question):
                self._settle(task, task.function(), None)
                return
            check_prompts(self.loaded.model, [task.prompt], [task.settings])
            if self._engine is None:
                task.stream = generate(
                    self.loaded.model, [task.prompt], task.settings, seeds=[task.seed], source=task.source
                )
            else:
                task.request = self._engine.submit(task.prompt, task.settings, task.seed)
            self._active.append(task)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self._refuse(task, self._told(error))

    def _drop(self) -> None:
        now = time.monotonic()
        for ticket in [each for each in self._active if each.cancelled or now > each.deadline]:
            if not ticket.cancelled:
                self._refuse(ticket, RefusedError(408, f"not done within {self.limits.seconds:.0f} seconds"))
            self._leave(ticket)

    def _leave(self, ticket: Ticket) -> None:
        self._active.remove(ticket)
        if ticket.request is not None and self._engine is not None:
            self._engine.cancel(ticket.request)
        ticket.stream = None

    def _step(self) -> None:
        if not self._active:
            return
        if self._engine is None:
            for ticket in list(self._active):
                self._write_one(ticket)
            return
        failure: RefusedError | None = None
        try:
            self._engine.step()
        except BaseException as error:
            failure = self._told(error)  # of each request that has ended now
        for ticket in list(self._active):
            request = ticket.request
            assert request is not None
            self._out += [(ticket, chunk) for chunk in request.chunks]
            request.chunks.clear()
            if request.ended:
                if request.error is not None:
                    self._refuse(ticket, failure or self._told(request.error))
                self._active.remove(ticket)

    def _write_one(self, ticket: Ticket) -> None:
        assert ticket.stream is not None
        try:
            chunk = next(ticket.stream)
        except BaseException as error:
            self._refuse(ticket, self._told(error))
            self._leave(ticket)
            return
        self.counts.prompt += len(ticket.prompt.ids) if chunk.tokens == 1 else 0
        self.counts.written += 1
        self._out.append((ticket, chunk))
        if chunk.finish is not None:
            self._leave(ticket)

    def _told(self, error: BaseException) -> RefusedError:
        if not isinstance(error, WeftError | RefusedError):
            log.exception("%s", self.name, exc_info=error)
        return as_refused(error)

    def _refuse(self, task: Task, refused: RefusedError) -> None:
        if isinstance(task, Question):
            self._settle(task, None, refused)
        else:
            self._out.append((task, refused))

    def _settle(self, question: Question, value: Any, error: RefusedError | None) -> None:
        _call(question.loop, question.settle, value, error)

    def _hand_over(self) -> None:
        """All that was written since the last time, with one call for each event loop.

        Python runs one thread at a time. Where many texts are read at once, an event loop that woke for every token
        would keep the model waiting: so it gets a few tokens of each at a time, as many as leave most of the time to
        the model.
        """
        if not self._out or (self._active and (self._delivering or time.monotonic() < self._next_delivery)):
            return
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Arrived]]] = {}
        for ticket, arrived in self._out:
            by_loop.setdefault(ticket.loop, []).append((ticket, arrived))
        self._out = []
        for loop, some in by_loop.items():
            self._delivering = True
            _call(loop, self._deliver, some, loop)

    def _deliver(self, some: list[tuple[Ticket, Arrived]], loop: asyncio.AbstractEventLoop) -> None:
        """In the event loop: wake who waits, and see how long that takes them."""
        begin = time.monotonic()
        for ticket, arrived in some:
            ticket.arrived.put_nowait((ticket.index, arrived))
        loop.call_soon(self._end_delivery, begin)

    def _end_delivery(self, begin: float) -> None:
        now = time.monotonic()
        self._next_delivery, self._delivering = now + MODEL_SHARE * (now - begin), False

    def _let_in(self) -> None:
        """Leave the interpreter to the event loop until it has nothing to do, while the GPU is at work.

        The two would take it from each other at every operation. And requests that arrive together begin together.
        """
        end = time.monotonic() + TURN_SECONDS
        while self._loop is not None:
            before, turn = self._queued, threading.Event()
            _call(self._loop, self._loop.call_soon, turn.set)  # after what has come meanwhile
            if not turn.wait(max(0.0, end - time.monotonic())) or self._queued == before:
                return

    def _make_engine(self) -> Engine | None:
        """An engine with blocks for as much as memory allows, where the model is a decoder that continues texts."""
        model, continues = self.loaded.model, self.loaded.config.objective.continues
        longest = min(context_window(model) or MAX_ENGINE_LENGTH, self.limits.max_tokens, MAX_ENGINE_LENGTH)
        bits = self.limits.quantize_cache
        if continues and bits is not None:
            check_quantized_cache(model, longest)
        if not continues or not engine_supports(model, longest):
            return None
        # a text longer than those it learned from may be asked for, but hardly by all at once
        usual = -(-min(longest, model.config.context) // BLOCK_SIZE)
        weighs = block_bytes(model, BLOCK_SIZE, bits)
        able = int(CACHE_SHARE * free_memory(device_of(model))) // weighs
        if able < min(usual, MIN_BLOCKS):
            raise MemoryError(f"no room for the keys and values of one text of {MIN_BLOCKS * BLOCK_SIZE} tokens")
        wanted = max(self.limits.rows * usual, -(-longest // BLOCK_SIZE))
        kept = None if self._on_gpu else MAX_KEPT_BYTES // weighs
        held = Held(min(wanted, able), BLOCK_SIZE, self.limits.rows, kept=kept, bits=bits)
        return Engine(model, self.loaded.tokenizer.vocab_size, held)


def keep_loaded() -> None:
    """Let Python's search for unused objects pass over all that is loaded now: it would stop all threads for long."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 10, 10)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *given: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *given)
    except RuntimeError:  # the loop has ended, and with it whoever waited
        return
