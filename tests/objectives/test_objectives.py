"""Each objective from data to a small finished run: its files, metrics and predictions."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.spread import spread
from tests.training.small import events

from weft.api import train as api
from weft.api.evaluation_report import evaluation_report
from weft.api.load import load
from weft.api.run import Run
from weft.data.examples import Examples
from weft.errors import ConfigError, DataError, ModelError, RunError
from weft.objectives.rows import EVEN
from weft.objectives.tag import _parts, tagged_example
from weft.runs.folder import RunFolder
from weft.runs.lines import read_lines
from weft.runs.report import report
from weft.storage import tensors

WORDS = (
    "the small dog saw a big cat near old trees while two birds sang about warm rain on green hills".split()  # noqa: SIM905
)
TINY = {"steps": 6, "log": {"every": 2}, "evaluate": {"every": 3}, "checkpoint": {"every": 3}, "batch": {"length": 24}}
FAST = {"kind": "adamw", "lr": 0.01}


def sentence(number: int, words: int = 6) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=words)).capitalize() + "."


def text(folder: Path, documents: int = 80) -> str:
    texts = [" ".join(sentence(n * 11 + k, 4 + k % 5) for k in range(5)) for n in range(documents)]
    return rows(folder, [{"text": text} for text in texts], "text.jsonl")


def rows(folder: Path, values: Sequence[dict[str, Any]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(map(json.dumps, values)), encoding="utf-8")
    return str(path)


def labelled(folder: Path, labels: Sequence[Any] = (0, 1), count: int = 80) -> str:
    return rows(folder, [{"text": sentence(n), "label": labels[n % len(labels)]} for n in range(count)])


def transformer(kind: str, **changes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 300, "context": 64, "layers": 2, "d_model": 16, "attention": {"heads": 2}}
    parts = {"feedforward": {"kind": "plain", "d_ff": 32}, "norm": {"kind": "layer"}, "position": {"kind": "learned"}}
    return {"kind": kind, **sizes, **parts, **changes}


def learn(folder: Path, source: str, model: dict[str, Any] | None, name: str = "run", **changes: Any) -> Run:
    recipe = folder / "recipe.toml"
    recipe.write_text("", encoding="utf-8")
    settings: dict[str, Any] = {**TINY, **changes}
    settings["batch"] = {**TINY["batch"], **changes.get("batch", {})}  # type: ignore[dict-item]
    if model is not None:
        settings["model"] = model
    run = api.train(recipe, data=source, run=folder / name, changes=settings, log=lambda line: None)
    for line in events(RunFolder(run.path), "evaluation"):
        assert line.keys() - {"time", "event", "step", "seconds"} == set(run.config.objective.metrics)
    return run


def last(run: Run) -> dict[str, Any]:
    """Return the results of a run's final evaluation."""
    return events(RunFolder(run.path), "result")[-1]


def test_masked_tokens_and_spans(tmp_path: Path) -> None:
    """Fresh weights begin near ln V, and a few steps lower the loss."""
    encoder = transformer("encoder", head={"kind": "mlm"})
    for kind, model in {"masked": encoder, "spans": transformer("encoder-decoder")}.items():
        run = learn(tmp_path, text(tmp_path), model, kind, objective={"kind": kind}, optimizer=FAST)
        assert run.config.objective.kind == kind
        assert 0 < last(run)["loss"] < math.log(run.config.model.vocab_size)


def test_masked_tokens_and_the_next_sentence(tmp_path: Path) -> None:
    """Both tasks count, in training and in evaluation: fresh weights have a loss of ln V + ln 2."""
    encoder = transformer("encoder", head={"kind": "mlm+nsp"}, segments=2)
    run = learn(tmp_path, text(tmp_path), encoder, batch={"length": 40}, optimizer={"lr": 1e-9})
    assert run.config.objective.kind == "masked+next"  # chosen for such a head
    assert 0 <= last(run)["next_accuracy"] <= 1
    losses = [line["loss"] for line in read_lines(RunFolder(run.path).metrics) if "loss" in line]
    chance = math.log(run.config.model.vocab_size) + math.log(2)
    assert [losses[-1], last(run)["loss"]] == pytest.approx([chance] * 2, abs=0.25)


@pytest.mark.parametrize("kind", spread(["encoder-decoder", "bahdanau"], 1))
def test_pairs(tmp_path: Path, kind: str) -> None:
    model = transformer(kind) if kind != "bahdanau" else {"kind": kind, "vocab_size": 300, "d_model": 16}
    pairs = [{"source": sentence(n), "target": sentence(n)[::-1]} for n in range(80)]
    run = learn(tmp_path, rows(tmp_path, pairs), model, tokenizer={"kind": "char"}, batch={"tokens": 512})
    assert Examples.open(run.path / "data/train.safetensors").notes[EVEN]  # unlike runs of 0.1
    metrics = last(run)
    assert {"loss", "bleu", "chrf", "exact", "bleu_signature"} <= metrics.keys()
    assert metrics["table"][0] == ["source", "reference", "output"]
    assert all(row[1] == row[0][::-1] for row in metrics["table"][1:])  # the target, not the output
    assert ">reference</th>" in (run.path / "report.html").read_text()


def test_pairs_with_separate_vocabularies(tmp_path: Path) -> None:
    pairs = [{"source": sentence(n), "target": str(n)} for n in range(80)]
    tokenizers: dict[str, Any] = {
        "tokenizer": {"kind": "char", "fallback": "unk"},
        "source_tokenizer": {"kind": "word"},
    }
    model = transformer("encoder-decoder")
    run = learn(tmp_path, rows(tmp_path, pairs), model, batch={"tokens": 512}, **tokenizers)
    assert run.config.model.source_vocab_size != run.config.model.vocab_size  # type: ignore[union-attr]
    assert (run.path / "source" / "tokenizer.json").exists()
    again = api.resume(run.path, log=lambda line: None)  # a finished run is loaded again
    assert last(again)["loss"] == pytest.approx(last(run)["loss"])


def test_labels_are_found_and_saved(tmp_path: Path) -> None:
    data = labelled(tmp_path, ["bad", "good", "odd"], 90)
    run = learn(tmp_path, data, transformer("encoder"), objective={"kind": "classify"})
    assert run.config.objective.labels == ("bad", "good", "odd")  # type: ignore[attr-defined]
    assert run.config.model.head.labels == 3  # type: ignore[union-attr]
    metrics = last(run)
    assert sum(map(sum, metrics["matrix"])) > 0
    assert {"accuracy", "macro_f1", "matthews"} <= metrics["intervals"].keys() <= metrics.keys()
    table = evaluation_report(run).metrics_table()
    assert table.header[2] == "95% interval" and f"{metrics['rows']} rows" in table.remarks[0]
    baseline = "accuracy of always predicting the most common label", f"{metrics['baseline_accuracy']:.4%}"
    assert baseline in [tuple(row[:2]) for row in table.rows]
    span = "–".join(f"{end:.1%}" for end in metrics["intervals"]["accuracy"])
    assert f"accuracy, held out ({span})" in report(RunFolder(run.path))
    titles, *mistakes = metrics["table"]
    assert titles == ["text", "actual", "predicted", "probability"]
    truth = {(row := json.loads(line))["text"].lower(): row["label"] for line in Path(data).read_text().splitlines()}
    for line, actual, predicted, share in mistakes:
        shares = run.classify([line])[0]
        assert truth[line] == actual != predicted == next(iter(shares))
        assert f"{shares[predicted]:.1%}" == share
    surest = [float(row[3].rstrip("%")) for row in mistakes]
    assert surest == sorted(surest, reverse=True)
    wrong = sum(count for i, row in enumerate(metrics["matrix"]) for j, count in enumerate(row) if i != j)
    assert len(mistakes) == min(8, wrong) > 0


def test_a_pair_of_texts_and_a_decoder(tmp_path: Path) -> None:
    values = [{"a": sentence(n), "b": sentence(n + n % 2), "label": n % 2} for n in range(80)]
    objective = {"kind": "classify", "text": "a", "second": "b"}
    run = learn(tmp_path, rows(tmp_path, values), transformer("decoder"), objective=objective)
    assert run.config.model.head.pooling == "last"  # type: ignore[union-attr]
    assert run.config.objective.labels == ("0", "1")  # type: ignore[attr-defined]


def test_regression(tmp_path: Path) -> None:
    values: list[dict[str, Any]] = [{"text": sentence(n), "score": n / 10} for n in range(80)]
    data = rows(tmp_path, values)
    run = learn(tmp_path, data, transformer("encoder"), objective={"kind": "regress"})
    assert {"loss", "pearson", "spearman"} <= last(run).keys()
    predicted = run.rate([row["text"] for row in values])
    error = sum((number - row["score"]) ** 2 for number, row in zip(predicted, values, strict=True)) / len(values)
    assert run.evaluate([data])["loss"] == pytest.approx(error, rel=1e-4)
    with pytest.raises(ConfigError, match=r"it can't classify; use it with weft classify .*run < lines.txt"):
        run.classify(["text"])
    with pytest.raises(ConfigError, match="this run expects one text at a time"):
        run.rate(["text"], ["another"])
    assert run.rate([]) == []


def test_tags(tmp_path: Path) -> None:
    values = [
        {"words": (words := sentence(n)[:-1].split()), "tags": ["short" if len(word) < 4 else "long" for word in words]}
        for n in range(80)
    ]
    data = rows(tmp_path, values)
    run = learn(tmp_path, data, transformer("encoder"), objective={"kind": "tag"})
    assert run.config.objective.labels == ("long", "short")  # type: ignore[attr-defined]
    predicted = run.tag([row["words"] for row in values])
    right = [
        tag == true
        for tags, row in zip(predicted, values, strict=True)
        for (tag, _), true in zip(tags, row["tags"], strict=True)
    ]
    assert run.evaluate([data])["accuracy"] == pytest.approx(sum(right) / len(right))
    assert all(0.5 <= share <= 1 for tags in predicted for _, share in tags)
    assert run.tag([[], ["dog"]])[0] == []


@pytest.mark.slow
def test_tags_of_a_long_text(tmp_path: Path) -> None:
    """A text of more words than a row holds is tagged in parts, each like a separate text, without losing a word."""
    values = [{"words": sentence(n)[:-1].split(), "tags": [str(k % 2) for k in range(6)]} for n in range(80)]
    run = learn(tmp_path, rows(tmp_path, values), transformer("encoder"), objective={"kind": "tag"})
    words = [word for n in range(20) for word in sentence(n)[:-1].split()]
    (whole,) = run.tag([words])
    assert len(whole) == len(words) == 120
    example = tagged_example(run.tokenizer, words, range(len(words)))
    begin = 0
    for ids, positions in _parts(example, 22):
        assert 0 < len(ids) <= 22
        end = begin + len(positions)
        (alone,) = run.tag([words[begin:end]])
        assert [tag for tag, _ in alone] == [tag for tag, _ in whole[begin:end]]
        begin = end
    assert begin == 120


def test_answers(tmp_path: Path) -> None:
    values = []
    for n in range(80):
        words = sentence(n)[:-1].split()
        values.append({"question": f"what is after {words[2]}", "context": " ".join(words), "answer": words[3]})
    data = rows(tmp_path, values)
    run = learn(tmp_path, data, transformer("encoder"), objective={"kind": "answer"})
    assert run.config.model.head.kind == "span"  # type: ignore[union-attr]
    assert set(run.evaluate([data])) >= {"loss", "exact"}
    answers = run.answer([row["question"] for row in values], [row["context"] for row in values])
    assert all(row["context"][span.start : span.end] == span.text for row, span in zip(values, answers, strict=True))
    assert all(0 < span.probability < 1 for span in answers)
    with pytest.raises(ConfigError, match="1 texts for 2 questions"):
        run.answer(["a", "b"], ["c"])
    values[3]["answer"] = "nowhere"
    with pytest.raises(DataError, match=r"rows\.jsonl:4: the answer 'nowhere' does not occur in its text"):
        learn(tmp_path, rows(tmp_path, values), transformer("encoder"), "other", objective={"kind": "answer"})


def test_contrastive_pairs(tmp_path: Path) -> None:
    values = [{"first": sentence(n), "second": sentence(n).lower()} for n in range(80)]
    run = learn(tmp_path, rows(tmp_path, values), transformer("encoder"), objective={"kind": "contrastive"})
    assert run.config.model.head.kind == "embedding"  # type: ignore[union-attr]
    assert 0 < last(run)["loss"] < 2 * math.log(80)


def messages(prompt: str, reply: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]}


def chat(folder: Path) -> str:
    return rows(folder, [messages(sentence(n), WORDS[n % 20]) for n in range(80)])


def test_conversations(tmp_path: Path) -> None:
    batch = {"length": 60, "tokens": 240}
    run = learn(tmp_path, chat(tmp_path), transformer("decoder"), objective={"kind": "chat"}, batch=batch)
    assert run.tokenizer.chat_template is not None  # so that `weft chat` frames turns as in training
    assert len(last(run)["samples"]) == 3
    assert all(sample.startswith("### User\n") for sample in last(run)["samples"])  # replies to held-out prompts


# ---- beginning with another run


def test_a_run_begins_with_another(tmp_path: Path) -> None:
    encoder = transformer("encoder", head={"kind": "mlm+nsp"}, segments=2)
    first = learn(tmp_path, text(tmp_path), encoder, "first", batch={"length": 40})
    objective = {"kind": "classify"}
    second = learn(
        tmp_path, labelled(tmp_path), None, "second", init=str(first.path), objective=objective, steps=1,
        optimizer={"kind": "adamw", "lr": 1e-12, "weight_decay": 0.0},
    )  # fmt: skip
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    for name, value in first.model.state_dict().items():
        there = name.replace("output.next_sentence.pooler.", "output.pooler.")
        if not name.startswith("output.") or there != name:
            torch.testing.assert_close(second.model.state_dict()[there], value, rtol=0, atol=1e-9)


def test_settings_that_change_the_meaning_of_weights_are_refused(tmp_path: Path) -> None:
    before = transformer("encoder", head={"kind": "mlm"}, placement="pre")
    first = learn(
        tmp_path, text(tmp_path), before, "first", objective={"kind": "masked"}, tokenizer={"kind": "wordpiece"}
    )
    recipe = tmp_path / "classify.toml"  # for another model
    recipe.write_text('model = "bert-tiny"\nobjective = "classify"\ntokenizer = "char"\nsteps = 1\n', encoding="utf-8")
    data, begin = labelled(tmp_path), {"init": str(first.path)}
    second = api.train(recipe, data=data, run=tmp_path / "second", changes=begin, log=lambda line: None)
    assert second.config.model.placement == "pre"  # type: ignore[union-attr]
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    changed = {**begin, "model": {"placement": "post"}}
    line = r"model\.placement = 'post': the weights of init = .* were trained with 'pre'"
    with pytest.raises(ConfigError, match=line):
        api.train(recipe, data=data, run=tmp_path / "third", changes=changed, log=lambda line: None)


# ---- refused data


def test_data_that_teaches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least two are needed"):
        learn(tmp_path, labelled(tmp_path, ["same"]), transformer("encoder"), objective={"kind": "classify"})
    with pytest.raises(DataError, match=r"batch\.length = 3: no reply of the assistant begins within this many tokens"):
        learn(tmp_path, chat(tmp_path), transformer("decoder"), objective={"kind": "chat"}, batch={"length": 3})
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*'target'"):
        learn(tmp_path, rows(tmp_path, [{"source": "a", "target": ""}] * 9), transformer("encoder-decoder"))
    with pytest.raises(ConfigError, match="objective 'pairs' needs a model of kind encoder-decoder or bahdanau"):
        learn(tmp_path, "x.tsv", transformer("decoder"), objective={"kind": "pairs"})
    with pytest.raises(ConfigError, match="not a run"):
        learn(tmp_path, "x.tsv", None, init="nowhere", objective={"kind": "classify"})
    with pytest.raises(ConfigError, match="name their run with init="):
        learn(tmp_path, "x.tsv", transformer("decoder"), adapter={"kind": "lora"})
    for labels in (["same"], ["same", "same", "other"]):
        with pytest.raises(ConfigError, match="expected two or more distinct labels"):
            learn(tmp_path, "x.tsv", transformer("encoder"), objective={"kind": "classify", "labels": labels})


@pytest.mark.slow
def test_missing_held_out_rows_are_noticed(tmp_path: Path) -> None:
    objective, source = {"kind": "classify"}, labelled(tmp_path)
    run = learn(tmp_path, source, transformer("encoder"), objective=objective)
    (run.path / "data" / "validation.safetensors").unlink()
    with pytest.raises(RunError, match=r"validation\.safetensors: no such file"):
        run.evaluate()
    nothing = {"data": {"validation": {"kind": "none"}}, "evaluate": {}}
    none = learn(tmp_path, source, transformer("encoder"), "none", objective=objective, **nothing)
    with pytest.raises(DataError, match="this run has no held-out data; name the data to evaluate on with --data"):
        none.evaluate()
    assert none.evaluate(source)["accuracy"] >= 0


def test_rows_that_cannot_be_read_are_skipped_and_counted(tmp_path: Path) -> None:
    values = [{"source": sentence(n), "target": "" if n % 10 == 0 else str(n)} for n in range(80)]
    model, skip = transformer("encoder-decoder"), {"on_error": "skip"}
    run = learn(tmp_path, rows(tmp_path, values), model, batch={"tokens": 512}, data=skip)
    assert events(RunFolder(run.path), "skipped")[0]["rows"] == 8


def test_a_run_stops_early_without_improvement(tmp_path: Path) -> None:
    run = learn(
        tmp_path, labelled(tmp_path), transformer("encoder"), objective={"kind": "classify"}, steps=40,
        evaluate={"every": 2, "metric": "accuracy", "patience": 2}, optimizer={"kind": "adamw", "lr": 1e-9},
    )  # fmt: skip
    folder = RunFolder(run.path)
    assert len(events(folder, "enough")) == 1
    assert max(line["step"] for line in events(folder, "evaluation")) < 40


def test_an_imported_classifier_may_have_learned_pairs(tmp_path: Path) -> None:
    values = [{"text": sentence(n), "other": sentence(n + 1), "label": "ab"[n % 2]} for n in range(80)]
    run = learn(tmp_path, rows(tmp_path, values), transformer("encoder"), objective={"kind": "classify"})
    with pytest.raises(ConfigError, match="this run expects one text at a time"):
        run.classify(["text"], ["another"])
    (run.path / "origin").mkdir()  # as `weft import` creates it
    (alone,), (pair,) = run.classify(["text"]), run.classify(["text"], ["another"])
    assert alone.keys() == pair.keys() and alone != pair
    with pytest.raises(ConfigError, match="second: 1 texts for 2 first ones; each needs a partner"):
        run.classify(["text", "more"], ["another"])
    with pytest.raises(ConfigError, match=r"texts = 'text': expected .*, such as \['text'\]"):
        run.classify("text")


@pytest.mark.parametrize("kind", spread(["classify", "regress", "tag"], 1))
def test_outputs_that_are_not_finite_are_refused(tmp_path: Path, kind: str) -> None:
    values = [
        {"text": sentence(n), "label": "ab"[n % 2], "score": n, "words": ["a", str(n)], "tags": ["x", "y"]}
        for n in range(80)
    ]
    run = learn(tmp_path, rows(tmp_path, values), transformer("encoder"), objective={"kind": kind})
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(float("nan"))
    predict: dict[str, Any] = {"classify": run.classify, "regress": run.rate, "tag": lambda texts: run.tag([texts])}
    with pytest.raises(ModelError, match="its outputs are not finite"):
        predict[kind](["text"])


# ---- adapters


@pytest.mark.slow
def test_a_new_head_is_trained_and_saved_with_an_adapter(tmp_path: Path) -> None:
    learn(tmp_path, text(tmp_path), transformer("decoder"), "base")
    begin: dict[str, Any] = {"init": str(tmp_path / "base"), "adapter": {"kind": "lora", "rank": 2}}
    data = labelled(tmp_path)
    run = learn(tmp_path, data, None, "tuned", objective={"kind": "classify"}, **begin)
    saved = tensors.load(RunFolder(run.path).checkpoints / "best/model.safetensors")
    assert any(name.startswith("output.") for name in saved)
    texts = [sentence(n) for n in range(9)]
    again = load(run.path).classify(texts)
    assert again == load(run.path).classify(texts)
    assert load(run.path).evaluate()["accuracy"] == last(run)["accuracy"]
    resumed = api.resume(run.path, log=lambda line: None)
    assert resumed.classify(texts) == again


def test_an_adapter_is_resumed_with_its_base_alone(tmp_path: Path) -> None:
    learn(tmp_path, text(tmp_path), transformer("decoder"), "base")
    tokenizer = {"kind": "pretrained", "path": str(tmp_path / "base")}
    learn(tmp_path, text(tmp_path), transformer("decoder"), "other", seed=5, tokenizer=tokenizer)
    begin: dict[str, Any] = {"init": str(tmp_path / "base"), "adapter": {"kind": "lora", "rank": 2}}
    run = learn(tmp_path, text(tmp_path), None, "tuned", **begin)
    before = (run.path / "metrics.jsonl").read_text()
    settings = run.path / "config.toml"
    settings.write_text(settings.read_text().replace("steps = 6\n", "steps = 12\n"))  # more steps to train
    (tmp_path / "base").rename(tmp_path / "away")
    (tmp_path / "other").rename(tmp_path / "base")
    with pytest.raises(RunError, match="its adapter was trained for the weights of"):
        api.resume(run.path, log=lambda line: None)
    assert (run.path / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_prompts_without_space_for_a_reply_are_measured_only(tmp_path: Path) -> None:
    long = " ".join(sentence(n) for n in range(9))
    prompts = [f"{n} {long}" if n % 2 else f"Hi {n}" for n in range(80)]
    values = [messages(prompt, "dog") for prompt in prompts]
    small = transformer("decoder", context=48)
    run = learn(tmp_path, rows(tmp_path, values), small, objective={"kind": "chat"}, batch={"length": 48})
    assert last(run)["loss"] > 0
