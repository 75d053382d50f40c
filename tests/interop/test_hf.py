"""All Hugging Face families, read and written: logits to 1e-5, files byte for byte."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.interop.hf_models import (
    CASES,
    GPT2,
    ROTARY,
    D,
    F,
    H,
    V,
    a_folder,
    built,
    difference,
    edit,
    exported,
    filled,
    fresh_model,
    gap,
    greedy,
    hf_models,
    same_files,
    saved,
    stepped,
    theirs,
)
from tests.spread import slow, spread

from weft.data.batch import Source
from weft.decode.config import Sampling
from weft.decode.prompt import Prompt
from weft.decode.speculative import Draft, LookUp, speculate
from weft.errors import InteropError
from weft.interop.bundle import ModelBundle, lazy_weights
from weft.interop.families.known import FAMILIES
from weft.interop.hf import hf
from weft.models.build import build
from weft.models.config import Decoder
from weft.models.presets import bert, gpt, llama, preset, vaswani
from weft.nn.config import Attention, Gated
from weft.nn.position_config import Concatenated, Sinusoidal

# cases that another family expresses: written as that one, unless imported as themselves
WRITTEN_AS = {
    "xlm-roberta": "RobertaForMaskedLM",
    "xlm-roberta-causal": "RobertaForCausalLM",
    "camembert": "RobertaForTokenClassification",
    "electra-wide": "BertForMaskedLM",
    "seed_oss": "Qwen2ForCausalLM",
    "seed_oss-biases": "LlamaForCausalLM",
    "ministral3": "MistralForCausalLM",
    "cwm": "SmolLM3ForCausalLM",
    "helium": "GlmForCausalLM",
    "gpt_bigcode-heads": "GPT2LMHeadModel",
    "codegen": "GPTJForCausalLM",
    "ernie4_5": "GlmForCausalLM",
    "ministral": "SmolLM3ForCausalLM",
    "mt5": "T5ForConditionalGeneration",
    "mt5-labels": "T5ForSequenceClassification",
}
# a case of each module of families/, and of what is unlike all others; `make test-all` runs the rest
FAST = {
    *("gpt2", "llama3", "qwen3", "gemma2", "phi3", "olmo2", "opt", "gpt_neox", "gptj", "falcon", "bloom", "cohere"),
    *("gpt_bigcode", "mixtral", "gpt_oss", "deepseek_v2", "bert-masked", "electra", "albert", "modernbert"),
    *("deberta-v2", "longformer", "esm-learned", "bart", "t5", "t5gemma"),
}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
NOT_STEPPED = {"marian-two-tables", "mt5"}  # decoded like marian and t5-v1.1


# ---- all families


@pytest.mark.parametrize("case", [case if case in FAST else slow(case) for case in CASES])
def test_import_and_export(case: str, tmp_path: Path, transformers_warnings: list[str]) -> None:
    name, settings = CASES[case]
    other = saved(tmp_path / "theirs", name, settings)
    bundle = hf.read(tmp_path / "theirs")
    ours = built(bundle)
    assert difference(ours, other) <= 1e-5
    if isinstance(bundle.model, Decoder) and bundle.model.head.kind == "lm":
        tokens = torch.randint(V, (2, 12))
        with torch.no_grad():
            assert gap(stepped(ours, tokens), ours(tokens)) <= 1e-5
        if "-" not in case:  # the first model of a family also generates the same text
            expected = other.generate(tokens[:1, :5], max_new_tokens=5, **GREEDY)[0, 5:].tolist()
            assert greedy(ours, tokens[:1, :5], 5) == expected

    assert same_files(tmp_path / "theirs", exported(bundle, tmp_path / "back"))

    # as if trained by weft, without notes of an import
    fresh = exported(ModelBundle(bundle.model, bundle.weights, tokenizer=None, origin="here"), tmp_path / "fresh")
    architecture = json.loads((fresh / "config.json").read_text())["architectures"][0]
    assert architecture == WRITTEN_AS.get(case, name)
    transformers_warnings.clear()
    loaded, info = getattr(hf_models, architecture).from_pretrained(fresh, output_loading_info=True)
    assert not any(info.values()), info
    assert transformers_warnings == []
    assert difference(ours, loaded.eval()) <= 1e-5
    assert hf.read(fresh).model == bundle.model


@pytest.mark.parametrize(
    "case",
    spread(
        (
            case
            for case, (_, keys) in CASES.items()
            if "decoder_start_token_id" in keys and case not in NOT_STEPPED and "labels" not in case
        ),
        2,
    ),
)
def test_decoding_step_by_step_equals_transformers(case: str, tmp_path: Path) -> None:
    """From the start token and the forced first token, with a KV cache."""
    other = saved(tmp_path, *CASES[case])
    ours = built(hf.read(tmp_path))
    torch.manual_seed(2)
    tokens = torch.randint(3, 50, (2, 9))
    mask = torch.arange(9)[None] < torch.tensor([9, 6])[:, None]
    expected = other.generate(
        tokens, attention_mask=mask.long(), do_sample=False, num_beams=1, max_new_tokens=8, forced_bos_token_id=7,
        forced_eos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    state, text, logits = ours.start(2, 9, Source(tokens, mask)), expected[:, :2], []
    with torch.no_grad():
        while len(text[0]) < 9:
            logits.append(ours.step(text[:, state.longest :], state))
            text = torch.cat((text, logits[-1][:, -1:].argmax(-1)), dim=1)
        assert gap(torch.cat(logits, dim=1), ours(text[:, :-1], source=Source(tokens, mask))) <= 1e-5
    assert expected[0, :2].tolist() == [other.config.decoder_start_token_id, 7]
    assert torch.equal(text, expected)


def test_longrope_switches_factors_in_a_long_text(tmp_path: Path) -> None:
    other = saved(tmp_path, *CASES["phi3-longrope"])
    ours, tokens = built(hf.read(tmp_path)), torch.randint(V, (1, 20))
    with torch.no_grad():
        assert gap(ours(tokens), other(tokens).logits) <= 1e-5
        # the logits of each step are those of reading the whole text so far
        for length, logits in enumerate(stepped(ours, tokens).unbind(1), 1):
            assert length < 3 or gap(logits, other(tokens[:, :length]).logits[:, -1]) <= 1e-5
    for length in (5, 14):
        expected = other.generate(tokens[:, :length], max_new_tokens=12, **GREEDY)[0, length:].tolist()
        assert expected == greedy(ours, tokens[:, :length], 12)
        for drafter in (LookUp(2), Draft(ours, Prompt(tokens[0, :length].tolist()), Sampling(max_tokens=12))):
            settings = Sampling(max_tokens=12, temperature=0.0)
            chunks = speculate(ours, tokens[0, :length].tolist(), settings, drafter=drafter)
            assert [chunk.id for chunk in chunks] == expected


def test_longrope_switches_factors_row_by_row(tmp_path: Path) -> None:
    """Each row is as if alone, also after truncation to a length with the short factors."""
    saved(tmp_path, *CASES["phi3-longrope"])
    ours, tokens = built(hf.read(tmp_path)), torch.randint(V, (3, 20))
    lengths, state = torch.tensor([9, 15, 12]), ours.start(3, 20)
    with torch.no_grad():
        ours.step(tokens[:, :15], state, lengths)
        for step in range(1, 6):
            new = tokens.gather(1, state.lengths[:, None])
            logits = ours.step(new, state)[:, 0]
            for row, length in enumerate((lengths + step).tolist()):
                assert gap(logits[row], ours(tokens[row : row + 1, :length])[0, -1]) <= 1e-5
        state.reorder(torch.tensor([1, 0]))
        state.truncate(13)
        logits = ours.step(tokens[[1, 0], 13:15], state)
        assert gap(logits, ours(tokens[[1, 0], :15])[:, 13:]) <= 1e-5


def test_every_family_is_tested() -> None:
    assert all(any(f"{case}-".startswith(f"{kind}-") for case in CASES) for kind in FAMILIES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_dtypes_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    """Also if a file mixes dtypes, and a joined matrix has parts of two."""
    model: Any = theirs("LlamaForCausalLM", ROTARY).to(dtype)
    model.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/model.safetensors"
    tensors = load_file(file)
    for name in ("model.norm.weight", "model.layers.1.self_attn.k_proj.weight"):
        tensors[name] = tensors[name].float() + 1e-5
    save_file(tensors, file, {"format": "pt"})
    bundle = hf.read(tmp_path / "theirs")
    assert bundle.weights["embedding.weight"]().dtype == dtype
    assert bundle.weights["decoder.norm.weight"]().dtype == torch.float32
    assert same_files(tmp_path / "theirs", exported(bundle, tmp_path / "back"))
    wide = exported(bundle, tmp_path / "wide", dtype="fp32")
    assert {tensor.dtype for tensor in load_file(wide / "model.safetensors").values()} == {torch.float32}
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"


def test_shards(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    saved(folder, "GPT2LMHeadModel", GPT2, max_shard_size="30KB")
    first, second, *others = sorted(folder.glob("*.safetensors"))
    assert others
    bundle = hf.read(folder)
    assert same_files(folder, exported(bundle, tmp_path / "back"))
    narrow = exported(bundle, tmp_path / "narrow", dtype="bf16")
    assert [file.name for file in narrow.glob("*.safetensors*")] == ["model.safetensors"]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second, {"format": "pt"})
    with pytest.raises(InteropError, match=f"'{name}' is in {first.name} too"):
        hf.read(folder)


def test_file_names_in_notes_cannot_leave_the_folder(tmp_path: Path) -> None:
    bundle = hf.read(a_folder(tmp_path / "theirs"))
    ((_, header),) = bundle.notes["headers"].items()
    hostile = replace(bundle, notes={**bundle.notes, "headers": {"../out.safetensors": header}})
    with pytest.raises(InteropError, match="not the name of a"):
        exported(hostile, tmp_path / "back")
    assert not (tmp_path / "out.safetensors").exists()


# ---- models trained by weft


@pytest.mark.parametrize(
    ("name", "family"),
    [("gpt-tiny", "gpt2"), ("llama-tiny", "llama"), ("transformer++", "llama"), ("bert-tiny", "bert")],
)
def test_families_of_presets(name: str, family: str) -> None:
    model: Any = preset(name)
    small = {"vocab_size": V, "d_model": D, "layers": 1, "context": 16}
    settings = model.replace(**small, attention={**model.attention.model_dump(), "heads": 2})
    assert hf.choose(fresh_model(settings)).kind == family


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "window": (
        lambda: gpt(1, D, H, context=32, vocab_size=V).replace(attention=Attention(heads=H, bias="all", window=4)),
        r"no Hugging Face family .*\.window = 4, where GPT-2 has None; .* without model\.attention\.window$",
    ),
    "sinusoids": (
        lambda: vaswani(1, D, H, d_ff=F, dropout=0.0, vocab_size=V, context=32).replace(
            position=Sinusoidal(amplitude=0.5).model_dump()
        ),
        r"model\.position\.amplitude = 0\.5, where Marian has 1\.0; .* with model\.position\.amplitude=1\.0$",
    ),
    "values": (
        lambda: llama(1, D, H, d_ff=F, context=32, vocab_size=V).replace(attention=Attention(heads=H, d_v=5)),
        r"model\.attention\.d_v = 5, where LLaMA has None; .* without model\.attention\.d_v$",
    ),
    "swish": (
        lambda: llama(1, D, H, d_ff=F, context=32, vocab_size=V).replace(feedforward=Gated(d_ff=F, beta=2.0)),
        r"model\.feedforward\.beta = 2\.0, where LLaMA has 1\.0; .* with model\.feedforward\.beta=1\.0$",
    ),
    "concatenated": (
        lambda: gpt(1, D, H, context=32, vocab_size=V).replace(position=Concatenated()),
        r"model\.position\.kind = 'concatenated', where GPT-2 has 'learned'; .* with model\.position\.kind=learned$",
    ),
    "no residual": (
        lambda: llama(1, D, H, d_ff=F, context=32, vocab_size=V).replace(residual=False),
        r"model\.residual = False, where LLaMA has True; .* with model\.residual=true$",
    ),
    "recurrent": (lambda: preset("lstm"), r"model\.kind = 'recurrent': Hugging Face has no family for it"),
    "head": (
        lambda: bert(1, D, H, vocab_size=V, context=32).replace(
            head={"kind": "sequence", "labels": 2, "pooling": "mean"}
        ),
        r"model\.head\.pooling = 'mean', where BERT has 'first'; .* with objective\.pooling=first$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_no_family_can_express_is_refused(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    with pytest.raises(InteropError, match=message):
        exported(fresh_model(make()), tmp_path / "out")


@pytest.mark.parametrize(
    "changes", [{}, {"placement": "pre", "encoder_layers": 3}, slow({"source_vocab_size": 55})], ids=str
)
def test_interleaved_sinusoids_are_reordered(changes: dict[str, Any], tmp_path: Path) -> None:
    """The 2017 Transformer is written as Marian or PEGASUS, which have all sines first."""
    settings = vaswani(2, D, H, d_ff=F, dropout=0.0, vocab_size=V, context=32).replace(**changes)
    ours = filled(build(settings))
    weights = ours.state_dict()
    bundle = ModelBundle(settings, lazy_weights(weights.__getitem__, weights), tokenizer=None, origin="here")
    folder = exported(bundle, tmp_path / "out")
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    loaded = getattr(hf_models, name).from_pretrained(folder).eval()
    assert difference(ours, loaded) <= 1e-5
    assert difference(built(hf.read(folder)), loaded) <= 1e-5


UNKNOWN = {
    "BitNetForCausalLM": r"'bitnet': .* no tensor 'model\.layers\.0\.self_attn\.attn_sub_norm\.weight'$",
    "VaultGemmaForCausalLM": r"'vaultgemma': .* needs a tensor 'model\.layers\.0\.post_attention_layernorm\.weight'$",
    "DiffLlamaForCausalLM": r"'diffllama': .* LLaMA \('llama'\), which has no lambda_std_dev; which has no tensor",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_family_is_compared_with_the_nearest(name: str, tmp_path: Path) -> None:
    saved(tmp_path, name, {**ROTARY, "num_hidden_layers": 4, "head_dim": 8})
    with pytest.raises(InteropError, match=UNKNOWN[name]):
        hf.read(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("t5gemma2", "T5Gemma2ForConditionalGeneration", "weft reads; it needs a decoder that .* in one attention"),
        ("t5gemma", "T5GemmaForSequenceClassification", "of T5Gemma weft reads T5GemmaForConditionalGeneration"),
        ("led", "LEDForQuestionAnswering", "of LED weft reads LEDForConditionalGeneration"),
    ],
)
def test_a_refusal_says_what_the_model_needs(kind: str, name: str, message: str, tmp_path: Path) -> None:
    saved(tmp_path, "LlamaForCausalLM", ROTARY)
    edit(tmp_path, model_type=kind, architectures=[name])
    with pytest.raises(InteropError, match=message):
        hf.read(tmp_path)


def test_an_unknown_family_with_the_keys_and_tensors_of_another(tmp_path: Path) -> None:
    saved(tmp_path, "LlamaForCausalLM", ROTARY)
    edit(tmp_path, model_type="other", architectures=["OtherForCausalLM"])
    with pytest.raises(
        InteropError, match=r"'other': .* has the same keys and tensors: the two must differ in their code"
    ):
        hf.read(tmp_path)


LIKE_ANOTHER = ["seed_oss", "seed_oss-biases", "ministral3", "cwm", "helium", "ernie4_5", "ministral"]


@pytest.mark.parametrize("case", spread([*LIKE_ANOTHER, "gpt_bigcode-heads", "codegen"], 2))
def test_a_family_like_another_keeps_its_name_after_import(case: str, tmp_path: Path) -> None:
    saved(tmp_path / "theirs", *CASES[case])
    bundle = hf.read(tmp_path / "theirs")
    changed = {**bundle.notes["config"], "rms_norm_eps": 0.5}  # differs from the model, so that settings are new
    fresh = exported(replace(bundle, notes={**bundle.notes, "config": changed}, files={}), tmp_path / "fresh")
    loaded = getattr(hf_models, CASES[case][0]).from_pretrained(fresh).eval()
    assert difference(built(bundle), loaded) <= 1e-5
    assert hf.read(fresh).model == bundle.model


def test_the_context_of_ministral_ends_where_its_queries_get_a_factor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, settings = CASES["ministral3"]
    other = saved(tmp_path, name, {**settings, "max_position_embeddings": 96})
    ours, tokens = built(hf.read(tmp_path)), torch.randint(V, (1, 40))
    assert isinstance(ours.config, Decoder) and ours.config.context == 32
    assert "no factor of queries beyond 32 tokens; the context ends there" in capsys.readouterr().err
    with torch.no_grad():
        assert gap(ours(tokens[:, :32]), other(tokens).logits[:, :32]) <= 1e-5
