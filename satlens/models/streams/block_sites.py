"""Access sites and effective routes of streams whose reads are softmaxes over block sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from satlens.config import AttnResStream, DeltaStream, ModelConfig, RoleDecoupledStream
from satlens.models.sites import EMBEDDING, AccessSite, Source

BlockSumStream = AttnResStream | RoleDecoupledStream | DeltaStream
Role = Literal["shared", "qk", "v"]

_ROUTES: dict[Role, str] = {
    "shared": "hook_route_attn",
    "qk": "hook_route_qk",
    "v": "hook_route_v",
}


def block_sources(cfg: ModelConfig, sublayer: int) -> tuple[Source, ...]:
    """The typed sources of a read: embedding, completed blocks, running sum last."""
    assert isinstance(cfg.stream, BlockSumStream)
    size = cfg.stream.block_size
    sources = [EMBEDDING]
    for first in range(0, sublayer, size):
        last = min(first + size, sublayer) - 1
        # The newest sum is still the running one: it joins the bank after this read.
        kind: Literal["block", "partial"] = "partial" if last == sublayer - 1 else "block"
        sources.append(Source(kind=kind, first=first, last=last))
    return tuple(sources)


def route_sites(cfg: ModelConfig, roles: tuple[Role, ...]) -> list[AccessSite]:
    """Sites of every read, in order of execution; attention reads have one a role."""
    stream = cfg.stream
    assert isinstance(stream, BlockSumStream)
    additive = isinstance(stream, DeltaStream)

    def site(hook: str, layer: int, sublayer: Any, role: Role, index: int) -> AccessSite:
        return AccessSite(
            hook=hook,
            kind="route",
            layer=layer,
            sublayer=sublayer,
            role=role,
            sources=block_sources(cfg, index),
            support="simplex",
            per_token=True,
            base="residual" if additive else "none",
        )

    sites = []
    for layer in range(cfg.n_layers):
        at = f"blocks.{layer}."
        sites += [site(at + _ROUTES[role], layer, "attn", role, 2 * layer) for role in roles]
        sites.append(site(at + "hook_route_mlp", layer, "mlp", "shared", 2 * layer + 1))
    if not additive and stream.output_read:
        sites.append(site("hook_route_out", cfg.n_layers, "out", "shared", 2 * cfg.n_layers))
    return sites


def unfolded(
    cfg: ModelConfig, sites: Sequence[AccessSite], recorded: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Effective routes, see :meth:`satlens.models.block.DepthStream.unfold`.

    A block's weight falls on each of its sublayers, plus one where the mixture is added to the
    residual stream; without a read of its own the final norm receives the sum of everything.
    """
    total = 1 + 2 * cfg.n_layers
    for site in sites:
        weights = recorded[site.hook].double() + (site.base == "residual")
        # One more weight, zero, for the components above the read.
        source_of = [len(site.sources)] * total
        for index, source in enumerate(site.sources):
            for m in source.sublayers:
                source_of[m + 1] = index
        # Whole rows are copied: tokens along them.
        rows = weights.movedim(-1, 0)
        padded = torch.cat([rows, torch.zeros_like(rows[:1])])
        chosen = torch.tensor(source_of, device=rows.device)
        yield _read_point(site), padded.index_select(0, chosen).movedim(0, -1)
    if sites[-1].sublayer != "out":
        yield "hook_out_read", weights.new_ones(1, 1, total)


def _read_point(site: AccessSite) -> str:
    """Hook point of what a site's read delivers."""
    block, _, route = site.hook.rpartition("hook_route_")
    role = f"_{route}" if route in ("qk", "v") else ""
    return f"{block}hook_{'attn' if role else route}_read{role}"
