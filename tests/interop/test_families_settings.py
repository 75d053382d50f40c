"""A config.json with a value of a wrong type gives a model or one line of error, in every family."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import math
from collections.abc import Iterator
from typing import Any

import pytest
from tests.interop.hf_models import CASES
from tests.later import Later
from tests.spread import spread

from weft.errors import InteropError, WeftError
from weft.interop.families.known import FAMILIES, family_of
from weft.interop.settings import MAX_SIZE, Settings
from weft.models.config import Decoder, Encoder, EncoderDecoder

transformers = Later("transformers")

# for each family, one of the models of hf_models
MODELS = {
    "gpt2": "gpt2",
    "llama": "llama3",
    "mistral": "mistral",
    "qwen2": "qwen2-window",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3_text",
    "smollm3": "smollm3",
    "granite": "granite",
    "phi3": "phi3-longrope",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "seed_oss": "seed_oss",
    "ministral3": "ministral3",
    "cwm": "cwm",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen2_moe-dense",
    "qwen3_moe": "qwen3_moe-dense",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "ernie4_5_moe": "ernie4_5_moe-interval",
    "hunyuan_v1_moe": "hunyuan_v1_moe",
    "glm4_moe": "glm4_moe",
    "minimax_m2": "minimax_m2",
    "phimoe": "phimoe",
    "gpt_oss": "gpt_oss",
    "llama4_text": "llama4_text",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "opt": "opt",
    "gpt_neox": "gpt_neox",
    "gptj": "gptj",
    "gpt_neo": "gpt_neo",
    "phi": "phi",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "falcon": "falcon-grouped",
    "bloom": "bloom",
    "cohere": "cohere-normed",
    "cohere2": "cohere2",
    "glm": "glm",
    "glm4": "glm4",
    "olmo3": "olmo3",
    "exaone4": "exaone4",
    "helium": "helium",
    "ernie4_5": "ernie4_5",
    "hunyuan_v1_dense": "hunyuan_v1_dense",
    "arcee": "arcee",
    "nemotron": "nemotron",
    "ministral": "ministral",
    "apertus": "apertus",
    "gpt_bigcode": "gpt_bigcode",
    "codegen": "codegen",
    "mpt": "mpt-clipped",
    "bert": "bert-labels",
    "roberta": "roberta-masked",
    "xlm-roberta": "xlm-roberta",
    "camembert": "camembert",
    "distilbert": "distilbert-tags",
    "electra": "electra-labels",
    "albert": "albert-groups",
    "mpnet": "mpnet",
    "modernbert": "modernbert",
    "modernbert-decoder": "modernbert-decoder",
    "eurobert": "eurobert-labels",
    "nomic_bert": "nomic_bert",
    "esm": "esm",
    "deberta-v2": "deberta-v2",
    "deberta": "deberta",
    "longformer": "longformer-labels",
    "blenderbot": "blenderbot",
    "marian": "marian-two-tables",
    "bart": "bart",
    "mbart": "mbart",
    "pegasus": "pegasus",
    "m2m_100": "m2m_100",
    "t5": "t5",
    "mt5": "mt5",
    "umt5": "umt5",
    "led": "led",
    "t5gemma": "t5gemma",
}
DEEP: Any = []  # nested lists
for _ in range(3000):
    DEEP = [DEEP]
STRANGE: list[Any] = [None, [], {}, "x", "", -1, 0, 0.5, 10**18, 10**30, 10**400, math.nan, math.inf, True, False]
STRANGE += [[["a"]], [{}], [None], {"a": {}}, {"type": ["x"]}, {"rope_type": {}}, "two\nlines" * 1000, DEEP]


def tree_of(family: str) -> dict[str, Any]:
    """The config.json of a family's model."""
    name, settings = CASES[MODELS[family]]
    return {**getattr(transformers, name).config_class(**settings).to_dict(), "architectures": [name]}


def corrupt_trees(tree: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield key, value and the changed tree, for each key of the first two levels: removed, and each of STRANGE."""
    for key, value in tree.items():
        yield key, "removed", {name: other for name, other in tree.items() if name != key}
        for strange in STRANGE:
            yield key, strange, {**tree, key: strange}
            for inner in value if isinstance(value, dict) else ():
                yield f"{key}.{inner}", strange, {**tree, key: {**value, inner: strange}}


def test_every_family_is_listed() -> None:
    assert set(MODELS) == set(FAMILIES)


@pytest.mark.parametrize("name", spread(MODELS, 3))
def test_a_strange_value_gives_a_model_or_one_line(name: str) -> None:
    tree = tree_of(name)
    family, architecture = family_of(tree, "config.json")
    assert family.kind == name
    assert isinstance(family.read(Settings(tree, "config.json"), architecture, {}), Decoder | Encoder | EncoderDecoder)
    lines = []
    for key, strange, corrupt in corrupt_trees(tree):
        try:
            family, architecture = family_of(corrupt, "config.json")
            model = family.read(Settings(corrupt, "config.json"), architecture, {})
        except WeftError as error:
            lines.append(str(error))
        except Exception as error:
            value = "a deep list" if strange is DEEP else repr(strange)[:80]
            raise AssertionError(f"{key} = {value}: {type(error).__name__}: {error}") from error
        else:
            assert isinstance(model, Decoder | Encoder | EncoderDecoder)
    assert len(lines) > 100
    assert not [line for line in lines if "\n" in line or len(line) > 600]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": ["gelu"]}, r"hidden_act = \['gelu'\]: weft has gelu"),
        ({"hidden_act": {"a": 1}}, r"hidden_act = {'a': 1}: weft has gelu"),
        ({"vocab_size": 10**18}, rf"vocab_size = {10**18}: expected {MAX_SIZE:,} at most"),
        ({"hidden_size": 10**30}, rf"hidden_size = {10**30}: expected {MAX_SIZE:,} at most"),
        ({"vocab_size": True}, "vocab_size = True: expected a whole number above 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps = nan: expected a finite number"),
        ({"attention_dropout": math.inf}, "attention_dropout = inf: expected a finite number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 1000.*: expected a finite number"),
        ({"rope_parameters": [1]}, r"rope_parameters = \[1\]: expected a table"),
        *(
            ({"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 1e300}}, "factor.*1000000")
            for kind in ("dynamic", "linear", "yarn")
        ),
        (
            {"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "dynamic-ntk scaling needs at least two",
        ),
    ],
)
def test_the_message_names_key_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        FAMILIES["llama"].read(Settings(tree_of("llama") | changes, "config.json"), "LlamaForCausalLM", {})


@pytest.mark.parametrize("names", [[["a"]], [{}], [3], [True]])
def test_architectures_that_are_not_names_are_refused(names: list[Any]) -> None:
    for tree in ({"model_type": "llama", "architectures": names}, {"architectures": names}):
        with pytest.raises(InteropError, match=r"config\.json: architectures = .*: expected the name of one"):
            family_of(tree, "config.json")
