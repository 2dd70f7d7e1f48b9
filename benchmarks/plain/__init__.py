"""Depth streams as one would first write them: stack the sources, norm them, einsum.

They are what satlens' streams are timed against and checked by. Parameters have the same names, so
a state dict of one form loads into the other; hook points of routes and reads do not exist here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from plain.delta import PlainDelta
from plain.dense import PlainDense
from plain.hyper import PlainHyper
from plain.mudd import PlainMudd
from satlens.config import ModelConfig
from satlens.models.block import DepthStream
from satlens.models.decoder import Decoder
from satlens.models.streams import STREAMS

PLAIN: dict[str, type[DepthStream]] = {
    "dense": PlainDense,
    "mudd": PlainMudd,
    "hyper": PlainHyper,
    "delta": PlainDelta,
}
"""Plain formulations by kind of stream."""


@contextmanager
def _built_of(streams: dict[str, type[DepthStream]]) -> Iterator[None]:
    """Inside the context, these stand for the streams of their kinds."""
    before = dict(STREAMS)
    STREAMS.update(streams)
    try:
        yield
    finally:
        STREAMS.update(before)


@contextmanager
def plain_streams() -> Iterator[None]:
    """Inside the context, models are built of plain streams where there is one."""
    with _built_of(PLAIN):
        yield


def plain_model(cfg: ModelConfig, seed: int | None = 0) -> Decoder:
    """The decoder of a configuration with its stream in the plain formulation.

    Raises:
        KeyError: the kind of stream has no plain formulation.
    """
    with _built_of({cfg.stream.kind: PLAIN[cfg.stream.kind]}):
        return Decoder(cfg, seed=seed)
