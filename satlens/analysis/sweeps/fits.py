"""What an ablation needs before it begins: means, donors and constants of a pool, and tags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from satlens.analysis.engine.inputs import Slice, open_windows, tokenizer_of
from satlens.analysis.engine.stream import Progress
from satlens.analysis.interventions.donors import fit_donors
from satlens.analysis.interventions.means import Per, fit_means
from satlens.analysis.interventions.static import fit_static
from satlens.data.categories import Categories
from satlens.data.tags import Tags, tag_documents
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.processes import first_alone

_PER: dict[str, Per] = {
    "means": "head",
    "means_position": "position",
    "means_category": "category",
}
OF_POOL = (*_PER, "donors", "static")
"""What is fitted on a pool."""


@dataclass(frozen=True, kw_only=True)
class Tagging:
    """How documents are tagged."""

    tagger: str = "auto"
    groups: Categories | None = None
    entities: bool = False
    cache_dir: str | Path | None = None
    progress: Progress | None = None

    def of(self, model: Decoder, data: Any, windows: Slice) -> Tags:
        """Tags of the documents of some windows.

        Raises:
            AnalysisError: no tokenizer.
            DataError: no tagger model, documents without text.
        """
        tokenizer = tokenizer_of(model, data)
        if tokenizer is None:
            raise AnalysisError("ablate: tokenizer: needed to align tags with tokens")
        with first_alone():
            return tag_documents(
                windows.documents,
                tokenizer,
                tagger=self.tagger,
                entities=self.entities,
                categories=self.groups,
                cache_dir=self.cache_dir,
                progress=self.progress,
            )


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Data that means, donors and constants are fitted on: the split ``pool`` of it."""

    model: Decoder
    data: Any
    batch_size: int
    limits: Mapping[str, Any]
    """``max_documents`` and ``max_tokens_per_document``."""
    passes: Mapping[str, Any]
    """``progress`` and ``resume_dir``."""

    def windows(self) -> Slice:
        """Its documents."""
        return open_windows(
            self.model, self.data, split="pool", batch_size=self.batch_size, **self.limits
        )

    def fit(
        self, needs: Iterable[str], tags: Tags | None, tagging: Tagging, evaluated: Slice
    ) -> dict[str, Any]:
        """Those of OF_POOL that are needed, by name.

        Args:
            tags: of the ``evaluated`` documents.
        """
        options: dict[str, Any] = {"batch_size": self.batch_size, **self.limits, **self.passes}
        fitted: dict[str, Any] = {}
        for need in (name for name in OF_POOL if name in needs):
            if need in _PER:
                per = _PER[need]
                own = self._tags(tags, tagging, evaluated) if per == "category" else None
                fitted[need] = fit_means(self.model, self.data, per=per, tags=own, **options)
            else:
                fit = fit_donors if need == "donors" else fit_static
                fitted[need] = fit(self.model, self.data, **options)
        return fitted

    def _tags(self, tags: Tags | None, tagging: Tagging, evaluated: Slice) -> Tags:
        """Of its own documents; those of the evaluated ones where they are the same."""
        windows = self.windows()
        if tags is not None and windows.sha256 == evaluated.sha256:
            return tags
        return tagging.of(self.model, self.data, windows)

    def facts(self, evaluated: Slice) -> dict[str, Any]:
        """What it was, for a summary."""
        windows = self.windows()
        return {
            "sha256": windows.sha256,
            "n_documents": windows.n_documents,
            "n_tokens": windows.n_tokens,
            "same_documents": windows.sha256 == evaluated.sha256,
        }
