"""Hashed n-gram embeddings: the formula written out, documents apart, and the step contract."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.models.contract import check_causal, check_rows_are_independent, check_step_equals_forward
from torch import Tensor

from weft.models.build import build
from weft.models.presets import gpt, llama
from weft.models.transformer import Transformer
from weft.nn.config import HashedNGrams
from weft.nn.hashed_ngrams import NGramEmbedding

VOCAB = 31
PLAIN, NARROW = HashedNGrams(orders=(2, 4), rows=13), HashedNGrams(orders=(3,), rows=50, width=6)


def written_out(ids: list[int], order: int, rows: int) -> int:
    """The row of the last `order` of these tokens, by Python's own whole numbers; before the first there is nothing."""
    last = ids[-order:][::-1]
    return sum((token + 1) * 1_000_000_007**back for back, token in enumerate(last)) % 2_147_483_647 % rows


def filled(settings: HashedNGrams, preset: Any = llama(2, 24, 4, 32, 32, vocab_size=VOCAB, kv_heads=2)) -> Transformer:  # noqa: B008
    """A small model whose tables have been learned: they weigh as much as the embeddings."""
    torch.manual_seed(0)
    model = build(preset.replace(ngrams=settings.model_dump()))
    with torch.no_grad():
        model.embedding.weight.mul_(10.0)
        model.ngrams.weight.normal_(std=0.2)
    return model.eval()


@pytest.mark.parametrize("vocab_size", [VOCAB, 200_000])
def test_rows_are_the_formula_written_out(vocab_size: int) -> None:
    orders, rows = (5, 2, 16), 131_072
    tables = NGramEmbedding(HashedNGrams(orders=orders, rows=rows, width=1), 1)
    tokens = torch.randint(vocab_size, (3, 20), generator=torch.Generator().manual_seed(0))
    found = tables.indices(tokens)
    for row, ids in enumerate(tokens.tolist()):
        for place in range(20):
            wanted = [n * rows + written_out(ids[: place + 1], order, rows) for n, order in enumerate(orders)]
            assert found[row, place].tolist() == wanted
    # what came before may be given instead
    assert torch.equal(tables.indices(tokens[:, 15:], tokens[:, :15]), found[:, 15:])


def test_rows_stay_what_they_were() -> None:
    """Trained tables are found again by every later version: these numbers may never change."""
    tables = NGramEmbedding(HashedNGrams(orders=(2, 3), rows=16_384), 1)
    found = tables.indices(torch.tensor([[72, 101, 108, 108, 111]]))
    assert found.tolist() == [[[73, 16457], [7302, 23686], [16230, 28096], [1434, 31481], [1437, 20053]]]


def test_their_sum_is_added_to_the_embedding() -> None:
    for settings in (PLAIN, NARROW):
        model = filled(settings)
        tables, ids = model.ngrams, [3, 1, 4, 1, 5]
        rows = [written_out(ids, order, settings.rows) + n * settings.rows for n, order in enumerate(settings.orders)]
        added = tables.weight[rows].sum(dim=0)
        if tables.projection is not None:
            added = tables.projection.weight @ added
        read: list[Tensor] = []
        hook = model.decoder.blocks[0].register_forward_pre_hook(lambda _, inputs, read=read: read.append(inputs[0]))
        model(torch.tensor([ids]))
        hook.remove()
        torch.testing.assert_close(read[0][0, -1], model.embedding.weight[5] + added)


def test_a_new_model_is_the_one_without_them() -> None:
    torch.manual_seed(0)
    without = build(gpt(2, 24, 4, 32, VOCAB)).eval()
    torch.manual_seed(0)
    model = build(gpt(2, 24, 4, 32, VOCAB).replace(ngrams=PLAIN.model_dump())).eval()
    tokens = torch.randint(VOCAB, (2, 9))
    assert torch.equal(model(tokens), without(tokens))
    model(tokens).sum().backward()
    assert model.ngrams.weight.grad.count_nonzero() > 0


@pytest.mark.parametrize("settings", [PLAIN, NARROW])
@pytest.mark.parametrize("preset", [gpt(1, 24, 4, 32, VOCAB), llama(2, 24, 4, 32, 32, vocab_size=VOCAB, kv_heads=2)])
def test_a_step_reads_what_came_before_it(settings: HashedNGrams, preset: Any) -> None:
    model = filled(settings, preset)
    check_step_equals_forward(model, VOCAB)
    check_causal(model, VOCAB)
    check_rows_are_independent(model, VOCAB)


def test_documents_are_kept_apart() -> None:
    """A document in a packed row is read as if it were alone; without its number, it is not."""
    model, ids = filled(PLAIN), torch.randint(VOCAB, (1, 9))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1, -1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]])
    packed = model(ids, documents=documents, positions=positions)
    for place in (slice(0, 3), slice(3, 7), slice(7, 9)):
        torch.testing.assert_close(packed[:, place], model(ids[:, place]))
    found = model.ngrams.indices(ids, None, documents)
    assert torch.equal(found[:, 3:7], model.ngrams.indices(ids[:, 3:7]))
    assert not torch.equal(found[:, 3:7], model.ngrams.indices(ids)[:, 3:7])


def test_padding_is_no_predecessor() -> None:
    model, ids = filled(PLAIN), torch.randint(VOCAB, (1, 8))
    mask = torch.tensor([[False, False, False, True, True, True, True, True]])
    padded = model(ids, mask=mask, positions=torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4]]))
    torch.testing.assert_close(padded[:, 3:], model(ids[:, 3:]))


def test_a_compiler_makes_one_graph_of_it() -> None:
    tables = filled(NARROW).ngrams
    given = torch.randint(VOCAB, (2, 9)), None, torch.tensor([[0] * 4 + [1] * 5] * 2)
    compiled = torch.compile(tables, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*given), tables(*given))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"orders": []}, "expected different"), ({"orders": [2, 2]}, "expected different"), ({"orders": [1]}, "2")],
)
def test_orders_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HashedNGrams(**changes)
