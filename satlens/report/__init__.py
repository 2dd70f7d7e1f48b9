"""The HTML page of a run: what was found, in words, figures and tables."""

from __future__ import annotations

from satlens.report.build import build_report

__all__ = ["build_report"]
