"""Time greedy decoding of one text on a CPU, with SmolLM2's shape (135M, random weights), beside transformers.

    python benchmarks/decode_cpu.py [--ways fp32 bf16 int8 int4 torch general transformers] [--new 32] [--rounds 3]
                                    [--threads N] [--llama-bench PROGRAM [--gguf FILE]] [--tiny]
                                    [--experts N [--chosen 2]] [--checkpoint FOLDER]

fp32 … int4        weft, with weights of this dtype
torch              weft in fp32 with torch's operations, as on a machine without a C compiler
general            weft's plain decode step in fp32, which models of an unusual shape take
transformers       generate() with the same weights in fp32; its tokens must equal weft's; Mixtral with experts
llama.cpp          llama-bench, on a GGUF file or the same weights in Q4_0 (embeddings in Q8_0)

With --experts, every layer has this many feed-forward parts of SmolLM2's size, of which a token reads --chosen. With
--checkpoint, weft and transformers read a folder in Hugging Face's format instead.
All take turns in every round, so that other load on the machine affects them equally. Only tokens after the first are
timed, which excludes the prefill. The best round counts: tokens per second by the clock, and milliseconds of processor
time per token, which other processes disturb less.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from weft.decode.config import Sampling
from weft.decode.fast import stepper
from weft.decode.fast.cpu import CPUFastPath
from weft.decode.fast.native_step import NativeStep
from weft.decode.fast.quantize import quantize
from weft.decode.generate import generate
from weft.interop.bundle import ModelBundle, lazy_weights
from weft.interop.gguf import file as gguf_file
from weft.interop.gguf import gguf
from weft.interop.hf import hf
from weft.models.build import build
from weft.models.config import Decoder
from weft.models.presets import llama
from weft.nn.config import Experts

WAYS = ("fp32", "bf16", "int8", "int4", "torch", "general", "transformers")
PROMPT = 16  # tokens


def weight_bytes(model: Any) -> int:
    """Bytes of a model's parameters and buffers, each tensor counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def ours(config: Decoder, width: str, checkpoint: Path | None) -> Any:
    torch.manual_seed(0)
    model = build(config).eval()
    if checkpoint is not None:
        model.load_state_dict({name: weight() for name, weight in hf.read(checkpoint).weights.items()})
    start = time.perf_counter()
    if width != "fp32":
        quantize(model, width)
    took = f", quantized in {time.perf_counter() - start:.1f} s" if width != "fp32" else ""
    print(f"{width:14} {weight_bytes(model) / 1e6:.0f} MB of weights{took}", flush=True)
    return model


def theirs(config: Decoder, model: Any, checkpoint: Path | None) -> Any:
    """Load transformers' model, or build its LLaMA or Mixtral with the shape and weights of `model`."""
    import transformers

    transformers.logging.set_verbosity_error()
    if checkpoint is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.feedforward.d_ff,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.attention.heads,
        "num_key_value_heads": config.attention.groups,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm.eps,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    mixture = config.feedforward if isinstance(config.feedforward, Experts) else None
    peer: Any
    if mixture is None:
        peer = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    else:
        settings |= {"num_local_experts": mixture.experts, "num_experts_per_tok": mixture.chosen, "rope_theta": 10000.0}
        peer = transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings)).eval()
    widths = [config.attention.heads * config.d_head] + [config.attention.groups * config.d_head] * 2
    with torch.no_grad():
        peer.model.embed_tokens.weight.copy_(model.embedding.weight)
        peer.model.norm.weight.copy_(model.decoder.norm.weight)
        for layer, block in zip(peer.model.layers, model.decoder.blocks, strict=True):
            attention, forward = layer.self_attn, layer.mlp
            parts = block.attention.qkv.weight.split(widths)
            for mine, part in zip((attention.q_proj, attention.k_proj, attention.v_proj), parts, strict=True):
                mine.weight.copy_(part)
            attention.o_proj.weight.copy_(block.attention.out.weight)
            if mixture is None:
                gate_up = zip(
                    (forward.gate_proj, forward.up_proj), block.feedforward.gate_up.weight.chunk(2), strict=True
                )
                for mine, part in gate_up:
                    mine.weight.copy_(part)
                forward.down_proj.weight.copy_(block.feedforward.down.weight)
            else:
                forward.gate.weight.copy_(block.feedforward.router.weight)
                forward.experts.gate_up_proj.copy_(block.feedforward.experts.gate_up)
                forward.experts.down_proj.copy_(block.feedforward.experts.down)
            layer.input_layernorm.weight.copy_(block.attention_skip.norm.weight)
            layer.post_attention_layernorm.weight.copy_(block.feedforward_skip.norm.weight)
    return peer


def shape(options: argparse.Namespace) -> Decoder:
    if options.checkpoint is not None:
        return hf.read(options.checkpoint).model
    layers, D, heads, d_ff, V, shared = (2, 64, 4, 96, 200, 2) if options.tiny else (30, 576, 9, 1536, 49152, 3)
    config = llama(layers, D, heads, d_ff=d_ff, context=2048, vocab_size=V, kv_heads=shared, tied=True)
    if options.experts is None:
        return config
    return config.replace(feedforward=Experts(experts=options.experts, chosen=options.chosen, d_ff=d_ff))


def contestants(options: argparse.Namespace) -> dict[str, Callable[[int], list[int]]]:
    """Functions that generate `count` tokens after the prompt and return their ids, by name."""
    config = shape(options)
    prompt = list(range(1, PROMPT + 1))
    plain = ours(config, "fp32", options.checkpoint)
    writers: dict[str, Callable[[int], list[int]]] = {}

    def write(model: Any, count: int) -> list[int]:
        return [token.id for token in generate(model, [prompt], Sampling(temperature=0.0, max_tokens=count))]

    def write_without(count: int, *paths: type) -> list[int]:
        default = stepper.STEP_PATHS
        stepper.STEP_PATHS = tuple(path for path in default if path not in paths)
        try:
            return write(plain, count)
        finally:
            stepper.STEP_PATHS = default

    for width in ("fp32", "bf16", "int8", "int4"):
        if width in options.ways:
            model = plain if width == "fp32" else ours(config, width, options.checkpoint)
            writers[width] = partial(write, model)
    if "torch" in options.ways:
        writers["torch"] = lambda count: write_without(count, NativeStep)
    if "general" in options.ways:
        writers["general"] = lambda count: write_without(count, NativeStep, CPUFastPath)
    if "transformers" in options.ways and importlib.util.find_spec("transformers") is not None:
        peer, tokens = theirs(config, plain, options.checkpoint), torch.tensor([prompt])

        def write_theirs(count: int) -> list[int]:
            length = {"min_new_tokens": count, "max_new_tokens": count}
            mask = torch.ones_like(tokens)
            return peer.generate(tokens, attention_mask=mask, do_sample=False, **length)[0, PROMPT:].tolist()

        writers["transformers"] = write_theirs
    return writers


def write_gguf(config: Decoder, path: Path) -> None:
    """Write the weights of `ours` in four bits, without a vocabulary: llama-bench feeds random tokens."""
    torch.manual_seed(0)
    weights = build(config).state_dict()
    bundle = ModelBundle(config, lazy_weights(weights.__getitem__, weights), None, "random weights")
    architecture = gguf.architecture_of(config)
    keys = {**gguf._keys(bundle, architecture, "random"), "tokenizer.ggml.model": gguf_file.typed("none")}
    gguf_file.write_file(path, keys, gguf._tensors(bundle, architecture, "q4_0"), advance=lambda count: None)


def llama_cpp(program: str, file: str, new: int) -> float:
    """Tokens per second by llama-bench, without loading."""
    arguments = ["-m", file, "-p", "0", "-n", str(new), "-r", "1", "-t", str(torch.get_num_threads()), "-o", "json"]
    output = subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout
    return float(json.loads(output)[0]["avg_ts"])


class Times(NamedTuple):
    """Seconds by the clock and of processor time."""

    clock: float
    processor: float


def timed(write: Callable[[int], list[int]], count: int) -> Times:
    """Time the generation of `count` tokens."""
    start, spent = time.perf_counter(), time.process_time()
    write(count)
    return Times(time.perf_counter() - start, time.process_time() - spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--llama-bench", help="path of llama.cpp's llama-bench")
    parser.add_argument("--gguf", help="the file that llama-bench reads")
    parser.add_argument("--experts", type=int, help="experts of each layer; without it, the layers are dense")
    parser.add_argument("--chosen", type=int, default=2, help="experts that read a token")
    parser.add_argument("--checkpoint", type=Path, help="folder of a model in Hugging Face's format")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    writers, folder = contestants(options), tempfile.TemporaryDirectory()
    file = options.gguf
    if options.llama_bench is not None and file is None:
        file = f"{folder.name}/model.gguf"
        write_gguf(shape(options), Path(file))
    outputs = {name: write(options.new) for name, write in writers.items()}  # the first call also warms up
    firsts: dict[str, list[Times]] = {name: [] for name in writers}
    wholes: dict[str, list[Times]] = {name: [] for name in writers}
    llama_rates: list[float] = []
    for _ in range(options.rounds):
        for name, write in writers.items():
            firsts[name].append(timed(write, 1))
            wholes[name].append(timed(write, 1 + options.new))
        if file is not None:
            llama_rates.append(llama_cpp(options.llama_bench, file, options.new))
    prompt = {name: Times(*map(min, zip(*times, strict=True))) for name, times in firsts.items()}
    clock = {name: [(whole.clock - prompt[name].clock) / options.new for whole in wholes[name]] for name in writers}
    processor = {
        name: [(whole.processor - prompt[name].processor) / options.new for whole in wholes[name]] for name in writers
    }
    base = "transformers" if "transformers" in writers else next(iter(writers))
    for name in writers:
        best, spent = min(clock[name]), min(processor[name])
        against = (
            "" if name == base else f"; {min(clock[base]) / best:.2f} × {base} ({min(processor[base]) / spent:.2f} ×)"
        )
        rates = " ".join(f"{1 / seconds:.1f}" for seconds in clock[name])
        print(f"{name:14} {1 / best:6.1f} tok/s ({rates}), {spent * 1e3:5.1f} ms of processor time per token{against}")
    if llama_rates:
        rates = " ".join(f"{rate:.1f}" for rate in llama_rates)
        against = ", ".join(f"{name} {1 / min(clock[name]) / max(llama_rates):.2f} ×" for name in writers)
        print(f"{'llama.cpp':14} {max(llama_rates):6.1f} tok/s ({rates}); of that, {against}")
    if {"fp32", "transformers"} <= set(outputs):
        same = outputs["fp32"] == outputs["transformers"]
        print(f"weft's tokens and transformers': {'the same' if same else 'NOT the same'}")


if __name__ == "__main__":
    main()
