"""ELECTRA (Clark et al. 2020): a discriminator that tells which tokens were replaced, and the generator that does so.

A BERT whose embeddings are narrower than its layers, unless they are as wide.
"""

from weft.interop.families.bert import (
    BODY,
    FIXED,
    NO_DECODER,
    OTHERS,
    Heads,
    bert_dropout,
    body,
    family,
    head,
    pooled,
    words_head,
)
from weft.interop.table import Table, embedding_width
from weft.interop.weight_map import module

_WORDS = ("generator_predictions.dense", "generator_predictions.LayerNorm")
HEADS: Heads = {
    "replaced": (
        *module("output.dense", "discriminator_predictions.dense"),
        *module("output.out", "discriminator_predictions.dense_prediction"),
    ),
    "mlm": words_head("output", *_WORDS, "generator_lm_head", "generator_lm_head.bias"),
    "sequence": pooled("output", "classifier.dense", "classifier.out_proj"),
    **OTHERS,
}


ELECTRA = family(
    "electra",
    "ELECTRA",
    Table(
        rows=(*BODY, embedding_width("embedding_size", 128), head("gelu", bert_dropout, words="gelu")),
        fixed=FIXED,
        only=NO_DECODER,
        defaults={"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    ),
    (*body("electra"), *module("encoder.projection", "electra.embeddings_project")),
    HEADS,
    name="Electra",
    unused=(r"(generator|discriminator)_(predictions|lm_head)\..*",),
)
