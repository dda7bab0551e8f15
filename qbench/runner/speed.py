"""How fast this machine computes: a GPU's published peak, or a CPU's measured rate. Does not import torch."""

import re
import time
from dataclasses import dataclass

from qbench.gpus import Gpu, gpus
from qbench.identity import remembered
from qbench.machine import cpu_name
from qbench.recipe.schema import Recipe

# Dense 16-bit matrix products (TFLOP/s, without sparsity) and memory (GB/s) from NVIDIA's data sheets. The first entry
# that occurs in the GPU's name counts.
PUBLISHED = {
    "B200": (2250, 8000),
    "H200": (989, 4800),
    "GH200": (989, 4000),
    "H100 PCIe": (756, 2000),
    "H100 NVL": (835, 3900),
    "H100": (989, 3350),
    "A100-PCIE-40GB": (312, 1555),
    "A100-SXM4-40GB": (312, 1555),
    "A100": (312, 1935),
    "A800": (312, 1935),
    "A40": (150, 696),
    "A30": (165, 933),
    "A10G": (70, 600),
    "A10": (125, 600),
    "L40S": (362, 864),
    "L40": (181, 864),
    "L4": (121, 300),
    "RTX 6000 Ada": (364, 960),
    "RTX A6000": (155, 768),
    "RTX 5090": (210, 1792),
    "RTX 4090": (165, 1008),
    "RTX 3090": (71, 936),
    "V100": (125, 900),
    "T4": (65, 320),
}
UNKNOWN = (50, 400)  # for a GPU that is not listed: a small current one
# The assumed share of the peak. A CPU's peak is a measured matrix product, so cells reach more of it;
# benchmarks/plan.py compares estimates with real cells. No GPU has been measured yet.
EFFICIENCY = {"cuda": 0.4, "cpu": 0.6}
FLOAT32_SHARE = 1 / 16  # of the 16-bit peak, on CUDA: an A100's 19.5 TFLOP/s without TF32
CPU_BANDWIDTH = 1e10  # bytes per second of one core
SIZE = 512  # of the matrices whose product measures a core


@dataclass(frozen=True)
class Speed:
    """Peak operations and bytes per second of one slot, and the share of the peak that is assumed."""

    device: str
    name: str
    operations: float
    bandwidth: float
    efficiency: float

    def seconds(self, operations: float = 0.0, size: float = 0.0) -> float:
        """How long this many operations and bytes of memory traffic take."""
        return (operations / self.operations + size / self.bandwidth) / self.efficiency

    def __str__(self) -> str:
        return f"{self.efficiency:.0%} of {self.operations / 1e12:.3g} TFLOP/s ({self.name})"


def speed_of(recipe: Recipe, threads: int) -> Speed | None:
    """The speed of one slot for the recipe's cells; None if they need a GPU and there is none."""
    if recipe.resolved_device == "cpu":
        rate = threads * core_rate()
        named = f"{threads} core{'s' if threads > 1 else ''} of {cpu_name()}"
        return Speed("cpu", named, rate, threads * CPU_BANDWIDTH, EFFICIENCY["cpu"])
    found = gpus()
    return gpu_speed(found[0], recipe.resolved_dtype) if found else None


def gpu_speed(gpu: Gpu, dtype: str) -> Speed:
    """A GPU's published peak; for a MIG part, its share of the seven slices."""
    peak = next((peak for name, peak in PUBLISHED.items() if re.search(rf"\b{name}\b", gpu.name)), None)
    share = int(found[1]) / 7 if (found := re.search(r"MIG (\d)g", gpu.name)) else 1.0
    operations, bandwidth = (value * share for value in peak or UNKNOWN)
    if dtype == "float32":
        operations *= FLOAT32_SHARE
    name = gpu.name if peak else f"{gpu.name} (peak not listed, assumed)"
    return Speed("cuda", name, operations * 1e12, bandwidth * 1e9, EFFICIENCY["cuda"])


def core_rate() -> float:
    """Floating-point operations per second of one core, measured once: the fastest of a few matrix products."""
    return float(remembered(f"speed of a core of {cpu_name()}", [], _measure_core))


def _measure_core() -> float:
    import numpy as np

    left = np.random.default_rng(0).random((SIZE, SIZE), dtype=np.float32)
    taken = []
    for _ in range(8):
        before = time.process_time()  # CPU time of all threads: independent of their number and of other load
        np.matmul(left, left)
        taken.append(time.process_time() - before)
    return 2 * SIZE**3 / min(taken)
