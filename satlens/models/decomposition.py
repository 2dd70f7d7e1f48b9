"""What cached activations consist of: a read of its components, a head's output of two values.

Works on anything that maps hook points to activations, with or without the batch axis. Shapes: M
components, B batch, T position, D model width, H query heads, K KV heads, E head width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from satlens.errors import HookError
from satlens.models.reads import Read, component_hooks, reads_of


class HeadOutputs(NamedTuple):
    """Two parts of what heads put out; their sum is all of it."""

    v_first: Tensor
    """What comes from the first layer's values, V_1."""
    rest: Tensor
    """What comes from the layer's own values."""


def read_at(model: Any, layer: int, mlp_input: bool, role: str | None) -> Read:
    """The read of a sublayer; layer n_layers is the final norm's.

    Raises:
        HookError: no such layer; a role that the read does not have, or several and none named.
    """
    n_layers = model.cfg.n_layers
    last = n_layers - 1 if mlp_input else n_layers
    if not 0 <= layer <= last:
        raise HookError(f"layer: {layer} is outside of 0 to {last}")
    sublayer = "out" if layer == n_layers else "mlp" if mlp_input else "attn"
    reads = {
        read.role: read
        for read in reads_of(model.hook_dict, n_layers)
        if (read.layer, read.sublayer) == (layer, sublayer)
    }
    if role is None and len(reads) == 1:
        return next(iter(reads.values()))
    if role not in reads:
        given = "give one of" if role is None else f"{role!r} is none of"
        place = "output" if layer == n_layers else f"layer {layer} {sublayer}"
        raise HookError(f"role: {given} the roles of the {place} read: {', '.join(reads)}")
    return reads[role]


def scale_point(model: Any, read: Read) -> str:
    """The hook point of the scale that a read is divided by.

    Raises:
        HookError: the read is not normalised.
    """
    if read.sublayer == "out":
        return "ln_final.hook_scale"
    at = f"blocks.{read.layer}."
    if read.sublayer == "mlp":
        return f"{at}ln2.hook_scale"
    own, shared = f"{at}ln1_{read.role}.hook_scale", f"{at}ln1.hook_scale"
    if own in model.hook_dict:
        return own
    if read.role == "r":
        raise HookError(f"apply_ln: {read.hook} feeds the residual and is not normalised")
    return shared


def parts_of_read(model: Any, cache: Any, read: Read, chosen: list[int], what: str) -> Tensor:
    """Chosen components times their effective routes, (M, B, T, D); all of them are the read.

    Args:
        cache: activations by hook point.
        chosen: numbers of components; the embedding is 0, sublayer m is m + 1.
        what: who asks, for errors.

    Raises:
        HookError: nothing chosen; activations that are missing, by name.
    """
    if not chosen:
        raise HookError(f"{what}: {read.hook} has no such parts")
    every = component_hooks(model.cfg.n_layers)
    hooks = [every[m] for m in chosen]
    require(cache, hooks, what)
    components = torch.stack([cache[hook] for hook in hooks])
    lead = components.shape[1:-1]
    recorded = _Recorded(model, cache, read, lead, what)
    for hook, coefficients in model.stream.unfold(model, recorded):
        if hook == read.hook:
            c = coefficients[0][:, chosen].movedim(1, 0)
            c = c if c.ndim == 3 else c[..., None]
            c = c.expand(-1, lead.numel(), -1).reshape(len(chosen), *lead, -1)
            return (c * components.double()).to(components.dtype)
    raise AssertionError(f"{read.hook} was not unfolded")


def require(cache: Any, hooks: Iterable[str], what: str) -> None:
    """Refuse a cache that lacks some activations.

    Raises:
        HookError: naming them.
    """
    missing = [hook for hook in hooks if hook not in cache]
    if missing:
        raise HookError(f"{what}: the cache lacks {', '.join(missing)}; add them to names_filter")


class _Recorded(dict[str, Tensor]):
    """Cached weights of all tokens as one row; what is missing is refused once it is needed."""

    def __init__(self, model: Any, cache: Any, read: Read, lead: torch.Size, what: str) -> None:
        names, n_layers = model.stream.unfolded_from(model.cfg), model.cfg.n_layers
        self.names = [name for name in names if _layer_of(name, n_layers) <= read.layer]
        self.what = what
        super().__init__(
            (name, cache[name].reshape(1, lead.numel(), *cache[name].shape[len(lead) :]))
            for name in names
            if name in cache
        )

    def __missing__(self, name: str) -> Tensor:
        require(self, self.names, self.what)
        raise KeyError(name)


def _layer_of(hook: str, n_layers: int) -> int:
    block = re.match(r"blocks\.(\d+)\.", hook)
    return int(block[1]) if block else n_layers


# -- values ----------------------------------------------------------------------------------------


def head_outputs(model: Any, cache: Any, layer: int, what: str) -> HeadOutputs:
    """The outputs of a layer's heads before W_O, split by where their values come from.

    Attention is linear in the values V' = scale V + gate V_1, so z = A V' is A (gate V_1) and the
    rest. Each part is (B, T, H, E).

    Raises:
        HookError: a layer without a value residual; activations that are missing, by name, or cut.
    """
    cfg = model.cfg
    if layer not in cfg.value_layers:
        mixing = ", ".join(map(str, cfg.value_layers)) or "none"
        raise HookError(
            f"{what}: layer {layer} adds no V_1 to its values; layers that do: {mixing}"
        )
    at = f"blocks.{layer}.attn.hook_"
    hooks = [at + name for name in ("z", "pattern", "v_gate", "v_first")]
    require(cache, hooks, what)
    z, pattern, gate, v_first = (cache[hook] for hook in hooks)
    first = gate[..., None] * v_first
    if z.ndim != v_first.ndim or pattern.shape[-1] != first.shape[-3]:
        raise HookError(
            f"{what}: needs every position that attention sees; cache without pos_slice"
        )
    by_head = first.repeat_interleave(cfg.n_heads // cfg.n_key_value_heads, dim=-2)
    first = torch.einsum("...hts,...she->...the", pattern, by_head)
    return HeadOutputs(first, z - first)
