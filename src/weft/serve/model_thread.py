"""The thread that owns a served model: it writes texts side by side, and other calls take turns with decode steps.

The engine runs a decoder's texts in one batch. Of other models' texts, one of the request that has had least time is
next. One call gets a step after each decode step.
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from weft.api.run import Run
from weft.decode.engine.engine import Counts
from weft.decode.generate import generate
from weft.decode.prompt import check_prompts
from weft.models.base import device_of
from weft.nn.block import Block
from weft.progress import pause
from weft.serve.config import Limits
from weft.serve.delivery import ThrottledDelivery
from weft.serve.engine import build_engine
from weft.serve.errors import RefusedError, logged
from weft.serve.fair_queue import FairQueue
from weft.serve.stepped_call import STEP_SECONDS, SteppedCall
from weft.serve.tasks import CallTask, Outputs, Task, TextTask, call_in_loop

MAX_CALLS = 8  # calls in progress, each of which holds memory
ROW_SHARE = 0.75  # of the texts written at the same time that may belong to one request
MAX_YIELD_SECONDS = 0.05  # how long the thread lets an event loop run before each step, while a GPU is busy anyway
POLL_SECONDS = 0.001  # interval at which a yielding thread checks whether the GPU has finished

T = TypeVar("T")
STOPPING = RefusedError(503, "the server is stopping", retry_after=1)


class ModelThread(threading.Thread):
    """The thread of one model. `submit`, `call` and `cancel` are called from event loops."""

    def __init__(self, name: str, run: Run, limits: Limits):
        super().__init__(name=f"weft {name}", daemon=True)
        self.loaded, self.limits = run, limits
        self._changed = threading.Condition()
        self._queue = FairQueue[Task](limits)
        self._active: list[TextTask] = []
        # without an engine: outputs of a request → its seconds, which began at the least of all requests in progress
        self._seconds = WeakKeyDictionary[Outputs, float]()
        self._calls: deque[CallTask] = deque()  # in progress; the first gets the next step
        self._delivery = ThrottledDelivery()
        self._closed = False
        self._last_loop: asyncio.AbstractEventLoop | None = None  # of the newest task
        self._on_gpu = device_of(run.model).type == "cuda"
        self._engine = build_engine(run, limits)
        self._stopping = False  # calls are refused; texts are finished
        for module in run.model.modules():
            if isinstance(module, Block):  # so that a call's pass over a long text takes turns after each layer
                module.register_forward_pre_hook(lambda *_: pause())
        self.counts = Counts() if self._engine is None else self._engine.counts
        self.start()

    def submit(self, tasks: Sequence[TextTask]) -> None:
        """Queue texts, all or none; `cancel` them when nobody waits for them any more."""
        for task in tasks:
            task.deadline = time.monotonic() + self.limits.seconds
        self._put(tasks)

    async def call(self, function: Callable[[], T], client: str) -> T:
        """Call a function that uses the model, in turns with decode steps, and return its result."""
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + self.limits.seconds
        task = CallTask(function, client, deadline, loop, loop.create_future())
        self._put([task])
        try:
            async with asyncio.timeout(self.limits.seconds):
                result: T = await task.result
                return result
        except TimeoutError:
            raise late("done", self.limits) from None
        finally:
            task.cancelled = True
            with self._changed:
                self._changed.notify()

    def cancel(self, tasks: Sequence[TextTask]) -> None:
        with self._changed:
            for task in tasks:
                task.cancelled = True
            self._changed.notify()

    def refuse_calls(self) -> None:
        """End the calls in progress, and refuse later ones: the server is stopping, once its texts are finished."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def close(self) -> None:
        """End the thread; unfinished tasks are refused."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.join()

    @property
    def waiting(self) -> int:
        """Number of queued tasks."""
        return len(self._queue)

    @property
    def active(self) -> int:
        """Number of texts in progress."""
        return len(self._active)

    @property
    def blocks(self) -> tuple[int, int]:
        """Number of KV blocks in use, and of all."""
        if self._engine is None:
            return 0, 0
        blocks = self._engine.manager.store.blocks
        return blocks - self._engine.manager.pool.free_blocks, blocks

    def _put(self, tasks: Sequence[Task]) -> None:
        client = tasks[0].client
        with self._changed:
            in_progress: list[Task] = [*self._active, *self._calls]
            running = sum(task.client == client for task in in_progress)
            self._queue.put(client, tasks, running=running)
            self._last_loop = tasks[0].loop
            self._changed.notify()

    def run(self) -> None:
        try:
            if self._engine is not None:
                self._engine.warm_up()
        except Exception as error:  # requests will report it
            self._logged(error)
        while True:
            with self._changed:
                while not (self._queue or self._active or self._calls or self._closed):
                    self._changed.wait()
            if self._on_gpu:
                self._yield_to_event_loop()
            with self._changed:
                if self._closed:
                    break
                expired = self._queue.drop(_over)
                admitted = self._admit()
            for task in expired:
                self._refuse(task, late("begun", self.limits))
            for task in admitted:
                self._begin(task)
            for active in filter(_over, list(self._active)):
                if not active.cancelled:
                    self._refuse(active, late("done", self.limits))
                self._end(active)
            self._step()
            self._step_call()
            self._delivery.flush(throttled=bool(self._active))
        with self._changed:
            unfinished = [*self._active, *self._calls, *self._queue.drop()]
            self._active = []
        texts = [task for task in unfinished if isinstance(task, TextTask)]
        for call in [*(task.first for task in texts), *(task.call for task in self._calls)]:
            if call is not None:
                call.cancel()
        self._calls.clear()
        unloaded = RefusedError(503, "the model was unloaded", retry_after=1)
        for task in unfinished:
            self._refuse(task, STOPPING if self._stopping else unloaded)
        self._delivery.flush(throttled=False)

    def _yield_to_event_loop(self) -> None:
        """Let the event loop run until it is idle, but not beyond the end of the step that the GPU is working on.

        Both threads would otherwise take the interpreter from each other at every operation. It also lets requests that
        arrive together start together.
        """
        end, engine = time.monotonic() + MAX_YIELD_SECONDS, self._engine if self._active else None
        while self._last_loop is not None:
            arrivals, idle = self._queue.arrivals, threading.Event()
            call_in_loop(self._last_loop, self._last_loop.call_soon, idle.set)  # runs after everything pending now
            while not idle.wait(POLL_SECONDS):
                if time.monotonic() > end or (engine is not None and not engine.busy):
                    return
            if self._queue.arrivals == arrivals:
                return

    def _admit(self) -> list[Task]:
        """Take texts from the queue while the batch has free rows, and calls while few are in progress."""
        admitted: list[Task] = []
        free = {TextTask: self.limits.rows - len(self._active), CallTask: MAX_CALLS - len(self._calls)}
        texts = Counter(id(task.outputs) for task in self._active)  # by request
        share = max(1, int(ROW_SHARE * self.limits.rows))

        def fits(task: Task) -> bool:
            return free[type(task)] > 0 and (isinstance(task, CallTask) or texts[id(task.outputs)] < share)

        while (task := self._queue.take(fits)) is not None:
            admitted.append(task)
            free[type(task)] -= 1
            if isinstance(task, TextTask):
                texts[id(task.outputs)] += 1
        return admitted

    def _begin(self, task: Task) -> None:
        try:
            if isinstance(task, CallTask):
                task.call = SteppedCall(task.function)
                self._calls.append(task)
                return
            check_prompts(self.loaded.model, [task.prompt], [task.settings])
            if self._engine is None:
                model = self.loaded.model
                task.stream = generate(model, [task.prompt], task.settings, seeds=[task.seed], source=task.source)
                task.first = SteppedCall(partial(next, task.stream))  # reads the prompt, which may be long
                least = min(map(self._seconds_of, self._active), default=0.0)
                self._seconds[task.outputs] = max(self._seconds.get(task.outputs, least), least)
            else:
                task.request = self._engine.submit(task.prompt, task.settings, task.seed)
            self._active.append(task)
        except BaseException as error:  # a panic in a Rust library is not an Exception
            self._refuse(task, self._logged(error))

    def _end(self, task: TextTask) -> None:
        self._active.remove(task)
        if task.request is not None and self._engine is not None:
            self._engine.cancel(task.request)
        if task.first is not None:
            task.first.cancel()
        task.stream = task.first = None

    def _step(self) -> None:
        """Write one token of every active text, or, without an engine, tokens of the requests that had least time."""
        if not self._active:
            return
        if self._engine is None:
            end = time.monotonic() + STEP_SECONDS
            while self._active and (began := time.monotonic()) < end:
                task = min(self._active, key=self._seconds_of)
                self._active.remove(task)
                self._active.append(task)  # the next of its request's texts goes before it
                self._write_token(task)
                self._seconds[task.outputs] += time.monotonic() - began
            return
        failure: RefusedError | None = None
        try:
            self._engine.step()
        except BaseException as error:
            failure = self._logged(error)  # the engine has ended the requests that it concerns
        for task in list(self._active):
            request = task.request
            assert request is not None
            for chunk in request.chunks:
                self._delivery.add(task, chunk)
            request.chunks.clear()
            if request.ended:
                if request.error is not None:
                    self._refuse(task, failure or self._logged(request.error))
                self._active.remove(task)

    def _seconds_of(self, task: TextTask) -> float:
        return self._seconds[task.outputs]

    def _step_call(self) -> None:
        """Run one step of the call that has waited longest for one."""
        if not self._calls:
            return
        task = self._calls[0]
        assert task.call is not None
        if _over(task) or self._stopping:
            task.call.cancel()
            task.call.error = STOPPING if self._stopping else late("done", self.limits)
        elif not task.call.step():
            self._calls.rotate(-1)
            return
        self._calls.popleft()
        if task.call.error is None:
            task.resolve(task.call.result, None)
        else:
            self._refuse(task, self._logged(task.call.error))

    def _write_token(self, task: TextTask) -> None:
        assert task.stream is not None
        try:
            if task.first is None:
                chunk = next(task.stream)
            elif task.first.step():
                if task.first.error is not None:
                    raise task.first.error
                chunk, task.first = task.first.result, None
            else:
                return
        except BaseException as error:
            self._refuse(task, self._logged(error))
            self._end(task)
            return
        self.counts.prompt += len(task.prompt.ids) if chunk.tokens == 1 else 0
        self.counts.written += 1
        self._delivery.add(task, chunk)
        if chunk.finish is not None:
            self._end(task)

    def _logged(self, error: BaseException) -> RefusedError:
        return logged(self.name, error)

    def _refuse(self, task: Task, refused: RefusedError) -> None:
        if isinstance(task, CallTask):
            task.resolve(None, refused)
        else:
            self._delivery.add(task, refused)


def late(state: str, limits: Limits) -> RefusedError:
    """Return the refusal of a request that reached its deadline."""
    return RefusedError(408, f"not {state} within {limits.seconds:g} seconds")


def _over(task: Task) -> bool:
    """Return whether nobody waits for a task any more, or not for longer."""
    return task.cancelled or time.monotonic() > task.deadline
