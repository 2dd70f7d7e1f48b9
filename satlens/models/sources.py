"""The sources of routes as tensors, from what a pass recorded: how large each is.

Shapes: B batch, T position, D model width, n sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from satlens.models.layers import at_least_fp32
from satlens.models.reads import component_hooks
from satlens.models.sites import AccessSite, Source


def source_points(source: Source, n_layers: int) -> list[str]:
    """Hook points whose activations add up to a source.

    A state after a layer is what its MLP read plus what the MLP added; block sums are sums of
    sublayer outputs.
    """
    if source.kind == "cumulative":
        assert source.last is not None
        at = f"blocks.{source.last // 2}."
        return [f"{at}hook_mlp_read", f"{at}hook_mlp_out"]
    outputs = component_hooks(n_layers)
    return [outputs[m + 1] for m in source.sublayers]


def source_state(source: Source, recorded: Mapping[str, Tensor], n_layers: int) -> Tensor:
    """A source, (B, T, D) in at least fp32."""
    first, *others = source_points(source, n_layers)
    state = at_least_fp32(recorded[first])
    for point in others:
        state = state + recorded[point]
    return state


def norms_of(
    sites: Iterable[AccessSite], recorded: Mapping[str, Tensor], n_layers: int
) -> Iterator[tuple[str, Tensor]]:
    """Each site's hook point and the norms (B, T, n) of its sources, shared ones taken once."""
    known: dict[Source, Tensor] = {}
    for site in sites:
        for source in site.sources:
            if source not in known:
                state = source_state(source, recorded, n_layers)
                known[source] = torch.linalg.vector_norm(state, dim=-1).double()
        yield site.hook, torch.stack([known[source] for source in site.sources], -1)
