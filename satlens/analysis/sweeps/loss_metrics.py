"""What an edited pass changes about the next-token distribution, token by token.

With clean logits l, edited logits l', p = softmax(l) and d = l' - l, centred as x = d - sum_v p d:

    KL(p || p') = log sum_v p e^x = log(1 + sum_v p (e^x - 1))
    NLL' - NLL  = sum_v p d - d[target] + KL

Both are small differences of large numbers; taken from d they keep their relative precision, and an
edit without an effect gives exact zeros. The change is top-1 where the clean pass's most likely
token is no longer the most likely one.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from satlens.models.loss import CHUNK_ELEMENTS, IGNORED, negative_log_likelihood

_LARGEST_EXPONENT = 60.0
"""Beyond it p e^x leaves fp32, where p may have vanished: such tokens are taken in fp64."""


class Change(NamedTuple):
    """What an edit changes, (N,) each; 0 where a token is not scored."""

    dnll: Tensor
    """Change in negative log-likelihood of the target, in nats."""
    kl: Tensor
    """KL divergence of the edited from the clean distribution, in nats."""
    top1: Tensor
    """1 where the most likely token changed."""


class CleanLosses:
    """The clean pass over some tokens, which edited ones are compared with.

    Args:
        logits: (N, V) in fp32 or wider.
        targets: (N,) ids, -100 where a token is not scored.
    """

    def __init__(self, logits: Tensor, targets: Tensor) -> None:
        self.logits, self.scored = logits, targets != IGNORED
        self.nll = negative_log_likelihood(logits, targets, per_token=True)
        """(N,) nats, 0 where not scored."""
        self.target = targets.masked_fill(~self.scored, 0)
        self.p = torch.empty_like(logits)
        self.top = torch.empty_like(targets)
        for rows in self._chunks():
            torch.softmax(logits[rows], -1, out=self.p[rows])
            torch.argmax(logits[rows], -1, out=self.top[rows])

    def _chunks(self) -> list[slice]:
        """Rows at a time: as many as stay in a CPU's cache."""
        n, width = self.logits.shape
        step = max(1, CHUNK_ELEMENTS // width) if self.logits.device.type == "cpu" else n
        return [slice(start, start + step) for start in range(0, n, step)]

    def change(self, logits: Tensor) -> Change:
        """What edited logits (N, V) change."""
        found = Change(*torch.empty(3, len(logits), dtype=logits.dtype, device=logits.device))
        for rows in self._chunks():
            d = logits[rows] - self.logits[rows]
            of_target = d.gather(-1, self.target[rows, None])[:, 0]
            mean = torch.linalg.vecdot(self.p[rows], d)
            x = d.sub_(mean[:, None])
            large = x.amax(-1) > _LARGEST_EXPONENT
            kl = torch.linalg.vecdot(self.p[rows], x.expm1_()).log1p_()
            found.kl[rows] = kl.clamp_min_(0.0)
            found.dnll[rows] = mean - of_target + kl
            best = logits[rows].gather(-1, self.top[rows, None])[:, 0]
            # A tie is no change; a distribution that is not defined has no most likely token.
            found.top1[rows] = torch.where(best.isnan(), best, (best < logits[rows].amax(-1)) * 1.0)
            if large.any():
                self._in_double(found, rows.start + large.nonzero()[:, 0], logits)
        return Change(*(values.masked_fill_(~self.scored, 0.0) for values in found))

    def _in_double(self, found: Change, rows: Tensor, logits: Tensor) -> None:
        clean, edited = (l[rows].double().log_softmax(-1) for l in (self.logits, logits))
        target = self.target[rows, None]
        found.kl[rows] = torch.linalg.vecdot(clean.exp(), clean - edited).to(found.kl.dtype)
        found.dnll[rows] = (clean - edited).gather(-1, target)[:, 0].to(found.dnll.dtype)
