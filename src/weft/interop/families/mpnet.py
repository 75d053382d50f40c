"""MPNet (Song et al. 2020), of which many sentence encoders are made: a RoBERTa with T5's bias for distances."""

from weft.interop.families.bert import BLOCK, BODY, FIXED, NO_DECODER, ROBERTA_HEADS, bert_dropout, family, head
from weft.interop.table import Special, Table, constant
from weft.interop.weight_map import module, tensor

_LAYER = "mpnet.encoder.layer.{layer}"
NAMES = (
    tensor("embedding.weight", "mpnet.embeddings.word_embeddings.weight"),
    tensor("encoder.position.added.weight", "mpnet.embeddings.position_embeddings.weight"),
    tensor("encoder.position.scored.weight", "mpnet.encoder.relative_attention_bias.weight"),
    *module("encoder.embedding_norm", "mpnet.embeddings.LayerNorm"),
    *module(f"{BLOCK}.attention.qkv", *(f"{_LAYER}.attention.attn.{part}" for part in "qkv")),
    *module(f"{BLOCK}.attention.out", f"{_LAYER}.attention.attn.o"),
    *module(f"{BLOCK}.attention_skip.norm", f"{_LAYER}.attention.LayerNorm"),
    *module(f"{BLOCK}.feedforward.up", f"{_LAYER}.intermediate.dense"),
    *module(f"{BLOCK}.feedforward.down", f"{_LAYER}.output.dense"),
    *module(f"{BLOCK}.feedforward_skip.norm", f"{_LAYER}.output.LayerNorm"),
)
BUCKETS = 32  # of distances up to 128; transformers computes them for no other number
# positions are counted from 2 whatever the pad token is: transformers has a constant there
COUNTED = Special(
    lambda settings, model: {"position.offset": 2, "context": model["context"] - 2},
    lambda model: {"max_position_embeddings": model["context"] + 2},
)

MPNET = family(
    "mpnet",
    "MPNet",
    Table(
        rows=(
            *(row for row in BODY if getattr(row, "ours", "") != "segments"),
            COUNTED,
            constant("relative_attention_num_buckets", BUCKETS),
            head("tanh", bert_dropout, words="gelu"),
        ),
        fixed={**FIXED, "position.kind": "learned+t5", "position.buckets": BUCKETS, "segments": 0},
        only={**NO_DECODER, "relative_attention_num_buckets": BUCKETS},
    ),
    NAMES,
    ROBERTA_HEADS,
    name="MPNet",
    pooler="mpnet.pooler.dense",
    unused=(r"lm_head\..*",),
)
