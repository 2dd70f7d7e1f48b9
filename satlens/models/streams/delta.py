"""Delta Attention Residuals: a softmax over earlier additions, on top of the residual stream.

The read of sublayer s is h = h~ + sum_i a_i s_i with h~ the ordinary residual stream, never reset,
and the sources s_i of Attention Residuals: the embedding, completed block sums and the running sum
(block size 1: every sublayer output). The final norm receives h~ (arXiv 2605.18855).

The sources add up to h~ at every moment, so that h = sum_i (1 + a_i) s_i: the stream is that of
AttnRes with one added to each weight, and h~ needs no tensor of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from satlens.config import ModelConfig
from satlens.models.block import final_norm
from satlens.models.streams.attnres import AttnRes, AttnResState


class Delta(AttnRes):
    """Full (block size 1) and Block Delta Attention Residuals.

    With zero queries a read of n sources is (1 + 1/n) h~: the transformer whose norm there has
    eps / (1 + 1/n)^2.
    """

    @staticmethod
    def output_read(cfg: ModelConfig) -> None:
        return None

    @staticmethod
    def finish(model: Any, state: AttnResState, eager: bool) -> Tensor:
        return final_norm(model, state.total(), eager)
