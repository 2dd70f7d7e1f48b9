"""What a task expects of a row of its data, field by field.

The fields are those of the data sets on the Hugging Face hub that lm-eval reads, so a file saved
from there works as it is; further fields are ignored. Types are strict: a label written as text
where the data set has a number is refused, since the prompt would come out differently.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from satlens.errors import DataError


def _encodable(text: str) -> str:
    found = next((place for place, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
    if found is not None:
        raise ValueError(f"lone surrogate U+{ord(text[found]):04X} at {found}")
    return text


def _written(text: str) -> str:
    if not text.strip():
        raise ValueError("empty text")
    return text


Plain = Annotated[str, AfterValidator(_encodable)]
Text = Annotated[Plain, AfterValidator(_written)]


class Row(BaseModel):
    """A question. Subclasses name the fields; see :func:`check_row`."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class Lambada(Row):
    """A passage whose last word is to be guessed."""

    text: Text

    @model_validator(mode="after")
    def _has_a_context(self) -> Lambada:
        if " " not in self.text.strip():
            raise ValueError("text: one word alone leaves no context to guess it from")
        return self


class Piqa(Row):
    """A goal and two solutions; ``label`` counts from 0."""

    goal: Text
    sol1: Text
    sol2: Text
    label: Literal[0, 1]


class HellaSwag(Row):
    """A scene (``ctx_a`` and the start of the next sentence, ``ctx_b``) and four endings."""

    activity_label: Text
    ctx_a: Plain
    ctx_b: Plain
    endings: Annotated[list[Text], Field(min_length=4, max_length=4)]
    label: Literal["0", "1", "2", "3"]
    source_id: Plain | None = None


class WinoGrande(Row):
    """A sentence with a blank (``_``) and the two words that might fill it."""

    sentence: Text
    option1: Text
    option2: Text
    answer: Literal["1", "2"]

    @model_validator(mode="after")
    def _has_a_blank(self) -> WinoGrande:
        if "_" not in self.sentence:
            raise ValueError("sentence: has no blank (_)")
        return self


class Choices(BaseModel):
    """Answers and the letters (or numbers) that name them."""

    model_config = Row.model_config

    text: Annotated[list[Text], Field(min_length=2)]
    label: list[Text]


class Choice(Row):
    """Base of the questions with a list of named answers."""

    choices: Choices
    answerKey: Text  # noqa: N815 - the field's name in the data

    @property
    def key(self) -> str:
        """The key as lm-eval looks it up."""
        return self.answerKey

    @model_validator(mode="after")
    def _key_names_a_choice(self) -> Choice:
        if len(self.choices.label) != len(self.choices.text):
            raise ValueError("choices: not as many labels as texts")
        if self.key not in self.choices.label:
            raise ValueError(f"answerKey: {self.answerKey!r} is none of the labels")
        return self


class Arc(Choice):
    """A question of a science exam."""

    question: Text


class OpenBookQA(Choice):
    """The start of a sentence and its possible ends."""

    question_stem: Text

    @property
    def key(self) -> str:
        """The key as lm-eval looks it up."""
        return self.answerKey.lstrip()


class BoolQ(Row):
    """A passage and a question about it: ``label`` 1 is yes."""

    passage: Text
    question: Text
    label: Literal[0, 1]


class SciQ(Row):
    """A question, its right and three wrong answers; ``support`` may be empty."""

    question: Text
    support: Plain
    distractor1: Text
    distractor2: Text
    distractor3: Text
    correct_answer: Text


class WikiText(Row):
    """A page."""

    page: Text


class Extraction(Row):
    """A page as ``text`` ending in a key whose value is wanted (SWDE, FDA)."""

    file_name: Text
    key: Text
    text: Text
    value: Text


class SquadCompletion(Row):
    """``text`` is the passage and the start of a sentence that ``value`` ends."""

    context: Text
    question: Text
    text: Text
    value: Text


class ContextQuestion(Row):
    """A passage and a question put as a sentence to complete; any of ``answers`` is right."""

    context: Text
    question: Text
    answers: Annotated[list[Plain], Field(min_length=1)]

    @model_validator(mode="after")
    def _has_an_answer(self) -> ContextQuestion:
        if not any(answer.strip() for answer in self.answers):
            raise ValueError("answers: all are empty")
        return self


class ContextQuestionTwice(ContextQuestion):
    """With the question as it was first asked, which the twice prompt opens with."""

    orig_question: Text


class Recall(Row):
    """Pairs of words, the key that is asked for, and the values among which to choose."""

    context: Text
    query: Text
    choices: list[Text]
    label: int
    context_id: Text


def check_row(row: Any, kind: type[Row], where: str) -> dict[str, Any]:
    """The fields of ``kind`` of a row, as plain data.

    Args:
        row: what the file holds in that place.
        where: names file and line (or row) in errors.

    Raises:
        DataError: not an object, or a field is missing, of another type or impossible.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where}: {type(row).__name__}, not an object with fields")
    try:
        return kind.model_validate(row).model_dump()
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"]))
        message = fault["msg"].removeprefix("Value error, ")
        if not field:  # a check across fields, whose message begins with the field
            field, _, message = message.partition(": ")
        raise DataError(f"{where}: field {field!r}: {message[0].lower()}{message[1:]}") from None
