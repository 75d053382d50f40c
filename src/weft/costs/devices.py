"""Devices by their data sheets and the share of these that they reach, and the networks that connect them.

A machine has `machine` devices, connected by `inside` bytes/s each way; a device reaches other machines with `across`.
Collectives run in rings (NCCL): the devices of a machine each receive a different part from outside and pass it on
inside, so a group with several members per machine has that many times the bandwidth of one. A device sends:

    all-gather, reduce-scatter    (n − 1)/n of the full tensor
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
    """Device: dense FLOP/s without sparsity, memory in bytes, bandwidth and link in bytes/s."""

    title: str
    bf16: float
    tf32: float
    fp32: float
    memory: int
    bandwidth: float
    watts: float
    share: float = 0.7  # fraction of the peak that large matrix products reach
    link: float = 32e9  # between the devices of a machine, per direction
    network: str = "ethernet-100"  # between machines
    lanes: int = 128  # fp32 units per 16 units for exponentials

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s in a precision; FP8 counts as bf16, its lower bound."""
        return {"tf32": self.tf32, "fp32": self.fp32}.get(precision, self.bf16)


MFU = 0.4  # assumed fraction of the peak that training reaches, if no step is predicted


def _device(teraflops: list[float], gigabytes: float, terabytes_s: float, **others: Any) -> Device:
    bf16, tf32, fp32 = (1e12 * peak for peak in teraflops)
    memory, bandwidth = round(gigabytes * 1e9), terabytes_s * 1e12
    return Device(bf16=bf16, tf32=tf32, fp32=fp32, memory=memory, bandwidth=bandwidth, **others)


_TABLE = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
DEVICES = {name: _device(**data_sheet) for name, data_sheet in _TABLE.items()}


def device_named(name: str) -> Device:
    if name.lower() not in DEVICES:
        raise ConfigError(f"--device '{name}': no such device; {suggestion(name.lower(), DEVICES)}")
    return DEVICES[name.lower()]


def device_called(name: str) -> Device | None:
    """Return the device with this driver name ("NVIDIA GeForce RTX 4090"), or None if the table lacks it."""
    plain = name.lower().replace("rtx ", "rtx")
    known = {key: device for key, device in DEVICES.items() if key != "cpu"}  # its speed is only assumed
    return next((device for key, device in known.items() if re.search(rf"{key}(?!\d)", plain)), None)


MACHINE = 8  # devices per machine
LINK_SHARE = 0.8  # fraction of a link's bandwidth that collectives of many megabytes reach
START = 10e-6  # seconds before the first byte of a collective
HOP_INSIDE, HOP_ACROSS = 1e-6, 6e-6  # seconds from one device to the next, in a machine and between machines

# Gb/s per device; with Ethernet the devices of a machine share one card
NETWORKS = {"ib-edr": 100.0, "ib-hdr": 200.0, "ib-ndr": 400.0, "ib-xdr": 800.0}
NETWORKS |= {f"roce-{speed}": float(speed) for speed in (100, 200, 400)}
NETWORKS |= {f"ethernet-{speed}": speed / MACHINE for speed in (10, 25, 100)}
ONE_MACHINE = {"nvlink": None, "pcie": 32e9}  # all devices in one machine; bytes/s each way, None for the device's link


@dataclass(frozen=True)
class Interconnect:
    """Network: bytes/s from a device to others of its machine and to other machines, each of `machine` devices."""

    name: str
    inside: float
    across: float
    machine: int = MACHINE


def interconnect_named(text: str | None, device: Device, gpus: int) -> Interconnect:
    """Return a network by name, or by Gb/s per device such as 400Gb/s; by default the one usual for the device."""
    name = (text or device.network).lower().strip()
    if name in ONE_MACHINE:
        speed = ONE_MACHINE[name] or device.link
        return Interconnect(name, speed, speed, machine=max(gpus, 1))
    if name in NETWORKS:
        return Interconnect(name, device.link, NETWORKS[name] * 1e9 / 8)
    number = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(gb|gbit|gbps)(/s)?", name)
    if number is None or float(number[1]) <= 0:
        known = suggestion(name, [*NETWORKS, *ONE_MACHINE])
        raise ConfigError(f"--interconnect '{text}': expected a number per GPU, such as 400Gb/s, or a name; {known}")
    return Interconnect(f"{float(number[1]):g} Gb/s", device.link, float(number[1]) * 1e9 / 8)


@dataclass(frozen=True)
class DeviceGroup:
    """Devices of a collective: `size` of them, each `stride` devices from the next."""

    size: int
    stride: int
    net: Interconnect

    @property
    def members(self) -> int:
        """Number of them in one machine."""
        return max(1, min(self.size, self.net.machine // self.stride))

    @property
    def machines(self) -> int:
        return -(-self.size // self.members)

    @property
    def bandwidth(self) -> float:
        """Bytes/s of a ring through all of them."""
        return LINK_SHARE * min(self.net.inside, self.members * self.net.across if self.machines > 1 else math.inf)

    def gather(self, bytes_: float) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of a tensor of this size."""
        hops = (self.size - self.machines) * HOP_INSIDE + (self.machines - 1) * HOP_ACROSS
        return self._seconds(hops, (self.size - 1) / self.size * bytes_ / self.bandwidth)

    def reduce(self, bytes_: float) -> float:
        """Return the seconds of an all-reduce of a tensor of this size, along a tree between machines."""
        hops = 2 * ((self.members - 1) * HOP_INSIDE + math.ceil(math.log2(self.machines)) * HOP_ACROSS)
        return self._seconds(hops, 2 * (self.size - 1) / self.size * bytes_ / self.bandwidth)

    def send(self, bytes_: float) -> float:
        """Return the seconds of a send to the next device."""
        link, hop = (self.net.across, HOP_ACROSS) if self.machines > 1 else (self.net.inside, HOP_INSIDE)
        return self._seconds(hop, bytes_ / (LINK_SHARE * link))

    def _seconds(self, hops: float, transfer: float) -> float:
        return 0.0 if self.size == 1 else START + hops + transfer
