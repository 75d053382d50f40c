"""The CPU fast path gives what `model.step` gives."""

import pytest
import torch

from weft.decode.config import Sampling
from weft.decode.fast import cuda, stepper
from weft.decode.fast.cpu import CPUFastPath
from weft.decode.fast.quantize import quantize
from weft.decode.fast.stepper import cpu_fast_path_fits as fits
from weft.decode.generate import generate
from weft.models.build import build
from weft.models.config import Decoder
from weft.models.presets import gpt, llama
from weft.models.transformer import Transformer
from weft.nn.config import Attention, LoRA
from weft.nn.lora import LowRank
from weft.nn.position_config import Rotary
from weft.nn.scaling import DynamicNTK, LinearScaling
from weft.training.finetune import add_adapters

CONFIGS = {
    "plain": llama(2, 32, 4, 48, context=32, vocab_size=50),
    "shared, tied": llama(3, 48, 6, 40, context=32, vocab_size=50, kv_heads=2, tied=True),
    "one key head": llama(1, 32, 4, 48, context=32, vocab_size=50, kv_heads=1),
    "stretched": llama(2, 32, 4, 48, context=32, vocab_size=50).replace(
        position=Rotary(base=500.0, scaling=LinearScaling(factor=2.0)), embedding_scale=True
    ),
}


def built(config: Decoder) -> Transformer:
    torch.manual_seed(0)
    model = build(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(torch.rand_like(parameter))
    return model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("bits", [None, "int8", "int4"])
def test_it_equals_the_plain_step(name: str, batch: int, bits: str | None) -> None:
    model = built(CONFIGS[name])
    if bits is not None:
        quantize(model, bits)
    prompt = torch.randint(50, (batch, 5))
    with torch.inference_mode():
        plain, ours = model.start(batch, 16), model.start(batch, 16)
        model.advance(prompt, plain)
        model.advance(prompt, ours)
        assert fits(model, ours)
        step = CPUFastPath(model, ours)
        for _ in range(6):
            tokens = torch.randint(50, (batch,))
            expected = model.step(tokens[:, None], plain)[:, -1]
            # a kernel that rounds its input to 8 bits may round a last digit the other way
            tolerance = 1e-4 if bits is None else 0.05
            torch.testing.assert_close(step(tokens), expected, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(ours.cache.store, plain.cache.store, atol=tolerance, rtol=tolerance)
        assert ours.longest == plain.longest == 11 and ours.lengths.tolist() == [11] * batch


def test_generate_takes_it_and_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(CONFIGS["shared, tied"])
    taken: list[int] = []
    monkeypatch.setattr(stepper, "native_path_fits", lambda model, state: False)
    monkeypatch.setattr(stepper, "CPUFastPath", lambda *given: taken.append(1) or CPUFastPath(*given))

    def texts(prompts: list[list[int]]) -> list[tuple[int, int]]:
        settings = [Sampling(temperature=0.0, max_tokens=length) for length in (9, 4)[: len(prompts)]]
        return [(token.row, token.id) for token in generate(model, prompts, settings)]

    ours = texts([[1, 2, 3], [4, 5, 6]])
    assert len(taken) == 2  # again when a row has ended
    monkeypatch.setattr(stepper, "cpu_fast_path_fits", lambda model, state: False)
    assert texts([[1, 2, 3], [4, 5, 6]]) == ours
    assert len(taken) == 2


def test_what_it_is_not_written_for() -> None:
    model = built(CONFIGS["plain"])
    state = model.start(2, 8)
    assert fits(model, state)
    uneven = model.start(2, 8)
    model.advance(torch.randint(50, (2, 3)), uneven, torch.tensor([3, 2]))
    assert not fits(model, uneven)
    hook = model.decoder.blocks[1].attention.weights.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    assert not fits(model, state)
    hook.remove()
    assert fits(model, state)
    for other in (
        gpt(1, 32, 2, 16, vocab_size=50),
        CONFIGS["plain"].replace(attention=Attention(heads=4, window=4)),
        CONFIGS["plain"].replace(position=Rotary(scaling=DynamicNTK(factor=2.0))),
    ):
        different = build(other).eval()
        assert not fits(different, different.start(2, 8))
    assert not fits(model.double(), model.start(2, 8))


def test_an_adapter_is_never_left_out() -> None:
    model = built(CONFIGS["plain"])
    add_adapters(model, LoRA(rank=2))
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, LowRank):
                part.b.normal_()
    model.eval()
    attention = model.decoder.blocks[0].attention  # type: ignore[union-attr]
    assert isinstance(attention.qkv, LowRank) and cuda._matrix(attention.qkv) is None  # type: ignore[arg-type]
    tokens = torch.randint(50, (1, 6))
    with torch.inference_mode():
        expected = model(tokens)
        state = model.start(1, 8)
        model.advance(tokens[:, :5], state)
        torch.testing.assert_close(CPUFastPath(model, state)(tokens[:, 5]), expected[:, 5], atol=1e-4, rtol=1e-4)
    quantize(model, "int8")
    with torch.inference_mode():
        assert float((model(tokens) - expected).norm() / expected.norm()) < 0.1
