"""Pairs of texts for patching that are made of a run's own data."""

import pytest
from tests.cli.test_explain import RUNS
from tests.spread import spread

import weft
from weft.api import example_pair
from weft.api.reading import own_text
from weft.errors import WeftError
from weft.explain.interventions.swap import TextPair


@pytest.mark.parametrize("name", spread(["gpt", "lstm", "pairs", "bahdanau"], 2))
def test_a_pair_differs_in_one_token_and_can_be_patched(name: str) -> None:
    run = weft.load(RUNS / name)
    pair = run.explain.example_pair()
    tokenizer = run.objective.tokenizers.source
    clean, corrupt = (tokenizer.encode(pair[side]) for side in ("clean", "corrupt"))
    assert len(clean) == len(corrupt)
    found = example_pair.text_pairs(run.model, run.objective, {**pair, "target": pair["target"] or None}, pairs=None)
    assert len(found) == 1 and isinstance(found[0], TextPair)
    ids, others = ((one.source or one.ids) for one in (found[0].clean, found[0].corrupt))
    assert sum(a != b for a, b in zip(ids, others, strict=True)) == 1
    assert found[0].answer != found[0].other
    assert run.explain.example_pair() == pair


@pytest.mark.parametrize("name", ["ngram", "classify", "masked-next"])
def test_counts_labels_and_an_untrained_model_have_none(name: str) -> None:
    with pytest.raises(WeftError):
        weft.load(RUNS / name).explain.example_pair()


def test_a_sample_text_ends_with_a_whole_word() -> None:
    run = weft.load(RUNS / "gpt")
    longest, _ = own_text(run.model, run.objective, 40)
    texts = {own_text(run.model, run.objective, tokens)[0] for tokens in range(8, 40)}
    assert len(texts) > 2
    for text in texts:
        assert longest.startswith(text) and not (text[-1].isalnum() and longest[len(text) :][:1].isalnum())
