"""Counts from the config alone equal those of the built model."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pairwise import pairwise
from tests.spread import slow, spread
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from weft.compare.sizes import multiplied, resize
from weft.config import Config
from weft.costs.count import count, decoding_weights, orthogonal_flops
from weft.costs.devices import DEVICES, device_called, device_named
from weft.costs.memory import MAX_LOGITS, Workload, cache_bytes, training_memory
from weft.costs.plan import Machine, plan_training
from weft.costs.units import byte_size, duration, parse_count, short
from weft.errors import ConfigError, ModelError
from weft.explain.costs import costs
from weft.models import config, head_config
from weft.models.build import build
from weft.models.presets import PRESETS, preset
from weft.models.recurrent import HiddenStates
from weft.models.transformer import TransformerState
from weft.nn import config as parts
from weft.nn import position_config as position
from weft.nn.loss import CPU_LOGITS
from weft.recipe.optimizer import Muon
from weft.training import optimizer


def built(model: Any) -> int:
    """Return the number of parameters of the built model, on the meta device."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(model).parameters())


@pytest.mark.parametrize("name", spread(PRESETS, 6))
def test_the_parameters_of_presets_are_counted(name: str) -> None:
    assert count(preset(name)).parameters == built(preset(name))


def test_the_parameters_of_the_largest_preset_are_counted() -> None:
    shallow = preset("gpt3-175b").replace(layers=2)
    per_layer = count(preset("gpt3-175b").replace(layers=3)).parameters - count(shallow).parameters
    assert count(shallow).parameters == built(shallow)
    assert count(preset("gpt3-175b")).parameters == count(shallow).parameters + 94 * per_layer


# ---- random configs

small = st.integers(1, 5)
norms = st.sampled_from(
    [parts.LayerNorm(), parts.LayerNorm(bias=False), parts.LayerNorm(gain=False, bias=False), parts.RMSNorm()]
)
positions = st.one_of(
    st.sampled_from([position.NoPosition(), position.Sinusoidal(), position.Rotary(), position.ALiBi()]),
    st.just(position.Rotary(fraction=0.5)),
    st.builds(position.Concatenated, width=st.sampled_from([None, 2, 14])),
    st.builds(position.Learned, offset=st.integers(0, 3)),
    st.builds(position.Relative, max_distance=small),
    st.builds(position.Disentangled, buckets=st.just(4), norm_eps=st.none() | st.just(1e-7), separate=st.booleans()),
    st.builds(position.T5Bias, buckets=st.sampled_from([4, 8])),
    st.builds(position.LayeredT5, buckets=st.sampled_from([4, 8])),
    st.builds(position.LearnedT5, offset=st.integers(0, 3), buckets=st.just(4)),
)
widths = {"d_ff": st.integers(1, 9), "bias": st.booleans()}
plain = st.builds(parts.Plain, **widths, activation=st.sampled_from(["relu", "xielu"]))
feedforwards = st.one_of(plain, st.builds(parts.Gated, **widths))
transforms = st.none() | st.builds(head_config.Transform, bias=st.booleans())
softcaps = st.none() | st.just(5.0)
lm_heads = st.builds(head_config.LMHead, tied=st.booleans(), bias=st.booleans(), softcap=softcaps, transform=transforms)
biases = dict.fromkeys(("tied", "bias", "dense_bias", "dense"), st.booleans())
heads = st.one_of(
    lm_heads,
    st.builds(head_config.MaskedLMHead, **biases),
    st.builds(head_config.PretrainingHead, **biases),
    st.just(head_config.NextSentenceHead()),
    st.builds(head_config.ClassificationHead, labels=small, pooler=st.booleans(), bias=st.booleans()),
    st.builds(head_config.ClassificationHead, labels=small, pooler=st.just(False), transform=transforms),
    st.builds(head_config.TaggingHead, labels=small, transform=transforms),
    st.builds(head_config.SpanHead, transform=transforms),
    st.sampled_from([head_config.ReplacedHead(), head_config.EmbeddingHead()]),
)


@st.composite
def transformers(draw: st.DrawFn) -> Any:
    groups, share = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    attention = parts.Attention(
        heads=groups * share,
        kv_heads=groups,
        d_head=draw(st.sampled_from([None, 4, 12])),
        d_v=draw(st.sampled_from([None, 3, 14])),
        bias=draw(st.sampled_from(["none", "qkv", "out", "all"])),
        qk_norm=draw(st.none() | norms),
        qk_norm_over=draw(st.sampled_from(["head", "each-head", "heads"])),
        softcap=draw(st.none() | st.just(2.0)),
    )
    shared = {
        "vocab_size": draw(st.integers(1, 11)),
        "context": draw(st.integers(4, 7)),
        "layers": draw(st.integers(1, 3)),
        "d_model": 16,
        "attention": attention,
        "feedforward": draw(feedforwards),
        "norm": draw(norms),
        "position": draw(positions),
        "placement": draw(st.sampled_from(["pre", "post", "res-post", "sandwich", "none"])),
        "embedding_norm": draw(st.booleans()),
        "embedding_scale": draw(st.sampled_from([False, True, 3.0])),
        "pattern": draw(st.lists(st.builds(config.LayerKind, window=st.sampled_from([None, 4, 9])), max_size=3)),
    }
    if draw(st.booleans()):
        shared["position"] = position.Rotary()
        other = draw(st.sampled_from([position.NoPosition(), position.Rotary(base=9.0)]))
        shared["pattern"].append(config.LayerKind(position=other))
    projected = shared["position"].projected
    if projected or isinstance(shared["position"], position.Relative):
        shared["attention"] = attention.replace(kv_heads=None, d_v=None)
    beside = isinstance(shared["position"], position.Concatenated)
    kind = draw(st.sampled_from(["decoder", "encoder", "both"]))
    if shared["placement"] == "pre" and kind == "decoder":
        shared["sublayers"] = draw(st.sampled_from(["sequential", "parallel", "parallel-two-norms"]))
    if shared["placement"] == "pre" and shared.get("sublayers", "sequential") == "sequential":
        shared["first_norm"] = draw(st.booleans())
    match kind:
        case "decoder":
            hashed = st.builds(
                parts.HashedNGrams,
                orders=st.sampled_from([(2,), (4, 2)]),
                rows=st.integers(1, 9),
                width=st.sampled_from([None, 3]),
            )
            ngrams, narrow = draw(st.none() | hashed), draw(st.sampled_from([None, 4]))
            narrow = None if beside else narrow
            segments = draw(st.integers(0, 2))
            return config.Decoder(**shared, d_embedding=narrow, ngrams=ngrams, segments=segments, head=draw(lm_heads))
        case "encoder":
            divisors = [n for n in (1, 2, 3) if shared["layers"] % n == 0]
            shared["distinct_layers"] = None if shared["pattern"] else draw(st.none() | st.sampled_from(divisors))
            shared["d_embedding"] = None if projected or beside else draw(st.sampled_from([None, 4, 8]))
            special = projected or isinstance(shared["position"], position.Relative | position.LayeredT5)
            if not special and not shared["pattern"] and draw(st.booleans()):
                shared["attention"] = shared["attention"].replace(window=4, global_tokens=1)
            head = draw(heads)
            if shared["d_embedding"] is not None or shared["position"].concatenated_width(16):
                head = head if getattr(head, "dense", True) else head.replace(dense=True)
            return config.Encoder(**shared, segments=draw(st.integers(0, 2)), head=head)
        case _:
            layers, rows = draw(st.none() | st.integers(1, 3)), draw(st.none() | st.integers(12, 15))
            return config.EncoderDecoder(**shared, encoder_layers=layers, source_vocab_size=rows, head=draw(lm_heads))


cells: dict[str, st.SearchStrategy[Any]] = {"vocab_size": st.integers(1, 11), "context": st.just(5)}
cells |= {"cell": st.sampled_from(["elman", "lstm", "gru"]), "layers": st.integers(1, 3), "d_model": st.just(6)}
recurrents = st.builds(config.Recurrent, **cells, d_embedding=st.sampled_from([None, 6]), tied=st.booleans())
alignments = st.builds(
    config.Bahdanau,
    **cells,
    source_vocab_size=st.none() | st.integers(12, 15),
    d_embedding=st.none() | st.just(4),
    d_attention=st.none() | st.just(3),
)
models = st.one_of(transformers(), transformers(), recurrents, alignments)


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Count FLOPs without fused attention and LSTM kernels, whose products torch doesn't see."""
    unfused = sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False)
    with unfused[0], unfused[1], FlopCounterMode(display=False) as counter:
        yield counter


@settings(max_examples=30, deadline=None)
@given(models)
def test_the_parameters_of_any_model_are_counted(model: Any) -> None:
    assert count(model).parameters == built(model)


@settings(max_examples=15, deadline=None)
@given(models)
def test_the_flops_of_any_model_are_counted(model: Any) -> None:
    T = 4
    rows = 1 if getattr(getattr(model, "position", None), "projected", False) else 2  # a batch projects the table once
    inputs: dict[str, Any] = {}
    if isinstance(model, config.EncoderDecoder | config.Bahdanau):
        inputs["source"] = SimpleNamespace(tokens=torch.zeros(rows, T, dtype=torch.long), mask=None)
    net = build(model).eval().requires_grad_(False)
    with torch.no_grad(), counting() as counter:
        net(torch.zeros(rows, T, dtype=torch.long), **inputs)
    assert sum(part.flops for part in count(model, T).components) == counter.get_total_flops() / rows


@pytest.mark.parametrize(
    "name", spread(["transformer++", "transformer", "gpt-tiny", "lstm", "llama-tiny", "elman", "gru"], 2)
)
def test_the_flops_of_training_are_counted(name: str) -> None:
    model, rows, length = resize(preset(name), 64).replace(vocab_size=256), 2, 32
    net, tokens = build(model), torch.randint(0, 256, (rows, length))
    with counting() as counter:
        F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert count(model, length).training() * rows * length == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_the_lectures_terms() -> None:
    """16d²L, 8d²L, 4TdL and 2dV per token."""
    cost = count(preset("gpt2"))
    flops = {part.name: part.flops / cost.length for part in cost.components}
    d, L, T, V = 768, 12, 1024, 50257
    assert (flops["FFN"], flops["MHA projections"]) == (16 * d * d * L, 8 * d * d * L)
    assert (flops["attention"], flops["logits"]) == (4 * T * d * L, 2 * d * V)
    assert cost.training() == 3 * cost.forward
    assert cost.training(recompute=True) == 4 * (24 * d * d * L + 4 * T * d * L) + 3 * 2 * d * V


def flops_by_component(model: Any, length: int | None = None) -> dict[str, int]:
    return {part.name: part.flops for part in count(model, length).components}


def test_windows_bound_the_keys_of_all_or_some_layers() -> None:
    full = preset("gpt-tiny")
    unbounded = flops_by_component(full)
    bounded = flops_by_component(full.replace(attention=full.attention.replace(window=32)))
    assert bounded["attention"] * 4 == unbounded["attention"]
    assert bounded["FFN"] == unbounded["FFN"]
    full = preset("gpt-tiny").replace(layers=5)
    pattern = (config.LayerKind(window=32), config.LayerKind())
    unbounded, bounded = (flops_by_component(model, 128) for model in (full, full.replace(pattern=pattern)))
    assert bounded["attention"] == unbounded["attention"] * (3 * 32 + 2 * 128) // (5 * 128)
    layers = costs(full.replace(pattern=pattern), 128).layers
    repeats = {"layer with a window of 32": 3, "layer with all of the past": 2}
    assert {layer.name: layer.repeats for layer in layers} == repeats
    attention = [next(p.flops for p in layer.cost.components if p.name == "attention") for layer in layers]
    assert 3 * attention[0] + 2 * attention[1] == bounded["attention"]


def test_an_encoders_window_has_two_sides_and_shares_sum_to_one() -> None:
    encoder = preset("bert-tiny").replace(layers=4, pattern=(config.LayerKind(), config.LayerKind(window=32)))
    names = [layer.name for layer in costs(encoder, 128).layers]
    assert names == ["layer with the whole text", "layer with 31 tokens to either side"]
    for name in ("gpt2", "vaswani-base", "bahdanau", "lstm"):
        cost = count(preset(name))
        for recompute in (False, True):
            assert sum(cost.share(part, recompute) for part in cost.components) == pytest.approx(1.0)


def test_an_ngram_model_has_no_weights() -> None:
    cost = count(preset("ngram-5"))
    assert cost.parameters == cost.forward == 0 and "5 look-ups" in cost.note
    assert training_memory(preset("ngram-5"), Workload(8, 64, "fp32")).total() == 0


@pytest.mark.parametrize("name", [name for name in PRESETS if isinstance(preset(name), config.Decoder)])
def test_the_decoding_weights_of_a_decoder_are_exact(name: str) -> None:
    model = preset(name)
    products = sum(part.flops for part in count(model).components if part.name != "attention")
    assert 2 * sum(decoding_weights(model, model.vocab_size).values()) * model.context == products


def test_training_takes_six_flops_per_weight_and_attention() -> None:
    model = preset("gpt2").replace(layers=2)
    weights = decoding_weights(model, model.vocab_size)
    assert weights == {"layers": 2 * 12 * 768 * 768, "logits": 50257 * 768}
    assert count(model, 1024).training() == 6 * sum(weights.values()) + 12 * 2 * 768 * 1024


def test_a_length_beyond_learned_positions_is_refused() -> None:
    with pytest.raises(ModelError, match=r"length 1025: the model's positions end at model.context = 1024"):
        count(preset("gpt2"), 1025)
    assert count(preset("llama-tiny"), 4096).length == 4096


# ---- memory


def saved_bytes(model: Any, batch: int, time: int, bf16: bool) -> int:
    """Return the bytes that autograd saves in the layers, without weights and their 16-bit copies."""
    net = build(model).train()
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    saved: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
    ):
        features = net.features(torch.zeros(batch, time, dtype=torch.long))
    copies = sum(2 * m.weight.numel() for m in net.modules() if isinstance(m, torch.nn.Linear)) if bf16 else 0
    assert features.shape == (batch, time, model.d_model)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) - copies


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("placement", "feedforward", "position", "precision"),
    pairwise(
        ["pre", "post", "none", "res-post", "sandwich", "parallel", "parallel-two-norms"],
        [parts.Plain(d_ff=96), parts.Plain(d_ff=96, activation="gelu"), parts.Gated(d_ff=64)],
        [position.Learned(), position.Rotary()],
        ["fp32", "bf16"],
    ),
)
def test_activations_equal_what_autograd_saves(
    precision: str, placement: str, feedforward: Config, position: Config
) -> None:
    around = {"placement": "pre", "sublayers": placement} if "parallel" in placement else {"placement": placement}
    sizes = {"layers": 3, "d_model": 64, "vocab_size": 16}
    model = preset("gpt-tiny").replace(**sizes, feedforward=feedforward, position=position, **around)
    predicted = training_memory(model, Workload(4, 32, precision)).activations
    assert predicted == pytest.approx(saved_bytes(model, 4, 32, precision == "bf16"), rel=0.1)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_ngram_tables_are_only_looked_up() -> None:
    """They have no 16-bit copy, and don't count towards a model's size."""
    plain = preset("gpt-tiny").replace(layers=1, d_model=64, vocab_size=16)
    hashed = plain.replace(ngrams={"orders": [2, 3], "rows": 5000, "width": 8})
    assert count(hashed).parameters == count(plain).parameters + 2 * 5000 * 8 + 8 * 64
    assert count(hashed).multiplied == count(plain).multiplied + 8 * 64
    assert multiplied(hashed) == multiplied(plain) + 8 * 64
    before, after = (training_memory(model, Workload(4, 32, "bf16")) for model in (plain, hashed))
    assert (after.weights - before.weights, after.copies - before.copies) == (4 * (80_000 + 512), 2 * 512)
    saved = saved_bytes(hashed, 4, 32, True) - saved_bytes(plain, 4, 32, True)
    assert after.activations - before.activations == pytest.approx(saved, rel=0.1)


def test_checkpointed_layers_store_their_inputs() -> None:
    memory = training_memory(preset("gpt2"), Workload(4, 1024, "bf16"))
    assert 4 * 1024 * 12 * 768 * 2 <= memory.recomputed < memory.activations / 4
    assert memory.total() - memory.total(recompute=True) == memory.activations - memory.recomputed


@pytest.mark.parametrize(
    ("work", "bytes_per_parameter"),
    [
        (Workload(1, 64, "fp32"), 16),
        (Workload(1, 64, "bf16"), 18),
        (Workload(1, 64, "fp32", "sgd"), 12),
        (Workload(1, 64, "fp32", shards=4), 4),
    ],
)
def test_bytes_per_parameter(work: Workload, bytes_per_parameter: int) -> None:
    assert training_memory(preset("gpt2"), work).fixed == bytes_per_parameter * count(preset("gpt2")).parameters
    assert MAX_LOGITS == CPU_LOGITS  # the loss has chunks of logits as counted


@pytest.mark.parametrize("name", ["gpt-tiny", "smollm2-135m"])
def test_the_kv_cache_has_the_counted_size(name: str) -> None:
    model = preset(name)
    with torch.device("meta"):
        state = build(model).start(3, 10)
    assert isinstance(state, TransformerState)
    store = state.cache.store
    assert store.numel() * store.element_size() == 3 * 10 * cache_bytes(model, "fp32")


def test_recurrent_states_have_the_counted_size() -> None:
    model = preset("lstm")
    state = build(model).start(2, 5)
    assert isinstance(state, HiddenStates)
    states = state.states  # also of the position before the first token
    assert states.numel() * states.element_size() == 2 * 6 * cache_bytes(model, "fp32")


# ---- time, energy and numbers


def test_time_and_energy_are_planned() -> None:
    planned = plan_training(6e9, 10**9, 2**20, machine=Machine(device_named("h100"), gpus=8, mfu=0.5, precision="bf16"))
    assert (planned.flops, planned.steps) == (6e18, 954)
    assert planned.seconds == pytest.approx(6e18 / (8 * 0.5 * 989e12))
    assert planned.kilowatt_hours == pytest.approx(8 * 0.7 * 1.1 * planned.seconds / 3600)


def test_unknown_devices_and_utilisations_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--device 'h300': no such device; did you mean"):
        device_named("h300")
    with pytest.raises(ConfigError, match="--mfu 0"):
        Machine(device_named("cpu"), 1, 0.0, precision="fp32")


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10G", "a10"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA L40", None),
    ],
)
def test_devices_are_recognised_by_their_driver_names(driver: str, name: str | None) -> None:
    assert device_called(driver) == (None if name is None else DEVICES[name])


@pytest.mark.parametrize(
    ("text", "number"),
    [("300B", 3e11), ("1.5T", 1.5e12), ("3e11", 3e11), ("20_000", 20_000), ("7k", 7000), (" 1M ", 1e6)],
)
def test_counts_are_parsed(text: str, number: float) -> None:
    assert parse_count(text, "--tokens") == number


@pytest.mark.parametrize("text", ["", "B", "abc", "-3B", "0", "1e999", "nan", "inf", "3X", "1.2.3M", "3 0 B", "0.1"])
def test_invalid_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--tokens .*expected a number of at least 1, such as 300B"):
        parse_count(text, "--tokens")


def test_numbers_are_formatted() -> None:
    assert [short(number) for number in (124439808, 175e9, 999)] == ["124.4M", "175B", "999"]
    assert [byte_size(number) for number in (80e9, 12)] == ["74.5 GiB", "12 B"]
    assert [duration(seconds) for seconds in (5400, 30 * 86400)] == ["1.5 hours", "30 days"]


@pytest.mark.parametrize("name", ["gpt-tiny", slow("vaswani-tiny")])
def test_the_flops_of_muons_update_are_counted(name: str) -> None:
    shape = preset(name)
    model = build(shape)
    muon = optimizer.build(Muon(rounds=3), model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with FlopCounterMode(display=False) as counted:
        muon.step()
    update, machine = orthogonal_flops(shape, 3), Machine(device_named("h100"), gpus=1, mfu=0.5, precision="bf16")
    assert counted.get_total_flops() == update
    plain, planned = (plan_training(1.0, 64, 16, machine=machine, update_flops=flops) for flops in (0.0, update))
    assert planned.flops - plain.flops == 4 * update
