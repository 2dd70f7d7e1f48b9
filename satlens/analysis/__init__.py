"""Analyses: from a model and data to tables with intervals and provenance.

``stream`` runs a model once over a corpus and feeds reducers; ``sparsity``, ``categories``,
``divergence``, ``ablation``, ``evaluation`` and ``comparison`` are the analyses; ``interventions``
changes gates and routes; ``stats`` has every statistic and ``result`` what an analysis returns.
"""
