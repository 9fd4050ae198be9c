"""The pure planning functions against brute force: what is known of timestamps, and what has to be decoded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt.video.plan import Timeline, group, spans


@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.integers(0, 60), min_size=1),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8),
)
def test_timeline_knows_exactly_what_it_was_told(all_pts: set[int], stretches: list[tuple[int, int]]) -> None:
    timeline, covered = Timeline(), set()
    for start, length in stretches:
        low = max((p for p in all_pts if p <= start), default=None)
        if low is None:
            continue
        timeline.add(low, start + length, all_pts)
        covered.update(range(low, start + length + 1))
    for tick in range(-1, 85):
        expected = max(p for p in all_pts if p <= tick) if tick in covered else None
        assert timeline.floor(tick) == expected


def test_timeline_refuses_a_stretch_without_a_first_frame() -> None:
    with pytest.raises(ValueError, match="begins with"):
        Timeline().add(3, 9, [4, 5])


def test_group_shares_a_pass_within_a_group_of_pictures_and_nearby() -> None:
    def key(tick: int) -> int:
        return tick // 100 * 100

    assert group([150, 10, 99, 10], key, near=5, far=50, longest=1000) == [[10, 99], [150]]
    assert group([98, 101], key, near=5, far=50, longest=1000) == [[98, 101]]
    assert group(range(0, 1000, 4), key, near=5, far=50, longest=150)[0] == list(range(0, 200, 4))
    assert group([0, 40, 95], lambda tick: None, near=5, far=50, longest=1000) == [[0, 40], [95]]
    assert group([], key, 1, 1, 1) == []


# Decoding order of two groups of pictures; the second one's keyframe (8) is followed by a frame shown before it (7).
PACKETS = [(0, True), (4, False), (2, False), (1, False), (3, False), (8, True), (7, False), (10, False), (9, False)]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([0], [(0, 1)]),
        ([1], [(0, 4)]),
        ([8], [(5, 6)]),
        ([9], [(5, 9)]),
        ([7], [(0, 7)]),
        ([0, 9], [(0, 1), (5, 9)]),
        ([3, 8], [(0, 6)]),
        ([0, 7, 9], [(0, 9)]),
        ([8, 7], [(0, 7)]),
        ([5], []),
    ],
)
def test_spans_begin_at_a_keyframe_that_is_not_shown_later(targets: list[int], expected: list[tuple[int, int]]) -> None:
    assert spans(PACKETS, targets) == expected
