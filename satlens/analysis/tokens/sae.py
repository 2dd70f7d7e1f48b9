"""A small top-k sparse autoencoder of V_1, the first layer's values.

Gao et al. 2024 (arXiv 2406.04093): a vector is written as a sum of at most k directions of a
dictionary, whose weights are the k largest outputs of an encoder; features that went silent are
trained on what the others leave (their auxiliary loss, section A.2).

Letters: N vectors, D width (heads side by side), F features, k active ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from satlens.errors import AnalysisError

_AUXILIARY = 1 / 32
"""Weight of the loss that revives silent features."""
_SILENT_AFTER = 32
"""Batches in a row without a feature after which it counts as silent in training."""


@dataclass(frozen=True, kw_only=True)
class SaeSettings:
    """How the dictionary is made and how its features are grouped."""

    n_features: int = 256
    """F."""
    k: int = 8
    """Active features of a token, at most."""
    steps: int = 1500
    """Of Adam, with the learning rate falling to zero over the last fifth."""
    batch_size: int = 512
    """Vectors in a step, drawn with replacement."""
    learning_rate: float = 2e-3
    max_vectors: int = 2**15
    """Train on this many vectors at most, evenly spaced over the tokens that count."""
    purity: float = 0.75
    """A feature belongs to a category that has at least this share of its activation."""
    seed: int = 0
    """Of the start and of the batches."""

    def __post_init__(self) -> None:
        for name in ("n_features", "k", "steps", "batch_size", "max_vectors"):
            if getattr(self, name) < 1:
                raise AnalysisError(f"sae: {name}: {getattr(self, name)} is not positive")
        if self.k > self.n_features:
            raise AnalysisError(f"sae: k: {self.k} of {self.n_features} features")
        if not 0.5 < self.purity <= 1:
            raise AnalysisError(f"sae: purity: {self.purity} is not above 0.5 and at most 1")
        if self.learning_rate <= 0:
            raise AnalysisError(f"sae: learning_rate: {self.learning_rate} is not positive")


class Active(NamedTuple):
    """The features of vectors, largest first; (N, k) each."""

    activation: Tensor
    """Zero where fewer than k are active."""
    feature: Tensor
    """int64."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseAutoencoder:
    """A trained dictionary; vectors are centred and scaled to mean square 1 an entry first."""

    k: int
    mean: Tensor
    """(D,) of the vectors trained on."""
    scale: Tensor
    """0-d: root mean square entry of the centred vectors."""
    encoder: Tensor
    """(F, D)."""
    threshold: Tensor
    """(F,): bias of the encoder."""
    decoder: Tensor
    """(F, D), rows of length 1."""
    offset: Tensor
    """(D,): bias of the decoder."""

    def active(self, vectors: Tensor) -> Active:
        """The k strongest features of vectors (N, D)."""
        return _encode(
            self._normalised(vectors) - self.offset, self.encoder, self.threshold, self.k
        )

    def reconstruct(self, active: Active) -> Tensor:
        """Vectors (N, D) back from their features."""
        sums = _decode(active, self.decoder) + self.offset
        return sums * self.scale + self.mean

    def to(self, device: torch.device) -> SparseAutoencoder:
        """The same on a device."""
        names = ("mean", "scale", "encoder", "threshold", "decoder", "offset")
        tensors = {name: getattr(self, name).to(device) for name in names}
        return SparseAutoencoder(k=self.k, **tensors)

    def _normalised(self, vectors: Tensor) -> Tensor:
        return (vectors.float() - self.mean) / self.scale


def train_sae(vectors: Tensor, settings: SaeSettings) -> SparseAutoencoder:
    """A dictionary for vectors (N, D) fp32, trained where they are; the same for the same seed.

    Raises:
        AnalysisError: vectors that are all the same.
    """
    mean = vectors.mean(0)
    scale = (vectors - mean).square().mean().sqrt()
    if not scale > 0:
        raise AnalysisError("sae: V_1 is the same for every token")
    data = (vectors - mean) / scale
    generator = torch.Generator().manual_seed(settings.seed)
    start = torch.randn(settings.n_features, data.shape[1], generator=generator)
    decoder = normalize(start.to(data.device), dim=1)
    weights = {
        "encoder": decoder.clone(),
        "threshold": data.new_zeros(settings.n_features),
        "decoder": decoder,
        "offset": data.new_zeros(data.shape[1]),
    }
    with torch.enable_grad():
        _optimise(weights, data, settings, generator)
    trained = {name: tensor.detach() for name, tensor in weights.items()}
    return SparseAutoencoder(k=settings.k, mean=mean, scale=scale, **trained)


def _optimise(
    weights: dict[str, Tensor], data: Tensor, settings: SaeSettings, generator: torch.Generator
) -> None:
    """Adam on the squared error; rows of the decoder keep length 1."""
    for tensor in weights.values():
        tensor.requires_grad_()
    optimiser = torch.optim.Adam(weights.values(), lr=settings.learning_rate)
    tail = max(1, settings.steps // 5)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (settings.steps - step) / tail)
    )
    idle = torch.zeros(settings.n_features, dtype=torch.int64, device=data.device)
    for _ in range(settings.steps):
        chosen = torch.randint(len(data), (settings.batch_size,), generator=generator)
        batch = data[chosen.to(data.device)]
        loss, active = _loss(weights, batch, idle > _SILENT_AFTER, settings.k)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            weights["decoder"].copy_(normalize(weights["decoder"], dim=1))
            idle += 1
            idle[active.feature[active.activation > 0]] = 0


def _loss(
    weights: dict[str, Tensor], batch: Tensor, silent: Tensor, k: int
) -> tuple[Tensor, Active]:
    encoder, threshold, decoder = (weights[n] for n in ("encoder", "threshold", "decoder"))
    centred = batch - weights["offset"]
    active = _encode(centred, encoder, threshold, k)
    error = centred - _decode(active, decoder)
    loss = error.square().mean()
    n_silent = int(silent.sum())
    if n_silent:
        left = error.detach()
        revived = _encode(
            centred, encoder[silent], threshold[silent], min(n_silent, max(k, batch.shape[1] // 2))
        )
        loss = loss + _AUXILIARY * (left - _decode(revived, decoder[silent])).square().mean()
    return loss, active


def _encode(centred: Tensor, encoder: Tensor, threshold: Tensor, k: int) -> Active:
    activation, feature = (centred @ encoder.T + threshold).topk(k, dim=-1)
    return Active(activation.relu(), feature)


def _decode(active: Active, decoder: Tensor) -> Tensor:
    code = active.activation.new_zeros(len(active.feature), len(decoder))
    return code.scatter(1, active.feature, active.activation) @ decoder
