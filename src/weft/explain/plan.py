"""What a training run takes on a named device: steps, hours, energy and compute, before a token is read."""

from dataclasses import dataclass

from weft.errors import ConfigError, suggestion

PETAFLOP_DAY = 8.64e19  # 10¹⁵ operations a second for a day
PUE = 1.1  # what a large data centre draws for each watt that reaches its machines
TOKENS_PER_PARAMETER = 20  # about where compute is best spent (Hoffmann et al. 2022)


@dataclass(frozen=True)
class Device:
    """What a data sheet says: dense operations a second, without sparsity."""

    title: str
    bf16: float
    tf32: float
    fp32: float
    memory: int  # bytes
    bandwidth: float  # bytes a second
    watts: float

    def peak(self, precision: str) -> float:
        """Operations a second in a precision; those in eight bits are counted as bf16, which is the least they are."""
        return {"tf32": self.tf32, "fp32": self.fp32}.get(precision, self.bf16)


def _device(
    title: str, bf16: float, tf32: float, fp32: float, gigabytes: float, terabytes_s: float, watts: float
) -> Device:
    return Device(title, bf16 * 1e12, tf32 * 1e12, fp32 * 1e12, round(gigabytes * 1e9), terabytes_s * 1e12, watts)


# TFLOP/s in bf16, tf32 and fp32, GB, TB/s, W
DEVICES = {
    "b200": _device("NVIDIA B200", 2250, 1125, 75, 180, 7.7, 1000),
    "h200": _device("NVIDIA H200 SXM", 989, 494, 67, 141, 4.8, 700),
    "h100": _device("NVIDIA H100 SXM", 989, 494, 67, 80, 3.35, 700),
    "a100": _device("NVIDIA A100 SXM 80 GB", 312, 156, 19.5, 80, 2.0, 400),
    "l40s": _device("NVIDIA L40S", 362, 183, 91.6, 48, 0.864, 350),
    "l4": _device("NVIDIA L4", 121, 60, 30.3, 24, 0.3, 72),
    "rtx4090": _device("NVIDIA RTX 4090", 165, 82.6, 82.6, 24, 1.008, 450),
    "rtx3090": _device("NVIDIA RTX 3090", 71, 35.6, 35.6, 24, 0.936, 350),
    "mi300x": _device("AMD MI300X", 1307, 653, 163, 192, 5.3, 750),
    "cpu": _device("a processor with 8 cores (assumed)", 0.8, 0.8, 0.8, 32, 0.05, 65),
}


def device_named(name: str) -> Device:
    """A device of the table."""
    if name.lower() not in DEVICES:
        raise ConfigError(f"--device '{name}': no such device; {suggestion(name.lower(), DEVICES)}")
    return DEVICES[name.lower()]


@dataclass(frozen=True)
class Journey:
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


def journey(
    flops_per_token: float, tokens: int, tokens_per_step: int, device: Device, gpus: int, mfu: float, precision: str
) -> Journey:
    """A run over `tokens` at `mfu`, the part of the peak that is reached (Chowdhery et al. 2022, appendix B).

    MFU counts the operations of the model alone, so recomputed layers are no part of `flops_per_token`.
    """
    if not 0.0 < mfu <= 1.0:
        raise ConfigError(f"--mfu {mfu:g}: expected a share of the peak above 0 and at most 1, such as 0.4")
    flops = flops_per_token * tokens
    seconds = flops / (device.peak(precision) * mfu * gpus)
    energy = gpus * device.watts * PUE * seconds / 3.6e6
    return Journey(tokens, -(-tokens // tokens_per_step), flops, seconds, energy)
