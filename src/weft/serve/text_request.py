"""Requests for texts, in weft's own settings: what the routes make of the bodies they receive."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel

from weft.api.run import Run
from weft.api.settings import beam, sampling, with_defaults
from weft.decode.config import Beam, Sampling
from weft.decode.constrain import Grammar
from weft.decode.prompt import Prompt, chat_prompt, context_window, max_prompt_tokens
from weft.decode.tool_calls import CallFormat, Tool, call_format, call_grammar
from weft.models.base import EncoderInput
from weft.objectives.pairs import Pairs
from weft.objectives.spans import Spans
from weft.serve.config import Limits
from weft.serve.errors import RefusedError
from weft.serve.library import ServedModel
from weft.serve.schema import ChatBody, CompletionBody, Format
from weft.serve.turns import Function, Message

JSON_OBJECT = {"type": "object", "additionalProperties": True}
NO_PARAMETERS = {"type": "object", "properties": {}}  # schema of the arguments of a tool that has none
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
T = TypeVar("T")


@dataclass(frozen=True)
class TextRequest:
    """Texts that a client requests of a model: `n` for each prompt."""

    model: ServedModel
    prompts: Sequence[Prompt]
    texts: Sequence[str]  # the prompts as text, for models that write one text from another
    settings: Sampling | Beam
    n: int = 1
    source: EncoderInput | None = None  # what an encoder–decoder reads, if its text is written token by token
    writes: bool = True  # False: nothing is written after the prompts
    echoed: Sequence[int] | None = None  # the texts begin with their prompts: the last tokens of each, this many
    calls: CallFormat | None = None  # how the texts may call tools
    echo_logprobs: int | None = None  # number of likeliest tokens at each position of the echoed prompts

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)


def writes_from_source(run: Run) -> bool:
    """Return whether a run's model writes one text from another."""
    return isinstance(run.objective, Pairs | Spans)


def filters(body: BaseModel) -> dict[str, Any]:
    """Return a request's top_k and top_p; None where they would keep all tokens, or decoding is greedy."""
    top_k, top_p, temperature = (getattr(body, key, None) for key in ("top_k", "top_p", "temperature"))
    greedy = temperature == 0
    # other servers take −1 or 0 for "all tokens"
    return {"top_k": None if greedy or top_k in (-1, 0) else top_k, "top_p": None if greedy or top_p == 1 else top_p}


def requested_settings(body: BaseModel, limits: Limits, *, max_tokens: int, **others: Any) -> dict[str, Any]:
    """Return the sampling settings that a request names, under weft's names; a random seed if it names none."""
    if max_tokens > limits.max_tokens:
        raise RefusedError(400, f"max_tokens = {max_tokens}: this server writes at most {limits.max_tokens} tokens")
    temperature, min_p, seed = (getattr(body, key, None) for key in ("temperature", "min_p", "seed"))
    return {
        "temperature": temperature,
        **filters(body),
        "min_p": (min_p or None) if temperature != 0 else None,
        "seed": secrets.randbits(62) if seed is None else seed % 2**63,
        "max_tokens": max_tokens,
        **others,
    }


def sampling_for(body: BaseModel, run: Run, limits: Limits, *, chat: bool, **others: Any) -> Sampling:
    """Return a request's sampling settings; those it leaves out are the checkpoint's defaults."""
    requested = requested_settings(body, limits, **others)
    return sampling(**with_defaults(requested, run.chat_defaults if chat else run.defaults))


def openai_settings(
    body: CompletionBody | ChatBody, run: Run, limits: Limits, *, chat: bool, max_tokens: int, logprobs: int | None
) -> Sampling | Beam:
    """Return the settings of an OpenAI request: of sampling, or of beam search if it asks for `beams`."""
    n = body.n or 1
    if n > limits.choices:
        raise RefusedError(400, f"n = {n}: this server writes at most {limits.choices} texts", param="n")
    bias: dict[int, float] = {}
    for key, value in (body.logit_bias or {}).items():
        if not key.isdecimal() or int(key) >= run.tokenizer.vocab_size:
            raise RefusedError(400, f"logit_bias: {key[:20]!r} is not a token id", param="logit_bias")
        bias[int(key)] = value
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    rules = {"logprobs": logprobs, "stop": stop or None, "logit_bias": bias or None}
    rules |= {key: getattr(body, key) for key in PENALTIES}
    settings = sampling_for(body, run, limits, chat=chat, max_tokens=max_tokens, **rules)
    if body.beams is None:
        return settings
    if n > body.beams:
        raise RefusedError(400, f"n = {n}: a beam of {body.beams} holds at most {body.beams} texts", param="n")
    if logprobs is not None:
        raise RefusedError(400, "logprobs: not available with beam search", param="logprobs")
    shared = {key: value for key, value in settings.model_dump(exclude_unset=True).items() if key in Beam.model_fields}
    return beam(**shared, beams=body.beams, n=n)


def grammar(format: Format | None, run: Run) -> Grammar | None:
    """Return the grammar that a request's `response_format` asks for."""
    if format is None or format.type == "text":
        return None
    if format.type == "regex":
        return run.pattern(_required(format.pattern, "pattern", format.type))
    if format.type == "grammar":
        return run.grammar(_required(format.grammar, "grammar", format.type))
    if format.type == "json_object":
        return run.schema(JSON_OBJECT)
    schema = format.json_schema.schema_ if format.json_schema is not None else format.schema_
    return run.schema(_required(schema, "json_schema", format.type))


def _required(value: T | None, name: str, kind: str) -> T:
    if value is None:
        raise RefusedError(400, f"response_format: type '{kind}' needs '{name}'", param="response_format")
    return value


@dataclass(frozen=True)
class ToolUse:
    """Tools that a reply may call: whether it must call one, and whether it may call several."""

    tools: Sequence[Tool]
    required: bool
    several: bool


def tool_use(tools: Sequence[Tool], choice: str, *, name: str | None, several: bool) -> ToolUse | None:
    """Return the use of tools that a request asks for; `choice` is none, auto, required, or tool: the one of `name`."""
    if choice == "none" or (not tools and choice == "auto"):
        return None
    names = [tool.name for tool in tools]
    repeated = next((each for each in names if names.count(each) > 1), None)
    if repeated is not None:
        raise RefusedError(400, f"tools: two tools are named '{repeated}'", param="tools")
    if not tools or (choice == "tool" and name not in names):
        missing = "no tools to call" if not tools else f"'{name}' is not among the tools: {', '.join(names)}"
        raise RefusedError(400, f"tool_choice: {missing}", param="tool_choice")
    used = [tool for tool in tools if choice != "tool" or tool.name == name]
    return ToolUse(used, choice != "auto", several and choice != "tool")


def function_use(
    functions: Sequence[Function], choice: str | None, *, name: str | None, several: bool | None
) -> ToolUse | None:
    """Return the use of tools that an OpenAI request asks for; `name` is that of the only function to call."""
    tools = [Tool(each.name, each.description or "", each.parameters or NO_PARAMETERS) for each in functions]
    return tool_use(tools, choice or "auto" if name is None else "tool", name=name, several=several is not False)


def conversation(
    run: Run,
    messages: Sequence[Message],
    limits: Limits,
    *,
    max_tokens: int | None,
    pattern: Grammar | None = None,
    use: ToolUse | None = None,
    continues_last: bool = False,
) -> tuple[Prompt, int]:
    """Return a conversation as a prompt, and the maximum number of tokens of the reply.

    A model that writes one text from another reads only the last turn.
    """
    calls = call_format(run.tokenizer)
    if calls is None and (use is not None or any("tool_calls" in each or each["role"] == "tool" for each in messages)):
        field = "messages" if use is None else "tools"
        raise RefusedError(400, f"{field}: the chat template of this model has no tools; leave them out", param=field)
    if calls is not None:
        messages = [_with_call_ids(message, calls) for message in messages]
    if use is not None and calls is not None:
        if pattern is not None:
            raise RefusedError(400, "response_format: not together with tools; leave one of them out", param="tools")
        pattern = call_grammar(run.tokenizer, calls, use.tools, required=use.required, several=use.several)
    if writes_from_source(run):
        return Prompt.of(run.tokenizer, messages[-1]["content"], pattern), max_tokens or limits.max_tokens
    run.objective.check_continues("chat")
    window = context_window(run.model)
    reserved = max_tokens or (limits.max_tokens if window is None else max(1, window // 2))
    max_reply = min(reserved, limits.max_tokens)
    definitions = [] if use is None else [tool.definition() for tool in use.tools]
    prompt = chat_prompt(
        run.tokenizer, messages, max_prompt_tokens(window, max_reply), tools=definitions, continues_last=continues_last
    )
    if use is not None and calls is not None:  # a special token before calls doesn't end the reply
        trigger = run.tokenizer.special_tokens.get(calls.trigger)
        prompt = replace(prompt, stop_ids=prompt.stop_ids - {trigger})
    if max_tokens is None and window is not None:
        max_reply = max(1, min(window - len(prompt.ids), limits.max_tokens))
    return replace(prompt, grammar=pattern), max_reply


def _with_call_ids(message: Message, calls: CallFormat) -> Message:
    """Return a message with the ids of calls as the template expects them."""
    ids = {"tool_call_id": calls.call_id(message["tool_call_id"])} if "tool_call_id" in message else {}
    called = [{**call, "id": calls.call_id(call["id"])} for call in message.get("tool_calls", ())]
    return {**message, **ids, **({"tool_calls": called} if called else {})}
