"""What removing each weight would change, to first and second order, from one backward pass.

With g the gradient of the summed loss, a removal that adds u_i to the weights w_i of a token
changes the loss by sum_i g_i u_i, to first order. Removing source j of a distribution leaves
w_i / (1 - w_j) for the others, so that

    sum_i g_i u_i = w_j (sum_i g_i w_i - g_j) / (1 - w_j)

and anywhere else u_j = -w_j alone. One backward pass gives g at every access site: all removals
together cost about three forwards, where exact ones cost a forward each.

At a trained optimum first-order changes cancel over windows, and the second order is what is left.
If targets are distributed as the model says, the expected Hessian of a window's loss is the
expectation of g g^T (the Fisher information), so that a removal costs about half of the square of
its first-order change, window by window (Fisher pruning, arXiv 1801.05787). That is free, and
added.

Shapes: B rows, T positions, n weights of a site, C columns (weights of all sites side by side).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.engine.accumulators import GroupSums
from satlens.analysis.engine.stream import fold, n_groups
from satlens.data.windows import IGNORE, Batch, Windows
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite


def width_of(site: AccessSite) -> int:
    """Weights of a site: heads of a gate, sources of a route."""
    return site.n_heads if site.kind == "gate" else len(site.sources)


def first_order(weights: Tensor, gradient: Tensor, simplex: bool) -> Tensor:
    """Change of the loss at each token if each weight were removed, (B, T, n) in float64.

    A weight of 1 in a distribution leaves nothing to share, and is 0.
    """
    w, g = weights.double(), gradient.double()
    if not simplex:
        return -g * w
    # Of the weights themselves: 1 - w would lose what a rounded w close to 1 leaves.
    rest = w.sum(-1, keepdim=True) - w
    whole = (g * w).sum(-1, keepdim=True)
    return torch.where(rest > 0, (whole - g * w) / rest - whole, 0.0)


def site_gradients(
    model: Decoder, batch: Batch, sites: Sequence[AccessSite]
) -> list[tuple[Tensor, Tensor]]:
    """Weights of each site and the gradients of the batch's summed loss, (B, T, n) each."""
    return _gradients(model, batch, sites)[0]


def _gradients(
    model: Decoder, batch: Batch, sites: Sequence[AccessSite]
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Those, and the losses (B, T)."""
    seen: dict[str, Tensor] = {}

    def show(weights: Tensor, hook: Any) -> Tensor:
        # What depends on earlier sites is in the graph already and stays there.
        seen[hook.name] = weights if weights.requires_grad else weights.detach().requires_grad_()
        return seen[hook.name]

    with torch.enable_grad(), model.hooks([(site.hook, show) for site in sites]):
        nll = model(batch.tokens, return_type="loss", targets=batch.targets, loss_per_token=True)
        weights = [seen[site.hook] for site in sites]
        gradients = torch.autograd.grad(nll.sum(), weights)
    return [(w.detach(), g) for w, g in zip(weights, gradients, strict=True)], nll.detach()


@contextmanager
def frozen(model: Decoder) -> Iterator[None]:
    """The model's parameters as constants, as they were afterwards."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def attributions(
    model: Decoder, windows: Windows, sites: Sequence[AccessSite], passes: dict[str, Any]
) -> GroupSums:
    """Sums by document group: ``attribution`` and ``fisher`` (G, C), ``nll`` and ``n`` (G,).

    The first is of first order, the second of second; ``n`` counts scored tokens.

    Args:
        passes: ``progress`` and ``resume_dir``.
    """
    widths = [width_of(site) for site in sites]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("attribution", "fisher"), (sum(widths),))
    sums = GroupSums(n_groups(windows), {**shapes, "nll": (), "n": ()})

    def step_over(batch: Batch, groups: np.ndarray) -> None:
        pairs, nll = _gradients(model, batch, sites)
        found = [
            first_order(w, g, site.support == "simplex").sum(1)
            for site, (w, g) in zip(sites, pairs, strict=True)
        ]
        first = torch.cat(found, 1)
        second = first + first.square() / 2
        losses = {"nll": nll.double().sum(1), "n": (batch.targets != IGNORE).sum(1)}
        sums.add(groups, attribution=first, fisher=second, **losses)

    fold(
        model,
        windows,
        {"sums": sums},
        step_over,
        identity=["removal", [site.hook for site in sites]],
        inside=lambda: frozen(model),
        label="attribution",
        **passes,
    )
    return sums
