"""Peak speed of accelerators in bf16, for those that are known for sure.

Figures are the makers' own for dense matrix products of bf16 numbers summed in fp32, without the
doubling by structured sparsity that data sheets like to print. A chip counts as known only if its
name and its number of multiprocessors both agree: a slice of a GPU (MIG), a laptop's or a cut-down
chip of the same name has another peak, and a wrong utilisation is worse than none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Chip(NamedTuple):
    """An accelerator as torch describes it, and what its maker says."""

    names: tuple[str, ...]
    """Names under torch, without the leading ``NVIDIA``."""
    multiprocessors: int
    teraflops: float
    """Peak of dense bf16 products, 10^12 operations a second."""


CHIPS: dict[str, Chip] = {
    # Ampere: data sheets of A100, A30, A10, A40 and RTX A6000; GA102 white paper.
    "A100": Chip(
        (
            "A100-SXM4-40GB",
            "A100-SXM4-80GB",
            "A100-PCIE-40GB",
            "A100-PCIE-80GB",
            "A100 80GB PCIe",
        ),
        108,
        312.0,
    ),
    "A30": Chip(("A30",), 56, 165.0),
    "A10": Chip(("A10",), 72, 125.0),
    "A40": Chip(("A40",), 84, 149.7),
    "RTX A6000": Chip(("RTX A6000",), 84, 154.8),
    "RTX 3090": Chip(("GeForce RTX 3090",), 82, 71.2),
    "RTX 3090 Ti": Chip(("GeForce RTX 3090 Ti",), 84, 80.0),
    # Ada: data sheets of L4, L40 and L40S; AD102 white paper. GeForce sums in fp32 at half speed.
    "L4": Chip(("L4",), 58, 121.0),
    "L40": Chip(("L40",), 142, 181.05),
    "L40S": Chip(("L40S",), 142, 362.05),
    "RTX 6000 Ada": Chip(("RTX 6000 Ada Generation",), 142, 364.2),
    "RTX 4090": Chip(("GeForce RTX 4090",), 128, 165.2),
    # Hopper: data sheets of H100, H200 and GH200.
    "H100 SXM": Chip(("H100 80GB HBM3",), 132, 989.4),
    "H100 PCIe": Chip(("H100 PCIe",), 114, 756.0),
    "H100 NVL": Chip(("H100 NVL",), 132, 835.0),
    "H200 SXM": Chip(("H200",), 132, 989.4),
    "H200 NVL": Chip(("H200 NVL",), 132, 835.5),
    "GH200": Chip(("GH200 480GB", "GH200 120GB", "GH200 144G HBM3e"), 132, 989.4),
    # Blackwell: data sheet of HGX B200 (per GPU, at 1000 W); GB202 white paper.
    "B200": Chip(("B200",), 148, 2250.0),
    "RTX 5090": Chip(("GeForce RTX 5090",), 170, 209.5),
}
"""Known accelerators by a short name."""


def peak_flops(device: torch.device | str) -> float | None:
    """Peak dense bf16 operations a second of the device under torch; None where it is not known."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return peak_of(properties.name, properties.multi_processor_count)


def peak_of(name: str, multiprocessors: int) -> float | None:
    """:func:`peak_flops` of a device by what torch says of it."""
    plain = name.strip().removeprefix("NVIDIA ")
    for chip in CHIPS.values():
        if plain in chip.names and multiprocessors == chip.multiprocessors:
            return chip.teraflops * 1e12
    return None
