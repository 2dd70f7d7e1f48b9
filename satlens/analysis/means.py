"""Mean weights of gates and routes over a corpus: what mean interventions put in their place.

Shapes: B batch, T position, K KV heads, n weights of a site.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.inputs import open_windows
from satlens.analysis.reducers import SiteMeans
from satlens.analysis.stream import Progress, run
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite

Means = Mapping[str, np.ndarray]
"""Hook point -> mean weights, (K,) of a gate or (n,) of a route; from :func:`fit_means`."""


def fit_means(
    model: Decoder,
    data: Any,
    *,
    split: str = "pool",
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    progress: Progress | None = None,
    resume_dir: Any = None,
) -> dict[str, np.ndarray]:
    """Mean weights of every site over all real tokens, for MeanGate and MeanRoute.

    Args:
        data: any form; prepared data gives its ``split``, other sources are taken whole.

    Returns:
        hook point -> (K,) per head of a gate, (n,) of a route, float64.

    Raises:
        AnalysisError: a model without access sites.
    """
    if not model.sites:
        raise AnalysisError(f"fit_means: this model ({model.cfg.variant}) has no access sites")
    windows = open_windows(
        model,
        data,
        split=split,
        batch_size=batch_size,
        max_documents=max_documents,
        max_tokens_per_document=max_tokens_per_document,
    )
    reducer = SiteMeans(model.sites)
    run(model, windows, [reducer], progress=progress, resume_dir=resume_dir, label="means")
    return reducer.means()


def mean_weights(who: str, means: Means, site: AccessSite, like: Tensor) -> Tensor:
    """A site's mean in place of every token's weights ``like`` (B, T, n).

    Args:
        who: the intervention, for errors.

    Raises:
        AnalysisError: there is no mean for the site, or one of another number of weights.
    """
    if site.hook not in means:
        raise AnalysisError(f"{who}: means: nothing for {site.hook}")
    mean = torch.as_tensor(np.asarray(means[site.hook]), dtype=like.dtype, device=like.device)
    if mean.shape != like.shape[-1:]:
        raise AnalysisError(
            f"{who}: means: {site.hook} has {like.shape[-1]} weights, got {list(mean.shape)}"
        )
    return mean.expand(like.shape)
