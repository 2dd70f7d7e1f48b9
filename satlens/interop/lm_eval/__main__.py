"""``python -m satlens.interop.lm_eval``: lm-eval's own command, which knows satlens models."""

from __future__ import annotations

from satlens.interop.lm_eval import main

main()
