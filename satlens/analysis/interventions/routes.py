"""Interventions on routes; :func:`satlens.intervene` installs them.

Shapes: B batch, T position, n sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.interventions.donors import Donors, resampled
from satlens.analysis.interventions.gates import HookFunction, SiteIntervention
from satlens.analysis.interventions.means import mean_weights, per_of
from satlens.analysis.interventions.running import Running
from satlens.data.tags import Tags
from satlens.errors import AnalysisError, HookError
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite


@dataclass(frozen=True, kw_only=True)
class RouteIntervention(SiteIntervention):
    """Base of interventions on routes."""

    kind = "route"
    target = "routes"


@dataclass(frozen=True, kw_only=True)
class UniformRoute(RouteIntervention):
    """Read every source with the same weight: 1 / n, or the mean of a token's weights where they
    are no distribution, so that their sum stays."""

    name = "uniform"

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
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

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
        return torch.zeros_like(weights)


@dataclass(frozen=True, kw_only=True)
class MeanRoute(RouteIntervention):
    """Replace each route by its mean over tokens, fitted on other data; see MeanGate."""

    name = "mean"

    means: Mapping[str, np.ndarray] = field(repr=False)
    """From :func:`satlens.fit_means`, on the pool split."""
    tags: Tags | None = field(default=None, repr=False)
    """Of the documents that the analysis inside the context runs, for means per category."""

    @property
    def causal(self) -> bool:
        return per_of(self.means) != "category"

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
        return mean_weights(type(self).__name__, self.means, site, weights, running, self.tags)


@dataclass(frozen=True, kw_only=True)
class ResampleRoute(RouteIntervention):
    """Replace a token's routes by those of a token at the same position of another document.

    All sites take them from the same place, as with ResampleGate.
    """

    name = "resample"

    donors: Donors = field(repr=False)
    """From :func:`satlens.fit_donors`, on the pool split."""
    seed: int = 0
    """Of the draws."""

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
        return resampled(type(self).__name__, self.donors, site, weights, running, self.seed)


# -- single sources --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SourceIntervention(RouteIntervention):
    """Base of interventions on some sources of routes. Sites that do not have them stay."""

    def sites(self, model: Decoder) -> list[AccessSite]:
        return self.with_sources(super().sites(model))

    def chosen(self, site: AccessSite) -> list[int]:
        """Places of its sources that are meant."""
        raise NotImplementedError

    def with_sources(self, sites: list[AccessSite]) -> list[AccessSite]:
        """Those of some sites that it changes, at least one.

        Raises:
            HookError: none has the sources.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class MaskRoute(SourceIntervention):
    """Take nothing from some sources.

    Of a distribution the other weights are divided by their sum, as if the masked logits were minus
    infinity (if their sum is zero in the model's precision, they become equal); signed weights
    become zero and the others stay. A site stays as it is where none of the sources is, and where
    there are no others.
    """

    name = "mask"

    source: int | str | Sequence[int] | Sequence[str] | None = None
    """Sources by place (0 the first, -1 the newest) or by label (``embed``, ``block 0..3``)."""
    family: str | None = None
    """Or all of one kind: embedding, blocks, partial, states or streams."""

    def chosen(self, site: AccessSite) -> list[int]:
        if self.family is not None:
            return [i for i, source in enumerate(site.sources) if source.family == self.family]
        return _places(site, self.source)

    def with_sources(self, sites: list[AccessSite]) -> list[AccessSite]:
        if (self.source is None) == (self.family is None):
            raise HookError("MaskRoute: give a source or a family, one of them")
        found = [site for site in sites if 0 < len(self.chosen(site)) < len(site.sources)]
        if not found:
            what, asked = (
                ("family", self.family) if self.source is None else ("source", self.source)
            )
            raise HookError(
                f"MaskRoute: {what} {asked!r}: no route has it beside others; there are: "
                f"{', '.join(_known(sites, what))}"
            )
        return found

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
        masked = torch.zeros(weights.shape[-1], dtype=torch.bool, device=weights.device)
        masked[self.chosen(site)] = True
        left = weights.masked_fill(masked, 0.0)
        if site.support != "simplex":
            return left
        total = left.sum(-1, keepdim=True)
        equal = (~masked).to(weights.dtype) / (~masked).sum()
        return torch.where(total > 0, left / total.where(total > 0, 1.0), equal)


@dataclass(frozen=True, kw_only=True)
class OneHotRoute(SourceIntervention):
    """Read one source with weight 1 and the others with 0. Sites that lack the source stay."""

    name = "onehot"

    source: int | str
    """By place (0 the first, -1 the newest) or by label (``embed``, ``block 0..3``)."""

    def chosen(self, site: AccessSite) -> list[int]:
        return _places(site, self.source)

    def with_sources(self, sites: list[AccessSite]) -> list[AccessSite]:
        found = [site for site in sites if self.chosen(site)]
        if not found:
            raise HookError(
                f"OneHotRoute: source {self.source!r}: no route has it; there are: "
                f"{', '.join(_known(sites, 'source'))}"
            )
        return found

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
        one_hot = torch.zeros_like(weights)
        one_hot[..., self.chosen(site)] = 1.0
        return one_hot


def _places(
    site: AccessSite, source: int | str | Sequence[int] | Sequence[str] | None
) -> list[int]:
    """Places of sources given by place or label, ascending; those that the site lacks left out."""
    wanted = (source,) if isinstance(source, int | str) else source or ()
    n, labels = len(site.sources), [s.label for s in site.sources]
    places = {
        labels.index(one) if isinstance(one, str) else one % n
        for one in wanted
        if (one in labels if isinstance(one, str) else -n <= one < n)
    }
    return sorted(places)


def _known(sites: list[AccessSite], what: str) -> list[str]:
    """Labels or families of the sources of some sites."""
    attribute = "family" if what == "family" else "label"
    return list(dict.fromkeys(getattr(s, attribute) for site in sites for s in site.sources))


# -- roles -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TieValueRoute(RouteIntervention):
    """Let values read by the route of queries and keys, which turns RD-AttnRes into its parent."""

    name = "tie_v"

    def sites(self, model: Decoder) -> list[AccessSite]:
        if self.role not in (None, "v"):
            raise HookError(f"TieValueRoute: role {self.role!r}: it changes the role v alone")
        return self.tied(model, type(self).__name__)

    def tied(self, model: Decoder, who: str) -> list[AccessSite]:
        """The value routes that it names; ``who`` is for errors."""
        found = super().sites(model)
        tied = [site for site in tied_sites(model) if site in found]
        if not tied:
            raise AnalysisError(
                f"{who}: this model ({model.cfg.variant}) has no value route beside one "
                "that queries and keys share"
                if self.layer is None and self.sublayer is None
                else f"{who}: no such value route among the sites it names"
            )
        return tied

    def hooks(self, model: Decoder, running: Running) -> list[tuple[str, HookFunction]]:
        pairs = []
        for site in self.sites(model):
            qk = _qk_of(model, site)
            assert qk is not None
            kept: dict[str, Tensor] = {}
            pairs += [
                (qk.hook, partial(_remember, into=kept)),
                (site.hook, partial(_recall, source=kept, hook_name=qk.hook)),
            ]
        return self.identified(pairs)


@dataclass(frozen=True, kw_only=True)
class SwapRoutes(RouteIntervention):
    """Let queries and keys read by the route of values, and values by theirs.

    What is exchanged is what the model makes of its state: other interventions on these routes come
    after it, whatever the order given.
    """

    name = "swap"

    def sites(self, model: Decoder) -> list[AccessSite]:
        """Both routes of each read that has the two."""
        if self.role is not None:
            raise HookError(f"SwapRoutes: role {self.role!r}: it changes the roles qk and v")
        values = TieValueRoute(layer=self.layer, sublayer=self.sublayer)
        pairs = [(_qk_of(model, site), site) for site in values.tied(model, type(self).__name__)]
        return [site for pair in pairs for site in pair if site is not None]

    def hooks(self, model: Decoder, running: Running) -> list[tuple[str, HookFunction]]:
        # They change nothing, but a cache knows them and the model visits the hook points.
        return self.identified((site.hook, partial(_left)) for site in self.sites(model))

    @contextmanager
    def switched(self, model: Decoder) -> Iterator[None]:
        blocks = [model.blocks[layer] for layer in {site.layer for site in self.sites(model)}]
        for block in blocks:
            block.swapped_roles = not block.swapped_roles
        try:
            yield
        finally:
            for block in blocks:
                block.swapped_roles = not block.swapped_roles


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


def _left(weights: Tensor, hook: Any) -> None:
    pass
