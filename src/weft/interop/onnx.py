"""Transformers as ONNX files, for runtimes that know nothing of weft.

An encoder is one file: tokens and mask in, its head's answer out. A decoder that writes is one file too, which takes
the keys and values of what was read before and gives them back with the new ones behind. An encoder–decoder is two:
`encoder.onnx` makes every decoder layer's keys and values of the source, and `decoder.onnx` writes with them. Batch
and lengths are free. Names are those that other programs use: input_ids, attention_mask, past_key_values.0.key, …
"""

import copy
import json
import logging
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import InteropError
from weft.models import heads
from weft.models.transformer import EncodedSource, Stack, Transformer
from weft.nn.attention import AttentionMask
from weft.nn.config import DynamicNTK, Rotary
from weft.nn.mask import Mask
from weft.nn.position import Position
from weft.text.tokenizer import Tokenizer

ABOUT = "weft.json"
OPSET = 18
IN_ONE_FILE = 1_500_000_000  # bytes of weights; a protocol-buffers file ends at 2 GiB, larger ones get a .data beside
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its answers were from weft's; None where onnxruntime is not installed."""

    files: tuple[Path, ...]
    difference: float | None


def export_onnx(
    model: nn.Module, tokenizer: Tokenizer | None, dest: Path, source_tokenizer: Tokenizer | None = None
) -> Exported:
    """Write `dest`, a new folder: the model in fp32 as ONNX, the tokenizer, and weft.json, which says what is what.

    Where onnxruntime is installed the files are run at other sizes than they were drawn at, and have to agree.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise InteropError(f"ONNX files need the package {missing[0]}; install it with: pip install 'weft[onnx]'")
    if not isinstance(model, Transformer):
        raise InteropError(f"ONNX export is for Transformers, not for a {type(model).__name__}")
    position = model.config.position
    if isinstance(position, Rotary) and isinstance(position.scaling, DynamicNTK):
        raise InteropError("position.scaling.kind = 'dynamic-ntk' depends on the length, which an ONNX file can't")
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise InteropError(f"{dest}: something is there already; ONNX files are written to a new or an empty folder")
    parts = _parts(_readied(model))
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=dest.parent, prefix=f".{dest.name}."))
    except OSError as error:
        raise InteropError(f"{dest}: cannot be written: {error.strerror}") from None
    try:
        for part in parts:
            _draw(part, beside / part.file)
        differences = [_difference(part, beside / part.file) for part in parts] if _runtime() else []
        for difference in differences:
            if math.isnan(difference):
                raise InteropError(f"{dest}: the model gives no numbers (NaN); nothing was written")
            if not difference < TOLERANCE:
                raise InteropError(
                    f"{dest}: the ONNX files differ from the model by {difference:g}; nothing was written"
                )
        _describe(model, parts, beside)
        if tokenizer is not None:
            tokenizer.save(beside)
        if source_tokenizer is not None:
            source_tokenizer.save(beside / "source")
        _settle(beside, dest)
    except OSError as error:
        raise InteropError(f"{dest}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Exported(tuple(sorted(file for file in dest.rglob("*") if file.is_file())), max(differences, default=None))


def _readied(model: Transformer) -> Transformer:
    """A copy in fp32 that takes the plain path, whose operations every runtime has."""
    ready = copy.deepcopy(model).float().eval().requires_grad_(False)
    for module in ready.modules():
        if hasattr(module, "always_reference"):
            setattr(module, "always_reference", True)  # noqa: B010 (a Module's attributes are tensors to the type checker)
    return ready


# ---- what is drawn


class _Drawn(AttentionMask):
    """A mask that is given as a tensor, which grows with the input."""

    def __init__(
        self,
        seen: Tensor,
        position: Position,
        queries: Tensor,
        keys: Tensor,
        angles: tuple[Tensor, Tensor] | None = None,
    ):
        super().__init__(Mask(causal=False), position, queries, keys, angles)
        bias = position.bias(queries, keys)
        self._dense = seen if bias is None else torch.where(seen, bias, float("-inf"))


class _Growing:
    """One layer's keys and values, (batch, kv_heads, past, d_head) each, with new ones put behind."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys, self.values = torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)
        return self.keys, self.values


def _seen(stack: Stack, queries: Tensor, keys: Tensor) -> Tensor:
    """Which keys a stack's queries may see, (1, 1, time, source time), padding apart."""
    query, key = queries[:, None, :, None], keys[:, None, None, :]
    seen = key <= query if stack.causal else key >= 0 * query
    if stack.window is not None:
        seen = seen & (key > query - stack.window)
        if not stack.causal:
            seen = seen & (key < query + stack.window)
    return seen


def _read(stack: Stack, x: Tensor, mask: Tensor) -> Tensor:
    """Whole sequences x (batch, time, d_model) through a stack; mask (batch, time), 0 where there is padding."""
    places = torch.arange(x.shape[1], device=x.device)[None]
    seen = _seen(stack, places, places) & (mask != 0)[:, None, None, :]
    angles = stack.position.angles(places, 0, x.dtype)
    return stack(x, places, _Drawn(seen, stack.position, places, places, angles))


def _embedded(model: Transformer, tokens: Tensor, table: nn.Embedding) -> Tensor:
    x = table(tokens)
    return x * model.config.d_model**0.5 if model.config.embedding_scale else x


class _Reads(nn.Module):
    """Whole sequences to a head's answer."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor | None = None) -> Any:
        """tokens, mask, segments (batch, time) → the head's answer."""
        model, stack = self.model, self.model.decoder or self.model.encoder
        assert stack is not None
        x = _embedded(model, tokens, model.embedding)
        if model.segments is not None and segments is not None:
            x = x + model.segments(segments)
        answer = model.head(_read(stack, x, mask), mask != 0)
        return tuple(answer) if isinstance(answer, heads.Pretraining) else answer


class _Remembers(nn.Module):
    """A source to every decoder layer's keys and values of it."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> list[Tensor]:
        """tokens, mask (batch, source time) → keys and values in turn, (batch, kv_heads, source time, d_head)."""
        model = self.model
        assert model.encoder is not None and model.decoder is not None
        x = _embedded(model, tokens, model.source_embedding or model.embedding)
        encoded = _read(model.encoder, x, mask)
        return [part for block in model.decoder.blocks for part in block.cross.keys_values(encoded)]  # type: ignore[operator,union-attr]


class _Writes(nn.Module):
    """Some tokens after what was read → logits, and the keys and values of everything read."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, past: list[Tensor], mask: Tensor | None = None, memory: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """tokens (batch, time); past and memory as keys and values in turn; mask (batch, source time)."""
        model, stack = self.model, self.model.decoder
        assert stack is not None
        x = _embedded(model, tokens, model.embedding)
        before, time = past[0].shape[2], tokens.shape[1]
        places = torch.arange(before, before + time, device=x.device)[None]
        keys = torch.arange(before + time, device=x.device)[None]
        angles = stack.position.angles(places, 0, x.dtype)
        where = _Drawn(_seen(stack, places, keys), stack.position, places, keys, angles)
        caches = [_Growing(k, v) for k, v in zip(past[::2], past[1::2], strict=True)]
        source = None
        if memory is not None and mask is not None:
            over = _Drawn((mask != 0)[:, None, None, :], Position(), places, places)
            source = EncodedSource(list(zip(memory[::2], memory[1::2], strict=True)), over)
        features = stack(x, places, where, caches, source)
        return model.head(features), [part for cache in caches for part in (cache.keys, cache.values)]


# ---- the files


@dataclass(frozen=True)
class _Part:
    """A file: what is drawn, an example of its inputs with the names of their free sizes, and names on both sides."""

    file: str
    module: nn.Module
    example: tuple[Any, ...]
    free: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def _parts(model: Transformer) -> list[_Part]:
    config = model.config
    free = {0: "batch", 1: "time"}
    tokens, mask = torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)
    if model.decoder is None or not isinstance(model.output, heads.WordHead):
        segments = [torch.zeros_like(tokens)] if model.segments is not None else []
        names = ("input_ids", "attention_mask", "token_type_ids")[: 2 + len(segments)]
        said = {"mlm+nsp": ("logits", "next_sentence_logits"), "embedding": ("embedding",)}
        return [
            _Part(
                "model.onnx",
                _Reads(model),
                (tokens, mask, *segments),
                (free,) * len(names),
                names,
                said.get(config.head.kind, ("logits",)),
            )
        ]
    layers = range(config.layers)
    pairs = [f"{layer}.{kind}" for layer in layers for kind in ("key", "value")]
    past, present, memory = ([f"{name}.{pair}" for pair in pairs] for name in ("past_key_values", "present", "memory"))
    shape = (2, config.attention.groups, 3, config.d_head)
    rows: Any = [{0: "batch", 2: "past"}] * len(pairs)
    writes = [tokens, [torch.zeros(shape) for _ in pairs]], [free, rows], ["input_ids", *past]
    if model.encoder is None:
        return [_writer("model.onnx", model, *writes, present)]
    source, source_free = (torch.ones(2, 5, dtype=torch.long), {0: "batch", 1: "source"})
    remembered = [torch.zeros(2, shape[1], 5, shape[3]) for _ in pairs]
    writes[0].extend([source, remembered])
    writes[1].extend([source_free, [{0: "batch", 2: "source"}] * len(pairs)])
    writes[2].extend(["encoder_attention_mask", *memory])
    reads = _Part(
        "encoder.onnx",
        _Remembers(model),
        (source.clone(), source.clone()),  # one tensor given twice would be drawn as one input
        (source_free, source_free),
        ("input_ids", "attention_mask"),
        tuple(memory),
    )
    return [reads, _writer("decoder.onnx", model, *writes, present)]


def _writer(
    file: str, model: Transformer, example: list[Any], free: list[Any], inputs: list[str], present: list[str]
) -> _Part:
    return _Part(file, _Writes(model), tuple(example), tuple(free), tuple(inputs), ("logits", *present))


def _draw(part: _Part, file: Path) -> None:
    weights = sum(tensor.numel() * tensor.element_size() for tensor in part.module.state_dict().values())
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                part.module,
                part.example,
                file,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                dynamic_shapes=part.free,
                input_names=part.inputs,
                output_names=part.outputs,
                external_data=weights > IN_ONE_FILE,
            )
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise InteropError(f"{file.name}: this model cannot be drawn as ONNX: {reason}") from None
    finally:
        quiet.setLevel(level)


def _runtime() -> bool:
    return find_spec("onnxruntime") is not None


def _difference(part: _Part, file: Path) -> float:
    """The largest difference between the file's answers and the model's, at sizes other than the example's."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    draw = torch.Generator().manual_seed(0)
    worst = torch.zeros(())
    for sizes in ({"batch": 3, "time": 7, "past": 2, "source": 4}, {"batch": 1, "time": 1, "past": 0, "source": 1}):
        given = tuple(_resized(each, free, sizes, draw) for each, free in zip(part.example, part.free, strict=True))
        with torch.no_grad():
            mine = _flat(part.module(*given))
        fed = {name: tensor.numpy() for name, tensor in zip(part.inputs, _flat(given), strict=True)}
        for ours, theirs in zip(mine, session.run(None, fed), strict=True):
            # unlike max, maximum keeps a NaN, which no check may pass over
            worst = torch.maximum(worst, (ours - torch.from_numpy(theirs)).abs().max().float())
    return float(worst)


def _resized(example: Any, free: Any, sizes: dict[str, int], draw: torch.Generator) -> Any:
    """An input like the example's at these sizes: whole numbers 0 and 1, which are ids, masks and segments at once."""
    if isinstance(example, list):
        return [_resized(one, own, sizes, draw) for one, own in zip(example, free, strict=True)]
    shape = [sizes[free[place]] if place in free else size for place, size in enumerate(example.shape)]
    if example.dtype == torch.long:
        whole = torch.randint(0, 2, shape, generator=draw)
        whole[:, 0] = 1  # a row of padding alone has nothing to say
        return whole
    return torch.randn(shape, generator=draw)


def _flat(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for each in tree for tensor in _flat(each)]


def _describe(model: Transformer, parts: Sequence[_Part], folder: Path) -> None:
    about = {
        "model": model.config.model_dump(mode="json", exclude_none=True),
        "files": {part.file: {"inputs": part.inputs, "outputs": part.outputs} for part in parts},
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _settle(beside: Path, dest: Path) -> None:
    """Put the finished folder in its place at once."""
    mask = os.umask(0)
    os.umask(mask)
    beside.chmod(0o777 & ~mask)
    for file in beside.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    beside.rename(dest)
