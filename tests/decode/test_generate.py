"""Generation from ragged prompts: the same as recomputing everything, row by row."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tests.decode.small import VOCAB, complete, decoder
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.generate import generate
from weft.decode.prompt import Prompt, start_token
from weft.decode.text import Chunk
from weft.errors import ModelError
from weft.models.base import LanguageModel, State
from weft.models.build import build
from weft.models.config import Recurrent
from weft.models.presets import preset
from weft.nn.config import LayerNorm
from weft.nn.position_config import Learned
from weft.text.config import BPE, Byte, Char
from weft.text.tokenizer import build_tokenizer


def recurrent() -> LanguageModel:
    torch.manual_seed(0)
    return build(Recurrent(vocab_size=VOCAB, d_model=16, cell="gru")).eval()


MODELS = {"rotary": decoder(), "learned": decoder(position=Learned(), norm=LayerNorm(), context=64), "gru": recurrent()}


def collect(tokens: list[Chunk], rows: int) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in range(rows)]
    for token in tokens:
        texts[token.row].append(token.id)
    return texts


def by_recomputing(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """Greedy, reading the whole text again for each token."""
    text = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
@given(prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=4))
@examples(max_examples=8, deadline=None)
def test_greedy_equals_recomputing(name: str, prompts: list[list[int]]) -> None:
    tokens = list(generate(MODELS[name], prompts, Sampling(temperature=0.0, max_tokens=6)))
    assert collect(tokens, len(prompts)) == [by_recomputing(MODELS[name], prompt, 6) for prompt in prompts]
    assert [t.finish for t in tokens[-len(prompts) :]] == ["length"] * len(prompts)
    assert all(t.finish is None for t in tokens[: -len(prompts)])


def test_a_seed_gives_one_text_in_any_company() -> None:
    model, settings = MODELS["rotary"], Sampling(max_tokens=12, top_k=20)
    prompt, others = [5, 6, 7], [[1], [2, 3, 4, 5, 6, 7, 8], [9, 9]]
    alone = collect(list(generate(model, [prompt], settings, seeds=[42])), 1)[0]
    company = collect(list(generate(model, [*others, prompt], settings, seeds=[1, 2, 3, 42])), 4)[3]
    assert alone == company
    assert alone != collect(list(generate(model, [prompt], settings, seeds=[43])), 1)[0]


def test_rows_that_end_leave_the_others_alone() -> None:
    """Each row ends at a different token of its own; what is written before is as if nothing had ended."""
    model, settings = MODELS["gru"], Sampling(max_tokens=8, seed=4)
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8]]
    free = collect(list(generate(model, prompts, settings)), 3)
    ends = {0: 2, 1: 5, 2: 7}
    stopped = [
        Prompt(prompt, stop_ids=frozenset({free[row][ends[row] - 1]}) - set(free[row][: ends[row] - 1]))
        for row, prompt in enumerate(prompts)
    ]
    assert all(prompt.stop_ids for prompt in stopped)  # what ends a row doesn't come before
    tokens = list(generate(model, stopped, settings))
    assert collect(tokens, 3) == [free[row][: ends[row]] for row in range(3)]
    assert {t.row: t.finish for t in tokens if t.finish} == {0: "stop", 1: "stop", 2: "stop"}


def test_rows_beyond_the_tokenizer_are_never_chosen() -> None:
    free = list(generate(MODELS["rotary"], [[1, 2]], Sampling(max_tokens=40)))
    few = list(generate(MODELS["rotary"], [Prompt([1, 2], vocab_size=10)], Sampling(max_tokens=40)))
    assert max(t.id for t in free) >= 10
    assert max(t.id for t in few) < 10


def test_eos_ends_a_row() -> None:
    model = MODELS["rotary"]
    free = collect(list(generate(model, [[1, 2]], Sampling(temperature=0.0, max_tokens=6))), 1)[0]
    eos = free[3]
    tokens = list(generate(model, [Prompt([1, 2], eos_id=eos)], Sampling(temperature=0.0, max_tokens=6)))
    assert [t.id for t in tokens] == free[: free.index(eos) + 1]
    assert tokens[-1].finish == "eos"


def test_the_window_ends_a_row_and_a_shorter_row_goes_on() -> None:
    model = decoder(position=Learned(), context=12)
    prompts = [[1] * 11, [2, 3]]
    tokens = list(generate(model, prompts, Sampling(temperature=0.0, max_tokens=50, slide=False)))
    texts = collect(tokens, 2)
    assert [len(text) for text in texts] == [2, 11]  # 12 places read, and what the last of them predicts
    assert texts == [by_recomputing(model, prompt, len(text)) for prompt, text in zip(prompts, texts, strict=True)]
    assert {t.row: t.finish for t in tokens if t.finish} == {0: "length", 1: "length"}


def test_gradients_stay_on_for_the_caller_between_tokens() -> None:
    stream = generate(MODELS["gru"], [[1]], Sampling(max_tokens=3))
    next(stream)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_what_cannot_be_continued_is_refused() -> None:
    learned = decoder(position=Learned(), context=12)
    with pytest.raises(ModelError, match="13 tokens long, but the model reads at most 12"):
        generate(learned, [[1] * 13], Sampling(slide=False))
    with pytest.raises(ModelError, match="prompt 1 is empty"):
        generate(learned, [[1], []], Sampling())
    with pytest.raises(ModelError, match="id 40, outside the model's vocabulary of 40"):
        generate(learned, [[40]], Sampling())
    with pytest.raises(ModelError, match="training mode"):
        generate(decoder().train(), [[1]], Sampling())


def test_an_encoder_cannot_generate() -> None:
    tiny = preset("bert-tiny").replace(layers=1, vocab_size=VOCAB)
    with pytest.raises(ModelError, match="cannot generate"):
        list(generate(build(tiny).eval(), [[1]], Sampling()))


# ---- text


class Script(LanguageModel):
    """Writes a text that is fixed beforehand, whatever it reads."""

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


def test_text_streams_whole_characters() -> None:
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
def test_stop_strings_end_the_text_and_never_show(text: str, stop: tuple[str, ...], shown: str, finish: str) -> None:
    chunks, tokens, reason = scripted(text, stop)
    assert ("".join(chunks), reason) == (shown, finish)
    assert tokens <= len(text.encode()) + 1


@given(st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
@examples(max_examples=60, deadline=None)
def test_stop_strings_cut_where_the_first_one_completes(text: str, stop: list[str]) -> None:
    chunks, _, _ = scripted(text, tuple(stop))
    done = next((i for i in range(len(text) + 1) if any(s in text[:i] for s in stop)), None)
    expected = text if done is None else text[: min(text[:done].find(s) for s in stop if s in text[:done])]
    shown = "".join(chunks)
    assert shown == expected
    # nothing was ever shown that had to be taken back
    assert not any(s in shown for s in stop)


def test_the_token_limit_shows_what_was_held_back() -> None:
    chunks, tokens, finish = scripted("abcdef", ("cdx",), max_tokens=4)
    assert ("".join(chunks), tokens, finish) == ("abcd", 4, "length")


def test_half_a_character_at_the_limit_is_not_lost_silently() -> None:
    chunks, _, finish = scripted("aé", max_tokens=2)
    assert "".join(chunks) == BYTES.decode(BYTES.encode("aé")[:2])
    assert finish == "length"


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
    whole = complete(model, tokenizer, ["the", "a cat"], settings)
    parts: dict[int, str] = {0: "", 1: ""}
    for chunk in generate(model, [Prompt.of(tokenizer, text) for text in ("the", "a cat")], settings):
        parts[chunk.row] += chunk.text
    assert [c.text for c in whole] == [parts[0], parts[1]]
    assert whole[1] == complete(model, tokenizer, ["a cat"], settings, seeds=[6])[0]
