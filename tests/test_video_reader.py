"""The shared reader: union plans, the cache, files that change, and concurrent requests.

What these tests lock: reading many windows at once equals reading each alone; what was decoded once is not decoded
again (`reader.stats.decoded` counts), not even by requests that come at the same time; the cache stays within its
bytes; a file that changed is never answered from memory; the event loop runs on while frames are decoded.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from paravt.errors import VideoError
from paravt.types import Frame
from paravt.video import FrameReader, Frames, distinct, overview_times, read_frames, window_times
from paravt.video.cache import FrameCache

CASES = Path(__file__).parent / "cases" / "video"
LONG = CASES / "longgop.mp4"
WINDOWS = [window_times(a, a + 12.0) for a in (3.0, 9.0, 9.0, 60.0, 110.0)]


def same(a: Frames, b: Frames) -> bool:
    return a.missing == b.missing and all(
        x is y or (x.time == y.time and x.key == y.key and np.array_equal(x.pixels, y.pixels))
        for x, y in zip(a.frames, b.frames, strict=True)
        if x is not None and y is not None
    )


@pytest.mark.parametrize("name", ["longgop.mp4", "vfr.mp4", "start.ts", "gap.mp4"])
def test_union_equals_separate_reads(name: str) -> None:
    duration = FrameReader().info(CASES / name).duration
    windows = [window_times(f * duration, f * duration + 0.3 * duration, 3.0) for f in (0.5, 0.0, 0.1, 0.35, 0.85)]
    union = FrameReader(0).read_many(CASES / name, windows, (64, 32))
    alone = [read_frames(CASES / name, times, (64, 32)) for times in windows]
    assert all(same(a, b) for a, b in zip(union, alone, strict=True))
    assert any(frames.reasons for frames in union)  # the last window reaches past the end
    assert all(frames.present for frames in union)


def test_union_decodes_each_group_of_pictures_once() -> None:
    union, alone = FrameReader(0), FrameReader(0)
    union.read_many(LONG, WINDOWS)
    for times in WINDOWS:
        alone.read(LONG, times)
    assert union.stats.decoded <= 600  # the file has one group of pictures of 600 frames
    assert union.stats.decoded < alone.stats.decoded / 2
    assert union.stats.runs == 1


def test_asked_order_and_repeats_are_kept() -> None:
    got = read_frames(CASES / "three.mp4", [0.25, 0.0, 0.25, 9.0, 0.21])
    assert [None if f is None else round(f.time, 3) for f in got.frames] == [0.2, 0.0, 0.2, None, 0.2]
    assert got.frames[0].key == got.frames[2].key == got.frames[4].key
    assert [round(frame.time, 3) for frame in distinct(got)] == [0.2, 0.0]


def test_more_frames_asked_than_there_are() -> None:
    got = read_frames(CASES / "three.mp4", overview_times(0.3, 64))
    assert len(got.present) == 64
    assert [round(frame.time, 3) for frame in distinct(got)] == [0.0, 0.1, 0.2]


def test_hits_need_neither_file_nor_decoder() -> None:
    reader = FrameReader()
    first = reader.read_many(LONG, WINDOWS, (64, 32))
    decoded, opened = reader.stats.decoded, reader.stats.opened
    again = reader.read_many(LONG, WINDOWS, (64, 32))
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    # Other times that fall into the same frames are hits too: which frame is shown when is remembered.
    shifted = reader.read(LONG, [frame.time + 0.01 for frame in first[0].present], (64, 32))
    assert [f.key for f in shifted.present] == [f.key for f in first[0].present]
    reader.info(LONG)
    assert (reader.stats.decoded, reader.stats.opened) == (decoded, opened)
    assert opened == 1
    reader.read(LONG, WINDOWS[0], (32, 32))  # another size is another frame
    assert reader.stats.decoded > decoded


def test_broken_frames_are_remembered() -> None:
    reader = FrameReader()
    first = reader.read(CASES / "corrupt.mp4", [1.1])
    decoded = reader.stats.decoded
    assert reader.read(CASES / "corrupt.mp4", [1.1]).missing == first.missing != (None,)
    assert reader.stats.decoded == decoded


def test_cache_is_bounded_and_drops_the_oldest() -> None:
    frame_bytes = 64 * 32 * 3
    reader = FrameReader(cache_bytes=10 * frame_bytes)
    times = [float(i) for i in range(40)]
    whole = reader.read(LONG, times, (64, 32))
    assert len(whole.present) == 40  # the answer is complete although the cache is not
    assert reader.cache.bytes <= 10 * frame_bytes
    assert len(reader.cache) == 10
    decoded = reader.stats.decoded
    reader.read(LONG, times[-10:], (64, 32))
    assert reader.stats.decoded == decoded
    reader.read(LONG, times[:1], (64, 32))
    assert reader.stats.decoded > decoded


def test_cache_alone() -> None:
    def frame(n: int) -> Frame:
        return Frame(0.0, np.zeros((1, n, 3), np.uint8), str(n))

    cache = FrameCache(50)
    for n in (5, 6, 7):
        cache.put(("a", n, None), frame(n))
        cache.get(("a", 5, None))
    assert [cache.get(("a", n, None)) is not None for n in (5, 6, 7)] == [True, False, True]
    cache.put(("a", 21, None), frame(21))  # larger than the cache
    assert cache.get(("a", 21, None)) is None
    cache.put(("a", 5, None), frame(4))
    assert cache.bytes == 3 * (7 + 4)


def test_pixels_cannot_be_written() -> None:
    frame = read_frames(CASES / "one.mp4", [0.0]).present[0]
    with pytest.raises(ValueError, match="read-only"):
        frame.pixels[0, 0, 0] = 1


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    shutil.copy(CASES / "base.mp4", path)
    reader = FrameReader()
    before = reader.read(path, [2.0]).present[0]
    shutil.copy(CASES / "rot90.mp4", path)
    after = reader.read(path, [2.0]).present[0]
    assert before.pixels.shape != after.pixels.shape
    assert before.key != after.key
    assert reader.info(path).rotation == 90
    # The same size in bytes, another time of modification: still another file.
    shutil.copy(CASES / "base.mp4", path)
    os.utime(path, ns=(0, 12345))
    assert reader.info(path).rotation == 0
    path.unlink()
    with pytest.raises(VideoError, match="no such file"):
        reader.read(path, [2.0])


def test_a_copy_is_another_file(tmp_path: Path) -> None:
    shutil.copy(CASES / "base.mp4", tmp_path / "a.mp4")
    shutil.copy(CASES / "base.mp4", tmp_path / "b.mp4")
    reader = FrameReader()
    keys = {reader.read(tmp_path / name, [1.0]).present[0].key for name in ("a.mp4", "b.mp4")}
    assert len(keys) == 2


async def test_concurrent_requests_decode_once() -> None:
    alone, shared = FrameReader(), FrameReader()
    expected = alone.read(LONG, WINDOWS[3], (64, 32))
    got = await asyncio.gather(*(shared.aread(LONG, WINDOWS[3], (64, 32)) for _ in range(16)))
    assert all(same(expected, frames) for frames in got)
    assert shared.stats.decoded == alone.stats.decoded
    assert shared.stats.opened == 1


def test_threads_share_one_decode() -> None:
    alone, shared = FrameReader(), FrameReader()
    alone.read(LONG, WINDOWS[3], (64, 32))
    threads = [threading.Thread(target=shared.read, args=(LONG, WINDOWS[3], (64, 32))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert shared.stats.requests == 8
    assert shared.stats.decoded == alone.stats.decoded


async def test_the_event_loop_runs_on_while_frames_are_decoded() -> None:
    reader, ticks, done = FrameReader(0), 0, False

    async def tick() -> None:
        nonlocal ticks
        while not done:
            await asyncio.sleep(0.005)
            ticks += 1

    ticker = asyncio.create_task(tick())
    started = asyncio.get_running_loop().time()
    await reader.aread_many(LONG, [[time] for time in overview_times(120.0, 200)], (640, 360))
    seconds = asyncio.get_running_loop().time() - started
    done = True
    await ticker
    assert ticks >= min(10, seconds / 0.05)
    assert seconds > 0.05  # or it would have proven nothing


async def test_a_cancelled_request_harms_nobody() -> None:
    reader = FrameReader(workers=1)
    first = asyncio.create_task(reader.aread(LONG, WINDOWS[0]))
    second = asyncio.create_task(reader.aread(LONG, WINDOWS[3]))
    third = asyncio.create_task(reader.aread(CASES / "base.mp4", [1.0]))
    await asyncio.sleep(0)
    second.cancel()
    assert (await first).present
    assert (await third).present
    assert (await reader.ainfo(LONG)).duration == pytest.approx(120.0)
    with pytest.raises(asyncio.CancelledError):
        await second


async def test_errors_reach_every_caller() -> None:
    reader = FrameReader()
    results = await asyncio.gather(*(reader.aread(CASES / "zero.mp4", [0.0]) for _ in range(5)), return_exceptions=True)
    assert all(isinstance(result, VideoError) for result in results)
    assert len({id(result) for result in results}) == 5
    assert (await reader.aread(CASES / "base.mp4", [0.0])).present


async def test_a_bug_is_raised_and_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    reader = FrameReader()
    with monkeypatch.context() as patch:
        patch.setattr("paravt.video.job.Job.run", fail)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(reader.aread(LONG, [0.0]), 10)
    assert (await asyncio.wait_for(reader.aread(LONG, [0.0]), 10)).present


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="size"):
        FrameReader().read(LONG, [0.0], (0, 32))
    with pytest.raises(ValueError, match="cache"):
        FrameReader(cache_bytes=-1)
    assert FrameReader().read(LONG, []).frames == ()
    assert FrameReader().read_many(LONG, []) == []


def test_after_close_it_refuses() -> None:
    reader = FrameReader()
    reader.read(CASES / "one.mp4", [0.0])
    reader.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            reader.read(CASES / "one.mp4", [0.0])
