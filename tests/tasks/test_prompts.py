"""Prompts of the retrieval tasks, character by character, against texts written out by hand."""

from __future__ import annotations

import pytest

from satlens.tasks.load import load_tasks
from satlens.tasks.prompts import PROMPTS, answers, contains, passage, without_question
from satlens.tasks.suite import RETRIEVAL, RETRIEVAL_TWICE

CANAL = "The Ostrey canal, dug between 1802 and 1809, joins two lakes."
GREY = "Grey Point Lighthouse. Height: 31 metres. Keeper: Ada Finch. Stone: granite."
PUMP = (
    "510(k) summary. Device: Vela infusion pump. Applicant: Norrow Medical. "
    "Predicate device: Vela One. Date prepared: 4 May 2011."
)
FERRY = (
    "The ferry to Skarholm leaves at seven. It carries forty people, and its captain is Liv Aune."
)
FINAL = (
    "In the final the Terns scored 21 points, the Gulls 14. Odd Berg kicked two field goals, "
    "of 33 and 41 yards."
)
# Marks go, the blanks around them stay; of two full stops at the end both go and one comes back.
CHEESE = "Cheeses of Ostrey  The blue cheese of Ostrey is called Vellan.  It ripens in caves."
EXPECTED = {
    "nq": ("nq", 0, f"{CANAL} The canal was finished in"),
    "nq-twice": (
        "nq",
        0,
        f"when was the ostrey canal finished {CANAL}\n{CANAL} The canal was finished in",
    ),
    "triviaqa": ("triviaqa", 0, f"{CHEESE} The blue cheese of Ostrey is called"),
    "triviaqa-twice": (
        "triviaqa",
        0,
        f"What is the blue cheese of Ostrey called? {CHEESE}\n{CHEESE} "
        "The blue cheese of Ostrey is called",
    ),
    "drop": ("drop", 1, f"{FINAL} The final was won by the"),
    "drop-twice": (
        "drop",
        1,
        f"Which team won the final? {FINAL}\n{FINAL} The final was won by the",
    ),
    "swde-twice": ("swde", 0, f"Information about Height. {GREY}\n{GREY} Height:"),
    "fda-twice": (
        "fda",
        1,
        f"Information about Predicate device. {PUMP}\n{PUMP} Predicate device:",
    ),
    "squad-completion-twice": (
        "squad-completion",
        1,
        f"When does the ferry leave? {FERRY}\n{FERRY} The ferry leaves at",
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_prompt_is_the_published_one(name, sample_rows):
    data, number, expected = EXPECTED[name]
    assert PROMPTS[name](sample_rows(data)[number]) == expected


@pytest.mark.parametrize("name", [name for name in PROMPTS if name.endswith("-twice")])
def test_read_twice_holds_the_passage_twice(name, sample_rows):
    data, number, _ = EXPECTED[name]
    first, second = PROMPTS[name](sample_rows(data)[number]).split("\n")
    sentence = second.split(". ")[0]
    assert sentence in first


def test_copies_of_the_question_go_whatever_their_case():
    assert without_question("A b. WHO IS who is", "who is") == "A b. WHO IS "
    assert without_question("A b.WHO ISwho is", "who is") == "A b."
    assert without_question("who is", "who is") == ""


def test_nq_loses_one_copy_of_its_question_and_no_other_case():
    row = {"context": "A b. It isIt is", "question": "It is"}
    assert PROMPTS["nq"](row) == "A b. It is. It is"
    assert PROMPTS["drop"](row) == "A b. It is"
    assert PROMPTS["nq"](row | {"context": "A b. it is"}) == "A b. it is. It is"


def test_questions_on_one_passage_have_it_in_common(sample_rows):
    first, second, other = (passage(r["context"], r["question"]) for r in sample_rows("nq"))
    assert first == second == CANAL != other


@pytest.mark.parametrize(
    ("generated", "right", "score"),
    [
        (" it was VELLAN, they say", ["Vellan"], 1.0),
        ("41 yards (long)", ["no", "(LONG)"], 1.0),  # no answer is a pattern
        ("vel lan", ["Vellan"], 0.0),
        ("", ["Vellan"], 0.0),
    ],
)
def test_right_is_what_contains_an_answer(generated, right, score):
    assert contains(generated, right) == score


def test_an_empty_answer_is_no_answer():
    assert answers({"answers": [" Holm ", "", "  "]}) == ["Holm"]
    assert answers({"value": " slate\n"}) == ["slate"]


@pytest.mark.parametrize("name", [*RETRIEVAL, *RETRIEVAL_TWICE])
def test_every_retrieval_task_answers_with_a_line_of_48_tokens_at_most(name, samples):
    pytest.importorskip("lm_eval")
    (loaded,) = load_tasks([name], data_dir=samples, limit=1)
    loaded.task.build_all_requests(rank=0, world_size=1)
    (request,) = loaded.task.instances
    assert request.args[1]["until"] == ["\n"]
    assert request.args[1]["max_gen_toks"] == 48
