"""Names of tasks: what the papers list, what users may type, what is refused."""

from __future__ import annotations

import pytest

from satlens.errors import AnalysisError
from satlens.tasks.suite import GROUPS, RECALL, RETRIEVAL, RETRIEVAL_TWICE, task_names, task_spec


def test_the_suite_is_the_papers():
    zero_shot = "lambada piqa hellaswag winogrande arc-easy arc-challenge boolq sciq openbookqa"
    assert list(GROUPS["zero-shot"]) == [*zero_shot.split(), "wikitext"]
    assert list(RETRIEVAL) == "swde fda squad-completion nq triviaqa drop".split()
    assert list(RETRIEVAL_TWICE) == [f"{name}-twice" for name in RETRIEVAL]


def test_groups_are_written_out_once_in_the_order_given():
    assert task_names(["fda", "retrieval", "mqar"])[:3] == ["fda", "swde", "squad-completion"]
    assert len(task_names([*GROUPS, *GROUPS, *RECALL])) == 10 + 6 + 6 + 1


def test_a_twice_variant_reads_the_file_and_passages_of_its_once_variant():
    for once, twice in zip(RETRIEVAL, RETRIEVAL_TWICE, strict=True):
        one, two = task_spec(once), task_spec(twice)
        assert (one.data, one.cluster, one.hub, one.split) == (
            two.data,
            two.cluster,
            two.hub,
            two.split,
        )
        assert set(one.fields) <= set(two.fields)
        assert (one.twice, two.twice) == (False, True)


def test_recall_takes_its_number_of_pairs_from_the_name():
    assert (task_spec("mqar").n_pairs, task_spec("mqar").chance) == (8, 1 / 8)
    assert (task_spec("mqar-32").n_pairs, task_spec("mqar-32").chance) == (32, 1 / 32)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hellaswage", "did you mean 'hellaswag'"),
        ("xyz", "known: lambada, piqa"),
        ("mqar-1", "between 2 and 64"),
        ("mqar-65", "between 2 and 64"),
        ("mqar-08", "no task 'mqar-08'"),
    ],
)
def test_unknown_names_are_refused_in_one_line(name, says):
    with pytest.raises(AnalysisError, match=says) as caught:
        task_names([name])
    assert "\n" not in str(caught.value)


def test_naming_nothing_is_refused():
    with pytest.raises(AnalysisError, match="no task was named"):
        task_names([])
