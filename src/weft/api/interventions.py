"""Patching and probing of a run's model: texts and labels from the user, and the run's checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from weft.api.reading import read_text
from weft.data.rows import MissingColumnError
from weft.data.shards import Side
from weft.data.table import RowSource, read_rows
from weft.errors import ConfigError, DataError, located, suggestion
from weft.explain import views
from weft.explain.interventions.recording import require_activations
from weft.explain.interventions.swap import TextPair
from weft.explain.reading import Reading, pieces
from weft.explain.surprise import predicts_masked
from weft.explain.texts import TEXTS
from weft.models.base import LanguageModel
from weft.models.hidden import MARKED, Occurrence, find_words, frame_for
from weft.objectives.tokens import TranslationObjective
from weft.runs import checkpoint
from weft.runs.report import read_record
from weft.text.tokenizer import Tokenizer
from weft.training.objective import Objective

if TYPE_CHECKING:  # these modules draw, and are imported on first use
    from weft.explain.interventions.picture import InterventionsOverTime
    from weft.explain.interventions.probe import LabelledSpan, Probes

# columns of a table of pairs, and the option for each; an encoder–decoder's may have `target` as well
OPTIONS = {"clean": "--text", "corrupt": "--other", "answer": "--answer", "wrong": "--answer"}
COLUMNS = tuple(OPTIONS)
BUILTIN_LABELS = ("builtin:number", "builtin:depth", "builtin:tag", "builtin:senses")
MAX_LABELLED = 1000  # texts of a table of labels that are read
NEEDED = "patch: give two texts and their answers (--text, --other, --answer A B), or a table of them (--pairs)"

Checkpoints = Iterator[tuple[str, LanguageModel]]


def text_pairs(
    model: LanguageModel, objective: Objective[Any], given: Mapping[str, str | None], *, pairs: str | None
) -> list[TextPair]:
    """Return the pair of texts that the user gave, or those of a table; `given` has its columns."""
    require_activations(model)
    if pairs is None:
        if missing := [name for name in COLUMNS if given[name] is None]:
            raise ConfigError(f"{NEEDED}; {OPTIONS[missing[0]]} is missing" if len(missing) < 4 else NEEDED)
        return [_pair(model, objective, {name: value or "" for name, value in given.items()}, where="")]
    if any(value is not None for value in given.values()):
        raise ConfigError("pairs: the table has all texts and answers; leave out the others")
    kinds: dict[str, Any] = {"clean": "text", "corrupt": "text", "answer": "optional", "wrong": "optional"}
    kinds |= {"target": "optional"} if isinstance(objective, TranslationObjective) else {}
    rows = read_rows(RowSource([pairs], kinds), "validation" if pairs.startswith("builtin:") else "train")
    return [_pair(model, objective, {"target": "", **row.values}, where=f"{row.where}: ") for row in rows]


def _pair(model: LanguageModel, objective: Objective[Any], texts: Mapping[str, str], *, where: str) -> TextPair:
    for name in COLUMNS:
        if not texts[name]:
            empty = f"{where}{name}" if where else OPTIONS[name]
            raise DataError(f"{empty} is empty; both texts and both answers need at least one token")
    read = _read_masked if predicts_masked(model) else _read_prefix
    (clean, answer), (corrupt, wrong) = (
        read(model, objective, texts[side], answer=texts[name], target=texts["target"], where=where)
        for side, name in (("clean", "answer"), ("corrupt", "wrong"))
    )
    position = len(clean.ids) - 1
    if predicts_masked(model):
        mask = objective.tokenizer.need("mask")
        position = clean.ids.index(mask)
        if len(clean.ids) == len(corrupt.ids) and corrupt.ids.index(mask) != position:
            raise DataError(f"{where}the mask is at different positions of the two texts")
    return TextPair(clean, corrupt, position, answer, wrong).check(where)


def _read_prefix(
    model: LanguageModel, objective: Objective[Any], text: str, *, answer: str, target: str, where: str
) -> tuple[Reading, int]:
    """Return a text as the model reads it, and the token that spells its answer; of a translation, after `target`."""
    seq2seq = isinstance(objective, TranslationObjective)
    if target and not seq2seq:
        raise ConfigError(f"{where}target: this model reads one text, and the answer follows it; leave it out")
    with located(where):
        reading = read_text(objective.recipe, model, objective, text=text, target=target if seq2seq else None)
    if seq2seq and target:
        reading = replace(reading, ids=reading.ids[:-1])  # the translation has not ended yet
    before, tokenizer = target if seq2seq else text, reading.tokenizer
    known = tokenizer.encode(before) if before else []
    spaced = [f" {answer}"] if before[-1:].isalnum() and answer[0].isalnum() else []
    for option in (*spaced, answer):
        ids = tokenizer.encode(before + option)
        if ids and ids[:-1] == known and ids[-1] != tokenizer.unk_id:
            return reading, ids[-1]
    raise _unspelled(tokenizer, answer, where)


def _read_masked(
    model: LanguageModel, objective: Objective[Any], text: str, *, answer: str, target: str, where: str
) -> tuple[Reading, int]:
    """Return a text with one mask as the model reads it, and the token that spells the answer there."""
    tokenizer = objective.tokenizer
    mask = tokenizer.token(tokenizer.need("mask"))
    if text.count(mask) != 1:
        raise DataError(f"{where}{text!r:.60}: write {mask} once, where the answer is predicted")
    left, right = text.split(mask)
    for option in (answer, f" {answer}"):
        ids = tokenizer.encode(option)
        if len(ids) == 1 and ids[0] != tokenizer.unk_id:
            left = left if option == answer else left.rstrip()
            whole = [*tokenizer.encode(left), tokenizer.need("mask"), *tokenizer.encode(right)]
            framed = frame_for(model)(tokenizer, whole, None)
            with located(where):
                return Reading(model, tokenizer, tuple(framed.ids), framed.before), ids[0]
    raise _unspelled(tokenizer, answer, where)


def _unspelled(tokenizer: Tokenizer, answer: str, where: str) -> DataError:
    spelled = " ".join(pieces(tokenizer, tokenizer.encode(answer))) or "nothing"
    return DataError(f"{where}answer {answer!r}: no single token spells it here; this tokenizer reads {spelled}")


def patch_over_time(
    pairs: Sequence[TextPair], checkpoints: Checkpoints, objective: Objective[Any]
) -> "InterventionsOverTime":
    """Return the strongest nodes and the circuit of the trained model, measured at each checkpoint."""
    found, measured = views.patch.patch(pairs), {}
    for name, model in checkpoints:
        sides = [(replace(p.clean, model=model), replace(p.corrupt, model=model)) for p in pairs]
        own = [p._replace(clean=a, corrupt=b) for p, (a, b) in zip(pairs, sides, strict=True)]
        measured[name] = views.patch.checkpoint_measures(own, found)
    measured["best"] = views.patch.checkpoint_measures(pairs, found)
    return over_time("Patching over time", TEXTS["patch-history"], measured, objective=objective)


def over_time(
    title: str, about: str, measured: Mapping[str, Mapping[str, float]], *, objective: Objective[Any]
) -> "InterventionsOverTime":
    """Return measures by the name of their checkpoint, "at first", "step 100" or "best", beside the held-out loss."""
    metrics, named = read_record(objective.folder).metrics, {"at first": 0}
    named["best"] = checkpoint.step_of(objective.folder.checkpoints / "best")
    steps = {name: named[name] if name in named else int(name.split()[-1]) for name in measured}
    order = sorted(measured, key=lambda name: steps[name])
    names = next(iter(measured.values()))
    loss = {line["step"]: line["validation_loss"] for line in metrics if "validation_loss" in line}
    columns = {name: [measured[each][name] for each in order] for name in names}
    return views.patch.InterventionsOverTime(title, about, [steps[name] for name in order], columns, loss)


def labelled_texts(name: str) -> tuple[list[str], list["LabelledSpan"]]:
    """Read texts with labels: `words` and `tags`, or `text` and `label` of the word in brackets, or of the whole text.

    Built-in labels are builtin:number, depth, tag and sense.
    """
    name = {"builtin:sense": "builtin:senses"}.get(name, name)
    if name.startswith("builtin:") and name not in BUILTIN_LABELS:
        raise DataError(f"{name}: no such labels; {suggestion(name, [*BUILTIN_LABELS, 'builtin:sense'])}")
    side: Side = "validation" if name == "builtin:senses" else "train"
    column = "sense" if name == "builtin:senses" else "label"
    texts, spans = list[str](), list["LabelledSpan"]()
    try:
        for row in islice(read_rows(RowSource([name], {"words": "words", "tags": "words"}), side), MAX_LABELLED):
            words, tags = row.values["words"], row.values["tags"]
            if len(words) != len(tags):
                raise DataError(f"{row.where}: {len(words)} words and {len(tags)} tags; each word needs one tag")
            start = 0
            for word, tag in zip(words, tags, strict=True):
                spans.append(views.probe.LabelledSpan(len(texts), start, start + len(word), tag))
                start += len(word) + 1
            texts.append(" ".join(words))
    except MissingColumnError:
        for row in islice(read_rows(RowSource([name], {"text": "text", column: "label"}), side), MAX_LABELLED):
            text, label = row.values["text"], str(row.values[column])
            marked = list[Occurrence]()
            with suppress(DataError):
                (text,), marked = find_words([text], MARKED)
            if len(marked) > 1:
                raise DataError(f"{row.where}: {len(marked)} words are in brackets; its label is that of one") from None
            # without a word in brackets, the label is that of the whole text
            start, end = (marked[0].start, marked[0].end) if marked else (0, len(text))
            spans.append(views.probe.LabelledSpan(len(texts), start, end, label))
            texts.append(text)
    return texts, spans


def probe_labels(
    model: LanguageModel, objective: Objective[Any], labels: str, *, checkpoints: Checkpoints | None
) -> "Probes | InterventionsOverTime":
    """Probe every layer of the model for labels, or those of each checkpoint."""
    views.probe.layer_taps(model)
    texts, spans = labelled_texts(labels)
    target = "" if isinstance(objective, TranslationObjective) else None
    readings = []
    for number, text in enumerate(texts, 1):
        with located(f"{labels}: text {number}: "):
            readings.append(read_text(objective.recipe, model, objective, text=text, target=target))
    found = views.probe.probe(readings, texts, spans)
    if checkpoints is None:
        return found
    probed = {
        name: views.probe.probe([replace(reading, model=each) for reading in readings], texts, spans)
        for name, each in checkpoints
    } | {"best": found}
    measured = {
        name: {layer.layer: layer.label for layer in each.layers} | {"control task": each.layers[-1].control}
        for name, each in probed.items()
    }
    return over_time("Probes over time", TEXTS["probe-history"], measured, objective=objective)
