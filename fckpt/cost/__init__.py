"""Bytes, FLOPs and seconds of every operation of a trace: measured on the device, or estimated for another one.

`price` fills in a trace's graph from a source. `Measured` runs each distinct operation on the real device;
`Analytic` computes a roofline for a `DeviceProfile`, so that a plan for a GPU can be made on a laptop. Kernels that
neither knows are named by `register_cost`; `register_pure` says that a custom one may be run on made-up data.
"""

from __future__ import annotations

from fckpt.cost.analytic import Analytic
from fckpt.cost.calls import CostSource, OpCost, register_cost, register_pure, signature
from fckpt.cost.devices import DeviceProfile, calibrated, profile_of, profiles
from fckpt.cost.measured import Measured
from fckpt.cost.pricing import price

__all__ = [
    "Analytic",
    "CostSource",
    "DeviceProfile",
    "Measured",
    "OpCost",
    "calibrated",
    "price",
    "profile_of",
    "profiles",
    "register_cost",
    "register_pure",
    "signature",
]
