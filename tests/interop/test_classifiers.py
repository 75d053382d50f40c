"""Classifiers of Hugging Face folders: labels are those of transformers, for texts and for pairs of texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interop.small_tokenizers import LINES, TEXTS, bart_bpe, bpe_with_bos
from tests.later import Later
from tests.spread import spread

import weft
from weft.api.import_model import import_model
from weft.api.load import load
from weft.errors import ConfigError
from weft.recipe.objective import Classify

transformers = Later("transformers")

D, HEADS, FF = 16, 2, 24
GPT2 = {"n_embd": D, "n_layer": 1, "n_head": HEADS, "n_positions": 64}
ROBERTA = {
    "hidden_size": D,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "intermediate_size": FF,
    "max_position_embeddings": 66,
    "type_vocab_size": 1,
    "pad_token_id": 1,
}
CASES: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "gpt2": ("GPT2", lambda: transformers.GPT2Tokenizer(**bart_bpe(), eos_token="</s>", bos_token="</s>"), GPT2),
    "gpt2 with bos": ("GPT2", bpe_with_bos, GPT2),
    "roberta": ("Roberta", lambda: transformers.RobertaTokenizer(**bart_bpe()), ROBERTA),
}


@torch.no_grad()
def probabilities(tokenizer: Any, model: Any, rows: list[tuple[str, ...]]) -> torch.Tensor:
    """Probabilities of the labels by transformers, (rows, labels)."""
    encoded = [tokenizer(*row, split_special_tokens=True, return_tensors="pt") for row in rows]
    return torch.cat([model(**row).logits.softmax(-1) for row in encoded])


@pytest.mark.parametrize("name", spread(CASES, 2))
def test_labels_of_texts_and_pairs(name: str, tmp_path: Path) -> None:
    """Texts are read in the tokenizer's frame: GPT-2 has none, RoBERTa puts two eos between the texts of a pair."""
    kind, make_tokenizer, settings = CASES[name]
    model_class, tokenizer = getattr(transformers, f"{kind}ForSequenceClassification"), make_tokenizer()
    torch.manual_seed(0)
    model = model_class(model_class.config_class(vocab_size=len(tokenizer), num_labels=3, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    model.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "run")
    run = load(tmp_path / "run", "cpu")
    for second in (None, TEXTS[::-1]):
        columns = [TEXTS] if second is None else [TEXTS, second]
        expected = probabilities(tokenizer, model, list(zip(*columns, strict=True)))
        ours = [[row[f"LABEL_{n}"] for n in range(3)] for row in run.classify(TEXTS, second)]
        torch.testing.assert_close(torch.tensor(ours), expected, atol=1e-5, rtol=1e-4)
    assert expected.std(dim=0).max() > 0.005


BART = {
    "d_model": D, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": HEADS, "encoder_ffn_dim": FF,
    "decoder_attention_heads": HEADS, "decoder_ffn_dim": FF, "max_position_embeddings": 64,
}  # fmt: skip
NLI = ["contradiction", "neutral", "entailment"]


@pytest.mark.slow
@pytest.mark.parametrize("names", [NLI, NLI[::-1]], ids=["last", "first"])
def test_labels_without_training_are_those_of_transformers(names: list[str], tmp_path: Path) -> None:
    """A model of natural-language inference judges hypotheses made of the labels."""
    tokenizer = transformers.BartTokenizer(**bart_bpe())
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    ids |= {"decoder_start_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
    torch.manual_seed(0)
    model = transformers.BartForSequenceClassification(transformers.BartConfig(**ids, **labels, **BART)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    model.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "run")
    run = load(tmp_path / "run", "cpu").reading_specials()
    pipeline = transformers.pipeline("zero-shot-classification", model=model, tokenizer=tokenizer, device="cpu")
    three = ["frogs", "a toad", "x"]
    for chosen, several in ((three, False), (three, True), (three[:1], False)):
        ours = run.classify(TEXTS, labels=chosen, template="It is {}.", multi_label=several)
        for text, row in zip(TEXTS, ours, strict=True):
            theirs = pipeline(text, chosen, hypothesis_template="It is {}.", multi_label=several)
            expected = dict(zip(theirs["labels"], theirs["scores"], strict=True))
            assert row == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ConfigError, match=r"--template 'It is it': expected a sentence with \{\} for the label"):
        run.classify(TEXTS, labels=["frogs"], template="It is it")


def test_an_exported_classifier_gives_the_same_labels_in_transformers(tmp_path: Path) -> None:
    """A decoder trained by weft expects eos after a text, which the exported tokenizer adds."""
    rows = [f"{text}\t{'odd' if n % 2 else 'even'}" for n, text in enumerate(LINES * 4)]
    (tmp_path / "rows.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    head = {"kind": "sequence", "labels": 2, "pooling": "last", "pooler": False, "bias": False, "dropout": 0.0}
    small = {"layers": 1, "d_model": D, "attention": {"heads": HEADS}, "feedforward": {"d_ff": FF}, "head": head}
    changes = {"objective": "classify", "model": small, "steps": 2, "batch.length": 64, "tokenizer": "byte"}
    data = str(tmp_path / "rows.tsv")
    run = weft.train("gpt-tiny", data=data, run=tmp_path / "run", changes=changes, log=lambda _: None)
    run.export("hf", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert isinstance(run.config.objective, Classify) and run.config.objective.labels is not None
    ours = [[row[label] for label in run.config.objective.labels] for row in run.classify(TEXTS)]
    expected = probabilities(tokenizer, model, [(text,) for text in TEXTS])
    torch.testing.assert_close(torch.tensor(ours), expected, atol=1e-5, rtol=1e-4)
