"""satlens: train, open up and measure Transformers whose late layers read early ones.

Importing satlens loads no torch; each name below is imported when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

try:
    __version__ = version("satlens")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

_HOMES = {
    "AttnResStream": "satlens.config",
    "DeltaStream": "satlens.config",
    "DenseStream": "satlens.config",
    "GatedValueResidual": "satlens.config",
    "HyperStream": "satlens.config",
    "ModelConfig": "satlens.config",
    "MuddStream": "satlens.config",
    "NoValueResidual": "satlens.config",
    "ResidualStream": "satlens.config",
    "RoleDecoupledStream": "satlens.config",
    "StaticValueResidual": "satlens.config",
    "TrainConfig": "satlens.config",
    "SatlensError": "satlens.errors",
    "attention": "satlens.models.attention",
    "build": "satlens.models.build",
    "register_stream": "satlens.models.register",
    "KVCache": "satlens.models.cache",
    "load": "satlens.checkpoints",
    "save": "satlens.checkpoints",
    "PreparedDataset": "satlens.data.dataset",
    "prepare": "satlens.data.prepare",
    "check_paired": "satlens.training",
    "train": "satlens.training",
    "Result": "satlens.analysis.result",
    "ablate": "satlens.analysis.ablation",
    "attribute": "satlens.analysis.attribution",
    "analyze": "satlens.analysis.analyze",
    "bench": "satlens.analysis.efficiency",
    "categories": "satlens.analysis.categories",
    "circuits": "satlens.analysis.circuits",
    "compare": "satlens.analysis.comparison",
    "controls": "satlens.analysis.controls",
    "divergence": "satlens.analysis.divergence",
    "evaluate": "satlens.analysis.evaluation",
    "evaluate_tasks": "satlens.analysis.tasks",
    "fit_donors": "satlens.analysis.interventions.donors",
    "fit_means": "satlens.analysis.interventions.means",
    "fit_static": "satlens.analysis.interventions.static",
    "FreezeGate": "satlens.analysis.interventions.gates",
    "intervene": "satlens.analysis.interventions.gates",
    "MaskRoute": "satlens.analysis.interventions.routes",
    "MeanGate": "satlens.analysis.interventions.gates",
    "MeanRoute": "satlens.analysis.interventions.routes",
    "OneHotRoute": "satlens.analysis.interventions.routes",
    "OpenGate": "satlens.analysis.interventions.gates",
    "RemoveSublayer": "satlens.analysis.interventions.removal",
    "ResampleGate": "satlens.analysis.interventions.gates",
    "ResampleRoute": "satlens.analysis.interventions.routes",
    "ScaleGate": "satlens.analysis.interventions.gates",
    "ShuffleGate": "satlens.analysis.interventions.gates",
    "SwapRoutes": "satlens.analysis.interventions.routes",
    "TieValueRoute": "satlens.analysis.interventions.routes",
    "UniformRoute": "satlens.analysis.interventions.routes",
    "ZeroGate": "satlens.analysis.interventions.gates",
    "ZeroRoute": "satlens.analysis.interventions.routes",
    "parse_intervention": "satlens.analysis.interventions.spec",
    "patch_v_first": "satlens.analysis.patching",
    "routes": "satlens.analysis.routes",
    "sparsity": "satlens.analysis.sparsity",
    "token_view": "satlens.analysis.token_view",
    "trajectory": "satlens.analysis.trajectory",
    "view": "satlens.report.page.view",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


class _LazyName:
    """A public name as an attribute of this module's class.

    There it is found before what other packages give every object (nnsight gives ``save``), which
    hides a module's ``__getattr__``.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type) -> Any:
        return getattr(import_module(_HOMES[self.name]), self.name)


class _Package(ModuleType):
    """This module, once its names are attributes of its class."""


for _name in _HOMES:
    setattr(_Package, _name, _LazyName(_name))
sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'satlens' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
