"""What requests may hold. A setting that is not here, or that weft can't keep to, is refused by name."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from weft.decode.config import Branching

MAX_STOPS = 16
MAX_INPUTS = 2048  # texts in one request
MAX_WRITTEN = 4096  # tokens of a text that is written token by token
MAX_CUT = 10_000  # characters that all tokenizers cut
MAX_HEADS = 4096  # that are switched off at a time
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(min_length=1)]


class Strict(BaseModel):
    """What has no other fields than those it names."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, allow_inf_nan=False, protected_namespaces=())


class Body(Strict):
    model: Name


def _unsupported(value: Any) -> None:
    if value not in (None, [], {}, "none", "auto", False):
        raise ValueError("weft's models have no such thing; leave it out")


def _text_part(value: Any) -> Any:
    """A content that is given in parts, as one text."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            raise ValueError(f"weft reads text alone, not {kind!r:.40}")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part of type 'text' has a text")
        texts.append(part["text"])
    return "".join(texts)


Unsupported = Annotated[Any, BeforeValidator(_unsupported), Field(description="Refused: weft's models have none.")]
Content = Annotated[str, BeforeValidator(_text_part)]
# it says who asks, or how to bill it; nothing that is written depends on it
Ignored = Annotated[Any, Field(description="Ignored.")]


class NoTools(BaseModel):
    """weft's models call no tools; clients may send the switches that go with none."""

    tools: Unsupported = None
    tool_choice: Unsupported = None
    parallel_tool_calls: Ignored = None


class Turn(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None
    type: Literal["message"] = "message"


class Drawing(Body):
    """How a text is drawn, in the words that the APIs share."""

    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool | None = None


class Schema(Strict):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class Format(Strict):
    """What a text has to be: JSON, JSON of a schema, a match of a regular expression, a text of a Lark grammar."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: Schema | None = None
    # the Responses API has the schema's parts here
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    pattern: str | None = Field(default=None, max_length=10_000)
    grammar: str | None = Field(default=None, max_length=100_000)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class OpenAI(Drawing):
    """What completions and chats have in common."""

    n: int | None = Field(default=None, ge=1, le=128)
    stop: Stops | Annotated[str, Field(min_length=1)] | None = None
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=100.0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    response_format: Format | None = None
    beams: int | None = Field(default=None, ge=1, le=64, description="Search with so many beams instead of drawing.")
    stream_options: StreamOptions | None = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None


class CompletionBody(OpenAI):
    prompt: str | Ids | Annotated[list[str] | list[Ids], Field(min_length=1, max_length=128)] = ""
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = Field(default=None, ge=1, le=128)
    echo: bool | None = None
    suffix: Unsupported = None


class ChatBody(OpenAI, NoTools):
    messages: Annotated[list[Turn], Field(min_length=1)]
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    modalities: list[Literal["text"]] | None = None
    functions: Unsupported = None
    function_call: Unsupported = None
    reasoning_effort: Unsupported = None


class TextSettings(Strict):
    format: Format | None = None
    verbosity: Unsupported = None


class ResponsesBody(Drawing, NoTools):
    input: str | Annotated[list[Turn], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextSettings | None = None
    metadata: dict[str, str] | None = None
    user: Ignored = None
    store: Ignored = None
    previous_response_id: Unsupported = None
    reasoning: Unsupported = None
    truncation: Literal["auto", "disabled"] | None = None


class MessagesTurn(Strict):
    role: Literal["user", "assistant"]
    content: Content


class CountBody(Body, NoTools):
    messages: Annotated[list[MessagesTurn], Field(min_length=1)]
    system: Content | None = None
    thinking: Unsupported = None


class MessagesBody(CountBody):
    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(default=None, ge=0.0, le=1.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=1, lt=2**31)
    stop_sequences: Stops | None = None
    stream: bool | None = None
    metadata: Ignored = None
    service_tier: Ignored = None


class EmbeddingsBody(Body):
    input: str | Ids | Annotated[list[str] | list[Ids], Field(min_length=1, max_length=MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    user: Ignored = None


Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]


class TranslateBody(Body):
    input: Texts
    source: str | None = None
    target: str | None = None
    beams: int | None = Field(default=None, ge=1, le=64)


class ClassifyBody(Body):
    input: Texts
    second: Texts | None = None


class TokenizeBody(Body):
    input: str


class DetokenizeBody(Body):
    tokens: list[TokenId]


class CutBody(Strict):
    """A text that all tokenizers cut, so no model is named."""

    input: str = Field(max_length=MAX_CUT)


class Begun(Body):
    """Where a text stands: after an input (a source, where one text is written from another) or a conversation, and the
    ids of what was written already."""

    input: str = ""
    messages: Annotated[list[Turn], Field(min_length=1)] | None = None
    tokens: list[TokenId] = Field(default=[], max_length=MAX_WRITTEN)


class NextBody(Begun):
    top: int = Field(default=40, ge=1, le=1000, description="How many of the likeliest tokens are named.")
    logprobs: bool = Field(default=False, description="All log-probabilities too, by id: float32 in base64.")


class WriteBody(Begun, Drawing):
    max_tokens: int = Field(default=64, ge=1, le=MAX_WRITTEN, description="With those written already.")
    top: int = Field(default=10, ge=0, le=100)


class BeamsBody(Begun):
    beams: int = Field(default=4, ge=1, le=64)
    max_tokens: int = Field(default=64, ge=1, le=MAX_WRITTEN)


class FillBody(Body):
    input: str
    top: int = Field(default=10, ge=1, le=100)


class ScoreBody(Body):
    input: str


class ReadingBody(Body):
    input: str | None = None
    target: str | None = None


class ExplainBody(ReadingBody):
    place: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    settings: Branching | None = None


class StepBody(ReadingBody):
    """Which token of the text is followed, which layer is opened, and how the next token is chosen."""

    place: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    layer: int | None = Field(default=None, ge=0, lt=2**31)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)


class WithoutHeadsBody(ReadingBody):
    heads: list[tuple[Literal["encoder", "decoder", "cross"], int, int]] = Field(
        default=[], max_length=MAX_HEADS, description="[kind, layer, head] of each"
    )
