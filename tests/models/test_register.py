"""Streams from outside of the package: CONTRIBUTING.md's example, registered, not edited in."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from pydantic.dataclasses import dataclass

import satlens
from satlens import config as configs
from satlens.config import STRICT, ModelConfig, make, to_dict
from satlens.errors import ConfigError, SatlensError
from satlens.models import initialise
from satlens.models.presets import PRESETS, VARIANTS
from satlens.models.streams import STREAMS
from satlens.training.optimiser import make_optimiser

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
SIZES: dict[str, Any] = {"n_layers": 3, "d_model": 16, "n_heads": 2, "d_vocab": 29, "n_ctx": 16}
FAMILIES = {r"\.echo$": "scalars"}


@pytest.fixture(autouse=True)
def _nothing_stays_registered() -> Iterator[None]:
    tables: list[dict[str, Any]] = [
        configs.REGISTERED,
        initialise.REGISTERED,
        STREAMS,
        VARIANTS,
        PRESETS,
    ]
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


@pytest.fixture
def example() -> ModuleType:
    """The two code blocks of the guide, as they stand."""
    guide = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"^   ```python\n(.*?)^   ```", guide, re.MULTILINE | re.DOTALL)
    module = ModuleType("example")
    vars(module).update(dataclass=dataclass, STRICT=STRICT, Literal=Literal)
    for block in blocks:
        exec(compile(textwrap.dedent(block), GUIDE, "exec", dont_inherit=True), vars(module))
    return module


@pytest.fixture
def registered(example: ModuleType) -> ModuleType:
    satlens.register_stream(example.EchoStream, example.Echo, families=FAMILIES)
    return example


def tokens() -> torch.Tensor:
    return torch.randint(0, 29, (6, 12), generator=torch.Generator().manual_seed(0))


def test_a_registered_stream_computes_trains_and_is_analysed(registered: ModuleType) -> None:
    echo, plain = (satlens.build(name, **SIZES) for name in ("echo", "transformer"))
    with torch.no_grad():
        assert torch.equal(echo(tokens()), plain(tokens()))
        echo.blocks[1].echo.fill_(0.5)
        assert not torch.equal(echo(tokens()), plain(tokens()))
    groups = make_optimiser(echo, satlens.TrainConfig()).param_groups
    (own,) = [g for g in groups if any(p is echo.blocks[1].echo for p in g["params"])]
    assert own["weight_decay"] == 0
    found = satlens.sparsity(echo, tokens(), n_resamples=50, baseline=False)
    assert found.table["mass_embedding"].tolist() == [0, 0.5, 0]
    found = satlens.routes(echo, tokens(), n_resamples=50, baseline=False)
    read = found.table[found.table["site"] == "L1.attn.read"]
    assert read["coefficient"].tolist() == [1.5, 1, 1]


def test_it_composes_with_a_value_residual(registered: ModuleType) -> None:
    model = satlens.build("echo", value_residual="satformer", **SIZES)
    assert {site.kind for site in model.sites} == {"gate", "route"}
    assert satlens.build("tiny-echo", device="meta").cfg.stream == registered.EchoStream()


def test_its_checkpoints_open_where_it_is_registered(
    registered: ModuleType, tmp_path: Path
) -> None:
    model = satlens.build("echo", **SIZES)
    with torch.no_grad():
        model.blocks[2].echo.fill_(0.25)
    satlens.save(model, tmp_path / "echo")
    again = satlens.load(tmp_path / "echo")
    with torch.no_grad():
        assert torch.equal(again(tokens()), model(tokens()))
    configs.REGISTERED.clear()
    with pytest.raises(SatlensError, match=r"stream.*echo") as error:
        satlens.load(tmp_path / "echo")
    assert "\n" not in str(error.value)


def test_its_settings_are_checked_and_survive_the_round_trip(example: ModuleType) -> None:
    @dataclass(frozen=True, kw_only=True, config=STRICT)
    class Scaled(example.EchoStream):
        start: float = 0.0

    variants = {"echo": {}, "loud_echo": {"start": 2.0}}
    satlens.register_stream(Scaled, example.Echo, families=FAMILIES, variants=variants)
    cfg = satlens.build("loud-echo", **SIZES).cfg
    assert cfg.stream == Scaled(start=2.0)
    assert make(ModelConfig, to_dict(cfg), "here") == cfg
    assert satlens.build("echo", start=3.0, **SIZES).cfg.stream == Scaled(start=3.0)
    with pytest.raises(ConfigError, match=r"stream.*start: Input should be a valid number"):
        satlens.build("echo", start="much", **SIZES)
    with pytest.raises(ConfigError, match=r"unknown field 'stream.*begin'"):
        make(ModelConfig, {"stream": {"kind": "echo", "begin": 1}}, "here")


def test_registering_again_replaces(registered: ModuleType) -> None:
    class Louder(registered.Echo):
        pass

    satlens.register_stream(registered.EchoStream, Louder, families=FAMILIES, variants={"e": {}})
    assert satlens.build("e", **SIZES).stream is Louder
    with pytest.raises(ConfigError, match="echo: no such variant"):
        satlens.build("echo")


def test_what_ships_cannot_be_replaced(example: ModuleType) -> None:
    with pytest.raises(ConfigError, match="'residual' ships with satlens"):
        satlens.register_stream(configs.ResidualStream, example.Echo)
    for name in ("satformer", "rd_attnres", "satformer-small"):
        with pytest.raises(ConfigError, match="ships with satlens; choose another name"):
            satlens.register_stream(example.EchoStream, example.Echo, variants={name: {}})
    # A wide pattern does not reach the parameters of other architectures.
    before = {n: p.clone() for n, p in satlens.build("muddformer", **SIZES).named_parameters()}
    satlens.register_stream(example.EchoStream, example.Echo, families={r".": "matrices"})
    after = dict(satlens.build("muddformer", **SIZES).named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_faults_are_named(example: ModuleType) -> None:
    with pytest.raises(ConfigError, match="kind: needs a name in lower case"):
        satlens.register_stream(int, example.Echo)
    with pytest.raises(ConfigError, match="expected a subclass of DepthStream"):
        satlens.register_stream(example.EchoStream, int)
    with pytest.raises(ConfigError, match=r"families: 'echo\(':"):
        satlens.register_stream(example.EchoStream, example.Echo, families={"echo(": "scalars"})
    with pytest.raises(ConfigError, match=r"must be one of matrices, .* got 'scalar'"):
        satlens.register_stream(example.EchoStream, example.Echo, families={"echo": "scalar"})
    with pytest.raises(ConfigError, match="variants: loud: unknown field 'volume'"):
        satlens.register_stream(example.EchoStream, example.Echo, variants={"loud": {"volume": 11}})
    assert "echo" not in STREAMS and "loud" not in VARIANTS


unchecked = inspect.unwrap(satlens.register_stream)
"""Without the tests' own checks of types at run time, which users do not have."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"families": [r"\.echo$"]}, "families: expected"),
        ({"families": ()}, "families: expected"),
        ({"families": {3: "scalars"}}, "families: 3:"),
        ({"variants": ["echo"]}, "variants: expected"),
        ({"variants": {}}, "variants: expected one"),
        ({"variants": {3: {}}}, "variants: 3:"),
        ({"variants": {"Loud Echo": {}}}, "variants: 'Loud Echo': a name is words"),
        ({"variants": {"": {}}}, "variants: '': a name is words"),
        ({"variants": {"loud": None}}, "variants: loud: expected"),
        ({"variants": {"loud": {1: 2}}}, "variants: loud: expected"),
    ],
)
def test_misuse_is_one_line(example: ModuleType, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as error:
        unchecked(example.EchoStream, example.Echo, **options)
    assert "\n" not in str(error.value)
    assert "echo" not in STREAMS


def test_a_configuration_is_given_as_its_class(example: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"^config: expected a class"):
        unchecked(example.EchoStream(), example.Echo)
