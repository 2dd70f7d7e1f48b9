"""Evaluation tasks: what the papers score models on, from local files."""
