"""The norm of a sublayer as one would first write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from satlens.models.layers import RMSNorm, at_least_fp32, compute_dtype


def plain_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    """``F.rms_norm`` in fp32 or wider, cast to the compute dtype."""
    with torch.autocast(x.device.type, enabled=False):
        y = F.rms_norm(at_least_fp32(x), x.shape[-1:], at_least_fp32(norm.weight), norm.eps)
    return y.to(compute_dtype(norm.weight))
