"""The weights that training starts from: every part fills its own, and models can be built without any."""

import subprocess
import sys
from typing import Any, get_args

import pytest
import torch
from torch import nn

from weft.config import Config, kinds
from weft.models import config as models
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.presets import bert, gpt, llama, vaswani
from weft.nn import config as parts
from weft.nn.init import empty_weights
from weft.nn.position_config import Position
from weft.training.weights import add_adapters

REQUIRED = {"d_ff": 24, "labels": 3, "factor": 2.0}


def each(union: Any) -> list[Config]:
    """One of each kind that a setting may be; a new kind is tested without a line here."""
    first = get_args(union)[0]
    members = kinds(first) if isinstance(first, type) else get_args(first)
    return [kind(**{key: REQUIRED[key] for key in kind.model_fields if key in REQUIRED}) for kind in members]


def named(settings: Any) -> str:
    return f"{settings.kind}"


SMALL: dict[str, Config] = {
    **{f"position {named(p)}": llama(2, 16, 2, 24, 16, vocab_size=32).replace(position=p) for p in each(Position)},
    **{f"norm {named(n)}": gpt(2, 16, 2, 16, 32).replace(norm=n) for n in each(parts.Norm)},
    **{f"feedforward {named(f)}": gpt(2, 16, 2, 16, 32).replace(feedforward=f) for f in each(parts.FeedForward)},
    **{f"init {named(i)}": gpt(2, 16, 2, 16, 32).replace(init=i) for i in each(parts.Init)},
    **{f"head {named(h)}": bert(2, 16, 2, 32, 16).replace(head=h) for h in each(models.Head)},
    "untied": llama(1, 16, 2, 24, 16, vocab_size=32).replace(head=models.LMHead(tied=False, bias=True)),
    "untied masked": bert(1, 16, 2, 32, 16).replace(head=models.MaskedLMHead(tied=False)),
    "normed queries": llama(1, 16, 2, 24, 16, vocab_size=32).replace(
        attention={"heads": 2, "qk_norm": {"kind": "rms"}}
    ),
    "seq2seq": vaswani(1, 16, 2, 24, 0.0, vocab_size=32).replace(source_vocab_size=20),
    **{f"recurrent {cell}": models.Recurrent(vocab_size=20, d_model=8, cell=cell) for cell in ("elman", "lstm", "gru")},
    "sigmoid": models.Recurrent(vocab_size=20, d_model=8, cell="elman", activation="sigmoid"),
    "tied recurrent": models.Recurrent(vocab_size=20, d_model=8, tied=True),
    "bahdanau": models.Bahdanau(vocab_size=20, d_model=8, source_vocab_size=9),
}


def test_every_kind_of_model_is_here() -> None:
    here = {settings.kind for settings in SMALL.values()}  # type: ignore[attr-defined]
    models_of_weights = [kind for kind in get_args(get_args(models.Model)[0]) if kind is not models.NGram]
    assert here == {kind.model_fields["kind"].default for kind in models_of_weights}


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
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN, so that a weight that is not set is seen
    try:
        model = build(SMALL[name])  # type: ignore[arg-type]
    finally:
        torch.use_deterministic_algorithms(False)
    check_filled(model)
    fill_with_nan(model)
    first = reset(model, 0)
    check_filled(model)
    fill_with_nan(model)
    again = reset(model, 0)
    assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("name", SMALL)
def test_a_model_built_without_memory_is_filled_like_any_other(name: str) -> None:
    expected = reset(build(SMALL[name]), 1)  # type: ignore[arg-type]
    with empty_weights():
        model = build(SMALL[name])  # type: ignore[arg-type]
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    fill_with_nan(model)
    found = reset(model, 1)
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in expected.items()}
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_an_adapter_fills_its_weights() -> None:
    model = build(gpt(1, 16, 2, 16, 32))
    add_adapters(model, parts.LoRA(rank=2))
    fill_with_nan(model)
    reset(model, 0)
    check_filled(model)
    linear = model.get_submodule("decoder.blocks.0.attention.qkv")
    assert linear.a.abs().min() > 0  # type: ignore[union-attr,operator]
    assert not linear.b.any()  # type: ignore[union-attr,operator]


def test_a_part_that_does_not_fill_its_weights_is_found_at_once() -> None:
    model = build(gpt(1, 16, 2, 16, 32))
    model.extra = nn.Bilinear(2, 2, 2)  # its own reset_parameters knows nothing of a model's settings
    with pytest.raises(TypeError, match="reset_parameters"):
        model.reset_parameters()


def test_normal_weights_have_the_deviation_that_is_asked_for() -> None:
    torch.manual_seed(0)
    model = build(gpt(8, 128, 4, 64, 512).replace(init=parts.NormalInit(std=0.05)))
    deviations = {name: float(p.detach().std()) for name, p in model.named_parameters() if p.dim() == 2}
    for name, deviation in deviations.items():
        shrunk = name.endswith(("attention.out.weight", "feedforward.down.weight"))
        assert deviation == pytest.approx(0.05 / 4 if shrunk else 0.05, rel=0.1), name


def test_xavier_draws_stacked_matrices_one_by_one() -> None:
    torch.manual_seed(0)
    model = build(llama(1, 64, 4, 96, 16, vocab_size=32, kv_heads=1).replace(init=parts.XavierInit()))
    weight = model.get_parameter("decoder.blocks.0.attention.qkv.weight")
    queries, keys, _ = weight.detach().split([64, 16, 16])
    assert float(queries.abs().max()) == pytest.approx((6 / (64 + 64)) ** 0.5, rel=0.02)
    assert float(keys.abs().max()) == pytest.approx((6 / (16 + 64)) ** 0.5, rel=0.02)


@pytest.mark.slow
def test_building_with_empty_weights_does_not_import_the_compiler() -> None:
    code = (
        "import sys; from weft.models.build import build; from weft.models.presets import preset\n"
        "from weft.nn.init import empty_weights\n"
        "with empty_weights(): build(preset('gpt-tiny'))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
