"""Checks the shapes in the signatures of the models while tests run, and only then."""

from jaxtyping import install_import_hook

install_import_hook("satlens.models", "beartype.beartype")
