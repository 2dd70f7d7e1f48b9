"""Prompts of the in-context retrieval tasks, read once and read twice.

White space is part of the protocol, so these follow the published evaluation of arXiv:2407.05483
character by character: where it strips a text, where it joins with a blank or a line break, and
that its full stops are stripped from both ends of a passage. Twice means: what is asked, the
passage, a line break, the passage again, and the start of the answer. (That evaluation also cuts
contexts to 1,000 tokens around the answer; nothing is cut here.)

For SWDE, FDA and SQuAD the prompt that is read once is lm-eval's; in SWDE its end differs from the
end of the one read twice ("Summary of information above" stays in the former), so a difference
between the two is not due to the second reading alone. All answers end with the line or 48 tokens;
lm-eval's own SQuAD completion (0.4.13) would end at an empty line or 256.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Doc = Mapping[str, Any]

_SWDE_SUMMARY = "Summary of information above..."
_TRIVIAQA_MARKS = re.compile(r"\[PAR\]|\[DOC\]|\[TLE\]")


def without_question(context: str, question: str) -> str:
    """A context without the copies of the question, in any case, that it ends with."""
    while context.lower().endswith(question.lower()):
        context = context[: -len(question)]
    return context


def _one_less(context: str, question: str) -> str:
    """A context without the last copy of the question: what the once prompt of NQ takes away."""
    return context.removesuffix(question)


def _context(doc: Doc, marks: bool, strip: Callable[[str, str], str]) -> str:
    context = doc["context"].strip()
    if marks:
        context = _TRIVIAQA_MARKS.sub("", context)
    return strip(context, doc["question"].strip()).strip().strip(".")


def _once(doc: Doc, marks: bool = False, strip: Callable = without_question) -> str:
    return f"{_context(doc, marks, strip)}. {doc['question'].strip()}"


def _twice(doc: Doc, asked: str, marks: bool = False) -> str:
    passage = _context(doc, marks, without_question).strip() + "."
    return f"{asked} {passage}\n{passage} {doc['question'].strip()}"


def nq(doc: Doc) -> str:
    """In-context Natural Questions, read once."""
    return _once(doc, strip=_one_less)


def nq_twice(doc: Doc) -> str:
    """In-context Natural Questions, read twice."""
    return _twice(doc, doc["orig_question"].strip(":"))


def triviaqa(doc: Doc) -> str:
    """In-context TriviaQA, read once: without the marks between its documents."""
    return _once(doc, marks=True)


def triviaqa_twice(doc: Doc) -> str:
    """In-context TriviaQA, read twice."""
    return _twice(doc, doc["orig_question"], marks=True)


def drop(doc: Doc) -> str:
    """In-context DROP, read once."""
    return _once(doc)


def drop_twice(doc: Doc) -> str:
    """In-context DROP, read twice."""
    return _twice(doc, doc["orig_question"].strip(":"))


def _key_twice(page: str, key: str) -> str:
    """Pages that end in ``key:`` (SWDE, FDA), twice."""
    asked = key[0].upper() + key[1:] + ":"
    if not page.endswith("."):
        page += "."
    return f"Information about {asked.strip(':')}. {page}\n{page} {asked}"


def swde_twice(doc: Doc) -> str:
    """SWDE read twice: the page up to its first summary line."""
    page = without_question(doc["text"].split(_SWDE_SUMMARY)[0], doc["key"] + ":")
    return _key_twice(page.strip("\n").strip(".").strip(), doc["key"])


def fda_twice(doc: Doc) -> str:
    """FDA read twice."""
    page = without_question(doc["text"], doc["key"] + ":")
    return _key_twice(page.strip("\n").strip("."), doc["key"])


def squad_completion_twice(doc: Doc) -> str:
    """SQuAD completion read twice: the question, the passage, then the completion prompt."""
    context = doc["context"].split("Question:")[0]
    return f"{doc['question']} {context}\n{doc['text'].strip()}"


def passage(context: str, question: str) -> str:
    """What questions on one passage have in common: their context without the question itself."""
    context = context.split("Question:")[0].strip()
    return without_question(context, question.strip()).strip()


PROMPTS: dict[str, Callable[[Doc], str]] = {
    "nq": nq,
    "nq-twice": nq_twice,
    "triviaqa": triviaqa,
    "triviaqa-twice": triviaqa_twice,
    "drop": drop,
    "drop-twice": drop_twice,
    "swde-twice": swde_twice,
    "fda-twice": fda_twice,
    "squad-completion-twice": squad_completion_twice,
}
"""From the name of a task that lm-eval does not have to its prompt."""


def answers(doc: Doc) -> list[str]:
    """Texts any of which is right, stripped."""
    given = doc["answers"] if "answers" in doc else [doc["value"]]
    return [answer.strip() for answer in given if answer.strip()]


def contains(generated: str, right: list[str]) -> float:
    """1.0 if a right answer stands anywhere in a generated text, in upper or lower case."""
    return float(any(re.search(re.escape(answer), generated, re.IGNORECASE) for answer in right))
