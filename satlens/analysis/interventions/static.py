"""The best constant gates: how far a static value residual would go with this model's weights.

Shapes: B batch, T position, K KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from satlens.analysis.engine.accumulators import (
    Arrays,
    GroupSums,
    Maxima,
    load_state,
    save_state,
)
from satlens.analysis.engine.inputs import open_windows, opened, sites_of
from satlens.analysis.engine.merging import merge
from satlens.analysis.engine.stream import Progress, fold, refuse_foreign_hooks, state_path
from satlens.analysis.interventions.means import SiteValues, fit_means, per_of
from satlens.analysis.sweeps.gradients import frozen
from satlens.data.windows import IGNORE, Batch, Windows, as_documents, tokens_per_document
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite

MAX_TOKENS = 20_000
ITERATIONS = 30
_KEPT = 4
"""Evaluations kept for a killed fit, as a multiple of the iterations."""


class Constants(SiteValues):
    """One value a head, from :func:`fit_static`.

    Args:
        values: hook point -> (K,) float64.
        nll_clean: loss of the model as it is, in nats a token, on the documents of the fit.
        nll_means: under the gates' means.
        nll: under these values.
        n_tokens: scored tokens of the fit.
        n_evaluations: passes with gradients that it took.
        converged: whether it ended by itself, at a stationary point.
    """

    def __init__(
        self,
        values: Mapping[str, np.ndarray],
        *,
        nll_clean: float,
        nll_means: float,
        nll: float,
        n_tokens: int,
        n_evaluations: int,
        converged: bool,
    ) -> None:
        super().__init__(values)
        self.nll_clean, self.nll_means, self.nll = nll_clean, nll_means, nll
        self.n_tokens, self.n_evaluations = n_tokens, n_evaluations
        self.converged = converged

    @property
    def facts(self) -> dict[str, Any]:
        """How good they are and how they were found, ready for JSON."""
        names = ("nll_clean", "nll_means", "nll", "n_tokens", "n_evaluations", "converged")
        return {name: getattr(self, name) for name in names}


def fit_static(
    model: Decoder,
    data: Any,
    *,
    split: str = "pool",
    means: Mapping[str, np.ndarray] | None = None,
    max_tokens: int | None = MAX_TOKENS,
    iterations: int = ITERATIONS,
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> Constants:
    """One value a head and layer in place of its gates that minimises the loss, for FreezeGate.

    L-BFGS over all documents at once from the gates' means, with exact gradients; all other weights
    stay. The loss need not be convex, so it is the best value near the means.

    Args:
        data: any form; prepared data gives its ``split``, other sources are taken whole.
        means: to start from; None fits them to the same documents.
        max_tokens: scored tokens at most, by taking the first ones of each document: the whole
            slice is run for every evaluation. None takes all.
        iterations: of L-BFGS at most; one is about 1.2 evaluations of loss and gradient.

    Raises:
        AnalysisError: a model without gates, means per position or category.
    """
    sites = sites_of(model, kind="gate", analysis="fit_static")
    if means is not None and per_of(means) != "head":
        raise AnalysisError(
            f"fit_static: means: one a head is needed, these are per {per_of(means)}"
        )
    data = opened(data)
    if max_tokens is not None:
        documents = as_documents(data, model.tokenizer, split)
        fitting = tokens_per_document(documents, max_tokens)
        max_tokens_per_document = min(fitting, max_tokens_per_document or fitting)
    limits: dict[str, Any] = {
        "batch_size": batch_size,
        "max_documents": max_documents,
        "max_tokens_per_document": max_tokens_per_document,
    }
    passes: dict[str, Any] = {"progress": progress, "resume_dir": resume_dir}
    if means is None:
        means = fit_means(model, data, split=split, **limits, **passes)
    windows = open_windows(model, data, split=split, **limits)
    start = np.concatenate([np.asarray(means[site.hook], dtype=np.float64) for site in sites])
    loss = _Loss(model, windows, sites, passes, start, _KEPT * (iterations + 2))
    # Less than the loss is rounded by is no progress.
    options = {"maxiter": iterations, "ftol": torch.finfo(_wide(model.dtype)).eps}
    found = optimize.minimize(
        loss.with_gradient, start, jac=True, method="L-BFGS-B", options=options
    )
    return Constants(
        loss.by_site(found.x),
        nll_clean=loss.clean(),
        nll_means=loss.first,
        nll=float(found.fun),
        n_tokens=windows.n_tokens,
        n_evaluations=loss.n_evaluations,
        converged=bool(found.success),
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Evaluations:
    """What evaluations gave in their order, kept for a fit that is killed.

    Args:
        capacity: evaluations kept at most.
        width: of their points.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.width, self.stored = width, 0
        self.rows = np.zeros((capacity, 2 * width + 1))
        """(capacity, 2 width + 1): point, loss, gradient."""

    def at(self, number: int, point: np.ndarray) -> tuple[float, np.ndarray] | None:
        """Loss and gradient of an evaluation, if it is kept and was at this point."""
        row = self.rows[number] if number < self.stored else None
        if row is None or not np.array_equal(row[: self.width], point, equal_nan=True):
            return None
        return float(row[self.width]), row[self.width + 1 :].copy()

    def put(self, number: int, point: np.ndarray, loss: float, gradient: np.ndarray) -> None:
        """Keep an evaluation; later ones are forgotten."""
        self.rows[number] = np.concatenate((point, [loss], gradient))
        self.stored = number + 1

    def arrays(self) -> Arrays:
        return {"rows": self.rows}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.rows[...] = arrays["rows"]

    def merge(self, other: _Evaluations) -> None:
        raise NotImplementedError  # every process has them all


class _Loss:
    """Mean loss over a partition as a function of the gates' constants."""

    def __init__(
        self,
        model: Decoder,
        windows: Windows,
        sites: list[AccessSite],
        passes: dict[str, Any],
        start: np.ndarray,
        capacity: int,
    ) -> None:
        self.model, self.windows, self.sites = model, windows, sites
        self.passes = passes
        self.width = sum(site.n_heads for site in sites)
        self.n_evaluations = 0
        self.first = np.nan
        self._earlier = _Evaluations(capacity, self.width)
        self._path: Path | None = None
        if passes["resume_dir"] is not None:
            refuse_foreign_hooks(model)
            identity = ["static", start.tolist(), capacity]
            self._path = state_path(model, windows, identity, "static", passes["resume_dir"])
            self._earlier.stored = load_state(self._path, {"evaluations": self._earlier})
            # Processes skip the same evaluations, those that all of them have.
            fewest = Maxima((1,))
            fewest.add(torch.tensor([[-float(self._earlier.stored)]]))
            merge({"fewest": fewest})
            self._earlier.stored = int(-fewest.values[0])
        self._n_run = 0

    def by_site(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """(sum of K,) -> hook point -> (K,)."""
        parts = np.split(values, np.cumsum([site.n_heads for site in self.sites])[:-1])
        return {site.hook: part for site, part in zip(self.sites, parts, strict=True)}

    def clean(self) -> float:
        """Without constants."""
        loss, _ = self._run(None)
        return loss

    def with_gradient(self, values: np.ndarray) -> tuple[float, np.ndarray]:
        """In nats a token, and its gradient."""
        loss, gradient = self._run(values)
        if not self.n_evaluations:
            self.first = loss
        self.n_evaluations += 1
        return loss, gradient

    def _run(self, values: np.ndarray | None) -> tuple[float, np.ndarray]:
        """One evaluation, or what it gave before a kill."""
        number, self._n_run = self._n_run, self._n_run + 1
        point = np.full(self.width, np.nan) if values is None else values
        found = self._earlier.at(number, point)
        if found is None:
            found = self._evaluate(values, number)
        return found

    def _evaluate(self, values: np.ndarray | None, number: int) -> tuple[float, np.ndarray]:
        width = self.width
        sums = GroupSums(1, {"nll": (), "n": (), "gradient": (width,)})

        def step_over(batch: Batch, groups: np.ndarray) -> None:
            nll, gradient = self._of_batch(batch, values)
            n = (batch.targets != IGNORE).sum()
            gradient = np.zeros(width) if gradient is None else gradient
            rows = {"nll": np.array([nll]), "n": np.array([int(n)]), "gradient": gradient[None]}
            sums.add(np.zeros(1, dtype=np.int64), **rows)

        identity, label = [None if values is None else values.tolist()], f"static-{number}"
        fold(
            self.model,
            self.windows,
            {"sums": sums},
            step_over,
            identity=identity,
            inside=lambda: frozen(self.model),
            label=label,
            **self.passes,
        )
        n = sums["n"][0]
        loss, gradient = float(sums["nll"][0] / n), sums["gradient"][0] / n
        if self._path is not None and number < len(self._earlier.rows):
            point = np.full(width, np.nan) if values is None else values
            self._earlier.put(number, point, loss, gradient)
            save_state(self._path, {"evaluations": self._earlier}, number + 1)
            # The evaluation's own state has served.
            what = [identity, label, 0, 1]
            folder = self._path.parent
            state_path(self.model, self.windows, what, label, folder).unlink(missing_ok=True)
        return loss, gradient

    def _of_batch(self, batch: Batch, values: np.ndarray | None) -> tuple[float, np.ndarray | None]:
        """Summed loss of a batch and its gradient."""

        def run() -> Tensor:
            nll = self.model(
                batch.tokens, return_type="loss", targets=batch.targets, loss_per_token=True
            )
            return nll.double().sum()

        if values is None:
            return float(run()), None
        with torch.enable_grad():
            constants = {
                hook: torch.tensor(part, device=batch.tokens.device, requires_grad=True)
                for hook, part in self.by_site(values).items()
            }

            def put(weights: Tensor, hook: Any) -> Tensor:
                return constants[hook.name].to(weights.dtype).expand_as(weights)

            with self.model.hooks([(hook, put) for hook in constants]):
                total = run()
            gradient = torch.autograd.grad(total, list(constants.values()))
        return float(total), torch.cat(gradient).double().cpu().numpy()
