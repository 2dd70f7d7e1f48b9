"""The sections of a run's page, a question each."""
