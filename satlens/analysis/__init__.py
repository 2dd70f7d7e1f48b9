"""Analyses: from a model and data to tables with intervals and provenance.

The modules here are the analyses, one a question; ``stats`` has every statistic and ``result`` what
an analysis returns. Packages hold their parts: ``engine`` runs a model once over a corpus and feeds
reducers, ``interventions`` changes gates, routes and reads, ``sweeps`` applies them in grids,
``depth``, ``tokens`` and ``heads`` measure routes, token categories and what V_1 carries,
``statistics`` computes intervals and tests, ``controls`` plants known answers.
"""
