"""Each of many texts is the one that is written alone, and the engine is empty afterwards."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tests.decode.fast.helpers import build_transformer, sharpen
from tests.decode.small import Asking, complete

from weft.decode.config import Sampling
from weft.decode.constrain import regex
from weft.decode.engine.blocks import Request, split_by_size
from weft.decode.engine.engine import Counts, EngineLimits
from weft.decode.fast.cuda_graphs import PagedGraphs
from weft.decode.prompt import Prompt
from weft.decode.text import Completion
from weft.errors import ModelError
from weft.models.presets import gpt, llama, preset, vaswani
from weft.models.transformer import Transformer
from weft.nn.config import Attention, Latent
from weft.nn.position_config import Rotary
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

BYTES = build_tokenizer(Byte(), ["any"])
VOCAB = BYTES.vocab_size
MODELS = {
    "llama": sharpen(build_transformer(llama(2, 16, 4, d_ff=32, vocab_size=VOCAB, kv_heads=2))),
    "latent": sharpen(
        build_transformer(
            llama(2, 16, 2, d_ff=32, vocab_size=VOCAB).replace(
                attention=Attention(heads=2, latent=Latent(rank=6, query_rank=5), sinks=True),
                position=Rotary(fraction=0.5),
            )
        )
    ),
    "gpt2": sharpen(build_transformer(gpt(2, 16, 2, context=48, vocab_size=VOCAB))),
}
NO_EOS = (BYTES.eos_id or 0,)
Job = tuple[str, Sampling]  # a prompt, and how it is continued


def engine_for(name: str, limits: EngineLimits, *, ahead: bool) -> Asking:
    """An engine; with `ahead` as on a GPU, except that its steps are not captured."""
    engine = Asking(MODELS[name], BYTES, limits)
    if ahead:
        manager = engine.manager
        manager.graphs = PagedGraphs(manager.model, manager.store, limits.rows, kernels=False)
    return engine


def random_jobs(count: int, seed: int, *, rules: bool) -> list[Job]:
    """Prompts of 0 to 40 characters and texts of 1 to 5 tokens, greedy or sampled, some with host-only `rules`."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    for number in range(count):
        options: dict[str, Any] = {"temperature": 0.0} if rng.random() < 0.4 else {"temperature": 0.9, "seed": number}
        if rng.random() < 0.2 and rules:
            options |= {"frequency_penalty": 0.7, "repetition_penalty": 1.3}
        if rng.random() < 0.2 and rules:
            options |= {"min_tokens": 1, "logit_bias": {BYTES.encode("e")[0]: 9.0}, "banned": (5,)}
        if options["temperature"] and rng.random() < 0.3:
            options |= {"top_k": 30, "top_p": 0.9}
        prompt = "".join(rng.choices("abcdefgh ", k=rng.choice([0, 1, 2, 5, 20, 40])))
        jobs.append((prompt, Sampling(max_tokens=rng.randint(1, 5), stop=("b ", "e"), **options)))
    return jobs


COMPLETIONS: dict[str, Completion] = {}  # several tests need the same texts


def alone(model: Transformer, job: Job) -> Completion:
    """The text that is written when nothing else is."""
    name = f"{id(model)} {job}"
    if name not in COMPLETIONS:
        COMPLETIONS[name] = complete(model, BYTES, [job[0]], job[1])[0]
    return COMPLETIONS[name]


def submit(engine: Asking, jobs: Sequence[Job]) -> list[Request]:
    return [engine.ask(*job) for job in jobs]


def check_texts(requests: Sequence[Request], model: Transformer, jobs: Sequence[Job]) -> None:
    assert [request.completion() for request in requests] == [alone(model, job) for job in jobs]


def check_empty(engine: Asking) -> None:
    """Nothing is running, and no block, row or prefix is reserved."""
    assert engine.idle
    manager = engine.manager
    assert manager.pool.free_blocks == len(manager.pool.uses)
    assert not manager.pool.pending
    assert not manager.tables
    assert len(manager.free_rows) == engine.scheduler.rows
    assert bool((manager.table_rows == manager.store.nowhere).all())


def check_run(engine: Asking, jobs: Sequence[Job]) -> list[Request]:
    """Run jobs together: each text is the one that is written alone, and the engine is empty afterwards."""
    requests = submit(engine, jobs)
    engine.run()
    check_texts(requests, engine.model, jobs)
    check_empty(engine)
    return requests


# ---- warm-up


@pytest.mark.parametrize(("name", "blocks"), [("llama", 64), ("gpt2", 64), ("llama", 3)])
def test_a_warmed_up_engine_prepares_nothing_later(name: str, blocks: int) -> None:
    engine = engine_for(name, EngineLimits(blocks=blocks, block_size=16, rows=5), ahead=True)
    engine.warm_up()
    check_empty(engine)
    assert engine.counts == Counts()
    graphs = engine.manager.graphs
    assert graphs is not None
    captured = set(graphs.steps)
    assert {rows for rows, _ in captured} == {1, 2, 4, 8}
    check_run(engine, random_jobs(8 if blocks > 3 else 1, 1, rules=False))
    assert set(graphs.steps) == captured


# ---- the same texts


@pytest.mark.parametrize(
    ("name", "count", "ahead", "rules"),
    [
        ("llama", 80, False, True),
        ("gpt2", 24, False, True),
        ("latent", 20, False, True),
        *product(["llama", "gpt2"], [24], [True], [True, False]),
    ],
)
def test_many_texts_equal_single_ones(name: str, count: int, ahead: bool, rules: bool) -> None:
    jobs = random_jobs(count, seed=1, rules=rules)
    engine = engine_for(name, EngineLimits(rows=16, prefill=64, block_size=4), ahead=ahead)
    requests = submit(engine, jobs)
    max_ahead = 0
    while engine.step():
        max_ahead = max(max_ahead, *(request.ahead for request in requests))
    assert max_ahead == int(ahead)
    check_texts(requests, MODELS[name], jobs)
    check_empty(engine)
    assert ahead or {request.chunks[-1].finish for request in requests} >= {"stop", "length"}
    assert engine.counts.written == sum(request.written for request in requests)  # dropped tokens are not counted
    assert engine.counts.steps < engine.counts.written / (1 if ahead else 3)  # many in a step


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.integers(0, 3), st.booleans())
@examples(max_examples=8, deadline=None)
def test_prompts_in_chunks_and_requests_that_arrive_while_others_run(
    prefill: int, block_size: int, rows: int, pause: int, ahead: bool
) -> None:
    jobs = random_jobs(8, seed=4, rules=not ahead)
    engine = engine_for("llama", EngineLimits(rows=rows, prefill=prefill, block_size=block_size), ahead=ahead)
    requests = submit(engine, jobs[:4])
    for job in jobs[4:]:
        for _ in range(pause):
            engine.step()
        requests += submit(engine, [job])
    engine.run()
    check_texts(requests, MODELS["llama"], jobs)
    check_empty(engine)


def test_log_probabilities() -> None:
    model, settings = MODELS["gpt2"], Sampling(max_tokens=5, temperature=0.0, logprobs=2)
    engine = Asking(model, BYTES)
    requests = [engine.ask("abc", settings), engine.ask("d", Sampling(max_tokens=3))]
    engine.run()
    found, expected = requests[0].completion().scored, complete(model, BYTES, ["abc"], settings)[0].scored
    assert [token.id for token in found] == [token.id for token in expected]
    assert [token.logprob for token in found] == pytest.approx([token.logprob for token in expected], abs=1e-4)
    assert requests[1].completion().scored == ()


def test_a_pattern_constrains_only_its_own_text() -> None:
    pattern = regex(BYTES, "(yes|no)!")
    engine = Asking(MODELS["llama"], BYTES)
    settings = Sampling(max_tokens=8, seed=1)
    constrained = engine.ask(Prompt.of(BYTES, "is it? ", pattern), settings)
    free = engine.ask("is it? ", settings)
    engine.run()
    assert constrained.completion().text in ("yes!", "no!")
    assert constrained.chunks[-1].finish == "stop"
    check_texts([free], MODELS["llama"], [("is it? ", settings)])


def test_stop_ids() -> None:
    engine, settings = Asking(MODELS["llama"], BYTES), Sampling(max_tokens=9, temperature=0.0)
    unstopped = engine.ask([97, 98], settings)
    engine.run()
    third = unstopped.ids[4]
    stopped = engine.ask(replace(Prompt.of(BYTES, [97, 98]), stop_ids=frozenset({third})), settings)
    engine.run()
    assert stopped.ids == unstopped.ids[: unstopped.ids.index(third, 2) + 1]
    assert stopped.chunks[-1].finish == "stop"


# ---- blocks


def test_a_common_prefix_is_read_once() -> None:
    prefix = "you are a helpful machine. "  # 27 tokens: 6 blocks of 4
    jobs: list[Job] = [(prefix + tail, Sampling(max_tokens=6, temperature=0.0)) for tail in ("a", "bc", "d", "e")]
    engine = Asking(MODELS["llama"], BYTES, EngineLimits(block_size=4))
    requests = check_run(engine, jobs)
    prompts = sum(len(request.prompt.ids) for request in requests)
    assert engine.counts.shared == 3 * 24  # all came together, but three waited for the first to be read
    assert engine.counts.prompt == prompts - 3 * 24
    check_run(engine, jobs)  # no text uses the blocks now, but they are still cached
    assert engine.counts.shared - 3 * 24 >= 4 * 24


def test_the_last_block_of_a_cached_prompt_is_read_again() -> None:
    model, job = MODELS["llama"], ("abcdabcd", Sampling(max_tokens=6, temperature=0.0))
    engine = Asking(model, BYTES, EngineLimits(block_size=4))
    first = submit(engine, [job])[0]
    while first.written < 3:
        engine.step()
    later = submit(engine, [job, job])  # the first is still running
    engine.run()
    check_texts([first, *later], model, [job] * 3)
    assert engine.counts.shared == 2 * 4
    assert engine.counts.prompt == 8 + 2 * 4


def test_an_answer_is_shared_with_the_next_question() -> None:
    model, settings = MODELS["llama"], Sampling(max_tokens=12, temperature=0.0)
    engine = Asking(model, BYTES, EngineLimits(block_size=4))
    first = engine.ask([97, 98, 99, 100], settings)
    engine.run()
    longer = [*first.ids, 97, 98]
    second = engine.ask(longer, settings)
    engine.run()
    assert engine.counts.shared == (len(first.ids) - 1) // 4 * 4
    assert second.completion() == complete(model, BYTES, [longer], settings)[0]


@pytest.mark.parametrize("blocks", [14, 20])
@pytest.mark.parametrize("ahead", [False, True])
def test_the_youngest_is_preempted_if_blocks_run_out(blocks: int, ahead: bool) -> None:
    """An engine that is ahead lets the host catch up first."""
    rng, rules = random.Random(5), {} if ahead else {"banned": NO_EOS}
    prompts = ["".join(rng.choices("abcdef", k=10)) for _ in range(6)]
    engine = engine_for("llama", EngineLimits(blocks=blocks, block_size=4, rows=6), ahead=ahead)
    check_run(engine, [(prompt, Sampling(max_tokens=30, seed=n, **rules)) for n, prompt in enumerate(prompts)])
    assert engine.counts.preempted > 0


def test_a_long_prompt_delays_nobody() -> None:
    engine = Asking(MODELS["llama"], BYTES, EngineLimits(prefill=8, block_size=4))
    running = engine.ask("ab", Sampling(max_tokens=60, banned=NO_EOS))
    engine.step()
    long = engine.ask("x" * 64, Sampling(max_tokens=1))
    short = engine.ask("yes", Sampling(max_tokens=1))
    before = running.written
    while not short.ended:
        engine.step()
    assert not long.written
    while not long.ended:
        before_step = running.written
        engine.step()
        assert running.written == before_step + 1  # one token in every step
    assert running.written - before >= 8
    engine.run()


# ---- errors and limits


def test_one_failure_ends_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = MODELS["llama"], Asking(MODELS["llama"], BYTES)
    settings = Sampling(max_tokens=3, temperature=0.0, logprobs=1)
    requests = [engine.ask(prompt, settings) for prompt in ("ab", "y", "def")]
    head = engine.manager.head

    def damaged(features: torch.Tensor) -> torch.Tensor:
        logits = head(features)
        if requests[1].written == 1 and not requests[1].ended:
            logits[1] = torch.nan
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(engine.manager, "head", damaged)
        engine.run()
    for request, prompt in ((requests[0], "ab"), (requests[2], "def")):
        assert request.completion().text == alone(model, (prompt, settings)).text
    assert requests[1].written == 1
    with pytest.raises(ModelError, match="NaN"):
        requests[1].completion()
    check_empty(engine)


def test_models_that_continue_no_text_are_refused() -> None:
    with pytest.raises(ModelError, match="cannot generate"):
        Asking(build_transformer(preset("bert-tiny").replace(layers=1, vocab_size=VOCAB)), BYTES)
    with pytest.raises(ModelError, match="source"):
        Asking(build_transformer(vaswani(1, 16, 2, d_ff=32, dropout=0.0, vocab_size=VOCAB)), BYTES)


def test_a_text_may_take_all_blocks() -> None:
    engine = Asking(MODELS["gpt2"], BYTES, EngineLimits(blocks=4, block_size=4))
    check_run(engine, [("abcdefghij", Sampling(max_tokens=7, temperature=0.0))])


def test_the_window_ends_a_text() -> None:
    engine = Asking(MODELS["gpt2"], BYTES, EngineLimits(block_size=5))
    settings = Sampling(max_tokens=50, temperature=0.0, banned=NO_EOS, slide=False)
    (request,) = check_run(engine, [("x" * 45, settings)])
    assert request.chunks[-1].finish == "length" and request.written == 4


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(0, 300))
def test_groups_hold_every_item_once_and_are_worth_their_cost(sizes: list[int], cost: int) -> None:
    groups = split_by_size(range(len(sizes)), sizes, cost)
    assert sorted(item for group in groups for item in group) == list(range(len(sizes)))
    padded = sum(len(group) * max(sizes[item] for item in group) for group in groups)
    assert padded + cost * (len(groups) - 1) <= len(sizes) * max(sizes)
