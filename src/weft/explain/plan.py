"""What a training run takes on a named machine: steps, hours, energy and compute, before a token is read."""

from dataclasses import dataclass

from weft.explain.devices import Machine

PETAFLOP_DAY = 8.64e19  # 10¹⁵ operations a second for a day
PUE = 1.1  # what a large data centre draws for each watt that reaches its machines
TOKENS_PER_PARAMETER = 20  # about where compute is best spent (Hoffmann et al. 2022)


@dataclass(frozen=True)
class TrainingPlan:
    """A whole training run."""

    tokens: int
    steps: int
    flops: float
    seconds: float
    kilowatt_hours: float

    @property
    def petaflop_days(self) -> float:
        """Compute in the unit of Brown et al. 2020."""
        return self.flops / PETAFLOP_DAY


def plan_training(flops_per_token: float, tokens: int, tokens_per_step: int, machine: Machine) -> TrainingPlan:
    """A run over `tokens`.

    MFU counts the operations of the model alone, so recomputed layers are no part of `flops_per_token`.
    """
    flops = flops_per_token * tokens
    seconds = flops / (machine.peak * machine.mfu)
    energy = machine.gpus * machine.device.watts * PUE * seconds / 3.6e6
    return TrainingPlan(tokens, -(-tokens // tokens_per_step), flops, seconds, energy)
