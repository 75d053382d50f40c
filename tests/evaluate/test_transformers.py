"""The loss of a text equals that of a plain loop over Transformers' tokenizer and model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tests.decode.fast.helpers import sharpen
from tests.later import Later
from tests.spread import spread
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from weft.api.import_model import import_model
from weft.api.load import load

transformers = Later("transformers")

LINE = "The frog number {} sat by  the river.\n\nDie Kröte, it's said, sang 漢字 {}.\r\n\t- one\n"
TEXT = "".join(LINE.format(n, n * 37) for n in range(4))
SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 48},
    "LlamaForCausalLM": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    | {"num_attention_heads": 2, "max_position_embeddings": 48},
}
TEMPLATES = {"bpe": "$A", "sentencepiece": "<s> $A", "unigram": "<s> $A </s>", "wordpiece": "[CLS] $A [SEP]"}


def trained(kind: str) -> Any:
    """Return a tokenizer like GPT-2's, LLaMA-2's, T5's (with bos) or BERT's."""
    specials = ["[UNK]", "[CLS]", "[SEP]"] if kind == "wordpiece" else ["<unk>", "<s>", "</s>"]
    unk, bos, eos = specials
    made: Any
    if kind == "bpe":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=330, special_tokens=specials, initial_alphabet=letters)
    elif kind == "sentencepiece":
        made = tokenizers.Tokenizer(models.BPE(unk_token=unk, fuse_unk=True, byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[*specials, *bytes_], limit_alphabet=20)
    elif kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=specials, unk_token=unk)
    else:
        made = tokenizers.Tokenizer(models.WordPiece(unk_token=unk))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=specials)
    trainer.show_progress = False
    made.train_from_iterator([TEXT, TEXT], trainer)
    if kind == "sentencepiece":
        made.pre_tokenizer = None
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        ending = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(ending)
    ids = [(token, made.token_to_id(token)) for token in specials]
    made.post_processor = processors.TemplateProcessing(single=TEMPLATES[kind], special_tokens=ids)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token=unk, bos_token=bos, eos_token=eos)


@pytest.mark.parametrize("kind", spread(TEMPLATES, 2))
def test_the_loss_equals_that_of_a_naive_loop(kind: str, tmp_path: Path) -> None:
    tokenizer = trained(kind)
    ids: list[int] = tokenizer(TEXT)["input_ids"]
    made = getattr(transformers, "LlamaForCausalLM" if kind == "sentencepiece" else "GPT2LMHeadModel")
    torch.manual_seed(0)
    theirs = made(made.config_class(vocab_size=len(tokenizer), **SIZES[made.__name__])).eval()
    sharpen(theirs, 8.0)
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "run")
    (tmp_path / "text.txt").write_bytes(TEXT.encode())
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": TEXT}))
    run, length = load(tmp_path / "run"), 48
    assert length < len(ids) - 1
    # both strides with one tokenizer per model family; surprisals always use half a window
    for stride in (None, length // 2) if kind in ("bpe", "sentencepiece") else (length // 2,):
        expected = naive(theirs, ids, length, length if stride is None else stride)
        found = [run.evaluate(str(tmp_path / name), stride=stride) for name in ("text.txt", "text.jsonl")]
        for each in found:
            assert each["tokens"] == len(ids) - 1
            assert each["loss"] == pytest.approx(expected, rel=1e-5)
            assert each["bytes"] == len(TEXT.encode())
        assert found[0]["bits_per_byte"] == pytest.approx(found[1]["bits_per_byte"], rel=1e-6)
    scored = [each.nats for each in run.surprisal(TEXT) if each.nats is not None]
    assert len(scored) == len(ids) - 1
    assert sum(scored) / len(scored) == pytest.approx(expected, rel=1e-5)
    assert math.log(run.perplexity(TEXT)) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def naive(model: Any, ids: list[int], length: int, stride: int) -> float:
    """Mean −log p of all tokens but the first, each from the first window that reaches it."""
    costs: dict[int, float] = {}
    for start in range(0, len(ids), stride):
        logits = model(torch.tensor([ids[start : start + length]])).logits[0].double().log_softmax(-1)
        for position in range(start + 1, min(start + length, len(ids) - 1) + 1):
            costs.setdefault(position, -float(logits[position - start - 1, ids[position]]))
    assert len(costs) == len(ids) - 1
    return sum(costs.values()) / len(costs)
