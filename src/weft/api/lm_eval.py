"""weft's runs as a model of the Language Model Evaluation Harness (Gao et al. 2021; lm-eval), and its tasks on a run.

Texts are cut, truncated and windowed as the harness does for models of transformers, so that a run and its export for
transformers get the same numbers.
"""

import logging
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict, Unpack

import datasets
import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from weft.api.load import load
from weft.api.run import Run
from weft.api.settings import sampling, with_defaults
from weft.decode.config import Sampling
from weft.decode.generate import completions
from weft.decode.prompt import Prompt, start_token
from weft.errors import ConfigError, DataError, first_line, hub_failure, suggestion
from weft.evaluate.perplexity import HEAD_ELEMENTS
from weft.models.base import LanguageModel, device_of, evaluating
from weft.models.ngram import NGram
from weft.progress import bar

BATCH = 16
MAX_BATCH_TOKENS = 1 << 17  # read together, unless one text is longer: recurrent models have no window
UNLIMITED = 1 << 16  # the window of a model without one
MAX_NEW_TOKENS = 256  # where a task doesn't say it; the harness's own number
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# what a task may ask for under another name
NAMED = {"max_gen_toks": "max_tokens", "until": "stop"}
SILENT = ("do_sample", "use_cache", "num_beams")

Ids = tuple[int, ...]
Pair = tuple[tuple[str, str] | None, list[int], list[int]]  # the texts, and the ids of context and continuation


class Options(TypedDict, total=False):
    """What the harness may give beside the run: `--model_args`, `--batch_size` and `--device`."""

    device: str | None
    dtype: str | None
    batch_size: int | str | None
    max_batch_size: int | None
    max_length: int | None
    prefix_token_id: int | None


class WeftLM(TemplateLM):
    """A language model of weft for the harness: a run's folder, or a `Run` that is loaded.

    `batch_size` texts are read or written together ("auto": 16). `max_length` is the window, by default the context of
    a Transformer. `prefix_token_id` stands before a text without a context: bos, or else eos.
    """

    def __init__(self, run: str | Run, **options: Unpack[Options]) -> None:
        super().__init__()
        unknown = next((name for name in options if name not in Options.__annotations__), None)
        if unknown is not None:
            raise ConfigError(f"{unknown}: no such setting; {suggestion(unknown, Options.__annotations__)}")
        device, dtype = options.get("device"), options.get("dtype")
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"dtype = {dtype}: {suggestion(dtype, DTYPES)}")
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # the harness asks for a GPU unless it is told otherwise, also where there is none
        if not isinstance(run, Run):
            run = load(run, device, dtype=None if dtype is None else DTYPES[dtype])
        if not run.config.objective.continues:
            raise run.objective.cannot("be evaluated on tasks")
        self.run, self.tokenizer = run, run.tokenizer
        self.model: LanguageModel = run.model
        self._device = device_of(self.model)
        size = options.get("batch_size")
        self.batch_size = BATCH if size is None or str(size).startswith("auto") else int(size)
        if self.batch_size < 1:
            raise ConfigError(f"batch_size = {size}: at least one text at a time")
        self.batch_size = min(self.batch_size, options.get("max_batch_size") or self.batch_size)
        # a recurrent model goes on for ever, and an n-gram model too
        windowed = getattr(self.model.config, "kind", "") not in ("recurrent", "ngram")
        own: int = getattr(self.model.config, "context", UNLIMITED) if windowed else UNLIMITED
        self.max_length: int = options.get("max_length") or own
        self._prefix = options.get("prefix_token_id")

    @property
    def eot_token_id(self) -> int:
        """What ends a text; for a tokenizer without such a token, what begins one."""
        return start_token(self.tokenizer)

    @property
    def prefix_token_id(self) -> int:
        if self._prefix is not None:
            return self._prefix
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **given: Any) -> list[int]:
        """The ids of a text, after what the tokenizer puts before all; special tokens in it count, but for a message's.

        A text that begins with bos already, as a chat template's does, gets no second one.
        """
        begun = has_bos_prefix(string, self.tokenizer.token(self.prefix_token_id))
        plain = begun if add_special_tokens is None else not add_special_tokens
        return [*(() if plain else self.tokenizer.leading), *self.tokenizer.chat_ids(string)]

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **given: Any
    ) -> list[tuple[float, bool]]:
        """log p of each continuation after its context, and whether it is what greedy decoding would write."""
        reads: list[Ids] = []  # what is read for each
        for _, context, continuation in requests:
            if not continuation or not context or len(continuation) > self.max_length:
                raise ConfigError(
                    f"a continuation of {len(continuation)} tokens after a context of {len(context)} can't be scored "
                    f"with a window of {self.max_length}"
                )
            reads.append(tuple((context + continuation)[-(self.max_length + 1) :][:-1]))
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as shown:
            for batch in self._batches(reads):
                answers = self._score([reads[number] for number in batch], [requests[number][2] for number in batch])
                for number, answer in zip(batch, answers, strict=True):
                    found[number], texts = answer, requests[number][0]
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answer)
                    shown.update()
        return found

    def _batches(self, reads: Sequence[Ids]) -> Iterator[list[int]]:
        """Requests that are read together, the longest first; those that read the same text share a row of the batch.

        The answers to a question are mostly of one token, and then they do.
        """
        order = sorted(range(len(reads)), key=lambda number: (-len(reads[number]), reads[number]))
        batch: list[int] = []
        rows = 0
        for read, alike in groupby(order, key=reads.__getitem__):
            longest = len(reads[batch[0]]) if batch else len(read)
            if batch and rows >= max(1, min(self.batch_size, MAX_BATCH_TOKENS // longest)):
                yield batch
                batch, rows = [], 0
            batch, rows = [*batch, *alike], rows + 1
        if batch:
            yield batch

    @torch.inference_mode()
    def _score(self, reads: Sequence[Ids], wanted: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        """log p of the tokens that are wanted at the end of each text read, and whether all are the likeliest."""
        rows = {read: number for number, read in enumerate(dict.fromkeys(reads))}
        tokens = torch.zeros(len(rows), len(reads[0]), dtype=torch.long)  # padded on the right
        for read, number in rows.items():
            tokens[number, : len(read)] = torch.tensor(read)
        places = [  # the last places of a row predict its continuation
            (rows[read], place, id)
            for read, ids in zip(reads, wanted, strict=True)
            for place, id in enumerate(ids, len(read) - len(ids))
        ]
        row, place, targets = torch.tensor(places, device=self._device).unbind(1)
        at_once = max(1, HEAD_ELEMENTS // int(self.model.config.vocab_size))  # type: ignore[attr-defined]
        logprobs, greedy = [], []
        with evaluating(self.model):
            features = self.model.features(tokens.to(self._device))[row, place]
            for some, ids in zip(features.split(at_once), targets.split(at_once), strict=True):
                logits = self.model.head(some[None])[0].float()
                logprobs.append(logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])
                greedy.append(logits.argmax(-1) == ids)
        lengths = list(map(len, wanted))
        answers = torch.cat(logprobs).double().cpu().split(lengths), torch.cat(greedy).cpu().split(lengths)
        return [(float(logprob.sum()), bool(likeliest.all())) for logprob, likeliest in zip(*answers, strict=True)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of each whole text, in windows that follow each other. Each text is read for itself."""
        texts = [request.args[0] for request in requests]
        windows: list[Pair] = []
        owners: list[int] = []
        found = [0.0] * len(texts)
        for number, text in enumerate(texts):
            ids = self.tok_encode(text)
            if ids and isinstance(self.model, NGram):  # it counted texts with nothing before them, and has no window
                found[number] = float(self.model.log_prob(torch.tensor(ids).numpy()).sum(dtype="float64"))
                continue
            cut = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            mine: list[Pair] = [(None, *make_disjoint_window(window)) for window in cut]
            windows, owners = windows + mine, owners + [number] * len(mine)
        for number, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            found[number] += logprob
        for text, logprob in zip(texts, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), logprob)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context until one of the strings in `until`, which are left out."""
        asked = [request.args for request in requests]
        prompts: list[tuple[int, list[int], Sampling]] = []
        for index, (context, wanted) in enumerate(asked):
            settings = _settings(wanted, self.run.defaults)
            max_prompt = self.max_length - settings.max_tokens
            if max_prompt < 1:
                raise ConfigError(
                    f"max_gen_toks = {settings.max_tokens}: the model reads and writes {self.max_length} tokens at "
                    "most, so a task that writes fewer is needed; --gen_kwargs max_gen_toks=… changes it"
                )
            ids = self.tok_encode(context) or [self.prefix_token_id]
            prompts.append((index, ids[-max_prompt:], settings))
        prompts.sort(key=lambda each: (repr(each[2]), -len(each[1]), asked[each[0]][0]))
        found = [""] * len(requests)
        self.model.eval()
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as shown:
            for _, alike in groupby(prompts, key=lambda each: repr(each[2])):
                some = list(alike)
                # a text by itself, as the harness decodes it: its first word has no leading space
                read = [replace(Prompt.of(self.tokenizer, ids), mid_text=False) for _, ids, _ in some]
                seeds = [settings.seed + index for index, _, settings in some]
                texts = completions(self.model, read, some[0][2], seeds=seeds, rows=self.batch_size)
                for (index, _, _), completion in zip(some, texts, strict=True):
                    found[index] = completion.text
                    self.cache_hook.add_partial("generate_until", asked[index], completion.text)
                    shown.update()
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the tokenizer's template writes it; without the prompt, it ends with the last message."""
        messages = self.tokenizer.to_chat(chat_history)
        text = self.tokenizer.chat(messages, reply=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = messages[-1]["content"].rstrip()
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's own template, which is the only one that a run has."""
        return self.tokenizer.chat_template

    @property
    def tokenizer_name(self) -> str:
        return f"weft-{self.tokenizer.fingerprint[:16]}"

    def get_model_info(self) -> dict[str, Any]:
        dtype = next((str(each.dtype) for each in self.model.parameters()), "")
        size = sum(each.numel() for each in self.model.parameters())
        return {"model_num_parameters": size, "model_dtype": dtype, "model_run": str(self.run.path)}


def _settings(wanted: Mapping[str, Any], defaults: Mapping[str, Any]) -> Sampling:
    """How to write as a task wants it, in the names of transformers; without do_sample greedily."""
    asked: dict[str, Any] = dict(normalize_gen_kwargs(dict(wanted), MAX_NEW_TOKENS))
    if asked.get("num_beams", 1) != 1:
        raise ConfigError(f"num_beams = {asked['num_beams']}: tasks are written without beam search here")
    drawn = asked.get("do_sample") is True
    given = {NAMED.get(name, name): value for name, value in asked.items() if name not in SILENT}
    unknown = next((name for name in given if name not in Sampling.model_fields), None)
    if unknown is not None:
        raise ConfigError(f"{unknown}: a task asks for it, but weft doesn't write so; it is given by gen_kwargs")
    given["stop"] = tuple(text for text in given["stop"] if text)
    if not drawn:
        given = {name: value for name, value in given.items() if name not in ("top_k", "top_p", "min_p", "typical_p")}
        given["temperature"] = 0.0
    return sampling(**with_defaults(given, defaults))


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
                raise DataError(f"--tasks {name}: its dataset is on the hub: {hub_failure(error)}") from None
            raise DataError(f"--tasks {name}: it cannot be loaded: {first_line(error)}") from None
        for task, made in found["tasks"].items():
            if task in loaded["tasks"]:
                raise ConfigError(f"--tasks {task}: two of the names in --tasks hold it")
            if getattr(made, "UNSAFE_CODE", False):
                raise ConfigError(f"--tasks {task}: it runs the code that a model writes, which weft doesn't do")
            if getattr(made, "MULTIMODAL", False):
                raise ConfigError(f"--tasks {task}: it shows pictures, and weft's models read text")
        for kind, items in found.items():
            loaded[kind] |= items
    return loaded


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the libraries log; and where nobody watches a terminal, without their progress bars."""
    bars, disabled = datasets.are_progress_bars_disabled(), logging.root.manager.disable
    logging.disable(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        if sys.stderr.isatty():
            yield
        else:
            with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
                yield
    finally:
        logging.disable(disabled)
        if not bars:
            datasets.enable_progress_bars()
