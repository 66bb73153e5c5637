"""What tests of servers share."""

from collections.abc import Iterator

import pytest

from kit.servers import Paced


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paced]:
    """Engines whose rounds a test can hold."""
    found = Paced(monkeypatch)
    yield found
    found.let_go()
