"""What an analysis reads, one window at a time from the cache."""

from __future__ import annotations

import numpy as np
import torch

N_CTX = 16


@torch.no_grad()
def cached(model, docs, hooks):
    """Hook -> (tokens, width) over the counted tokens of all documents, one window at a time."""
    rows = {hook: [] for hook in hooks}
    for document in docs:
        for start in range(0, len(document.tokens) - 1, N_CTX):
            piece = torch.from_numpy(document.tokens[start : start + N_CTX + 1][:-1])[None]
            _, cache = model.run_with_cache(piece, names_filter=list(hooks))
            for hook in hooks:
                rows[hook].append(cache[hook][0, 1:].double().numpy())
    return {hook: np.concatenate(parts) for hook, parts in rows.items()}
