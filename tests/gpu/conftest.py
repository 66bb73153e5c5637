"""Tests that need a GPU: skipped, with the reason, where torch sees none."""

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    if not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="torch sees no GPU here"))
