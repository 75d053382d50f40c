"""The Language Model Evaluation Harness gives a run the same results as its export for transformers."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.api.conftest import with_bos
from tests.api.test_import_export import sharp
from tests.command import Cli
from tests.interop.hf_models import exported
from tests.later import Later
from tests.serve.serving import served
from tests.spread import slow

from weft.api.export_model import export_model
from weft.api.import_model import import_model
from weft.api.load import load
from weft.api.run import Run
from weft.cli.main import run as command
from weft.errors import ConfigError
from weft.models.presets import gpt, llama
from weft.text.config import BPE
from weft.text.tokenizer import Tokenizer, build_tokenizer

if find_spec("lm_eval") is None:
    pytest.skip("lm-eval is not installed", allow_module_level=True)

ours = Later("weft.api.lm_eval")

Capture = pytest.CaptureFixture[str]
RUNS = Path(__file__).parent / "runs-0.1"
WORDS = "the cat sat on the mat, and the dog ate the hat. " * 8
CONTEXT = 48
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{text}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{written}}",
        "generation_kwargs": {"until": ["at e", "\n\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(BPE(vocab_size=281), [WORDS])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """Two tiny Transformers, as runs and as folders for transformers."""
    torch.manual_seed(0)
    folder, size = tmp_path_factory.mktemp("runs"), tokenizer.vocab_size
    settings: dict[str, tuple[Any, Tokenizer]] = {
        "gpt": (gpt(2, 32, 4, context=CONTEXT, vocab_size=size), tokenizer),
        "llama": (llama(2, 32, 4, d_ff=48, context=CONTEXT, vocab_size=size, kv_heads=2), with_bos(tokenizer)),
    }
    for name, (model, own_tokenizer) in settings.items():
        theirs = exported(replace(sharp(model), tokenizer=own_tokenizer), folder / f"{name}-first")
        import_model(theirs, folder / name)
        export_model(folder / name, "hf", folder / f"{name}-hf")
    return folder


def documents(count: int = 7) -> list[dict[str, Any]]:
    """Return texts shorter and longer than the window, with choices of one token and of several."""
    words = WORDS.split()
    texts = [" ".join(words[n : n + 3 + 11 * n]) + (" <eos> naïve –" if n % 3 == 0 else "") for n in range(count)]
    choices = [" the", " cat", " mat, and", "\u2009dog ate <bos>"]
    return [{"text": text, "choices": choices, "answer": n % 4, "written": ""} for n, text in enumerate(texts)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks with their data; JSON is YAML."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents()))
    for name, definition in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}}}
        task = {"task": f"local_{name}", **data, "test_split": "test", "num_fewshot": 0, "metadata": {"version": 1.0}}
        (folder / f"{name}.yaml").write_text(json.dumps({**task, **definition}))
    return folder


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the harness's datasets in a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


def request(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


# ---- against the harness's own model of transformers


@pytest.mark.parametrize("name", [slow("gpt"), "llama"])
def test_a_run_and_its_export_have_the_same_results(runs: Path, tasks: Path, name: str) -> None:
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    names = [f"local_{name}" for name in TASKS]

    def results(model: Any) -> dict[str, Any]:
        found = evaluate(lm=model, task_dict=manager.load(names), bootstrap_iters=0)
        assert found is not None
        return dict(found)

    # its cache would mix up windows that read the same text but score different parts of it
    settings = {"device": "cpu", "dtype": "float32", "batch_size": 3, "logits_cache": False}
    theirs = results(HFLM(str(runs / f"{name}-hf"), **settings))
    found = results(ours.WeftLM(str(runs / name), device="cpu", batch_size=2))
    for task in names:
        for key, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][key] == pytest.approx(value, rel=1e-6), (task, key)
        for one, other in zip(theirs["samples"][task], found["samples"][task], strict=True):
            assert one["doc_id"] == other["doc_id"] and one["arguments"] == other["arguments"]
            if task == "local_write":
                assert one["resps"] == other["resps"]
            else:
                assert _flat(one["resps"]) == pytest.approx(_flat(other["resps"]), rel=1e-5)
    written = {sample["resps"][0][0] for sample in found["samples"]["local_write"]}
    assert len(written) > 3, "equal texts would prove little"


def _flat(resps: Any) -> list[float]:
    """Return log p and whether it is greedy, of all responses."""
    return [float(part) for resp in resps for each in resp for part in (each if isinstance(each, tuple) else (each,))]


# ---- scoring, against a plain loop


def score(run: Run, context: list[int], continuation: list[int], window: int) -> tuple[float, bool]:
    """Return log p of a continuation, and whether it is greedy, from one forward pass."""
    ids = (context + continuation)[-(window + 1) :]
    first = len(ids) - len(continuation)
    with torch.no_grad():
        rows = run.model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)[first - 1 :]
    targets = torch.tensor(continuation)
    return float(rows.gather(1, targets[:, None]).sum()), bool((rows.argmax(1) == targets).all())


def test_scores_do_not_depend_on_batch_and_order(runs: Path) -> None:
    run = load(runs / "llama", "cpu")
    requests = [request(document["text"], choice) for document in documents(5) for choice in document["choices"]]
    requests += [request("", " the cat sat"), request("", "<bos> the"), request("the cat  ", "sat")]
    found = {size: ours.WeftLM(run, batch_size=size).loglikelihood(requests, disable_tqdm=True) for size in (1, 3, 64)}
    again = ours.WeftLM(run, batch_size=3).loglikelihood(requests[::-1], disable_tqdm=True)[::-1]
    model = ours.WeftLM(run)
    for index, (context, continuation) in enumerate(each.args for each in requests):
        if context:
            kept = context.rstrip()
            whole, before = model.tok_encode(context + continuation), model.tok_encode(kept)
            after = whole[len(before) :]
        else:
            before = [run.tokenizer.need("bos")]
            after = run.tokenizer.encode(continuation.removeprefix("<bos>"))
        expected = score(run, before, after, CONTEXT)
        for results in (*found.values(), again):
            assert results[index][0] == pytest.approx(expected[0], abs=1e-3)
            assert results[index][1] == expected[1]


def test_a_long_text_is_read_in_consecutive_windows(runs: Path) -> None:
    run = load(runs / "gpt", "cpu")
    model = ours.WeftLM(run, batch_size=2)
    ids = model.tok_encode(WORDS)
    assert len(ids) > 2 * CONTEXT
    total = 0.0
    for start in range(0, len(ids), CONTEXT):
        window = ids[start : start + CONTEXT]
        before = [run.tokenizer.need("bos")] if start == 0 else ids[:start]
        total += score(run, before, window, CONTEXT)[0]
    (found,) = model.loglikelihood_rolling([request(WORDS)], disable_tqdm=True)
    assert found == pytest.approx(total, rel=1e-6)


def test_results_are_passed_to_the_harnesss_cache(runs: Path) -> None:
    model = ours.WeftLM(load(runs / "gpt", "cpu"))
    cached: dict[tuple[str, Any], Any] = {}

    def add_partial(attr: str, req: Any, res: Any) -> None:
        cached[attr, req[0]] = res

    model.set_cache_hook(SimpleNamespace(add_partial=add_partial))
    scored = model.loglikelihood([request("the", " cat")], disable_tqdm=True)
    rolled = model.loglikelihood_rolling([request("the cat")], disable_tqdm=True)
    written = model.generate_until([request("the", {"max_gen_toks": 3})], disable_tqdm=True)
    assert cached == {
        ("loglikelihood", "the"): scored[0],
        ("loglikelihood_rolling", "the cat"): rolled[0],
        ("generate_until", "the"): written[0],
    }


# ---- other models


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An n-gram model and an LSTM, of words."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "book.txt").write_text("".join(f"the cat {n % 7} sat by the river and the dog ran\n" for n in range(200)))
    book, small = str(folder / "book.txt"), ["steps=2", "batch.length=16", "batch.size=2", "tokenizer=word"]
    assert command(["train", "ngram-3", "--data", book, "--run", str(folder / "ngram"), "tokenizer=word"]) == 0
    lstm = ["train", "lstm", "--data", book, "--run", str(folder / "lstm"), "model.layers=1", "model.d_model=16"]
    assert command([*lstm, *small]) == 0
    return folder


def test_an_ngram_model_has_no_prefix_and_no_window(trained: Path) -> None:
    run = load(trained / "ngram")
    model = ours.WeftLM(run)
    text = "the cat 3 sat by the river"
    ids = run.tokenizer.encode(text)
    (found,) = model.loglikelihood_rolling([request(text)], disable_tqdm=True)
    assert found == pytest.approx(float(run.model.log_prob(torch.tensor(ids).numpy()).sum()), rel=1e-6)  # type: ignore[operator]
    ((score, greedy),) = model.loglikelihood([request("the cat 3", " sat by")], disable_tqdm=True)
    logprobs = run.model.log_prob(torch.tensor(ids[:5]).numpy())  # type: ignore[operator]
    assert score == pytest.approx(float(logprobs[3:].sum()), rel=1e-5) and greedy


def test_a_recurrent_model_has_no_window(trained: Path) -> None:
    run = load(trained / "lstm", "cpu")
    text = "the cat 3 sat by the river and the dog ran " * 20
    (found,) = ours.WeftLM(run).loglikelihood_rolling([request(text)], disable_tqdm=True)
    ids = run.tokenizer.encode(text)
    assert found == pytest.approx(score(run, [run.tokenizer.need("bos")], ids, 1 << 20)[0], rel=1e-5)


# ---- refusals


@pytest.mark.parametrize(
    ("options", "task", "line"),
    [
        ({"batch_size": 0}, {}, "batch_size = 0: expected 1 or more texts"),
        ({"dtype": "int3"}, {}, "dtype = int3: available: bfloat16"),
        ({"batchsize": 2}, {}, "batchsize: no such argument; did you mean 'batch_size'"),
        ({}, {"max_gen_toks": 99}, "max_gen_toks = 99: prompt and text may have 48 tokens"),
        ({}, {"num_beams": 4}, "num_beams = 4: beam search is not available for tasks"),
        ({}, {"penalty_alpha": 1}, "penalty_alpha: a task sets it in gen_kwargs, but weft has no such setting"),
    ],
)
def test_invalid_settings_are_refused(runs: Path, options: dict[str, Any], task: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        ours.WeftLM(str(runs / "gpt"), **options).generate_until([request("the", task)], disable_tqdm=True)


def test_a_chat_template_formats_the_messages(runs: Path) -> None:
    run = load(runs / "llama", "cpu")
    model = ours.WeftLM(run)
    run.tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages = [{"role": "user", "content": "the cat"}]
    assert model.apply_chat_template(messages) == "<bos>[user] the cat<eos>[assistant]"
    begun = [*messages, {"role": "assistant", "content": "sat "}]
    assert model.apply_chat_template(begun, False) == "<bos>[user] the cat<eos>[assistant] sat"
    bos, eos = run.tokenizer.need("bos"), run.tokenizer.need("eos")
    assert model.tok_encode("<bos>the")[0] == bos != model.tok_encode("<bos>the")[1]  # not twice
    spelled = [{"role": "user", "content": "the <eos> cat"}, {"role": "assistant", "content": "<bos> sat "}]
    for reply, expected in ((True, [bos, eos, eos]), (False, [bos, eos])):
        ids = model.tok_encode(model.apply_chat_template(spelled, reply))
        special = [id for id in ids if id in run.tokenizer.special_tokens.values() and id != run.tokenizer.unk_id]
        assert special == expected  # only the template's
    assert model.tok_encode("the <eos>")[-1] == eos  # outside a conversation
    assert model.chat_template() == run.tokenizer.chat_template and model.tokenizer_name.startswith("weft-")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--limit", "3"], "--limit 3: goes with --tasks or --abilities"),
        (["--tasks", ",", "--tasks-path", "TASKS"], "--tasks ',': expected the name of a task"),
        (["--tasks", "local_choice", "--stride", "3"], "--stride 3: not available with --tasks"),
        (["--tasks", "local_choice", "--tasks-path", "nowhere"], "--tasks-path nowhere: no such folder"),
        (["--tasks", "broken", "--tasks-path", "TASKS"], "--tasks broken: cannot be loaded"),
        (
            ["--tasks", "far", "--tasks-path", "TASKS"],
            "--tasks far: its dataset is on the hub: weft couldn't reach the",
        ),
    ],
)
def test_mistakes_get_one_line(runs: Path, tasks: Path, words: list[str], line: str, cli: Cli) -> None:
    choice = {"test_split": "test", **TASKS["choice"]}
    broken = {"task": "broken", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "nowhere.jsonl"}}}
    (tasks / "broken.yaml").write_text(json.dumps({**broken, **choice}))
    (tasks / "far.yaml").write_text(json.dumps({"task": "far", "dataset_path": "some/where", **choice}))
    given = [str(tasks) if word == "TASKS" else word for word in words]
    assert line in cli.refused("evaluate", runs / "gpt", *given)


def test_a_task_that_matches_twice_is_evaluated_once(runs: Path, tasks: Path, cli: Cli) -> None:
    words = ["--tasks", "local_choice,local_choice*", "--tasks-path", tasks]
    assert cli("evaluate", runs / "gpt", *words).count("acc_norm") == 1


def test_a_masked_model_has_pseudo_log_likelihoods(tasks: Path, cli: Cli) -> None:
    run = load(RUNS / "masked-next", "cpu")
    model = ours.WeftLM(run)
    text = "the cat sat on the mat."
    ((whole, _),) = model.loglikelihood([request("", text)])
    (pair,) = run.minimal_pairs([(text, "cat the sat on the mat.")]).scores["words left to right"]
    assert pair is not None and whole == pytest.approx(pair.good, rel=1e-6)
    assert model.loglikelihood_rolling([request(text)]) == [whole]
    ((after, _),) = model.loglikelihood([request("the cat sat", " on the mat.")])
    assert whole < after < 0
    words = ["--tasks", "local_write", "--tasks-path", tasks]
    assert "write a text" in cli.refused("evaluate", RUNS / "masked-next", *words)
    assert "be evaluated on tasks" in cli.refused("evaluate", RUNS / "classify", *words)


PAIRS = [
    {"sentence_good": "the cat sat on the mat.", "sentence_bad": "the cat sat the on mat.", "UID": "order"},
    {"sentence_good": "the dog ate the hat.", "sentence_bad": "the dog ate hat.", "UID": "article"},
    {"sentence_good": "a naïve cat sat.", "sentence_bad": "a cat naïve sat.", "UID": "order"},
]


@pytest.mark.parametrize("name", ["gpt", slow("llama")])
def test_minimal_pairs_are_judged_as_by_the_harness(runs: Path, tmp_path: Path, name: str, cli: Cli) -> None:
    """The task is the harness's `blimp` with data of its own; its model is the run's export for transformers."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    task = {
        "task": "local_blimp",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"train": str(tmp_path / "pairs.jsonl")}},
        "output_type": "multiple_choice",
        "validation_split": "train",
        "doc_to_text": "",
        "doc_to_target": 0,
        "doc_to_choice": "{{[sentence_good, sentence_bad]}}",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "blimp.yaml").write_text(json.dumps(task))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False).load(["local_blimp"])
    theirs = evaluate(lm=HFLM(str(runs / f"{name}-hf"), device="cpu", dtype="float32"), task_dict=tasks)
    assert theirs is not None
    expected = [_flat(sample["resps"])[::2] for sample in theirs["samples"]["local_blimp"]]
    found = cli.json("evaluate", runs / name, "--pairs", tmp_path / "pairs.jsonl", "--details")
    got = [[pair["sentence"]["good"], pair["sentence"]["bad"]] for pair in found["scores"]]
    assert got == [pytest.approx(pair, rel=1e-5) for pair in expected]
    accuracy = found["groups"][0]["accuracies"]["sentence"]["accuracy"]
    assert accuracy == pytest.approx(theirs["results"]["local_blimp"]["acc,none"])


def test_the_command_prints_a_line_per_metric(runs: Path, tasks: Path, cli: Cli) -> None:
    words = ["evaluate", str(runs / "gpt"), "--tasks", "local_rolling,local_write", "--tasks-path", str(tasks)]
    found = ours.evaluate_tasks(load(runs / "gpt", "cpu"), ["local_rolling"], limit=3, folder=tasks)["results"]
    out = cli(*words, "--limit", "3")
    assert max(map(len, out.splitlines())) <= 80
    assert f"{found['local_rolling']['bits_per_byte,none']:.4f}" in out and "exact_match" in out
    assert cli.json(*words, "--limit", "3")["results"]["local_rolling"] == found["local_rolling"]


@pytest.mark.slow
def test_wefts_command_is_the_harnesss_with_weft(runs: Path, tasks: Path, tmp_path: Path) -> None:
    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        words = ["--model", "weft", "--model_args", f"run={folder}", "--tasks", "local_choice", "--batch_size", "4"]
        command = [sys.executable, "-m", "weft.cli.lm_eval", *words, "--include_path", str(tasks)]
        environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path)}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    done = run(runs / "gpt")
    assert done.returncode == 0, done.stderr
    found = ours.evaluate_tasks(load(runs / "gpt", "cpu"), ["local_choice"], folder=tasks)["results"]["local_choice"]
    assert f"{found['acc_norm,none']:.4f}"[:5] in done.stdout
    missing = run(runs / "nowhere")
    assert missing.returncode == 2 and missing.stderr.splitlines()[-1].startswith("weft-lm-eval: ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_served_run_gets_the_same_results_over_http(runs: Path, tasks: Path, name: str) -> None:
    """The harness's `local-completions` sends ids, several prompts per request, and reads the echoed prompts."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    names = ["local_choice", "local_rolling"]
    with served(runs / name) as server:
        options: dict[str, Any] = {
            "model": name,
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(runs / f"{name}-hf"),
        }
        # the harness subtracts 1, and the last token of its prompts need not be read
        options |= {"max_length": CONTEXT + 2, "batch_size": 4, "add_bos_token": name == "llama"}
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        theirs = simple_evaluate("local-completions", model_args=options, tasks=names, task_manager=manager)
    expected = ours.evaluate_tasks(load(runs / name, "cpu"), names, folder=tasks)["results"]
    for task in names:
        for metric, value in expected[task].items():
            if isinstance(value, float):
                assert theirs["results"][task][metric] == pytest.approx(value, rel=1e-4), (task, metric)


def test_starting_python_does_not_import_weft() -> None:
    """Not even through the .pth file of an editable install."""
    command = [sys.executable, "-X", "importtime", "-c", "import site"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "site" in done.stderr and "weft" not in done.stderr
