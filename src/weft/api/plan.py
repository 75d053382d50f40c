"""What a model and its training will cost, from the settings alone, before anything runs. Needs no torch."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from weft.api.arguments import checked
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

DEFAULT_ROWS = 32  # that a device reads in a step
MAX_DEFAULT_TOKENS = 1 << 22  # of a step, unless there are more devices: about what GPT-3 read
TOKENS_PER_PARAMETER = 20  # about where compute is best spent (Hoffmann et al. 2022)


class PlanOptions(TypedDict, total=False):
    """What `plan` may be given beside a recipe, by the names of the command's options."""

    device: str
    gpus: int
    interconnect: str | None
    layout: str | None
    tokens: str | None
    mfu: float | None
    batch: int | None
    length: int | None
    precision: str | None


@dataclass(frozen=True)
class Plan:
    """A training run that could be: what `weft plan` prints, which is also its `str`."""

    recipe: Recipe
    cost: Count
    work: Workload
    machine: Machine
    training: TrainingPlan
    search: LayoutSearch | None  # None for a model that no layout over devices is searched for
    rows: int  # sequences a step
    basis: str  # where the number of tokens comes from

    def __str__(self) -> str:
        return text_tables(self.tables())

    def tables(self) -> list[Table]:
        """Parts, layouts over several devices, the memory of one, and the whole training run."""
        tables = [costs.components_table(self.recipe.name, self.cost)]
        if not self.cost.parameters:
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
        """Plain values, for programs: numbers of bytes, operations and seconds."""
        cost, machine = self.cost, self.machine
        if self.search is not None:
            memory = _predicted(self.search.best, "")["memory_bytes"]
        else:
            alone = training_memory(self.recipe.model, self.work, self.recipe.adapter)
            memory = {**asdict(alone), "total": alone.total()}
            memory["total_with_activation_checkpointing"] = alone.total(recompute=True)
        flops = {"forward": cost.forward, "training": cost.training()}
        flops["training_with_activation_checkpointing"] = cost.training(recompute=True)
        values = {
            "name": self.recipe.name,
            "parameters": cost.parameters,
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
                "best": _predicted(best, ""),
                "others": [_predicted(each, why_not(each, best)) for each in self.search.others()],
                "interconnect": {"name": net.name, "inside": net.inside, "across": net.across},
            }
        return values


def _predicted(each: LayoutPrediction, reason: str) -> dict[str, Any]:
    return {
        "layout": {**each.choice.layout.sizes, "sequence": each.choice.layout.sequence},
        "micro": each.choice.micro,
        "recompute": bool(each.choice.recompute),
        "memory_bytes": {**asdict(each.memory), "peak": each.memory.peak},
        "seconds": {**asdict(each.time), "step": each.time.total},
        "mfu": each.mfu,
        "fits": each.fits,
        "reason": reason,
    }


@checked
def plan(recipe: str | Path | Recipe, changes: Changes = (), **options: Unpack[PlanOptions]) -> Plan:
    """What a preset, a recipe or a run costs in parameters, operations, memory, time and energy, and its best layout.

        print(weft.plan("llama-7b", device="a100", gpus=64, tokens="300B"))

    `changes` as for `train`; the options are those of `weft plan`, and what they leave open is the recipe's.
    """
    wanted = resolve(recipe, changes)
    device, gpus, mfu = device_named(options.get("device", "h100")), options.get("gpus", 1), options.get("mfu")
    context: int = getattr(wanted.model, "context", 256)
    length = options.get("length") or wanted.batch.length or context
    rows = options.get("batch") or _rows(wanted, gpus, length)
    precision = options.get("precision") or wanted.precision or "bf16"
    net, layout = interconnect_named(options.get("interconnect"), device, gpus), options.get("layout")
    asked = None if layout is None else layout_from(layout)
    machine = Machine(device, gpus, MFU if mfu is None else mfu, precision)
    optimizer = (wanted.optimizer or AdamW()).kind
    cost = count(wanted.model, length, wanted.adapter)
    tokens, basis = _tokens(wanted, options.get("tokens"), cost.parameters, rows * length)
    micro, found = wanted.batch.micro if isinstance(wanted.batch.micro, int) else None, None
    if isinstance(wanted.model, TransformerConfig) and wanted.model.divisible and wanted.adapter is None:
        predicted = wanted.objective.rate if isinstance(wanted.objective, MaskedObjective) else 1.0
        job = TrainingJob(wanted.model, rows, length, device=device, net=net, gpus=gpus, precision=precision)
        job = replace(job, optimizer=optimizer, predicted=predicted)
        found = search(job, asked, micro=micro, recompute=True if wanted.batch.recompute else None)
        if mfu is None:
            machine = replace(machine, mfu=found.best.mfu, basis="worked out from a step; --mfu overrides it")
        else:
            machine = replace(machine, basis=f"--mfu; a step works out to {found.best.mfu:.1%}")
    elif asked is not None:
        raise ConfigError(f"--layout: {'an adapter' if wanted.adapter else 'this model'} can't be planned over a mesh")
    work = Workload(min(micro or rows, -(-rows // gpus)), length, precision, optimizer, gpus)
    update = orthogonal_flops(wanted.model, getattr(wanted.optimizer, "rounds", 0), wanted.adapter)
    training = plan_training(cost.training(), tokens, rows * length, machine=machine, update_flops=update)
    return Plan(wanted, cost, work, machine, training, found, rows, basis)


def _rows(recipe: Recipe, gpus: int, length: int) -> int:
    """The sequences of a step: the recipe's, or 32 a device, but no more than 4M tokens in all."""
    batch, sides = recipe.batch, 2 if recipe.objective.has_source else 1
    if batch.size is not None:
        return batch.size
    if batch.tokens is not None:
        return max(1, batch.tokens // (sides * length))
    return max(gpus, min(DEFAULT_ROWS * gpus, MAX_DEFAULT_TOKENS // length // gpus * gpus))


def _tokens(recipe: Recipe, asked: str | None, parameters: int, step: int) -> tuple[int, str]:
    """How many tokens to train on, `step` of them at a time, and why that many."""
    if asked is not None:
        return parse_count(asked, "--tokens"), "as asked"
    if recipe.steps is not None:
        return recipe.steps * step, "the recipe's steps"
    ratio = TOKENS_PER_PARAMETER
    return max(ratio * parameters, step), f"{ratio} per parameter, Hoffmann et al. 2022"
