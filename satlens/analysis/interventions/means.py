"""Mean weights of gates and routes over a corpus: what mean interventions put in their place.

Shapes: B batch, T position, K KV heads, n weights of a site, P positions, C categories.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.engine.accumulators import Accumulator, GroupSums
from satlens.analysis.engine.coding import Coding, coding, require_tags_of
from satlens.analysis.engine.inputs import concatenated, open_windows
from satlens.analysis.engine.reducers import SiteMeans
from satlens.analysis.engine.stream import Observed, Progress, Transform, run
from satlens.analysis.interventions.running import Running
from satlens.data.tags import Tags
from satlens.data.windows import Windows
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite

Per = Literal["head", "position", "category"]


class SiteValues(Mapping[str, np.ndarray]):
    """Arrays by hook point, made from a corpus to be put in the place of a site's weights."""

    def __init__(self, values: Mapping[str, np.ndarray]) -> None:
        self._values = {hook: np.asarray(value) for hook, value in values.items()}

    def __getitem__(self, hook: str) -> np.ndarray:
        return self._values[hook]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return self is other  # arrays do not compare as one

    def __hash__(self) -> int:
        return id(self)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 over hook points and values."""
        digest = hashlib.sha256()
        for hook, value in self.items():
            digest.update(f"{hook} {value.dtype.str} {value.shape}\n".encode())
            digest.update(np.ascontiguousarray(value).data)
        return digest.hexdigest()

    @property
    def identity(self) -> dict[str, Any]:
        """What tells them from others, ready for JSON."""
        return {"sha256": self.sha256}


class Means(SiteValues):
    """Mean weights, from :func:`fit_means`.

    Args:
        values: hook point -> float64 means, (K,) of a gate or (n,) of a route; after a first axis
            of positions (P,) or categories (C,) if they are ``per`` these.
        per: what a mean is taken for, beside each head or source.
        names: of the categories.
    """

    def __init__(
        self, values: Mapping[str, np.ndarray], per: Per = "head", names: tuple[str, ...] = ()
    ) -> None:
        super().__init__(values)
        self.per: Per = per
        self.names = names

    @property
    def identity(self) -> dict[str, Any]:
        return {"per": self.per, "names": list(self.names), **super().identity}


# -- fitting ---------------------------------------------------------------------------------------


def fit_means(
    model: Decoder,
    data: Any,
    *,
    per: Per = "head",
    tags: Tags | None = None,
    split: str = "pool",
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    progress: Progress | None = None,
    resume_dir: Any = None,
) -> Means:
    """Mean weights of every site over all real tokens, for MeanGate and MeanRoute.

    Args:
        data: any form; prepared data gives its ``split``, other sources are taken whole.
        per: a mean for each ``head`` (of a route, each source); for each of them and each
            ``position`` in the window, of which a document may have several; or for each of them
            and each ``category`` of the token.
        tags: of the documents that means are taken of, for those per category.

    Returns:
        hook point -> (K,) per head of a gate, (n,) of a route, float64; (P, K) and (C, K) by
        position and category. A position beyond the longest document has the mean of the last one
        before it, a category without tokens the mean of all tokens.

    Raises:
        AnalysisError: a model without access sites; no tags, or tags of other documents.
    """
    if not model.sites:
        raise AnalysisError(f"fit_means: this model ({model.cfg.variant}) has no access sites")
    if per not in get_args(Per):
        raise AnalysisError(f"fit_means: per: {per!r} is not one of {', '.join(get_args(Per))}")
    windows = open_windows(
        model,
        data,
        split=split,
        batch_size=batch_size,
        max_documents=max_documents,
        max_tokens_per_document=max_tokens_per_document,
    )
    passes: dict[str, Any] = {"progress": progress, "resume_dir": resume_dir, "label": "means"}
    if per == "head":
        reducer = SiteMeans(model.sites)
        run(model, windows, [reducer], **passes)
        return Means(reducer.means())
    codes = None if per == "position" else _categories(windows, tags)
    by_code = CodedMeans(model.sites, model.cfg.n_ctx, codes)
    run(model, windows, [by_code], **passes)
    return Means(by_code.means(), per, () if codes is None else codes.names)


def _categories(windows: Windows, tags: Tags | None) -> Coding:
    if tags is None:
        raise AnalysisError(
            "fit_means: means per category need tags: satlens.data.tags.tag_documents"
        )
    require_tags_of(tags, windows, "fit_means")
    return coding("category", windows, tags)


class CodedMeans:
    """Mean weights over real tokens by position or by a coding of the tokens.

    Args:
        sites: whose weights.
        n_ctx: positions.
        codes: of the tokens; None takes positions.
    """

    needs_nll = False

    def __init__(self, sites: list[AccessSite], n_ctx: int, codes: Coding | None) -> None:
        self.codes, self.names = codes, [site.hook for site in sites]
        self.hooks: dict[str, Transform | None] = dict.fromkeys(self.names)
        self.widths = [s.n_heads if s.kind == "gate" else len(s.sources) for s in sites]
        self.n_codes = n_ctx if codes is None else len(codes.names)
        # One group a code: rows of a batch are its tokens.
        self.sums = GroupSums(self.n_codes, {"n": (), "total": (sum(self.widths),)})
        self.accumulators: Mapping[str, Accumulator] = {"sums": self.sums}
        digest = hashlib.sha256()
        for code in () if codes is None else codes.codes:
            digest.update(np.asarray(code).astype("<i8").tobytes())
        self.identity: dict[str, Any] = {
            "reducer": "means by code",
            "hooks": self.names,
            "n": self.n_codes,
            "codes": None if codes is None else digest.hexdigest(),
        }

    def update(self, seen: Observed) -> None:
        """Add one batch."""
        weights = concatenated(seen.captured, self.names)
        valid = seen.batch.valid
        if self.codes is None:
            code = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)
        else:
            code = self.codes.of(seen.batch)
        # Counted batch by batch, so that every batch is one rounding of its sum.
        n = torch.zeros(self.n_codes, dtype=torch.float64, device=valid.device)
        total = n.new_zeros(self.n_codes, weights.shape[-1])
        n.index_add_(0, code[valid], n.new_ones(int(valid.sum())))
        total.index_add_(0, code[valid], weights[valid])
        self.sums.add(np.arange(self.n_codes), n=n, total=total)

    def means(self) -> dict[str, np.ndarray]:
        """Hook point -> (C or P, K) of a gate or (C or P, n) of a route, float64."""
        n, total = self.sums["n"], self.sums["total"]
        if self.codes is None:
            # The last position that was seen stands for those beyond.
            place = np.maximum.accumulate(np.where(n > 0, np.arange(len(n)), -1))
            place = np.where(place < 0, np.argmax(n > 0), place)
            mean = total[place] / n[place][:, None]
        else:
            everywhere = total.sum(0) / n.sum()
            mean = np.where(n[:, None] > 0, total / np.maximum(n, 1)[:, None], everywhere)
        return dict(
            zip(self.names, np.split(mean, np.cumsum(self.widths)[:-1], axis=1), strict=True)
        )


# -- in the place of weights -----------------------------------------------------------------------


def mean_weights(
    who: str,
    means: Mapping[str, np.ndarray],
    site: AccessSite,
    like: Tensor,
    running: Running,
    tags: Tags | None = None,
) -> Tensor:
    """A site's mean in place of every token's weights ``like`` (B, T, n).

    Args:
        who: the intervention, for errors.
        tags: of the documents that the running analysis is of, for means per category.

    Raises:
        AnalysisError: there is no mean for the site, or one of another number of weights; means per
            category without tags, with other categories, or outside of an analysis.
    """
    if site.hook not in means:
        raise AnalysisError(f"{who}: means: nothing for {site.hook}")
    mean = torch.as_tensor(np.asarray(means[site.hook]), dtype=like.dtype, device=like.device)
    per = per_of(means)
    if mean.ndim != 1 + (per != "head") or mean.shape[-1] != like.shape[-1]:
        raise AnalysisError(
            f"{who}: means: {site.hook} has {like.shape[-1]} weights, got {list(mean.shape)}"
        )
    if per == "head":
        return mean.expand(like.shape)
    if per == "position":
        return mean[running.position.clamp(max=len(mean) - 1)]
    assert isinstance(means, Means)
    key = ("category", id(tags))
    return mean[running.once(key, lambda: _running_categories(who, means, running, tags))]


def per_of(means: Mapping[str, np.ndarray]) -> Per:
    """What means are taken for; a plain mapping holds means per head."""
    return means.per if isinstance(means, Means) else "head"


def _running_categories(who: str, means: Means, running: Running, tags: Tags | None) -> Tensor:
    """(B, T) category of each token of the running batch."""
    if tags is None:
        raise AnalysisError(f"{who}: means per category need the tags of the documents that run")
    if tags.categories.names != means.names:
        raise AnalysisError(
            f"{who}: tags: categories {', '.join(tags.categories.names)}, the means have "
            f"{', '.join(means.names)}"
        )
    batch = running.batch
    if batch is None or int(batch.document.max()) >= len(tags):
        raise AnalysisError(
            f"{who}: means per category apply inside an analysis of the documents that the tags "
            "are of, which alone knows each token's category"
        )
    return Coding(means.names, [d.category for d in tags.documents]).of(batch)
