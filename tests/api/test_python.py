"""weft from Python: changes, what a run says of itself, surprisal, chat and export."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import inspect
import io
import json
import pydoc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tests.interop.hf_models import exported, fresh_model
from tests.later import Later
from tokenizers.processors import TemplateProcessing

import weft
from weft.api.import_model import import_model
from weft.cli.main import run as command
from weft.decode.prompt import context_window
from weft.errors import ConfigError, DataError, WeftError
from weft.interop.generation import generation_settings, search_settings
from weft.models.presets import gpt, llama
from weft.recipe.resolve import resolve
from weft.text.config import BPE, Char
from weft.text.tokenizer import Tokenizer, build_tokenizer

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
def test_a_table_of_dotted_keys_is_what_words_are(table: dict[str, Any], words: list[str]) -> None:
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
def test_mistakes_in_changes_are_one_line(changes: Any, line: str) -> None:
    for recipe in ("gpt-tiny", resolve("gpt-tiny")):
        with pytest.raises(ConfigError) as caught:
            weft.train(recipe, data="none.txt", changes=changes)
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)


def test_help_shows_what_train_takes() -> None:
    shown = pydoc.render_doc(weft.train, renderer=pydoc.plaintext)
    assert list(inspect.signature(weft.train).parameters) == ["recipe", "data", "run", "changes", "log"]
    for word in ("changes: ", "model.layers", "dotted keys", "a free one in runs/"):
        assert word in shown
    methods = [name for name, each in inspect.getmembers(weft.Run, callable) if not name.startswith("_")]
    assert {"generate", "chat", "perplexity", "surprisal", "embed", "export"} <= set(methods)
    assert all(inspect.getdoc(getattr(weft.Run, name)) for name in methods)


# ---- a run


def test_a_run_is_one_line() -> None:
    assert repr(weft.load(OLD / "gpt")).startswith(f"Run({str(OLD / 'gpt')!r}: decoder of ")
    shown = repr(weft.load(OLD / "base"))
    assert shown.endswith(" parameters, step 12, perplexity 54.42)")
    assert "step" in repr(weft.load(OLD / "ngram")) or "n-gram" in repr(weft.load(OLD / "ngram"))


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


def test_a_long_text_is_scored_in_windows_that_overlap() -> None:
    run = weft.load(OLD / "gpt")
    window = context_window(run.model)
    assert window is not None
    text = "the cat sees a dog. " * 6
    found = [each.nats for each in run.surprisal(text)]
    ids = torch.tensor([[run.tokenizer.need("eos"), *run.tokenizer.encode(text)]])
    with torch.no_grad():
        for place in (3, window - 1, window, 2 * window - 1, len(found) - 1):
            start = 0
            while place - start >= window:
                start += window // 2
            log_p = run.model(ids[:, start : place + 1])[0, -1].log_softmax(-1)
            assert found[place] == pytest.approx(-float(log_p[ids[0, place + 1]]), rel=1e-4)


def test_what_a_person_may_get_wrong(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    run, labels = weft.load(OLD / "gpt"), weft.load(OLD / "classify")
    for wrong in (
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
        lambda: run.chat("a", temperature="hot"),
        lambda: run.export("word", tmp_path / "x"),
        lambda: labels.chat("a"),
        lambda: labels.surprisal("a"),
        lambda: labels.perplexity("a"),
    ):
        with pytest.raises(WeftError) as caught:
            wrong()
        assert len(str(caught.value).splitlines()) == 1
    monkeypatch.chdir(tmp_path)
    (tmp_path / "the.txt").write_text("the cat")
    capsys.readouterr()
    run.perplexity("the.txt")
    assert "'the.txt' is scored as a text; evaluate('the.txt')" in capsys.readouterr().err


def test_chat_is_reply_and_takes_a_conversation() -> None:
    run = weft.load(OLD / "gpt")
    settings = {"temperature": 0.0, "max_tokens": 8}
    asked = [{"role": "system", "content": "cat."}, {"role": "user", "content": "the"}]
    assert run.chat(asked, **settings) == "".join(chunk.text for chunk in run.reply(asked, weft.sampling(**settings)))
    assert run.chat("the", **settings) == run.generate("the", **settings)
    assert run.chat(asked, **settings) == run.generate("cat.\nthe", **settings)


# ---- a checkpoint


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    learned = build_tokenizer(BPE(vocab_size=280), ["the cat sat on the mat, and the dog ate the hat. " * 8])
    backend = tokenizers.Tokenizer.from_str(learned.to_json())
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", learned.need("bos"))])
    return Tokenizer.from_json(backend.to_str(), learned.roles)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_surprisal_is_the_loss_of_transformers(family: str, pieces: Tokenizer, tmp_path: Path) -> None:
    """On the same ids: bos stands before the text where the tokenizer puts it; otherwise nothing predicts the first."""
    tokenizer = pieces if family == "llama" else build_tokenizer(BPE(vocab_size=262), ["the cat sat. " * 9])
    size = {"vocab_size": tokenizer.vocab_size}
    settings = llama(2, 32, 4, 48, 64, kv_heads=2, **size) if family == "llama" else gpt(2, 32, 4, context=64, **size)
    folder = exported(replace(fresh_model(settings), tokenizer=tokenizer), tmp_path / "theirs")
    import_model(folder, tmp_path / "run")
    run = weft.load(tmp_path / "run")
    text = "the dog ate the mat, and the cat sat."
    first = [tokenizer.need("bos")] if family == "llama" else []
    ids = torch.tensor([[*first, *tokenizer.encode(text)]])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    found = [each.nats for each in run.surprisal(text)]
    assert len(found) == ids.shape[1] - len(first)
    scored = [each for each in found if each is not None]
    assert len(scored) == ids.shape[1] - 1
    assert sum(scored) / len(scored) == pytest.approx(loss, rel=1e-4)
    assert run.perplexity(text) == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-3)
    place = run.export("hf", tmp_path / "again")
    assert (place / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.fixture
def checkpoint(tmp_path: Path, pieces: Tokenizer) -> Path:
    settings = llama(2, 32, 4, 48, 64, vocab_size=pieces.vocab_size, kv_heads=2)
    folder = exported(replace(fresh_model(settings), tokenizer=pieces), tmp_path / "theirs")
    tree = {"do_sample": True, "temperature": 0.6, "top_p": 0.8, "max_new_tokens": 9, "eos_token_id": [270, 271]}
    (folder / "generation_config.json").write_text(json.dumps(tree))
    return folder


def test_a_checkpoint_writes_as_its_makers_have_it(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    import_model(checkpoint, tmp_path / "run")
    run = weft.load(tmp_path / "run")
    theirs = {"temperature": 0.6, "top_p": 0.8, "max_tokens": 9, "stop_ids": (270, 271)}
    assert run.defaults == run.chat_defaults == theirs
    text = run.complete(["the"], weft.sampling(**theirs, seed=3))[0].text
    assert run.generate("the", seed=3) == text
    assert text and text != run.complete(["the"], weft.sampling(max_tokens=9, seed=3))[0].text
    capsys.readouterr()
    assert command(["generate", str(tmp_path / "run"), "--prompt", "the", "--seed", "3"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"the{text}\n"
    source = "from the checkpoint's generation_config.json"
    assert shown.err == f"weft: writing with temperature 0.6, top_p 0.8, max_tokens 9, {source}\n"
    words = ["--greedy", "--max-tokens", "5"]
    assert command(["generate", str(tmp_path / "run"), "--prompt", "the", *words]) == 0
    greedy = run.complete(["the"], weft.sampling(temperature=0.0, max_tokens=5, stop_ids=(270, 271)))[0].text
    assert tuple(capsys.readouterr()) == (f"the{greedy}\n", "")
    assert command(["generate", str(tmp_path / "run"), "--prompt", "the", "--beam", "2"]) == 0
    assert "writing with max_tokens 9, from" in capsys.readouterr().err


def test_a_checkpoints_stop_strings_are_said(
    checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / "generation_config.json").write_text('{"stop_strings": ["e", "\\n"], "max_new_tokens": 3}')
    import_model(checkpoint, tmp_path / "run")
    said = "weft: writing with max_tokens 3, stop 'e', '\\n', from the checkpoint's generation_config.json\n"
    for words in ["generate", "--prompt", "the"], ["generate", "--prompt", "the", "--beam", "2"], ["chat"]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the\n"), encoding="utf-8"))
        capsys.readouterr()
        assert command([words[0], str(tmp_path / "run"), *words[1:]]) == 0
        assert capsys.readouterr().err == said


def test_chat_is_gentle_where_nobody_says_how(
    checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        capsys.readouterr()
        assert command(["chat", str(tmp_path / "run"), "--max-tokens", "12", *words]) == 0
        assert capsys.readouterr().out == f"{expected}\n"


def test_a_strangers_settings_are_checked() -> None:
    nothing: dict[str, Any] = {}
    odd = {"temperature": "hot", "top_p": 3, "top_k": True, "do_sample": "yes", "max_new_tokens": -1, "min_p": 1e999}
    found, lines = generation_settings(odd | {"eos_token_id": [1, "x"], "repetition_penalty": []}, 50)
    assert found == nothing
    assert len(lines) == 8 and "temperature = 'hot'" in lines
    assert generation_settings({"eos_token_id": 50}, 50) == (nothing, ["eos_token_id = 50"])
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "typical_p": 1, "repetition_penalty": 1.0, "min_p": None}
    assert generation_settings(off, 50) == ({"temperature": 1.0}, [])
    assert generation_settings({"do_sample": True}, 50) == ({"temperature": 1.0}, [])
    assert generation_settings({"do_sample": False, "top_p": 0.9}, 50) == ({"temperature": 0.0}, [])
    ids = {"forced_bos_token_id": 3, "forced_eos_token_id": 2, "suppress_tokens": [7], "bad_words_ids": [[8], [9, 10]]}
    read = {"forced": (3,), "last": 2, "banned": (7, 8), "min_tokens": 4, "no_repeat_ngram": 3, "stop": ("x",)}
    more = {"min_new_tokens": 4, "no_repeat_ngram_size": 3, "stop_strings": "x"}
    assert generation_settings({**ids, **more}, 50) == (read, [])
    beyond = {"suppress_tokens": [7, 60], "bad_words_ids": [[50]]}  # which this tokenizer has no tokens for
    assert generation_settings(beyond, 50) == ({"banned": (7,)}, [])
    assert generation_settings({"stop_strings": [""]}, 50) == (nothing, ["stop_strings = ['']"])
    odd = {"forced_bos_token_id": 50, "forced_eos_token_id": "2", "suppress_tokens": [True], "bad_words_ids": ["a"]}
    found, lines = generation_settings(odd, 50)
    assert found == nothing and len(lines) == 4
    both = {"forced_bos_token_id": 3, "suppress_tokens": [3]}
    assert generation_settings(both, 50) == ({"banned": (3,)}, ["forced_bos_token_id = 3"])
    assert generation_settings({"min_length": 5}, 50) == (nothing, [])  # with the prompt, which is not here
    assert generation_settings({"min_length": 5}, 50, answers=True) == ({"min_tokens": 4}, [])
    assert generation_settings({"min_length": 5, "min_new_tokens": 2}, 50, answers=True) == ({"min_tokens": 2}, [])
    assert generation_settings({"min_length": "5"}, 50, answers=True) == (nothing, ["min_length = '5'"])
    short = {"min_length": 5, "max_new_tokens": 3}
    assert generation_settings(short, 50, answers=True) == ({"max_tokens": 3}, ["min_length = 5"])


def test_a_strangers_search_is_transformers() -> None:
    usual = {"patience": None, "settled": "likely", "renormalise": False}
    assert search_settings({}) == search_settings({"early_stopping": False, "max_length": 20}) == (usual, [])
    assert search_settings({"early_stopping": True}) == ({**usual, "patience": 1.0}, [])
    assert search_settings({"early_stopping": "never"}) == ({**usual, "settled": "certain"}, [])
    asked = {"num_beams": 4, "length_penalty": 2.0, "renormalize_logits": True}
    read = {"beams": 4, "length_penalty": {"kind": "power", "alpha": 2.0}, "renormalise": True}
    assert search_settings(asked) == ({**usual, **read}, [])
    odd = {"early_stopping": 3, "num_beams": 0, "length_penalty": "x", "renormalize_logits": 1}
    found, lines = search_settings(odd)
    assert found == usual and sorted(lines) == sorted(f"{key} = {value!r}" for key, value in odd.items())


def test_settings_of_before_there_was_a_file_are_in_the_models(checkpoint: Path, tmp_path: Path) -> None:
    tree = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    old = {"num_beams": 3, "early_stopping": True, "no_repeat_ngram_size": 2, "do_sample": False, "top_k": 50}
    (checkpoint / "config.json").write_text(json.dumps(tree | old))
    import_model(checkpoint, tmp_path / "run")
    run = weft.load(tmp_path / "run")
    assert run.defaults == {"no_repeat_ngram": 2}
    read = {"beams": 3, "patience": 1.0, "settled": "likely", "renormalise": False}
    assert run.beam_defaults == {**read, "no_repeat_ngram": 2}


def test_a_broken_file_of_settings_is_said_and_not_used(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    for number, content in enumerate(["{", "[]", '{"temperature": "hot"}']):
        (checkpoint / "generation_config.json").write_text(content)
        place = tmp_path / f"run-{number}"
        import_model(checkpoint, place)
        assert weft.load(place).defaults == {}
        (line,) = capsys.readouterr().err.splitlines()
        assert "generation_config.json" in line


def test_rules_that_weft_does_not_have_are_named(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    words = {"bad_words_ids": [[3], [4, 5]]}
    tree = {"penalty_alpha": 0.6, "min_length": 5, "encoder_no_repeat_ngram_size": 0, "num_beam_groups": 1, **words}
    (checkpoint / "generation_config.json").write_text(json.dumps(tree))
    import_model(checkpoint, tmp_path / "run")
    capsys.readouterr()
    assert weft.load(tmp_path / "run").defaults == {"banned": (3,)}
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2] for line in lines] == [
        "penalty_alpha = 0.6",
        "min_length = 5",
        "bad_words_ids = [[4, 5]]",
    ]
    assert {line.split(": ")[3] for line in lines} == {"not used; weft has no such rule"}


def test_greedy_settings_give_way_to_what_is_asked_for() -> None:
    from weft.api.settings import with_defaults

    assert with_defaults({"max_tokens": 3}, {"min_tokens": 9}) == {"max_tokens": 3, "min_tokens": 3}
    assert with_defaults({}, {"min_tokens": 900}) == {"min_tokens": 128}  # which is as long as a text is by default
    assert with_defaults({"top_p": 0.5}, {"temperature": 0.0}) == {"top_p": 0.5}
    assert with_defaults({"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.5, "max_tokens": 3}) == {
        "temperature": 0.0,
        "max_tokens": 3,
    }
    assert with_defaults({"temperature": None}, {"temperature": 0.6}) == {"temperature": 0.6}


def test_messages_that_no_reply_answers() -> None:
    with pytest.raises(DataError, match="the last message is the assistant's"):
        weft.load(OLD / "gpt").chat([{"role": "assistant", "content": "a"}])
