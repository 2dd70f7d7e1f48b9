"""Samples of each task's rows, and a machine without a network."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

SAMPLES = Path(__file__).parent / "samples"


@pytest.fixture
def samples() -> Path:
    """Folder with a small made-up file a task."""
    return SAMPLES


@pytest.fixture
def sample_rows():
    """Reads the rows of a sample."""

    def read(name: str) -> list[dict[str, Any]]:
        text = (SAMPLES / f"{name}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    return read


@pytest.fixture
def unplugged(monkeypatch):
    """Every way to another machine raises."""

    def refuse(*args: Any, **kwargs: Any):
        raise AssertionError("the network was asked for")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
