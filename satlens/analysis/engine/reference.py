"""What predictions are fitted on: the pool, or the other half of the documents.

A score of a fit on its own tokens flatters it. Where data has a pool, fits are made there; else the
documents (whole works, where they are pieces of one) are divided in two, and each half is predicted
from the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from satlens.analysis.engine.descriptive import Inputs
from satlens.analysis.engine.inputs import Slice, open_windows
from satlens.data.dataset import PreparedDataset
from satlens.data.tags import Tags

POOL = "pool"
POOL_SAID = "the pool"
HALVES_SAID = "the other half of the documents"


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """Documents to fit on, and which fit each measured document is predicted by."""

    windows: Slice
    tags: Tags
    fit_of: np.ndarray
    """(documents of ``windows``,) the fit that each document enters."""
    predicted_by: np.ndarray
    """(measured documents,) the fit that predicts each."""
    is_pool: bool

    @property
    def n_fits(self) -> int:
        """One on a pool, two on halves."""
        return 1 if self.is_pool else 2

    @property
    def pool(self) -> Slice | None:
        """The pool, if there is one."""
        return self.windows if self.is_pool else None

    @property
    def note(self) -> str:
        """What was fitted on, for a reader."""
        return f"The drivers were fitted on {POOL_SAID if self.is_pool else HALVES_SAID}."

    @property
    def facts(self) -> dict[str, object]:
        """What was fitted on, for a summary."""
        return {
            "fitted_on": POOL_SAID if self.is_pool else HALVES_SAID,
            "n_documents": self.windows.n_documents,
            "n_tokens": self.windows.n_tokens,
        }


def reference(
    inputs: Inputs, tags: Tags, tag: Callable[[Slice], Tags] | None = None
) -> Reference | None:
    """What to fit on for some measured documents; None for a single one without a pool.

    Args:
        tags: of the measured documents.
        tag: makes the tags of a pool; None uses no pool.
    """
    pool = None if tag is None else _pool(inputs)
    measured = inputs.windows
    if pool is not None and tag is not None:
        return Reference(
            windows=pool,
            tags=tag(pool),
            fit_of=np.zeros(pool.n_documents, dtype=np.int64),
            predicted_by=np.zeros(measured.n_documents, dtype=np.int64),
            is_pool=True,
        )
    if measured.n_documents < 2:
        return None
    half = halves(measured)
    return Reference(windows=measured, tags=tags, fit_of=half, predicted_by=1 - half, is_pool=False)


def halves(windows: Slice) -> np.ndarray:
    """(n_documents,) 0 or 1 in turn, by work where documents are pieces of several."""
    works = [d.id if d.cluster is None else d.cluster for d in windows.documents]
    number = {work: k for k, work in enumerate(dict.fromkeys(works))}
    if len(number) < 2:
        return np.arange(windows.n_documents) % 2
    return np.array([number[work] % 2 for work in works])


def _pool(inputs: Inputs) -> Slice | None:
    """As much of the data's pool as was asked for of the measured split."""
    measured, data = inputs.windows, inputs.data
    if measured.split in (None, POOL):
        return None
    if isinstance(data, PreparedDataset) and not data.split(POOL).documents:
        return None
    return open_windows(
        inputs.model, data, split=POOL, batch_size=measured.batch_size, **measured.limits
    )
