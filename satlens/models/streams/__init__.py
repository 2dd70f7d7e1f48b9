"""Depth streams: how a sublayer reads what earlier ones wrote. One file a stream."""

from satlens.models.block import DepthStream
from satlens.models.streams.attnres import AttnRes, RoleDecoupled
from satlens.models.streams.delta import Delta
from satlens.models.streams.dense import Dense
from satlens.models.streams.hyper import Hyper
from satlens.models.streams.mudd import Mudd
from satlens.models.streams.residual import Residual

STREAMS: dict[str, type[DepthStream]] = {
    "residual": Residual,
    "attnres": AttnRes,
    "rd_attnres": RoleDecoupled,
    "hyper": Hyper,
    "dense": Dense,
    "mudd": Mudd,
    "delta": Delta,
}
