"""The recipe `induction`: its induction heads are seen by score, by patching and by ablation, for every seed."""

from pathlib import Path
from typing import Any

import pytest

import weft
from weft.explain.heads import MIN_INDUCTION, induction_scores


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_induction_heads_by_score_patching_and_ablation(seed: int, tmp_path: Path) -> None:
    run = weft.train("induction", run=tmp_path / "run", changes={"seed": seed}, log=lambda message: None)
    scores = induction_scores(run.model, run.tokenizer.vocab_size)
    assert scores[1].max() >= MIN_INDUCTION > scores[0].max()  # they are in the second layer
    found: Any = run.explain.patch(pairs="builtin:induction")
    by_kind = {each.kind: each.recovered for each in found.maps}
    assert (
        by_kind["attention"][0, 9] > 0.8 < by_kind["attention"][1, -1]
    )  # after the answer is read, and where it is due
    assert any(path.name.startswith("head 0") and "→ head 1" in path.name and path.low > 0 for path in found.paths)
    accuracies = found.circuit.accuracies
    assert accuracies["whole model"].likeliest > 0.95
    assert found.circuit.explained >= 0.9 and len(found.circuit.kept) < found.circuit.nodes
    assert accuracies["without the circuit"].likeliest < 0.2
