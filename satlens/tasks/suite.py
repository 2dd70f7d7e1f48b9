"""The tasks that the papers score models on, their names and what each needs.

Tasks that lm-eval has (zero-shot; SWDE, FDA and SQuAD completion) keep its prompt and metric: only
where the rows come from is replaced, and where answers to SQuAD completion end
(:attr:`TaskSpec.difference`). In-context NQ, TriviaQA and DROP and everything read twice
follow the evaluation of Arora et al., "Just read twice" (arXiv:2407.05483), re-implemented here;
lm-eval's ``nq_open`` and ``triviaqa`` are closed-book and its ``drop`` scores F1: other tasks.
Multi-query associative recall is that of Arora et al., "Zoology" (arXiv:2312.04927), as text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from satlens.errors import AnalysisError
from satlens.tasks import rows

DEFAULT_PAIRS = 8
MAX_PAIRS = 64


@dataclass(frozen=True)
class TaskSpec:
    """A task: what it is called, what it reads and what guessing scores.

    Attributes:
        name: what users type.
        base: the file of lm-eval that defines prompt and metric, relative to its ``tasks``; None
            for tasks that are defined here.
        row: the model of a row.
        split: the split that is scored, under its name on the hub.
        fewshot_split: where examples come from; None: from ``split`` itself, of what is loaded.
        chance: the score of guessing on the metrics of :attr:`chance_metrics`; None where there is
            none (perplexities). 0.0 for continuations and generated answers, which are right by
            chance too rarely to matter (short numbers in DROP are the exception).
        chance_metrics: the metrics that ``chance`` belongs to.
        cluster: the field that names a row's passage; None: each row is its own.
        data: stem of the local file (a twice variant reads that of its once variant).
        hub: (id, configuration) on the Hugging Face hub; None for tasks without data.
        n_pairs: pairs in a context of associative recall; 0 for other tasks.
        difference: how the task differs from lm-eval's of the same file; empty where it does not.
    """

    name: str
    base: str | None
    row: type[rows.Row]
    split: str
    chance: float | None
    data: str
    fewshot_split: str | None = None
    chance_metrics: tuple[str, ...] = ("acc", "acc_norm")
    cluster: str | None = None
    hub: tuple[str, str | None] | None = None
    n_pairs: int = 0
    difference: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that every row must have."""
        return tuple(n for n, field in self.row.model_fields.items() if field.is_required())

    @property
    def twice(self) -> bool:
        """Whether the prompt holds the passage twice."""
        return self.name.endswith("-twice")


def _zero_shot(
    name: str,
    base: str,
    row: type[rows.Row],
    hub: tuple[str, str | None],
    split: str,
    chance: float | None,
    cluster: str | None = None,
    fewshot_split: str | None = "train",
) -> TaskSpec:
    return TaskSpec(name, base, row, split, chance, name, fewshot_split, cluster=cluster, hub=hub)


_ARC = "allenai/ai2_arc"
_ZERO_SHOT = (
    _zero_shot(
        "lambada",
        "lambada/lambada_openai.yaml",
        rows.Lambada,
        ("EleutherAI/lambada_openai", "default"),
        "test",
        0.0,
        fewshot_split=None,
    ),
    _zero_shot("piqa", "piqa/piqa.yaml", rows.Piqa, ("baber/piqa", None), "validation", 1 / 2),
    _zero_shot(
        "hellaswag",
        "hellaswag/hellaswag.yaml",
        rows.HellaSwag,
        ("Rowan/hellaswag", None),
        "validation",
        1 / 4,
        "source_id",
    ),
    _zero_shot(
        "winogrande",
        "winogrande/default.yaml",
        rows.WinoGrande,
        ("allenai/winogrande", "winogrande_xl"),
        "validation",
        1 / 2,
    ),
    _zero_shot("arc-easy", "arc/arc_easy.yaml", rows.Arc, (_ARC, "ARC-Easy"), "test", 1 / 4),
    _zero_shot(
        "arc-challenge",
        "arc/arc_challenge.yaml",
        rows.Arc,
        (_ARC, "ARC-Challenge"),
        "test",
        1 / 4,
    ),
    _zero_shot(
        "boolq",
        "super_glue/boolq/default.yaml",
        rows.BoolQ,
        ("aps/super_glue", "boolq"),
        "validation",
        1 / 2,
        "passage",
    ),
    _zero_shot(
        "sciq", "sciq/sciq.yaml", rows.SciQ, ("allenai/sciq", None), "test", 1 / 4, "support"
    ),
    _zero_shot(
        "openbookqa",
        "openbookqa/openbookqa.yaml",
        rows.OpenBookQA,
        ("allenai/openbookqa", "main"),
        "test",
        1 / 4,
    ),
    _zero_shot(
        "wikitext",
        "wikitext/wikitext.yaml",
        rows.WikiText,
        ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"),
        "test",
        None,
    ),
)


def _retrieval(
    name: str,
    base: str | None,
    once: type[rows.Row],
    twice: type[rows.Row],
    hub: tuple[str, str | None],
    cluster: str,
    difference: str = "",
) -> tuple[TaskSpec, TaskSpec]:
    """A retrieval task read once and read twice."""

    def spec(suffix: str, base: str | None, row: type[rows.Row]) -> TaskSpec:
        return TaskSpec(
            name + suffix,
            base,
            row,
            "validation",
            0.0,
            name,
            chance_metrics=("contains",),
            cluster=cluster,
            hub=hub,
            difference=difference if base else "",
        )

    return spec("", base, once), spec("-twice", None, twice)


_RETRIEVAL_PAIRS = (
    _retrieval(
        "swde",
        "swde/swde.yaml",
        rows.Extraction,
        rows.Extraction,
        ("hazyresearch/based-swde-v2", "default"),
        "file_name",
    ),
    _retrieval(
        "fda",
        "fda/fda.yaml",
        rows.Extraction,
        rows.Extraction,
        ("hazyresearch/based-fda", "default"),
        "file_name",
    ),
    _retrieval(
        "squad-completion",
        "squad_completion/squad_completion.yaml",
        rows.SquadCompletion,
        rows.SquadCompletion,
        ("hazyresearch/based-squad", "default"),
        "context",
        "answers end with the line or 48 tokens, not an empty line or 256",
    ),
    *(
        _retrieval(name, None, rows.ContextQuestion, rows.ContextQuestionTwice, hub, "context")
        for name, hub in (
            # There are versions of 512, 1,024 and 2,048 tokens; the paper's table has the second.
            ("nq", ("hazyresearch/based_nq_1024", None)),
            ("triviaqa", ("hazyresearch/based_triviaqa", None)),
            ("drop", ("hazyresearch/based_drop", None)),
        )
    ),
)

ZERO_SHOT = tuple(spec.name for spec in _ZERO_SHOT)
RETRIEVAL = tuple(once.name for once, _ in _RETRIEVAL_PAIRS)
RETRIEVAL_TWICE = tuple(twice.name for _, twice in _RETRIEVAL_PAIRS)
RECALL = ("mqar",)

GROUPS: dict[str, tuple[str, ...]] = {
    "zero-shot": ZERO_SHOT,
    "retrieval": RETRIEVAL,
    "retrieval-twice": RETRIEVAL_TWICE,
}
"""Names that stand for several tasks."""

_SPECS = {spec.name: spec for spec in (*_ZERO_SHOT, *(s for p in _RETRIEVAL_PAIRS for s in p))}


def task_spec(name: str) -> TaskSpec:
    """The task of that name; ``mqar-N`` is associative recall with N pairs a context.

    Raises:
        AnalysisError: no task has the name, or N is not between 2 and 64.
    """
    if name in _SPECS:
        return _SPECS[name]
    recall = re.fullmatch(r"mqar(?:-([1-9]\d*))?", name)
    if recall:
        return _recall(name, int(recall[1] or DEFAULT_PAIRS))
    known = [*_SPECS, *RECALL, *GROUPS]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}, mqar-N"
    raise AnalysisError(f"no task {name!r} ({hint})")


def _recall(name: str, n_pairs: int) -> TaskSpec:
    if not 2 <= n_pairs <= MAX_PAIRS:
        raise AnalysisError(f"task {name!r}: pairs must be between 2 and {MAX_PAIRS}")
    return TaskSpec(
        name,
        None,
        rows.Recall,
        "test",
        1 / n_pairs,
        name,
        chance_metrics=("acc",),
        cluster="context_id",
        n_pairs=n_pairs,
    )


def task_names(names: Sequence[str]) -> list[str]:
    """Names of tasks, with groups (:data:`GROUPS`) written out and repeats left out.

    Raises:
        AnalysisError: a name is neither a task nor a group, or there is none.
    """
    found = [task for name in names for task in GROUPS.get(name, (name,))]
    for name in found:
        task_spec(name)
    if not found:
        raise AnalysisError("no task was named")
    return list(dict.fromkeys(found))
