"""Small files in the layouts of published training data, made with real videos and images."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from paravt.types import Trace

CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 3}}\n</tool_call>'


def write_video(path: Path, seconds: int = 4, fps: int = 4) -> Path:
    """Every second has a grey of its own: 20, 40, 60 ..."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        stream.options = {"preset": "ultrafast"}
        for i in range(seconds * fps):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 20 * (1 + i // fps), np.uint8), format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def write_image(path: Path, grey: int = 120) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (100, 50), (grey, grey, grey)).save(path)
    return path


def write_media(root: Path) -> None:
    """Under the sentinel paths of the published data."""
    write_video(root / "longvt_source/selftrace/a.mp4")
    write_video(root / "museg/charades/b.mp4", seconds=3)
    for n in range(3):
        write_image(root / f"longvt_source/videor1/{n}.jpg", 50 * (n + 1))


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def video(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def turn(role: str, *parts: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": role, "content": parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)}


def answered(*asked: dict[str, Any], answer: str = "<think>\nI see.\n</think>\n<answer>A</answer>") -> dict[str, Any]:
    return {"messages": [turn("user", *asked), turn("assistant", text(answer))]}


def agent_row() -> dict[str, Any]:
    """A trace with calls in one turn, and text replies."""
    reply = "<tool_response>\n[1.0s - 3.0s] grey\n</tool_response>"
    return {
        "messages": [
            turn("system", text("You can crop.")),
            turn("user", video("longvt_source/selftrace/a.mp4"), text("What is it?")),
            turn("assistant", text(f"<think>\nI look.\n</think>\n{CALL}\n{CALL}")),
            turn("user", text(reply)),
            turn("assistant", text("<think>\nSeen.\n</think>\n<answer>grey</answer>")),
        ]
    }


def frames_row() -> dict[str, Any]:
    """Images between texts, and a reply that carries frames."""
    first, second, third = (image(f"longvt_source/videor1/{n}.jpg") for n in range(3))
    return {
        "messages": [
            turn("user", text("First"), first, text("then"), second, text("What changed?")),
            turn("assistant", text(f"<think>\nI look.\n</think>\n{CALL}")),
            turn("user", text("<tool_response>\n"), third, text("\n</tool_response>")),
            turn("assistant", text("<answer>the light</answer>")),
        ]
    }


def two_videos_row() -> dict[str, Any]:
    return answered(video("longvt_source/selftrace/a.mp4"), video("museg/charades/b.mp4"), text("Which is longer?"))


def good_rows() -> list[dict[str, Any]]:
    return [agent_row(), frames_row(), two_videos_row(), {"messages": [turn("user", "2+2?"), turn("assistant", "4")]}]


def write_parquet(path: Path, rows: list[dict[str, Any]], group: int = 2, as_text: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if as_text:
        rows = [{**row, "messages": json.dumps(row["messages"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def rl_row(
    answer: str = "1.0 - 2.5", kind: str | None = "tvg", question: str = "When?", **change: Any
) -> dict[str, Any]:
    """Of published RL data."""
    return {
        "data_source": "charades_tvg",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"<video>\n{question}"}],
        "videos": [{"video": "museg/charades/b.mp4", "fps": None}],
        "extra_info": {"answer": answer, "question_type": kind},
        **change,
    }


def same(first: Trace, second: Trace) -> bool:
    """The same tokens, mask and frames."""
    keys = [[frame.key for frame in trace.images] for trace in (first, second)]
    return first.segments == second.segments or (
        first.ids == second.ids and first.loss_mask == second.loss_mask and keys[0] == keys[1]
    )
