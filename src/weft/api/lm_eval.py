"""Runs as models of the Language Model Evaluation Harness (Gao et al. 2021; lm-eval), and its tasks on a run.

Texts are tokenized, truncated and windowed as the harness does for models of transformers, so that a run and its export
for transformers get the same results.
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
from typing import Any

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

from weft.api.arguments import checked
from weft.api.load import load
from weft.api.run import Run
from weft.api.settings import sampling, with_defaults
from weft.decode.config import Sampling
from weft.decode.generate import completions
from weft.decode.prompt import Prompt, start_token
from weft.errors import ConfigError, DataError, first_line, hub_failure, suggestion
from weft.evaluate.continuations import Continuation, ContinuationScore, continuation_scores, scoring_window
from weft.evaluate.pseudo_likelihood import MaskedText, pseudo_log_likelihoods
from weft.models.base import LanguageModel, device_of
from weft.models.hidden import frame_for
from weft.models.ngram import NGram
from weft.models.transformer import Transformer
from weft.progress import bar

DEFAULT_BATCH = 16  # texts
MAX_NEW_TOKENS = 256  # for tasks that set no limit; the harness's default
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RENAMED = {"max_gen_toks": "max_tokens", "until": "stop"}  # a task's name of a setting → weft's
HANDLED = ("do_sample", "use_cache", "num_beams")  # settings of a task that are not weft's
FILTERS = ("top_k", "top_p", "min_p", "typical_p")

Pair = tuple[tuple[str, str] | None, list[int], list[int]]  # the texts, and the ids of context and continuation


class WeftLM(TemplateLM):
    """A language model for the harness: a run's folder, or a loaded `Run`.

    The options are the harness's `--model_args`, `--batch_size` and `--device`. `batch_size` texts are read or written
    in one batch ("auto": 16). `max_length` is the window, by default the context of a Transformer. `prefix_token_id`
    precedes a text without a context: bos by default, or else eos.
    """

    @checked
    def __init__(
        self,
        run: str | Path | Run,
        *,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
    ) -> None:
        super().__init__()
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"dtype = {dtype}: {suggestion(dtype, DTYPES)}")
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # the harness names a GPU by default, even if there is none
        if not isinstance(run, Run):
            run = load(run, device, dtype=None if dtype is None else DTYPES[dtype])
        self.masked = run.config.objective.kind.startswith("masked")
        if not run.config.objective.continues and not self.masked:
            raise run.objective.cannot("be evaluated on tasks")
        self.run, self.tokenizer = run, run.tokenizer
        self.model: LanguageModel = run.model
        self._device = device_of(self.model)
        automatic = batch_size is None or str(batch_size).startswith("auto")
        self.batch_size = DEFAULT_BATCH if automatic else int(str(batch_size))
        if self.batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size}: expected 1 or more texts")
        self.batch_size = min(self.batch_size, max_batch_size or self.batch_size)
        self.max_length: int = max_length or scoring_window(self.model)
        self._prefix = prefix_token_id

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text; for a tokenizer without one, of the token that begins a text."""
        return start_token(self.tokenizer)

    @property
    def prefix_token_id(self) -> int:
        if self._prefix is not None:
            return self._prefix
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Return the ids of a text, after those that the tokenizer puts before every text.

        Special tokens in the text are recognised, except inside a chat message. A text that already begins with bos, as
        a chat template's does, gets no second one.
        """
        begun = has_bos_prefix(string, self.tokenizer.token(self.prefix_token_id))
        plain = begun if add_special_tokens is None else not add_special_tokens
        return [*(() if plain else self.tokenizer.leading), *self.tokenizer.chat_ids(string)]

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        """Return log p of each continuation after its context, and whether greedy decoding would write it."""
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        continuations = [Continuation(context, ids) for _, context, ids in requests]
        if self.masked:
            scores = self._pseudo_scores(continuations)
        else:
            scores = continuation_scores(self.model, continuations, window=self.max_length, rows=self.batch_size)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as progress:
            for index, score in scores:
                results[index], texts = (score.log_p, score.greedy), requests[index][0]
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, results[index])
                progress.update()
        return results

    def _pseudo_scores(self, continuations: Sequence[Continuation]) -> Iterator[tuple[int, ContinuationScore]]:
        """Yield pseudo-log-likelihoods of continuations, which a masked model reads together with their contexts."""
        assert isinstance(self.model, Transformer)
        frame, special, texts = frame_for(self.model), set(self.tokenizer.frame[0]) | {self.prefix_token_id}, []
        for context, ids in continuations:
            before = [id for id in context if id not in special]
            text = frame(self.tokenizer, [*before, *ids], None)
            end = text.before + text.length
            texts.append(MaskedText(tuple(text.ids), range(end - len(ids), end)))
        scores = [ContinuationScore(0.0, True)] * len(texts)
        for index, token in pseudo_log_likelihoods(self.model, self.tokenizer, texts):
            log_p, greedy = scores[index]
            scores[index] = ContinuationScore(log_p + token.log_p, greedy and token.greedy)
        yield from enumerate(scores)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log p of each whole text, in consecutive windows; texts are independent of each other."""
        texts = [request.args[0] for request in requests]
        if self.masked:
            pairs = [(None, [self.prefix_token_id], self.tok_encode(text, add_special_tokens=False)) for text in texts]
            return [log_p for log_p, _ in self._loglikelihood_tokens(pairs, disable_tqdm)]
        windows: list[Pair] = []
        text_of_window: list[int] = []
        results = [0.0] * len(texts)
        for index, text in enumerate(texts):
            ids = self.tok_encode(text)
            if ids and isinstance(self.model, NGram):  # trained on texts without a prefix, and has no window
                results[index] = float(self.model.log_prob(torch.tensor(ids).numpy()).sum(dtype="float64"))
                continue
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            disjoint: list[Pair] = [(None, *make_disjoint_window(window)) for window in rolling]
            windows, text_of_window = windows + disjoint, text_of_window + [index] * len(disjoint)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for index, (logprob, _) in zip(text_of_window, scores, strict=True):
            results[index] += logprob
        for text, logprob in zip(texts, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), logprob)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that the model writes after each context, up to one of the strings in `until`."""
        if self.masked:
            raise self.run.objective.cannot("write a text, as this task asks")
        arguments = [request.args for request in requests]
        prompts: list[tuple[int, list[int], Sampling]] = []
        for index, (context, task_settings) in enumerate(arguments):
            settings = _settings(task_settings, self.run.defaults)
            max_prompt = self.max_length - settings.max_tokens
            if max_prompt < 1:
                raise ConfigError(
                    f"max_gen_toks = {settings.max_tokens}: prompt and text may have {self.max_length} tokens "
                    "together; set a smaller number with --gen_kwargs max_gen_toks=…"
                )
            ids = self.tok_encode(context) or [self.prefix_token_id]
            prompts.append((index, ids[-max_prompt:], settings))
        prompts.sort(key=lambda prompt: (repr(prompt[2]), -len(prompt[1]), arguments[prompt[0]][0]))
        results = [""] * len(requests)
        self.model.eval()
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as progress:
            for _, same_settings in groupby(prompts, key=lambda prompt: repr(prompt[2])):
                batch = list(same_settings)
                # decoded alone, as the harness does: the first word has no leading space
                begun = [replace(Prompt.of(self.tokenizer, ids), mid_text=False) for _, ids, _ in batch]
                seeds = [settings.seed + index for index, _, settings in batch]
                texts = completions(self.model, begun, batch[0][2], seeds=seeds, rows=self.batch_size)
                for (index, _, _), completion in zip(batch, texts, strict=True):
                    results[index] = completion.text
                    self.cache_hook.add_partial("generate_until", arguments[index], completion.text)
                    progress.update()
        return results

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format a conversation with the tokenizer's template; without a generation prompt, up to the last message."""
        messages = self.tokenizer.to_chat(chat_history)
        text = self.tokenizer.chat(messages, reply=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = messages[-1]["content"].rstrip()
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the tokenizer's template, the only one that a run has."""
        return self.tokenizer.chat_template

    @property
    def tokenizer_name(self) -> str:
        return f"weft-{self.tokenizer.fingerprint[:16]}"

    def get_model_info(self) -> dict[str, Any]:
        dtype = next((str(each.dtype) for each in self.model.parameters()), "")
        size = sum(each.numel() for each in self.model.parameters())
        return {"model_num_parameters": size, "model_dtype": dtype, "model_run": str(self.run.path)}


def _settings(task_settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> Sampling:
    """Return a task's settings of generation, which have the names of transformers; greedy without do_sample."""
    normalized: dict[str, Any] = dict(normalize_gen_kwargs(dict(task_settings), MAX_NEW_TOKENS))
    if normalized.get("num_beams", 1) != 1:
        raise ConfigError(f"num_beams = {normalized['num_beams']}: beam search is not available for tasks")
    settings = {RENAMED.get(name, name): value for name, value in normalized.items() if name not in HANDLED}
    unknown = next((name for name in settings if name not in Sampling.model_fields), None)
    if unknown is not None:
        raise ConfigError(f"{unknown}: a task sets it in gen_kwargs, but weft has no such setting")
    settings["stop"] = tuple(text for text in settings["stop"] if text)
    if normalized.get("do_sample") is not True:
        settings = {name: value for name, value in settings.items() if name not in FILTERS}
        settings["temperature"] = 0.0
    return sampling(**with_defaults(settings, defaults))


def evaluate_tasks(
    run: Run, names: Sequence[str], *, limit: int | None = None, folder: Path | None = None
) -> dict[str, Any]:
    """Return the harness's results of a run on tasks, or groups of tasks: {"results": {task: {"acc,none": …}}, …}.

    Only the first `limit` examples of each task are used. `folder` holds custom tasks, as the harness's .yaml files.
    Datasets come from the hub, or from the files that a task names.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: expected 1 or more examples per task")
    model = WeftLM(run)
    with _quiet():
        manager, matches = _find_tasks(names, folder)
        loaded = _load_tasks(manager, matches)
        # as the harness's own command does, for the same examples and the same intervals
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        results = evaluate(lm=model, task_dict=loaded, limit=limit, log_samples=False)
    assert results is not None, "a single process has all results"
    return dict(results)


def _find_tasks(names: Sequence[str], folder: Path | None) -> tuple[TaskManager, list[str]]:
    """Return the harness's task manager, and the names of the tasks that match; `mmlu_*` matches by prefix.

    The harness's own tasks are thousands of files, which are searched only if one of them is named.
    """
    if not names:
        raise ConfigError("--tasks: expected the name of a task, or several separated by commas")
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--tasks-path {folder}: no such folder")
    path = None if folder is None else str(folder)
    manager = TaskManager(include_path=path, include_defaults=False)
    if not all(manager.match_tasks([name]) for name in names):
        with bar("reading the harness's tasks", None):
            manager = TaskManager(include_path=path)
    matches = {name: manager.match_tasks([name]) for name in names}
    for name, tasks in matches.items():
        if not tasks:
            raise ConfigError(f"--tasks {name}: no such task; {suggestion(name, manager.all_tasks)}")
    return manager, list(dict.fromkeys(task for tasks in matches.values() for task in tasks))


def _load_tasks(manager: TaskManager, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Load tasks with their datasets; third-party tasks may fail with any exception."""
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        try:
            tables = manager.load([name])
        except Exception as error:
            if isinstance(error, ConnectionError) or "Hub" in str(error):
                raise DataError(f"--tasks {name}: its dataset is on the hub: {hub_failure(error)}") from None
            raise DataError(f"--tasks {name}: cannot be loaded: {first_line(error)}") from None
        for task_name, task in tables["tasks"].items():
            if task_name in loaded["tasks"]:
                raise ConfigError(f"--tasks {task_name}: named twice, once as part of a group")
            if getattr(task, "UNSAFE_CODE", False):
                raise ConfigError(f"--tasks {task_name}: it executes code that the model writes; weft refuses that")
            if getattr(task, "MULTIMODAL", False):
                raise ConfigError(f"--tasks {task_name}: it shows pictures, but weft's models read only text")
        for kind, items in tables.items():
            loaded[kind] |= items
    return loaded


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries' logs, and without a terminal also their progress bars."""
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
