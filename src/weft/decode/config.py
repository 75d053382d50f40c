"""Settings of generation: sampling, beam search and search trees. Torch-free.

`parameters` describes the settings of `Sampling` and `Beam`, so that options of commands, keyword arguments of the API,
schemas of routes and fields of forms can be generated. Each setting is declared once, here.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from weft.config import Config

StopString = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-1000.0, le=1000.0)]
Penalty = Annotated[float, Field(ge=-100.0, le=100.0)]
Fraction = Annotated[float | None, Field(gt=0.0, le=1.0)]
MAX_TOKENS = 10**9  # bounds every setting that counts tokens
# Defaults of decoding by kind of model, where an imported checkpoint has none. A language model continues a text with
# the defaults of `Sampling`. In a chat, temperature 1 over the whole vocabulary soon leads a small model astray; other
# programs are similar (llama.cpp: 0.8 and 0.95, Ollama: 0.8 and 0.9).
CHAT_DEFAULTS = {"temperature": 0.7, "top_p": 0.9}
TRANSLATION_DEFAULTS = {"beams": 5, "patience": 1.0}  # of a model that writes one text from another
MIN_TEMPERATURE = 1e-30  # below this, dividing logits may overflow; at this, only ties with the maximum have a chance


class Rules(Config):
    """Settings that sampling and beam search share: when a text ends, and how earlier tokens change the next logits.

    Rules apply in this order: `logit_bias`, the three penalties, `no_repeat_ngram`, `banned` and `min_tokens`, and last
    `forced` and `last`, which hold even for tokens that the model excludes. The repetition penalty is Keskar et al.'s
    (2019, §4.1), the ban on repeated n-grams Paulus et al.'s (2018, §2.5). Stop strings are no part of the text.
    """

    max_tokens: int = Field(128, gt=0, le=MAX_TOKENS, description="Stop after this many tokens.")
    min_tokens: int = Field(0, ge=0, le=MAX_TOKENS, description="Don't end the text before this many tokens.")
    stop: tuple[StopString, ...] = Field((), description="Stop before any of these strings.")
    stop_ids: tuple[TokenId, ...] = Field((), description="Token ids that end the text, besides end-of-text.")
    repetition_penalty: float = Field(1.0, gt=0.0, le=100.0, description="Above 1: avoid tokens of prompt and text.")
    frequency_penalty: Penalty = Field(0.0, description="Subtract this from a logit each time its token was generated.")
    presence_penalty: Penalty = Field(0.0, description="Subtract this once from the logit of each generated token.")
    no_repeat_ngram: int = Field(0, ge=0, le=MAX_TOKENS, description="No n-gram of this size may repeat; 0 allows all.")
    logit_bias: dict[TokenId, Bias] = Field({}, description="Values to add to logits, by token id.")
    banned: tuple[TokenId, ...] = Field((), description="Token ids that are never generated.")
    forced: tuple[TokenId, ...] = Field((), description="Token ids that the text begins with.")
    last: TokenId | None = Field(None, description="Token id at the last position of a text that reaches max_tokens.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens}: more than max_tokens = {self.max_tokens}")
        both = sorted(set(self.banned) & set(self.forced))
        if both:
            raise ValueError(f"forced: token {both[0]} is banned as well")
        return self

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the earlier tokens through a rule, not only through the model."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty, self.no_repeat_ngram)
        return penalties != (1.0, 0.0, 0.0, 0)

    @property
    def changes_logits(self) -> bool:
        """Whether any rule changes the model's logits before a token is chosen from them."""
        others = self.logit_bias or self.banned or self.forced or self.min_tokens or self.last is not None
        return self.penalises or bool(others)


class Sampling(Rules):
    """Settings of sampling, one token after the other.

    Filters apply in the order of declaration, temperature first. Without them, the model's distribution is unchanged.
    """

    temperature: float = Field(
        1.0, ge=0.0, le=100.0, description="Below 1: safer; above 1: bolder; 0: always the likeliest token (greedy)."
    )
    top_k: int | None = Field(None, gt=0, le=MAX_TOKENS, description="Draw from this many likeliest tokens.")
    top_p: Fraction = Field(None, description="Draw from the fewest likeliest tokens that reach this probability.")
    min_p: Fraction = Field(None, description="Drop tokens less likely than this fraction of the likeliest.")
    typical_p: Fraction = Field(None, description="Draw from the most typical tokens that reach this probability.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the draws: the same seed gives the same text.")
    logprobs: int | None = Field(None, ge=0, le=100, description="Report log p of each token and this many others.")
    slide: bool = Field(True, description="Beyond the model's window, continue from the last tokens; otherwise stop.")

    @model_validator(mode="after")
    def _greedy_has_no_filters(self) -> Self:
        if self.temperature == 0.0 and (self.top_k or self.top_p or self.min_p or self.typical_p):
            useless = "top_k, top_p, min_p and typical_p don't apply"
            raise ValueError(f"greedy decoding (temperature = 0) draws nothing, so {useless}")
        return self

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken: the temperature is 0, or too low to matter."""
        return self.temperature < MIN_TEMPERATURE


class PowerLength(Config):
    """score = log p / length^alpha: 0 keeps the sum, 1 is the mean per token."""

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
    """Beam search: keep the `beams` likeliest prefixes at each step, and return the `n` best texts.

    The search ends when no live prefix can still reach the texts to return (`settled = "certain"`); where length is
    rewarded, that may be at `max_tokens` only. With "likely" it also ends when as many texts as beams have ended and no
    live prefix scores better now, as in Transformers; with a `patience`, when patience · beams texts have ended (Kasai
    et al. 2022; 1 in fairseq and CTranslate2). Coverage: Wu et al. 2016, §7. Unknown tokens: Luong et al. 2015.
    """

    beams: int = Field(4, ge=1, le=1000, description="Number of beams; 1 is greedy.")
    n: int = Field(1, gt=0, description="Number of texts to return, best first.")
    length_penalty: LengthPenalty = Field(PowerLength(), description="Divisor of log p; high powers favour long texts.")
    coverage_penalty: float = Field(0.0, ge=0.0, le=10.0, description="Penalise texts that skip parts of the source.")
    patience: float | None = Field(None, gt=0.0, le=1000.0, description="End after patience · beams complete texts.")
    settled: Literal["certain", "likely"] = Field(
        "certain", description="End the search when better texts are impossible (certain) or improbable (likely)."
    )
    renormalise: bool = Field(True, description="Renormalise probabilities over the tokens that the rules allow.")
    replace_unknown: bool = Field(False, description="Replace unknown tokens by the source tokens they attend to most.")

    @model_validator(mode="after")
    def _enough_beams(self) -> Self:
        if self.n > self.beams:
            raise ValueError(f"n = {self.n}: a beam of {self.beams} holds at most {self.beams} texts")
        return self


class Branching(Config):
    """Size of the search trees that are drawn: of greedy search with alternatives, of beam search, of samples."""

    depth: int = Field(3, ge=1, le=12, description="Tokens to generate.")
    alternatives: int = Field(3, ge=1, le=10, description="Likeliest tokens shown per step of greedy search.")
    beams: int = Field(3, ge=1, le=10, description="Number of beams.")
    samples: int = Field(4, ge=1, le=20, description="Number of sampled texts.")
    temperature: float = Field(1.0, gt=0.0, le=100.0, description="Temperature of the samples.")
    top_k: int | None = Field(None, gt=0, le=MAX_TOKENS, description="Draw from this many likeliest tokens.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the samples.")


class TreeSearch(Config):
    """Searches of a hand-written tree."""

    beams: int = Field(2, ge=1, le=10, description="Number of beams.")
    samples: int = Field(6, ge=1, le=20, description="Number of sampled paths.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the samples.")


# Settings that commands don't offer, such as token ids, and options whose name differs from the setting's.
UNOFFERED = {"stop_ids", "logit_bias", "banned", "forced", "last", "settled", "renormalise", "replace_unknown"}
RENAMED = {"typical_p": "--typical", "slide": "--slide/--no-slide", "beams": "--beam"}
Group = Literal["rules", "sampling", "beam"]


class Parameter(NamedTuple):
    """A setting of `Sampling` or `Beam`, as its field declares it."""

    name: str
    type: Any  # the annotation without None
    default: Any
    description: str
    bounds: Mapping[str, float]  # some of "ge", "gt", "le" and "lt", as `pydantic.Field` takes them
    group: Group  # the search it belongs to; rules belong to both
    option: str | None  # of a command, such as "--top-k"; None where commands don't offer it


def parameters() -> tuple[Parameter, ...]:
    """Return the settings of `Sampling` and `Beam` in the order of declaration: rules, sampling, beam search."""
    groups: dict[Group, type[Rules]] = {"rules": Rules, "sampling": Sampling, "beam": Beam}
    return tuple(
        _parameter(name, field, group)
        for group, config in groups.items()
        for name, field in config.model_fields.items()
        if config is Rules or name not in Rules.model_fields
    )


def _parameter(name: str, field: FieldInfo, group: Group) -> Parameter:
    members = get_args(field.annotation)
    limits = ((key, getattr(mark, key, None)) for mark in field.metadata for key in ("ge", "gt", "le", "lt"))
    return Parameter(
        name=name,
        type=members[0] if type(None) in members else field.annotation,
        default=field.get_default(call_default_factory=True),
        description=field.description or "",
        bounds={key: limit for key, limit in limits if limit is not None},
        group=group,
        option=None if name in UNOFFERED else RENAMED.get(name, f"--{name.replace('_', '-')}"),
    )
