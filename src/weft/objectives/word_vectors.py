"""Word vectors from running text: word2vec and GloVe."""

from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from weft.data.batch import Batch
from weft.data.shards import Side
from weft.errors import ConfigError
from weft.models.base import LanguageModel
from weft.models.word_table import WordTable
from weft.objectives.text import TextObjective
from weft.recipe import objective as config
from weft.training.loader import Loader
from weft.training.objective import Loss, Results

EXAMPLES, NEAREST = 12, 6  # words in the report, and the nearest words of each
FIRST_EXAMPLE = 50  # rank by frequency of the first word in the report: more frequent ones say little


class WordVectors(TextObjective[config.WordVectors]):
    """Text as word ids; the updates are in `weft.models.word2vec` and `weft.models.glove`."""

    usage = "weft neighbours {run} WORD"

    def words(self) -> NDArray[np.int32]:
        """Return the training text as word ids (time,): −1 between documents, without special tokens and unknown
        words."""
        dropped = sorted(set(self.tokenizer.special_tokens.values()))
        parts: list[NDArray[np.int32]] = []
        for text in self.tokens("train"):
            ids, documents = text.read(0, len(text)), text.documents(0, len(text))
            kept = ~np.isin(ids, dropped)
            ids, documents = ids[kept], documents[kept]
            ends = np.flatnonzero(np.diff(documents)) + 1
            parts += [np.insert(ids, ends, -1).astype(np.int32), np.array([-1], dtype=np.int32)]
        return np.concatenate(parts)

    def loss(self, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
        self._refuse()

    @property
    def loader(self) -> Loader:
        self._refuse()

    def validation_metrics(self, model: LanguageModel, max_tokens: int | None) -> dict[str, float]:
        return {}

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        self._refuse()

    def _refuse(self) -> NoReturn:
        how = "weft neighbours RUN --pairs FILE (similarity), or --questions FILE (analogies)"
        raise ConfigError(f"word vectors are not evaluated on a text; measure them with {how}")

    def final_evaluation(self, model: LanguageModel) -> Results:
        """Return frequent words with their nearest neighbours."""
        assert isinstance(model, WordTable)
        table = F.normalize(model.embedding.weight.detach().float(), dim=-1)
        first = len(self.tokenizer.special_tokens) + min(FIRST_EXAMPLE, len(table) // 4)
        words = [id for id in range(first, len(table)) if self.tokenizer.token(id).isalpha() and table[id].any()]
        rows = [["word", "nearest"]]
        for id in words[:EXAMPLES]:
            best = (table @ table[id]).index_fill(0, torch.tensor([id]), -1.0).topk(min(NEAREST, len(table) - 1))
            rows.append([self.tokenizer.token(id), ", ".join(map(self.tokenizer.token, best.indices.tolist()))])
        return Results(table=rows)
