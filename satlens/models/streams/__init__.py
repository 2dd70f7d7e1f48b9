"""Depth streams: how a sublayer reads what earlier ones wrote. One file a stream."""

from satlens.models.block import DepthStream
from satlens.models.streams.attnres import AttnRes, RoleDecoupled
from satlens.models.streams.residual import Residual

STREAMS: dict[str, type[DepthStream]] = {
    "residual": Residual,
    "attnres": AttnRes,
    "rd_attnres": RoleDecoupled,
}
