"""Perplexity is what a plain loop over transformers' own model finds, token by token."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from weft.api.import_model import import_model
from weft.api.run import load
from weft.text.config import BPE
from weft.text.tokenizer import build_tokenizer

TEXT = "".join(f"The frog number {n} sat by the river and die Kröte sang.\n" for n in range(2))
SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24},
    "LlamaForCausalLM": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 24,
    },
}


@pytest.mark.parametrize("kind", SIZES)
def test_perplexity_equals_a_naive_loop(kind: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(BPE(vocab_size=270), [TEXT * 3])
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    roles = {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.eos_id}
    theirs = made(made.config_class(vocab_size=tokenizer.vocab_size, **SIZES[kind], **roles)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(8.0)  # far from uniform
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "run")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    run, length = load(tmp_path / "run"), 24
    with run.evaluation(str(tmp_path / "text.txt")) as text:
        (tokens,) = text.objective.tokens("train")
        ids = [tokenizer.eos_id, *tokens.read(0, len(tokens)).tolist()]
        assert text.objective.length == length
        for stride in (None, 5):
            expected = naive(theirs, ids, length, length if stride is None else stride)
            found = text.metrics(stride)
            assert found["tokens"] == len(ids) - 1
            assert found["perplexity"] == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def naive(model: Any, ids: list[int], length: int, stride: int) -> float:
    """exp of the mean −log p, a token at a time: each from the window that reaches it first."""
    nats = 0.0
    for place in range(1, len(ids)):
        window = max(0, -(-(place - length) // stride))
        logits = model(torch.tensor([ids[window * stride : place]])).logits[0, -1]
        nats -= float(logits.double().log_softmax(-1)[ids[place]])
    return math.exp(nats / (len(ids) - 1))
