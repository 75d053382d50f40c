"""Many texts at once are each the text that is written alone, and leave nothing behind."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tests.decode.small import Asking, complete

from weft.decode.config import Sampling
from weft.decode.constrain import regex
from weft.decode.engine.blocks import Request, bands
from weft.decode.engine.engine import Limits
from weft.decode.prompt import Prompt
from weft.decode.text import Completion
from weft.errors import ModelError
from weft.models.build import build as build_model
from weft.models.presets import gpt, llama, preset, vaswani
from weft.models.transformer import Transformer
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

BYTES = build_tokenizer(Byte(), ["any"])
VOCAB = BYTES.vocab_size


def decided(model: Transformer) -> Transformer:
    """Fresh weights give almost even logits; make the choices decided ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model.eval()


def build(name: str) -> Transformer:
    torch.manual_seed(0)
    if name == "llama":
        return decided(build_model(llama(2, 16, 4, d_ff=32, vocab_size=VOCAB, kv_heads=2)))
    return decided(build_model(gpt(2, 16, 2, context=48, vocab_size=VOCAB)))


MODELS = {name: build(name) for name in ("llama", "gpt2")}
Wish = tuple[str, Sampling]


def wishes(count: int, seed: int) -> list[Wish]:
    """Prompts of 0 to 40 characters, texts of 1 to 5 tokens, greedy or drawn, some with more rules."""
    rng = random.Random(seed)
    some: list[Wish] = []
    for number in range(count):
        extra: dict[str, Any] = {"temperature": 0.0} if rng.random() < 0.4 else {"temperature": 0.9, "seed": number}
        if rng.random() < 0.2:
            extra |= {"frequency_penalty": 0.7, "repetition_penalty": 1.3}
        if rng.random() < 0.2:
            extra |= {"min_tokens": 1, "logit_bias": {BYTES.encode("e")[0]: 9.0}, "banned": (5,)}
        if extra["temperature"] and rng.random() < 0.3:
            extra |= {"top_k": 30, "top_p": 0.9}
        prompt = "".join(rng.choices("abcdefgh ", k=rng.choice([0, 1, 2, 5, 20, 40])))
        some.append((prompt, Sampling(max_tokens=rng.randint(1, 5), stop=("b ", "e"), **extra)))
    return some


WRITTEN: dict[str, Completion] = {}  # several tests ask for the same texts


def alone(model: Transformer, wish: Wish) -> Completion:
    """The text that is written when nothing else is."""
    name = f"{id(model)} {wish}"
    if name not in WRITTEN:
        WRITTEN[name] = complete(model, BYTES, [wish[0]], wish[1])[0]
    return WRITTEN[name]


def ask(engine: Asking, some: Sequence[Wish]) -> list[Request]:
    return [engine.ask(*wish) for wish in some]


def check_empty(engine: Asking) -> None:
    """Nothing is running, and nothing is held for anybody."""
    assert engine.idle
    manager = engine.manager
    assert manager.pool.free_blocks == len(manager.pool.uses)
    assert not manager.pool.pending
    assert not manager.tables
    assert len(manager.free_rows) == engine.scheduler.rows
    assert bool((manager.numbers == manager.store.nowhere).all())


# ---- the same texts


@pytest.mark.parametrize(("name", "count"), [("llama", 200), ("gpt2", 60)])
def test_many_at_once_are_as_alone(name: str, count: int) -> None:
    model = MODELS[name]
    some = wishes(count, seed=1)
    engine = Asking(model, BYTES, Limits(rows=16, prefill=64, block_size=4))
    requests = ask(engine, some)
    engine.run()
    assert [request.completion() for request in requests] == [alone(model, wish) for wish in some]
    assert {request.chunks[-1].finish for request in requests} >= {"stop", "length"}
    check_empty(engine)
    assert engine.counts.steps < sum(request.written for request in requests) / 3  # many in a step


def test_texts_that_come_while_others_are_written() -> None:
    model, some = MODELS["llama"], wishes(30, seed=2)
    engine = Asking(model, BYTES, Limits(rows=5, prefill=16, block_size=4))
    rng = random.Random(3)
    requests: list[Request] = []
    while len(requests) < len(some) or not engine.idle:
        if len(requests) < len(some) and rng.random() < 0.6:
            requests += ask(engine, [some[len(requests)]])
        engine.step()
    assert [request.completion() for request in requests] == [alone(model, wish) for wish in some]


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5))
@examples(max_examples=12, deadline=None)
def test_a_prompt_in_chunks_is_the_prompt(prefill: int, block_size: int, rows: int) -> None:
    model, some = MODELS["llama"], wishes(8, seed=4)
    engine = Asking(model, BYTES, Limits(rows=rows, prefill=prefill, block_size=block_size))
    requests = ask(engine, some)
    engine.run()
    assert [request.completion() for request in requests] == [alone(model, wish) for wish in some]
    check_empty(engine)


def test_log_probabilities_come_along() -> None:
    model, settings = MODELS["gpt2"], Sampling(max_tokens=5, temperature=0.0, logprobs=2)
    engine = Asking(model, BYTES)
    asked = [engine.ask("abc", settings), engine.ask("d", Sampling(max_tokens=3))]
    engine.run()
    mine, other = asked[0].completion(), complete(model, BYTES, ["abc"], settings)[0]
    assert [s.id for s in mine.scored] == [s.id for s in other.scored]
    assert [s.logprob for s in mine.scored] == pytest.approx([s.logprob for s in other.scored], abs=1e-4)
    assert asked[1].completion().scored == ()


def test_a_pattern_holds_one_text_and_not_its_neighbours() -> None:
    pattern = regex(BYTES, "(yes|no)!")
    engine = Asking(MODELS["llama"], BYTES)
    settings = Sampling(max_tokens=8, seed=1)
    held = engine.ask(Prompt.of(BYTES, "is it? ", pattern), settings)
    free = engine.ask("is it? ", settings)
    engine.run()
    assert held.completion().text in ("yes!", "no!")
    assert held.chunks[-1].finish == "stop"
    assert free.completion() == complete(MODELS["llama"], BYTES, ["is it? "], settings)[0]


def test_ids_that_end_a_text() -> None:
    model, settings = MODELS["llama"], Sampling(max_tokens=9, temperature=0.0)
    engine = Asking(model, BYTES)
    whole = engine.ask([97, 98], settings)
    engine.run()
    third = whole.ids[4]
    ended = engine.ask(replace(Prompt.of(BYTES, [97, 98]), stop_ids=frozenset({third})), settings)
    engine.run()
    assert ended.ids == whole.ids[: whole.ids.index(third, 2) + 1]
    assert ended.chunks[-1].finish == "stop"


# ---- blocks


def test_texts_that_begin_alike_are_read_once() -> None:
    model = MODELS["llama"]
    opening = "you are a helpful machine. "  # 27 tokens: 6 blocks of 4
    some: list[Wish] = [(opening + tail, Sampling(max_tokens=6, temperature=0.0)) for tail in ("a", "bc", "d", "e")]
    engine = Asking(model, BYTES, Limits(block_size=4))
    requests = ask(engine, some)
    engine.run()
    assert [request.completion() for request in requests] == [alone(model, wish) for wish in some]
    prompts = sum(len(request.prompt.ids) for request in requests)
    assert engine.counts.shared == 3 * 24  # though all came at once: the others waited for the first to be read
    assert engine.counts.prompt == prompts - 3 * 24
    again = ask(engine, some)  # nobody uses the blocks now, but they are still there
    engine.run()
    assert [request.completion() for request in again] == [request.completion() for request in requests]
    assert engine.counts.shared - 3 * 24 >= 4 * 24
    check_empty(engine)


def test_of_a_whole_prompt_that_is_known_the_last_block_is_read_again() -> None:
    model, settings = MODELS["llama"], Sampling(max_tokens=6, temperature=0.0)
    wish: Wish = ("abcdabcd", settings)
    engine = Asking(model, BYTES, Limits(block_size=4))
    first = ask(engine, [wish])[0]
    while first.written < 3:
        engine.step()
    later = ask(engine, [wish, wish])  # the first is still being written
    engine.run()
    assert [request.completion() for request in (first, *later)] == [alone(model, wish)] * 3
    assert engine.counts.shared == 2 * 4
    assert engine.counts.prompt == 8 + 2 * 4


def test_the_answer_is_shared_with_the_next_question() -> None:
    model, settings = MODELS["llama"], Sampling(max_tokens=12, temperature=0.0)
    engine = Asking(model, BYTES, Limits(block_size=4))
    first = engine.ask([97, 98, 99, 100], settings)
    engine.run()
    longer = [*first.ids, 97, 98]
    second = engine.ask(longer, settings)
    engine.run()
    assert engine.counts.shared == (len(first.ids) - 1) // 4 * 4
    assert second.completion() == complete(model, BYTES, [longer], settings)[0]


@pytest.mark.parametrize("blocks", [14, 20])
def test_where_free_blocks_run_out_the_youngest_is_preempted(blocks: int) -> None:
    model, rng = MODELS["llama"], random.Random(5)
    some: list[Wish] = [
        ("".join(rng.choices("abcdef", k=10)), Sampling(max_tokens=30, seed=n, banned=(BYTES.eos_id or 0,)))
        for n in range(6)
    ]
    engine = Asking(model, BYTES, Limits(blocks=blocks, block_size=4, rows=6))
    requests = ask(engine, some)
    engine.run()
    assert engine.counts.preempted > 0
    assert [request.completion() for request in requests] == [alone(model, wish) for wish in some]
    check_empty(engine)


def test_a_long_prompt_holds_nobody_up() -> None:
    model = MODELS["llama"]
    engine = Asking(model, BYTES, Limits(prefill=8, block_size=4))
    writing = engine.ask("ab", Sampling(max_tokens=60, banned=(BYTES.eos_id or 0,)))
    engine.step()
    long = engine.ask("x" * 64, Sampling(max_tokens=1))
    short = engine.ask("yes", Sampling(max_tokens=1))
    before = writing.written
    while not short.ended:
        engine.step()
    assert not long.written
    while not long.ended:
        before_step = writing.written
        engine.step()
        assert writing.written == before_step + 1  # a token in every step all the while
    assert writing.written - before >= 8
    engine.run()


# ---- what goes wrong


def test_one_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]
    engine = Asking(model, BYTES)
    settings = Sampling(max_tokens=3, temperature=0.0, logprobs=1)
    asked = [engine.ask(prompt, settings) for prompt in ("ab", "y", "def")]
    head = engine.manager.head

    def damaged(features: torch.Tensor) -> torch.Tensor:
        logits = head(features)
        if asked[1].written == 1 and not asked[1].ended:
            logits[1] = torch.nan
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(engine.manager, "head", damaged)
        engine.run()
    for request, prompt in ((asked[0], "ab"), (asked[2], "def")):
        assert request.completion().text == alone(model, (prompt, settings)).text
    assert asked[1].written == 1
    with pytest.raises(ModelError, match="NaN"):
        asked[1].completion()
    check_empty(engine)


def test_what_continues_no_text_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot generate"):
        Asking(build_model(preset("bert-tiny").replace(layers=1, vocab_size=VOCAB)).eval(), BYTES)
    with pytest.raises(ModelError, match="source"):
        Asking(build_model(vaswani(1, 16, 2, d_ff=32, dropout=0.0, vocab_size=VOCAB)).eval(), BYTES)


def test_a_text_may_take_all_blocks() -> None:
    engine = Asking(MODELS["gpt2"], BYTES, Limits(blocks=4, block_size=4))
    fits = engine.ask("abcdefghij", Sampling(max_tokens=7, temperature=0.0))
    engine.run()
    assert fits.completion() == complete(MODELS["gpt2"], BYTES, ["abcdefghij"], fits.settings)[0]


def test_the_window_ends_a_text() -> None:
    engine = Asking(MODELS["gpt2"], BYTES, Limits(block_size=5))
    settings = Sampling(max_tokens=50, temperature=0.0, banned=(BYTES.eos_id or 0,), slide=False)
    request = engine.ask("x" * 45, settings)
    engine.run()
    assert request.completion() == complete(MODELS["gpt2"], BYTES, ["x" * 45], settings)[0]
    assert request.chunks[-1].finish == "length"
    assert request.written == 4


# ---- inside


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(0, 300))
def test_bands_hold_every_place_once_and_are_worth_their_toll(sizes: list[int], toll: int) -> None:
    groups = bands(range(len(sizes)), sizes, toll)
    assert sorted(place for group in groups for place in group) == list(range(len(sizes)))
    padded = sum(len(group) * max(sizes[place] for place in group) for group in groups)
    assert padded + toll * (len(groups) - 1) <= len(sizes) * max(sizes)
