"""Checks the shapes in the signatures of the models while tests run, and only then.

Tests run in one process a core, each with one thread: their models are too small for more.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from jaxtyping import install_import_hook

install_import_hook("satlens.models", "beartype.beartype")
