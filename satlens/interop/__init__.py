"""Bridges to other tools. Each module is imported by name, when it is needed.

``huggingface`` registers satlens models with transformers' Auto classes; ``nnsight`` wraps them for
tracing; ``transformer_lens`` has what its patching helpers lack for value residuals.
"""
