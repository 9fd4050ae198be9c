"""What is written to disk: whole or not at all, by one process at a time."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from disk import full_disk

from paravt.episodes import save_episode
from paravt.errors import DataError, RecipeError, VideoError
from paravt.files import write_whole
from paravt.provenance import claim_run
from paravt.types import Episode, Sample, Trace
from paravt.video import open_video


def episode(answer: str) -> Episode:
    sample = Sample("s", "v.mp4", "q", metadata={"score": np.float32(0.5)})
    return Episode(sample, 4, "parallel", Trace("main", "main"), (), (), answer)


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with full_disk(1000), pytest.raises(OSError, match="large") as failure:
        write_whole(tmp_path / "e.json", "x" * 5000)
    assert failure.value.filename == str(tmp_path / "e.json")
    assert list(tmp_path.iterdir()) == []


def test_writers_of_one_file_never_leave_half_of_it(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    seen: list[str] = []

    def write(number: int) -> None:
        for _ in range(30):
            save_episode(episode(str(number) * 2000), path)
            seen.append(json.loads(path.read_text())["answer"])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 120
    assert {len(answer) for answer in seen} == {2000}
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(path.read_text())["sample"]["metadata"] == {"score": 0.5}


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    for wrong in (tmp_path, Path("/dev/null"), tmp_path / "no" / "e.json", tmp_path / "a\0b"):
        with pytest.raises(DataError):
            save_episode(episode("x"), wrong)


def test_a_run_directory_belongs_to_one_process_and_one_recipe(tmp_path: Path) -> None:
    with claim_run(tmp_path / "run", "one"):
        with pytest.raises(RecipeError, match="another process is running there"):
            claim_run(tmp_path / "run", "one")
        before = (tmp_path / "run" / "recipe.json").stat().st_mtime_ns
    with claim_run(tmp_path / "run", "one"):
        assert (tmp_path / "run" / "recipe.json").stat().st_mtime_ns == before
    with pytest.raises(RecipeError, match="holds a run of another recipe"):
        claim_run(tmp_path / "run", "two")
    claim_run(tmp_path / "json", '{"a": {"b": 1, "c": 2}}').close()
    with pytest.raises(RecipeError, match=r"another recipe \(a\.c: 2, now 3\); choose"):
        claim_run(tmp_path / "json", '{"a": {"b": 1, "c": 3}}')
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="cannot be written to"):
        claim_run(tmp_path / "file", "one")


@pytest.mark.parametrize(
    "text", ["ffconcat version 1.0\nfile base.mp4\n", "#EXTM3U\n#EXT-X-TARGETDURATION:4\n#EXTINF:4,\nbase.ts\n"]
)
def test_a_playlist_is_not_a_video(tmp_path: Path, text: str) -> None:
    cases = Path(__file__).parent / "cases" / "video"
    (tmp_path / "base.mp4").write_bytes((cases / "base.mp4").read_bytes())
    (tmp_path / "base.ts").write_bytes((cases / "start.ts").read_bytes())
    for name in ("list.mp4", "list.m3u8"):
        (tmp_path / name).write_text(text)
        with pytest.raises(VideoError):
            open_video(str(tmp_path / name))
