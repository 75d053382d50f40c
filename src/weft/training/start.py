"""How training starts: a new run, one that goes on, or a process that takes part in another one's."""

import platform
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import torch

from weft import __version__
from weft.errors import RunError
from weft.models.config import NGram
from weft.parallel.ranks import ALONE, Ranks
from weft.recipe.config import Recipe
from weft.recipe.settle import Choice, check_trainable, unsettled
from weft.runs import checkpoint
from weft.runs.folder import FollowedRun, RunFolder, RunResult, claimed, found, held, open_run
from weft.runs.journal import Say, check_log, say_on_stderr
from weft.training.counting import count_corpus
from weft.training.evaluation import Evaluator, Writer
from weft.training.loader import Corpus, Feed, share
from weft.training.loop import Loop
from weft.training.precision import pick_device
from weft.training.recovery import Progress
from weft.training.throughput import device_name
from weft.training.weights import check_base


class TokenizerFile(Protocol):
    """What is asked of a tokenizer here."""

    @property
    def vocab_size(self) -> int: ...

    def save(self, path: Path) -> object: ...


def train(
    recipe: Recipe,
    run_dir: Path | str | RunFolder,
    *,
    corpus: Corpus | Sequence[Corpus] | Feed,
    tokenizer: TokenizerFile,
    evaluators: Sequence[Evaluator] = (),
    writer: Writer | None = None,
    choices: Sequence[Choice] = (),
    command: str | None = None,
    device: torch.device | None = None,
    quiet: bool = False,
    say: Say = say_on_stderr,
    ranks: Ranks = ALONE,
) -> RunResult:
    """Train the recipe's model in a new run folder (or one that is `claimed`), on running text or on any feed.

    The recipe is settled (`weft.recipe.settle.settle`); `choices` and `command` are noted for the report, as is what
    `writer` gives after each evaluation. Of several processes the first one calls this, and the others `follow`.
    Ctrl-C finishes the step, saves, says how to go on and raises KeyboardInterrupt.
    """
    missing = unsettled(recipe)
    assert not missing, f"settle the recipe first: {missing}"
    check_trainable(recipe, tokenizer.vocab_size)
    check_log(recipe.log)
    batches = None if isinstance(recipe.model, NGram) else share(recipe, corpus, ranks)
    with nullcontext(run_dir) if isinstance(run_dir, RunFolder) else claimed(run_dir) as run:
        tokenizer.save(run.path)
        place = device or pick_device()
        run.event(
            "start",
            command=command,
            choices=[[c.key, str(c.value), c.why] for c in choices],
            corpus=_fingerprints(corpus),
            weft=__version__,
            torch=torch.__version__,
            python=platform.python_version(),
            device=device_name(place),
            processes=ranks.ranks,
        )
        torch.manual_seed(recipe.seed)
        if batches is None:
            found(run, recipe)
            assert not isinstance(corpus, Feed), "n-grams are counted, not fed"
            return count_corpus(recipe, run, corpus, evaluators, quiet)
        loop = Loop(recipe, run, batches, evaluators, writer, place, quiet, say, ranks)
        ranks.share(lambda: "")  # no checkpoint: those who follow begin with fresh weights as well
        # config.toml is written once the pre-flight has passed: a start that fails leaves no run behind
        return loop.go(Progress(), begin=found)


def resume(
    run_dir: Path | str | RunFolder,
    *,
    corpus: Corpus | Sequence[Corpus] | Feed,
    evaluators: Sequence[Evaluator] = (),
    writer: Writer | None = None,
    device: torch.device | None = None,
    quiet: bool = False,
    say: Say = say_on_stderr,
    ranks: Ranks = ALONE,
) -> RunResult:
    """Go on from a run's newest whole checkpoint, as if it had never stopped. A finished run is returned as it is."""
    run = run_dir if isinstance(run_dir, RunFolder) else open_run(run_dir)
    with nullcontext() if isinstance(run_dir, RunFolder) else held(run):
        recipe = run.recipe()
        missing = unsettled(recipe)
        if missing:
            raise RunError(f"{run.config}: {missing[0]} is missing; a run that has started leaves nothing open")
        if run.checkpoints.exists() and not run.checkpoints.is_dir():
            raise RunError(f"{run.checkpoints}: expected a folder of checkpoints")
        if recipe.adapter is not None:
            check_base(run, recipe)
        check_log(recipe.log)
        place = device or pick_device()
        torch.manual_seed(recipe.seed)
        if isinstance(recipe.model, NGram):
            assert not isinstance(corpus, Feed), "n-grams are counted, not fed"
            return count_corpus(recipe, run, corpus, evaluators, quiet)
        loop = Loop(recipe, run, share(recipe, corpus, ranks), evaluators, writer, place, quiet, say, ranks)
        progress, origin = Progress(), ""
        if checkpoint.checkpoints(run.checkpoints):
            path, damage = checkpoint.newest_good(run.checkpoints)
            for line in damage:
                run.event("damage", line=line)
                say(f"{line}; going on from {path.name}")
            progress = Progress.from_notes(checkpoint.load(path, loop.model, loop.optimizer).notes)
            checkpoint.forget_after(run.checkpoints, progress.step)
            origin = str(path)
        run.event("resume", step=progress.step, device=device_name(place), processes=ranks.ranks)
        ranks.share(lambda: origin)
        return loop.go(progress)


def follow(
    recipe: Recipe,
    run: FollowedRun,
    *,
    corpus: Corpus | Sequence[Corpus] | Feed,
    evaluators: Sequence[Evaluator] = (),
    ranks: Ranks,
    device: torch.device | None = None,
) -> None:
    """Take part in a run that the first process trains or resumes: the same steps, on other rows of each batch.

    Every process holds all weights and makes every update; only the first one evaluates and writes. An n-gram model
    is counted by the first one alone.
    """
    if isinstance(recipe.model, NGram):
        return
    place = device or pick_device()
    torch.manual_seed(recipe.seed)
    loop = Loop(recipe, run, share(recipe, corpus, ranks), evaluators, None, place, True, lambda line: None, ranks)
    progress = Progress()
    origin = ranks.share(lambda: "")
    if origin:
        progress = Progress.from_notes(checkpoint.load(Path(origin), loop.model, loop.optimizer).notes)
    loop.go(progress)


def _fingerprints(corpus: Corpus | Sequence[Corpus] | Feed) -> list[str]:
    """Hashes of the prepared data; what was made in memory has none."""
    if isinstance(corpus, Feed):
        return list(corpus.fingerprints)
    corpora = corpus if isinstance(corpus, Sequence) else [corpus]
    return [c.fingerprint for c in corpora if hasattr(c, "fingerprint")]
