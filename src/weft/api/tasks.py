"""A run on tasks of the Language Model Evaluation Harness (the package lm-eval), as its own command would do it."""

import logging
import os
import random
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from weft.api.lm_eval import WeftLM
from weft.api.run import Run
from weft.errors import ConfigError, DataError, hub_failure, suggestion
from weft.progress import bar

LIBRARIES = ("lm_eval", "datasets", "huggingface_hub", "evaluate")


def evaluate_tasks(
    run: Run, names: Sequence[str], *, limit: int | None = None, folder: Path | None = None
) -> dict[str, Any]:
    """The harness's results of a run on tasks, or groups of them: {"results": {task: {"acc,none": …}}, …}.

    Of each task the first `limit` examples are taken. `folder` holds tasks of one's own, as the harness's .yaml files,
    which are not found elsewhere. Datasets come from the hub, or from the files that a task names.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: expected 1 or more examples of each task")
    model = WeftLM(run)
    with _quiet():
        manager, wanted = _manager(names, folder)
        loaded = _loaded(manager, wanted)
        # as the harness's own command: the same examples are shown, and the same intervals come out
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        found = evaluate(lm=model, task_dict=loaded, limit=limit, log_samples=False)
    assert found is not None, "one process has all results"
    return dict(found)


def _manager(names: Sequence[str], folder: Path | None) -> tuple[TaskManager, list[str]]:
    """What knows the tasks, and their names: `mmlu_*` stands for all that begin so.

    The harness's own tasks are many thousand files, so they are looked through only if one of them is meant.
    """
    if not names:
        raise ConfigError("--tasks: expected the name of a task, or several with commas between them")
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--tasks-path {folder}: no such folder")
    path = None if folder is None else str(folder)
    manager = TaskManager(include_path=path, include_defaults=False)
    if not all(manager.match_tasks([name]) for name in names):
        with bar("looking through the harness's tasks", None):
            manager = TaskManager(include_path=path)
    matches = {name: manager.match_tasks([name]) for name in names}
    for name, found in matches.items():
        if not found:
            raise ConfigError(f"--tasks {name}: no such task; {suggestion(name, manager.all_tasks)}")
    return manager, list(dict.fromkeys(each for found in matches.values() for each in found))


def _loaded(manager: TaskManager, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The tasks with their datasets. Reading a stranger's task may fail in any way."""
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        try:
            found = manager.load([name])
        except Exception as error:
            if isinstance(error, ConnectionError) or "Hub" in str(error):
                raise DataError(f"--tasks {name}: its dataset is on the hub: {_unreachable(error)}") from None
            raise DataError(f"--tasks {name}: it cannot be loaded: {_first_line(error)}") from None
        for task, made in found["tasks"].items():
            _check(task, made, loaded["tasks"])
        for kind, items in found.items():
            loaded[kind] |= items
    return loaded


def _check(name: str, task: Any, others: Container[str]) -> None:
    if name in others:
        raise ConfigError(f"--tasks {name}: two of the names in --tasks hold it")
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(f"--tasks {name}: it runs the code that a model writes, which weft doesn't do")
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(f"--tasks {name}: it shows pictures, and weft's models read text")


def _unreachable(error: Exception) -> str:
    return "weft couldn't reach it" if isinstance(error, ConnectionError) else hub_failure(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the libraries log; and where nobody watches a terminal, without their progress bars."""
    levels = {name: logging.getLogger(name).level for name in LIBRARIES}
    bars = datasets.are_progress_bars_disabled()
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        if sys.stderr.isatty():
            yield
        else:
            with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
                yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
