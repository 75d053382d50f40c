"""Models that `gpu_train.py` measures: weft's and its peers', with the same sizes, tokens, optimizer and clipping.

gpt2     GPT-2 124M, 32 × 1024 tokens; peers: nanoGPT (with --nanogpt), transformers
packed   GPT-2 124M on packed documents of 20 to 1,000 tokens that don't attend to each other; peer: transformers with
         a dense mask. The difference to `gpt2` is the cost of the mask; passes are compiled, but not captured
llama    22 layers, d 2048, 16 heads, d_ff 5632, V 32000: 1.26 B; 8 × 2048 tokens; peer: transformers
bert     BERT-base, masked LM, 64 × 512 tokens, 15 % of each row masked; peer: transformers. weft computes logits only
         at masked positions; dropout 0.1 in both
experts  8 layers of d 2048 and 16 heads, 8 of 64 experts of d_ff 1024 chosen, V 50304: 0.7 of 3.6 B parameters active;
         8 × 2048 tokens, balance loss. (16 layers, 1.3 of 6.9 B, with AdamW in fp32 leave no room for activations on
         one GPU.) Peer: transformers' Mixtral with experts by grouped_mm, weights and AdamW in bf16: with fp32
         weights it would not use grouped products when compiled
vaswani  the base model of 2017, 128 pairs of 128 + 128 tokens, label smoothing and dropout 0.1; peer:
         torch.nn.Transformer

A step is forward, backward, clipping to norm 1 and fused AdamW, compiled, under bf16 autocast, on random tokens already
on the device. weft's is its trainer's step, with passes captured as CUDA graphs.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.data.batch import Batch, Source
from weft.models.build import build
from weft.models.head_config import MaskedLMHead
from weft.models.presets import bert, gpt, llama, vaswani
from weft.nn.config import Experts
from weft.nn.dropout import row_keys
from weft.objectives.masked import masked_loss
from weft.objectives.tokens import token_loss
from weft.parallel.passes import LossFunction, Parallel
from weft.recipe.objective import NextToken
from weft.recipe.optimizer import AdamW
from weft.training import optimizer
from weft.training.compiled import Compiled, without_maps
from weft.training.precision import check_precision, use_eight_bits
from weft.training.step import OptimisationStep

Step = Callable[[], Tensor]

LR, BETAS, DECAY, CLIP = 6e-4, (0.9, 0.95), 0.1, 1.0
EXPERTS, CHOSEN = 64, 8
MASKED = 0.15  # fraction of BERT's tokens


@dataclass(frozen=True)
class Size:
    """Sizes of a model, and of its batch: `rows` rows of `length` tokens."""

    rows: int
    length: int
    layers: int
    d_model: int
    heads: int
    d_ff: int
    vocab_size: int

    def shrunk(self) -> "Size":
        """Return a size small enough for a CPU to check the script with."""
        return replace(self, rows=2, length=32, layers=2, d_model=64, heads=2, d_ff=128, vocab_size=101)


SIZES = {
    "gpt2": Size(32, 1024, 12, 768, 12, 3072, 50257),
    "packed": Size(32, 1024, 12, 768, 12, 3072, 50257),
    "llama": Size(8, 2048, 22, 2048, 16, 5632, 32000),
    "experts": Size(8, 2048, 8, 2048, 16, 1024, 50304),
    "bert": Size(64, 512, 12, 768, 12, 3072, 30522),
    "vaswani": Size(128, 128, 6, 512, 8, 2048, 37000),
}


def tokens_of(case: str, size: Size) -> int:
    """Number of tokens per step."""
    return size.rows * size.length * (2 if case == "vaswani" else 1)


def flops_of(case: str, size: Size) -> float:
    """FLOPs per step: per token 6 for each weight, and 12 · d · time for each layer's attention."""
    rows, d = size.rows * size.length, size.d_model
    matrices = {"llama": 3, "experts": 3 * CHOSEN}.get(case, 2)
    layer = 6 * (4 * d * d + matrices * d * size.d_ff) + 12 * d * size.length
    head = 6 * d * size.vocab_size * (MASKED if case == "bert" else 1.0)
    cross = 6 * 4 * d * d + 12 * d * size.length
    if case == "vaswani":
        return rows * (size.layers * (2 * layer + cross) + head)
    return rows * (size.layers * layer + head)


class Bench:
    """Device and precision, and the training steps of weft and its peers on them."""

    def __init__(self, precision: Any, compiled: bool, device: torch.device, nanogpt: Path | None):
        self.precision, self.compiled, self.device, self.nanogpt = precision, compiled, device, nanogpt

    def random(self, size: Size, *shape: int) -> Tensor:
        """Random token ids."""
        return torch.randint(size.vocab_size, shape, device=self.device)

    def text(self, size: Size) -> tuple[Tensor, Tensor]:
        """Random tokens and their targets, each (rows, length)."""
        row = self.random(size, size.rows, size.length + 1)
        return row[:, :-1].contiguous(), row[:, 1:].contiguous()

    def ours(self, settings: Any, batch: Batch, loss: LossFunction, capture: bool = True) -> Step:
        """Training step of weft's trainer, including its checks."""
        model = build(settings).to(self.device).train()
        if self.precision == "fp8":
            check_precision("fp8", self.device)
            use_eight_bits(model)
        if self.compiled:
            model.wrap(lambda features: Compiled(without_maps(model), capture))
        adamw = optimizer.build(AdamW(betas=BETAS, weight_decay=DECAY), model)
        limits = torch.full((2,), math.inf, device=self.device)
        batch = replace(batch, keys=row_keys(0, torch.arange(len(batch.tokens), device=self.device)))
        step = OptimisationStep(Parallel(model), adamw, loss, self.device, self.precision, CLIP)
        return lambda: step([batch], LR, limits).loss

    def theirs(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> Step:
        """Training step as the peers' users write it; `loss` is called with the compiled model."""
        model.to(self.device).train()
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": DECAY},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
        compiled = torch.compile(model) if self.compiled else model

        def step() -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision != "fp32"):
                value = loss(compiled)
            value.backward()
            nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return value.detach()

        return step


# ---- next tokens


def token_loss_of(settings: NextToken) -> LossFunction:
    return lambda model, features, batch: token_loss(model, features, batch, settings=settings)


def gpt2_weft(bench: Bench, size: Size) -> Step:
    settings = gpt(size.layers, size.d_model, size.heads, context=size.length, vocab_size=size.vocab_size)
    return bench.ours(settings, Batch(*bench.text(size)), token_loss_of(NextToken()))


def gpt2_nanogpt(bench: Bench, size: Size) -> Step:
    """nanoGPT's model with its defaults: no biases, vocabulary padded to a multiple of 64."""
    assert bench.nanogpt is not None
    spec = importlib.util.spec_from_file_location("nanogpt_model", bench.nanogpt)
    assert spec is not None and spec.loader is not None, bench.nanogpt
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=size.length,
        vocab_size=-(-size.vocab_size // 64) * 64,
        n_layer=size.layers,
        n_head=size.heads,
        n_embd=size.d_model,
        dropout=0.0,
        bias=False,
    )
    tokens, targets = bench.text(size)
    return bench.theirs(module.GPT(config), lambda model: model(tokens, targets)[1])


def documents(bench: Bench, size: Size) -> tuple[Tensor, Tensor]:
    """Document id and position within the document of each token, both (rows, length)."""
    rng = torch.Generator().manual_seed(0)
    ids, positions = torch.zeros(2, size.rows, size.length, dtype=torch.long)
    for row in range(size.rows):
        start, document = 0, 0
        while start < size.length:
            shortest = size.length / 50  # lengths are log-uniform
            end = start + int(shortest * 50 ** torch.rand((), generator=rng).item()) + 1
            ids[row, start:end] = document
            positions[row, start:end] = torch.arange(len(positions[row, start:end]))
            start, document = end, document + 1
    return ids.to(bench.device), positions.to(bench.device)


def packed_weft(bench: Bench, size: Size) -> Step:
    settings = gpt(size.layers, size.d_model, size.heads, context=size.length, vocab_size=size.vocab_size)
    ids, positions = documents(bench, size)
    batch = Batch(*bench.text(size), positions=positions, documents=ids)
    return bench.ours(settings, batch, token_loss_of(NextToken()), capture=False)


def packed_transformers(bench: Bench, size: Size) -> Step:
    ids, positions = documents(bench, size)
    mask = (ids[:, None, :, None] == ids[:, None, None, :]).tril()
    return gpt2_transformers(bench, size, attention_mask=mask, position_ids=positions)


def gpt2_transformers(bench: Bench, size: Size, **inputs: Tensor) -> Step:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=size.vocab_size,
        n_positions=size.length,
        n_embd=size.d_model,
        n_layer=size.layers,
        n_head=size.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")
    tokens, _ = bench.text(size)
    return bench.theirs(model, lambda model: model(input_ids=tokens, labels=tokens, **inputs).loss)


def llama_weft(bench: Bench, size: Size) -> Step:
    settings = llama(
        size.layers, size.d_model, size.heads, d_ff=size.d_ff, context=size.length, vocab_size=size.vocab_size
    )
    return bench.ours(settings, Batch(*bench.text(size)), token_loss_of(NextToken()))


def their_sizes(size: Size) -> dict[str, int]:
    """Sizes under the names that most of transformers' configurations have."""
    return {
        "vocab_size": size.vocab_size,
        "hidden_size": size.d_model,
        "intermediate_size": size.d_ff,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": size.length,
    }


def llama_transformers(bench: Bench, size: Size) -> Step:
    import transformers

    config = transformers.LlamaConfig(**their_sizes(size), tie_word_embeddings=False, use_cache=False)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    tokens, _ = bench.text(size)
    return bench.theirs(model, lambda model: model(input_ids=tokens, labels=tokens).loss)


def experts_weft(bench: Bench, size: Size) -> Step:
    settings = llama(
        size.layers, size.d_model, size.heads, d_ff=size.d_ff, context=size.length, vocab_size=size.vocab_size
    ).replace(feedforward=Experts(experts=EXPERTS, chosen=CHOSEN, d_ff=size.d_ff))
    return bench.ours(settings, Batch(*bench.text(size)), token_loss_of(NextToken()))


def experts_transformers(bench: Bench, size: Size) -> Step:
    import transformers

    config = transformers.MixtralConfig(
        **their_sizes(size),
        num_key_value_heads=size.heads,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        output_router_logits=True,  # with the balance loss
        router_aux_loss_coef=0.01,
        use_cache=False,
    )
    ways = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    model = transformers.MixtralForCausalLM._from_config(config, dtype=torch.bfloat16, **ways)
    tokens, _ = bench.text(size)
    return bench.theirs(model, lambda model: model(input_ids=tokens, labels=tokens).loss)


# ---- masked LM


def _masked(bench: Bench, size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (rows, length), and the masked positions and their targets (rows, masked)."""
    masked = round(MASKED * size.length)
    tokens = bench.random(size, size.rows, size.length)
    positions = torch.rand(size.rows, size.length, device=bench.device).argsort(dim=1)[:, :masked]
    return tokens, positions, bench.random(size, size.rows, masked)


def bert_weft(bench: Bench, size: Size) -> Step:
    tokens, positions, words = _masked(bench, size)
    targets = torch.zeros_like(tokens).scatter(1, positions, words)
    mask = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, positions, True)
    settings = bert(size.layers, size.d_model, size.heads, vocab_size=size.vocab_size, context=size.length).replace(
        head=MaskedLMHead()
    )
    return bench.ours(settings, Batch(tokens, targets, loss_mask=mask, counted=words.numel()), masked_loss)


def bert_transformers(bench: Bench, size: Size) -> Step:
    import transformers

    config = transformers.BertConfig(**their_sizes(size))
    tokens, positions, words = _masked(bench, size)
    labels = torch.full_like(tokens, -100).scatter(1, positions, words)
    model = transformers.BertForMaskedLM._from_config(config, attn_implementation="sdpa")
    return bench.theirs(model, lambda model: model(input_ids=tokens, labels=labels).loss)


# ---- translation; every sentence fills its row: neither side masks padding


def vaswani_weft(bench: Bench, size: Size) -> Step:
    source = bench.random(size, size.rows, size.length)
    settings = vaswani(
        size.layers,
        size.d_model,
        size.heads,
        d_ff=size.d_ff,
        dropout=0.1,
        vocab_size=size.vocab_size,
        context=size.length,
    )
    batch = _Unpadded(*bench.text(size), source=Source(source, None))  # type: ignore[arg-type]
    return bench.ours(settings, batch, token_loss_of(NextToken(smoothing=0.1)))


class _Unpadded(Batch):
    """Batch without a source mask."""

    @property
    def read(self) -> int:
        assert self.source is not None
        return self.tokens.numel() + self.source.tokens.numel()


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with one tied embedding matrix and sinusoidal positions."""

    def __init__(self, size: Size):
        super().__init__()
        self.d_model = size.d_model
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        nn.init.normal_(self.embedding.weight, std=size.d_model**-0.5)
        self.inner = nn.Transformer(
            size.d_model, size.heads, size.layers, size.layers, size.d_ff, dropout=0.1, batch_first=True
        )
        self.dropout = nn.Dropout(0.1)
        angles = torch.arange(size.length)[:, None] / 10000 ** (torch.arange(0, size.d_model, 2) / size.d_model)
        self.register_buffer("waves", torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1))
        self.register_buffer("ahead", nn.Transformer.generate_square_subsequent_mask(size.length))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens: (batch, time) → (batch, time, d_model)."""
        return self.dropout(self.embedding(tokens) * self.d_model**0.5 + self.waves)

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        """Logits (batch, time, vocab_size)."""
        features = self.inner(self.embed(source), self.embed(tokens), tgt_mask=self.ahead, tgt_is_causal=True)
        return F.linear(features, self.embedding.weight)


def vaswani_torch(bench: Bench, size: Size) -> Step:
    source = bench.random(size, size.rows, size.length)
    tokens, targets = bench.text(size)

    def loss(model: Any) -> Tensor:
        logits = model(source, tokens).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten(), label_smoothing=0.1)

    return bench.theirs(TorchTransformer(size), loss)


CASES: dict[str, dict[str, Callable[[Bench, Size], Step]]] = {
    "gpt2": {"weft": gpt2_weft, "nanoGPT": gpt2_nanogpt, "transformers": gpt2_transformers},
    "packed": {"weft": packed_weft, "transformers": packed_transformers},
    "llama": {"weft": llama_weft, "transformers": llama_transformers},
    "experts": {"weft": experts_weft, "transformers": experts_transformers},
    "bert": {"weft": bert_weft, "transformers": bert_transformers},
    "vaswani": {"weft": vaswani_weft, "torch.nn.Transformer": vaswani_torch},
}
