"""Rotary scalings in GGUF files: linear scaling and YaRN have keys, those of LLaMA 3.1 and LongRoPE tensors."""

from collections.abc import Container

import torch
from torch import Tensor

from weft.config import Tree, validate
from weft.errors import InteropError
from weft.interop.gguf.file import Contents
from weft.interop.settings import Flat, Settings
from weft.interop.table import Special
from weft.models.config import Decoder
from weft.nn.position import Rotary as RotaryModule
from weft.nn.position_config import Llama3Scaling, LongRoPE, Rotary, Sizes

# tensors with divisors of rotary frequencies: LLaMA 3.1's scaling, and both lists of LongRoPE
FREQUENCIES, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (FREQUENCIES, SHORT, LONG)  # tensors that are settings
SCALED_BY = {FREQUENCIES: "llama3", LONG: "longrope"}  # tensor → the rotary scaling that it implies
# rotary scalings that are tensors → architectures in which llama.cpp supports them
IN_TENSORS = {"llama3": ("llama", "granite", "granitemoe", "llama4"), "longrope": ("phi3",)}
SCALINGS = "position.scaling."  # of the settings
YARN_RAMP = {"fast": 32.0, "slow": 1.0}  # our name of a number of turns → default


def _read_keys(settings: Settings, model: Flat) -> Flat:
    """Read the rotary scaling; that of LLaMA 3.1 is a tensor, not a key."""
    kind = settings.get("rope.scaling.type", "none")
    settings.integer("rope.scaling.original_context_length", 8192)
    if f"{SCALINGS}kind" in model:
        return {}
    if kind == "linear":
        return {f"{SCALINGS}kind": "linear", f"{SCALINGS}factor": settings.number("rope.scaling.factor")}
    if kind == "yarn":
        sizes = settings.number("rope.scaling.factor"), settings.integer("rope.scaling.original_context_length")
        ramp = (settings.number(f"rope.scaling.yarn_beta_{end}", turns) for end, turns in YARN_RAMP.items())
        values = dict(zip(("factor", "original_context", *YARN_RAMP), (*sizes, *ramp), strict=True))
        return {f"{SCALINGS}kind": "yarn", **{f"{SCALINGS}{name}": value for name, value in values.items()}}
    if kind != "none":
        raise settings.error("rope.scaling.type", f"weft has none, linear, yarn, and LLaMA 3.1's '{FREQUENCIES}'")
    return {}


def _write_keys(model: Flat) -> Tree:
    """Return the keys of a scaling, and of one that is stored as tensors the numbers that these lack."""
    kind = model.get(f"{SCALINGS}kind")
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": model[f"{SCALINGS}factor"]}
    if kind == "yarn":
        ramp = {
            f"rope.scaling.yarn_beta_{end}": model.get(f"{SCALINGS}{end}", turns) for end, turns in YARN_RAMP.items()
        }
        sizes = {"rope.scaling.original_context_length": model[f"{SCALINGS}original_context"]}
        return {"rope.scaling.type": "yarn", "rope.scaling.factor": model[f"{SCALINGS}factor"], **sizes, **ramp}
    if kind not in ("llama3", "longrope"):
        return {}
    factor = {"rope.scaling.attn_factor": model[f"{SCALINGS}attention_factor"]} if kind == "longrope" else {}
    return {"rope.scaling.original_context_length": model[f"{SCALINGS}original_context"], **factor}


SCALING = Special(_read_keys, _write_keys)


def scaling_of(names: Container[str]) -> Flat:
    """Return the kind of scaling that follows from the names of a file's tensors."""
    kind = next((kind for name, kind in SCALED_BY.items() if name in names), None)
    return {} if kind is None else {f"{SCALINGS}kind": kind}


def read_factors(settings: Settings, contents: Contents, model: Flat) -> Flat:
    """Return the settings of a scaling that the file has as tensors."""
    scaling = scaling_of(contents.tensors).get(f"{SCALINGS}kind")
    if scaling is None:
        return {}
    read = _llama3_scaling if scaling == "llama3" else _long_scaling
    return {f"{SCALINGS}{key}": value for key, value in read(settings, contents, model).items()}


def _llama3_scaling(settings: Settings, contents: Contents, model: Flat) -> Tree:
    """Rotary scaling of LLaMA 3.1, from the divisors of all frequencies."""
    stored = contents.tensor(FREQUENCIES).float()
    factor = float(stored.nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1.0))
    original = settings.integer("rope.scaling.original_context_length", 8192)
    for high in (4.0, 1.0):  # LLaMA 3.1's and Llama 4's
        scaling: Tree = Llama3Scaling(factor=factor, original_context=original, high=high).model_dump()
        position = validate(Rotary, {"base": model["position.base"], "scaling": scaling}, settings.location)
        expected = _frequency_factors(position, model["attention.d_head"])
        if stored.shape == expected.shape and torch.allclose(stored, expected, rtol=1e-4):
            return scaling
    raise InteropError(f"{contents.path}: '{FREQUENCIES}' is not a rotary scaling of LLaMA 3.1's kind")


def _long_scaling(settings: Settings, contents: Contents, model: Flat) -> Tree:
    if SHORT not in contents.tensors:
        raise InteropError(f"{contents.path}: it has a tensor '{LONG}', but no '{SHORT}'")
    lists = {
        side: tuple(float(str(factor)) for factor in contents.tensor(name).float().flatten().numpy())
        for side, name in (("short", SHORT), ("long", LONG))
    }
    original = settings.integer("rope.scaling.original_context_length", model["context"])
    attention = settings.number("rope.scaling.attn_factor", 1.0)
    return {**lists, "original_context": original, "attention_factor": attention}


def factor_tensors(model: Decoder) -> dict[str, Tensor]:
    """Return the tensors of a model's scaling, if it is stored as tensors."""
    match model.position:
        case Rotary(scaling=LongRoPE() as scaling):
            return {LONG: torch.tensor(scaling.long), SHORT: torch.tensor(scaling.short)}
        case Rotary(scaling=Llama3Scaling()) as position:
            return {FREQUENCIES: _frequency_factors(position, model.d_head)}
    return {}


def _frequency_factors(position: Rotary, d_head: int) -> Tensor:
    """Divisors of the rotary frequencies, (d_head/2,): GGUF's form of LLaMA 3.1's scaling."""
    cpu, sizes = torch.device("cpu"), Sizes(d_model=d_head, heads=1, d_head=d_head, context=1, causal=True, layers=1)
    plain = RotaryModule(position.replace(scaling=None), sizes).frequencies(1, cpu)
    return plain / RotaryModule(position, sizes).frequencies(1, cpu)
