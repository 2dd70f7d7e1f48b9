"""Parts of :mod:`satlens.analysis.circuits`: what heads take from V_1."""
