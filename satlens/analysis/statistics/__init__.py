"""Parts of :mod:`satlens.analysis.stats`, through which analyses use them."""
