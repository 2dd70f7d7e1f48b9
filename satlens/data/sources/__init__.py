"""Sources of documents: what :func:`open_source` opens, and the pieces that workers read.

The formats, each in its own module: the embedded corpus, text files, JSON Lines, parquet,
data sets of the Hugging Face Hub, and token files of nanoGPT and llm.c.
"""

from __future__ import annotations

from satlens.data.sources.base import Piece, Source
from satlens.data.sources.opening import open_source

__all__ = ["Piece", "Source", "open_source"]
