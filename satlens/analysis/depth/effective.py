"""Effective routes over a corpus: what one pass adds up about the components of every read.

A component is the embedding or one sublayer's own output (:mod:`satlens.models.reads`); its
coefficient in a read comes from the model's own recorded weights, unfolded token by token
(:meth:`satlens.models.block.DepthStream.unfold`), and the components times their coefficients have
to add up to the read. Of the components a pass keeps norms; the sum is made again on some tokens,
or on every token where hooks may change what the model computes.

Shapes: B rows, T positions, t positions at once, s positions checked, M components, D model width,
R reads, C cells (read by read, component by component).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.engine.accumulators import Accumulator, GroupSums, Maxima
from satlens.analysis.engine.rows import Ownership, as_rows, over_positions, some_positions, summed
from satlens.analysis.engine.stream import Observed, Transform, kept_tokens
from satlens.analysis.stats import divide
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.layers import at_least_fp32
from satlens.models.reads import component_hooks, component_names, reads_of

CAPTURED_BYTES = 2**31
"""How much memory what a pass captures of one batch may take."""
CHECKED_EVERY = 64
"""Of which positions of a window the components are added up again: 1, 65, 129, ..."""

_OF_CELLS = ("coefficient", "share", "signed_share")
_MOMENTS = ("absolute", "squares")
_OF_READS = ("n", "undefined", "effective", "negative", "embedding")


def windows_at_once(model: Decoder, batch_size: int, max_tokens: int | None = None) -> int:
    """Windows in a batch of a pass that unfolds: fewer where too much would be captured.

    A pass keeps norms of 1 + 2 L components and, of the positions that it checks, components and
    reads (2 L + 1, or 5 L + 1 with four at an attention) whole. Where coefficients differ between
    channels, or hooks are on the model, that is every position: at 24 layers of 1024 in windows of
    2048 0.8 GB a window (1.4 GB); one window is the least.

    Args:
        batch_size: the most.
        max_tokens: of a document, if documents are cut.
    """
    length = min(model.cfg.n_ctx, max_tokens or model.cfg.n_ctx)
    unfolder = Unfolder(model)
    n_components, n_reads = len(unfolder.components), len(unfolder.reads)
    n_checked = -(-length // unfolder.checked.step)
    n_whole = n_components * (length if unfolder.by_channel else n_checked) + n_reads * n_checked
    n_numbers = n_whole * model.cfg.d_model + n_components * length
    return min(batch_size, max(1, CAPTURED_BYTES // (n_numbers * max(4, model.dtype.itemsize))))


class Component(NamedTuple):
    """What is kept of a component."""

    norms: Tensor
    """(B, T)."""
    checked: Tensor
    """(B, s, D)."""
    whole: Tensor | None
    """(B, T, D), if coefficients differ between channels."""


class Unfolder:
    """Unfolds the recorded weights of a pass, some positions at a time."""

    def __init__(self, model: Decoder) -> None:
        n_layers = model.cfg.n_layers
        self.model = model
        self.reads = reads_of(model.hook_dict, n_layers)
        self.components = component_hooks(n_layers)
        self.weights = model.stream.unfolded_from(model.cfg)
        self.by_channel = model.stream.unfolds_by_channel(model.cfg)
        # What nothing can change adds up on every token if it does on some.
        self.checked = slice(1, None, 1 if model.editing_hooks() else CHECKED_EVERY)
        widths = [read.n_components for read in self.reads]
        self.read_of = np.repeat(np.arange(len(widths)), widths)
        self.component_of = np.concatenate([np.arange(width) for width in widths])
        keep = partial(_component, checked=self.checked, whole=self.by_channel)
        self.hooks: dict[str, Transform | None] = dict.fromkeys(self.weights)
        self.hooks |= dict.fromkeys(self.components, keep)
        """Hook points that it needs, and what it keeps of them."""

    def parts(self, shape: Sequence[int], n_more: int = 0) -> Iterator[slice]:
        """Positions of (B, T) some at a time; ``n_more`` numbers a token are made elsewhere."""
        # The coefficients of all states so far and of the reads at hand, with D channels or one.
        width = self.model.cfg.d_model if self.by_channel else 1
        n_held = (self.model.cfg.n_layers + 8) * len(self.components) * width
        return some_positions(shape, n_held + 8 * len(self.read_of) + n_more)

    def unfold(self, captured: Mapping[str, Any], at: slice) -> tuple[Tensor, Tensor]:
        """Coefficients of some positions and the norms of what they bring, (C, B, t) in float64.

        Coefficients are means over channels where they differ between them.
        """
        kept = [captured[name] for name in self.components]
        norms = torch.stack([each.norms[:, at] for each in kept]).double()
        recorded = {name: captured[name][:, at] for name in self.weights}
        if not self.by_channel:
            shape = norms.shape[1:]
            c = as_rows([c[..., :m].expand(*shape, m) for m, c in self._each(recorded)])
            component_of = torch.from_numpy(self.component_of).to(norms.device)
            return c, c.abs().mul_(norms.index_select(0, component_of))
        delta = torch.stack([each.whole[:, at] for each in kept], 2).double()
        coefficients, sizes = [], []
        for m, c in self._each(recorded):
            c = c[:, :, :m]
            sizes.append(torch.linalg.vector_norm(c * delta[:, :, :m], dim=-1))
            coefficients.append(c.mean(-1).expand(*delta.shape[:2], m))
        return as_rows(coefficients), as_rows(sizes)

    def errors(self, captured: Mapping[str, Any], at: slice) -> tuple[Tensor, Tensor]:
        """How far, at some of the checked positions, reads are from their components' sums.

        Args:
            captured: of the reads, (B, s, D) each, beside what ``hooks`` keep.

        Returns:
            Norms of the differences and of the reads, (B, s, R) each in float64.
        """
        kept = [captured[name].checked[:, at] for name in self.components]
        delta = torch.stack(kept, 2).double()
        recorded = {name: captured[name][:, self.checked][:, at] for name in self.weights}
        unfolded = self._each(recorded)
        if self.by_channel:
            total = torch.stack([(c[:, :, :m] * delta[:, :, :m]).sum(2) for m, c in unfolded], 2)
        else:
            every = [c.expand(*delta.shape[:2], -1) for _, c in unfolded]
            total = torch.stack(every, 2) @ delta
        given = torch.stack([captured[read.hook][:, at] for read in self.reads], 2).double()
        missed, found = (torch.linalg.vector_norm(x, dim=-1) for x in (total - given, given))
        return missed, found

    def _each(self, recorded: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Of each read in order the number of its components, and coefficients of all, (B, t, M)
        or (B, t, M, D), zero beyond its own; B = t = 1 where they are static."""
        unfolded = self.model.stream.unfold(self.model, recorded)
        for read, (hook, c) in zip(self.reads, unfolded, strict=True):
            assert hook == read.hook, f"{hook} was unfolded in the place of {read.hook}"
            yield read.n_components, c


def _component(x: Tensor, checked: slice, whole: bool) -> Component:
    norms = torch.linalg.vector_norm(at_least_fp32(x), dim=-1)
    # A copy, so that not all of x is kept for a part of it.
    return Component(norms, x[:, checked].clone(), x if whole else None)


def _checked(x: Tensor, checked: slice) -> Tensor:
    return x[:, checked].clone()


class EffectiveRoutes:
    """Coefficients of every component in every read, and what share of its size each is.

    The share of a component is ||c_m delta_m|| over the sum of that over all components, per token;
    its signed share has the sign of the coefficient. A token is undefined at a read where one of
    these is not finite or all components are zero.

    Args:
        model: the model that is run, whose stream unfolds its weights; hooks that edit what it
            computes have to be on it already.
        n_groups: document groups.
    """

    needs_nll = False

    def __init__(self, model: Decoder, n_groups: int) -> None:
        self.model = model
        self.unfolder = Unfolder(model)
        self.reads = self.unfolder.reads
        self.names = component_names(model.cfg.n_layers)
        self.read_of, self.component_of = self.unfolder.read_of, self.unfolder.component_of
        self._ownership = Ownership(self.read_of)
        self._embeddings = np.flatnonzero(self.component_of == 0).tolist()
        self.hooks: dict[str, Transform | None] = dict(self.unfolder.hooks)
        keep = partial(_checked, checked=self.unfolder.checked)
        self.hooks |= dict.fromkeys((read.hook for read in self.reads), keep)
        n_cells, n_reads = len(self.read_of), len(self.reads)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_OF_CELLS, (n_cells,))
        self.sums = GroupSums(n_groups, shapes | dict.fromkeys(_OF_READS, (n_reads,)))
        # What gets no interval needs no groups.
        self.moments = GroupSums(1, dict.fromkeys(_MOMENTS, (n_cells,)))
        self.first = GroupSums(1, {"n": (n_reads,), "embedding": (n_reads,)})
        self.checks = GroupSums(1, {"n": (n_reads,), "squares": (n_reads,)})
        self.largest_error = Maxima((n_reads,))
        self.accumulators: Mapping[str, Accumulator] = {
            "sums": self.sums,
            "moments": self.moments,
            "first": self.first,
            "checks": self.checks,
            "largest_error": self.largest_error,
        }
        self.identity: dict[str, Any] = {
            "reducer": "effective routes",
            "hooks": list(self.hooks),
            "checked": self.unfolder.checked.step,
            "groups": n_groups,
        }

    # -- a batch ------------------------------------------------------------------------------

    def update(self, seen: Observed) -> None:
        """Add one batch.

        Raises:
            AnalysisError: a read is not the sum of its unfolded components.
        """
        kept, starts = kept_tokens(seen.batch), seen.batch.valid & seen.batch.first
        rows = summed(
            self._terms(*self.unfolder.unfold(seen.captured, at), kept[:, at], starts[:, at])
            for at in self.unfolder.parts(kept.shape)
        )
        one_group = np.zeros(len(seen.groups), dtype=np.int64)
        self.sums.add(seen.groups, **{name: rows[name] for name in (*_OF_CELLS, *_OF_READS)})
        self.moments.add(one_group, **{name: rows[name] for name in _MOMENTS})
        self.first.add(one_group, n=rows["first_n"], embedding=rows["first_embedding"])
        self._check(seen, kept)

    def _terms(self, c: Tensor, size: Tensor, kept: Tensor, starts: Tensor) -> dict[str, Tensor]:
        """Sums over positions of coefficients and sizes (C, B, t): (B, C) or (B, R)."""
        of_read = self._ownership
        total = of_read.total(size)
        defined = (total > 0) & total.isfinite()
        counted, first = defined & kept, defined & starts
        share, c = of_read.shares(size, total, counted), of_read.masked(c, counted)
        by_cell, signed = over_positions(share), over_positions(share * c.sign())
        return {
            "coefficient": over_positions(c),
            "share": by_cell,
            "signed_share": signed,
            "absolute": over_positions(c.abs()),
            "squares": over_positions(c.square()),
            "n": over_positions(counted),
            "undefined": over_positions(kept & ~defined),
            "effective": over_positions(of_read.effective(share, counted)),
            "negative": of_read.total((by_cell - signed).t()).t() / 2,
            "embedding": by_cell[:, self._embeddings],
            "first_n": over_positions(first),
            "first_embedding": over_positions(
                torch.where(first, size[self._embeddings] / total, 0.0)
            ),
        }

    @property
    def per_channel(self) -> np.ndarray:
        """(R,) reads whose coefficients differ between channels, so that ours are their means."""
        return np.full(len(self.reads), self.unfolder.by_channel)

    # -- the identity -------------------------------------------------------------------------

    def _check(self, seen: Observed, kept: Tensor) -> None:
        """Compare reads with their components' sums at the checked positions that count."""
        kept = kept[:, self.unfolder.checked]
        n_more = 3 * len(self.names) * self.model.cfg.d_model
        for at in self.unfolder.parts(kept.shape, n_more):
            missed, found = self.unfolder.errors(seen.captured, at)
            finite = missed.isfinite() & kept[:, at, None]
            self.largest_error.add(torch.where(finite, missed, -torch.inf).flatten(0, 1))
            squares = torch.where(finite, found.square(), 0.0)
            every = np.zeros(len(kept), dtype=np.int64)
            self.checks.add(every, n=finite.sum(1), squares=squares.sum(1))
        _require_identity(self.reads, self.identity_errors(), self.tolerance)

    def identity_errors(self) -> np.ndarray:
        """(R,) the largest error of a checked token by the root mean square of their reads' norms.

        NaN without a checked token.
        """
        n, squares = (self.checks[name][0] for name in ("n", "squares"))
        errors = np.where(n > 0, self.largest_error.values, np.nan)
        return divide(errors, np.sqrt(divide(squares, n)))

    @property
    def tolerance(self) -> float:
        """What the errors may be at the model's precision."""
        rounding = 4 * torch.finfo(self.model.dtype).eps
        return max(self.model.stream.unfold_tolerance, rounding)


def _require_identity(reads: Sequence[Any], errors: np.ndarray, tolerance: float) -> None:
    if np.isnan(errors).all():
        return
    worst = int(np.nanargmax(errors))
    if errors[worst] > tolerance:
        raise AnalysisError(
            f"routes: {reads[worst].hook}: its components miss it by {errors[worst]:.1e} of its "
            f"size, more than {tolerance:.0e}; a hook that edits a read is outside of what unfolds"
        )
