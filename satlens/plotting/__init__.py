"""Figures from result tables: ``figure_for`` for a whole result, one function per kind of picture.

Knows only pandas tables: no model, no checkpoint, no file but the one it is asked to write.
"""

from __future__ import annotations

from satlens.plotting.figures import figure_for
from satlens.plotting.style import FORMATS, picture_bytes

__all__ = ["FORMATS", "figure_for", "picture_bytes"]
