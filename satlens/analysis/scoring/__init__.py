"""Parts of :func:`satlens.evaluate_tasks`: who answers, what was answered, and the tables of it."""
