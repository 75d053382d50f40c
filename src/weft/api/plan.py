"""Costs of a model and its training, computed from the settings alone. Torch-free."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from weft.api.arguments import checked, takes_settings
from weft.config import Config, validate
from weft.costs import plan as costs
from weft.costs.count import Count, count, orthogonal_flops
from weft.costs.devices import MFU, device_named, interconnect_named
from weft.costs.layout_search import LayoutPrediction, LayoutSearch, layout_from, search, why_not
from weft.costs.layouts import TrainingJob
from weft.costs.memory import Workload, training_memory
from weft.costs.plan import Machine, TrainingPlan, plan_training
from weft.costs.units import parse_count
from weft.errors import ConfigError
from weft.figures.tables import Table, text_tables
from weft.models.config import TransformerConfig
from weft.recipe.config import Recipe
from weft.recipe.objective import MaskedObjective
from weft.recipe.optimizer import AdamW
from weft.recipe.resolve import Changes, resolve

DEFAULT_ROWS = 32  # sequences per device and step
MAX_DEFAULT_TOKENS = 1 << 22  # per step, unless there are more devices than that: about GPT-3's batch
TOKENS_PER_PARAMETER = 20  # about compute-optimal (Hoffmann et al. 2022)


class PlanSettings(Config):
    """Options of `weft plan` by their names; None leaves the choice to the recipe or the planner."""

    device: str = "h100"
    gpus: PositiveInt = 1
    interconnect: str | None = None
    layout: str | None = None
    tokens: str | None = None
    mfu: float | None = None
    batch: PositiveInt | None = None
    length: PositiveInt | None = None
    precision: str | None = None


@dataclass(frozen=True)
class Plan:
    """The costs of a training run. `str` gives the tables that `weft plan` prints."""

    recipe: Recipe
    cost: Count
    work: Workload
    machine: Machine
    training: TrainingPlan
    search: LayoutSearch | None  # None for a model that layouts are not searched for
    rows: int  # sequences per step
    basis: str  # the origin of the number of tokens, in words

    def __str__(self) -> str:
        return text_tables(self.tables())

    def tables(self) -> list[Table]:
        """Return tables of components, layouts over several devices, memory per device, and the whole training run."""
        tables = [costs.components_table(self.recipe.name, self.cost)]
        if not self.cost.forward:  # counts and tables of vectors: no products
            return tables
        if self.search is None:
            model, adapter = self.recipe.model, self.recipe.adapter
            tables.append(costs.memory_table(model, self.cost, self.work, machine=self.machine, adapter=adapter))
        else:
            tables += [costs.layouts_table(self.search)] if self.machine.gpus > 1 else []
            tables.append(costs.device_table(self.search.best, self.machine))
        batch = f"{self.rows:,} × {self.work.length:,}"
        return [*tables, costs.training_table(self.training, self.machine, basis=self.basis, batch=batch)]

    def record(self) -> dict[str, Any]:
        """Return plain values, in bytes, operations and seconds."""
        cost, machine = self.cost, self.machine
        if self.search is not None:
            memory = _prediction(self.search.best, "")["memory_bytes"]
        else:
            alone = training_memory(self.recipe.model, self.work, self.recipe.adapter)
            memory = {**asdict(alone), "total": alone.total()}
            memory["total_with_activation_checkpointing"] = alone.total(recompute=True)
        flops = {"forward": cost.forward, "training": cost.training()}
        flops["training_with_activation_checkpointing"] = cost.training(recompute=True)
        values = {
            "name": self.recipe.name,
            "parameters": cost.parameters,
            "active_parameters": cost.active,
            "trained_parameters": cost.trainable,
            "components": [
                {"name": part.name, "parameters": part.parameters, "flops_per_token": part.flops / cost.length}
                for part in cost.components
            ],
            "flops_per_token": flops,
            "memory_bytes": memory,
            "training": asdict(self.training),
            "device": {"title": machine.device.title, "count": machine.gpus, "mfu": machine.mfu},
            "precision": machine.precision,
        }
        if self.search is not None:
            best, net = self.search.best, self.search.job.net
            values["layouts"] = {
                "best": _prediction(best, ""),
                "others": [_prediction(other, why_not(other, best)) for other in self.search.others()],
                "interconnect": {"name": net.name, "inside": net.inside, "across": net.across},
            }
        return values


def _prediction(prediction: LayoutPrediction, reason: str) -> dict[str, Any]:
    choice, memory, time = prediction.choice, prediction.memory, prediction.time
    return {
        "layout": {**choice.layout.sizes, "sequence": choice.layout.sequence},
        "micro": choice.micro,
        "recompute": bool(choice.recompute),
        "memory_bytes": {**asdict(memory), "peak": memory.peak},
        "seconds": {**asdict(time), "step": time.total},
        "mfu": prediction.mfu,
        "fits": prediction.fits,
        "reason": reason,
    }


@checked
@takes_settings(PlanSettings)
def plan(recipe: str | Path | Recipe, changes: Changes = (), **settings: Any) -> Plan:
    """Compute the parameters, FLOPs, memory, time and energy of a preset, a recipe or a run, and its best layout.

        print(weft.plan("llama-7b", device="a100", gpus=64, tokens="300B"))

    `changes` are as for `train`; the settings are the options of `weft plan`.
    """
    options = validate(PlanSettings, {name: value for name, value in settings.items() if value is not None})
    resolved = resolve(recipe, changes)
    device, gpus, mfu = device_named(options.device), options.gpus, options.mfu
    context: int = getattr(resolved.model, "context", 256)
    length = options.length or resolved.batch.length or context
    rows = options.batch or _default_rows(resolved, gpus, length)
    precision = options.precision or resolved.precision or "bf16"
    net = interconnect_named(options.interconnect, device, gpus)
    layout = None if options.layout is None else layout_from(options.layout)
    machine = Machine(device, gpus, MFU if mfu is None else mfu, precision)
    optimizer = (resolved.optimizer or AdamW()).kind
    cost = count(resolved.model, length, resolved.adapter)
    tokens, basis = _training_tokens(resolved, options.tokens, parameters=cost.active, per_step=rows * length)
    micro, layouts = resolved.batch.micro if isinstance(resolved.batch.micro, int) else None, None
    if isinstance(resolved.model, TransformerConfig) and resolved.model.divisible and resolved.adapter is None:
        predicted = resolved.objective.rate if isinstance(resolved.objective, MaskedObjective) else 1.0
        job = TrainingJob(resolved.model, rows, length, device=device, net=net, gpus=gpus, precision=precision)
        job = replace(job, optimizer=optimizer, predicted=predicted)
        layouts = search(job, layout, micro=micro, recompute=True if resolved.batch.recompute else None)
        if mfu is None:
            machine = replace(machine, mfu=layouts.best.mfu, basis="predicted for a step; --mfu overrides it")
        else:
            machine = replace(machine, basis=f"--mfu; the prediction for a step is {layouts.best.mfu:.1%}")
    elif layout is not None:
        subject = "an adapter" if resolved.adapter else "this model"
        raise ConfigError(f"--layout: {subject} cannot be planned over several devices; leave it out")
    work = Workload(min(micro or rows, -(-rows // gpus)), length, precision, optimizer, gpus)
    update = orthogonal_flops(resolved.model, getattr(resolved.optimizer, "rounds", 0), resolved.adapter)
    training = plan_training(cost.training(), tokens, rows * length, machine=machine, update_flops=update)
    return Plan(resolved, cost, work, machine=machine, training=training, search=layouts, rows=rows, basis=basis)


def _default_rows(recipe: Recipe, gpus: int, length: int) -> int:
    """Return the sequences per step: the recipe's, or 32 per device, up to 4M tokens in all."""
    batch, sides = recipe.batch, 2 if recipe.objective.has_source else 1
    if batch.size is not None:
        return batch.size
    if batch.tokens is not None:
        return max(1, batch.tokens // (sides * length))
    return max(gpus, min(DEFAULT_ROWS * gpus, MAX_DEFAULT_TOKENS // length // gpus * gpus))


def _training_tokens(recipe: Recipe, tokens: str | None, *, parameters: int, per_step: int) -> tuple[int, str]:
    """Return the number of tokens to train on, and its origin in words."""
    if tokens is not None:
        return parse_count(tokens, "--tokens"), "as requested"
    if recipe.steps is not None:
        return recipe.steps * per_step, "the recipe's steps"
    ratio = TOKENS_PER_PARAMETER
    return max(ratio * parameters, per_step), f"{ratio} per parameter, Hoffmann et al. 2022"
