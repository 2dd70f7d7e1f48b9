"""Parts of :mod:`satlens.analysis.categories`: sums by token, drivers, the dictionary of V_1."""
