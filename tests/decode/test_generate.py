"""Generation from prompts of different lengths equals recomputing each row without a cache."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tests.decode.small import VOCAB, complete, decoder, recompute_greedy, token_ids
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.generate import generate
from weft.decode.prompt import Prompt, start_token
from weft.errors import ModelError
from weft.models import base
from weft.models.base import LanguageModel, State
from weft.models.build import build
from weft.models.config import Recurrent
from weft.models.presets import preset
from weft.nn.config import LayerNorm
from weft.nn.position_config import Learned
from weft.progress import pausing
from weft.text.config import BPE, Byte, Char
from weft.text.tokenizer import build_tokenizer


def recurrent() -> LanguageModel:
    torch.manual_seed(0)
    return build(Recurrent(vocab_size=VOCAB, d_model=16, cell="gru")).eval()


MODELS = {"rotary": decoder(), "learned": decoder(position=Learned(), norm=LayerNorm(), context=64), "gru": recurrent()}


@pytest.mark.parametrize("name", MODELS)
@given(prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=4))
@examples(max_examples=8, deadline=None)
def test_greedy_equals_recomputing(name: str, prompts: list[list[int]]) -> None:
    settings, rows = Sampling(temperature=0.0, max_tokens=6), len(prompts)
    expected = [recompute_greedy(MODELS[name], prompt, 6) for prompt in prompts]
    assert token_ids(MODELS[name], prompts, settings) == expected
    finishes = [chunk.finish for chunk in generate(MODELS[name], prompts, settings)]
    assert finishes == [None] * (5 * rows) + ["length"] * rows


def test_a_seed_gives_the_same_text_in_any_batch() -> None:
    model, settings = MODELS["rotary"], Sampling(max_tokens=12, top_k=20)
    prompt, others = [5, 6, 7], [[1], [2, 3, 4, 5, 6, 7, 8], [9, 9]]
    alone = token_ids(model, [prompt], settings, seeds=[42])[0]
    assert alone == token_ids(model, [*others, prompt], settings, seeds=[1, 2, 3, 42])[3]
    assert alone != token_ids(model, [prompt], settings, seeds=[43])[0]


def test_rows_that_end_leave_the_others_alone() -> None:
    """Each row ends at another token; the tokens before are the same as without an end."""
    model, settings = MODELS["gru"], Sampling(max_tokens=8, seed=4)
    prompts, lengths = [[1, 2, 3, 4, 5], [6], [7, 8]], [2, 5, 7]
    endless = token_ids(model, prompts, settings)
    expected = [ids[:length] for ids, length in zip(endless, lengths, strict=True)]
    assert all(ids[-1] not in ids[:-1] for ids in expected)
    stopped = [Prompt(prompt, stop_ids=frozenset(ids[-1:])) for prompt, ids in zip(prompts, expected, strict=True)]
    assert token_ids(model, stopped, settings) == expected
    finishes = {chunk.row: chunk.finish for chunk in generate(model, stopped, settings)}
    assert finishes == {0: "stop", 1: "stop", 2: "stop"}


def test_ids_beyond_the_tokenizer_are_never_chosen() -> None:
    settings = Sampling(max_tokens=40)
    assert max(token_ids(MODELS["rotary"], [[1, 2]], settings)[0]) >= 10
    assert max(token_ids(MODELS["rotary"], [Prompt([1, 2], vocab_size=10)], settings)[0]) < 10


def test_eos_ends_a_row() -> None:
    model, settings = MODELS["rotary"], Sampling(temperature=0.0, max_tokens=6)
    endless = token_ids(model, [[1, 2]], settings)[0]
    eos = endless[3]
    chunks = list(generate(model, [Prompt([1, 2], eos_id=eos)], settings))
    assert [chunk.id for chunk in chunks] == endless[: endless.index(eos) + 1]
    assert chunks[-1].finish == "eos"


def test_a_full_window_ends_a_row_and_a_shorter_row_continues() -> None:
    model = decoder(position=Learned(), context=12)
    prompts, settings = [[1] * 11, [2, 3]], Sampling(temperature=0.0, max_tokens=50, slide=False)
    lengths = [2, 11]  # 12 positions are read, and the last of them predicts one more token
    expected = [recompute_greedy(model, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    assert token_ids(model, prompts, settings) == expected
    assert {chunk.row: chunk.finish for chunk in generate(model, prompts, settings)} == {0: "length", 1: "length"}


def test_the_caller_keeps_gradients_between_chunks() -> None:
    stream = generate(MODELS["gru"], [[1]], Sampling(max_tokens=3))
    next(stream)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_impossible_prompts_are_refused() -> None:
    learned = decoder(position=Learned(), context=12)
    encoder = build(preset("bert-tiny").replace(layers=1, vocab_size=VOCAB)).eval()
    with pytest.raises(ModelError, match="cannot generate"):
        list(generate(encoder, [[1]], Sampling()))
    with pytest.raises(ModelError, match="13 tokens long, but the model reads at most 12"):
        generate(learned, [[1] * 13], Sampling(slide=False))
    with pytest.raises(ModelError, match="prompt 1 is empty"):
        generate(learned, [[1], []], Sampling())
    with pytest.raises(ModelError, match="id 40, outside the model's vocabulary of 40"):
        generate(learned, [[40]], Sampling())
    with pytest.raises(ModelError, match="training mode"):
        generate(decoder().train(), [[1]], Sampling())


# ---- text


class Script(LanguageModel):
    """Generates a fixed text after any prompt."""

    def __init__(self, ids: list[int], vocab_size: int):
        super().__init__()
        self.config = Recurrent(vocab_size=vocab_size, d_model=1)
        self.ids, self.vocab_size = torch.tensor(ids), vocab_size

    def start(self, batch: int, max_len: int, source: object = None) -> State:
        return State(batch, max_len, torch.device("cpu"))

    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        state.advance(tokens.shape[1], lengths)
        return torch.full((*tokens.shape, 1), state.longest - 1)

    def head(self, features: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(self.ids[features[..., 0]], self.vocab_size).float() * 50


BYTES = build_tokenizer(Byte(), ["any"])


def scripted(text: str, stop: tuple[str, ...] = (), max_tokens: int = 500) -> tuple[list[str], int, str]:
    assert BYTES.eos_id is not None
    model = Script([*BYTES.encode(text), BYTES.eos_id], BYTES.vocab_size).eval()
    settings = Sampling(temperature=0.0, stop=stop, max_tokens=max_tokens)
    chunks = list(generate(model, [Prompt.of(BYTES, "x")], settings))
    assert chunks[-1].finish is not None
    return [chunk.text for chunk in chunks], chunks[-1].tokens, chunks[-1].finish


def test_chunks_hold_complete_characters() -> None:
    chunks, _, finish = scripted("naïve 😀 text")
    assert "".join(chunks) == "naïve 😀 text"
    assert finish == "eos"
    assert all("\ufffd" not in chunk for chunk in chunks)
    assert "😀" in chunks


@pytest.mark.parametrize(
    ("text", "stop", "shown", "finish"),
    [
        ("one\nUser: two", ("\nUser:",), "one", "stop"),
        ("one\nUse it", ("\nUser:",), "one\nUse it", "eos"),
        ("aab", ("ab",), "a", "stop"),
        ("abcabd!", ("abd",), "abc", "stop"),
        ("xyz", ("z", "yz"), "x", "stop"),
        ("ends with half a sto", ("stop",), "ends with half a sto", "eos"),
        ("stop", ("stop",), "", "stop"),
        ("日本語。", ("。",), "日本語", "stop"),
    ],
)
def test_stop_strings_end_the_text_and_are_not_shown(text: str, stop: tuple[str, ...], shown: str, finish: str) -> None:
    chunks, tokens, reason = scripted(text, stop)
    assert ("".join(chunks), reason) == (shown, finish)
    assert tokens <= len(text.encode()) + 1


@given(st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
@examples(max_examples=25, deadline=None)
def test_the_first_complete_stop_string_ends_the_text(text: str, stop: list[str]) -> None:
    chunks, _, _ = scripted(text, tuple(stop))
    done = next((i for i in range(len(text) + 1) if any(s in text[:i] for s in stop)), None)
    expected = text if done is None else text[: min(text[:done].find(s) for s in stop if s in text[:done])]
    assert "".join(chunks) == expected


def test_the_token_limit_releases_pending_text() -> None:
    chunks, tokens, finish = scripted("abcdef", ("cdx",), max_tokens=4)
    assert ("".join(chunks), tokens, finish) == ("abcd", 4, "length")
    chunks, _, finish = scripted("aé", max_tokens=2)  # ends in half a character
    assert ("".join(chunks), finish) == (BYTES.decode(BYTES.encode("aé")[:2]), "length")


def test_an_empty_prompt_begins_a_new_text() -> None:
    assert start_token(BYTES) == BYTES.eos_id
    bare = build_tokenizer(Char(specials=Char().specials.replace(bos=None, eos=None)), ["a b\nc"])
    assert bare.decode([start_token(bare)]) == "\n"
    model = build(Recurrent(vocab_size=BYTES.vocab_size, d_model=8, cell="elman")).eval()
    empty = complete(model, BYTES, [""], Sampling(max_tokens=5))[0]
    assert empty.tokens == 5 or empty.finish == "eos"


def test_completions_are_the_joined_chunks() -> None:
    tokenizer = build_tokenizer(BPE(vocab_size=270), ["the cat sat on the mat, the cat sat. " * 4])
    torch.manual_seed(3)
    model = build(Recurrent(vocab_size=tokenizer.vocab_size, d_model=8, cell="lstm")).eval()
    settings = Sampling(max_tokens=20, seed=5)
    completions = complete(model, tokenizer, ["the", "a cat"], settings)
    texts = ["", ""]
    for chunk in generate(model, [Prompt.of(tokenizer, text) for text in ("the", "a cat")], settings):
        texts[chunk.row] += chunk.text
    assert [each.text for each in completions] == texts
    assert completions[1] == complete(model, tokenizer, ["a cat"], settings, seeds=[6])[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_long_prompt_is_read_in_steps_with_pauses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any model, also beside shorter prompts; later steps take no longer, so they have fewer tokens."""
    prompts = [[token % VOCAB for token in range(first, first + 5 * first)] for first in (9, 1, 5, 9)]
    expected = token_ids(MODELS[name], prompts, Sampling(temperature=0.0, max_tokens=3))
    pauses: list[None] = []
    monkeypatch.setattr(base, "READ_CHUNK", 24)
    with pausing(lambda: pauses.append(None)):
        assert token_ids(MODELS[name], prompts, Sampling(temperature=0.0, max_tokens=3)) == expected
    assert len(pauses) > 45 / (24 / 3)  # of three rows
    assert base.step_size(MODELS["rotary"], 64, before=100) < 64 == base.step_size(MODELS["rotary"], 64, before=0)
