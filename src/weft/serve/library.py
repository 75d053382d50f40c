"""The models of a server by name: loaded when first asked for, and unloaded when memory is short."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft.api.load import check_width, load
from weft.api.run import Run
from weft.compare.studies import studies
from weft.costs.count import count
from weft.errors import ConfigError, WeftError, out_of_memory, suggestion
from weft.machine import free_memory, pick_device
from weft.runs.checkpoint import WEIGHTS
from weft.runs.folder import LOCK, RunFolder, open_run
from weft.runs.listing import RunRow, run_folders, run_row
from weft.serve.config import Limits
from weft.serve.errors import RefusedError, as_refused
from weft.serve.worker import Worker, keep_loaded
from weft.storage.files import is_locked

RESERVE = 1.5  # times the size of its weights, that are free before a model is loaded
BYTES = 4  # of a weight while it is loaded
RETRY_SECONDS = 10  # after which memory may be free again


@dataclass
class Shelf:
    """One model: where its run is, and its thread while it is loaded."""

    name: str
    folder: RunFolder
    created: int
    worker: Worker | None = None
    users: int = 0
    used: float = 0.0

    @property
    def run(self) -> Run:
        assert self.worker is not None, "it is in use"
        return self.worker.loaded


class Library:
    """All models that a server was given."""

    def __init__(self, places: Sequence[str], quantize: str | None, limits: Limits, *, may_be_empty: bool = False):
        """A place is a run, or a folder whose runs come and go; one that `may_be_empty` has none yet."""
        if quantize is not None:
            check_width(quantize)
        self.quantize, self.limits, self.device = quantize, limits, torch.device(pick_device())
        self.ready = False
        self.shelves: dict[str, Shelf] = {}
        self.places = [Path(place) for place in places]
        self._folders = [place for place in self.places if not RunFolder(place).config.is_file()]
        for folder in [run for place in self.places for run in found(place, may_be_empty)]:
            name = folder.path.resolve().name
            if name in self.shelves:
                other = self.shelves[name].folder.path
                raise ConfigError(f"{folder.path}: {other} is named '{name}' as well; rename one of them")
            self.shelves[name] = _shelf(folder)
        self._loading = asyncio.Lock()
        self._rows: dict[Path, tuple[Any, RunRow]] = {}

    async def refresh(self) -> None:
        """Take in the runs that have come into the folders and have a checkpoint, and forget those that have gone."""
        now = await asyncio.to_thread(lambda: [_shelf(run) for folder in self._folders for run in _served(folder)])
        fresh = {shelf.name: shelf for shelf in reversed(now)}  # of two that are called alike, the first
        for shelf in list(self.shelves.values()):
            same = fresh.get(shelf.name)
            if shelf.folder.path.parent in self._folders and (same is None or same.created != shelf.created):
                self.shelves.pop(shelf.name, None)
                await self._let_go(shelf)
        for shelf in now:
            self.shelves.setdefault(shelf.name, fresh[shelf.name])

    async def _let_go(self, shelf: Shelf) -> None:
        """Unload a model that is no longer served, once nobody uses it."""
        worker = shelf.worker
        if not shelf.users and worker is not None:
            shelf.worker = None
            await asyncio.to_thread(worker.close)

    def run_folders(self) -> dict[str, RunFolder]:
        """The runs of all places by name, those too that can't be served."""
        every: dict[str, RunFolder] = {}
        for place in self.places:
            with suppress(WeftError):  # the folder isn't there yet, or no longer
                for run in run_folders(place):
                    every.setdefault(run.path.resolve().name, run)
        return every

    def run_rows(self) -> list[RunRow]:
        """What is known of them at a glance; of those that have not changed, from memory."""
        rows: dict[Path, tuple[Any, RunRow]] = {}
        for name, run in self.run_folders().items():
            signs = (run.path, run.config, run.events, run.metrics, run.checkpoints)
            now = [_changed(path) for path in signs], is_locked(run.path / LOCK)
            known = self._rows.get(run.path)
            rows[run.path] = known if known and known[0] == now else (now, replace(run_row(run), name=name))
        self._rows = rows
        return [row for _, row in rows.values()]

    async def prepare(self) -> None:
        """Load the newest model already; each of the others is loaded when it is asked for."""
        if newest := max(self.shelves.values(), key=lambda each: each.created, default=None):
            with suppress(WeftError, RefusedError):  # whoever asks for it is told
                async with self.lent(newest.name) as shelf:
                    assert shelf.worker is not None
                    await shelf.worker.ask(shelf.worker.warm_up, "the server itself")
        self.ready = True

    @asynccontextmanager
    async def lent(self, name: str) -> AsyncIterator[Shelf]:
        """A model, which is loaded as long as the `with` lasts."""
        if name not in self.shelves:
            await self.refresh()
        shelf = self.shelves.get(name)
        if shelf is None:
            known = suggestion(name[:60], self.shelves, what="served")
            raise RefusedError(404, f"model '{name[:60]}': {known}", param="model")
        shelf.users += 1
        try:
            if shelf.worker is None:
                async with self._loading:
                    if shelf.worker is None:
                        shelf.worker = await self._load(shelf)
            yield shelf
        except (WeftError, RefusedError) as error:  # a client knows the model by its name, and not where it lies
            refused = as_refused(error)
            refused.message = refused.message.replace(str(shelf.folder.path), f"model '{shelf.name}'")
            raise refused from None
        finally:
            shelf.users -= 1
            shelf.used = time.monotonic()
            if self.shelves.get(name) is not shelf:
                await self._let_go(shelf)

    def close(self) -> None:
        for shelf in self.shelves.values():
            worker, shelf.worker = shelf.worker, None
            if worker is not None:
                worker.close()

    async def _load(self, shelf: Shelf) -> Worker:
        need = int(RESERVE * max(BYTES * count(shelf.folder.recipe().model).parameters, _stored(shelf.folder)))
        while free_memory(self.device) < need and await self._unload_one():
            pass
        while True:
            try:
                return await asyncio.to_thread(self._started, shelf)
            except Exception as error:
                if not out_of_memory(error):
                    raise
            if not await self._unload_one():
                raise RefusedError(503, f"there is no memory for model '{shelf.name}' now", retry_after=RETRY_SECONDS)

    def _started(self, shelf: Shelf) -> Worker:
        return Worker(shelf.name, load(shelf.folder.path, self.device, quantize=self.quantize), self.limits)

    async def _unload_one(self) -> bool:
        """Unload the model that nobody has used for longest; False where all are in use."""
        idle = [each for each in self.shelves.values() if each.worker is not None and not each.users]
        if not idle:
            return False
        oldest = min(idle, key=lambda each: each.used)
        worker, oldest.worker = oldest.worker, None  # before anybody else can be lent it
        assert worker is not None
        await asyncio.to_thread(worker.close)
        del worker
        keep_loaded()  # and let go of what is not
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return True


def found(place: Path, may_be_empty: bool = False) -> list[RunFolder]:
    """The runs that are meant: the place is one, or a folder of some, or it is there for its comparisons."""
    if inside := _served(place) if not RunFolder(place).config.is_file() else []:
        return inside
    if (place / "config.json").is_file():
        raise ConfigError(f"{place}: a model of another program; first: weft import {place} runs/{place.name}")
    may_be_empty = may_be_empty or bool(studies([place]))
    return [] if may_be_empty and not RunFolder(place).config.is_file() else [open_run(place)]


def _served(folder: Path) -> list[RunFolder]:
    """The runs of a folder that have a checkpoint; one that trains now is served from its newest."""
    with suppress(OSError):
        runs = [RunFolder(file.parent) for file in sorted(folder.glob("*/config.toml"))]
        return [run for run in runs if run.steps() and not run.path.name.startswith(".")]
    return []


def _shelf(folder: RunFolder) -> Shelf:
    return Shelf(folder.path.resolve().name, folder, int(_changed(folder.config)[0] // 1e9))


def _changed(path: Path) -> tuple[int, int]:
    """When a file was last written, in nanoseconds, and its size."""
    try:
        about = path.stat()
    except OSError:
        return 0, 0
    return about.st_mtime_ns, about.st_size


def _stored(run: RunFolder) -> int:
    """Bytes of the largest weights in a run: how large tables of n-grams are, no config says."""
    return max((file.stat().st_size for file in run.checkpoints.glob(f"*/{WEIGHTS}")), default=0)
