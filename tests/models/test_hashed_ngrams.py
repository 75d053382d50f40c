"""Hashed n-gram embeddings: the formula, packed documents, and the stepping contract."""

import pytest
import torch
from pydantic import ValidationError
from tests.models.contract import check_contract

from weft.explain.capture import capture
from weft.models.build import build
from weft.models.config import Decoder
from weft.models.presets import gpt, llama
from weft.models.transformer import Transformer
from weft.nn.config import HashedNGrams
from weft.nn.hashed_ngrams import NGramEmbedding

VOCAB = 31
PLAIN, NARROW = HashedNGrams(orders=(2, 4), rows=13), HashedNGrams(orders=(3,), rows=50, width=6)
GPT = gpt(1, 24, 4, context=32, vocab_size=VOCAB)
LLAMA = llama(2, 24, 4, d_ff=32, context=32, vocab_size=VOCAB, kv_heads=2)


def hash_row(ids: list[int], order: int, rows: int) -> int:
    """Row of the last `order` of these tokens, in Python's integers."""
    last = ids[-order:][::-1]
    return sum((token + 1) * 1_000_000_007**back for back, token in enumerate(last)) % 2_147_483_647 % rows


def trained(settings: HashedNGrams, preset: Decoder = LLAMA) -> tuple[Transformer, NGramEmbedding]:
    """Small model whose tables weigh as much as the embeddings, and these tables."""
    torch.manual_seed(0)
    model = build(preset.replace(ngrams=settings.model_dump())).eval()
    assert model.ngrams is not None
    with torch.no_grad():
        model.embedding.weight.mul_(10.0)
        model.ngrams.weight.normal_(std=0.2)
    return model, model.ngrams


@pytest.mark.parametrize("vocab_size", [VOCAB, 200_000])
def test_rows_follow_the_formula(vocab_size: int) -> None:
    orders, rows = (5, 2, 16), 131_072
    tables = NGramEmbedding(HashedNGrams(orders=orders, rows=rows, width=1), 1)
    tokens = torch.randint(vocab_size, (3, 20), generator=torch.Generator().manual_seed(0))
    found = tables.indices(tokens)
    for row, ids in enumerate(tokens.tolist()):
        for index in range(20):
            expected = [n * rows + hash_row(ids[: index + 1], order, rows) for n, order in enumerate(orders)]
            assert found[row, index].tolist() == expected
    # earlier tokens may be given separately
    assert torch.equal(tables.indices(tokens[:, 15:], tokens[:, :15]), found[:, 15:])


def test_rows_never_change() -> None:
    """Later versions must index trained tables in the same way."""
    tables = NGramEmbedding(HashedNGrams(orders=(2, 3), rows=16_384), 1)
    found = tables.indices(torch.tensor([[72, 101, 108, 108, 111]]))
    assert found.tolist() == [[[73, 16457], [7302, 23686], [16230, 28096], [1434, 31481], [1437, 20053]]]


@pytest.mark.parametrize("settings", [PLAIN, NARROW])
def test_their_sum_is_added_to_the_embedding(settings: HashedNGrams) -> None:
    (model, tables), ids = trained(settings), [3, 1, 4, 1, 5]
    rows = [hash_row(ids, order, settings.rows) + n * settings.rows for n, order in enumerate(settings.orders)]
    added = tables.weight[rows].sum(dim=0)
    if tables.projection is not None:
        added = tables.projection.weight @ added
    with capture(model, "decoder.dropout") as seen:
        model(torch.tensor([ids]))
    torch.testing.assert_close(seen["decoder.dropout"][0, -1], (model.embedding.weight[5] + added).detach())


def test_a_new_model_computes_the_same_as_without_them() -> None:
    torch.manual_seed(0)
    without = build(GPT).eval()
    torch.manual_seed(0)
    model = build(GPT.replace(ngrams=PLAIN.model_dump())).eval()
    tokens = torch.randint(VOCAB, (2, 9))
    assert torch.equal(model(tokens), without(tokens))
    model(tokens).sum().backward()
    gradient = model.get_parameter("ngrams.weight").grad
    assert gradient is not None and gradient.count_nonzero() > 0


@pytest.mark.parametrize("settings", [PLAIN, NARROW])
@pytest.mark.parametrize("preset", [GPT, LLAMA])
def test_models_with_ngrams_keep_the_contract(settings: HashedNGrams, preset: Decoder) -> None:
    model, _ = trained(settings, preset)
    check_contract(model, VOCAB)


def test_ngrams_do_not_cross_documents() -> None:
    (model, tables), ids = trained(PLAIN), torch.randint(VOCAB, (1, 9))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1, -1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]])
    packed = model(ids, documents=documents, positions=positions)
    for part in (slice(0, 3), slice(3, 7), slice(7, 9)):
        torch.testing.assert_close(packed[:, part], model(ids[:, part]))
    found = tables.indices(ids, None, documents)
    assert torch.equal(found[:, 3:7], tables.indices(ids[:, 3:7]))
    assert not torch.equal(found[:, 3:7], tables.indices(ids)[:, 3:7])


def test_ngrams_do_not_contain_padding() -> None:
    (model, _), ids = trained(PLAIN), torch.randint(VOCAB, (1, 8))
    mask = torch.tensor([[False, False, False, True, True, True, True, True]])
    padded = model(ids, mask=mask, positions=torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4]]))
    torch.testing.assert_close(padded[:, 3:], model(ids[:, 3:]))


@pytest.mark.slow
def test_a_compiler_makes_one_graph() -> None:
    _, tables = trained(NARROW)
    inputs = torch.randint(VOCAB, (2, 9)), None, torch.tensor([[0] * 4 + [1] * 5] * 2)
    compiled = torch.compile(tables, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs), tables(*inputs))


@pytest.mark.parametrize(
    ("orders", "message"), [((), "distinct"), ((2, 2), "distinct"), ((1,), "greater than or equal to 2")]
)
def test_invalid_orders_are_refused(orders: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HashedNGrams(orders=orders)
