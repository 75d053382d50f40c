"""The rows of each step, for any micro-batches and any number of processes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.data import held
from tests.training.small import CPU, Corpus, loader, small

from weft.data.batch import Batch
from weft.errors import ConfigError
from weft.parallel.ranks import ALONE, Ranks
from weft.recipe.config import BatchConfig
from weft.recipe.objective import Contrastive
from weft.training.loader import Loader, micro_rows, shard_loader


def test_a_mixture_is_drawn_by_its_weights() -> None:
    mixture = [{"sources": ["a"], "weight": 3.0}, {"sources": ["b"], "weight": 1.0}]
    settings = small("batch.size=8").replace(data={"mixture": mixture})
    batches = loader(settings, *(SimpleNamespace(train=held.tokens([token] * 500)) for token in (1, 2)))
    rows = torch.cat([part.tokens[:, 0] for step in range(1, 11) for part in batches.parts(step)])
    assert (rows == 1).sum() == 60
    assert (rows == 2).sum() == 20
    assert batches.epochs(10) > 0


def test_micro_batches_do_not_change_the_rows_of_a_step(corpus: Corpus) -> None:
    whole = loader(small("batch.size=5"), corpus).parts(3)[0].tokens
    divided = loader(small("batch.size=5", "batch.micro=2"), corpus).parts(3)
    assert [len(part.tokens) for part in divided] == [1, 2, 2]
    assert torch.equal(torch.cat([part.tokens for part in divided]), whole)


def test_a_masked_batch_counts_its_targets(corpus: Corpus) -> None:
    (batch,) = loader(small(), corpus).parts(1)
    mask = torch.zeros_like(batch.tokens, dtype=torch.bool)
    mask[0, :5] = True
    assert replace(batch, loss_mask=mask).count == 5


def test_a_stream_yields_the_micro_batches_of_each_step_in_order(corpus: Corpus) -> None:
    batches = loader(small("batch.micro=2"), corpus)
    found = list(batches.stream(3, 5, CPU))
    assert len(found) == 3
    for step, parts in zip((3, 4, 5), found, strict=True):
        assert [part.tokens.tolist() for part in parts] == [part.tokens.tolist() for part in batches.parts(step)]


@pytest.mark.parametrize(("micro", "rows"), [(None, 8), ("auto", 8), (3, 3)])
def test_a_step_is_one_micro_batch_unless_the_recipe_divides_it(micro: Any, rows: int) -> None:
    assert micro_rows(BatchConfig(size=8, micro=micro), 8) == rows


# ---- several processes


@pytest.mark.parametrize(("size", "ranks"), [(32, 2), (7, 3)])
def test_processes_divide_the_rows_of_one(corpus: Corpus, size: int, ranks: int) -> None:
    settings = small(f"batch.size={size}")
    whole = loader(settings, corpus)
    for step in (1, 9):
        local = [shard_loader(whole, settings, Ranks(rank, ranks)).batch(step).tokens for rank in range(ranks)]
        assert torch.equal(torch.cat(local), whole.batch(step).tokens)


def test_a_micro_batch_has_no_more_rows_than_the_process(corpus: Corpus) -> None:
    settings = small("batch.size=7")
    assert shard_loader(loader(settings, corpus), settings, ALONE).micro == 7
    assert shard_loader(loader(settings, corpus), settings, Ranks(0, 3)).micro == 3


def test_too_few_rows_to_divide_is_one_line(corpus: Corpus) -> None:
    settings = small("batch.size=2")
    with pytest.raises(ConfigError, match=r"batch\.size = 2: 3 processes share the rows of a step"):
        shard_loader(loader(settings, corpus), settings, Ranks(0, 3))
    rows = torch.zeros(2, 4, dtype=torch.int64)
    few = Loader(lambda *args: Batch(rows, rows), lambda step: 2, epochs=float, min_rows=2, row="row", micro=2)
    by_tokens: Any = SimpleNamespace(objective=settings.objective, batch=BatchConfig(tokens=99, length=4))
    with pytest.raises(ConfigError, match=r"batch\.tokens = 99: 3 processes .* some steps have only 2; raise it"):
        shard_loader(few, by_tokens, Ranks(1, 3))


def test_rows_that_are_compared_with_each_other_are_not_divided(corpus: Corpus) -> None:
    recipe: Any = SimpleNamespace(objective=Contrastive(), batch=BatchConfig(size=4))
    with pytest.raises(ConfigError, match=r"so 2 processes can't share it"):
        shard_loader(loader(small(), corpus), recipe, Ranks(0, 2))
