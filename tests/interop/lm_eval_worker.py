"""One process of an evaluation of a checkpoint by lm-eval.

    python lm_eval_worker.py CHECKPOINT RESPONSES|- KILL_AFTER

Kills itself once KILL_AFTER requests are answered (0: never). Prints, in the first process, a line
of JSON: the answers of each question, and the counts of all processes.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
from lm_eval.evaluator import evaluate

from satlens.interop.lm_eval import SatlensLM
from satlens.interop.lm_eval.processes import leave
from satlens.tasks.load import load_tasks


def answered(lm):
    """Answers and counts of a few questions; None where another process has collected them."""
    (task,) = load_tasks(["mqar"], limit=5)
    found = evaluate(lm, {"tasks": {task.name: task.task}, "groups": {}}, bootstrap_iters=0)
    if found is None:
        return None
    samples = sorted(found["samples"][task.name], key=lambda sample: sample["doc_id"])
    return {"answers": [sample["filtered_resps"] for sample in samples], "counts": lm.counts}


def main(checkpoint, responses, kill_after):
    def progress(label, done, total):
        if kill_after and done >= kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    folder = None if responses == "-" else responses
    found = answered(SatlensLM(checkpoint, responses=folder, progress=progress))
    if found is not None:
        print(json.dumps(found), flush=True)
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
