"""Interventions on gates, routes and reads, and what they are fitted on."""
