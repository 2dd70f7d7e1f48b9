"""Interventions on gates and routes, installed for the length of a ``with`` block.

    with satlens.intervene(model, satlens.ZeroGate(layer=3, head=1)):
        logits = model(tokens)

An intervention names its target by layer, head, role and sublayer (None means all) and replaces
exactly those weights; everything below the first of them is the clean pass to the bit. Several
apply in the order given. Nothing stays installed, also after an exception. Those on gates are here,
those on routes in :mod:`satlens.analysis.route_interventions`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.means import Means, mean_weights
from satlens.analysis.stream import current_batch
from satlens.data.tokenizers import special_ids
from satlens.errors import AnalysisError, HookError
from satlens.models.cache import KVCache
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite

Which = int | str | Sequence[int] | Sequence[str] | None
HookFunction = Callable[..., Tensor | None]


class Tokens:
    """What the running forward pass reads, for interventions that depend on positions."""

    tokens: Tensor | None = None
    """(B, T) ids."""
    valid: Tensor | None = None
    """(B, T) real, non-special tokens."""
    start: int = 0
    """Position of the first of them: those before it are in a cache."""

    def __init__(self, special: frozenset[int] = frozenset()) -> None:
        self.special = torch.tensor(sorted(special), dtype=torch.int64)
        self.permutations: dict[int, Tensor] = {}
        """By seed, for the running pass."""


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """Base: where it applies. A subclass says what it makes of the weights there."""

    kind: ClassVar[Literal["gate", "route"]]
    """What it applies to."""
    name: ClassVar[str]
    """Its name in tables."""
    target: ClassVar[str]
    """What kind of site it needs, for errors."""
    causal: ClassVar[bool] = True
    """Whether a token's weight depends on earlier tokens only; others cannot run with a cache."""

    layer: int | Sequence[int] | None = None
    """Layers that take; n_layers is the output read."""
    role: str | Sequence[str] | None = None
    """Roles: v of gates; shared, qk, q, k, v or r of routes."""
    sublayer: str | Sequence[str] | None = None
    """Sublayers that take: attn, mlp, depth (after a layer), out."""

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
        for axis in ("layer", "role", "sublayer"):
            wanted = _chosen(getattr(self, axis))
            if wanted is None:
                continue
            present = {getattr(site, axis): None for site in found}
            for value in wanted:
                if value not in present:
                    raise HookError(
                        f"{type(self).__name__}: {axis} {value!r}: no {self.kind} there; "
                        f"{axis}s with one: {', '.join(map(str, present))}"
                    )
            found = [site for site in found if getattr(site, axis) in wanted]
        return found

    @classmethod
    def fits(cls, site: AccessSite) -> bool:
        """Whether it means something at a site."""
        return site.kind == cls.kind

    def hooks(self, model: Decoder, running: Tokens) -> list[tuple[str, HookFunction]]:
        """(hook point, function) of every site it names."""
        return self._identified(
            (site.hook, partial(self._at, site=site, running=running)) for site in self.sites(model)
        )

    def _identified(
        self, hooks: Iterable[tuple[str, HookFunction]]
    ) -> list[tuple[str, HookFunction]]:
        """Hooks that a cache knows again when the same intervention is installed anew."""
        marked, identity = list(hooks), (type(self), self.identity)
        for _, function in marked:
            function.hook_identity = identity  # type: ignore[attr-defined]
        return marked

    def edit(self, weights: Tensor, site: AccessSite, running: Tokens) -> Tensor:
        """New weights (B, T, n) for all of a site; the caller's are not written to."""
        raise NotImplementedError

    def _at(self, weights: Tensor, hook: Any, *, site: AccessSite, running: Tokens) -> Tensor:
        return self.edit(weights, site, running).to(weights.dtype)

    @property
    def identity(self) -> dict[str, Any]:
        """Its name and settings, ready for JSON."""
        settings = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"name": self.name, "kind": self.kind, **{k: _plain(v) for k, v in settings.items()}}


# -- gates -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GateIntervention(Intervention):
    """Base of interventions on gates, which also have heads."""

    kind = "gate"
    target = "gates"

    head: int | Sequence[int] | None = None
    """KV heads."""

    def sites(self, model: Decoder) -> list[AccessSite]:
        found = super().sites(model)
        n_heads = min(site.n_heads for site in found)
        for head in _chosen(self.head) or ():
            if not isinstance(head, int) or not 0 <= head < n_heads:
                raise HookError(
                    f"{type(self).__name__}: head {head!r}: gates have the KV heads "
                    f"0 to {n_heads - 1}"
                )
        return found

    def _at(self, weights: Tensor, hook: Any, *, site: AccessSite, running: Tokens) -> Tensor:
        edited = self.edit(weights, site, running).to(weights.dtype)
        heads = _chosen(self.head)
        if heads is None:
            return edited
        kept = weights.clone()
        kept[..., list(heads)] = edited[..., list(heads)]
        return kept


@dataclass(frozen=True, kw_only=True)
class ZeroGate(GateIntervention):
    """Close the gate: values are the layer's own."""

    name = "zero"

    def edit(self, weights: Tensor, site: AccessSite, running: Tokens) -> Tensor:
        return torch.zeros_like(weights)


@dataclass(frozen=True, kw_only=True)
class OpenGate(GateIntervention):
    """Set the gate to one value everywhere."""

    name = "open"

    value: float = 1.0
    """What every token and head gets."""

    def edit(self, weights: Tensor, site: AccessSite, running: Tokens) -> Tensor:
        return torch.full_like(weights, self.value)


@dataclass(frozen=True, kw_only=True)
class ScaleGate(GateIntervention):
    """Multiply the gate."""

    name = "scale"

    factor: float
    """By how much."""

    def edit(self, weights: Tensor, site: AccessSite, running: Tokens) -> Tensor:
        return weights * self.factor


@dataclass(frozen=True, kw_only=True)
class MeanGate(GateIntervention):
    """Replace each head's gate by its mean over tokens, fitted on other data."""

    name = "mean"

    means: Means = field(repr=False)
    """From :func:`satlens.fit_means`, on the pool split."""

    def edit(self, weights: Tensor, site: AccessSite, running: Tokens) -> Tensor:
        return mean_weights(type(self).__name__, self.means, site, weights)


@dataclass(frozen=True, kw_only=True)
class ShuffleGate(GateIntervention):
    """Permute gates among the real tokens of a context, all heads and layers together.

    A token then receives a later token's gate, so this is not causal. The permutation depends on
    the seed and the context's real tokens alone: not on batch size, padding or order.
    """

    name = "shuffle"
    causal = False

    seed: int = 0
    """Of the permutations."""

    def edit(self, weights: Tensor, site: AccessSite, running: Tokens) -> Tensor:
        index = running.permutations.get(self.seed)
        if index is None:
            index = _permutations(running, self.seed, weights.shape[1])
            running.permutations[self.seed] = index
        return weights.gather(1, index[..., None].expand_as(weights))


def _permutations(running: Tokens, seed: int, length: int) -> Tensor:
    """(B, T) index that permutes the valid positions of each row and keeps the others."""
    tokens, valid = running.tokens, running.valid
    if tokens is None or valid is None or tokens.shape[1] != length:
        raise AnalysisError("ShuffleGate: it needs whole contexts, as model(tokens) runs them")
    index = torch.arange(length).repeat(len(tokens), 1)
    for row, (ids, real) in enumerate(zip(tokens.cpu(), valid.cpu(), strict=True)):
        places = real.nonzero()[:, 0]
        content = f"{seed}:".encode() + ids[places].numpy().astype("<i8").tobytes()
        entropy = int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
        order = np.random.default_rng(entropy).permutation(len(places))
        index[row, places] = places[torch.from_numpy(order)]
    return index.to(tokens.device)


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
        AnalysisError: an intervention on gates or routes of a model without any.
    """
    special = frozenset() if model.tokenizer is None else special_ids(model.tokenizer)
    running = Tokens(special)
    hooks = [hook for one in interventions for hook in one.hooks(model, running)]
    acausal = [type(one).__name__ for one in interventions if not one.causal]
    note = partial(_note, running, acausal)
    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with model.hooks(hooks):
            yield model
    finally:
        handle.remove()


def _note(
    running: Tokens,
    acausal: Sequence[str],
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Before each forward: which tokens it reads and which of them are real."""
    past = kwargs.get("past")
    if past is not None and acausal:
        raise HookError(f"{acausal[0]}: it reads later tokens, so it cannot run with a cache")
    tokens = args[0] if args else kwargs.get("tokens")
    if tokens is not None and not isinstance(tokens, Tensor):
        tokens = model.to_tokens(tokens)
    running.tokens = tokens
    running.start = len(past) if isinstance(past, KVCache) else 0
    running.permutations.clear()
    batch = current_batch()
    if running.tokens is None:
        running.valid = None
    elif batch is not None and batch.tokens is running.tokens:
        running.valid = batch.valid
    else:
        special = running.special.to(running.tokens.device)
        running.valid = ~torch.isin(running.tokens, special)
        for name, padding in (("documents", -1), ("attention_mask", 0)):
            if kwargs.get(name) is not None:
                running.valid &= kwargs[name] != padding


def _chosen(which: Which) -> tuple[Any, ...] | None:
    """One value or several as a tuple; None stays None, which means all."""
    if which is None:
        return None
    if isinstance(which, int | str):
        return (which,)
    return tuple(which)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: np.asarray(mean).tolist() for key, mean in value.items()}
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else value
