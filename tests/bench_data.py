"""Small data sets in the layouts that the benchmarks are published in, made here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rows import write_video

SECONDS = 8


def video(path: Path, seconds: int = SECONDS) -> Path:
    return write_video(path, seconds)


def parquet(path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=schema), path)


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


SRT = """\ufeff1\r
00:00:00,200 --> 00:00:01,000\r
<font color="white" size=".72c">Good &amp; early</font>\r
\r
2\r
00:00:00,900 --> 00:00:02,600\r
<font color="white" size=".72c">a line that</font>\r
<font color="white" size=".72c">goes on</font>\r
\r
3\r
00:00:02,600 --> 00:00:02,700\r
<font color="white" size=".72c">a line that goes on</font>\r
\r
4\r
01:00:00,000 --> 01:00:01,000\r
far\\Naway\r
"""


def videomme(root: Path) -> Path:
    """Two videos of three questions each; the second has no subtitles."""
    rows = []
    for number, (name, duration) in enumerate((("fFj-_93ACGo", "short"), ("-x.Y2", "long")), 1):
        video(root / "data" / f"{name}.mp4")
        for n in range(1, 4):
            rows.append(
                {
                    "video_id": f"{number:03d}", "duration": duration, "domain": "Knowledge",
                    "sub_category": "Astronomy", "url": f"https://www.youtube.com/watch?v={name}", "videoID": name,
                    "question_id": f"{number:03d}-{n}", "task_type": "Counting Problem",
                    "question": f"How many, {n}?", "options": ["A. One.", "B. A. Two.", "C. Three.", "D. Four."],
                    "answer": "ABCD"[n],
                }
            )  # fmt: skip
    parquet(root / "videomme" / "test-00000-of-00001.parquet", rows)
    (root / "subtitle").mkdir()
    (root / "subtitle" / "fFj-_93ACGo.srt").write_text(SRT, encoding="utf-8", newline="")
    return root


def longvideobench(root: Path) -> Path:
    """Four rows on two videos: four options, five, a "N/A" inside, a choice that is padding."""
    base = {
        "video_id": "v1", "video_path": "v1.mp4", "subtitle_path": "v1_en.json", "question": "What is it?",
        "duration": 8.0, "duration_group": 15, "question_category": "S2E", "topic_category": "NP-News-Programs",
        "starting_timestamp_for_subtitles": 100.0,
    }  # fmt: skip

    def row(id: str, options: str, right: int, **more: object) -> dict[str, Any]:
        texts = options.split("|")
        return {**base, "id": id, "correct_choice": right, **{f"option{n}": texts[n] for n in range(5)}, **more}

    rows = [
        row("v1_0", "a cat|a dog|a cow|a hen|N/A", 3),
        row("v1_1", "a cat|a dog|a cow|a hen|an ox", 4),
        row("v2_0", "a cat|N/A|a cow|N/A|N/A", 2, video_id="v2", video_path="v2.mp4", subtitle_path="v2_en.json"),
        row("v2_1", "a cat|a dog|a cow|N/A|N/A", 3, video_id="v2", video_path="v2.mp4", subtitle_path="v2_en.json"),
    ]
    parquet(root / "validation-00000-of-00001.parquet", rows)
    listed = [
        {key: value for key, value in row.items() if not key.startswith("option")}
        | {"candidates": [row[f"option{n}"] for n in range(5) if row[f"option{n}"] != "N/A"], "level": "L1-Perception"}
        for row in rows[:2]
    ]
    write_json(root / "lvb_val.json", listed)
    write_json(
        root / "subtitles" / "v1_en.json",
        [
            {"timestamp": [90.0, 99.0], "text": "before"},
            {"timestamp": [99.5, 102], "text": "hello <i>there</i>"},
            {"timestamp": [106.0, None], "text": "to the end"},
        ],
    )
    write_json(
        root / "subtitles" / "v2_en.json",
        [
            {"start": "00:01:41.5", "end": "00:01:41.6", "line": "short"},
            {"start": "00:01:47.0", "end": "00:01:48.0", "line": "late"},
        ],
    )
    for name in ("v1", "v2"):
        video(root / "videos" / f"{name}.mp4")
    return root


def lvbench(root: Path) -> Path:
    """The hub's parquet: options are lines of the question, types are lists."""
    question = "What year appears?\n(A) 1636\n(B) 1366\n(C) 1363\n(D) 1633"
    rows = [
        {"uid": "0", "video_path": "Cm73ma6Ibcs.mp4", "question": question, "answer": "D",
         "question_type": ["key information retrieval"], "time_reference": "00:15-00:19", "type": "tv"},
        {"uid": "1", "video_path": "Cm73ma6Ibcs.mp4", "question": question, "answer": "F",
         "question_type": ["event understanding", "reasoning"], "time_reference": "01:00-02:00", "type": "tv"},
        {"uid": "2", "video_path": "Cm73ma6Ibcs.mp4", "question": "No options?", "answer": "A",
         "question_type": ["reasoning"], "time_reference": "", "type": "tv"},
    ]  # fmt: skip
    parquet(root / "data" / "train-00000-of-00001.parquet", rows)
    video(root / "video_chunks" / "part1" / "Cm73ma6Ibcs.mp4")
    return root


def lvbench_authors(root: Path) -> Path:
    """The authors' file: a line for each video."""
    question = "Who is it?\n(A) a man\n(B) a dog,\nand a cat\n(C) nobody"
    asked = [
        {"uid": str(uid), "question": question, "answer": "B", "question_type": ["entity recognition"],
         "time_reference": "00:15-00:19"}
        for uid in (7, 8)
    ]  # fmt: skip
    line = {"key": "abc", "type": "sport", "video_info": {"duration_minutes": 68}, "qa": asked}
    (root / "video_info.meta.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    video(root / "all_videos" / "abc.mp4")
    return root


def mlvu(root: Path) -> Path:
    """The hub's copy. Answers are letters and texts; one is no option, one is two of them; an id occurs twice."""

    def row(id: str, options: Sequence[str], answer: str, task: str = "count", name: str = "c_1.mp4") -> dict[str, Any]:
        listed = "".join(f"\n({letter}) {option}" for letter, option in zip("ABCD", options, strict=False))
        return {"video_name": name, "duration": 8.0, "question": f"How many?{listed}", "candidates": list(options),
                "answer": answer, "task_type": task, "question_id": id}  # fmt: skip

    rows = [
        row("C_0", ["1", "2", "3", "4"], "C"),
        row("C_1", ["1", "2", "3", "4"], "4"),
        row("C_2", ["1", "2", "3", "4"], "9"),
        row("C_3", ["1", "2", "2", "4"], "2"),
        row("C_4", ["1", "2", "2", "4"], "D"),
        row("C_4", ["B", "A", "D", "C"], "A", task="order", name="o_1.mp4"),
    ]
    parquet(root / "mlvu" / "test-00000-of-00001.parquet", rows)
    video(root / "c_1.mp4")
    video(root / "o_1.mp4")
    return root


def mlvu_authors(root: Path) -> Path:
    """The authors' files: answers are texts, and videos of different tasks have the same names."""
    for table, task, seconds in (("1_plotQA", "plotQA", 8), ("2_needle", "findNeedle", 3)):
        write_json(
            root / "json" / f"{table}.json",
            [{"video": "1.mp4", "duration": 8.0, "question": "Where?", "candidates": ["here", "there"],
              "answer": "there", "question_type": task}],
        )  # fmt: skip
        video(root / "video" / table / "1.mp4", seconds)
    write_json(root / "json" / "9_summary.json", [{"video": "1.mp4", "question": "Sum up!", "answer": "..."}])
    return root


def mmvu(root: Path) -> Path:
    """A question with a free answer, one with five options, one whose letter has no option."""
    address = "https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/videos/{}/0.mp4"

    def row(id: int, kind: str, subject: str, choices: Sequence[str], answer: str) -> dict[str, Any]:
        return {
            "id": f"validation_{id}", "video": address.format(subject.replace(" ", "_")), "youtube_url": "",
            "question_type": kind, "question": "What is shown?", "answer": answer,
            "metadata": {"subject": subject, "textbook": "", "rationale": "", "knowledge": []},
            "choices": dict(zip("ABCDE", [*choices, *[""] * 5], strict=False)),
        }  # fmt: skip

    rows = [
        row(0, "open-ended", "Computer Science", [], "Depth-First Search (DFS)"),
        row(1, "multiple-choice", "Art", ["10.0", "5.0", "12.0", "15.0", "20.0"], "A"),
        row(2, "multiple-choice", "Dentistry", ["a", "b", "c", "d"], "E"),
    ]
    write_json(root / "validation.json", rows)
    for folder, seconds in (("Computer_Science", 8), ("Art", 3)):
        video(root / "videos" / folder / "0.mp4", seconds)
    return root


def charades(root: Path) -> Path:
    """Times as 16-bit floats; the last row's window is empty."""
    times = [[24.3, 30.4], [0.0, 6.9], [5.0, 5.0]]
    columns = {
        "video": pa.array(["3MSZA.mp4", "3MSZA.mp4", "AO8RW.mp4"]),
        "caption": pa.array(["person turn a light on. ", "a person sits down.", "a person is putting a book."]),
        "timestamp": pa.array([np.array(pair, np.float16) for pair in times], pa.list_(pa.float16())),
    }
    (root / "data").mkdir(parents=True)
    pq.write_table(pa.table(columns), root / "data" / "test-00000-of-00001.parquet")
    for name in ("3MSZA", "AO8RW"):
        video(root / "Charades_v1_480" / f"{name}.mp4")
    return root
