"""Bodies of requests. Unknown fields, and settings that weft cannot honour, are refused by name."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from weft.decode.config import Branching, parameters
from weft.serve import turns
from weft.serve.turns import Content, Ignored, Name, Strict, Unsupported, at_most

MAX_STOPS = 16  # stop strings
MAX_INPUTS = 2048  # texts in one request
MAX_PROMPTS = 128  # of one request for completions
MAX_BIASES = 10_000  # of logits
MAX_STREAMED_TOKENS = 4096  # of a text that /v1/write or /v1/beams writes
MAX_TOKENIZED = 10_000  # characters of a text for /v1/tokenizers
MAX_HEADS = 4096  # attention heads switched off in one request
MAX_THREADS = 256  # tokens of a text named in one request
SETTINGS = {parameter.name: parameter for parameter in parameters()}
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], at_most(MAX_STOPS, "stop strings")]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Head = tuple[Literal["encoder", "decoder", "cross"], int, int]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Strings = Annotated[list[str], Field(min_length=1, fail_fast=True)]
ListOfIds = Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
Texts = Annotated[str | Strings, at_most(MAX_INPUTS, "texts")]
T = TypeVar("T")
Messages = Annotated[list[T], Field(min_length=1, fail_fast=True), at_most(turns.MAX_TURNS, "messages")]


def _check_inputs(limit: int) -> BeforeValidator:
    """Return a check of texts or ids, so that a long wrong list is refused with one error."""

    def check(value: Any) -> Any:
        if not isinstance(value, list) or not value:
            return value
        kinds = set(map(type, value))
        if kinds == {int} and min(value) >= 0:
            return value
        if kinds not in ({str}, {list}):
            raise ValueError("expected a text, a list of texts, a list of token ids, or a list of such lists")
        if len(value) > limit:
            raise ValueError(f"{len(value):,} texts; at most {limit:,} are accepted in one request")
        return value

    return BeforeValidator(check)


def setting(name: str, default: Any = None, **bounds: float) -> Any:
    """Return a field for one of weft's settings of generation; `bounds` replace those of the setting."""
    limits: dict[str, Any] = dict(bounds or SETTINGS[name].bounds)
    return Field(default=default, description=SETTINGS[name].description, **limits)


class Body(Strict):
    model: Name


class SamplingBody(Body):
    """Sampling settings, with the bounds that OpenAI's API sets and the values that other servers take for "off"."""

    temperature: float | None = setting("temperature", ge=0.0, le=2.0)
    top_p: float | None = setting("top_p")
    top_k: int | None = setting("top_k", ge=-1, lt=2**31)
    min_p: float | None = setting("min_p", ge=0.0, le=1.0)
    seed: int | None = setting("seed", ge=-(2**63), lt=2**63)
    stream: bool | None = None


class Schema(Strict):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class Format(Strict):
    """The form of a text: JSON, JSON of a schema, a match of a regular expression, or a text of a Lark grammar."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: Schema | None = None
    # the Responses API has the fields of `json_schema` here
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    pattern: str | None = Field(default=None, max_length=10_000)
    grammar: str | None = Field(default=None, max_length=100_000)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class OpenAIBody(SamplingBody):
    """Fields that completions and chat completions share."""

    n: int | None = Field(default=None, ge=1, le=128, description="Number of texts per prompt.")
    stop: Stops | Annotated[str, Field(min_length=1)] | None = setting("stop")
    frequency_penalty: float | None = setting("frequency_penalty", ge=-2.0, le=2.0)
    presence_penalty: float | None = setting("presence_penalty", ge=-2.0, le=2.0)
    repetition_penalty: float | None = setting("repetition_penalty")
    logit_bias: Annotated[dict[str, Bias] | None, at_most(MAX_BIASES, "biases")] = setting("logit_bias")
    response_format: Format | None = None
    beams: int | None = Field(default=None, ge=1, le=64, description="Beam search with this many beams.")
    stream_options: StreamOptions | None = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None


class CompletionBody(OpenAIBody):
    prompt: Annotated[str | Ids | Strings | ListOfIds, _check_inputs(MAX_PROMPTS)] = ""
    max_tokens: int | None = setting("max_tokens", ge=0)
    logprobs: int | None = setting("logprobs", ge=0, le=20)
    best_of: int | None = Field(default=None, ge=1, le=128, description="Write this many texts; return the likeliest.")
    echo: bool | None = Field(default=None, description="Begin each text with its prompt, with its log-probabilities.")
    suffix: Unsupported = None


class ChatBody(OpenAIBody):
    messages: Messages[turns.ChatTurn]
    tools: Annotated[list[turns.FunctionTool] | None, at_most(turns.MAX_TOOLS, "tools")] = None
    tool_choice: Literal["none", "auto", "required"] | turns.NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = setting("max_tokens", ge=1)
    max_completion_tokens: int | None = setting("max_tokens", ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = setting("logprobs", ge=0, le=20)
    modalities: list[Literal["text"]] | None = None
    functions: Unsupported = None
    function_call: Unsupported = None
    reasoning_effort: Unsupported = None


class TextSettings(Strict):
    format: Format | None = None
    verbosity: Unsupported = None


class ResponsesBody(SamplingBody):
    input: str | Messages[turns.ResponsesItem]
    instructions: str | None = None
    max_output_tokens: int | None = setting("max_tokens", ge=1)
    text: TextSettings | None = None
    metadata: Annotated[dict[str, str] | None, at_most(turns.MAX_FIELDS, "entries")] = None
    user: Ignored = None
    store: Ignored = None
    previous_response_id: Unsupported = None
    reasoning: Unsupported = None
    truncation: Literal["auto", "disabled"] | None = None
    tools: Annotated[list[turns.ResponsesTool] | None, at_most(turns.MAX_TOOLS, "tools")] = None
    tool_choice: Literal["none", "auto", "required"] | turns.ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CountBody(Body):
    messages: Messages[turns.MessagesTurn]
    system: Content | None = None
    tools: Annotated[list[turns.MessagesTool] | None, at_most(turns.MAX_TOOLS, "tools")] = None
    tool_choice: turns.MessagesToolChoice | None = None
    thinking: Unsupported = None


class MessagesBody(CountBody):
    max_tokens: int = setting("max_tokens", ..., ge=1)
    temperature: float | None = setting("temperature", ge=0.0, le=1.0)
    top_p: float | None = setting("top_p")
    top_k: int | None = setting("top_k", ge=1, lt=2**31)
    stop_sequences: Stops | None = setting("stop")
    stream: bool | None = None
    metadata: Ignored = None
    service_tier: Ignored = None


class EmbeddingsBody(Body):
    input: Annotated[str | Ids | Strings | ListOfIds, _check_inputs(MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    user: Ignored = None


class AbilityBody(Body):
    ability: Name
    questions: int = Field(default=25, ge=1, le=100, description="Questions at each distance.")


class TranslateBody(Body):
    input: Texts
    source: str | None = None
    target: str | None = None
    beams: int | None = setting("beams", ge=1, le=64)


class ClassifyBody(Body):
    input: Texts
    second: Texts | None = None


class TextBody(Body):
    input: str


class DetokenizeBody(Body):
    tokens: list[TokenId] = Field(fail_fast=True)


class TokenizersBody(Strict):
    """A text for all tokenizers; no model is named."""

    input: str = Field(max_length=MAX_TOKENIZED)


class PrefixBody(Body):
    """The prefix of a text: an input (a source, if the model writes one text from another) or a conversation, and the
    ids of tokens written so far."""

    input: str = ""
    messages: Messages[turns.ChatTurn] | None = None
    tokens: Annotated[list[TokenId], at_most(MAX_STREAMED_TOKENS, "tokens")] = Field(default=[], fail_fast=True)


class NextBody(PrefixBody):
    top: int = Field(default=40, ge=1, le=1000, description="Number of likeliest tokens to return.")
    logprobs: bool = Field(default=False, description="Also all log-probabilities, by id: float32 in base64.")


class WriteBody(PrefixBody, SamplingBody):
    max_tokens: int = Field(
        default=64, ge=1, le=MAX_STREAMED_TOKENS, description="Stop after this many tokens, those in `tokens` included."
    )
    top: int = setting("logprobs", 10)


class BeamsBody(PrefixBody):
    """Beam search; settings that are left out are the model's defaults."""

    beams: int | None = setting("beams", ge=1, le=64)
    max_tokens: int | None = setting("max_tokens", ge=1, le=MAX_STREAMED_TOKENS)


class FillBody(TextBody):
    top: int = Field(default=10, ge=1, le=100, description="Number of likeliest tokens per masked position.")


class ReadingBody(Body):
    input: str | None = None
    target: str | None = None


class PredictionBody(Body):
    input: str | None = None
    second: str | None = Field(default=None, description="Second text of a pair, context of a question, or comparison.")
    output: int | str | None = Field(default=None, description="Explained label, index of a word or of a similar text.")


class ExplainBody(ReadingBody):
    place: int | None = Field(default=None, ge=-(2**31), lt=2**31, description="Position of the explained token.")
    other: str | None = Field(default=None, description="Patch: the text whose activations are replaced.")
    answer: tuple[str, str] | None = Field(default=None, description="Patch: the tokens that follow the two texts.")
    settings: Branching | None = None


class StepBody(ReadingBody):
    """The token to follow, the layer to open, and how the next token is chosen."""

    place: int | None = Field(default=None, ge=-(2**31), lt=2**31, description="Position of the token to follow.")
    source_place: int | None = Field(default=None, ge=0, lt=2**31, description="Token of the source, in the encoder.")
    layer: int | None = Field(default=None, ge=0, lt=2**31, description="Layer to open, counted from 0.")
    threads: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], at_most(MAX_THREADS, "threads")] = Field(
        default=[], fail_fast=True, description="Positions of other tokens to show of a long text."
    )
    temperature: float | None = setting("temperature", ge=0.0, le=2.0)
    top_k: int | None = setting("top_k", ge=-1, lt=2**31)
    top_p: float | None = setting("top_p")


class WithoutHeadsBody(ReadingBody):
    heads: Annotated[list[Head], at_most(MAX_HEADS, "heads")] = Field(
        default=[], fail_fast=True, description="Heads to switch off, each as [kind, layer, head]."
    )
