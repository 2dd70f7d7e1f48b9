"""Putting tasks to a model through lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from satlens.analysis.engine.stream import Progress
from satlens.analysis.scoring.answers import Answers, answers_of

if TYPE_CHECKING:
    from satlens.analysis.scoring.arms import Arm
    from satlens.interop.lm_eval import SatlensLM
    from satlens.tasks.load import LoadedTask

_KEPT = ("doc_id", "arguments", "filter", "metrics")


def ask(
    arm: Arm,
    tasks: Sequence[LoadedTask],
    *,
    seed: int,
    responses: str | Path | None,
    progress: Progress | None,
    **options: Any,
) -> Iterator[tuple[LoadedTask, Answers]]:
    """What an arm answers to each task; the same in every process of torchrun.

    Args:
        seed: of the choice of examples before each question.
        responses: folder of answers that are known, to which new ones are added.
        options: of :class:`satlens.interop.lm_eval.SatlensLM`.

    Raises:
        AnalysisError: as :func:`satlens.analysis.scoring.answers.answers_of`.
        DataError: a prompt of any task is too long, and ``truncation`` is ``error``.
    """
    from satlens.interop.lm_eval import SatlensLM

    asked = ""

    def show(stage: str, done: int, total: int) -> None:
        if progress is not None:
            progress(f"{arm.label}: {asked}", done, total)

    lm = SatlensLM(
        model=arm.model,
        intervene=arm.interventions,
        responses=responses,
        progress=show,
        **options,
    )
    # Of all tasks before the first is run: a long one would be found too long at its end.
    for task in tasks:
        task.task.set_fewshot_seed(seed)
        with _no_bars():
            task.task.build_all_requests(rank=lm.rank, world_size=lm.world_size)
        lm.check(task.task.instances)
    for task in tasks:
        asked = task.name
        # Writing the questions moves the draws of examples on; every arm gets the same.
        task.task.set_fewshot_seed(seed)
        yield task, _answers(lm, task)


def _answers(lm: SatlensLM, task: LoadedTask) -> Answers:
    from lm_eval.evaluator import evaluate

    given: Any = {"tasks": {task.name: task.task}, "groups": {}}
    with _no_bars():
        found: Any = evaluate(lm, task_dict=given, bootstrap_iters=0)
    samples = _everywhere(lm, found["samples"][task.name] if found is not None else [])
    kind = str(task.task.OUTPUT_TYPE)
    notes = {sample["doc_id"]: _notes(lm, kind, sample) for sample in samples}
    different = {key: note for of in notes.values() for key, note in of.items()}
    return answers_of(
        task.name,
        samples,
        task.task.aggregation(),
        truncated={doc for doc, of in notes.items() if any(n.truncated for n in of.values())},
        skipped={doc for doc, of in notes.items() if any(n.skipped for n in of.values())},
        n_tokens=sum(note.tokens for note in different.values()),
    )


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without the bars of the harness over questions that are being written, which it offers no
    setting for; what takes time is told to ``progress``."""
    import lm_eval.api.task as harness

    shown = harness.tqdm
    harness.tqdm = partial(shown, disable=True)
    try:
        yield
    finally:
        harness.tqdm = shown


def _notes(lm: SatlensLM, kind: str, sample: dict[str, Any]) -> dict[str, Any]:
    """What became of the requests of a question, by their hash."""
    from lm_eval.api.model import hash_args

    kind = "loglikelihood" if kind == "multiple_choice" else kind
    keys = [hash_args(kind, arguments) for arguments in sample["arguments"]]
    return {key: lm.notes[key] for key in keys}


def _everywhere(lm: SatlensLM, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the first of several processes has collected, in all of them."""
    kept = [{key: one[key] for key in (*_KEPT, *one["metrics"])} for one in samples]
    if lm.world_size == 1:
        return kept
    import torch.distributed as dist

    shared = [kept]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]
