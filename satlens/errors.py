"""Errors that a user can act on: one line, naming the file and the field."""


class SatlensError(Exception):
    """Base of every error that satlens raises on purpose; the CLI prints it as one line."""


class ConfigError(SatlensError):
    """A configuration has an unknown, missing or impossible field."""


class CheckpointError(SatlensError):
    """A checkpoint is unreadable, damaged, unsafe or in no known layout."""


class DataError(SatlensError):
    """A corpus, tokenizer or shard is unreadable, damaged, empty or does not fit the model."""


class HookError(SatlensError):
    """A hook point, layer or head was asked for that this model does not have."""


class AnalysisError(SatlensError):
    """An analysis was asked of a model or of data that cannot answer it."""
