"""Every family of Hugging Face models that weft reads and writes: a new one is a file, its import and its name here."""

from weft.config import Tree
from weft.errors import InteropError
from weft.interop.families.albert import ALBERT
from weft.interop.families.base import Family
from weft.interop.families.bert import BERT, CAMEMBERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from weft.interop.families.deberta import DEBERTA_V2
from weft.interop.families.electra import ELECTRA
from weft.interop.families.falcon import BLOOM, FALCON
from weft.interop.families.gemma import GEMMA, GEMMA2, GEMMA3
from weft.interop.families.gpt2 import GPT2, GPT_NEO, GPTJ
from weft.interop.families.gpt_neox import GPT_NEOX, PHI, STABLELM, STARCODER2
from weft.interop.families.llama import GRANITE, LLAMA, MISTRAL, OLMO, OLMO2, PHI3, QWEN2, QWEN3, SMOLLM3
from weft.interop.families.modernbert import MODERNBERT
from weft.interop.families.mpnet import MPNET
from weft.interop.families.nearest import unknown
from weft.interop.families.opt import OPT
from weft.interop.families.seq2seq import BART, M2M100, MARIAN, MBART, MT5, PEGASUS, T5
from weft.interop.settings import shown

# where several can hold a model that weft has trained, the first one is written
DECODERS = (
    *(GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, SMOLLM3, GRANITE, PHI3, OLMO, OLMO2),
    *(OPT, GPT_NEOX, GPTJ, GPT_NEO, PHI, STABLELM, FALCON, STARCODER2, BLOOM),
)
ENCODERS = (BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT, ELECTRA, ALBERT, MPNET, MODERNBERT, DEBERTA_V2)
PAIRS = (MARIAN, BART, MBART, PEGASUS, M2M100, T5, MT5)
FAMILIES: dict[str, Family] = {family.kind: family for family in (*DECODERS, *ENCODERS, *PAIRS)}


def family_of(tree: Tree, where: str) -> tuple[Family, str]:
    """The family of a config.json, and which of its architectures the folder holds."""
    kind, named = tree.get("model_type"), tree.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if not isinstance(architecture, str | None):
        raise InteropError(f"{where}: architectures = {shown(named)}: expected the name of one")
    by_name = {name: family for family in FAMILIES.values() for name in family.architectures}
    if kind is None and architecture in by_name:
        kind = by_name[architecture].kind
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InteropError(f"{where}: model_type = {shown(kind)}: {unknown(tree, FAMILIES.values())}")
    family = FAMILIES[kind]
    if architecture is None:
        architecture = list(family.architectures)[-1]  # the base model
    if architecture not in family.architectures:
        known = ", ".join(family.architectures)
        raise InteropError(f"{where}: architectures = {shown([architecture])}: of {family.title} weft reads {known}")
    return family, architecture
