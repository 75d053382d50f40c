"""Every family of Hugging Face models that weft reads and writes: a new one is a file, its import and its name here."""

from weft.config import Tree
from weft.errors import InteropError
from weft.interop.families.albert import ALBERT
from weft.interop.families.base import Family
from weft.interop.families.bert import BERT, CAMEMBERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from weft.interop.families.electra import ELECTRA
from weft.interop.families.gpt2 import GPT2
from weft.interop.families.llama import GEMMA, LLAMA, MISTRAL, QWEN2, QWEN3
from weft.interop.families.mpnet import MPNET
from weft.interop.families.seq2seq import BART, M2M100, MARIAN, MBART, MT5, PEGASUS, T5
from weft.interop.settings import shown

FAMILIES: dict[str, Family] = {
    family.kind: family
    for family in (
        *(GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA),
        *(BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT, ELECTRA, ALBERT, MPNET),
        *(MARIAN, BART, MBART, PEGASUS, M2M100, T5, MT5),
    )
}


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
        raise InteropError(f"{where}: model_type = {shown(kind)}: weft reads {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    if architecture is None:
        architecture = list(family.architectures)[-1]  # the base model
    if architecture not in family.architectures:
        known = ", ".join(family.architectures)
        raise InteropError(f"{where}: architectures = {shown([architecture])}: of {family.title} weft reads {known}")
    return family, architecture
