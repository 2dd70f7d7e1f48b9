"""Who answers: models, each by itself and once more under interventions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from satlens.analysis.interventions.gates import Intervention, intervene
from satlens.analysis.interventions.spec import interventions_label
from satlens.analysis.scoring.estimates import Pair
from satlens.checkpoints import load
from satlens.errors import AnalysisError, HookError
from satlens.models.decoder import Decoder
from satlens.models.identity import weights_sha256

Model = Decoder | str | Path


@dataclass(frozen=True, eq=False)
class Arm:
    """A model that answers, with what is done to it."""

    label: str
    model: Decoder
    interventions: tuple[Intervention, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """The model and what was done to it, for a summary."""
        return {
            "checkpoint": self.model.provenance.get("checkpoint"),
            "sha256": self.model.provenance.get("sha256"),
            "weights_sha256": weights_sha256(self.model),
            "variant": self.model.cfg.variant,
            "interventions": interventions_label(self.interventions) or None,
        }


def named_models(models: Model | Sequence[Model] | Mapping[str, Model]) -> dict[str, Model]:
    """Models by label: the given ones, or the checkpoint each was loaded from.

    Raises:
        AnalysisError: none, or two with one label.
    """
    if isinstance(models, Mapping):
        found = {str(label): model for label, model in models.items()}
    else:
        each = [models] if isinstance(models, Decoder | str | Path) else list(models)
        found = {}
        for model in each:
            label = _label(model)
            if label in found:
                raise AnalysisError(
                    f"models: two are called {label!r}; give a dict with a name for each"
                )
            found[label] = model
    if not found:
        raise AnalysisError("models: there is none")
    return found


def _label(model: Model) -> str:
    if isinstance(model, Decoder):
        return str(model.provenance.get("checkpoint") or model.cfg.variant)
    path = Path(model)
    return "/".join(path.parts[-2:]) if path.is_absolute() else str(model)


def changed_label(label: str, interventions: Sequence[Intervention]) -> str:
    """Label of a model under interventions."""
    return f"{label} + {interventions_label(interventions)}"


def arms_of(
    models: Mapping[str, Model], interventions: tuple[Intervention, ...], device: str
) -> Iterator[Arm]:
    """Every model by itself and under the interventions, loaded one after the other.

    Models beside the first that have nothing for the interventions are only scored by themselves.

    Raises:
        HookError, AnalysisError: the first has nothing for them.
    """
    for place, (label, source) in enumerate(models.items()):
        model = source if isinstance(source, Decoder) else load(source, device=device)
        arm = Arm(label, model, ())
        if not interventions:
            yield arm
            continue
        try:
            with intervene(model, *interventions):
                pass
        except (HookError, AnalysisError):
            if place == 0:
                raise
            yield arm
            continue
        yield arm
        yield Arm(changed_label(label, interventions), model, interventions)


def check_contrasts(labels: Sequence[str], contrasts: Sequence[Pair] | None) -> list[Pair]:
    """Which models to compare: the given pairs, or every model with the first.

    Raises:
        AnalysisError: a contrast names no model.
    """
    if contrasts is None:
        return [(label, labels[0]) for label in labels[1:]]
    pairs = [(model, baseline) for model, baseline in contrasts]
    for name in (name for pair in pairs for name in pair):
        if name not in labels:
            raise AnalysisError(f"contrasts: no model {name!r}; there are {', '.join(labels)}")
    return pairs
