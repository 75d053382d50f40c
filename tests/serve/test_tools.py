"""Tool calls of imported chat models over OpenAI's and Anthropic's clients, and replies that are continued."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.later import Later
from tests.serve.serving import Served, served
from tests.serve.tool_models import TEMPLATES, write_models
from tests.spread import spread

from weft.api.load import load
from weft.decode.prompt import chat_prompt
from weft.decode.tool_calls import (
    CallArguments,
    CallParser,
    CallStart,
    ReplyPart,
    ReplyText,
    Tool,
    call_format,
    call_grammar,
)
from weft.serve.config import Limits
from weft.serve.text_request import conversation
from weft.serve.turns import ChatTurn, MessagesTurn

anthropic, openai = Later("anthropic"), Later("openai")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
CLAUDE_TOOLS: Any = [{"name": "weather", "description": "Weather of a city", "input_schema": SCHEMA}]
HI: Any = [{"role": "user", "content": "How warm is it?"}]
CALL = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "R\\"}m", "unit": "c"}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city": "R\\"}m", "unit": "c"}}',
    "mistral": ' [{"name": "weather", "arguments": {"city": "R\\"}m", "unit": "c"}}]',
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Served]:
    with served(models) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def claude(server: Served) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    if name == "weather":
        assert set(arguments) == {"city", "unit"} and len(arguments["city"]) <= 5 and arguments["unit"] in ("c", "f")
    else:
        assert name == "now" and arguments == {}


@pytest.mark.parametrize("model", spread(TEMPLATES, 1))
@pytest.mark.parametrize("seed", spread([1, 2, 3], 1))
def test_required_calls_follow_the_schema(client: Any, model: str, seed: int) -> None:
    body = {"model": model, "messages": HI, "tools": TOOLS, "tool_choice": "required", "max_tokens": 500, "seed": seed}
    whole = client.chat.completions.create(**body, parallel_tool_calls=False).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None and len(whole.message.tool_calls) == 1
    function = whole.message.tool_calls[0].function
    check_arguments(function.name, json.loads(function.arguments))
    calls: dict[int, list[str]] = {}
    last = None
    for chunk in client.chat.completions.create(**body, parallel_tool_calls=False, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            if part.id:
                assert part.index == len(calls)
                calls[part.index] = [part.function.name, ""]
            calls[part.index][1] += part.function.arguments
        last = chunk.choices[0].finish_reason
    assert calls == {0: [function.name, function.arguments]} and last == "tool_calls"
    named = client.chat.completions.create(**{**body, "tool_choice": {"type": "function", "function": {"name": "now"}}})
    assert [call.function.name for call in named.choices[0].message.tool_calls] == ["now"]


def test_several_calls_in_one_reply(client: Any) -> None:
    counts = set()
    for seed in range(8):
        body = {"messages": HI, "tools": TOOLS[1:], "tool_choice": "required", "max_tokens": 500, "seed": seed}
        message = client.chat.completions.create(model="mistral", **body).choices[0].message
        counts.add(len(message.tool_calls))
        assert len({call.id for call in message.tool_calls}) == len(message.tool_calls) <= 16
    assert max(counts) > 1


def test_the_model_decides_whether_to_call(client: Any, models: Path) -> None:
    trigger = str(load(models / "mistral").tokenizer.special_tokens["[TOOL_CALLS]"])
    body: dict[str, Any] = {"model": "mistral", "messages": HI, "tools": TOOLS, "max_tokens": 500, "seed": 5}
    called = client.chat.completions.create(**body, logit_bias={trigger: 100}).choices[0]
    assert called.finish_reason == "tool_calls" and called.message.tool_calls
    text = client.chat.completions.create(**body, logit_bias={trigger: -100}).choices[0]
    assert text.message.content and not text.message.tool_calls and text.finish_reason in ("stop", "length")
    none = client.chat.completions.create(**body, tool_choice="none", logit_bias={trigger: 100}).choices[0]
    assert not none.message.tool_calls
    named = {"type": "function", "function": {"name": "weather"}}
    cut = client.chat.completions.create(**{**body, "max_tokens": 42}, tool_choice=named).choices[0]
    assert cut.finish_reason == "length" and cut.message.tool_calls


@pytest.mark.parametrize("model", TEMPLATES)
def test_grammar_and_parser_agree(models: Path, model: str) -> None:
    tokenizer = load(models / model).tokenizer
    format = call_format(tokenizer)
    assert format is not None
    tools = [Tool("weather", "", SCHEMA)]
    for before in ("", "Sure. Let me see:\n"):
        if (model == "llama3" and before) or model == "mistral":  # its trigger is a token, not a text
            continue
        text = before + CALL[model]
        grammar = call_grammar(tokenizer, format, tools, required=False, several=True)
        assert grammar.matches(text) and grammar.matches("no < call") and grammar.matches("")
        assert not grammar.matches(text.replace('"c"', '"k"')) and not grammar.matches(text.replace("weather", "x"))
        assert call_grammar(tokenizer, format, tools, required=True, several=True).matches(text) == (not before)
    trigger = tokenizer.special_tokens.get(format.trigger)
    for size in (1, 3, 1000):
        parser = CallParser(tokenizer, format)
        parts: list[ReplyPart] = [] if trigger is None else [*parser.push(0, "Sure. "), *parser.push(trigger, "")]
        for start in range(0, len(CALL[model]), size):
            parts += parser.push(0, CALL[model][start : start + size])
        parts += parser.end()
        assert "".join(part.text for part in parts if isinstance(part, ReplyText)) == (
            "" if trigger is None else "Sure."
        )
        assert [part.name for part in parts if isinstance(part, CallStart)] == ["weather"]
        arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
        assert json.loads(arguments) == {"city": 'R"}m', "unit": "c"}
    parser = CallParser(tokenizer, format)
    plain = "a < b\n<tool and {x}  "
    texts = [part for character in plain for part in parser.push(0, character)] + parser.end()
    assert "".join(part.text for part in texts if isinstance(part, ReplyText)) == plain


@pytest.mark.parametrize("model", TEMPLATES)
def test_calls_and_results_reach_the_template(models: Path, model: str) -> None:
    run = load(models / model)
    function = {"name": "weather", "arguments": '{"city": "Rome </s>"}'}
    chat = [
        ChatTurn(role="user", content="How warm?"),
        ChatTurn.model_validate({"role": "assistant", "tool_calls": [{"id": "call_1", "function": function}]}),
        ChatTurn(role="tool", content="31 degrees", tool_call_id="call_1"),
    ]
    use: Any = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome </s>"}}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "31 degrees"}]}
    claude = [
        MessagesTurn(role="user", content="How warm?"),
        MessagesTurn.model_validate({"role": "assistant", "content": [use]}),
        MessagesTurn.model_validate({"role": "user", "content": [result]}),
    ]
    for turns in (chat, claude):
        messages = [message for turn in turns for message in turn.messages()]
        prompt, _ = conversation(run, messages, Limits(), max_tokens=5)
        text = run.tokenizer.decode(prompt.ids, specials=True)
        assert '"city": "Rome </s>"' in text and "<s>tool 31 degrees</s><s>assistant " in text
        assert prompt.ids.count(run.tokenizer.eos_id) == 3  # not the one in the arguments


def test_messages_with_tools(claude: Any) -> None:
    body: dict[str, Any] = {"model": "hermes", "max_tokens": 400, "messages": HI, "tools": CLAUDE_TOOLS}
    found = claude.messages.create(**body, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert found.stop_reason == "tool_use" and [block.type for block in found.content] == ["tool_use"]
    check_arguments(found.content[0].name, found.content[0].input)
    named = {"type": "tool", "name": "weather"}
    with claude.messages.stream(**body, tool_choice=named) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert "input_json" in events and final.stop_reason == "tool_use"
    check_arguments(final.content[0].name, final.content[0].input)
    counted = claude.messages.count_tokens(model="hermes", messages=HI, tools=CLAUDE_TOOLS)
    assert (
        counted.input_tokens
        == final.usage.input_tokens
        > claude.messages.count_tokens(model="hermes", messages=HI).input_tokens
    )
    result = [{"type": "tool_result", "tool_use_id": final.content[0].id, "content": "31"}]
    turns = [*HI, {"role": "assistant", "content": final.content}, {"role": "user", "content": result}]
    again = claude.messages.create(**{**body, "messages": turns}, tool_choice={"type": "none"})
    assert again.stop_reason in ("end_turn", "max_tokens") and again.content[0].type == "text"


def test_a_reply_is_continued(claude: Any, models: Path) -> None:
    run = load(models / "hermes")
    prefill = [*HI, {"role": "assistant", "content": "It is </s> about"}]
    prompt = chat_prompt(run.tokenizer, prefill, continues_last=True)
    text = run.tokenizer.decode(prompt.ids, specials=True)
    assert text.endswith("<s>assistant It is </s> about") and prompt.mid_text
    assert prompt.ids.count(run.tokenizer.eos_id) == 1
    counted = claude.messages.count_tokens(model="hermes", messages=prefill)
    assert counted.input_tokens == len(prompt.ids)
    off: Any = {"type": "disabled"}
    found = claude.messages.create(model="hermes", max_tokens=5, messages=prefill, thinking=off)
    assert found.usage.input_tokens == len(prompt.ids) and found.role == "assistant"
    for content in ("It is ", "It is\n"):
        with pytest.raises(anthropic.BadRequestError, match="white space"):
            claude.messages.create(
                model="hermes", max_tokens=5, messages=[*HI, {"role": "assistant", "content": content}]
            )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "plain"}, "tools: the chat template of this model has no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x' is not among the tools: weather, now"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice: no tools to call"),
        ({"tools": TOOLS + TOOLS}, "two tools are named 'weather'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": 7}}}]}, "the tools: "),
        ({"response_format": {"type": "json_object"}}, "response_format: not together with tools"),
        ({"messages": [{"role": "tool", "content": "1"}]}, "tool_call_id"),
        ({"messages": [{"role": "user"}]}, "needs a 'content'"),
        ({"beams": 2}, "beams: not available with tools"),
    ],
)
def test_mistakes_get_one_line(server: Served, changes: dict[str, Any], message: str) -> None:
    body = {"model": "hermes", "messages": HI, "tools": TOOLS, "tool_choice": "auto", **changes}
    assert message in server.refused("/v1/chat/completions", body)


# ---- Responses

FUNCTIONS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.mark.parametrize("model", spread(TEMPLATES, 1))
def test_responses_call_tools_by_their_schemas(client: Any, model: str) -> None:
    body = {"model": model, "input": "How warm is it?", "tools": FUNCTIONS, "max_output_tokens": 500}
    for choice, names in (("required", ("weather", "now")), ({"type": "function", "name": "weather"}, ("weather",))):
        response = client.responses.create(**body, tool_choice=choice, extra_body={"seed": 1})
        calls = [item for item in response.output if item.type == "function_call"]
        assert calls and response.output == calls and response.status == "completed"
        for call in calls:
            assert call.name in names and call.call_id.startswith("call_") and call.status == "completed"
            check_arguments(call.name, json.loads(call.arguments))
    assert [tool.name for tool in response.tools] == ["weather", "now"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "12 °C"} for call in calls]
    dumps = [item.model_dump(by_alias=True) for item in response.output]
    history = [{"role": "user", "content": "How warm is it?"}, *dumps, *results]
    reply = client.responses.create(
        model=model, input=history, tools=FUNCTIONS, tool_choice="none", max_output_tokens=5
    )
    assert [item.type for item in reply.output] == ["message"]
    assert client.responses.create(model=model, input=[*history, *reply.output, *HI], max_output_tokens=5).output


@pytest.mark.parametrize("model", spread(TEMPLATES, 1))
def test_streamed_responses_are_the_whole_ones(client: Any, model: str) -> None:
    body = {"model": model, "input": "How warm is it?", "tools": FUNCTIONS, "max_output_tokens": 400}
    body |= {"tool_choice": "required", "parallel_tool_calls": True, "extra_body": {"seed": 3}}
    whole = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [(item.name, item.arguments) for item in final.output] == [(e.name, e.arguments) for e in whole.output]
    for index, item in enumerate(final.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        assert mine[0].type == "response.output_item.added" and mine[-1].type == "response.output_item.done"
        deltas = [event.delta for event in mine if event.type == "response.function_call_arguments.delta"]
        done = next(event for event in mine if event.type == "response.function_call_arguments.done")
        assert "".join(deltas) == done.arguments == item.arguments and {event.item_id for event in mine[1:-1]} == {
            item.id
        }


def test_a_reply_of_a_response_may_be_a_text(client: Any) -> None:
    body = {"model": "hermes", "input": "hi", "tools": FUNCTIONS, "max_output_tokens": 8, "extra_body": {"seed": 5}}
    whole = client.responses.create(**body)
    final = list(client.responses.create(**body, stream=True))[-1].response
    assert whole.status == "incomplete" and [item.type for item in whole.output] == ["message"]
    assert final.output_text == whole.output_text and final.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "function_call", "call_id": "a", "name": "now"}, "input.0.*'function_call' needs 'arguments'"),
        ({"type": "function_call_output", "output": "x"}, "input.0.*needs 'call_id'"),
        ({"content": "x"}, "input.0.*'message' needs 'role'"),
        (
            {"type": "function_call", "call_id": "a", "name": "now", "arguments": "["},
            "input: the arguments of the call",
        ),
        ({"type": "reasoning", "summary": []}, "input.0.*type"),
    ],
)
def test_items_that_are_incomplete_are_refused(client: Any, item: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(model="hermes", input=[item], max_output_tokens=5)
