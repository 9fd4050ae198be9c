"""Reading video: seconds in, frames with their true times out, and a reason for each frame that cannot be had."""

from paravt.video.frames import Frames, distinct
from paravt.video.probe import VideoInfo, open_video
from paravt.video.reader import FrameReader, FrameSource, read_frames
from paravt.video.sizes import frame_size, overview_times, window_times

__all__ = [
    "FrameReader",
    "FrameSource",
    "Frames",
    "VideoInfo",
    "distinct",
    "frame_size",
    "open_video",
    "overview_times",
    "read_frames",
    "window_times",
]
