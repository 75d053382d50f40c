"""Export Transformers as ONNX files.

An encoder is one file, from tokens and mask to the output of its head. A decoder is one file that takes the KV cache
and returns it extended by the new tokens. An encoder–decoder is two files: `encoder.onnx` computes the keys and values
of the source for all decoder layers, and `decoder.onnx` generates with them. Batch size and lengths are dynamic. Inputs
have the usual names: input_ids, attention_mask, past_key_values.0.key, …
"""

import json
import logging
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.data.batch import Source
from weft.errors import InteropError
from weft.interop.bundle import ModelBundle
from weft.models import heads
from weft.models.build import build
from weft.models.config import Decoder, Model, TransformerConfig
from weft.models.transformer import Transformer, mask_source
from weft.nn.init import empty_weights
from weft.nn.mask import Mask
from weft.nn.position_config import Rotary
from weft.nn.scaled_dot_product import Probabilities

ABOUT, OPSET = "weft.json", 18
MAX_EMBEDDED_BYTES = 1_500_000_000  # of weights inside a file; protocol buffers end at 2 GiB, larger ones get a .data
TOLERANCE = 1e-3  # absolute difference allowed between the outputs of onnxruntime and of the model


def write(bundle: ModelBundle, folder: Path, *, tolerance: float = TOLERANCE) -> None:
    """Write to an empty folder the model in fp32 as ONNX, the tokenizers, and weft.json, which describes the files.

    If onnxruntime is installed, the outputs of the files must equal the model's to within `tolerance`.
    """
    _check(bundle.model)
    model = _plain_model(bundle)
    files = _files(model)
    for exported in files:
        _export(exported, folder / exported.file)
    for exported in files if find_spec("onnxruntime") is not None else ():
        compare(exported, folder / exported.file, tolerance)
    about = {
        "model": bundle.model.model_dump(mode="json", exclude_none=True),
        "files": {file.file: {"inputs": [*file.inputs], "outputs": file.outputs} for file in files},
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    for tokenizer, path in ((bundle.tokenizer, folder), (bundle.source_tokenizer, folder / "source")):
        if tokenizer is not None:
            tokenizer.save(path)


def _check(model: Model) -> None:
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise InteropError(f"ONNX files need the package {missing[0]}; install it with: pip install 'weft[onnx]'")
    if not isinstance(model, TransformerConfig):
        raise InteropError(f"model.kind = '{model.kind}': only Transformers can be exported as ONNX")
    if isinstance(model, Decoder) and model.ngrams is not None:
        raise InteropError("model.ngrams: a step of an ONNX file receives the KV cache, not the tokens before it")
    for kind in model.kinds():
        if isinstance(kind.position, Rotary) and kind.position.changes_after(model.context) is not None:
            assert kind.position.scaling is not None
            scaling, why = kind.position.scaling.kind, "it depends on the length, which is not fixed in an ONNX file"
            raise InteropError(f"model.position.scaling.kind = '{scaling}': {why}")


def _plain_model(bundle: ModelBundle) -> Transformer:
    """Model in fp32 with attention computed by its formula, whose operations every runtime has: `watch` selects that
    path because it replaces the probabilities, here by a copy."""
    assert isinstance(bundle.model, TransformerConfig)
    with empty_weights():
        model = build(bundle.model)
    assert isinstance(model, Transformer)
    model.load_state_dict({name: read().float() for name, read in bundle.weights.items()}, assign=True)
    for module in model.modules():
        if isinstance(module, Probabilities):
            module.watch(Tensor.clone)
    return model.eval().requires_grad_(False)


class _Cache:
    """KV cache of one layer, (batch, kv_heads, past, d_head) each."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys, self.values = torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)
        return self.keys, self.values


def _run_whole(model: Transformer, tokens: Tensor, *others: Tensor) -> Any:
    """tokens, mask and, if the model has them, segments (batch, time) → output of the head."""
    mask, segments = others if len(others) > 1 else (*others, None)
    output = model(tokens, mask=mask != 0, segments=segments)
    return tuple(output) if isinstance(output, heads.Pretraining) else output


def _encode_source(model: Transformer, tokens: Tensor, mask: Tensor) -> list[Tensor]:
    """tokens, mask (batch, source time) → alternating keys and values of the cross-attention of every decoder layer,
    (batch, kv_heads, source time, d_head)."""
    return [part for both in model.source_cache(model.encode(Source(tokens, mask != 0))) for part in both]


def _decode(model: Transformer, tokens: Tensor, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The next tokens (batch, time) → logits, and the extended KV cache of every layer.

    `inputs` are alternating keys and values of all layers; in an encoder–decoder followed by the source's mask (batch,
    source time) and the output of `_encode_source`.
    """
    stack, count = model.decoder, 2 * model.config.layers
    assert stack is not None
    past, time = inputs[0].shape[2], tokens.shape[1]
    positions = torch.arange(past, past + time, device=tokens.device)[None]
    keys = torch.arange(past + time, device=tokens.device)[None]
    x = model.embed(tokens, model.embedding)
    masks = stack.masks(Mask(causal=True, offset=past), positions, keys, dtype=x.dtype)
    caches = [_Cache(k, v) for k, v in zip(inputs[:count:2], inputs[1:count:2], strict=True)]
    source = None
    if len(inputs) > count:
        mask, *memory = inputs[count:]
        source = mask_source(list(zip(memory[::2], memory[1::2], strict=True)), mask != 0, time)
    features = stack(x, positions, masks, past=caches, source=source)
    return model.head(features), [part for cache in caches for part in (cache.keys, cache.values)]


class _Exported(nn.Module):
    """Wraps a function of a model and its inputs for the exporter."""

    def __init__(self, compute: Callable[..., Any], model: Transformer):
        super().__init__()
        self.compute, self.model = compute, model

    def forward(self, *inputs: Any) -> Any:
        return self.compute(self.model, *inputs)


Dims = tuple[str | int, ...]  # sizes, or names of dynamic dimensions


@dataclass(frozen=True)
class OnnxFile:
    """One file: the exported module, the dimensions of its inputs, and the names of its outputs."""

    file: str
    module: nn.Module
    inputs: Mapping[str, Dims]
    outputs: tuple[str, ...]

    def example(self, **sizes: int) -> tuple[Tensor, ...]:
        rng = torch.Generator().manual_seed(0)
        tensors = []
        for dims in self.inputs.values():
            shape = [sizes[dim] if isinstance(dim, str) else dim for dim in dims]
            if all(isinstance(dim, str) for dim in dims):
                tensors.append(torch.randint(0, 2, shape, generator=rng))  # valid as ids, masks and segments
                tensors[-1][:, 0] = 1  # the output of a row of padding is undefined
            else:
                tensors.append(torch.randn(shape, generator=rng))
        return tuple(tensors)


def _files(model: Transformer) -> list[OnnxFile]:
    config, text, source = model.config, ("batch", "time"), ("batch", "source")
    if model.decoder is None or not isinstance(model.output, heads.LMHead):
        names = ("input_ids", "attention_mask", "token_type_ids")[: 2 if model.segments is None else 3]
        by_head = {"mlm+nsp": ("logits", "next_sentence_logits"), "embedding": ("embedding",)}
        outputs = by_head.get(config.head.kind, ("logits",))
        module = _Exported(_run_whole, model)
        return [OnnxFile("model.onnx", module, inputs=dict.fromkeys(names, text), outputs=outputs)]
    decoder, present = _Exported(_decode, model), ("logits", *_key_values("present", model))

    def vectors(name: str, time: str) -> dict[str, Dims]:
        """Shapes of alternating keys and values."""
        widths = {"key": config.d_head, "value": config.d_v}
        names = _key_values(name, model)
        return {each: ("batch", config.attention.groups, time, widths[each.rpartition(".")[2]]) for each in names}

    inputs: dict[str, Dims] = {"input_ids": text, **vectors("past_key_values", "past")}
    if model.encoder is None:
        return [OnnxFile("model.onnx", decoder, inputs=inputs, outputs=present)]
    encoder, memory = _Exported(_encode_source, model), _key_values("memory", model)
    inputs |= {"encoder_attention_mask": source, **vectors("memory", "source")}
    encoder_inputs: dict[str, Dims] = {"input_ids": source, "attention_mask": source}
    return [
        OnnxFile("encoder.onnx", encoder, inputs=encoder_inputs, outputs=memory),
        OnnxFile("decoder.onnx", decoder, inputs=inputs, outputs=present),
    ]


def _key_values(name: str, model: Transformer) -> tuple[str, ...]:
    return tuple(f"{name}.{layer}.{kind}" for layer in range(model.config.layers) for kind in ("key", "value"))


def _export(exported: OnnxFile, file: Path) -> None:
    weights = sum(tensor.numel() * tensor.element_size() for tensor in exported.module.state_dict().values())
    dynamic = tuple({n: dim for n, dim in enumerate(dims) if isinstance(dim, str)} for dims in exported.inputs.values())
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                exported.module,
                exported.example(batch=2, time=4, past=3, source=5),
                file,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                dynamic_shapes=(dynamic,),  # of the one parameter `*inputs`
                input_names=[*exported.inputs],
                output_names=exported.outputs,
                external_data=weights > MAX_EMBEDDED_BYTES,
            )
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise InteropError(f"{file.name}: this model cannot be exported as ONNX: {reason}") from None
    finally:
        logger.setLevel(level)


def compare(exported: OnnxFile, file: Path, tolerance: float = TOLERANCE) -> None:
    """Raise InteropError if the outputs of a file differ from the model's, at sizes other than exported."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    for sizes in ({"batch": 3, "time": 7, "past": 2, "source": 4}, {"batch": 1, "time": 1, "past": 0, "source": 1}):
        example = exported.example(**sizes)
        with torch.no_grad():
            expected = _flatten(exported.module(*example))
        inputs = {name: tensor.numpy() for name, tensor in zip(exported.inputs, example, strict=True)}
        for ours, theirs in zip(expected, session.run(None, inputs), strict=True):
            difference = float((ours - torch.from_numpy(theirs)).abs().max())
            if not difference < tolerance:
                differ = f"its outputs differ from the model's by {difference:g}"
                what = "the model's output is NaN" if math.isnan(difference) else differ
                raise InteropError(f"{file.name}: {what}; nothing was written")


def _flatten(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [tensor for branch in tree for tensor in _flatten(branch)]
