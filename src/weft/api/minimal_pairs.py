"""Judge minimal pairs with a run's model: language models, masked ones, and encoder–decoders."""

from collections.abc import Sequence
from typing import Any

from weft.api.reading import read_text
from weft.decode.prompt import start_token
from weft.errors import DataError, located
from weft.evaluate.continuations import Continuation, continuation_scores, scoring_window
from weft.evaluate.minimal_pairs import MinimalPair, MinimalPairs, PairScore, check_finite, pair_remarks
from weft.evaluate.perplexity import surprisals
from weft.evaluate.pseudo_likelihood import MaskedText, pseudo_log_likelihoods
from weft.explain.surprise import surprise
from weft.models.base import LanguageModel
from weft.models.transformer import Transformer
from weft.objectives.tokens import TranslationObjective
from weft.progress import bar
from weft.text.tokenizer import Tokenizer
from weft.training.objective import Objective

BATCH = 32  # texts that a causal model reads at a time


def minimal_pairs(objective: Objective[Any], model: LanguageModel, pairs: Sequence[MinimalPair]) -> MinimalPairs:
    """Score both sentences of every pair, by each method that the model has.

    A causal model compares log p of the whole sentences, and of the words that decide after their prefixes; a masked
    one pseudo-log-likelihoods; an encoder–decoder log p of two targets, given the source.
    """
    if not pairs:
        raise DataError("there are no pairs of sentences to compare")
    remarks = _remarks(objective.tokenizer, pairs)
    if isinstance(objective, TranslationObjective):
        scores = {"target": _targets(objective, model, pairs)}
    elif objective.recipe.objective.continues:
        scores = _continuations(model, objective.tokenizer, pairs)
    elif objective.recipe.objective.kind.startswith("masked"):
        scores = _masked(objective, model, pairs)
    else:
        raise objective.cannot("compare two sentences")
    check_finite(score for column in scores.values() for score in column if score is not None)
    name = objective.folder.path.resolve().name
    return MinimalPairs(name, pairs, scores, remarks)


def _continuations(model: LanguageModel, tokenizer: Tokenizer, pairs: Sequence[MinimalPair]) -> dict[str, Any]:
    """Score as lm-evaluation-harness does: a sentence follows the token that begins a text, and a space."""
    first = start_token(tokenizer) if tokenizer.bos_id is None else tokenizer.bos_id

    def sentence(text: str) -> Continuation:
        ids = tokenizer.chat_ids(f" {text}")
        return Continuation(ids[:1], ids[1:]) if ids[:1] == [first] else Continuation([first], ids)

    def critical(prefix: str, word: str) -> Continuation:
        if not prefix:
            return sentence(word)
        context = [*tokenizer.leading, *tokenizer.chat_ids(prefix)]
        whole = [*tokenizer.leading, *tokenizer.chat_ids(f"{prefix} {word}")]
        return Continuation(context or [first], whole[len(context) :])

    requests: dict[tuple[str, int], Continuation] = {}
    for index, pair in enumerate(pairs):
        requests |= {("sentence", 2 * index + side): sentence(text) for side, text in enumerate(pair[:2])}
        requests |= {("prefix", 2 * index + side): critical(*word) for side, word in enumerate(pair.critical or ())}
    found: dict[tuple[str, int], float] = {}
    window, keys = scoring_window(model), [key for key, each in requests.items() if each.ids]
    fitting = [key for key in keys if len(requests[key].ids) <= window]
    with bar("judging pairs", len(keys)) as advance:
        for index, score in continuation_scores(model, [requests[key] for key in fitting], window=window, rows=BATCH):
            found[fitting[index]] = score.log_p
            advance(1)
        for key in set(keys) - set(fitting):  # longer than the window, so it is read in windows that overlap by half
            nats = surprisals(model, requests[key].ids, requests[key].context, length=window)
            found[key] = -sum(value for value in nats if value is not None)
            advance(1)
    scores: dict[str, list[PairScore | None]] = {}
    for method in ("sentence", "prefix"):
        both = ((found.get((method, 2 * index)), found.get((method, 2 * index + 1))) for index in range(len(pairs)))
        scores[method] = [None if good is None or bad is None else PairScore(good, bad) for good, bad in both]
    return scores


def _masked(objective: Objective[Any], model: LanguageModel, pairs: Sequence[MinimalPair]) -> dict[str, Any]:
    assert isinstance(model, Transformer)
    texts = []
    for number, pair in enumerate(pairs, 1):
        for side, sentence in (("good", pair.good), ("bad", pair.bad)):
            with located(f"{pair.where or f'pair {number}'}, the {side} sentence: "):
                reading = read_text(objective.recipe, model, objective, text=sentence)
            length = len(objective.tokenizer.encode(sentence))
            texts.append(MaskedText(reading.ids, range(reading.before, reading.before + length)))
    scores: dict[str, Any] = {}
    for name, within_words in (("words left to right", False), ("single tokens", True)):
        sums = [0.0] * len(texts)
        with bar(f"judging pairs, {name}", sum(len(text.scored) for text in texts)) as advance:
            for index, token in pseudo_log_likelihoods(model, objective.tokenizer, texts, within_words=within_words):
                sums[index] += token.log_p
                advance(1)
        scores[name] = [PairScore(*sums[index : index + 2]) for index in range(0, len(sums), 2)]
    return scores


def _targets(
    objective: TranslationObjective[Any], model: LanguageModel, pairs: Sequence[MinimalPair]
) -> list[PairScore]:
    scores = []
    with bar("judging pairs", len(pairs)) as advance:
        for number, pair in enumerate(pairs, 1):
            with located(f"{pair.where or f'pair {number}'}: "):
                if pair.source is None or not pair.source.strip():
                    raise DataError("no source, which an encoder–decoder reads; fill a column 'source'")
                both = (read_text(objective.recipe, model, objective, text=pair.source, target=x) for x in pair[:2])
                scores.append(PairScore(*(-sum(surprise(reading, 1).scored) for reading in both)))
            advance(1)
    return scores


def _remarks(tokenizer: Tokenizer, pairs: Sequence[MinimalPair]) -> list[str]:
    lengths, unknown = [], []
    for number, pair in enumerate(pairs, 1):
        good, bad = tokenizer.encode(pair.good), tokenizer.encode(pair.bad)
        if not (good and bad):
            silent = pair.bad if good else pair.good
            raise DataError(f"{pair.where or f'pair {number}'}: {silent!r:.60} has no token of this model")
        lengths.append((len(good), len(bad)))
        has_unknown = tokenizer.unk_id is not None and tokenizer.unk_id in (*good, *bad)
        words = f"{pair.good} {pair.bad}".split() if has_unknown else ()
        unknown.append([word for word in words if tokenizer.unk_id in tokenizer.encode(word)])
    return pair_remarks(pairs, lengths, unknown)
