"""What an arm learns of its costs."""

import pytest

from forerun.control.arms import Arm


def test_a_second_depth_is_believed_though_it_is_not_in_proportion() -> None:
    """A draft of one guess often takes more than a quarter of one of four: that is a price, not an outlier."""
    arm = Arm()
    for depth, taken_s in ((4, 4e-3), (1, 2.2e-3)):
        for _ in range(3):
            arm.time(depth, [0], taken_s)
    assert arm.drafting_s(4, 1) == pytest.approx(4e-3, rel=0.02)
    assert arm.drafting_s(1, 1) == pytest.approx(2.2e-3, rel=0.02)


def test_at_a_depth_that_is_known_a_single_long_draft_is_not_believed() -> None:
    arm = Arm()
    for taken_s in (1e-3, 1e-3, 3e-3):
        arm.time(4, [0], taken_s)
    assert arm.drafting_s(4, 1) == pytest.approx(1e-3)
