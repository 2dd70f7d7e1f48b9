"""Access sites: where a later computation takes something from an earlier depth. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SourceKind = Literal["embedding", "block", "partial", "cumulative", "stream", "v_first"]
EMBEDDING_INDEX = -1
_FAMILIES: dict[SourceKind, str] = {
    "embedding": "embedding",
    "block": "blocks",
    "partial": "partial",
    "cumulative": "states",
    "stream": "streams",
    "v_first": "v_first",
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One thing a site can take, typed by where it comes from."""

    kind: SourceKind
    """embedding; block: a completed sum of sublayer outputs (of one, where blocks have one);
    partial: the running sum of the current block; cumulative: the state after a layer, itself a
    mixture of earlier ones; stream: one of several parallel streams; v_first: the first layer's
    values."""
    first: int | None = None
    """First sublayer in the sum (layer l: attention 2l, MLP 2l+1)."""
    last: int | None = None
    """Last sublayer in the sum, or that a cumulative state contains."""
    index: int | None = None
    """Number of a stream."""

    @property
    def sublayers(self) -> tuple[int, ...]:
        """The sublayers whose outputs it sums; the embedding is -1. Cumulative states and streams
        are no such sums: see the effective routes."""
        if self.kind == "embedding":
            return (EMBEDDING_INDEX,)
        if self.first is None or self.last is None:
            return ()
        return tuple(range(self.first, self.last + 1))

    @property
    def family(self) -> str:
        """What sources of its kind are called together: embedding, blocks, partial, states,
        streams or v_first."""
        return _FAMILIES[self.kind]

    @property
    def label(self) -> str:
        """Short name for tables and axes."""
        match self.kind:
            case "embedding":
                return "embed"
            case "v_first":
                return "V_1"
            case "stream":
                return f"stream {self.index}"
            case "cumulative":
                return f"state ..{self.last}"
            case _:
                return f"{self.kind} {self.first}..{self.last}"


EMBEDDING = Source(kind="embedding")
V_FIRST = Source(kind="v_first")


@dataclass(frozen=True, kw_only=True)
class AccessSite:
    """One place of access: its hook point carries the weights."""

    hook: str
    """Hook point of the weights: (B, T, n_heads) for gates, (B, T, len(sources)) for routes."""
    kind: Literal["gate", "route"]
    layer: int
    """Layer that takes; n_layers for the output read."""
    sublayer: Literal["attn", "mlp", "depth", "out"]
    role: Literal["v", "qk", "q", "k", "r", "shared"]
    """What the mixture feeds; shared feeds all of the sublayer."""
    sources: tuple[Source, ...]
    """In the order of the weights."""
    support: Literal["simplex", "nonnegative", "signed"]
    """simplex: the weights of a token are a distribution."""
    per_token: bool
    """False for static weights, shown as expanded views."""
    base: Literal["none", "residual", "own"]
    """none: the mixture is the read; residual or own: it is added to a stream or to the layer's
    own value."""
    n_heads: int = 1
    """KV heads of a gate; 1 for routes."""

    @property
    def name(self) -> str:
        """Short name, unique in the model: ``L3.attn.v`` is a gate, ``L3.attn.route_v`` a route."""
        if self.sublayer == "out":
            return "out"
        role = self.role
        if self.kind == "route":
            role = "route" if role == "shared" else f"route_{role}"
        return f"L{self.layer}.{self.sublayer}.{role}"
