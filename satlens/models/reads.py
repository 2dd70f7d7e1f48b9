"""Reads: where sublayers take their input from, and the components it consists of. No torch.

A component is what one place writes: the embedding, then each sublayer's own output in order
(layer l: attention 2l, MLP 2l + 1). A read can contain those that were written before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

Sublayer = Literal["attn", "mlp", "out"]

_BLOCK = re.compile(r"blocks\.(\d+)\.hook_(attn|mlp)_read(?:_(\w+))?")
_OUT = "hook_out_read"
_RANK = {"attn": 0, "mlp": 1, "out": 2}


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a hook point of a read shows, before the norm."""

    hook: str
    """Hook point, (B, T, D)."""
    layer: int
    """Layer that reads; n_layers for the final norm."""
    sublayer: Sublayer
    role: str
    """What the read feeds; shared feeds all of the sublayer."""

    @property
    def n_components(self) -> int:
        """The embedding and the sublayers that ran before it."""
        return 1 + 2 * self.layer + (self.sublayer == "mlp")

    @property
    def name(self) -> str:
        """Short name, unique in the model: ``L3.attn.read``, ``L3.attn.read_v``, ``out``."""
        if self.sublayer == "out":
            return "out"
        role = "" if self.role == "shared" else f"_{self.role}"
        return f"L{self.layer}.{self.sublayer}.read{role}"


def reads_of(hooks: Iterable[str], n_layers: int) -> list[Read]:
    """The reads among a model's hook points, in order of execution.

    Args:
        hooks: names of hook points; roles of one read keep their order.
        n_layers: L.
    """
    found = [_read(hook, n_layers) for hook in hooks]
    reads = [read for read in found if read is not None]
    return sorted(reads, key=lambda read: (read.layer, _RANK[read.sublayer]))


def _read(hook: str, n_layers: int) -> Read | None:
    if hook == _OUT:
        return Read(hook=hook, layer=n_layers, sublayer="out", role="shared")
    match = _BLOCK.fullmatch(hook)
    if match is None:
        return None
    sublayer = cast(Sublayer, match[2])
    return Read(hook=hook, layer=int(match[1]), sublayer=sublayer, role=match[3] or "shared")


def component_names(n_layers: int) -> list[str]:
    """``embed, L0.attn, L0.mlp, L1.attn, ...``: 1 + 2 L names."""
    return ["embed", *(f"L{layer}.{s}" for layer in range(n_layers) for s in ("attn", "mlp"))]


def component_hooks(n_layers: int) -> list[str]:
    """Hook points of the components, (B, T, D) each."""
    at = (f"blocks.{layer}.hook_{s}_out" for layer in range(n_layers) for s in ("attn", "mlp"))
    return ["hook_embed", *at]
