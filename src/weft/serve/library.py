"""The models of a server by name: loaded when first asked for, and unloaded when memory is short."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.api.load import check_width, load
from weft.api.run import Run
from weft.costs.count import count
from weft.errors import ConfigError, WeftError, out_of_memory, suggestion
from weft.runs.checkpoint import WEIGHTS
from weft.runs.folder import RunFolder, open_run
from weft.serve.config import Limits
from weft.serve.errors import RefusedError
from weft.serve.worker import Worker
from weft.training.precision import pick_device
from weft.training.preflight import free_memory

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

    def __init__(self, places: Sequence[str], quantize: str | None, limits: Limits):
        if quantize is not None:
            check_width(quantize)
        self.quantize, self.limits, self.device = quantize, limits, torch.device(pick_device())
        self.ready = False
        self.shelves: dict[str, Shelf] = {}
        for folder in found(places):
            name = folder.path.resolve().name
            if name in self.shelves:
                other = self.shelves[name].folder.path
                raise ConfigError(f"{folder.path}: {other} is named '{name}' as well; rename one of them")
            self.shelves[name] = Shelf(name, folder, int(folder.config.stat().st_mtime))
        self._loading = asyncio.Lock()

    async def prepare(self) -> None:
        """Load the model already, if there is only one; of several, each is loaded when it is asked for."""
        if len(self.shelves) == 1:
            with suppress(WeftError, RefusedError):  # whoever asks for it is told
                async with self.lent(next(iter(self.shelves))):
                    pass
        self.ready = True

    @asynccontextmanager
    async def lent(self, name: str) -> AsyncIterator[Shelf]:
        """A model, which is loaded as long as the `with` lasts."""
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
        except WeftError as error:  # a client knows the model by its name, and not where it lies
            place = str(shelf.folder.path)
            raise RefusedError(400, " ".join(str(error).replace(place, f"model '{shelf.name}'").split())) from None
        finally:
            shelf.users -= 1
            shelf.used = time.monotonic()

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
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return True


def _stored(run: RunFolder) -> int:
    """Bytes of the largest weights in a run: how large tables of n-grams are, no config says."""
    return max((file.stat().st_size for file in run.checkpoints.glob(f"*/{WEIGHTS}")), default=0)


def found(places: Sequence[str]) -> list[RunFolder]:
    """The runs that are meant: each place is one, or a folder of some."""
    runs: list[RunFolder] = []
    for place in map(Path, places):
        inside = sorted(place.glob("*/config.toml")) if place.is_dir() and not RunFolder(place).config.is_file() else []
        if not inside and (place / "config.json").is_file():
            raise ConfigError(f"{place}: a model of another program; first: weft import {place} runs/{place.name}")
        runs += [open_run(file.parent) for file in inside] or [open_run(place)]
    return runs
