"""The lab's world, its teacher, and the tiny models."""

from __future__ import annotations

import errno
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from paravt.errors import DataError
from paravt.lab.factory import new_model
from paravt.lab.teacher import Mixture, traces
from paravt.lab.tiny import TinyShape, build_model, build_processor
from paravt.lab.world import DURATION, EVENT_LENGTHS, FPS, GLYPHS, SCENE, WorldReader, world, write_video
from paravt.models import QwenVL, load_model
from paravt.types import Frame
from paravt.video import distinct, open_video, read_frames


@pytest.fixture(scope="module")
def student() -> QwenVL:
    return new_model()


def test_a_world_follows_from_its_name_alone() -> None:
    a, b = world("one"), world("two")
    assert world.__wrapped__("one") == a != b  # type: ignore[attr-defined]
    assert {w.events[0].shows for w in (world(f"w{i}") for i in range(60))} == set(GLYPHS)
    lengths = {event.end - event.start for i in range(60) for event in world(f"w{i}").events}
    assert lengths == set(EVENT_LENGTHS)
    for i in range(60):
        shown = world(f"w{i}")
        for scene, event in enumerate(shown.events):
            assert scene * SCENE <= event.start < event.end <= (scene + 1) * SCENE
            assert shown.shows(event.start) == shown.shows(event.end - 0.5) == event.shows
    assert any(world(f"w{i}").distractors for i in range(60))


async def test_the_file_and_the_memory_show_the_same(tmp_path: Path) -> None:
    """Every picture, to the last bit."""
    path = tmp_path / "w.mp4"
    write_video("w0", path)
    info = open_video(str(path))
    memory = await WorldReader().ainfo("w0")
    assert (info.duration, info.width, info.height) == (memory.duration, memory.width, memory.height)
    times = [index / FPS for index in range(DURATION * FPS)]
    from_file = read_frames(str(path), times, (32, 32))
    from_memory = await WorldReader().aread("w0", times, (32, 32))
    assert len(from_file.present) == len(times)
    for a, b in zip(from_file.present, from_memory.present, strict=True):
        assert a.time == b.time
        assert (a.pixels == b.pixels).all()


def test_a_video_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "w.mp4"
    monkeypatch.setattr("paravt.lab.world.picture", full)
    with pytest.raises(DataError, match=r"w\.mp4: cannot be written: No space left"):
        write_video("w0", path)
    assert list(tmp_path.iterdir()) == []


async def test_past_the_end_there_is_a_reason() -> None:
    read = await WorldReader().aread("w0", [0, DURATION], (32, 32))
    assert read.frames[1] is None
    assert "outside the video" in str(read.missing[1])


async def test_frames_that_look_the_same_have_one_name_and_are_still_two_frames() -> None:
    read = await WorldReader().aread("w0", [index / FPS for index in range(DURATION * FPS)], (32, 32))
    pictures: dict[str, np.ndarray] = {}
    for frame in read.present:
        assert (pictures.setdefault(frame.key, frame.pixels) == frame.pixels).all()
    assert len(pictures) < DURATION  # shared
    assert len(distinct(read)) == DURATION * FPS


def test_traces_are_the_same_for_the_same_seed(student: QwenVL) -> None:
    mixture = Mixture({"parallel": 1, "direct": 1, "sequential": 1, "none": 1, "crop": 1, "look": 1}, questions=2)
    first, second = ([t.ids for t in islice(traces(student.chat, mixture, 5), 12)] for _ in range(2))
    assert first == second
    assert first != [t.ids for t in islice(traces(student.chat, mixture, 6), 12)]


def test_the_tokenizer_is_lossless_and_short_on_the_task(student: QwenVL) -> None:
    tokenizer = student.chat.tokenizer
    for text in ("héllo 🙂 <answer>B</answer>.\n", "\x00\x01 tabs\t", "<12.0 seconds><12.5 seconds>", "127 12790"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("<12.0 seconds>", add_special_tokens=False)) == 1
    (crop,) = islice(traces(student.chat, Mixture({"crop": 1}), 0), 1)
    assert len(crop.ids) < 100  # 16 frames of four tokens, and the prompt


def test_positions_are_those_of_transformers(student: QwenVL) -> None:
    (trace,) = islice(traces(student.chat, Mixture({"parallel": 1}, budgets=(8,)), 1), 1)
    ids = torch.tensor([trace.ids])
    _, grid = student.pixel_inputs(trace.images)
    expected, _ = student.module.model.get_rope_index(ids, (ids == student.chat.image_id).int(), grid)
    found, following = student.positions(trace.ids, trace.images)
    assert (found == expected[:, 0].numpy()).all()
    assert following == found.max() + 1
    cut = trace.ids.index(trace.ids[-1], 40)  # somewhere in the text
    frames_before = sum(i == student.chat.image_id for i in trace.ids[:cut])
    head, start = student.positions(trace.ids[:cut], trace.images[:frames_before])
    tail, _ = student.positions(trace.ids[cut:], trace.images[frames_before:], start)
    assert (np.concatenate([head, tail], axis=1) == found).all()


def test_vision_features_are_those_of_transformers_also_for_mixed_sizes(tiny: QwenVL) -> None:
    shape = TinyShape(frame_side=64)
    model = QwenVL(build_model(tiny.chat.tokenizer, shape), _with_side(tiny, 64))
    draw = np.random.default_rng(0)
    for sides in ([(32, 32)] * 3, [(32, 32), (64, 32), (64, 64)]):
        frames = [
            Frame(0.0, draw.integers(0, 255, (h, w, 3), dtype=np.uint8), f"{i}") for i, (w, h) in enumerate(sides)
        ]
        ours = model.encode_images([*frames, frames[0]])
        plain = AutoModelForImageTextToText.from_config(model.module.config)
        plain.load_state_dict(model.module.state_dict())
        theirs = plain.model.get_image_features(*model.pixel_inputs(frames), return_dict=True)
        for mine, other in zip(ours.pooler_output, [*theirs.pooler_output, theirs.pooler_output[0]], strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def _with_side(tiny: QwenVL, side: int) -> object:
    return build_processor(tiny.chat.tokenizer, TinyShape(frame_side=side))


def test_a_saved_model_loads_with_the_auto_classes(student: QwenVL, tmp_path: Path) -> None:
    student.save(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    module = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(module).__name__ == "Qwen3VLForConditionalGeneration"
    assert type(processor).__name__ == "Qwen3VLProcessor"
    again = load_model(tmp_path)
    assert again.chat.template == student.chat.template
    for name, value in student.module.state_dict().items():
        assert torch.equal(value, again.module.state_dict()[name]), name
