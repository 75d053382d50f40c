"""Transformers as ONNX files, for runtimes that know nothing of weft.

An encoder is one file: tokens and mask in, its head's output out. A decoder that generates is one file too, which takes
the keys and values of earlier tokens and returns them with the new ones appended. An encoder–decoder is two:
`encoder.onnx` computes every decoder layer's keys and values of the source, and `decoder.onnx` generates with them.
Batch and lengths are dynamic. Inputs are called as elsewhere: input_ids, attention_mask, past_key_values.0.key, …
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
IN_ONE_FILE = 1_500_000_000  # bytes of weights; a protocol-buffers file ends at 2 GiB, larger ones get a .data beside
TOLERANCE = 1e-3


def write(bundle: ModelBundle, folder: Path) -> None:
    """Fill an empty folder: the model in fp32 as ONNX, the tokenizers, and weft.json, which describes the files.

    Where onnxruntime is installed, the files are run at other sizes than those of the examples, and have to agree.
    """
    _check(bundle.model)
    model = _plain_model(bundle)
    graphs = _graphs(model)
    for graph in graphs:
        _export(graph, folder / graph.file)
    for graph in graphs if find_spec("onnxruntime") is not None else ():
        _compare(graph, folder / graph.file)
    about = {
        "model": bundle.model.model_dump(mode="json", exclude_none=True),
        "files": {graph.file: {"inputs": [*graph.inputs], "outputs": graph.outputs} for graph in graphs},
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    for tokenizer, place in ((bundle.tokenizer, folder), (bundle.source_tokenizer, folder / "source")):
        if tokenizer is not None:
            tokenizer.save(place)


def _check(model: Model) -> None:
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise InteropError(f"ONNX files need the package {missing[0]}; install it with: pip install 'weft[onnx]'")
    if not isinstance(model, TransformerConfig):
        raise InteropError(f"model.kind = '{model.kind}': only Transformers can be exported as ONNX")
    if isinstance(model, Decoder) and model.ngrams is not None:
        raise InteropError("model.ngrams: a step in an ONNX file is given keys and values, not the tokens before it")
    for kind in model.kinds():
        if isinstance(kind.position, Rotary) and kind.position.changes_after(model.context) is not None:
            assert kind.position.scaling is not None
            scaling, why = kind.position.scaling.kind, "it depends on the length, which is not fixed in an ONNX file"
            raise InteropError(f"model.position.scaling.kind = '{scaling}': {why}")


def _plain_model(bundle: ModelBundle) -> Transformer:
    """The model in fp32, with attention by the formula, whose operations every runtime has: so it is computed where its
    probabilities are replaced, here by themselves."""
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
    """One layer's keys and values, (batch, kv_heads, past, d_head) each, to which new ones are appended."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys, self.values = torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)
        return self.keys, self.values


def _whole_sequences(model: Transformer, tokens: Tensor, mask: Tensor, segments: Tensor | None = None) -> Any:
    """Whole sequences: tokens, mask, segments (batch, time) → the head's output."""
    output = model(tokens, mask=mask != 0, segments=segments)
    return tuple(output) if isinstance(output, heads.Pretraining) else output


def _encode_source(model: Transformer, tokens: Tensor, mask: Tensor) -> list[Tensor]:
    """tokens, mask (batch, source time) → the keys and values in turn, (batch, kv_heads, source time, d_head), that
    every decoder layer's cross-attention has of a source."""
    return [part for both in model.source_cache(model.encode(Source(tokens, mask != 0))) for part in both]


def _decode(model: Transformer, tokens: Tensor, *given: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The next tokens (batch, time) → logits, and every layer's keys and values with the new ones appended.

    Given are the keys and values in turn of the tokens before; in an encoder–decoder also the source's mask
    (batch, source time), and the keys and values in turn that the layers have of it.
    """
    stack, count = model.decoder, 2 * model.config.layers
    assert stack is not None
    before, time = given[0].shape[2], tokens.shape[1]
    places = torch.arange(before, before + time, device=tokens.device)[None]
    keys = torch.arange(before + time, device=tokens.device)[None]
    x = model.embed(tokens, model.embedding)
    masks = stack.masks(Mask(causal=True, offset=before), places, keys, dtype=x.dtype)
    caches = [_Cache(k, v) for k, v in zip(given[:count:2], given[1:count:2], strict=True)]
    source = None
    if len(given) > count:
        mask, *memory = given[count:]
        source = mask_source(list(zip(memory[::2], memory[1::2], strict=True)), mask != 0, time)
    features = stack(x, places, masks, past=caches, source=source)
    return model.head(features), [part for cache in caches for part in (cache.keys, cache.values)]


class _Exported(nn.Module):
    """A function of a model and its inputs, as the exporter takes it."""

    def __init__(self, compute: Callable[..., Any], model: Transformer):
        super().__init__()
        self.compute, self.model = compute, model

    def forward(self, *inputs: Any) -> Any:
        return self.compute(self.model, *inputs)


Dims = tuple[str | int, ...]  # sizes, and the names of those that are dynamic


@dataclass(frozen=True)
class _Graph:
    """A file: what is exported, the dimensions of its inputs, and the names of its outputs."""

    file: str
    module: nn.Module
    inputs: Mapping[str, Dims]
    outputs: tuple[str, ...]

    def example(self, **sizes: int) -> tuple[Tensor, ...]:
        rng = torch.Generator().manual_seed(0)
        made = []
        for dims in self.inputs.values():
            shape = [sizes[dim] if isinstance(dim, str) else dim for dim in dims]
            if all(isinstance(dim, str) for dim in dims):
                made.append(torch.randint(0, 2, shape, generator=rng))  # which can be ids, masks and segments alike
                made[-1][:, 0] = 1  # the output for a row that is all padding means nothing
            else:
                made.append(torch.randn(shape, generator=rng))
        return tuple(made)


def _graphs(model: Transformer) -> list[_Graph]:
    config, text, source = model.config, ("batch", "time"), ("batch", "source")
    if model.decoder is None or not isinstance(model.output, heads.LMHead):
        names = ("input_ids", "attention_mask", "token_type_ids")[: 2 if model.segments is None else 3]
        outputs = {"mlm+nsp": ("logits", "next_sentence_logits"), "embedding": ("embedding",)}
        whole = _Exported(_whole_sequences, model)
        return [_Graph("model.onnx", whole, dict.fromkeys(names, text), outputs.get(config.head.kind, ("logits",)))]
    decoder, present = _Exported(_decode, model), ("logits", *_key_values("present", model))
    cached: Dims = ("batch", config.attention.groups, "past", config.d_head)
    inputs = {"input_ids": text, **dict.fromkeys(_key_values("past_key_values", model), cached)}
    if model.encoder is None:
        return [_Graph("model.onnx", decoder, inputs, present)]
    encoder, memory = _Exported(_encode_source, model), _key_values("memory", model)
    read: Dims = ("batch", config.attention.groups, "source", config.d_head)
    inputs |= {"encoder_attention_mask": source, **dict.fromkeys(memory, read)}
    return [
        _Graph("encoder.onnx", encoder, {"input_ids": source, "attention_mask": source}, memory),
        _Graph("decoder.onnx", decoder, inputs, present),
    ]


def _key_values(name: str, model: Transformer) -> tuple[str, ...]:
    return tuple(f"{name}.{layer}.{kind}" for layer in range(model.config.layers) for kind in ("key", "value"))


def _export(graph: _Graph, file: Path) -> None:
    weights = sum(tensor.numel() * tensor.element_size() for tensor in graph.module.state_dict().values())
    dynamic = tuple({at: dim for at, dim in enumerate(dims) if isinstance(dim, str)} for dims in graph.inputs.values())
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                graph.module,
                graph.example(batch=2, time=4, past=3, source=5),
                file,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                dynamic_shapes=(dynamic,),  # of the one parameter `*inputs`
                input_names=[*graph.inputs],
                output_names=graph.outputs,
                external_data=weights > IN_ONE_FILE,
            )
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise InteropError(f"{file.name}: this model cannot be exported as ONNX: {reason}") from None
    finally:
        quiet.setLevel(level)


def _compare(graph: _Graph, file: Path) -> None:
    """Refuse a file whose outputs differ from the model's, at sizes other than the example's."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    for sizes in ({"batch": 3, "time": 7, "past": 2, "source": 4}, {"batch": 1, "time": 1, "past": 0, "source": 1}):
        given = graph.example(**sizes)
        with torch.no_grad():
            expected = _flat(graph.module(*given))
        fed = {name: tensor.numpy() for name, tensor in zip(graph.inputs, given, strict=True)}
        for ours, theirs in zip(expected, session.run(None, fed), strict=True):
            difference = float((ours - torch.from_numpy(theirs)).abs().max())
            if not difference < TOLERANCE:
                differ = f"its outputs differ from the model's by {difference:g}"
                wrong = "the model's output is NaN" if math.isnan(difference) else differ
                raise InteropError(f"{file.name}: {wrong}; nothing was written")


def _flat(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [tensor for each in tree for tensor in _flat(each)]
