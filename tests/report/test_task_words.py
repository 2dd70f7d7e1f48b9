"""Sentences about tasks follow the numbers: chance, lost evidence, what interventions cost."""

from __future__ import annotations

import json

import mock_tasks as mock
import numpy as np
import pandas as pd
import pytest

from satlens.report import words
from satlens.report.collect import collect
from satlens.report.sections.tasks import tasks_section

MINUS = "\N{MINUS SIGN}"


def said(findings) -> str:
    return "\n".join(findings)


@pytest.mark.parametrize(
    ("score", "words_", "kind"),
    [
        (0.40, "above chance", "found"),
        (0.10, "below chance", "found"),
        (0.27, "not told from chance", "open"),
    ],
)
def test_a_score_is_set_beside_chance(score: float, words_: str, kind: str) -> None:
    table = mock.tasks({mock.MODEL: {"piqa": score}}, chance=0.25, half=0.04)
    (finding,) = words.tasks(table, None, "satformer (seed 0)")
    assert finding.kind == kind
    assert finding == (
        f"satformer (seed 0), {words_}: piqa {100 * score:.1f} % (95 % interval "
        f"{100 * score - 4:.1f} to {100 * score + 4:.1f} %; chance 25 %)."
    )


def test_without_an_interval_no_side_of_chance_is_taken() -> None:
    table = mock.tasks({mock.MODEL: {"piqa": 0.9}})
    table = table.assign(score_low=np.nan, score_high=np.nan, flags="units<10")
    (finding,) = words.tasks(table)
    assert finding.kind == "open"
    assert "too few passages for an interval: piqa 90.0 % (no interval" in finding


def test_where_a_guess_is_worth_nothing_no_chance_is_named() -> None:
    table = mock.tasks({mock.MODEL: {"swde": 0.3}}, chance=0.0, metric="contains")
    (finding,) = words.tasks(table, None, "m")
    assert finding == (
        "m answers, where a guess is worth nothing: swde 30.0 % (95 % interval 26.0 to 34.0 %)."
    )


def test_perplexities_are_no_shares_and_less_of_them_is_better() -> None:
    scores = {mock.MODEL: {"wikitext": 212.34}}
    table = mock.tasks(scores, metric="word_perplexity", chance=np.nan, half=10.0)
    (finding,) = words.tasks(table, None, "m")
    assert finding == (
        "m: word perplexity on wikitext 212.3 (95 % interval [202.3, 222.3]); less is better."
    )


def test_cut_and_skipped_questions_are_counted_and_groups_do_not_count_them_twice() -> None:
    scores = {mock.MODEL: {"swde": 0.3, "fda": 0.2}}
    table = mock.group(mock.tasks(scores, chance=0.0, n_truncated=3, n_skipped=2))
    notes = [finding for finding in words.tasks(table) if finding.kind == "caveat"]
    assert notes == [
        "Cut to the model's context, so that the evidence may be gone: 3 of 80 questions of swde "
        "and 3 of 80 questions of fda.",
        "Questions longer than the model's context, left out of the scores: 2 of swde and 2 of "
        "fda.",
    ]


def intervened(delta: float, **changes: object) -> list:
    table = mock.tasks({mock.MODEL: {"swde": 0.5}, mock.CLOSED: {"swde": 0.5 + delta}})
    differences = mock.task_differences({"swde": delta}, half=0.03).assign(**changes)
    found = words.tasks(table, differences, "satformer (seed 0)")
    return [finding for finding in found if "zero-gate" in finding]


def test_what_an_intervention_takes_away_has_its_sign_and_its_interval() -> None:
    (lost,) = intervened(-0.1)
    assert lost.kind == "found"
    assert lost == (
        "satformer (seed 0) + zero-gate: swde is lower by 10.0 points, 95 % interval "
        f"[{MINUS}13.0, {MINUS}7.0] points (sign-flip p 0.001, 0.002 adjusted over the tasks)."
    )
    (gained,) = intervened(0.1)
    assert "swde is higher by 10.0 points, 95 % interval [+7.0, +13.0] points" in gained


def test_a_null_difference_is_said_with_its_interval() -> None:
    (finding,) = intervened(-0.01)
    assert finding.kind == "open"
    assert finding == (
        "satformer (seed 0) + zero-gate: no difference is established: swde "
        f"({MINUS}1.0 points, 95 % interval [{MINUS}4.0, +2.0] points)."
    )


def test_that_nothing_changes_is_said_so() -> None:
    (finding,) = intervened(0.0, delta_low=0.0, delta_high=0.0)
    assert finding == (
        "satformer (seed 0) + zero-gate: no difference is established: swde (nothing changes)."
    )


def test_one_of_many_tasks_is_a_direction_until_its_p_is_adjusted() -> None:
    (finding,) = intervened(-0.1, p_adjusted=0.2)
    assert finding.kind == "direction"
    assert "0.2 adjusted over the tasks" in finding


def test_two_checkpoints_are_compared_by_their_names() -> None:
    table = mock.tasks({"a": {"swde": 0.5}, "b": {"swde": 0.4}})
    differences = mock.task_differences({"swde": -0.1}, model="b", baseline="a")
    found = words.tasks(table, differences, "a")
    assert any(finding.startswith("b against a: swde is lower by 10.0") for finding in found)
    assert any(finding.startswith("b, above chance: swde 40.0 %") for finding in found)


def test_no_score_is_missing_or_undefined_and_never_a_number() -> None:
    table = mock.tasks({mock.MODEL: {"swde": 0.5}})
    (finding,) = words.tasks(table.iloc[:0], None, "m")
    assert (finding, finding.kind) == ("m: no task was scored.", "missing")
    (finding,) = words.tasks(table.assign(score=np.nan, score_low=np.nan, score_high=np.nan))
    assert finding == "model: no score is defined on swde."


def test_seeds_and_arms_are_counted_on_their_side_of_chance() -> None:
    def of(score: float) -> pd.DataFrame:
        return mock.tasks({mock.MODEL: {"mqar": score}, mock.CLOSED: {"mqar": 0.9}}, chance=0.125)

    (finding,) = words.chance_across(
        {"a": {0: of(0.6), 1: of(0.5)}, "b": {0: of(0.6), 1: of(0.13)}, "c": {0: of(0.02)}}
    )
    assert finding.kind == "open"
    assert finding == (
        "mqar (chance 12.5 %), above chance: a (in both seeds) and b (in 1 of 2 seeds); "
        "below chance: c; not told from chance: b (in 1 of 2 seeds)."
    )


def test_effects_of_interventions_are_of_groups_where_there_are_any() -> None:
    deltas = {"swde": -0.1, "fda": -0.2}
    assert set(words.difference_effects(mock.task_differences(deltas))) == {
        ("zero-gate", "swde", "acc"),
        ("zero-gate", "fda", "acc"),
    }
    grouped = mock.task_differences({**deltas, "retrieval (mean of 2)": -0.15})
    ((key, found),) = words.difference_effects(grouped).items()
    assert key == ("zero-gate", "retrieval (mean of 2)", "acc")
    assert found.value == -0.15


def test_the_section_of_a_study_has_all_seeds_their_tables_and_what_they_agree_on(tmp_path) -> None:
    for seed, lost in ((0, 0.1), (1, 0.15)):
        mock.task_result(lost).save(tmp_path / f"results/satformer-seed{seed}")
    mock.task_result(None, score=0.24).save(tmp_path / "results/transformer-seed0")
    section = tasks_section(collect(tmp_path))
    assert section is not None
    assert [str(finding) for finding in section.headlines] == [
        "mqar (chance 25 %), above chance: satformer (in both seeds); not told from chance: "
        "transformer.",
        f"satformer + zero-gate: mqar is lower in both seeds: seed 0: {MINUS}0.100 "
        f"[{MINUS}0.130, {MINUS}0.070]; seed 1: {MINUS}0.150 [{MINUS}0.180, {MINUS}0.120] (acc).",
    ]
    assert any("MQAR asks for the partner of a word" in note for note in section.caveats)
    titles = [part.title for part in section.parts]
    assert titles == ["satformer", "satformer, seed 0", "satformer, seed 1", "transformer, seed 0"]
    tables = [table.title for table in section.parts[1].tables]
    assert [title.split(" of ")[0] for title in tables] == [
        "Tasks",
        "Task differences",
        "Task protocol",
        "Task answers",
    ]


def test_what_a_model_at_chance_loses_is_no_headline(tmp_path) -> None:
    mock.task_result(0.01, score=0.26).save(tmp_path / "results/satformer-seed0")
    section = tasks_section(collect(tmp_path))
    assert section is not None
    assert [str(finding) for finding in section.headlines] == [
        "mqar (chance 25 %), not told from chance: satformer."
    ]
    assert any("+ zero-gate: no difference" in finding for finding in section.parts[0].findings)


@pytest.mark.parametrize(
    ("score", "metric", "chance", "answer"),
    [
        (0.6, "acc", 0.25, True),
        (0.27, "acc", 0.25, False),
        (0.1, "contains", 0.0, True),
        (0.02, "contains", 0.0, False),
        (300.0, "word_perplexity", np.nan, True),
    ],
)
def test_only_a_score_above_chance_can_be_lost(score, metric, chance, answer) -> None:
    table = mock.tasks({mock.MODEL: {"x": score}}, metric=metric, chance=chance)
    assert words.has_to_lose(table, "x", metric) is answer


def test_a_study_without_tasks_has_no_section_and_a_planned_one_says_what_is_missing(
    tmp_path,
) -> None:
    mock.task_result().save(tmp_path / "results/x-seed0")
    for file in (tmp_path / "results/x-seed0").glob("tasks.*"):
        file.unlink()
    assert tasks_section(collect(tmp_path)) is None
    arms = {"x": {"variant": "satformer", "analyses": ["tasks"]}}
    plan = {"asked": {}, "recipe": {"name": "x", "seeds": 1, "arms": arms}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    section = tasks_section(collect(tmp_path))
    assert section is not None
    assert "tasks of x (seed 0)" in section.parts[0].findings[0]
