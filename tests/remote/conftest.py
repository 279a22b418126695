"""Fixtures of the tests of URLs: a bucket for each test, on a shared server."""

import gc
import uuid
from collections.abc import Iterator

import pytest

from tests.remote.peer import Line, server, speak


@pytest.fixture(scope="session")
def port() -> Iterator[int]:
    """Return the port of a server that speaks S3."""
    pytest.importorskip("s3fs", reason="the package s3fs is not installed")
    pytest.importorskip("moto", reason="the package moto is not installed")
    with server() as port:
        yield port


@pytest.fixture
def bucket(port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty bucket."""
    speak(monkeypatch, port)
    return made()


@pytest.fixture
def line(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """Return the only way to the server."""
    line = Line(port)
    speak(monkeypatch, line.port)
    yield line
    line.close()
    gc.collect()  # dropped connections warn here, and not in another test


def made() -> str:
    """Make a bucket and return its URL."""
    import s3fs

    name = f"bucket-{uuid.uuid4().hex[:8]}"
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"
