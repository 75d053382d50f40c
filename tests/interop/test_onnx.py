"""ONNX files: onnxruntime computes the model's outputs, at any size, and the same greedy text."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weft.errors import InteropError
from weft.interop import onnx
from weft.interop.bundle import ModelBundle
from weft.models.build import build
from weft.models.config import EncoderDecoder, Recurrent
from weft.models.head_config import ClassificationHead, LMHead, PretrainingHead
from weft.models.presets import bert, gpt, llama, vaswani
from weft.models.transformer import Transformer
from weft.nn.config import Attention, Gated, RMSNorm
from weft.nn.position_config import Concatenated, DynamicNTK, Rotary, T5Bias
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

D, HEADS, FF, VOCAB = 16, 2, 24, 50


@pytest.fixture
def runtime() -> Any:
    pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    return pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


def random_model(config: Any) -> Transformer:
    torch.manual_seed(0)
    model = build(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    assert isinstance(model, Transformer)
    return model


def export(model: Transformer, folder: Path, tolerance: float = onnx.TOLERANCE, **tokenizers: Any) -> None:
    weights = {name: partial(tensor.clone) for name, tensor in model.state_dict().items()}
    folder.mkdir()
    bundle = replace(ModelBundle(model.config, weights, None, "here"), **tokenizers)
    onnx.write(bundle, folder, tolerance=tolerance)


def session(runtime: Any, file: Path) -> Any:
    return runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


def check_close(theirs: np.ndarray, ours: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(theirs), ours, atol=1e-4, rtol=1e-4)


def named(names: list[str], arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    return dict(zip(names, arrays, strict=True))


@pytest.mark.slow
def test_an_encoder(runtime: Any, tmp_path: Path) -> None:
    model = random_model(bert(1, D, HEADS, vocab_size=VOCAB, context=32).replace(head=PretrainingHead()))
    export(model, tmp_path / "bert", tokenizer=build_tokenizer(Byte(), []))
    assert {file.name for file in (tmp_path / "bert").iterdir()} == {
        "model.onnx",
        "tokenizer.json",
        "tokenizer_config.json",
        onnx.ABOUT,
    }
    run = session(runtime, tmp_path / "bert" / "model.onnx")
    assert [node.name for node in run.get_inputs()] == ["input_ids", "attention_mask", "token_type_ids"]
    for rows, time in ((1, 1), (3, 9), (2, 32)):
        tokens, segments = torch.randint(VOCAB, (rows, time)), torch.randint(2, (rows, time))
        mask = torch.arange(time)[None] < torch.arange(1, rows + 1)[:, None] * (time // rows)
        arrays = [tokens.numpy(), mask.long().numpy(), segments.numpy()]
        words, next_sentence = run.run(None, named(["input_ids", "attention_mask", "token_type_ids"], arrays))
        with torch.no_grad():
            ours = model(tokens, mask=mask, segments=segments)
        check_close(words[mask.numpy()], ours.words[mask])
        check_close(next_sentence, ours.next_sentence)


@pytest.mark.slow
def test_a_decoder_generates(runtime: Any, tmp_path: Path) -> None:
    """Greedily, with grouped queries, rotary positions and a window; the KV cache is an input and an output."""
    config = llama(1, D, HEADS, d_ff=FF, context=32, vocab_size=VOCAB, kv_heads=1).replace(
        attention=Attention(heads=2, kv_heads=1, window=6)
    )
    model = random_model(config)
    export(model, tmp_path / "llama")
    run = session(runtime, tmp_path / "llama" / "model.onnx")
    names = ["input_ids", "past_key_values.0.key", "past_key_values.0.value"]
    assert [node.name for node in run.get_inputs()] == names
    assert [node.name for node in run.get_outputs()] == ["logits", "present.0.key", "present.0.value"]
    prompt = torch.randint(VOCAB, (2, 5))
    state, tokens, expected = model.start(2, 20), prompt, []
    empty = np.zeros((2, 1, 0, D // HEADS), np.float32)
    fresh, past, theirs = prompt.numpy(), [empty, empty], []
    for _ in range(10):
        ours = model.step(tokens, state)
        tokens = ours[:, -1:].argmax(-1)
        expected.append(tokens)
        logits, *past = run.run(None, named(names, [fresh, *past]))
        check_close(logits, ours)
        fresh = logits[:, -1:].argmax(-1)
        theirs.append(fresh)
    assert torch.cat(expected, 1).tolist() == np.concatenate(theirs, 1).tolist()


@pytest.mark.slow
def test_an_encoder_decoder_generates(runtime: Any, tmp_path: Path) -> None:
    model = random_model(vaswani(1, D, HEADS, d_ff=FF, dropout=0.1, vocab_size=VOCAB))
    export(model, tmp_path / "pair", source_tokenizer=build_tokenizer(Byte(), []))
    assert (tmp_path / "pair" / "source" / "tokenizer.json").is_file()
    encoder, decoder = (session(runtime, tmp_path / "pair" / f"{name}.onnx") for name in ("encoder", "decoder"))
    source = torch.randint(VOCAB, (3, 8))
    mask = torch.arange(8)[None] < torch.tensor([8, 5, 2])[:, None]
    real = mask.long().numpy()
    memory = encoder.run(None, named(["input_ids", "attention_mask"], [source.numpy(), real]))
    state = model.start(3, 10, SimpleNamespace(tokens=source, mask=mask))
    tokens = torch.ones(3, 1, dtype=torch.long)
    fresh, past = tokens.numpy(), [np.zeros((3, HEADS, 0, D // HEADS), np.float32)] * 2
    for _ in range(8):
        ours = model.step(tokens, state)
        logits, *past = decoder.run(
            None, named([node.name for node in decoder.get_inputs()], [fresh, *past, real, *memory])
        )
        check_close(logits, ours)
        tokens, fresh = ours.argmax(-1), logits.argmax(-1)
        assert tokens.tolist() == fresh.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "classifier", "t5", "wide values"])
def test_other_models(name: str, runtime: Any, tmp_path: Path) -> None:
    config: Any = {
        "gpt": gpt(1, D, HEADS, context=32, vocab_size=VOCAB),
        "wide values": gpt(1, D, HEADS, context=32, vocab_size=VOCAB).replace(
            attention=Attention(heads=HEADS, d_v=9),
            position=Concatenated(),
            feedforward=Gated(d_ff=FF, beta=2.0),
        ),
        "classifier": gpt(1, D, HEADS, context=32, vocab_size=VOCAB).replace(
            head=ClassificationHead(labels=3, pooling="last")
        ),
        "t5": EncoderDecoder(
            vocab_size=VOCAB,
            source_vocab_size=40,
            layers=1,
            d_model=D,
            attention=Attention(heads=HEADS, d_head=6, scale=1.0),
            feedforward=Gated(d_ff=FF, activation="gelu-tanh"),
            norm=RMSNorm(),
            position=T5Bias(buckets=8, max_distance=20),
            head=LMHead(tied=False),
        ),
    }[name]
    export(random_model(config), tmp_path / name, tolerance=1e-4)
    assert (tmp_path / name / onnx.ABOUT).is_file()


# ---- refused exports


def test_models_that_cannot_be_exported_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    recurrent = ModelBundle(Recurrent(vocab_size=9, d_model=8), {}, None, "here")
    with pytest.raises(InteropError, match=r"model\.kind = 'recurrent': only Transformers can be exported as ONNX"):
        onnx.write(recurrent, tmp_path)
    scaled = llama(1, D, HEADS, d_ff=FF, context=32, vocab_size=VOCAB).replace(
        position=Rotary(scaling=DynamicNTK(factor=2.0))
    )
    with pytest.raises(InteropError, match="dynamic-ntk"):
        onnx.write(ModelBundle(scaled, {}, None, "here"), tmp_path)
    hashed = llama(1, D, HEADS, d_ff=FF, context=32, vocab_size=VOCAB).replace(ngrams={"rows": 9})
    with pytest.raises(InteropError, match=r"model\.ngrams: a step of an ONNX file"):
        onnx.write(ModelBundle(hashed, {}, None, "here"), tmp_path)
    monkeypatch.setattr(onnx, "find_spec", lambda name: None)
    with pytest.raises(InteropError, match=r"pip install 'weft\[onnx\]'"):
        onnx.write(recurrent, tmp_path)
    assert list(tmp_path.iterdir()) == []


class Outputs(nn.Module):
    """Returns given values."""

    def __init__(self, values: list[list[float]]) -> None:
        super().__init__()
        self.values = [torch.tensor(row) for row in values]

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        return self.values


class Session:
    """A session of onnxruntime in which every output is 1."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def run(self, names: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [np.ones(2, np.float32)] * 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0, 1.0], [1.5, 1.0]], r"model\.onnx: its outputs differ from the model's by 0\.5"),
        ([[1.0, 1.0], [math.nan, 2.0]], r"the model's output is NaN; nothing was written"),
        ([[math.nan, 1.0], [1.0, 1.0]], r"the model's output is NaN; nothing was written"),
    ],
)
def test_a_file_that_differs_from_the_model_is_refused(
    runtime: Any, values: list[list[float]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "InferenceSession", Session)
    inputs: dict[str, onnx.Dims] = {"input_ids": ("batch", "time")}
    exported = onnx.OnnxFile("model.onnx", Outputs(values), inputs=inputs, outputs=("a", "b"))
    with pytest.raises(InteropError, match=message):
        onnx.compare(exported, Path("model.onnx"))
