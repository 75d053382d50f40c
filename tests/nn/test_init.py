"""Initial weights: every part fills its own, and models can be built with empty weights."""

import subprocess
import sys
from typing import Any, get_args

import pytest
import torch
from torch import nn

from weft.config import kinds
from weft.models import config as models
from weft.models import head_config
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.presets import bert, gpt, llama, vaswani
from weft.nn import config as parts
from weft.nn.init import empty_weights
from weft.nn.linear import LowRank
from weft.nn.position_config import Position
from weft.training.weights import add_adapters

REQUIRED = {"d_ff": 24, "experts": 4, "labels": 3, "factor": 2.0}


def every_kind(union: Any) -> list[Any]:
    """One config of each kind that a setting may be, including kinds added later."""
    first = get_args(union)[0]
    members = kinds(first) if isinstance(first, type) else get_args(first)
    return [kind(**{key: REQUIRED[key] for key in kind.model_fields if key in REQUIRED}) for kind in members]


GPT, BERT = gpt(2, 16, 2, context=16, vocab_size=32), bert(2, 16, 2, vocab_size=32, context=16)
LLAMA = llama(2, 16, 2, d_ff=24, context=16, vocab_size=32)
VARIED: dict[str, tuple[Any, Any]] = {"position": (LLAMA, Position), "norm": (GPT, parts.Norm)}
VARIED |= {"feedforward": (GPT, parts.FeedForward), "init": (GPT, parts.Init), "head": (BERT, head_config.Head)}
SMALL: dict[str, Any] = {
    **{
        f"{field} {part.kind}": base.replace(**{field: part})
        for field, (base, union) in VARIED.items()
        for part in every_kind(union)
    },
    "untied": LLAMA.replace(head=head_config.LMHead(tied=False, bias=True)),
    "untied masked": BERT.replace(head=head_config.MaskedLMHead(tied=False)),
    "normalised queries": LLAMA.replace(attention={"heads": 2, "qk_norm": {"kind": "rms"}}),
    "seq2seq": vaswani(1, 16, 2, d_ff=24, dropout=0.0, vocab_size=32).replace(source_vocab_size=20),
    **{f"recurrent {cell}": models.Recurrent(vocab_size=20, d_model=8, cell=cell) for cell in ("elman", "lstm", "gru")},
    "bengio": models.Bengio(vocab_size=20, d_model=8, direct=True),
    "sigmoid": models.Recurrent(vocab_size=20, d_model=8, cell="elman", activation="sigmoid"),
    "tied recurrent": models.Recurrent(vocab_size=20, d_model=8, tied=True),
    "bahdanau": models.Bahdanau(vocab_size=20, d_model=8, source_vocab_size=9),
    **{f"elmo {d_cell}": models.ELMo(vocab_size=20, d_model=8, d_cell=d_cell) for d_cell in (None, 12)},
}


def test_every_kind_of_model_is_tested() -> None:
    untrained = models.NGram, models.Word2Vec, models.GloVe  # counted, or started by the formulas of their papers
    trained = [kind for kind in get_args(get_args(models.Model)[0]) if kind not in untrained]
    assert {settings.kind for settings in SMALL.values()} == {kind.model_fields["kind"].default for kind in trained}


def fill_with_nan(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)


def check_filled(model: nn.Module) -> None:
    assert not [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]


def reset(model: LanguageModel, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model.reset_parameters()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", SMALL)
def test_every_weight_is_filled(name: str) -> None:
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN, so that unset weights are found
    try:
        model = build(SMALL[name])
    finally:
        torch.use_deterministic_algorithms(False)
    check_filled(model)
    fill_with_nan(model)
    first = reset(model, 0)
    check_filled(model)
    fill_with_nan(model)
    torch.testing.assert_close(reset(model, 0), first, rtol=0, atol=0)


@pytest.mark.parametrize("name", SMALL)
def test_a_model_built_with_empty_weights_is_filled_like_any_other(name: str) -> None:
    expected = reset(build(SMALL[name]), 1)
    with empty_weights():
        model = build(SMALL[name])
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    fill_with_nan(model)
    torch.testing.assert_close(reset(model, 1), expected, rtol=0, atol=0)


def test_an_adapter_fills_its_weights() -> None:
    model = build(GPT)
    add_adapters(model, parts.LoRA(rank=2))
    fill_with_nan(model)
    reset(model, 0)
    check_filled(model)
    linear = model.get_submodule("decoder.blocks.0.attention.qkv")
    assert isinstance(linear, LowRank) and linear.a.abs().min() > 0 and not linear.b.any()


def test_a_part_that_does_not_fill_its_weights_is_refused() -> None:
    model = build(GPT)
    model.extra = nn.Bilinear(2, 2, 2)  # its reset_parameters takes no initialiser
    with pytest.raises(TypeError, match="reset_parameters"):
        model.reset_parameters()


def test_normal_weights_have_the_requested_deviation() -> None:
    torch.manual_seed(0)
    model = build(gpt(8, 128, 4, context=64, vocab_size=512).replace(init=parts.NormalInit(std=0.05)))
    deviations = {name: float(p.detach().std()) for name, p in model.named_parameters() if p.dim() == 2}
    for name, deviation in deviations.items():
        into_residual = name.endswith(("attention.out.weight", "feedforward.down.weight"))
        assert deviation == pytest.approx(0.05 / 4 if into_residual else 0.05, rel=0.1), name


def test_xavier_draws_stacked_matrices_separately() -> None:
    torch.manual_seed(0)
    model = build(llama(1, 64, 4, d_ff=96, context=16, vocab_size=32, kv_heads=1).replace(init=parts.XavierInit()))
    weight = model.get_parameter("decoder.blocks.0.attention.qkv.weight")
    queries, keys, _ = weight.detach().split([64, 16, 16])
    assert float(queries.abs().max()) == pytest.approx((6 / (64 + 64)) ** 0.5, rel=0.02)
    assert float(keys.abs().max()) == pytest.approx((6 / (16 + 64)) ** 0.5, rel=0.02)


@pytest.mark.slow
def test_building_with_empty_weights_does_not_import_the_compiler() -> None:
    imports = "import sys; from weft.models.build import build; from weft.models.presets import preset\n"
    build = "from weft.nn.init import empty_weights\nwith empty_weights(): build(preset('gpt-tiny'))\n"
    code = f"{imports}{build}sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
