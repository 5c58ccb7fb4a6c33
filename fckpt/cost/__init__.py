"""Seconds, FLOPs and temporary bytes of the operations of a trace: measured on the device, or estimated for another.

`price` sets the costs in the graph of a trace. `Measured` runs each distinct operation on the real device. `Analytic`
computes a roofline estimate from a `DeviceProfile`, so that a plan for a GPU can be made on a laptop. For custom
operations, `register_cost` sets the cost, and `register_pure` allows `Measured` to run them on synthetic data.
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
