"""The pass under an ablation: every intervention of a sweep beside one shared clean pass.

For each batch the state at the block borders is computed once, and each intervention runs only from
the first layer that it touches, with the same attention implementation. A pass whose weights come
out as they were is left off: it would be the clean one to the bit.

Shapes: B rows, T positions, G document groups, N cases, C categories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.engine.accumulators import GroupSums
from satlens.analysis.engine.coding import Coding
from satlens.analysis.engine.stream import fold, n_groups
from satlens.analysis.interventions.gates import Intervention, intervene
from satlens.analysis.interventions.removal import removal_points
from satlens.analysis.sweeps.loss_metrics import Change, CleanLosses
from satlens.analysis.tokens.sums import digest, one_hot
from satlens.data.windows import IGNORE, Batch, Windows
from satlens.hooks import ReadOnly
from satlens.models.block import Snapshot
from satlens.models.decoder import Decoder

METRICS = ("dnll", "kl", "top1")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a sweep's table: an intervention and where it applies."""

    intervention: Intervention
    kind: str
    target: str
    """gate, route or read."""
    scope: str
    first_layer: int
    """The clean state below it is reused."""
    weights: tuple[str, ...] = ()
    """Hook points of everything that it edits, if these are all weights of sites."""
    site: str = ""
    layer: int | None = None
    sublayer: str = ""
    role: str = ""
    head: int | None = None
    source: str = ""
    component: str = ""
    static: bool = False
    """All of its weights are the same for every token."""


class _UnchangedError(Exception):
    """Every weight that a case edits is what it was."""


class CleanPass:
    """One batch without an intervention: its losses, states at block borders and activations.

    Args:
        cases: what it is compared with; borders are kept where one starts.
        points: hook points to record.
    """

    def __init__(
        self, model: Decoder, batch: Batch, cases: Sequence[Case], points: Sequence[str]
    ) -> None:
        self.model, self.batch = model, batch
        self.recorded: dict[str, Tensor] = {}
        self.borders: dict[int, Snapshot | None] = {0: None}
        snapshot: Snapshot | None = None
        with model.hooks([(name, ReadOnly(self._keep)) for name in points]):
            for layer in sorted({case.first_layer for case in cases} - {0}):
                snapshot = model(batch.tokens, start_at=snapshot, stop_at_layer=layer)
                self.borders[layer] = snapshot
            logits = model(batch.tokens, start_at=snapshot)
        self.losses = CleanLosses(logits.flatten(0, 1), batch.targets.flatten())

    def _keep(self, activation: Tensor, hook: Any) -> None:
        self.recorded[hook.name] = activation.clone()

    def change(self, case: Case) -> Change | None:
        """What a case changes, (B T,) each; None if it changes no weight."""
        try:
            with ExitStack() as stack:
                stack.enter_context(intervene(self.model, case.intervention))
                if case.weights:
                    stack.enter_context(self.model.hooks(self._watch(case.weights)))
                logits = self.model(self.batch.tokens, start_at=self.borders[case.first_layer])
        except _UnchangedError:
            return None
        return self.losses.change(logits.flatten(0, 1))

    def _watch(self, points: Sequence[str]) -> list[tuple[str, Callable[..., None]]]:
        """Hooks that stop a pass once it is known to be the clean one."""
        equal: dict[str, bool] = {}

        def compare(weights: Tensor, hook: Any) -> None:
            equal[hook.name] = torch.equal(weights, self.recorded[hook.name])
            if len(equal) == len(points) and all(equal.values()):
                raise _UnchangedError

        return [(name, compare) for name in points]


def measure(
    model: Decoder,
    windows: Windows,
    cases: Sequence[Case],
    passes: dict[str, Any],
    *,
    by: Coding | None = None,
    recorded: dict[str, Tensor] | None = None,
    label: str = "ablation",
) -> GroupSums:
    """Sums by document group of what each case changes.

    Args:
        passes: ``progress`` and ``resume_dir``.
        by: a coding of target tokens (:func:`of_targets`) to add dNLL up by.
        recorded: filled with the clean activations of each batch before its cases run, for those
            that remove a component.

    Returns:
        ``nll`` and ``n`` (G,), of the clean pass; ``dnll, kl, top1`` (G, N); with ``by`` also
        ``dnll_by`` (G, N, C) and ``n_by`` (G, C).
    """
    shapes: dict[str, tuple[int, ...]] = {"nll": (), "n": ()}
    shapes |= dict.fromkeys(METRICS, (len(cases),))
    if by is not None:
        shapes |= {"dnll_by": (len(cases), len(by.names)), "n_by": (len(by.names),)}
    sums = GroupSums(n_groups(windows), shapes)
    points = [name for case in cases for name in case.weights]
    if any(case.component for case in cases):
        points += removal_points(model)
    points = list(dict.fromkeys(points))

    def step_over(batch: Batch, groups: np.ndarray) -> None:
        clean = CleanPass(model, batch, cases, points)
        if recorded is not None:
            recorded.update(clean.recorded)
        scored = batch.targets != IGNORE
        hot = None if by is None else one_hot(by.of(batch), scored, len(by.names))
        rows = [_rows(clean.change(case), scored, hot) for case in cases]
        together = {name: torch.stack([row[name] for row in rows], 1) for name in rows[0]}
        if hot is not None:
            together["n_by"] = hot.sum(1)
        nll = clean.losses.nll.double().view(scored.shape).sum(1)
        sums.add(groups, nll=nll, n=scored.sum(1), **together)

    fold(
        model,
        windows,
        {"sums": sums},
        step_over,
        identity=[
            [case.intervention.identity for case in cases],
            None if by is None else digest(by),
        ],
        label=label,
        **passes,
    )
    return sums


def _rows(change: Change | None, scored: Tensor, hot: Tensor | None) -> dict[str, Tensor]:
    """Sums over the tokens of each row: (B,) each, (B, C) by category."""
    if change is None:
        none = torch.zeros(len(scored), dtype=torch.float64, device=scored.device)
        rows: dict[str, Tensor] = dict.fromkeys(METRICS, none)
        return rows if hot is None else {**rows, "dnll_by": torch.zeros_like(hot[:, 0])}
    tokens = {name: getattr(change, name).double().view(scored.shape) for name in METRICS}
    rows = {name: values.sum(1) for name, values in tokens.items()}
    if hot is not None:
        rows["dnll_by"] = (tokens["dnll"][:, None] @ hot)[:, 0]
    return rows


def of_targets(coding: Coding) -> Coding:
    """A coding of documents that gives each position the code of the token it predicts."""
    return Coding(coding.names, [np.asarray(codes)[1:] for codes in coding.codes])
