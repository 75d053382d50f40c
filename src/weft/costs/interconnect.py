"""What joins devices, and how long a collective operation takes over it.

Devices stand in machines of `machine` devices, joined by `inside` bytes a second each way; a device reaches other
machines with `across`. Collectives run in rings (NCCL): of all that every device must receive, a machine's devices take
one part each from outside and pass it on inside, so a group with several members in each machine has as many times the
bandwidth of one. Bytes are those that a device sends:

    all-gather, reduce-scatter    (n − 1)/n of the whole
    all-reduce                    2 (n − 1)/n: a reduce-scatter and an all-gather
"""

import math
import re
from dataclasses import dataclass

from weft.costs.devices import Device
from weft.errors import ConfigError, suggestion

MACHINE = 8  # devices in a machine
REACHED = 0.8  # of a link's bandwidth, by collectives of many megabytes
START = 10e-6  # seconds before the first byte moves
HOP_INSIDE, HOP_ACROSS = 1e-6, 6e-6  # seconds from one device to the next

# Gb/s for each device; with Ethernet a machine's devices share one card
NETWORKS = {
    "ib-edr": 100.0,
    "ib-hdr": 200.0,
    "ib-ndr": 400.0,
    "ib-xdr": 800.0,
    "roce-100": 100.0,
    "roce-200": 200.0,
    "roce-400": 400.0,
    "ethernet-10": 10.0 / MACHINE,
    "ethernet-25": 25.0 / MACHINE,
    "ethernet-100": 100.0 / MACHINE,
}
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
        raise ConfigError(
            f"--interconnect '{text}': expected a number for each GPU, such as 400Gb/s, or a name; "
            f"{suggestion(name, [*NETWORKS, *ONE_MACHINE])}"
        )
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
        """Over how many machines they are spread."""
        return -(-self.size // self.members)

    @property
    def crosses(self) -> bool:
        """Whether they stand in several machines."""
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
        """Seconds of a message from one member to the next."""
        link, hop = (self.net.across, HOP_ACROSS) if self.crosses else (self.net.inside, HOP_INSIDE)
        return self._seconds(hop, bytes_ / (REACHED * link))

    def _seconds(self, hops: float, transfer: float) -> float:
        return 0.0 if self.size == 1 else START + hops + transfer
