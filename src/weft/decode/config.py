"""How text is drawn from a model, as settings."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from weft.config import Config

StopString = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-1000.0, le=1000.0)]
MAX_TOKENS = 10**9  # in one text, and of the likeliest to draw from
MIN_TEMPERATURE = 1e-30  # logits divided by a lower one may not be finite; at this one only equals have a chance


class Rules(Config):
    """What holds for every way of writing: when to stop, and what the text so far does to the next token.

    `repetition_penalty` counts the prompt too (Keskar et al. 2019); `frequency_penalty` and `presence_penalty` count
    only what was written. Before any of them, `logit_bias` is added, by token id. No n-gram of `no_repeat_ngram` tokens
    repeats in prompt and text (Paulus et al. 2018, §2.5); 0 allows it. `banned` tokens are never written, `forced` ones
    come first in any case, and the text cannot end by itself before `min_tokens`. A text ends before the strings to
    `stop` at, and with a token of `stop_ids`, as it does with the tokenizer's eos. One that reaches `max_tokens` has
    the token `last` there, if there is one.
    """

    max_tokens: PositiveInt = Field(default=128, le=MAX_TOKENS)
    min_tokens: NonNegativeInt = Field(default=0, le=MAX_TOKENS)
    stop: tuple[StopString, ...] = ()
    stop_ids: tuple[TokenId, ...] = ()
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=100.0)
    frequency_penalty: float = Field(default=0.0, ge=-100.0, le=100.0)
    presence_penalty: float = Field(default=0.0, ge=-100.0, le=100.0)
    no_repeat_ngram: NonNegativeInt = Field(default=0, le=MAX_TOKENS)
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict)
    banned: tuple[TokenId, ...] = ()
    forced: tuple[TokenId, ...] = ()
    last: TokenId | None = None

    @model_validator(mode="after")
    def _can_be_kept(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens}: more than max_tokens = {self.max_tokens}")
        both = sorted(set(self.banned) & set(self.forced))
        if both:
            raise ValueError(f"forced: token {both[0]} is banned as well")
        return self

    @property
    def penalises(self) -> bool:
        """Whether the next token depends on which tokens came before, beyond what the model makes of them."""
        given = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty, self.no_repeat_ngram)
        return given != (1.0, 0.0, 0.0, 0)

    @property
    def changes_logits(self) -> bool:
        """Whether anything here changes the model's logits before a token is chosen from them."""
        asked = self.logit_bias or self.banned or self.forced or self.min_tokens or self.last is not None
        return self.penalises or bool(asked)


class Sampling(Rules):
    """How the next token is chosen, and when to stop.

    `temperature = 0` takes the likeliest token each time (greedy). `top_k`, `top_p`, `min_p` and `typical_p` each drop
    tokens before one is drawn; without them and with `temperature = 1` the draw follows the model exactly.
    `logprobs = n` reports the log-probability of each token and of the n likeliest, as the model gave them. A text that
    is longer than the model's window goes on over its last tokens; without `slide` it ends there.
    """

    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_k: PositiveInt | None = Field(default=None, le=MAX_TOKENS)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    min_p: float | None = Field(default=None, gt=0.0, le=1.0)
    typical_p: float | None = Field(default=None, gt=0.0, le=1.0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    logprobs: int | None = Field(default=None, ge=0, le=100)
    slide: bool = True

    @model_validator(mode="after")
    def _greedy_has_no_choice(self) -> Self:
        if self.temperature == 0.0 and (self.top_k or self.top_p or self.min_p or self.typical_p):
            useless = "top_k, top_p, min_p and typical_p don't apply"
            raise ValueError(f"greedy decoding (temperature = 0) draws nothing, so {useless}")
        return self

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time: the temperature is 0, or so low that it comes to the same."""
        return self.temperature < MIN_TEMPERATURE


class PowerLength(Config):
    """score = log p / length^alpha: 0 leaves the sum, 1 takes the mean of a token."""

    kind: Literal["power"] = "power"
    alpha: float = Field(default=1.0, ge=-10.0, le=10.0)

    def divisor(self, length: int) -> float:
        return float(length) ** self.alpha


class GNMTLength(Config):
    """score = log p / ((5 + length) / 6)^alpha: milder for short texts (Wu et al. 2016, §7)."""

    kind: Literal["gnmt"] = "gnmt"
    alpha: float = Field(default=0.6, ge=-10.0, le=10.0)

    def divisor(self, length: int) -> float:
        return ((5.0 + length) / 6.0) ** self.alpha


LengthPenalty = Annotated[PowerLength | GNMTLength, Field(discriminator="kind")]


class Beam(Rules):
    """Beam search: keep the `beams` likeliest beginnings at each step, and return the `n` best texts.

    A width of one is greedy decoding. `coverage_penalty` times Σ log min(weight, 1) over the words of a source lowers
    the score of texts that left some of them out (Wu et al. 2016, §7).

    The search is `settled` for certain when no beginning can still reach the texts that are returned; where length is
    rewarded, that may be at `max_tokens` alone. It is likely to be when as many texts as beams have ended and no
    beginning is better as it stands, which is what Transformers goes by. With a `patience` it also ends when patience ·
    beams texts have ended (Kasai et al. 2022): 1 is what fairseq and CTranslate2 do. Unless they `renormalise`, rules
    leave the log-probabilities of what they allow as the model gave them, and penalties act on these. A translation
    that may `replace_unknown` tokens has for each the piece of the source that it looks at (Luong et al. 2015).
    """

    beams: int = Field(default=4, ge=1, le=1000)
    n: PositiveInt = 1
    length_penalty: LengthPenalty = PowerLength()
    coverage_penalty: float = Field(default=0.0, ge=0.0, le=10.0)
    patience: float | None = Field(default=None, gt=0.0, le=1000.0)
    settled: Literal["certain", "likely"] = "certain"
    renormalise: bool = True
    replace_unknown: bool = False

    @model_validator(mode="after")
    def _enough_beams(self) -> Self:
        if self.n > self.beams:
            raise ValueError(f"n = {self.n}: a beam of {self.beams} holds at most {self.beams} texts")
        return self


class Branching(Config):
    """How far and how wide search trees are drawn: of greedy search with `alternatives`, of beam search, of samples."""

    depth: int = Field(default=3, ge=1, le=12)
    alternatives: int = Field(default=3, ge=1, le=10)
    beams: int = Field(default=3, ge=1, le=10)
    samples: int = Field(default=4, ge=1, le=20)
    temperature: float = Field(default=1.0, gt=0.0, le=100.0)
    top_k: PositiveInt | None = Field(default=None, le=MAX_TOKENS)
    seed: int = Field(default=0, ge=0, lt=2**63)
