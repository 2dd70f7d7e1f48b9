"""Claims of the papers: what they say, the statistic that speaks about each, and verdicts."""
