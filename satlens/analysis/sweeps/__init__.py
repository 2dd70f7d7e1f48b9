"""Interventions swept over a model: cases, the shared pass, screens and tables."""
