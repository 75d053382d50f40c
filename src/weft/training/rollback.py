"""How a run returns to an earlier checkpoint when training has gone wrong."""

from weft.errors import RunError
from weft.recipe.config import SettledRecipe
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.training.learner import Learner
from weft.training.state import TrainingState


def roll_back(
    run: RunFolder, recipe: SettledRecipe, learner: Learner, state: TrainingState, since: int
) -> TrainingState:
    """Put the last good checkpoint from before step `since` back, or fresh weights; the state to continue from.

    Later checkpoints are removed: the run will write them again. After too many attempts in a row it gives up.
    """
    guard = state.guard
    if guard.tries >= recipe.guard.rollbacks:
        tried = f"{guard.tries} rollback{'s' if guard.tries > 1 else ''} did not help"
        raise RunError(
            f"{run.path}: training went wrong at step {since}{f' and {tried}' if guard.tries else ''}; lower "
            f"optimizer.lr, lengthen schedule.warmup, look at the text, or allow more with guard.rollbacks"
        )
    # an attempt that failed from one checkpoint is followed by one from the checkpoint before it
    path = checkpoint.newest_before(run.checkpoints, min(since, guard.back_to) if guard.tries else since)
    if path is not None:
        earlier = TrainingState.from_notes(learner.load(path))
    else:
        earlier = TrainingState(micro=state.micro)
        learner.restart(recipe)
    checkpoint.forget_after(run.checkpoints, earlier.step)
    if not (run.checkpoints / "best").exists():
        earlier.best = earlier.best_step = None
    earlier.guard = guard.go_back(earlier.guard, recipe.guard)
    return earlier
