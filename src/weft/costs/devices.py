"""What models are trained on: devices by their makers' data sheets and what of these they reach, and what joins them.

Devices stand in machines of `machine` devices, joined by `inside` bytes a second each way; a device reaches other
machines with `across`. Collectives run in rings (NCCL): of all that every device must receive, a machine's devices take
one part each from outside and pass it on inside, so a group with several members in each machine has as many times the
bandwidth of one. Bytes are those that a device sends:

    all-gather, reduce-scatter    (n − 1)/n of the whole
    all-reduce                    2 (n − 1)/n: a reduce-scatter and an all-gather
"""

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, suggestion


@dataclass(frozen=True)
class Device:
    """Dense operations a second, without sparsity; memory in bytes; bandwidth and link in bytes a second.

    `share` is what large matrix products reach of the peak; `lanes` how many fp32 units there are for every 16 that
    compute exponentials; `link` joins the devices of one machine, in each direction; `network` usually joins machines.
    """

    title: str
    bf16: float
    tf32: float
    fp32: float
    memory: int
    bandwidth: float
    watts: float
    share: float = 0.7
    link: float = 32e9
    network: str = "ethernet-100"
    lanes: int = 128

    def peak(self, precision: str) -> float:
        """Operations a second in a precision; those in eight bits are counted as bf16, which is the least they are."""
        return {"tf32": self.tf32, "fp32": self.fp32}.get(precision, self.bf16)

    @property
    def exponentials(self) -> float:
        """Exponentials that it can compute in a second: 16 for every `lanes` multiplications and additions."""
        return self.fp32 / 2 * 16 / self.lanes


MFU = 0.4  # the share of the peak that training is assumed to reach, where no step was worked out


def _device(teraflops: list[float], gigabytes: float, terabytes_s: float, **others: Any) -> Device:
    bf16, tf32, fp32 = (1e12 * number for number in teraflops)
    memory, bandwidth = round(gigabytes * 1e9), terabytes_s * 1e12
    return Device(bf16=bf16, tf32=tf32, fp32=fp32, memory=memory, bandwidth=bandwidth, **others)


_TABLE = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
DEVICES = {name: _device(**data_sheet) for name, data_sheet in _TABLE.items()}


def device_named(name: str) -> Device:
    if name.lower() not in DEVICES:
        raise ConfigError(f"--device '{name}': no such device; {suggestion(name.lower(), DEVICES)}")
    return DEVICES[name.lower()]


def device_called(name: str) -> Device | None:
    """The device that a driver calls `name` ("NVIDIA GeForce RTX 4090"), if the table has it."""
    plain = name.lower().replace("rtx ", "rtx")
    known = {key: device for key, device in DEVICES.items() if key != "cpu"}  # whose speed is assumed
    return next((device for key, device in known.items() if re.search(rf"{key}(?!\d)", plain)), None)


MACHINE = 8  # devices in a machine
REACHED = 0.8  # of a link's bandwidth, by collectives of many megabytes
START = 10e-6  # seconds before the first byte moves
HOP_INSIDE, HOP_ACROSS = 1e-6, 6e-6  # seconds from one device to the next

# Gb/s for each device; with Ethernet a machine's devices share one card
NETWORKS = {"ib-edr": 100.0, "ib-hdr": 200.0, "ib-ndr": 400.0, "ib-xdr": 800.0}
NETWORKS |= {f"roce-{speed}": float(speed) for speed in (100, 200, 400)}
NETWORKS |= {f"ethernet-{speed}": speed / MACHINE for speed in (10, 25, 100)}
ONE_MACHINE = {"nvlink": None, "pcie": 32e9}  # all devices in one domain; bytes a second each way


@dataclass(frozen=True)
class Interconnect:
    """Bytes a second from a device to others of its machine, and to other machines, which have `machine` devices."""

    name: str
    inside: float
    across: float
    machine: int = MACHINE


def interconnect_named(text: str | None, device: Device, gpus: int) -> Interconnect:
    """By a name of the table, or a number such as 400Gb/s, for each device; without one, what the device comes with."""
    name = (text or device.network).lower().strip()
    if name in ONE_MACHINE:
        speed = ONE_MACHINE[name] or device.link
        return Interconnect(name, speed, speed, max(gpus, 1))
    if name in NETWORKS:
        return Interconnect(name, device.link, NETWORKS[name] * 1e9 / 8)
    number = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(gb|gbit|gbps)(/s)?", name)
    if number is None or float(number[1]) <= 0:
        known = suggestion(name, [*NETWORKS, *ONE_MACHINE])
        raise ConfigError(f"--interconnect '{text}': expected a number per GPU, such as 400Gb/s, or a name; {known}")
    return Interconnect(f"{float(number[1]):g} Gb/s", device.link, float(number[1]) * 1e9 / 8)


@dataclass(frozen=True)
class Group:
    """Devices that take part in a collective: `size` of them, each `stride` devices from the next."""

    size: int
    stride: int
    net: Interconnect

    @property
    def members(self) -> int:
        """How many of them stand in one machine."""
        return max(1, min(self.size, self.net.machine // self.stride))

    @property
    def machines(self) -> int:
        return -(-self.size // self.members)

    @property
    def crosses(self) -> bool:
        return self.machines > 1

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a ring through all of them passes on."""
        link = min(self.net.inside, self.members * self.net.across) if self.crosses else self.net.inside
        return REACHED * link

    def gather(self, whole: float) -> float:
        """Seconds of an all-gather, or a reduce-scatter, of `whole` bytes."""
        hops = (self.size - self.machines) * HOP_INSIDE + (self.machines - 1) * HOP_ACROSS
        return self._seconds(hops, (self.size - 1) / self.size * whole / self.bandwidth)

    def reduce(self, whole: float) -> float:
        """Seconds of an all-reduce of `whole` bytes; from machine to machine it goes along a tree."""
        hops = 2 * ((self.members - 1) * HOP_INSIDE + math.ceil(math.log2(self.machines)) * HOP_ACROSS)
        return self._seconds(hops, 2 * (self.size - 1) / self.size * whole / self.bandwidth)

    def send(self, bytes_: float) -> float:
        link, hop = (self.net.across, HOP_ACROSS) if self.crosses else (self.net.inside, HOP_INSIDE)
        return self._seconds(hop, bytes_ / (REACHED * link))

    def _seconds(self, hops: float, transfer: float) -> float:
        return 0.0 if self.size == 1 else START + hops + transfer
