"""The Python API: changes, repr, surprisal, chat, defaults of a checkpoint, and export."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import inspect
import io
import json
import pydoc
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.command import Cli, Patch
from tests.interop.hf_models import exported, fresh_model
from tests.later import Later

import weft
from weft import errors
from weft.api.evaluation import EvaluationMetrics
from weft.api.import_model import import_model
from weft.api.settings import BeamSettings, SamplingSettings, with_defaults
from weft.decode.config import Beam, Sampling
from weft.errors import ConfigError, WeftError
from weft.interop.generation import generation_settings, search_settings
from weft.models.presets import llama
from weft.recipe.resolve import resolve
from weft.runs.folder import open_run
from weft.runs.lines import checked_lines
from weft.text.config import Char
from weft.text.tokenizer import Tokenizer

PUBLIC_USE = """
from pathlib import Path

import weft

run = weft.train("gpt-tiny", data="book.txt", run="runs/book", changes={"steps": 5})
text: str = run.generate("Once", max_tokens=5, temperature=0.7, stop=["."])
reply: str = run.chat("hi", top_p=0.9)
value: float = run.perplexity("x")
ids: list[int] = run.tokenizer.encode("x")
run.explain.attention("A text.").save("attention.html")
run.explain.step("A text.").save("step.html")
run.explain.graph().save("graph.svg")
loaded: weft.Run = weft.load(Path("runs/book"), quantize="int8")
print(weft.plan("llama-7b", device="a100"), weft.resume("runs/book"), weft.architecture("gpt-tiny").anatomy())
completions = loaded.complete(["a"], weft.sampling(max_tokens=3)) + loaded.complete(["a"], weft.beam(beams=3))
print([each.text for each in completions], loaded.embed(["a"]).shape, loaded.evaluate()["loss"], run.results())
try:
    weft.load("x")
except weft.WeftError as error:
    print(error)
"""

transformers = Later("transformers")

OLD = Path(__file__).parent / "runs-0.1"
Capture = pytest.CaptureFixture[str]


# ---- changes


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"model.layers": 1}, ["model.layers=1"]),
        ({"model": {"attention.heads": 2}, "model.d_model": 32}, ["model.attention.heads=2", "model.d_model=32"]),
        ({"tokenizer.lowercase": True, "tokenizer": "char"}, ["tokenizer.lowercase=true", "tokenizer=char"]),
        ({"data.sources": (Path("a.txt"), "b.txt")}, ['data.sources=["a.txt", "b.txt"]']),
        ({"tokenizer": Char(lowercase=True)}, ["tokenizer=char", "tokenizer.lowercase=true"]),
        ({"model": "llama-tiny", "steps": None}, ["model=llama-tiny"]),
        ({"compile": False, "optimizer.lr": 1e-3}, ["compile=false", "optimizer.lr=1e-3"]),
    ],
)
def test_changes_as_a_table_equal_changes_as_words(table: dict[str, Any], words: list[str]) -> None:
    assert resolve("gpt-tiny", table) == resolve("gpt-tiny", words)
    assert resolve("gpt-tiny", table) != resolve("gpt-tiny")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model.layrs": 1}, "model.layrs: unknown key; did you mean 'model.layers'?"),
        ({"model.layers": "many"}, "model.layers = 'many': expected"),
        ({"model..layers": 1}, "'model..layers': not a setting's name"),
        ({3: 1}, "3: not a setting's name"),
        ("steps=3", "changes = 'steps=3': expected Iterable[str] | Mapping[str, Any]"),
        ([3], "changes = [3]: expected Iterable[str]"),
    ],
)
def test_invalid_changes_are_one_line(changes: Any, line: str) -> None:
    for recipe in ("gpt-tiny", resolve("gpt-tiny")):
        with pytest.raises(ConfigError) as caught:
            weft.train(recipe, data="none.txt", changes=changes)
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)


def test_help_shows_the_arguments_of_train() -> None:
    shown = pydoc.plain(pydoc.render_doc(weft.train))
    assert list(inspect.signature(weft.train).parameters) == ["recipe", "data", "run", "changes", "log", "command"]
    for word in ("changes: ", "model.layers", "dotted keys", "a free one in runs/"):
        assert word in shown
    methods = [name for name, each in inspect.getmembers(weft.Run, callable) if not name.startswith("_")]
    assert {"generate", "chat", "perplexity", "surprisal", "embed", "export"} <= set(methods)
    assert all(inspect.getdoc(getattr(weft.Run, name)) for name in methods)


# ---- a run


def test_the_repr_of_a_run_is_one_line() -> None:
    assert repr(weft.load(OLD / "gpt")).startswith(f"Run({str(OLD / 'gpt')!r}: decoder of ")
    shown = repr(weft.load(OLD / "base"))
    assert shown.endswith(" parameters, step 12, perplexity 54.42)")
    assert "step" in repr(weft.load(OLD / "ngram")) or "n-gram" in repr(weft.load(OLD / "ngram"))


def test_a_run_as_a_table_and_its_metrics_as_columns(tmp_path: Path, monkeypatch: Patch) -> None:
    shutil.copytree(OLD / "gpt", tmp_path / "gpt")
    logged = {"step": 1, "loss": 2.5, "tokens": 9, "epoch": 0.5}
    lines = checked_lines([logged, {"step": 2, "validation_loss": 2.25}])
    (tmp_path / "gpt" / "metrics.jsonl").write_text(lines)
    run = weft.load(tmp_path / "gpt")
    assert "<table" in run._repr_html_() and "parameters" in run._repr_html_()
    assert repr(run.tokenizer).startswith("Tokenizer(") and len(repr(run.tokenizer)) < 60
    monkeypatch.setitem(sys.modules, "pandas", None)
    columns = {name: [value, None] for name, value in logged.items()}
    assert run.metrics == {**columns, "step": [1, 2], "validation_loss": [None, 2.25]}
    monkeypatch.delitem(sys.modules, "pandas")
    pandas = pytest.importorskip("pandas")
    assert isinstance(run.metrics, pandas.DataFrame) and list(run.metrics["step"]) == [1, 2]


def test_errors_are_exported() -> None:
    assert weft.WeftError is WeftError and issubclass(weft.RunError, weft.WeftError)
    assert {name for name in vars(errors) if name.endswith("Error")} <= set(weft.__all__)


def test_settings_as_arguments_of_train_are_answered_with_changes() -> None:
    train: Any = weft.train
    with pytest.raises(ConfigError, match=r"^steps: no such argument; .* changes=\{'steps': 5\}$"):
        train("gpt-tiny", data="book.txt", steps=5)
    with pytest.raises(ConfigError, match=r"changes=\{'optimizer.lr': 0.1\}$"):
        train("gpt-tiny", learning_rate=0.1)


def test_another_programs_model_is_to_be_imported(tmp_path: Path) -> None:
    (tmp_path / "smol lm").mkdir()
    (tmp_path / "smol lm" / "config.json").write_text("{}")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(weft.RunError, match=r"import it first: weft import '.*/smol lm' 'runs/smol lm'$"):
        open_run(tmp_path / "smol lm")
    with pytest.raises(weft.RunError, match=r"weft import .*/a\.gguf runs/a$"):
        open_run(tmp_path / "a.gguf")


def test_the_surprisal_of_a_text_adds_up_to_its_perplexity() -> None:
    for name in ("gpt", "lstm", "ngram"):
        run = weft.load(OLD / name)
        found = run.surprisal("the cat")
        assert "".join(each.token for each in found) == "the cat"
        nats = [each.nats for each in found if each.nats is not None]
        assert len(nats) == len(found)
        assert run.perplexity("the cat") == pytest.approx(torch.tensor(nats).double().mean().exp().item())
        both = [*nats, *(each.nats for each in run.surprisal("a dog") if each.nats is not None)]
        assert run.perplexity(["the cat", "a dog"]) == pytest.approx(torch.tensor(both).double().mean().exp().item())


def test_invalid_arguments_are_one_line(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    run, labels = weft.load(OLD / "gpt"), weft.load(OLD / "classify")
    invalid_calls: list[Callable[[], object]] = [
        lambda: run.perplexity(""),
        lambda: run.perplexity([]),
        lambda: run.perplexity(3),  # type: ignore[arg-type]
        lambda: run.surprisal(["a"]),  # type: ignore[arg-type]
        lambda: run.chat([]),
        lambda: run.chat([{"role": "robot", "content": "a"}]),
        lambda: run.chat([{"role": "user"}]),
        lambda: run.chat([3]),  # type: ignore[list-item]
        lambda: run.chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]),
        lambda: run.chat([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]),
        lambda: run.chat("a", temperature="hot"),  # type: ignore[arg-type]
        lambda: run.export("word", tmp_path / "x"),
        lambda: labels.chat("a"),
        lambda: labels.surprisal("a"),
        lambda: labels.perplexity("a"),
        lambda: run.chat([{"role": "assistant", "content": "a"}]),
    ]
    for call in invalid_calls:
        with pytest.raises(WeftError) as caught:
            call()
        assert len(str(caught.value).splitlines()) == 1
    monkeypatch.chdir(tmp_path)
    (tmp_path / "the.txt").write_text("the cat")
    capsys.readouterr()
    run.perplexity("the.txt")
    assert "'the.txt' is scored as a text; evaluate('the.txt')" in capsys.readouterr().err


def test_chat_is_reply_and_takes_a_conversation() -> None:
    run = weft.load(OLD / "gpt")
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
    messages = [{"role": "system", "content": "cat."}, {"role": "user", "content": "the"}]
    chunks = run.reply(messages, weft.sampling(**settings))
    assert run.chat(messages, **settings) == "".join(chunk.text for chunk in chunks)
    assert run.chat("the", **settings) == run.generate("the", **settings)
    assert run.chat(messages, **settings) == run.generate("cat.\nthe", **settings)


# ---- an imported checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path, pieces: Tokenizer) -> Path:
    settings = llama(2, 32, 4, d_ff=48, context=64, vocab_size=pieces.vocab_size, kv_heads=2)
    folder = exported(replace(fresh_model(settings), tokenizer=pieces), tmp_path / "theirs")
    tree = {"do_sample": True, "temperature": 0.6, "top_p": 0.8, "max_new_tokens": 9, "eos_token_id": [270, 271]}
    (folder / "generation_config.json").write_text(json.dumps(tree))
    return folder


def test_other_programs_models_are_loaded_through_the_cache(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    run = weft.load(checkpoint)
    assert run.path.is_relative_to(tmp_path / "cache") and "importing" in capsys.readouterr().err
    assert weft.load(checkpoint).path == run.path and "importing" not in capsys.readouterr().err
    (checkpoint / "generation_config.json").write_text("{}")
    assert weft.load(checkpoint).path != run.path
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(WeftError, match=r"theirs.*model_type"):
        weft.load(checkpoint)
    for missing in ("runs/typo", "nobody/here/model", "typo"):
        with pytest.raises(WeftError, match="not a run: no such folder"):
            weft.load(missing)


def test_settings_that_type_checkers_see_are_those_of_decoding() -> None:
    for shown, config in ((SamplingSettings, Sampling), (BeamSettings, Beam)):
        assert list(shown.__annotations__) == list(config.model_fields)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed: npm install -g pyright")
def test_public_names_pass_pyright_in_strict_mode(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(PUBLIC_USE)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    command = ["pyright", "--pythonpath", sys.executable]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    (tmp_path / "use.py").write_text(PUBLIC_USE.replace("max_tokens", "max_tokenz"))
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'No parameter named "max_tokenz"' in found.stdout


def test_notebooks_show_tables(checkpoint: Path, pieces: Tokenizer) -> None:
    html = pieces._repr_html_()
    assert "Tokenizer(BPE" in html and "&lt;" in html and "<bos>" not in html
    shown = EvaluationMetrics(loss=1.5, tokens=9, intervals={"loss": [1.25, 1.75]})._repr_html_()
    assert "1.500" in shown and "1.250 to 1.750" in shown


def test_a_checkpoints_generation_config_is_used(checkpoint: Path, tmp_path: Path, cli: Cli) -> None:
    import_model(checkpoint, tmp_path / "run")
    run = weft.load(tmp_path / "run")
    theirs: Any = {"temperature": 0.6, "top_p": 0.8, "max_tokens": 9, "stop_ids": (270, 271)}
    assert run.defaults == run.chat_defaults == theirs
    text = run.complete(["the"], weft.sampling(**theirs, seed=3))[0].text
    assert run.generate("the", seed=3) == text
    assert text and text != run.complete(["the"], weft.sampling(max_tokens=9, seed=3))[0].text
    command = ["generate", tmp_path / "run", "--prompt", "the"]
    assert cli(*command, "--seed", "3") == f"the{text}\n"
    source = "from the checkpoint's generation_config.json"
    assert cli.err == f"weft: using temperature 0.6, top_p 0.8, max_tokens 9, {source}\n"
    greedy = run.complete(["the"], weft.sampling(temperature=0.0, max_tokens=5, stop_ids=(270, 271)))[0].text
    assert cli(*command, "--greedy", "--max-tokens", "5") == f"the{greedy}\n" and cli.err == ""
    assert "using max_tokens 9, from" in cli.logged(*command, "--beam", "2")


def test_a_checkpoints_stop_strings_are_logged(checkpoint: Path, tmp_path: Path, cli: Cli, monkeypatch: Patch) -> None:
    (checkpoint / "generation_config.json").write_text('{"stop_strings": ["e", "\\n"], "max_new_tokens": 3}')
    import_model(checkpoint, tmp_path / "run")
    message = "weft: using max_tokens 3, stop 'e', '\\n', from the checkpoint's generation_config.json\n"
    for words in ["generate", "--prompt", "the"], ["generate", "--prompt", "the", "--beam", "2"], ["chat"]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the\n"), encoding="utf-8"))
        assert cli.logged(words[0], tmp_path / "run", *words[1:]) == message


def test_chat_has_its_own_default_temperature(checkpoint: Path, tmp_path: Path, cli: Cli, monkeypatch: Patch) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 2, "transformers_version": "4"}')
    import_model(checkpoint, tmp_path / "run")
    run = weft.load(tmp_path / "run")
    assert "temperature" not in run.defaults
    settings = weft.sampling(temperature=0.7, top_p=0.9, max_tokens=12, **run.defaults)
    reply = "".join(chunk.text for chunk in run.reply([{"role": "user", "content": "the"}], settings))
    assert run.chat("the", max_tokens=12) == reply
    plain = run.complete(["the"], weft.sampling(top_p=1.0, max_tokens=12))[0].text
    assert plain != reply
    for words, expected in ([], reply), (["--temperature", "1", "--top-p", "1"], plain):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the\n"), encoding="utf-8"))
        assert cli("chat", tmp_path / "run", "--max-tokens", "12", *words) == f"{expected}\n"


def test_invalid_generation_settings_are_reported() -> None:
    nothing: dict[str, Any] = {}
    odd = {"temperature": "hot", "top_p": 3, "top_k": True, "do_sample": "yes", "max_new_tokens": -1, "min_p": 1e999}
    found, lines = generation_settings(odd | {"eos_token_id": [1, "x"], "repetition_penalty": []}, 50)
    assert found == nothing
    assert len(lines) == 8 and "temperature = 'hot'" in lines
    assert generation_settings({"eos_token_id": 50}, 50) == (nothing, ["eos_token_id = 50"])
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "typical_p": 1, "repetition_penalty": 1.0, "min_p": None}
    assert generation_settings({**off, "do_sample": True}, 50) == ({"temperature": 1.0}, [])
    assert generation_settings({"temperature": 0.7, "top_p": 0.9}, 50) == ({"temperature": 0.0}, [])  # no do_sample
    assert generation_settings({"do_sample": True}, 50) == ({"temperature": 1.0}, [])
    assert generation_settings({"do_sample": False, "top_p": 0.9}, 50) == ({"temperature": 0.0}, [])
    ids = {"forced_bos_token_id": 3, "forced_eos_token_id": 2, "suppress_tokens": [7], "bad_words_ids": [[8], [9, 10]]}
    expected = {"forced": (3,), "last": 2, "banned": (7, 8), "min_tokens": 4, "no_repeat_ngram": 3, "stop": ("x",)}
    others = {"min_new_tokens": 4, "no_repeat_ngram_size": 3, "stop_strings": "x"}
    assert generation_settings({**ids, **others}, 50) == (expected, [])
    beyond = {"suppress_tokens": [7, 60], "bad_words_ids": [[50]]}  # ids that this tokenizer does not have
    assert generation_settings(beyond, 50) == ({"banned": (7,)}, [])
    assert generation_settings({"stop_strings": [""]}, 50) == (nothing, ["stop_strings = ['']"])
    odd = {"forced_bos_token_id": 50, "forced_eos_token_id": "2", "suppress_tokens": [True], "bad_words_ids": ["a"]}
    found, lines = generation_settings(odd, 50)
    assert found == nothing and len(lines) == 4
    both = {"forced_bos_token_id": 3, "suppress_tokens": [3]}
    assert generation_settings(both, 50) == ({"banned": (3,)}, ["forced_bos_token_id = 3"])
    assert generation_settings({"min_length": 5}, 50) == (nothing, [])  # it counts the prompt, which is unknown here
    assert generation_settings({"min_length": 5}, 50, answers=True) == ({"min_tokens": 4}, [])
    assert generation_settings({"min_length": 5, "min_new_tokens": 2}, 50, answers=True) == ({"min_tokens": 2}, [])
    assert generation_settings({"min_length": "5"}, 50, answers=True) == (nothing, ["min_length = '5'"])
    short = {"min_length": 5, "max_new_tokens": 3}
    assert generation_settings(short, 50, answers=True) == ({"max_tokens": 3}, ["min_length = 5"])


def test_search_settings_of_transformers() -> None:
    usual = {"patience": None, "settled": "likely", "renormalise": False}
    assert search_settings({}) == search_settings({"early_stopping": False, "max_length": 20}) == (usual, [])
    assert search_settings({"early_stopping": True}) == ({**usual, "patience": 1.0}, [])
    assert search_settings({"early_stopping": "never"}) == ({**usual, "settled": "certain"}, [])
    theirs = {"num_beams": 4, "length_penalty": 2.0, "renormalize_logits": True}
    expected = {"beams": 4, "length_penalty": {"kind": "power", "alpha": 2.0}, "renormalise": True}
    assert search_settings(theirs) == ({**usual, **expected}, [])
    odd = {"early_stopping": 3, "num_beams": 0, "length_penalty": "x", "renormalize_logits": 1}
    found, lines = search_settings(odd)
    assert found == usual and sorted(lines) == sorted(f"{key} = {value!r}" for key, value in odd.items())


def test_older_checkpoints_have_the_settings_in_config_json(checkpoint: Path, tmp_path: Path) -> None:
    tree = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    old = {"num_beams": 3, "early_stopping": True, "no_repeat_ngram_size": 2, "do_sample": False, "top_k": 50}
    (checkpoint / "config.json").write_text(json.dumps(tree | old))
    import_model(checkpoint, tmp_path / "run")
    run = weft.load(tmp_path / "run")
    assert run.defaults == {"no_repeat_ngram": 2}
    expected = {"beams": 3, "patience": 1.0, "settled": "likely", "renormalise": False}
    assert run.beam_defaults == {**expected, "no_repeat_ngram": 2}


def test_a_broken_generation_config_is_reported_and_ignored(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    for number, content in enumerate(["{", "[]", '{"temperature": "hot"}']):
        (checkpoint / "generation_config.json").write_text(content)
        import_model(checkpoint, tmp_path / f"run-{number}")
        assert weft.load(tmp_path / f"run-{number}").defaults == {}
        (line,) = capsys.readouterr().err.splitlines()
        assert "generation_config.json" in line


def test_unsupported_generation_settings_are_reported(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    words = {"bad_words_ids": [[3], [4, 5]]}
    tree = {"penalty_alpha": 0.6, "min_length": 5, "encoder_no_repeat_ngram_size": 0, "num_beam_groups": 1, **words}
    (checkpoint / "generation_config.json").write_text(json.dumps(tree))
    import_model(checkpoint, tmp_path / "run")
    capsys.readouterr()
    assert weft.load(tmp_path / "run").defaults == {"banned": (3,)}
    lines = capsys.readouterr().err.splitlines()
    unused = ["penalty_alpha = 0.6", "min_length = 5", "bad_words_ids = [[4, 5]]"]
    assert [line.split(": ")[2] for line in lines] == unused
    assert {line.split(": ")[3] for line in lines} == {"not used; weft has no such rule"}


def test_defaults_that_contradict_settings_are_dropped() -> None:
    assert with_defaults({"max_tokens": 3}, {"min_tokens": 9}) == {"max_tokens": 3, "min_tokens": 3}
    assert with_defaults({}, {"min_tokens": 900}) == {"min_tokens": 128}  # the default of max_tokens
    assert with_defaults({"top_p": 0.5}, {"temperature": 0.0}) == {"top_p": 0.5}
    defaults = {"temperature": 0.6, "top_p": 0.5, "max_tokens": 3}
    assert with_defaults({"temperature": 0.0}, defaults) == {"temperature": 0.0, "max_tokens": 3}
    assert with_defaults({"temperature": None}, {"temperature": 0.6}) == {"temperature": 0.6}
