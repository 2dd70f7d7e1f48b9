"""What cached activations consist of: a read of its components, a head's output of two values.

Works on anything that maps hook points to activations, with or without the batch axis. Shapes: M
components, B batch, T position, D model width, H query heads, K KV heads, E head width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from satlens.errors import HookError
from satlens.models.layers import at_least_fp32
from satlens.models.reads import Read, component_hooks, reads_of

UNFOLDED_BYTES = 2**27
"""Roughly how much memory the coefficients of the tokens unfolded at once may take."""


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
    reads = roles_at(model, layer, mlp_input)
    if role is None and len(reads) == 1:
        return next(iter(reads.values()))
    if role not in reads:
        given = "give one of" if role is None else f"{role!r} is none of"
        sublayer = "mlp" if mlp_input else "attn"
        place = "output" if layer == n_layers else f"layer {layer} {sublayer}"
        raise HookError(f"role: {given} the roles of the {place} read: {', '.join(reads)}")
    return reads[role]


def roles_at(model: Any, layer: int | None, mlp_input: bool) -> dict[str, Read]:
    """The reads of a sublayer by role; None, -1 or n_layers is the final norm, which has one."""
    n_layers = model.cfg.n_layers
    layer = n_layers if layer in (None, -1) else layer
    sublayer = "out" if layer == n_layers else "mlp" if mlp_input else "attn"
    return {
        read.role: read
        for read in reads_of(model.hook_dict, n_layers)
        if (read.layer, read.sublayer) == (layer, sublayer)
    }


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
    recorded, at, parts = _recorded(model, cache, read, lead, what), 0, []
    size = _at_once(model, recorded, read)
    for delta in components.reshape(len(hooks), lead.numel(), -1).split(size, 1):
        *_, coefficients = _unfolded_to(model, recorded.part(slice(at, at + size)), read)
        c = coefficients[0][:, chosen].movedim(1, 0)
        # Coefficients that nothing recorded tells are on the model's device.
        c = (c if c.ndim == 3 else c[..., None]).to(delta.device)
        parts.append((c * delta.double()).to(delta.dtype))
        at += size
    return torch.cat(parts, 1).view_as(components)


def _unfolded_to(model: Any, recorded: _Recorded, read: Read) -> Iterator[Tensor]:
    """Coefficients of the reads up to one, (1, N, M) or (1, N, M, D), N = 1 if static."""
    for hook, coefficients in model.stream.unfold(model, recorded):
        yield coefficients
        if hook == read.hook:
            return
    raise AssertionError(f"{read.hook} was not unfolded")


def _at_once(model: Any, recorded: _Recorded, read: Read) -> int:
    """Tokens whose coefficients fit, from those of the first."""
    first = _unfolded_to(model, recorded.part(slice(1)), read)
    n_numbers = sum(coefficients.numel() for coefficients in first)
    return max(1, UNFOLDED_BYTES // (8 * max(1, n_numbers)))


def require(cache: Any, hooks: Iterable[str], what: str) -> None:
    """Refuse a cache that lacks some activations.

    Raises:
        HookError: naming them.
    """
    missing = [hook for hook in hooks if hook not in cache]
    if missing:
        raise HookError(f"{what}: the cache lacks {', '.join(missing)}; add them to names_filter")


class _Recorded(dict[str, Tensor]):
    """Cached weights of tokens as one row; what is missing is refused once it is needed."""

    def __init__(self, weights: Mapping[str, Tensor], names: list[str], what: str) -> None:
        super().__init__(weights)
        self.names, self.what = names, what

    def part(self, tokens: slice) -> _Recorded:
        """The same of some tokens."""
        some = {name: weights[:, tokens] for name, weights in self.items()}
        return _Recorded(some, self.names, self.what)

    def __missing__(self, name: str) -> Tensor:
        require(self, self.names, self.what)
        raise KeyError(name)


def _recorded(model: Any, cache: Any, read: Read, lead: torch.Size, what: str) -> _Recorded:
    """The weights that a read may depend on, of all tokens."""
    names, n_layers = model.stream.unfolded_from(model.cfg), model.cfg.n_layers
    weights = {
        name: cache[name].reshape(1, lead.numel(), *cache[name].shape[len(lead) :])
        for name in names
        if name in cache
    }
    needed = [name for name in names if _layer_of(name, n_layers) <= read.layer]
    return _Recorded(weights, needed, what)


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
    # Under autocast they are of several dtypes.
    z, pattern, gate, v_first = (at_least_fp32(cache[hook]) for hook in hooks)
    first = gate[..., None] * v_first
    if z.ndim != v_first.ndim or pattern.shape[-1] != first.shape[-3]:
        raise HookError(
            f"{what}: needs every position that attention sees; cache without pos_slice"
        )
    by_head = first.repeat_interleave(cfg.n_heads // cfg.n_key_value_heads, dim=-2)
    first = torch.einsum("...hts,...she->...the", pattern, by_head)
    return HeadOutputs(first, z - first)
