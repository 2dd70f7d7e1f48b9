"""Effective routes over a corpus: what one pass adds up about the components of every read.

A component is the embedding or one sublayer's own output (:mod:`satlens.models.reads`); its
coefficient in a read comes from the model's own recorded weights, unfolded token by token
(:meth:`satlens.models.block.DepthStream.unfold`), and the components times their coefficients have
to add up to the read that was recorded beside them.

Shapes: B rows, N tokens at once, M components, D model width, R reads, C cells (read by read,
component by component).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.accumulators import Accumulator, GroupSums, Maxima
from satlens.analysis.stats import divide
from satlens.analysis.stream import Observed, Transform, kept_tokens
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.decomposition import UNFOLDED_BYTES
from satlens.models.reads import component_hooks, component_names, reads_of

CAPTURED_BYTES = 2**31
"""How much memory the components and reads that a pass captures of one batch may take."""

_OF_CELLS = ("coefficient", "share", "signed_share")
_MOMENTS = ("absolute", "squares")
_OF_READS = ("n", "undefined", "effective", "negative", "embedding", "read_squares")


def windows_at_once(model: Decoder, batch_size: int, max_tokens: int | None = None) -> int:
    """Windows in a batch of a pass that unfolds: fewer where too much would be captured.

    Every component and read of every layer is captured before any is unfolded: of a window of T
    tokens 1 + 2 L components and 2 L + 1 reads (5 L + 1 with four at an attention), T x D each. At
    24 layers of 1024 in windows of 2048 that is 0.8 GB (1.4 GB); one window is the least.

    Args:
        batch_size: the most.
        max_tokens: of a document, if documents are cut.
    """
    length = min(model.cfg.n_ctx, max_tokens or model.cfg.n_ctx)
    n_captured = 1 + 2 * model.cfg.n_layers + len(reads_of(model.hook_dict, model.cfg.n_layers))
    window = n_captured * length * model.cfg.d_model * max(4, model.dtype.itemsize)
    return min(batch_size, max(1, CAPTURED_BYTES // window))


class Unfolded(NamedTuple):
    """One read of N tokens, the components that can be in it."""

    index: int
    """Number of the read."""
    coefficient: Tensor
    """(N, M), the mean over channels where coefficients differ between them."""
    size: Tensor
    """Norm of each component's contribution, (N, M)."""
    error: Tensor
    """Norm of the difference between the read and its components' sum, (N,)."""
    read: Tensor
    """Norm of the read, (N,)."""


class Unfolder:
    """Unfolds the recorded weights of a pass, some tokens at a time."""

    def __init__(self, model: Decoder) -> None:
        n_layers = model.cfg.n_layers
        self.model = model
        self.reads = reads_of(model.hook_dict, n_layers)
        self.components = component_hooks(n_layers)
        self.weights = model.stream.unfolded_from(model.cfg)
        reads = (read.hook for read in self.reads)
        self.points = list(dict.fromkeys((*self.weights, *self.components, *reads)))
        """Hook points that it needs."""
        self.channels: list[int] | None = None
        """Of each read: D where its coefficients differ between channels, else 1; known once a
        token was unfolded."""
        self._n_numbers = 0

    def at_once(self, flat: Mapping[str, Tensor], n_more: int = 0) -> int:
        """Tokens to unfold at once; ``n_more`` numbers a token are made of them elsewhere."""
        if self.channels is None:
            recorded = {name: flat[name][None, :1] for name in self.weights}
            unfolded = [c for _, c in self.model.stream.unfold(self.model, recorded)]
            self.channels = [1 if c.ndim == 3 else c.shape[-1] for c in unfolded]
            self._n_numbers = 4 * len(self.components) * self.model.cfg.d_model
            self._n_numbers += sum(c.numel() for c in unfolded)
        return max(1, UNFOLDED_BYTES // (8 * (self._n_numbers + n_more)))

    def unfold(self, flat: Mapping[str, Tensor], tokens: Tensor) -> Iterator[Unfolded]:
        """Every read of some tokens, in order of execution.

        Args:
            flat: activations of ``points``, (B T, ...) each.
            tokens: places in B T, (N,).
        """
        recorded = {name: flat[name][tokens][None] for name in self.weights}
        delta = torch.stack([flat[name][tokens].double() for name in self.components], dim=1)
        norms = torch.linalg.vector_norm(delta, dim=-1)
        unfolded = self.model.stream.unfold(self.model, recorded)
        for (index, read), (hook, c) in zip(enumerate(self.reads), unfolded, strict=True):
            assert hook == read.hook, f"{hook} was unfolded in the place of {read.hook}"
            m = read.n_components
            c = c[0, :, :m].expand(len(tokens), m, *c.shape[3:])
            if c.ndim == 3:
                parts = c * delta[:, :m]
                size, total = torch.linalg.vector_norm(parts, dim=-1), parts.sum(1)
                c = c.mean(-1)
            else:
                size, total = c.abs() * norms[:, :m], (c[:, None] @ delta[:, :m])[:, 0]
            found = flat[read.hook][tokens].double()
            error = torch.linalg.vector_norm(total - found, dim=-1)
            yield Unfolded(index, c, size, error, torch.linalg.vector_norm(found, dim=-1))


class EffectiveRoutes:
    """Coefficients of every component in every read, and what share of its size each is.

    The share of a component is ||c_m delta_m|| over the sum of that over all components, per token;
    its signed share has the sign of the coefficient. A token is undefined at a read where one of
    these is not finite or all components are zero.

    Args:
        model: the model that is run, whose stream unfolds its weights.
        n_groups: document groups.
    """

    needs_nll = False

    def __init__(self, model: Decoder, n_groups: int) -> None:
        self.model = model
        self.unfolder = Unfolder(model)
        self.reads = self.unfolder.reads
        self.names = component_names(model.cfg.n_layers)
        widths = [read.n_components for read in self.reads]
        self.read_of = np.repeat(np.arange(len(widths)), widths)
        self.component_of = np.concatenate([np.arange(width) for width in widths])
        starts = np.cumsum([0, *widths])
        self.cells = [slice(*ends) for ends in pairwise(starts)]
        self.hooks: dict[str, Transform | None] = dict.fromkeys(self.unfolder.points)
        n_cells, n_reads = len(self.read_of), len(self.reads)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_OF_CELLS, (n_cells,))
        self.sums = GroupSums(n_groups, shapes | dict.fromkeys(_OF_READS, (n_reads,)))
        # What gets no interval needs no groups.
        self.moments = GroupSums(1, dict.fromkeys(_MOMENTS, (n_cells,)))
        self.first = GroupSums(1, {"n": (n_reads,), "embedding": (n_reads,)})
        self.largest_error = Maxima((n_reads,))
        self.channels = Maxima((n_reads,))
        self.accumulators: Mapping[str, Accumulator] = {
            "sums": self.sums,
            "moments": self.moments,
            "first": self.first,
            "largest_error": self.largest_error,
            "channels": self.channels,
        }
        self.identity: dict[str, Any] = {
            "reducer": "effective routes",
            "hooks": list(self.hooks),
            "groups": n_groups,
        }

    # -- a batch ------------------------------------------------------------------------------

    def update(self, seen: Observed) -> None:
        """Add one batch.

        Raises:
            AnalysisError: a read is not the sum of its unfolded components.
        """
        flat = {name: tensor.flatten(0, 1) for name, tensor in seen.captured.items()}
        kept, starts = kept_tokens(seen.batch), seen.batch.valid & seen.batch.first
        rows = self._rows(len(seen.groups), kept.device)
        # These stay on the device for the batch: to move each number would wait for it.
        worst = kept.new_full((len(self.reads),), -torch.inf, dtype=torch.float64)
        first = kept.new_zeros(2, len(self.reads), dtype=torch.float64)
        for tokens, row in self._parts(kept, flat):
            for unfolded in self.unfolder.unfold(flat, tokens):
                self._add(rows, worst, row, unfolded)
        self.largest_error.add(worst[None])
        sums = {name: rows[name] for name in (*_OF_CELLS, *_OF_READS)}
        self.sums.add(seen.groups, **sums)
        one_group = np.zeros(len(seen.groups), dtype=np.int64)
        self.moments.add(one_group, **{name: rows[name] for name in _MOMENTS})
        for tokens, _ in self._parts(starts, flat):
            self._add_first(first, flat, tokens)
        self.first.add(one_group[:1], n=first[:1], embedding=first[1:])
        self._require_identity()

    def _rows(self, n_rows: int, device: torch.device) -> dict[str, Tensor]:
        widths = dict.fromkeys((*_OF_CELLS, *_MOMENTS), len(self.read_of))
        widths |= dict.fromkeys(_OF_READS, len(self.reads))
        return {
            name: torch.zeros(n_rows, width, dtype=torch.float64, device=device)
            for name, width in widths.items()
        }

    def _parts(self, chosen: Tensor, flat: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Chosen tokens (B, T) some at a time: their places in B T, and the row of each."""
        size = self.unfolder.at_once(flat)
        self.channels.add(torch.tensor(self.unfolder.channels)[None])
        for part in chosen.flatten().nonzero()[:, 0].split(size):
            if len(part):
                yield part, part // chosen.shape[1]

    def _add(self, rows: dict[str, Tensor], worst: Tensor, row: Tensor, unfolded: Unfolded) -> None:
        """Add the tokens of one read to the rows they belong to, the largest error to ``worst``."""
        index, c, size, error, read = unfolded
        total = size.sum(1, keepdim=True)
        defined = (total > 0) & total.isfinite() & c.isfinite().all(1, keepdim=True)
        share, c = (torch.where(defined, x, 0.0) for x in (size / total, c))
        cells = {
            "coefficient": c,
            "share": share,
            "signed_share": share * c.sign(),
            "absolute": c.abs(),
            "squares": c.square(),
        }
        for name, values in cells.items():
            rows[name][:, self.cells[index]].index_add_(0, row, values)
        reads = {
            "n": defined[:, 0].double(),
            "undefined": (~defined)[:, 0].double(),
            "effective": torch.special.entr(share).sum(1).exp() * defined[:, 0],
            "negative": (share * (c < 0)).sum(1),
            "embedding": share[:, 0],
            "read_squares": torch.where(defined[:, 0], read.square(), 0.0),
        }
        for name, values in reads.items():
            rows[name][:, index].index_add_(0, row, values)
        largest = torch.where(defined[:, 0], error, -torch.inf).amax()
        worst[index] = torch.maximum(worst[index], largest)

    def _add_first(self, first: Tensor, flat: Mapping[str, Tensor], tokens: Tensor) -> None:
        """Add how many first tokens of contexts have an embedding's share, and it, to (2, R)."""
        for index, _, size, _, _ in self.unfolder.unfold(flat, tokens):
            share = size[:, 0] / size.sum(1)
            defined = share.isfinite()
            first[0, index] += defined.sum()
            first[1, index] += torch.where(defined, share, 0.0).sum()

    @property
    def per_channel(self) -> np.ndarray:
        """(R,) reads whose coefficients differ between channels, so that ours are their means."""
        return self.channels.values > 1

    # -- the identity -------------------------------------------------------------------------

    def identity_errors(self) -> np.ndarray:
        """(R,) the largest error of a token by the root mean square of the reads' norms."""
        n, squares = (self.sums[name].sum(axis=0) for name in ("n", "read_squares"))
        errors = np.where(n > 0, self.largest_error.values, np.nan)
        return divide(errors, np.sqrt(divide(squares, n)))

    @property
    def tolerance(self) -> float:
        """What the errors may be at the model's precision."""
        rounding = 4 * torch.finfo(self.model.dtype).eps
        return max(self.model.stream.unfold_tolerance, rounding)

    def _require_identity(self) -> None:
        errors = self.identity_errors()
        if np.isnan(errors).all():
            return
        worst = int(np.nanargmax(errors))
        if errors[worst] > self.tolerance:
            raise AnalysisError(
                f"routes: {self.reads[worst].hook}: its components miss it by "
                f"{errors[worst]:.1e} of its size, more than {self.tolerance:.0e}; a hook that "
                "edits a read is outside of what unfolds"
            )
