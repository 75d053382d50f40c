"""Recipes of earlier versions: what was renamed since is read under its new name."""

from collections.abc import Mapping

from weft.config import Tree

OBJECTIVE_KINDS = {"score": "regress", "twins": "contrastive"}


def upgrade(tree: Mapping[str, object]) -> tuple[Tree, list[str]]:
    """A recipe's tables with today's names, and a message for each name that has changed."""
    objective = tree.get("objective")
    kind = objective.get("kind") if isinstance(objective, Mapping) else objective
    if not isinstance(kind, str) or kind not in OBJECTIVE_KINDS:
        return dict(tree), []
    new = OBJECTIVE_KINDS[kind]
    renamed = {**objective, "kind": new} if isinstance(objective, Mapping) else new
    return {**tree, "objective": renamed}, [f"objective.kind = '{kind}' is called '{new}' now; write that instead"]
