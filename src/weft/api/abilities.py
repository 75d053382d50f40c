"""Test the abilities of a run's model, causal, masked or encoder–decoder, at one checkpoint or at many."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch

from weft.decode.prompt import start_token
from weft.errors import ConfigError, RunError, counted
from weft.evaluate.abilities.result import Abilities, AbilityCurve, Appearance, OverTime, answer_value, curve
from weft.evaluate.abilities.tasks import AbilityQuestion, AbilitySpeller, Form, UnspelledError, chosen_tasks
from weft.evaluate.continuations import Continuation, continuation_scores, scoring_window
from weft.evaluate.minimal_pairs import CHANCE, Accuracy, MinimalPairs, check_finite
from weft.evaluate.pseudo_likelihood import MaskedText, pseudo_log_likelihoods
from weft.explain.reading import SourceTokens
from weft.models.base import LanguageModel, device_of, evaluating
from weft.models.hidden import context_of, frame_for
from weft.models.transformer import Transformer
from weft.objectives.frame import text_frame
from weft.objectives.tokens import TranslationObjective
from weft.progress import bar, pause
from weft.recipe.config import Recipe
from weft.runs.checkpoint import checkpoints, step_of
from weft.runs.folder import RunFolder
from weft.runs.lines import read_lines
from weft.training.objective import Objective
from weft.training.weights import fill_model

QUESTIONS = 100  # at each distance
BATCH = 32  # texts that a causal model reads at a time
Ids = Sequence[int]
Spelled = tuple[Ids, Ids, Sequence[Ids]]  # source, context or beginning of a target, and candidates


def abilities(
    objective: Objective[Any],
    model: LanguageModel,
    *,
    only: Sequence[str] = (),
    distances: Sequence[int] = (),
    questions: int = QUESTIONS,
    seed: int = 0,
) -> Abilities:
    """Test the abilities named in `only`, or all, at their own distances or at the given ones."""
    if questions < 1:
        raise ConfigError(f"questions = {questions}: expected 1 or more")
    tasks, paired = chosen_tasks(only), isinstance(objective, TranslationObjective)
    scores = _scoring(objective)
    speller = AbilitySpeller([objective.tokenizers.source, objective.tokenizer] if paired else [objective.tokenizer])
    curves, remarks = list[AbilityCurve](), list[str]()
    with bar("asking", len(tasks)) as advance:
        for task in tasks:
            try:
                form, values, left = speller.form(task), dict[int, list[float]](), dict[str, list[int]]()
                for distance in distances or task.distances:
                    if distance < min(task.distances) or (task.name == "agreement" and distance % 3):
                        least = f"at least {min(task.distances)}" + ", in steps of 3" * (task.name == "agreement")
                        raise ConfigError(f"distance {distance}: for '{task.name}' it is the {task.unit}, {least}")
                    if reason := speller.lacks(task, distance):
                        left.setdefault(reason, []).append(distance)
                        continue
                    for items in (1, questions):  # one question shows whether those of a large distance are too long
                        asked = speller.questions(task, distance, items=items, seed=seed)
                        spelled = [_spelled(objective, form, each) for each in asked]
                        if longest := _too_long(objective, model, spelled):
                            break
                    if longest:
                        if distances:
                            longer = f"takes {longest:,} tokens, more than the context of {objective.folder.path}"
                            raise ConfigError(f"distance {distance}: '{task.name}' {longer}; give a shorter one")
                        left.setdefault(NO_SPACE, []).append(distance)
                        continue
                    check_finite(found := scores(objective, model, spelled))
                    values[distance] = list(map(answer_value, found))
                    pause()
                curves.append(curve(task, values) if values else AbilityCurve(task, skipped=next(iter(left))))
                if values:
                    for why, each in left.items():
                        named = f"distance{'s' * (len(each) > 1)} {', '.join(map(str, each))}"
                        remarks.append(f"{task.name}: {named} left out, {why}.")
            except UnspelledError as reason:
                curves.append(AbilityCurve(task, skipped=str(reason)))
            advance(1)
    return Abilities(objective.folder.path.resolve().name, curves, remarks)


NO_SPACE = "longer than the model's context"


def _scoring(objective: Objective[Any]) -> Callable[[Objective[Any], Any, Sequence[Spelled]], list[list[float]]]:
    """Return the function that scores the candidates of questions."""
    if isinstance(objective, TranslationObjective):
        return _targets
    if objective.recipe.objective.continues:
        return _continuations
    if objective.recipe.objective.kind.startswith("masked"):
        return _masked
    raise objective.cannot("be asked for abilities")


def _spelled(objective: Objective[Any], form: Form, question: AbilityQuestion) -> Spelled:
    """Return the tokens of a question; candidates begin where their tokens first differ."""
    if isinstance(objective, TranslationObjective):
        frame, start, first = objective.direction
        source = (*frame.before, *objective.tokenizers.source.encode(form.write(question.source)), *frame.after)
        before, context = (start, *first), question.prefix
    else:
        source, context, recipe = (), question.context, objective.recipe
        before = text_frame(recipe, objective.tokenizer).begins if recipe.objective.continues else ()
    tokenizer = objective.tokenizer
    words = [tokenizer.encode(form.write((*context, *candidate))) for candidate in question.candidates]
    columns = zip(tokenizer.encode(form.write(context)), *words, strict=False)
    shared = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    if not before and not shared:
        before = (start_token(tokenizer),)
    return source, (*before, *words[0][:shared]), [each[shared:] for each in words]


def _too_long(objective: Objective[Any], model: LanguageModel, questions: Sequence[Spelled]) -> int:
    """Return the tokens of the longest question, if they don't fit into the model's context; else 0."""
    limit = scoring_window(model) if objective.recipe.objective.continues else context_of(model)
    around = 2 if objective.recipe.objective.kind.startswith("masked") else 0  # special tokens
    sides = [(len(source), len(context) + max(map(len, words)) + around) for source, context, words in questions]
    longest = max(map(max, sides))
    return longest if limit is not None and longest > limit else 0


def _continuations(objective: Objective[Any], model: LanguageModel, questions: Sequence[Spelled]) -> list[list[float]]:
    asked = [Continuation(context, ids) for _, context, candidates in questions for ids in candidates]
    scores = dict(continuation_scores(model, asked, window=scoring_window(model), rows=BATCH))
    return _grouped([scores[index].log_p for index in range(len(asked))], questions)


def _masked(objective: Objective[Any], model: Transformer, questions: Sequence[Spelled]) -> list[list[float]]:
    texts, frame = list[MaskedText](), frame_for(model)
    for _, context, candidates in questions:
        for ids in candidates:
            framed = frame(objective.tokenizer, (*context, *ids), None)
            start = framed.before + len(context)
            texts.append(MaskedText(tuple(framed.ids), range(start, start + len(ids))))
    sums = [0.0] * len(texts)
    for index, score in pseudo_log_likelihoods(model, objective.tokenizer, texts):
        sums[index] += score.log_p
    return _grouped(sums, questions)


@torch.inference_mode()
def _targets(objective: Objective[Any], model: LanguageModel, questions: Sequence[Spelled]) -> list[list[float]]:
    """Return log p of the candidates as continuations of a target; those of one token share a pass."""
    sums, passes = list[float](), dict[tuple[Ids, Ids], torch.Tensor]()
    with evaluating(model):
        device = device_of(model)
        for source, context, candidates in questions:
            for ids in candidates:
                read = (tuple(source), (*context, *ids[:-1]))
                if read not in passes:
                    inputs = SourceTokens(torch.tensor([source], device=device))
                    passes[read] = (
                        model(torch.tensor([read[1]], device=device), source=inputs)[0].float().log_softmax(-1)
                    )
                rows = passes[read][len(context) - 1 :]
                sums.append(float(sum(row[id] for row, id in zip(rows, ids, strict=True))))
            passes.clear()
    return _grouped(sums, questions)


def _grouped(scores: Sequence[float], questions: Sequence[Spelled]) -> list[list[float]]:
    remaining = iter(scores)
    return [[next(remaining) for _ in candidates] for _, _, candidates in questions]


# ---- over a run's checkpoints


def checkpoint_models(
    folder: RunFolder, recipe: Recipe, steps: str | Sequence[int], *, device: torch.device
) -> Iterator[tuple[int, LanguageModel]]:
    """Yield the step and the model of each checkpoint at `steps`: "all", or numbers."""
    if not steps or (isinstance(steps, str) and steps != "all"):
        raise ConfigError(f"checkpoints = {steps!r}: expected 'all', or a list of steps")
    paths = {step_of(path): path for path in checkpoints(folder.checkpoints)}
    chosen = list(paths) if isinstance(steps, str) else sorted(set(steps))
    if not paths:
        raise RunError(f"{folder.path}: has no checkpoints to measure")
    for step in chosen:
        if step not in paths:
            shown = ", ".join(map(str, list(paths)[:12])) + (" …" if len(paths) > 12 else "")
            have = f"it has {counted(len(paths), 'checkpoint')}: {shown}"
            raise ConfigError(f"checkpoint {step}: {folder.path} has no such checkpoint; {have}")
    with bar("checkpoints", len(chosen)) as advance:
        for step in chosen:
            yield int(step), fill_model(folder, recipe, paths[int(step)], device=device)
            advance(1)


def over_time(folder: RunFolder, results: Iterable[tuple[int, Abilities | MinimalPairs]]) -> OverTime:
    """Return the accuracies of all steps by ability, or by phenomenon of the pairs, beside the validation loss."""
    columns = dict[str, list[Accuracy]]()
    chances = dict[str, float]()
    steps = list[int]()
    for step, result in results:
        steps.append(step)
        for name, chance, accuracy in _accuracies(result):
            chances[name] = chance
            columns.setdefault(name, []).append(accuracy)
    losses = {line["step"]: line["validation_loss"] for line in read_lines(folder.metrics) if "validation_loss" in line}
    curves = [Appearance(name, chances[name], column) for name, column in columns.items()]
    return OverTime(folder.path.resolve().name, steps, [losses.get(step) for step in steps], curves)


def _accuracies(result: Abilities | MinimalPairs) -> list[tuple[str, float, Accuracy]]:
    if isinstance(result, Abilities):
        return [(each.task.name, each.task.chance, each.overall) for each in result.curves if each.overall is not None]
    if not isinstance(result, MinimalPairs):
        found = f"a value of type {type(result).__name__}"
        raise ConfigError(f"measure returned {found}, expected run.abilities(…) or run.minimal_pairs(…)")
    named = [group for group in result.groups if group.level in ("all", "phenomenon") and group.accuracies]
    return [(group.name, CHANCE / 100, next(iter(group.accuracies.values()))) for group in named]
