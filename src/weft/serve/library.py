"""The models of a server by name: loaded on first use, and unloaded when memory runs short."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from weft.api.load import check_width, load
from weft.api.run import Run
from weft.compare.studies import studies
from weft.costs.count import count
from weft.errors import ConfigError, RunError, WeftError, listed, out_of_memory, quoted, suggestion
from weft.explain.ablation import HeadIndex, remove_heads
from weft.explain.attention.maps import AttentionKind
from weft.machine import free_memory, pick_device
from weft.recipe.config import Recipe
from weft.runs.checkpoint import WEIGHTS
from weft.runs.folder import LOCK, RunFolder, open_run
from weft.runs.listing import RunRow, run_folders, run_row
from weft.serve.config import Limits
from weft.serve.errors import RefusedError, UnknownModelError, as_refused
from weft.serve.model_thread import ModelThread
from weft.storage.files import is_locked, link_out

LOAD_MEMORY_RATIO = 1.5  # memory that must be free to load a model, as a multiple of the size of its weights
BYTES_PER_PARAMETER = 4  # while a model is loaded
RETRY_SECONDS = 10  # Retry-After of a request that found no memory
# "book@400~decoder.1.2": the checkpoint of step 400 of the run "book" (0: before training), without some heads
VARIANT = re.compile(r"(.+?)(?:@(\d{1,12}))?((?:~(?:encoder|decoder|cross)\.\d{1,4}\.\d{1,4}){0,16})", re.S)
MAX_VARIANTS = 6  # loaded at the same time
SEE_LOG = "the server's log has the details"
log = logging.getLogger("weft.serve")


@dataclass
class ServedModel:
    """One model: the folder of its run, and its thread while it is loaded. A variant has the weights of a `step`, or
    lacks some heads."""

    name: str
    folder: RunFolder
    created: int  # when its config was written, in seconds since 1970
    step: int | None = None
    without: tuple[HeadIndex, ...] = ()
    problem: str | None = None  # why it could not be loaded when it was last asked for
    thread: ModelThread | None = None
    users: int = 0  # requests that use it now
    last_used: float = 0.0

    @property
    def run(self) -> Run:
        return self.loaded_thread.loaded

    @property
    def loaded_thread(self) -> ModelThread:
        assert self.thread is not None, "a model in use is loaded"
        return self.thread


class Library:
    """All models of a server.

    Each of `paths` is a run, or a folder whose runs may come and go; with `may_be_empty` it need not hold any yet.
    Errors of damaged files are for whoever runs the server: clients get them only with `show_errors`, as on a server of
    this machine alone. `on_change` is called after a model has been loaded or unloaded.
    """

    def __init__(
        self,
        paths: Sequence[str],
        quantize: str | None,
        limits: Limits,
        *,
        may_be_empty: bool = False,
        show_errors: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ):
        if quantize is not None:
            check_width(quantize)
        self.quantize, self.limits, self.device = quantize, limits, torch.device(pick_device())
        self.show_errors, self.on_change = show_errors, on_change
        self.ready = False
        self.models: dict[str, ServedModel] = {}
        self.variants: dict[str, ServedModel] = {}  # the last used one is the last
        self.paths = [Path(path) for path in paths]
        self._folders = [path for path in self.paths if not RunFolder(path).config.is_file()]
        for folder in [run for path in self.paths for run in find_runs(path, may_be_empty)]:
            model = _served_model(folder)
            if model.name in self.models:
                other = self.models[model.name].folder.path
                raise ConfigError(f"{folder.path}: {other} is named '{model.name}' as well; rename one of them")
            self.models[model.name] = model
        self._loading = asyncio.Lock()
        self._rows: dict[Path, tuple[Any, RunRow]] = {}

    async def refresh(self) -> None:
        """Add runs that have appeared in the folders and have a checkpoint; drop those that are gone."""
        now = await asyncio.to_thread(lambda: [_served_model(run) for path in self._folders for run in _runs_in(path)])
        by_name = {model.name: model for model in reversed(now)}  # the first of two with the same name
        for model in list(self.models.values()):
            current = by_name.get(model.name)
            if model.folder.path.parent in self._folders and (current is None or current.created != model.created):
                self.models.pop(model.name, None)
                if not model.users:
                    await self._unload(model)
        for model in now:
            self.models.setdefault(model.name, by_name[model.name])

    def run_folders(self) -> dict[str, RunFolder]:
        """Return the runs in all paths by name, including those that cannot be served."""
        folders: dict[str, RunFolder] = {}
        for path in self.paths:
            with suppress(WeftError):  # the folder doesn't exist yet, or no longer
                for run in run_folders(path):
                    folders.setdefault(run.path.resolve().name, run)
        return folders

    def run_rows(self) -> list[RunRow]:
        """Summarise all runs; a run whose files have not changed is not read again."""
        rows: dict[Path, tuple[Any, RunRow]] = {}
        for name, run in self.run_folders().items():
            files = (run.path, run.config, run.events, run.metrics, run.checkpoints)
            state = [_modified(path) for path in files], is_locked(run.path / LOCK)
            known = self._rows.get(run.path)
            rows[run.path] = known if known and known[0] == state else (state, self._row(run, name))
        self._rows = rows
        return [row for _, row in rows.values()]

    def _row(self, run: RunFolder, name: str) -> RunRow:
        try:
            self.check_links(run.path)
            if run.config.is_file():
                self.recipe(run)
        except RunError as error:
            return RunRow(name, str(run.path), "damaged", changed=_modified(run.path)[0] / 1e9, problem=str(error))
        return replace(run_row(run), name=name)

    def check_links(self, folder: Path) -> None:
        """Refuse a folder of this server with links out of it: clients must not read other files through them."""
        if (link := link_out(folder, folder if folder in self.paths else folder.parent)) is not None:
            raise _link_error(link)

    def recipe(self, run: RunFolder) -> Recipe:
        """Return the recipe of a run whose links were checked. Errors are for clients, see `reason`."""
        try:
            return run.recipe()
        except (WeftError, OSError) as error:
            log.warning("%s", error)
            why = self.reason(run, error, f"not a valid recipe; {SEE_LOG}").removeprefix("config.toml: ")
            raise RunError(f"{run.config}: {why}") from None

    def reason(self, run: RunFolder, error: Exception, otherwise: str) -> str:
        """Return why a run cannot be loaded, in one line without its path; `otherwise` if clients may not know."""
        line, path = " ".join(str(error).split()), str(run.path)
        return line.replace(f"{path}/", "").removeprefix(f"{path}: ") if self.show_errors else otherwise

    async def prepare(self) -> None:
        """Load the newest model ahead of the first request."""
        if newest := max(self.models.values(), key=lambda model: model.created, default=None):
            with suppress(WeftError, RefusedError):  # reported to whoever requests this model
                async with self.use(newest.name) as model:
                    await model.loaded_thread.call(lambda: None, "the server itself")  # after it has warmed up
        self.ready = True

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ServedModel]:
        """Yield a model, which stays loaded inside the `with` block."""
        if name not in self.models and name not in self.variants:
            await self.refresh()
        model = self.models.get(name) or await self._variant(name)
        if model is None:
            raise UnknownModelError(name, suggestion(name[:60], self.models, what="served"))
        model.users += 1
        try:
            if model.thread is None:
                async with self._loading:
                    if model.thread is None:
                        model.thread = await self._load(model)
            yield model
        except (WeftError, RefusedError) as error:  # clients learn the model's name, not its path
            refused = as_refused(error)
            path, name = str(model.folder.path), model.name
            refused.message = refused.message.replace(f"{path}:", f"model '{name}':").replace(path, name)
            raise refused from None
        finally:
            model.users -= 1
            model.last_used = time.monotonic()
            if not model.users and self.models.get(name, self.variants.get(name)) is not model:  # no longer served
                await self._unload(model)

    async def _variant(self, name: str) -> ServedModel | None:
        """Return a variant of a model; the one that was used longest ago is unloaded for it."""
        base, step, removed = VARIANT.fullmatch(name).groups()  # type: ignore[union-attr]  # it matches every name
        model, known = self.models.get(base), self.variants.pop(name, None)
        if model is None or base == name:
            return None
        if step and int(step) not in [0, *(steps := await asyncio.to_thread(model.folder.steps))]:
            raise UnknownModelError(name, f"no checkpoint of step {step}; there are {listed(map(str, steps))}")
        if known is None or known.folder is not model.folder:
            heads = [head.split(".") for head in removed.split("~")[1:]]
            without = tuple((cast("AttentionKind", kind), int(layer), int(head)) for kind, layer, head in heads)
            known = replace(model, name=name, step=int(step) if step else None, without=without, thread=None, users=0)
        self.variants[name] = known
        for old in list(self.variants.values())[:-MAX_VARIANTS]:
            if not old.users:
                await self._unload(self.variants.pop(old.name))
        return known

    @property
    def _all(self) -> list[ServedModel]:
        return [*self.models.values(), *self.variants.values()]

    def refuse_calls(self) -> None:
        """End long work before the server stops; texts in progress are finished."""
        for model in self._all:
            if model.thread is not None:
                model.thread.refuse_calls()

    def close(self) -> None:
        """Unload all models."""
        for model in self._all:
            if model.thread is not None:
                model.thread.close()
                model.thread = None

    async def _load(self, model: ServedModel) -> ModelThread:
        """Load a model; others make room for it, the one that has been idle longest first."""
        await asyncio.to_thread(self.check_links, model.folder.path)
        parameters = count(self.recipe(model.folder).model).parameters
        # the largest weights file counts too: the config doesn't contain the size of n-gram tables
        stored = [file.stat().st_size for file in model.folder.checkpoints.glob(f"*/{WEIGHTS}")]
        need = int(LOAD_MEMORY_RATIO * max([BYTES_PER_PARAMETER * parameters, *stored]))
        while free_memory(self.device) < need and await self._unload_one():
            pass
        while True:
            try:
                return await asyncio.to_thread(self._start, model)
            except Exception as error:
                if not out_of_memory(error):
                    raise
            if not await self._unload_one():
                message = f"not enough memory for model '{model.name}' at the moment"
                raise RefusedError(503, message, retry_after=RETRY_SECONDS)

    def _start(self, model: ServedModel) -> ModelThread:
        width = None if model.step is not None or model.without else self.quantize
        try:
            run = load(model.folder.path, self.device, quantize=width, step=model.step)
            _ = run.defaults  # reads the generation_config.json of an imported model, so that its errors appear here
        except WeftError as error:  # may quote a file
            log.warning("%s", error)
            model.problem = self.reason(model.folder, error, SEE_LOG)
            raise RefusedError(409, f"model '{model.name}' cannot be loaded: {model.problem}") from None
        model.problem = None
        if model.without:
            remove_heads(run.model, model.without)
        thread = ModelThread(model.name, run, self.limits)
        self.on_change()
        return thread

    async def _unload_one(self) -> bool:
        """Unload the model that has been idle longest; return False if all are in use."""
        idle = [model for model in self._all if model.thread is not None and not model.users]
        if not idle:
            return False
        await self._unload(min(idle, key=lambda model: model.last_used))
        self.on_change()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return True

    async def _unload(self, model: ServedModel) -> None:
        thread, model.thread = model.thread, None  # first, so that no request starts to use it
        if thread is not None:
            await asyncio.to_thread(thread.close)


def find_runs(path: Path, may_be_empty: bool = False) -> list[RunFolder]:
    """Return the runs at a path: the run itself, or the runs in a folder."""
    is_run = RunFolder(path).config.is_file()
    if runs := [] if is_run else _runs_in(path):
        return runs
    if (path / "config.json").is_file():
        command = f"weft import {quoted(path)} {quoted(f'runs/{path.name}')}"
        raise ConfigError(f"{path}: another program's model; import it first: {command}")
    may_be_empty = may_be_empty or bool(studies([path]))  # a folder may hold comparisons only
    if may_be_empty and not is_run:
        return []
    if is_run and (link := link_out(path, path)) is not None:
        raise _link_error(link)
    return [open_run(path)]


def _link_error(link: Path) -> RunError:
    return RunError(f"{link}: a link, through which weft would read outside the run; replace it with its target")


def _runs_in(folder: Path) -> list[RunFolder]:
    """Return the runs in a folder that have a checkpoint; a run in training is served from its newest one."""
    with suppress(OSError):
        runs = [RunFolder(file.parent) for file in sorted(folder.glob("*/config.toml"))]
        named = [run for run in runs if run.steps() and not run.path.name.startswith(".")]
        return [run for run in named if link_out(run.path, folder) is None]
    return []


def _served_model(folder: RunFolder) -> ServedModel:
    return ServedModel(folder.path.resolve().name, folder, int(_modified(folder.config)[0] // 1e9))


def _modified(path: Path) -> tuple[int, int]:
    """Return a file's modification time in nanoseconds and its size; zeros if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
