"""One engine of two ranks for the tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from commbench import Engine

FAKE = '{"duration_s": 1e-3}'  # the script of the fake backend


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with Engine(tp=2, device="cpu", environment={"COMMBENCH_FAKE": FAKE}) as engine:
        yield engine
