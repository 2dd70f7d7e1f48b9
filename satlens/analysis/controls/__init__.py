"""Positive controls: models whose numbers are known, and whether the analyses return them.

``planted`` and ``priced`` set weights by hand, ``languages`` and ``trained`` teach small models
synthetic languages, ``nulls`` have nothing to find; ``scorecard`` compares.
"""

from __future__ import annotations

from satlens.analysis.controls.scorecard import controls

__all__ = ["controls"]
