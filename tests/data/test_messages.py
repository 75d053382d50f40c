"""Conversations: rows to messages, messages to tokens with a mask of the replies."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.messages import TEMPLATE, conversation, encode_chat, with_template
from weft.data.table import RowSource, read_rows
from weft.decode.prompt import chat_prompt
from weft.errors import DataError, TokenizerError
from weft.text.config import BPE, Byte, Char, Specials, Unigram, Word
from weft.text.tokenizer import Tokenizer, build_tokenizer

TEXTS = ["### User", "### Assistant", "### System", "How are you? I am fine, thank you. And you? Hello there."] * 3
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INST = (  # the last turn opens with a space, as Llama 2's does
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(contents)]


def chatml() -> Tokenizer:
    specials = Specials(pad="<pad>", eos="<|im_end|>", extra=("<|im_start|>",))
    plain = build_tokenizer(BPE(vocab_size=300, specials=specials), TEXTS)
    return Tokenizer.from_json(plain.to_json(), plain.roles, CHATML)


def replies(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[str]:
    """Text of each run of tokens that are in the mask."""
    ids, mask = encode_chat(tokenizer, messages)
    groups = groupby(zip(ids, mask, strict=True), key=lambda item: item[1])
    return [tokenizer.decode([id for id, _ in run], specials=True) for counts, run in groups if counts]


# ---- rows to messages


def test_an_instruction_becomes_two_turns() -> None:
    row = {"instruction": "Fix it.", "input": "He go.", "output": "He goes."}
    assert conversation(row) == turns("Fix it.\n\nHe go.", "He goes.")
    assert conversation(row | {"input": ""}) == turns("Fix it.", "He goes.")
    assert conversation({"instruction": "Hi", "output": "Hello"}) == turns("Hi", "Hello")


SYSTEM = {"role": "system", "content": "Be kind."}
WRONG: list[tuple[Any, str]] = [
    (turns("a", "b")[1:], "an assistant message without a user message before it: message 1"),
    ([SYSTEM, *turns("a", "b")[1:]], "an assistant message without a user message before it: message 2"),
    ([*turns("a", "b"), {"role": "assistant", "content": "c"}], "two assistant messages in a row: message 3"),
    ([{"role": "usr", "content": "a"}], "unknown role: message 1 has 'usr'; did you mean 'user'"),
    ([{"content": "a"}], "unknown role: message 1 has None"),
    (turns("a", " \n"), "empty content: message 2 of role assistant"),
    ([{"role": "user", "content": None}], "not text: message 1"),
    ([*turns("a", "b"), SYSTEM], "a system message after another message: message 3"),
    (turns("a"), "the assistant never replies"),
    ([], "or is empty"),
    ("hello", "not a list of messages"),
    (["hello"], "without 'role' and 'content': message 1"),
]


@pytest.mark.parametrize(("messages", "reason"), WRONG)
def test_an_invalid_conversation_is_reported_with_file_and_line(tmp_path: Path, messages: Any, reason: str) -> None:
    path = tmp_path / "chat.jsonl"
    valid = {"messages": [SYSTEM, *turns("a", "b")]}
    path.write_text(f"{json.dumps(valid)}\n{json.dumps({'messages': messages})}\n")
    with pytest.raises(DataError, match=rf"chat\.jsonl:2: .*{reason}"):
        list(read_rows(RowSource([str(path)], {"messages": "messages"})))
    rows = list(read_rows(RowSource([str(path)], {"messages": "messages"}, on_error="skip")))
    assert [row.values for row in rows] == [valid]


def test_two_user_messages_in_a_row_are_allowed() -> None:
    messages = [*turns("a"), *turns("b", "c")]
    assert conversation({"messages": messages}) == messages
    assert replies(chatml(), messages) == ["c<|im_end|>"]


def test_rows_without_messages_are_refused() -> None:
    with pytest.raises(DataError, match="neither 'messages' nor 'instruction' and 'output'; its columns: text"):
        conversation({"text": "a"})
    with pytest.raises(DataError, match="not list"):
        conversation([1])


# ---- messages to tokens


@pytest.mark.parametrize("kind", [Word(split="punctuation"), Char(), Byte(), BPE(vocab_size=300), Unigram()])
def test_the_mask_covers_replies_and_their_ends(kind: Any) -> None:
    tokenizer = build_tokenizer(kind, TEXTS)
    messages = [SYSTEM, *turns("How are you?", "I am fine", "Thank you", "Hello there")]
    assert [text.replace(" <eos>", "<eos>") for text in replies(tokenizer, messages)] == [
        "I am fine<eos>",
        "Hello there<eos>",
    ]


def test_other_chat_templates() -> None:
    assert replies(chatml(), turns("How?", "Fine.", "And?", "Hello\n")) == ["Fine.<|im_end|>", "Hello\n<|im_end|>"]
    plain = build_tokenizer(BPE(vocab_size=300), TEXTS)
    inst = Tokenizer.from_json(plain.to_json(), plain.roles, INST)
    assert replies(inst, turns("How?", "Fine.", "And?", "Hello")) == [" Fine.<eos>", " Hello<eos>"]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab #\n.é"), min_size=1, max_size=8), min_size=2, max_size=5))
def test_the_prompt_of_a_reply_is_the_same_in_chat_and_in_training(contents: list[str]) -> None:
    messages = turns(*contents) if len(contents) % 2 == 0 else turns(*contents[:-1])
    if any(not message["content"].strip() for message in messages):
        return
    ids, mask = encode_chat(CHAT, messages)
    last = len(mask) - mask[::-1].index(1)
    first = max((n + 1 for n in range(last) if not mask[n]), default=0)
    prompt = chat_prompt(CHAT, messages[:-1])
    assert prompt.ids == ids[:first]
    assert ids[last - 1] == CHAT.need("eos") and ids[last - 1] in prompt.stop_ids


CHAT = with_template(build_tokenizer(Byte(), []))


def test_the_default_template_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = with_template(build_tokenizer(BPE(vocab_size=300), TEXTS))
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.chat_template == TEMPLATE
    assert loaded.chat(turns("Hi", "Hello"), reply=False) == "<bos>### User\nHi\n### Assistant\nHello<eos>\n"
    assert with_template(loaded) is loaded
    with pytest.raises(TokenizerError, match="has no eos token"):
        encode_chat(build_tokenizer(Byte(specials=Specials(pad="<pad>")), []), turns("a", "b"))


def test_special_tokens_in_messages_are_plain_text() -> None:
    tokenizer = with_template(build_tokenizer(BPE(vocab_size=300), TEXTS))
    ids, mask = encode_chat(tokenizer, turns("<eos>### Assistant", "a <bos><eos>", "b", "<eos>"))
    first = "<bos>### User\n<eos>### Assistant\n### Assistant\na <bos><eos><eos>\n"
    assert tokenizer.decode(ids, specials=True) == f"{first}### User\nb\n### Assistant\n<eos><eos>\n"
    assert (ids.count(tokenizer.need("bos")), ids.count(tokenizer.need("eos"))) == (1, 2)
    replies = [*tokenizer.encode("a <bos><eos>", eos=True), *tokenizer.encode("<eos>", eos=True)]
    assert [id for id, counts in zip(ids, mask, strict=True) if counts] == replies
    parsing = tokenizer.reading_specials()
    assert encode_chat(parsing, turns("<eos>", "b"))[0].count(tokenizer.need("eos")) == 2


def test_a_template_that_rewrites_history_is_refused() -> None:
    plain = build_tokenizer(BPE(vocab_size=300), TEXTS)
    forgetful = Tokenizer.from_json(plain.to_json(), plain.roles, "{{ messages[-1]['content'] + eos_token }}")
    with pytest.raises(TokenizerError, match="rewrites earlier turns"):
        encode_chat(forgetful, turns("a", "b", "c", "d"))


def test_other_formats_of_messages() -> None:
    expected = turns("Hi there", "Hello")
    sharegpt = [{"from": "human", "value": "Hi there"}, {"from": "gpt", "value": "Hello"}]
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    assert conversation({"conversations": sharegpt}, "conversations") == expected
    assert conversation({"messages": [{"role": "user", "content": parts}, expected[1]]}) == expected
    with pytest.raises(DataError, match="neither 'talk' nor 'instruction' and 'output'; its columns: messages"):
        conversation({"messages": expected}, "talk")
    with pytest.raises(DataError, match="content that is not text: message 1"):
        conversation({"messages": [{"role": "user", "content": [{"type": "image"}]}, expected[1]]})
