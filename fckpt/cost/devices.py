"""Device profiles: rates of GPUs from their data sheets, and measured rates of the devices of this machine."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from fckpt.cost.allocators import granularity
from fckpt.errors import ArgumentValueError

__all__ = ["BANDWIDTH_EFFICIENCY", "COMPUTE_EFFICIENCY", "DeviceProfile", "calibrated", "profile_of", "profiles"]

COMPUTE_EFFICIENCY = 0.7
"""The fraction of the peak rate that a large matrix product reaches; torch's own estimate uses 0.75."""
BANDWIDTH_EFFICIENCY = 0.85
"""The fraction of the peak bandwidth that a large copy reaches."""


@dataclass(frozen=True)
class DeviceProfile:
    """The rates of a device on large operations, and the minimum time of an operation."""

    name: str
    flops: Mapping[torch.dtype, float] = field(hash=False)
    """Floating point operations per second of a matrix product, by dtype; must contain float32."""
    bytes_per_second: float
    launch_seconds: float
    """The time of an operation on an empty tensor."""
    memory_nbytes: int
    allocation_granularity: int = 1
    """The allocator rounds sizes up to a multiple of this many bytes."""
    capability: tuple[int, int] | None = None
    """The compute capability of a CUDA device, on which torch's choice of kernels depends; None for other devices."""

    def __post_init__(self) -> None:
        rates = [*self.flops.values(), self.bytes_per_second, self.allocation_granularity]
        if torch.float32 not in self.flops or min(rates) <= 0 or self.launch_seconds < 0:
            raise ArgumentValueError(
                f"the profile {self.name!r} must have positive rates, including one for float32, not {self.flops}, "
                f"{self.bytes_per_second} B/s and {self.launch_seconds} s."
            )

    def flops_of(self, dtype: torch.dtype) -> float:
        """Returns the rate for `dtype`: the listed one, a quarter of the real rate for complex dtypes, or float32's."""
        if dtype.is_complex:
            return self.flops_of(dtype.to_real()) / 4
        return self.flops.get(dtype, self.flops[torch.float32])


def _gpu(
    name: str,
    teraflops: dict[torch.dtype, float],
    gigabytes_per_second: float,
    nbytes: int,
    capability: tuple[int, int],
) -> DeviceProfile:
    flops = {dtype: rate * 1e12 * COMPUTE_EFFICIENCY for dtype, rate in teraflops.items()}
    rate = gigabytes_per_second * 1e9 * BANDWIDTH_EFFICIENCY
    # Eager PyTorch takes about 5 us to launch a kernel from Python.
    grain = granularity(torch.device("cuda"))
    return DeviceProfile(name, MappingProxyType(flops), rate, 5e-6, nbytes, grain, capability)


def _teraflops(half: float, single: float, double: float, eighth: float = 0.0) -> dict[torch.dtype, float]:
    rates = {torch.float16: half, torch.bfloat16: half, torch.float32: single, torch.float64: double}
    return rates | ({torch.float8_e4m3fn: eighth, torch.float8_e5m2: eighth} if eighth else {})


_HOPPER = _teraflops(half=989.4, single=66.9, double=66.9, eighth=1978.9)

profiles: Mapping[str, DeviceProfile] = MappingProxyType(
    {
        "H200": _gpu("H200", _HOPPER, 4800, 141 * 10**9, (9, 0)),
        "H100": _gpu("H100", _HOPPER, 3350, 80 * 10**9, (9, 0)),
        "A100": _gpu("A100", _teraflops(half=312, single=19.5, double=19.5), 2039, 80 * 10**9, (8, 0)),
        "RTX 4090": _gpu(
            "RTX 4090", _teraflops(half=165.2, single=82.6, double=1.29, eighth=330.3), 1008, 24 * 10**9, (8, 9)
        ),
        "cpu": DeviceProfile(
            "cpu",
            MappingProxyType({torch.float32: 150e9, torch.float64: 50e9, torch.bfloat16: 300e9, torch.float16: 5e9}),
            bytes_per_second=25e9,
            launch_seconds=2e-6,
            memory_nbytes=16 * 2**30,
        ),
    }
)
"""Profiles by device name: the peaks of the data sheet times `COMPUTE_EFFICIENCY` and `BANDWIDTH_EFFICIENCY`.

Peaks are for dense matrices. The rates of float16, bfloat16 and float8 are those of tensor cores with accumulation in
float32. float64 also uses tensor cores (except on the RTX 4090). float32 does not, because torch does not use TF32 for
matrix products by default (`torch.set_float32_matmul_precision`). torch does use TF32 for convolutions by default
(`torch.backends.cudnn.allow_tf32`), so the float32 rates are too low for convolutions.

* H100 SXM 80 GB, H200 SXM 141 GB: NVIDIA, "NVIDIA H100 Tensor Core GPU Architecture" white paper, V1.04, 2023, table 2;
  bandwidths from the H100 and "NVIDIA H200 Tensor Core GPU" data sheets. 989.4 TFLOPS bfloat16, 66.9 float32 and
  float64, 1978.9 float8; 3.35 and 4.8 TB/s.
* A100 SXM 80 GB: NVIDIA, "NVIDIA A100 Tensor Core GPU" data sheet, 2021. 312 TFLOPS bfloat16, 19.5 float32 and float64;
  2039 GB/s.
* RTX 4090: NVIDIA, "NVIDIA Ada GPU Architecture" white paper, V2.02, 2023, appendix A. 165.2 TFLOPS bfloat16, 82.6
  float32 and 1/64 of that, 1.29, float64, 330.3 float8 (660.6 before V2.02, an error); 1008 GB/s.
* cpu: two cores of a server processor of 2023 with AVX-512, rounded; `profile_of("cpu")` measures this machine instead.
"""


def profile_of(device: torch.device | str) -> DeviceProfile:
    """Returns the profile of a device: listed in `profiles` for known GPUs, otherwise measured once.

    Args:
        device: a name in `profiles`, or a device of this machine. "cpu" means the CPU of this machine.

    Raises:
        ArgumentValueError: there is no such profile, and no such device on this machine.

    Example:
        >>> f"{profile_of('H100').bytes_per_second:.3g}"
        '2.85e+12'
    """
    if isinstance(device, str) and device in profiles and device != "cpu":
        return profiles[device]
    try:
        device = torch.device(device)
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            return _listed(name) or calibrated(device)
        torch.empty(1, device=device).add(1).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ArgumentValueError(
            f"this machine has no device {str(device)!r}, and there is no profile of that name. Name one of "
            f"{', '.join(profiles)}, or describe the device with a DeviceProfile."
        ) from error
    return calibrated(device)


def _listed(name: str) -> DeviceProfile | None:
    """Returns the profile of the GPU with this device name; None if only another variant of the chip is listed."""
    if re.search("PCIe|NVL|40GB|Laptop|MIG|4090 ?D", name, re.IGNORECASE):
        return None
    return next((known for key, known in profiles.items() if re.search(rf"\b{key}\b", name)), None)


def calibrated(device: torch.device | str) -> DeviceProfile:
    """Measures a device of this machine with matrix products, a copy and a small operation; takes under a second, once.

    Args:
        device: the device to measure.

    Returns:
        A profile. On CPU it is valid for the current number of threads.
    """
    return _calibrated(torch.device(device), torch.get_num_threads())


@functools.cache
def _calibrated(device: torch.device, threads: int) -> DeviceProfile:
    size = 384 if device.type == "cpu" else 4096
    flops = {}
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            try:
                a = torch.full((size, size), 0.5, device=device, dtype=dtype)
                flops[dtype] = 2 * size**3 / _least_seconds(lambda a=a: a.mm(a), device)
            except (RuntimeError, TypeError):  # not every device supports every dtype
                continue
        a = torch.zeros(2**26 if device.type == "cpu" else 2**28, device=device, dtype=torch.uint8)
        b = torch.zeros_like(a)
        rate = 2 * a.numel() / _least_seconds(lambda: b.copy_(a), device)
        a = torch.zeros(1, device=device)
        launch = _least_seconds(lambda: a.neg(), device, repeats=100)
    return DeviceProfile(str(device), MappingProxyType(flops), rate, launch, _memory(device), granularity(device))


def _memory(device: torch.device) -> int:
    """Returns the bytes of memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return profiles["cpu"].memory_nbytes


def _least_seconds(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    def wait() -> None:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)

    run()
    least, until = float("inf"), time.perf_counter() + 0.1
    for i in range(repeats):
        wait()
        start = time.perf_counter()
        run()
        wait()
        end = time.perf_counter()
        least = min(least, end - start)
        if end > until and i:
            break
    return least
