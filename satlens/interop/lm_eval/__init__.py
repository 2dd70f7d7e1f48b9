"""satlens models in lm-evaluation-harness, under the name ``satlens``.

    import lm_eval, satlens.interop.lm_eval
    lm_eval.simple_evaluate("satlens", {"path": "folder"}, tasks=["lambada_openai"])

    python -m satlens.interop.lm_eval --model satlens --model_args path=folder --tasks ...

lm-eval finds a model only once something has imported it, so the second line is lm-eval's own
command with satlens models in it; Hugging Face folders of satlens models open there as well
(``--model hf --model_args pretrained=folder``). Needs ``pip install 'satlens[eval]'``.
"""

from __future__ import annotations

from satlens.interop.lm_eval.adapter import SatlensLM, main

__all__ = ["SatlensLM", "main"]
