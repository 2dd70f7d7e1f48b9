"""The section about tasks: scores beside chance, and what interventions take away."""

from __future__ import annotations

from satlens.analysis.result import Result
from satlens.report import caveats, words
from satlens.report.collect import Run
from satlens.report.effects import Effect, Finding, Frame, who
from satlens.report.page.layout import Section
from satlens.report.sections.parts import by_arm

NAME = "tasks"


def tasks_section(run: Run) -> Section | None:
    """Scores of every checkpoint on tasks, and the paired cost of interventions on them.

    None where no arm has or should have the result.
    """
    scored = run.of(NAME)

    def say(arm: str, seed: int, result: Result) -> list[Finding]:
        return words.tasks(result.table, _differences(result), who(arm, seed))

    def headline(arm: str, results: dict[int, Result]) -> list[Finding]:
        return _costs(arm, results)

    section = by_arm(run, NAME, "What can the models do?", _notes(scored), say, headline)
    if section is not None:
        tables = {arm: {k: r.table for k, r in seeds.items()} for arm, seeds in scored.items()}
        section.headlines = [*words.chance_across(tables), *section.headlines]
    return section


def _notes(scored: dict[str, dict[int, Result]]) -> list[Finding]:
    names = {
        str(task).partition("-")[0]
        for seeds in scored.values()
        for result in seeds.values()
        for task in result.table["task"]
    }
    return [*caveats.TASKS, caveats.MQAR] if "mqar" in names else list(caveats.TASKS)


def _differences(result: Result) -> Frame | None:
    return next((part.table for part in result.parts if part.name == "task_differences"), None)


def _costs(arm: str, results: dict[int, Result]) -> list[Finding]:
    """Whether the seeds of an arm tell the same about each intervention and task.

    Not of tasks on which none of them scores above chance.
    """
    effects: dict[tuple[str, str, str], dict[int, Effect]] = {}
    for seed, result in results.items():
        differences = _differences(result)
        if differences is not None:
            for key, found in words.difference_effects(differences).items():
                effects.setdefault(key, {})[seed] = found
    found = []
    for (what, task, metric), seeds in effects.items():
        if not any(words.has_to_lose(results[seed].table, task, metric) for seed in seeds):
            continue
        found += words.across_seeds(
            f"{arm} + {what}: {task}",
            seeds,
            up="is higher",
            down="is lower",
            unit=metric.replace("_", " "),
        )
    return found
