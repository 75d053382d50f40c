"""Many texts at once: each joins the batch when there is room and leaves it when it ends, token by token.

    engine = Engine(model, tokenizer)
    requests = [engine.submit(prompt, settings) for prompt in prompts]
    engine.run()
    texts = [request.completion().text for request in requests]

At each turn all texts that are being written get a token, and new prompts are read a limited piece at a time, so that
a long one holds nobody up (Yu et al. 2022; Agrawal et al. 2023). Where the memory runs out, the youngest text gives its
room to the others and is read again later. What a request gets depends on its prompt, its settings and its seed alone.

One thread turns the engine; any thread may submit, cancel, and wait for what comes.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.engine.blocks import memory_of
from weft.decode.engine.request import Listener, OneSource, Request
from weft.decode.generate import (
    Constraint,
    Finish,
    Token,
    check_prompts,
    chosen_size,
    device_of,
    longest_text,
    reports,
)
from weft.decode.sampling import check_logits, draw, filtered, greedy
from weft.decode.shaping import Past, ban, check_ids, shaped
from weft.decode.writing import has_begun, piece, prompt_ids
from weft.errors import ModelError, WeftError
from weft.models.base import LanguageModel
from weft.progress import bar
from weft.text.tokenizer import Tokenizer


@dataclass
class Counts:
    """What the engine has done so far, in tokens and requests."""

    prompt: int = 0  # tokens of prompts that were read
    shared: int = 0  # tokens of prompts that need not be read: another text had begun alike
    written: int = 0
    again: int = 0  # texts that gave up their room and were read again
    turns: int = 0


class Engine:
    """Writes many texts with one model.

    `rows` texts at most are written at a time. A Transformer keeps them in `blocks` blocks of `block` tokens; other
    models need no such room. `prefill` tokens of prompts at most are read in one turn.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        blocks: int = 2048,
        block: int = 16,
        rows: int = 256,
        prefill: int = 512,
    ):
        for name, amount in (("blocks", blocks), ("block", block), ("rows", rows), ("prefill", prefill)):
            if amount < 1:
                raise ModelError(f"{name} = {amount}: expected 1 or more")
        self.model, self.tokenizer = model, tokenizer
        self.rows, self.prefill = rows, prefill
        self.device, self.window = device_of(model), longest_text(model)
        self.vocab_size = chosen_size(model, tokenizer.vocab_size)
        self.memory = memory_of(model, blocks, block, rows)
        self.counts = Counts()
        self.running: list[Request] = []  # in the order they were let in
        self._waiting: deque[Request] = deque()
        self._numbers = count(1)
        self._lock = threading.Lock()  # guards the two lists above, which other threads touch
        self._turning = threading.Lock()
        self._work = threading.Condition(self._lock)

    # ---- from any thread

    def submit(
        self,
        prompt: str | Sequence[int],
        settings: Sampling | None = None,
        *,
        source: str | Sequence[int] | None = None,
        constraint: Constraint | None = None,
        ends: frozenset[int] = frozenset(),
        listener: Listener | None = None,
    ) -> Request:
        """Ask for a text that continues `prompt`, or one that is written from a source.

        An empty prompt begins a new text. Ids in `ends` stop it too. `listener` is called with each piece, in the
        thread that turns the engine. A pattern's text begins as `has_begun` says of the prompt. What can't be written
        at all is refused here.
        """
        settings = settings or Sampling()
        ids = list(prompt_ids(self.tokenizer, prompt))
        check_prompts(self.model, [ids], self.window)
        check_ids([settings], self.vocab_size)
        given = None
        if source is not None:
            words = self.tokenizer.encode(source) if isinstance(source, str) else list(source)
            if not words:
                raise ModelError("the source is empty; it needs at least one token")
            given = OneSource(torch.tensor([words], device=self.device))
        most = len(ids) + settings.max_tokens - 1  # the last one is never read
        request = Request(
            next(self._numbers),
            ids,
            most if self.window is None else min(most, self.window),
            given,
            settings=settings,
            prompt=len(ids),
            tokenizer=self.tokenizer,
            begun=has_begun(self.tokenizer, prompt),
            constraint=constraint,
            ends=ends,
            listener=listener,
        )
        self.memory.check(request)
        with self._lock:
            self._waiting.append(request)
            self._work.notify_all()
        return request

    def cancel(self, request: Request) -> None:
        """Stop writing a text; its room is free at the next turn. One that has ended stays as it is."""
        with self._lock:
            if not request.ended.is_set():
                request.cancelled = True
                self._work.notify_all()

    @property
    def idle(self) -> bool:
        """Nothing is left to do."""
        with self._lock:
            return not (self._waiting or self.running)

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until there is something to do, or for `timeout` seconds; True if there is."""
        with self._work:
            return self._work.wait_for(lambda: bool(self._waiting or self.running), timeout)

    # ---- from the thread that turns the engine

    def run(self, progress: bool = False) -> None:
        """Turn until nothing is left to do; with `progress`, a bar is drawn on a terminal."""
        with self._lock:
            todo = len(self._waiting) + len(self.running)
        with bar("writing", todo, wanted=progress) as tick:
            left = todo
            while not self.idle:
                self.step()
                with self._lock:
                    now = len(self._waiting) + len(self.running)
                tick(max(0, left - now))
                left = now

    @torch.inference_mode()
    def step(self) -> bool:
        """One turn: let texts in, read a piece of the new prompts, write a token of all others. False if idle."""
        with self._turning:
            self._sweep()
            self._admit()
            work = self._with_room(self._plan())
            if not work:
                return not self.idle
            self.counts.turns += 1
            try:
                self._turn(work)
            except Exception as error:
                failed = error if isinstance(error, WeftError) else ModelError(f"the engine failed: {error}")
                for request, _ in work:
                    self._end(request, failed)
                if not isinstance(error, WeftError):
                    raise
            return not self.idle

    def _sweep(self) -> None:
        """Let go of what was cancelled."""
        with self._lock:
            waiting = [request for request in self._waiting if request.cancelled]
            for request in waiting:
                self._waiting.remove(request)
            running = [request for request in self.running if request.cancelled]
        for request in waiting + running:
            self._end(request)

    def _admit(self) -> None:
        """Let waiting texts in, in the order they came, as long as there is room."""
        later: list[Request] = []  # will find their beginning read in a moment
        try:
            while self._waiting and len(self.running) < self.rows:
                request = self._waiting[0]  # none but this thread takes away from those who wait
                if self.memory.awaits(request):
                    later.append(self._waiting.popleft())
                elif not self._let_in(request):
                    break
        finally:
            with self._lock:
                self._waiting.extendleft(reversed(later))

    def _let_in(self, request: Request) -> bool:
        """Take in the first of those who wait; False where there is no room."""
        try:
            # each of the others may soon need a block more
            if not self.memory.admit(request, spare=len(self.running)):
                return False
        except WeftError as error:
            self._waiting.popleft()
            self._end(request, error)
            return True
        with self._lock:
            self._waiting.popleft()
            self.running.append(request)
        if not request.written:
            self.counts.shared += request.read
        return True

    def _plan(self) -> list[tuple[Request, int]]:
        """How many tokens of which texts to read now: one of each that is being written, and some of the prompts."""
        work = [(request, 1) for request in self.running if len(request.ids) - request.read == 1]
        fresh = [request for request in self.running if len(request.ids) - request.read > 1]
        # the oldest goes first, and then the shortest; while others wait, one takes half of the room at most
        fresh[1:] = sorted(fresh[1:], key=lambda request: len(request.ids) - request.read)
        room = self.prefill
        for request in fresh:
            most = max(1, self.prefill // 2) if len(fresh) > 1 else room
            size = min(len(request.ids) - request.read, room, most)
            work.append((request, size))
            room -= size
            if room == 0:
                break
        return work

    def _with_room(self, work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """What of the work has room in the memory; where it hasn't, the youngest texts give theirs."""
        gone: set[int] = set()
        for request, size in sorted(work, key=lambda item: item[0].number):
            while request.number not in gone and not self.memory.reserve(request, request.read + size):
                youngest = max(self.running, key=lambda other: other.number)
                gone.add(youngest.number)
                with self._lock:
                    self._leave(youngest)
                    self._wait_again(youngest)
                self.counts.again += 1
        return [item for item in work if item[0].number not in gone] if gone else work

    def _wait_again(self, request: Request) -> None:
        """Back among those who wait, before whoever came later."""
        place = next((i for i, other in enumerate(self._waiting) if other.number > request.number), len(self._waiting))
        self._waiting.insert(place, request)

    def _turn(self, work: list[tuple[Request, int]]) -> None:
        requests = [request for request, _ in work]
        features = self.memory.read(requests, [size for _, size in work])
        self.counts.prompt += sum(size for request, size in work if not request.written)
        done = [place for place, request in enumerate(requests) if request.read == len(request.ids)]
        if not done:
            return
        if len(done) < len(requests):
            features = features[torch.tensor(done, device=features.device)]
            requests = [requests[place] for place in done]
        logits = self.model.head(features.unsqueeze(1))[:, 0, : self.vocab_size]
        self._write(requests, logits)

    def _write(self, requests: list[Request], logits: Tensor) -> None:
        """Choose a token for each text from logits (texts, V), and hand on what it spells."""
        ready, bad = self._shaped(requests, logits)
        if bad:
            for place, error in bad.items():
                self._end(requests[place], error)
            good = [place for place in range(len(requests)) if place not in bad]
            if not good:
                return
            index = torch.tensor(good, device=logits.device)
            requests, logits, ready = [requests[place] for place in good], logits[index], ready[index]
        chosen = self._choose(requests, ready)
        said = reports(logits, chosen, [request.settings for request in requests])
        self.counts.written += len(requests)
        eos_id = self.tokenizer.eos_id
        for request, token, report in zip(requests, chosen, said, strict=True):
            if request.cancelled:
                continue  # it leaves at the next turn, with what it has
            full = request.written + 1 == request.settings.max_tokens or len(request.ids) == self.window
            stopped = token != eos_id and (token in request.ends or request.writer.push(token))
            if request.constraint is not None and token != eos_id:
                request.constraint.push(token)
                stopped = stopped or request.constraint.over
            finish: Finish | None = "eos" if token == eos_id else "stop" if stopped else "length" if full else None
            request.ids.append(token)
            request.tell(piece(Token(0, token, finish, *report), request.writer, request.written))
            if finish is not None:
                self._end(request)
            elif request.past is not None:
                request.past.push(torch.tensor([token], device=self.device))

    def _shaped(self, requests: list[Request], logits: Tensor) -> tuple[Tensor, dict[int, ModelError]]:
        """Logits (texts, V) after what each request asks of them; and the rows from which nothing can be chosen."""
        ready = logits.float()
        bad: dict[int, ModelError] = {}
        places = [place for place, request in enumerate(requests) if request.shapes]
        if places:
            some = [requests[place] for place in places]
            index = torch.tensor(places, device=logits.device)
            shaped_rows = self._by_rules(some, ready[index], bad, places)
            ready = ready.index_copy(0, index, shaped_rows)
        wrong = ~torch.isfinite(ready.amax(dim=-1))
        for place in wrong.nonzero().flatten().tolist():
            try:
                check_logits(ready[place])
            except ModelError as error:
                bad.setdefault(place, error)
        return ready, bad

    def _by_rules(
        self, requests: list[Request], logits: Tensor, bad: dict[int, ModelError], places: list[int]
    ) -> Tensor:
        past = None
        if any(request.settings.penalises for request in requests):
            for request in requests:
                if request.past is None:
                    request.past = Past([request.ids[: request.prompt]], self.vocab_size, self.device)
            past = Past.joined([request.past for request in requests if request.past is not None])
        rules = [request.settings for request in requests]
        ready = shaped(logits, rules, past, [request.written for request in requests], self.tokenizer.eos_id)
        for row, request in enumerate(requests):
            if request.constraint is not None:
                try:
                    ready[row] = ban(ready[row], ~request.constraint.allowed().to(ready.device))
                except ModelError as error:
                    bad[places[row]] = error
        return ready

    def _choose(self, requests: list[Request], logits: Tensor) -> list[int]:
        """The next token of each row of logits (texts, V), each drawn with its own request's numbers."""
        drawn = [place for place, request in enumerate(requests) if not request.settings.greedy]
        if not drawn:
            return greedy(logits).tolist()
        some = [requests[place] for place in drawn]
        rows = logits if len(drawn) == len(requests) else logits[torch.tensor(drawn, device=logits.device)]
        uniforms = torch.tensor([request.uniform() for request in some], dtype=torch.float64, device=logits.device)
        tokens: list[int] = draw(filtered(rows, [request.settings for request in some]), uniforms).tolist()
        if len(drawn) == len(requests):
            return tokens
        chosen: list[int] = greedy(logits).tolist()
        for place, token in zip(drawn, tokens, strict=True):
            chosen[place] = token
        return chosen

    def _end(self, request: Request, error: WeftError | None = None) -> None:
        """A text is complete, or is not wanted any more, or has failed."""
        if request.ended.is_set():
            return
        with self._lock:
            if request in self.running:
                self._leave(request)
        request.error = error
        request.tell(None)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.memory.release(request)
