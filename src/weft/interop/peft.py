"""Low-rank adapters as PEFT keeps them: adapter_config.json and adapter_model.safetensors, in and out.

There an adapter stands beside each matrix of transformers, `….q_proj.lora_A.weight` (rank, in) and `….lora_B.weight`
(out, rank). Here matrices that read the same lie in one, each with an A and a B of its own (`LowRank`). So what
stands beside one of three is 0 beside the others; and what stands beside three that are one matrix there has the same A
three times. Where these A have become different, they are written as one of three times the rank.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.config import Tree, validate
from weft.errors import InteropError
from weft.interop.bundle import ModelBundle
from weft.interop.hf import hf, weights
from weft.interop.hf.tokenizer import json_bytes
from weft.interop.license import in_folder
from weft.interop.settings import Settings, Transformer
from weft.interop.weight_map import Conversions, Part, conversions, their_shapes, to_ours, to_theirs
from weft.models.build import build
from weft.models.config import EncoderDecoder
from weft.nn.block import block_linears
from weft.nn.config import LoRA
from weft.nn.init import empty_weights
from weft.nn.linear import Linear
from weft.storage.safetensors_header import parse_header
from weft.storage.tensors import FLOATS, NAMES, LazyWeights, write_with_header
from weft.storage.tensors import write as write_tensors
from weft.storage.untrusted import read_bytes, read_object

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
LOW_RANK = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
# settings that change what an adapter computes, with the one value that weft has
ONLY = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "use_qalora": False, "lora_bias": False,
    "layer_replication": None,
}  # fmt: skip
TASKS = {"lm": "CAUSAL_LM", "sequence": "SEQ_CLS", "token": "TOKEN_CLS", "span": "QUESTION_ANS"}


@dataclass(frozen=True)
class Adapter:
    """An adapter by weft's names: `….a`, `….b` and, if it trained the head, `output.…`."""

    settings: LoRA
    weights: Mapping[str, Tensor]
    files: Mapping[str, bytes] = field(default_factory=dict)  # as they were, for an export
    notes: Tree = field(default_factory=dict)


def recognises(path: Path) -> bool:
    """Whether a path is a folder with an adapter."""
    return (path / CONFIG).is_file()


def base_of(folder: Path) -> str:
    """The name that an adapter, if it is one that weft can use, gives to the model that it was trained for."""
    name = _config(folder).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else "a model that it does not name"


def _config(folder: Path) -> Settings:
    settings = Settings(read_object(folder / CONFIG), str(folder / CONFIG))
    settings.only(**ONLY)
    return settings


def read(folder: Path, base: ModelBundle) -> Adapter:
    """The adapter in a folder, for the model `base`."""
    settings = _config(folder)
    tensors = weights.listing(folder, WEIGHTS, PICKLED)
    table = _table(base)
    places = {part.name: (name, part) for name, parts in table.items() for part in parts}
    pairs: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name, stored in tensors.items():
        known = name.removeprefix(PREFIX)
        found = LOW_RANK.fullmatch(known)
        target = f"{found[1]}.weight" if found else known
        fits = target in places and (found is not None or places[target][0].startswith("output."))
        if not fits or stored.dtype not in FLOATS:
            raise InteropError(f"{stored.file}: '{name}' {list(stored.shape)} has no place beside the base's matrices")
        if found:
            pairs.setdefault(target, {})[found[2]] = stored.read()
        else:
            others[known] = stored.read()
    lora = _settings(settings, pairs, others)
    ours: dict[str, Tensor] = {}
    linears = _linears(base)
    for name in dict.fromkeys(places[target][0] for target in pairs):
        own = {part: pairs[part.name] for part in table[name] if part.name in pairs}
        if name.removesuffix(".weight") not in linears:
            raise InteropError(f"{folder / WEIGHTS}: '{next(iter(own)).name}': adapters stand beside layers in blocks")
        ours |= _ours(name.removesuffix(".weight"), linears[name.removesuffix(".weight")], own, lora, settings)
    adapted = [name.removesuffix(".a") for name in ours if name.endswith(".a")]
    patterns = tuple(_shortened(adapted, linears, lambda name: re.sub(r"^.*\.blocks\.\d+\.", "*.", name)))
    if not patterns:
        raise InteropError(f"{folder / WEIGHTS}: it holds no adapter")
    if others:
        ours |= _head(table, base, others, str(folder / WEIGHTS))
    kept: Tree = {"config": dict(settings.tree), "headers": weights.headers(tensors)}
    files, notes = {CONFIG: read_bytes(folder / CONFIG)}, {"peft": kept, "license": in_folder(folder)}
    return Adapter(lora.replace(targets=patterns), ours, files, notes)


def _settings(settings: Settings, pairs: Mapping[str, Mapping[str, Tensor]], others: Mapping[str, Tensor]) -> LoRA:
    for target, pair in pairs.items():
        if len(pair) != 2 or pair["A"].dim() != 2 or pair["B"].dim() != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            shapes = {kind: list(tensor.shape) for kind, tensor in pair.items()}
            raise InteropError(f"{settings.place}: beside '{target}' stand {shapes}; expected an A and a B of one rank")
    rank = max((len(pair["A"]) for pair in pairs.values()), default=1)
    alpha, dropout = _scale(settings) * rank, settings.number("lora_dropout", 0.0)
    return validate(LoRA, {"rank": rank, "alpha": alpha, "dropout": dropout, "head": bool(others)}, settings.place)


def _scale(settings: Settings, module: str = "", rank: int | None = None) -> float:
    """What B A is multiplied by: alpha/rank, or with rslora alpha/√rank (Kalajdzievski 2023); of a module its own."""
    alpha, rank = settings.number("lora_alpha", 8.0), rank or settings.whole("r", 8)
    given = settings.get("alpha_pattern") or {}
    if not isinstance(given, dict):
        raise settings.error("alpha_pattern", "expected a table of modules with a number each")
    for pattern, value in given.items():
        # peft takes them as expressions, which a stranger's file may make slow: only names are understood here
        name = pattern.removeprefix("^").removesuffix("$")
        if not re.fullmatch(r"[\w.]+", name):
            raise settings.error("alpha_pattern", "weft reads the names of modules there, not expressions")
        if module == name or module.endswith(f".{name}"):
            alpha = Settings({name: value}, f"{settings.place}: alpha_pattern").number(name)
    return alpha / (rank**0.5 if settings.flag("use_rslora", False) else rank)


def _ours(
    name: str, linear: Linear, own: Mapping[Part, Mapping[str, Tensor]], lora: LoRA, settings: Settings
) -> dict[str, Tensor]:
    """A and B of one of our layers, from those beside the parts of it that have some."""
    wide, like = linear.in_features, next(iter(own.values()))["A"]
    a, b = like.new_zeros(len(linear.heights) * lora.rank, wide), like.new_zeros(linear.out_features, lora.rank)
    start = 0
    for number, height in enumerate(linear.heights):
        for part, pair in own.items():
            if not part.start <= start < part.stop:
                continue
            rank, up = len(pair["A"]), pair["B"]
            if len(up) != part.stop - part.start or pair["A"].shape[1] != wide:
                shapes = [list(pair[kind].shape) for kind in "AB"]
                raise InteropError(f"{settings.place}: beside '{part.name}' {list(part.shape)} stand {shapes}")
            factor = _scale(settings, part.name.removesuffix(".weight"), rank) / (lora.alpha / lora.rank)
            up = part.layout.to_ours(up) if _by_rows(part) else up
            rows = up[start - part.start : start - part.start + height]
            a[number * lora.rank : number * lora.rank + rank] = pair["A"]
            b[start : start + height, :rank] = rows if abs(factor - 1) < 1e-9 else rows * factor
        start += height
    return {f"{name}.a": a, f"{name}.b": b}


def _by_rows(part: Part) -> bool:
    """Whether the layout moves rows; one that is stored transposed has its adapter as any other."""
    return part.layout.shape((part.stop - part.start, 3)) == (part.stop - part.start, 3)


def _shortened(names: list[str], every: Iterable[str], short: Callable[[str], str]) -> list[str]:
    """The names in their short form where that means no others of `every`; else as they are."""
    others = {short(name) for name in every if name not in names}
    return list(dict.fromkeys(name if short(name) in others else short(name) for name in names))


def _head(table: Conversions, base: ModelBundle, saved: Mapping[str, Tensor], place: str) -> dict[str, Tensor]:
    """The head that was trained along; what of it was not saved is the base's."""
    own = to_theirs(table, base.weights)
    head = {name: parts for name, parts in table.items() if name.startswith("output.")}
    shapes = their_shapes(head) | {name: tuple(tensor.shape) for name, tensor in saved.items()}
    made = to_ours(head, shapes, lambda name: saved[name] if name in saved else own[name](), place)
    return {name: read() for name, read in made.items()}


def _table(base: ModelBundle) -> Conversions:
    family = hf.choose(base)
    assert isinstance(base.model, Transformer)
    return conversions(family.rules(base.model), base.model)


def _linears(base: ModelBundle) -> dict[str, Linear]:
    with empty_weights():
        return block_linears(build(base.model))


def write(folder: Path, base: ModelBundle, adapter: Adapter, base_name: str) -> int:
    """Fill an empty folder with an adapter of the model `base`, as `peft` reads it; how many parameters it has.

    One that was read from such a folder, and has the same sizes still, gets back its names, dtypes and settings.
    """
    table, linears, scale = _table(base), _linears(base), adapter.settings.alpha / adapter.settings.rank
    low_rank: dict[str, tuple[Tensor, Tensor]] = {}
    head: dict[str, Tensor] = {}
    for name, tensor in adapter.weights.items():
        if name.endswith(".a") and name.removesuffix(".a") in linears:
            layer = name.removesuffix(".a")
            low_rank |= _theirs(table[f"{layer}.weight"], linears[layer].heights, tensor, adapter.weights[f"{layer}.b"])
        elif name.startswith("output."):
            head |= {part.name: part.of(tensor) for part in table[name]}
    heads = _modules(head)
    tensors = {f"{PREFIX}{name}": tensor for name, tensor in head.items()}
    for name, (a, b) in low_rank.items():
        tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
    lazy: LazyWeights = {name: partial(Tensor.contiguous, tensor) for name, tensor in tensors.items()}
    kept = adapter.notes.get("peft", {})
    ranks = {name: len(a) for name, (a, _) in low_rank.items()}
    count = sum(tensor.numel() for tensor in tensors.values())
    if kept.get("headers") and _same(kept, tensors, ranks, scale):
        write_with_header(folder / WEIGHTS, next(iter(kept["headers"].values())), lazy)
        (folder / CONFIG).write_bytes(adapter.files[CONFIG])
        return count
    write_tensors(folder / WEIGHTS, lazy)
    usual = max(ranks.values(), key=lambda rank: list(ranks.values()).count(rank))
    other = {name: rank for name, rank in ranks.items() if rank != usual}
    names = [part.name.removesuffix(".weight") for parts in table.values() for part in parts]
    transposed = any(not _by_rows(part) for parts in table.values() for part in parts if part.name[:-7] in low_rank)
    kind = base.model.head.kind  # type: ignore[union-attr]
    task = "SEQ_2_SEQ_LM" if isinstance(base.model, EncoderDecoder) else TASKS.get(kind, "FEATURE_EXTRACTION")
    tree: Tree = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": usual,
        "lora_alpha": scale * usual,
        "lora_dropout": adapter.settings.dropout,
        "target_modules": _shortened(list(low_rank), names, lambda name: name.rpartition(".")[2]),
        "rank_pattern": other,
        "alpha_pattern": {name: scale * rank for name, rank in other.items()},
        "modules_to_save": heads or None,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "use_rslora": False,
        "use_dora": False,
    }
    (folder / CONFIG).write_bytes(json_bytes(tree))
    return count


def _theirs(parts: Iterable[Part], heights: list[int], a: Tensor, b: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B beside each of the parts; a part that has none, or that never learned, is left out."""
    downs, ups = a.chunk(len(heights)), b.split(heights)
    begins = [sum(heights[:number]) for number in range(len(heights))]
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for part in parts:
        pairs = [(d, u) for begin, d, u in zip(begins, downs, ups, strict=True) if part.start <= begin < part.stop]
        if all(torch.equal(down, pairs[0][0]) for down, _ in pairs):
            down, up = pairs[0][0], torch.cat([up for _, up in pairs])
        else:
            down, up = torch.cat([down for down, _ in pairs]), torch.block_diag(*(up for _, up in pairs))
        used = down.any(dim=1) | up.any(dim=0)
        if used.any():
            rows = part.layout.to_theirs(up[:, used]) if _by_rows(part) else up[:, used]
            found[part.name.removesuffix(".weight")] = down[used], rows
    return found


def _same(kept: Tree, tensors: Mapping[str, Tensor], ranks: Mapping[str, int], scale: float) -> bool:
    """Whether the tensors are those of the file that was read, and its settings say the same of them."""
    places = parse_header(next(iter(kept["headers"].values())).encode()).tensors
    stored = {name: (place.dtype, place.shape) for name, place in places.items()}
    same = stored == {name: (NAMES[each.dtype], tuple(each.shape)) for name, each in tensors.items()}
    scales = [_scale(Settings(kept["config"], CONFIG), name, rank) for name, rank in ranks.items()]
    return same and all(abs(each - scale) < 1e-9 * scale for each in scales)


def _modules(head: Iterable[str]) -> list[str]:
    found = list(dict.fromkeys(name.rpartition(".")[0] for name in head))
    for name in found:
        if not name or any(other.startswith(f"{name}.") for other in found):
            vector = f"a vector of '{name or 'the model'}'"
            raise InteropError(f"the head trained {vector}, where PEFT keeps whole modules; use --to hf")
    return found
