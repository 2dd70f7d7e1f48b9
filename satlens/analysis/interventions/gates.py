"""Interventions on gates and routes, installed for the length of a ``with`` block.

    with satlens.intervene(model, satlens.ZeroGate(layer=3, head=1)):
        logits = model(tokens)

An intervention names its target by layer, head, role and sublayer (None means all) and replaces
exactly those weights; everything below the first of them is the clean pass to the bit. Nothing
stays installed, also after an exception. Those on gates are here, those on routes in
``routes``, the removal of a sublayer from what later ones read in ``removal``; ``kinds`` lists them
for sweeps.

Order: at one hook point first the hooks that were there before (of the caller, of an outer
``intervene``), then the interventions in the order given, then hooks added inside
(``run_with_hooks``, ``run_with_cache``), which therefore see what the interventions left. An
nnsight trace is served before any of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.interventions.axes import axis_values, chosen_of
from satlens.analysis.interventions.donors import Donors, resampled
from satlens.analysis.interventions.means import SiteValues, mean_weights, per_of
from satlens.analysis.interventions.running import Running
from satlens.data.tags import Tags
from satlens.errors import AnalysisError, HookError
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite

HookFunction = Callable[..., Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """Base: what it changes and where. A subclass says with which hooks."""

    kind: ClassVar[Literal["gate", "route"]]
    """What it applies to."""
    name: ClassVar[str]
    """Its name."""

    layer: int | Sequence[int] | None = None
    """Layers that take; n_layers is the output read."""
    role: str | Sequence[str] | None = None
    """Roles: v of gates; shared, qk, q, k, v or r of routes."""
    sublayer: str | Sequence[str] | None = None
    """Sublayers that take: attn, mlp, depth (after a layer), out."""

    def __post_init__(self) -> None:
        """Whole numbers of any library as those of Python, several as a tuple.

        Raises:
            HookError: a layer or head that is no whole number, or none of several.
        """
        for axis in ("layer", "head", "role", "sublayer"):
            given = getattr(self, axis, None)
            if given is not None:
                object.__setattr__(self, axis, axis_values(type(self).__name__, axis, given))

    @property
    def causal(self) -> bool:
        """Whether what it does to a token depends on earlier tokens only; others cannot run with a
        cache."""
        return True

    def hooks(self, model: Decoder, running: Running) -> list[tuple[str, HookFunction]]:
        """(hook point, function) of everything it changes.

        Raises:
            HookError, AnalysisError: the model has nothing of the kind, or not where it is named.
        """
        raise NotImplementedError

    def looks(self, model: Decoder, running: Running) -> list[tuple[str, HookFunction]]:
        """(hook point, function) of what it looks at, after every intervention's changes."""
        return []

    @contextmanager
    def switched(self, model: Decoder) -> Iterator[None]:
        """What it sets on the model itself for as long as it applies, beside hooks."""
        yield

    def named(self, found: Sequence[Any], what: str) -> list[Any]:
        """Those of some sites or reads whose layer, role and sublayer are asked for.

        Args:
            found: sites or reads, not empty.
            what: they are, for errors.

        Raises:
            HookError: a layer, role or sublayer without one, naming those that have one.
        """
        chosen = list(found)
        for axis in ("layer", "role", "sublayer"):
            wanted = chosen_of(getattr(self, axis))
            if wanted is None:
                continue
            present = {getattr(site, axis): None for site in found}
            for value in wanted:
                if value not in present:
                    raise HookError(
                        f"{type(self).__name__}: {axis} {value!r}: no {what} there; "
                        f"{axis}s with one: {', '.join(map(str, present))}"
                    )
            chosen = [site for site in chosen if getattr(site, axis) in wanted]
        return chosen

    def identified(
        self, hooks: Iterable[tuple[str, HookFunction]]
    ) -> list[tuple[str, HookFunction]]:
        """Hooks that a cache knows again when the same intervention is installed anew."""
        marked, identity = list(hooks), (type(self), self.identity)
        for _, function in marked:
            function.hook_identity = identity  # type: ignore[attr-defined]
        return marked

    @property
    def identity(self) -> dict[str, Any]:
        """Its name and settings, ready for JSON."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        return {"name": self.name, "kind": self.kind, **{k: _plain(v) for k, v in settings.items()}}


@dataclass(frozen=True, kw_only=True)
class SiteIntervention(Intervention):
    """Base of those that replace the weights of access sites: a subclass says by what."""

    target: ClassVar[str]
    """What kind of site it needs, for errors."""

    def sites(self, model: Decoder) -> list[AccessSite]:
        """The sites it names.

        Raises:
            HookError: a layer, role or sublayer without such a site, naming those that have one.
            AnalysisError: the model has no sites of this kind at all.
        """
        found = [site for site in model.sites if self.fits(site)]
        if not found:
            raise AnalysisError(
                f"{type(self).__name__}: this model ({model.cfg.variant}) has no {self.target}"
            )
        return self.named(found, self.kind)

    @classmethod
    def fits(cls, site: AccessSite) -> bool:
        """Whether it means something at a site."""
        return site.kind == cls.kind

    def hooks(self, model: Decoder, running: Running) -> list[tuple[str, HookFunction]]:
        return self.identified(
            (site.hook, partial(self._at, site=site, running=running)) for site in self.sites(model)
        )

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
        """New weights (B, T, n) for all of a site; the caller's are not written to."""
        raise NotImplementedError

    def _at(self, weights: Tensor, hook: Any, *, site: AccessSite, running: Running) -> Tensor:
        return self.edit(weights, site, running).to(weights.dtype)


# -- gates -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GateIntervention(SiteIntervention):
    """Base of interventions on gates, which also have heads."""

    kind = "gate"
    target = "gates"

    head: int | Sequence[int] | None = None
    """KV heads."""

    def sites(self, model: Decoder) -> list[AccessSite]:
        found = super().sites(model)
        n_heads = min(site.n_heads for site in found)
        for head in chosen_of(self.head) or ():
            if not 0 <= head < n_heads:
                raise HookError(
                    f"{type(self).__name__}: head {head!r}: gates have the KV heads "
                    f"0 to {n_heads - 1}"
                )
        return found

    def _at(self, weights: Tensor, hook: Any, *, site: AccessSite, running: Running) -> Tensor:
        edited = self.edit(weights, site, running).to(weights.dtype)
        heads = chosen_of(self.head)
        if heads is None:
            return edited
        kept = weights.clone()
        kept[..., list(heads)] = edited[..., list(heads)]
        return kept


@dataclass(frozen=True, kw_only=True)
class ZeroGate(GateIntervention):
    """Close the gate: values are the layer's own."""

    name = "zero"

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
        return torch.zeros_like(weights)


@dataclass(frozen=True, kw_only=True)
class OpenGate(GateIntervention):
    """Set the gate to one value everywhere."""

    name = "open"

    value: float = 1.0
    """What every token and head gets."""

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
        return torch.full_like(weights, self.value)


@dataclass(frozen=True, kw_only=True)
class ScaleGate(GateIntervention):
    """Multiply the gate."""

    name = "scale"

    factor: float
    """By how much."""

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
        return weights * self.factor


@dataclass(frozen=True, kw_only=True)
class MeanGate(GateIntervention):
    """Replace each head's gate by its mean over tokens, fitted on other data.

    Means per position count a token's place in its window. Those per category need the tags of
    what is running; a tagger reads whole sentences, so they are not causal.
    """

    name = "mean"

    means: Mapping[str, np.ndarray] = field(repr=False)
    """From :func:`satlens.fit_means`, on the pool split; a plain mapping holds means per head."""
    tags: Tags | None = field(default=None, repr=False)
    """Of the documents that the analysis inside the context runs, for means per category."""

    @property
    def causal(self) -> bool:
        return per_of(self.means) != "category"

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
        return mean_weights(type(self).__name__, self.means, site, weights, running, self.tags)


@dataclass(frozen=True, kw_only=True)
class FreezeGate(GateIntervention):
    """Give each head's gate one value for all tokens, as a static value residual does."""

    name = "freeze"

    values: Mapping[str, np.ndarray] = field(repr=False)
    """Hook point -> (K,); the best ones are from :func:`satlens.fit_static`, on the pool split."""

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
        return mean_weights(type(self).__name__, self.values, site, weights, running)


@dataclass(frozen=True, kw_only=True)
class ResampleGate(GateIntervention):
    """Replace a token's gates by those of a token at the same position of another document.

    All heads and layers take them from the same place. Which document it is depends on the seed,
    the position, the token and (in an analysis, to leave it out) the token's document, not on what
    else is in the batch.
    """

    name = "resample"

    donors: Donors = field(repr=False)
    """From :func:`satlens.fit_donors`, on the pool split."""
    seed: int = 0
    """Of the draws."""

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
        return resampled(type(self).__name__, self.donors, site, weights, running, self.seed)


@dataclass(frozen=True, kw_only=True)
class ShuffleGate(GateIntervention):
    """Permute gates among the real tokens of a context, all heads and layers together.

    A token then receives a later token's gate, so this is not causal. The permutation depends on
    the seed and the context's real tokens alone: not on batch size, padding or order.
    """

    name = "shuffle"

    seed: int = 0
    """Of the permutations."""

    @property
    def causal(self) -> bool:
        return False

    def edit(self, weights: Tensor, site: AccessSite, running: Running) -> Tensor:
        if running.tokens.shape[1] != weights.shape[1]:
            raise AnalysisError("ShuffleGate: it needs whole contexts, as model(tokens) runs them")
        index = running.permutation(self.seed)
        return weights.gather(1, index[..., None].expand_as(weights))


# -- installing ------------------------------------------------------------------------------------


@contextmanager
def intervene(model: Decoder, *interventions: Intervention) -> Iterator[Decoder]:
    """Apply interventions to every forward pass inside the context, in the order given.

    A model generates under them as under one full pass over the final sequence. A cache stays with
    the interventions it was begun under.

    Raises:
        HookError: a layer, head, role or sublayer that the model does not have; inside the context,
            a pass with a cache under an intervention that is not causal, or under others than the
            cache was begun with.
        AnalysisError: an intervention on gates or routes of a model without any; something that is
            no intervention.
    """
    for one in interventions:
        if not isinstance(one, Intervention):
            what = f"the class {one.__name__}" if isinstance(one, type) else repr(one)
            raise AnalysisError(
                f"intervene: {what}: not an intervention; give instances, as ZeroGate(layer=3)"
            )
    running = Running(model)
    hooks = [hook for one in interventions for hook in one.hooks(model, running)]
    hooks += [look for one in interventions for look in one.looks(model, running)]
    acausal = [type(one).__name__ for one in interventions if not one.causal]
    with ExitStack() as stack:
        begin = partial(_begin, running, acausal)
        before = model.register_forward_pre_hook(begin, with_kwargs=True)
        stack.callback(before.remove)
        stack.callback(model.register_forward_hook(partial(_end, running)).remove)
        for one in interventions:
            stack.enter_context(one.switched(model))
        stack.enter_context(model.hooks(hooks))
        yield model


def _begin(
    running: Running,
    acausal: Sequence[str],
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Before each forward: what it reads."""
    if kwargs.get("past") is not None and acausal:
        raise HookError(f"{acausal[0]}: it reads later tokens, so it cannot run with a cache")
    running.begin(args, kwargs)


def _end(running: Running, model: Any, args: Any, output: Any) -> None:
    """After each forward: what it gave, which a later one may continue."""
    running.end(output)


def _plain(value: Any) -> Any:
    if isinstance(value, SiteValues):
        return value.identity
    if isinstance(value, Tags):
        codes = np.concatenate([document.category for document in value.documents])
        return {"tagger": value.tagger, "sha256": hashlib.sha256(codes.tobytes()).hexdigest()}
    if isinstance(value, Mapping):
        return {key: np.asarray(array).tolist() for key, array in value.items()}
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else value
