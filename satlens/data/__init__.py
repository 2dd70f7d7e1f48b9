"""Corpora, tokenizers, shards, evaluation windows, training batches and tags."""
