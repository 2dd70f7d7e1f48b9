"""Interventions on routes; :func:`satlens.intervene` installs them.

Shapes: B batch, T position, n sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from satlens.analysis.interventions import HookFunction, Intervention, Tokens
from satlens.analysis.means import Means, mean_weights
from satlens.errors import AnalysisError, HookError
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite


@dataclass(frozen=True, kw_only=True)
class RouteIntervention(Intervention):
    """Base of interventions on routes."""

    kind = "route"
    target = "routes"


@dataclass(frozen=True, kw_only=True)
class UniformRoute(RouteIntervention):
    """Read every source with the same weight: 1 / n, or the mean of a token's weights where they
    are no distribution, so that their sum stays."""

    name = "uniform"

    def edit(self, weights: Tensor, site: AccessSite, running: Tokens) -> Tensor:
        if site.support == "simplex":
            return torch.full_like(weights, 1.0 / weights.shape[-1])
        return weights.mean(-1, keepdim=True).expand_as(weights).contiguous()


@dataclass(frozen=True, kw_only=True)
class ZeroRoute(RouteIntervention):
    """Take nothing: of a mixture that is added to a residual stream, the residual stays."""

    name = "zero"
    target = "routes that are added to a residual stream"

    @classmethod
    def fits(cls, site: AccessSite) -> bool:
        return super().fits(site) and site.base == "residual"

    def edit(self, weights: Tensor, site: AccessSite, running: Tokens) -> Tensor:
        return torch.zeros_like(weights)


@dataclass(frozen=True, kw_only=True)
class MeanRoute(RouteIntervention):
    """Replace each route by its mean over tokens, fitted on other data."""

    name = "mean"

    means: Means = field(repr=False)
    """From :func:`satlens.fit_means`, on the pool split."""

    def edit(self, weights: Tensor, site: AccessSite, running: Tokens) -> Tensor:
        return mean_weights(type(self).__name__, self.means, site, weights)


@dataclass(frozen=True, kw_only=True)
class TieValueRoute(RouteIntervention):
    """Let values read by the route of queries and keys, which turns RD-AttnRes into its parent."""

    name = "tie_v"

    def sites(self, model: Decoder) -> list[AccessSite]:
        if self.role not in (None, "v"):
            raise HookError(f"TieValueRoute: role {self.role!r}: it changes the role v alone")
        found = super().sites(model)
        tied = [site for site in tied_sites(model) if site in found]
        if not tied:
            raise AnalysisError(
                f"TieValueRoute: this model ({model.cfg.variant}) has no value route beside one "
                "that queries and keys share"
                if self.layer is None and self.sublayer is None
                else "TieValueRoute: no such value route among the sites it names"
            )
        return tied

    def hooks(self, model: Decoder, running: Tokens) -> list[tuple[str, HookFunction]]:
        pairs = []
        for site in self.sites(model):
            qk = _qk_of(model, site)
            assert qk is not None
            kept: dict[str, Tensor] = {}
            pairs += [
                (qk.hook, partial(_remember, into=kept)),
                (site.hook, partial(_recall, source=kept, hook_name=qk.hook)),
            ]
        return self._identified(pairs)


def tied_sites(model: Decoder) -> list[AccessSite]:
    """The value routes that a query and key route over the same sources could replace."""
    several = [site for site in model.sites if len(site.sources) > 1]
    return [site for site in several if _qk_of(model, site) is not None]


def _qk_of(model: Decoder, site: AccessSite) -> AccessSite | None:
    """The query and key route of the read whose value route a site is."""
    if site.role != "v":
        return None
    place = (site.layer, site.sublayer, site.sources)
    for other in model.sites:
        if other.role == "qk" and (other.layer, other.sublayer, other.sources) == place:
            return other
    return None


def _remember(weights: Tensor, hook: Any, *, into: dict[str, Tensor]) -> None:
    into[hook.name] = weights


def _recall(weights: Tensor, hook: Any, *, source: dict[str, Tensor], hook_name: str) -> Tensor:
    # The very tensor: the model then sees one route and makes one mixture for both roles.
    return source.pop(hook_name)
