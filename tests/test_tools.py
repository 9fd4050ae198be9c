"""`crop_video`: what arguments it takes, which it repairs, which it refuses with a reason a model can act on."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt.tools import CROP_VIDEO, TOOLS, ToolArgumentError, crop_window
from paravt.types import Window

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def test_schema_is_openai_style_and_stable():
    function = CROP_VIDEO.schema["function"]
    assert CROP_VIDEO.schema["type"] == "function"
    assert function["name"] == CROP_VIDEO.name == "crop_video"
    assert CROP_VIDEO.parameters == ("video_path", "start_time", "end_time")
    assert CROP_VIDEO.required == ("start_time", "end_time")
    assert json.loads(json.dumps(CROP_VIDEO.schema)) == CROP_VIDEO.schema
    assert json.dumps(CROP_VIDEO.schema).isascii()
    assert TOOLS == {"crop_video": CROP_VIDEO}


@pytest.mark.parametrize(
    ("arguments", "window", "repaired"),
    [
        ({"start_time": 10, "end_time": 20}, (10, 20), False),
        ({"start_time": 0, "end_time": 0.5}, (0, 0.5), False),
        ({"video_path": "v.mp4", "start_time": 1.5, "end_time": 2}, (1.5, 2), False),
        ({"start_time": "10", "end_time": " 20.5 "}, (10, 20.5), True),
        ({"start_time": "1:05", "end_time": "80"}, (65, 80), True),
        ({"start_time": "00:01:05.5", "end_time": "1:00:00"}, (65.5, 3600), True),
        ({"start_time": "12.5s", "end_time": "15 seconds"}, (12.5, 15), True),
        ({"start_time": "90:00", "end_time": "90:30"}, (5400, 5430), True),
        ({"start": 1, "end": 2}, (1, 2), True),
        ({"start_time": 1, "end": 2}, (1, 2), True),
        ({"start_time": 1, "start": 9, "end_time": 2}, (1, 2), True),
        ({"start_time": -3, "end_time": 2}, (0, 2), True),
        ({"start_time": -0.0, "end_time": 2}, (0, 2), False),
        ({"start_time": 1, "end_time": 2, "fps": 4}, (1, 2), True),
        ({"start_time": 1, "end_time": 2, "video_path": None}, (1, 2), True),
        ({"start_time": 1, "end_time": 2, "video_path": ["v.mp4"]}, (1, 2), True),
        ({"start_time": 1, "end_time": 2, "video_path": "\ud800"}, (1, 2), True),
    ],
)
def test_accepted(arguments, window, repaired):
    normal, mended = CROP_VIDEO.normalise(arguments)
    assert crop_window(normal) == Window(*window)
    assert mended is repaired
    assert [type(normal[name]) for name in ("start_time", "end_time")] == [float, float]
    assert math.copysign(1, normal["start_time"]) == 1


def test_video_path_is_kept_as_it_is():
    assert CROP_VIDEO.normalise({"video_path": "a b.mp4", "start_time": 1, "end_time": 2})[0]["video_path"] == "a b.mp4"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"start_time": 1},
        {"end_time": 1},
        {"start_time": None, "end_time": 1},
        {"start_time": True, "end_time": 5},
        {"start_time": math.nan, "end_time": 5},
        {"start_time": 1, "end_time": math.inf},
        {"start_time": -math.inf, "end_time": 5},
        {"start_time": "nan", "end_time": 5},
        {"start_time": "inf", "end_time": 5},
        {"start_time": 1, "end_time": 10**400},
        {"start_time": 1, "end_time": "9" * 400},
        {"start_time": 20, "end_time": 10},
        {"start_time": 5, "end_time": 5},
        {"start_time": 5, "end_time": -1},
        {"start_time": -5, "end_time": 0},
        {"start_time": [1], "end_time": 5},
        {"start_time": "", "end_time": 5},
        {"start_time": "1:75", "end_time": 500},
        {"start_time": "1:75:00", "end_time": 50000},
        {"start_time": "the start\n", "end_time": 5},
        {"start_time": "\ud800" * 99, "end_time": 5},
    ],
)
def test_refused_with_one_printable_line(arguments):
    with pytest.raises(ToolArgumentError) as caught:
        CROP_VIDEO.normalise(arguments)
    message = str(caught.value)
    assert "_time" in message
    assert "\n" not in message
    assert len(message) < 120
    message.encode("utf-8")


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["start_time", "end_time", "start", "end", "video_path", "x"]), json_values))
def test_any_arguments_give_a_window_or_a_reason(arguments):
    try:
        normal, _ = CROP_VIDEO.normalise(arguments)
    except ToolArgumentError:
        return
    window = crop_window(normal)
    assert 0 <= window.start_time < window.end_time < math.inf
    assert CROP_VIDEO.normalise(normal) == (normal, False)
