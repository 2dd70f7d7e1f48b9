"""Recipes: which arms are trained, and what is measured on each."""

from __future__ import annotations

import re
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic.dataclasses import dataclass

from satlens.config import STRICT, ModelConfig, TrainConfig, make
from satlens.errors import ConfigError
from satlens.shipped import shipped_folder

Analysis = Literal[
    "evaluation",
    "sparsity",
    "routes",
    "categories",
    "divergence",
    "ablation",
    "attribution",
    "circuits",
    "trajectory",
    "tasks",
    "token_view",
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Arm:
    """One architecture of a study."""

    variant: str
    """Variant or preset name, as in ``satlens.build``."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields that differ from the variant and from the recipe's model."""
    analyses: tuple[Analysis, ...] = ("evaluation",)
    """What is measured on each trained seed."""
    options: dict[Analysis, dict[str, Any]] = field(default_factory=dict)
    """Further arguments of an analysis, by its name."""
    optional: bool = False
    """Whether the arm is left out unless it is asked for (``--arch``)."""
    seeds: int | None = None
    """How many of the study's seeds this arm has, from the first, where it is fewer."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    """What a study trains and measures."""

    name: str
    """Folder name of the study under ``runs/``."""
    title: str
    """Title of the report."""
    corpus: str = "sotu"
    """Embedded corpus, a path (text, folder, JSONL, parquet), or a Hugging Face data set:
    ``hf:NAME:CONFIG``."""
    cluster_field: str = "cluster"
    """JSONL field of the larger work a document belongs to; ``id-prefix``: the id up to its last
    hyphen."""
    vocab_size: int = 2048
    """Tokens of the BPE trained on the training split."""
    tokenizer: str | None = None
    """A tokenizer.json to use in place of training one."""
    tokenizer_sample: float | None = None
    """Share of the training documents that the BPE is trained on; all where null."""
    seeds: int | tuple[int, ...] = 2
    """Paired seeds: how many, from 0, or which."""
    device: str = "cpu"
    """Where models train and are measured: cpu, or cuda (then one process at a time is wise)."""
    milestones: tuple[float, ...] = ()
    """Shares of training after which a checkpoint is kept, for trajectories."""
    model: dict[str, Any] = field(default_factory=dict)
    """Model fields common to all arms."""
    train: dict[str, Any] = field(default_factory=dict)
    """Fields of TrainConfig common to all arms."""
    arms: dict[str, Arm] = field(default_factory=dict)
    """Arms by name, in order."""
    differ: tuple[str, ...] | None = None
    """Fields beside the value residual and the stream that arms are meant to differ in."""
    contrasts: tuple[tuple[str, str], ...] = ()
    """Pairs of arms compared, first minus second; by default every arm with the first."""
    max_documents: int | None = None
    """Test documents that every analysis covers, a fixed sample; all where null."""
    slices: dict[Analysis, int] = field(default_factory=dict)
    """First tokens of every test document that each analysis covers; all where absent. Tasks and
    the token view have options of their own: ``limit``, ``max_tokens``."""
    analysis_seeds: dict[Analysis, int] = field(default_factory=dict)
    """How many seeds' checkpoints an analysis covers, from the first; all where absent."""
    bench: dict[str, Any] | None = None
    """Arguments of ``satlens.bench`` over the arms, at the recipe's size; null times nothing."""

    @property
    def seed_numbers(self) -> tuple[int, ...]:
        """The paired seeds, in order."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    def first_seeds(self, n: int) -> int | tuple[int, ...]:
        """The ``seeds`` of this recipe with n of them.

        Raises:
            ConfigError: it says which seeds it has, and has fewer.
        """
        if isinstance(self.seeds, int):
            return n
        if n > len(self.seeds):
            raise ConfigError(f"--seeds {n}: {self.name} has {len(self.seeds)}: {self.seeds}")
        return self.seeds[:n]

    def seeds_of(self, arm: str) -> tuple[int, ...]:
        """Seeds that an arm is trained with."""
        return self.seed_numbers[: self.arms[arm].seeds]

    def seeds_measured(self, arm: str, analysis: Analysis) -> tuple[int, ...]:
        """Seeds of an arm whose checkpoint an analysis covers."""
        return self.seeds_of(arm)[: self.analysis_seeds.get(analysis)]

    def __post_init__(self) -> None:
        for pair in self.contrasts:
            for arm in pair:
                if arm not in self.arms:
                    raise ValueError(f"contrasts: no arm {arm!r} among {', '.join(self.arms)}")
        if not self.arms:
            raise ValueError("arms: a study needs at least one")
        self._check_seeds()
        limits = {f"arms.{name}.seeds": arm.seeds for name, arm in self.arms.items()}
        limits |= {f"analysis_seeds.{name}": n for name, n in self.analysis_seeds.items()}
        limits |= {f"slices.{name}": n for name, n in self.slices.items()}
        limits["max_documents"] = self.max_documents
        for name, limit in limits.items():
            if limit is not None and limit < 1:
                raise ValueError(f"{name}: must be positive, got {limit}")
        for name, option in _OWN_SIZE.items():
            if name in self.slices:
                raise ValueError(f"slices.{name}: its size is arms.*.options.{name}.{option}")
        self._check_names()
        for share in self.milestones:
            if not 0 < share < 1:
                raise ValueError(f"milestones: a share of training lies between 0 and 1: {share}")
        if self.milestones and "milestones" in self.train:
            raise ValueError("milestones: give shares here or tokens in train.milestones")
        share = self.tokenizer_sample
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"tokenizer_sample: must lie in (0, 1], got {share}")

    def _check_seeds(self) -> None:
        if isinstance(self.seeds, int):
            if self.seeds < 1:
                raise ValueError(f"seeds: must be positive, got {self.seeds}")
        elif not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds: some, each once and none negative, got {[*self.seeds]}")

    def _check_names(self) -> None:
        """Names become folders, commands and rules of a Snakefile."""
        for where, name in (("name", self.name), *((f"arms.{arm}", arm) for arm in self.arms)):
            if not _NAME.fullmatch(name) or name == "all":
                raise ValueError(
                    f"{where}: a name has 1 to 40 letters, digits, dots, hyphens, plus signs or "
                    f"underscores, the first a letter or digit, and is not 'all'; got {name!r}"
                )
        for pair in self.contrasts:
            if pair[0] == pair[1] or self.contrasts.count(pair) > 1:
                raise ValueError(f"contrasts: {list(pair)}: two different arms, and each pair once")
        for name, arm in self.arms.items():
            if len(set(arm.analyses)) < len(arm.analyses):
                raise ValueError(f"arms.{name}.analyses: each analysis once")
        if len(set(self.milestones)) < len(self.milestones):
            raise ValueError("milestones: each share once")


_OWN_SIZE: dict[Analysis, str] = {"tasks": "limit", "token_view": "max_tokens"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,39}")


def load_recipe(name: str) -> Recipe:
    """A shipped recipe by name, or one from a YAML file.

    Raises:
        ConfigError: no such recipe or file, not YAML, an unknown or impossible field.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = shipped_folder("analyses") / f"{name}.yaml"
        if not path.exists():
            known = ", ".join(sorted(p.stem for p in shipped_folder("analyses").glob("*.yaml")))
            raise ConfigError(f"{name}: no such recipe; there are {known}, or give a YAML file")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of fields")
    return make(Recipe, values, str(path))


def is_local(corpus: str) -> bool:
    """Whether a corpus is a file or folder: no embedded one and no Hugging Face data set."""
    return corpus != "sotu" and not corpus.startswith("hf:")


def model_config(recipe: Recipe, arm: str, changes: dict[str, Any] | None = None) -> ModelConfig:
    """Configuration of one arm: the variant, the recipe's model fields, the arm's own, changes."""
    from satlens.models.presets import config_for

    spec = recipe.arms[arm]
    fields = {"d_vocab": recipe.vocab_size, **recipe.model, **spec.fields, **(changes or {})}
    return config_for(spec.variant, **fields)


def train_config(recipe: Recipe, seed: int, changes: dict[str, Any] | None = None) -> TrainConfig:
    """Training configuration of one seed, the same for every arm.

    Args:
        changes: fields in place of the recipe's, for a run of its own; the steps of a study, which
            run side by side, have none and one thread each.
    """
    values = {**recipe.train, "seed": seed}
    values = {**values, "n_threads": 1} if changes is None else {**values, **changes}
    if recipe.milestones and "milestones" not in values:
        tokens = make(TrainConfig, values, recipe.name).tokens
        values["milestones"] = [round(share * tokens) for share in recipe.milestones]
    return make(TrainConfig, values, recipe.name)
