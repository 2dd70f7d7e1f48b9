"""MUDDFormer's FFN re-allocation, undone: the configured width that a model's widths came from."""

from __future__ import annotations

from typing import Literal

from satlens.config import ModelConfig
from satlens.models.presets import reallocated_widths

Form = Literal["satformer_repo", "release"]


def allocated(width: int, n_layers: int, form: Form) -> int | tuple[int, ...]:
    """Re-allocated widths; one number where all layers end up with the same."""
    widths = reallocated_widths(width, n_layers, form)
    if isinstance(widths, tuple) and len(set(widths)) == 1:
        return widths[0]
    return widths


def width_before_reallocation(cfg: ModelConfig, form: Form) -> int | None:
    """The roundest ``intermediate_size`` that re-allocation turns into a model's widths, or None.

    Rounding maps a range of sizes onto the same widths; the one with the most factors of two is
    the likeliest to have been written by hand.
    """
    widths = tuple(cfg.d_mlp_of(layer) for layer in range(cfg.n_layers))
    if cfg.n_layers == 1:
        return widths[0]
    # The last layer has 3/2 of the configured width, rounded by less than 256 either way.
    low, high = max(1, (widths[-1] - 256) * 2 // 3), (widths[-1] + 256) * 2 // 3 + 1
    fitting = [
        size
        for size in range(low, high + 1)
        if reallocated_widths(size, cfg.n_layers, form) == widths
    ]
    return max(fitting, key=lambda size: size & -size, default=None)
