"""What the terminal shows of an episode, while it runs and when it is done."""

from __future__ import annotations

import io

from conftest import LONG
from rich.console import Console
from test_agent import ANSWER, calls, scripted

from paravt.agent import EpisodeConfig, Event, run_episode
from paravt.models import QwenVL
from paravt.terminal import LiveEpisode, clock, printable, show_episode
from paravt.types import Sample
from paravt.video import FrameReader


async def test_every_event_is_shown(tiny: QwenVL) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    engine = scripted(tiny, [calls((0, 9), (300, 400)), ANSWER], crop_0_0=["[bold]a\x1b[31m cat"])
    frames: list[str] = []
    with LiveEpisode(screen) as live:

        def show(event: Event) -> None:
            live.on_event(event)
            with screen.capture() as shot:
                screen.print(live._render())
            frames.append(shot.get())

        config = EpisodeConfig(frame_budget=4)
        episode = await run_episode(Sample("s", LONG, "?"), engine, config, reader=FrameReader(), on_event=show)
    assert "4 overview frames of 2:00" in frames[0]
    assert "turn 1: 2 calls" in frames[1]
    assert any("watching" in frame for frame in frames)
    assert "answered" in frames[-1]
    assert "past the end of the video" in frames[-1]

    plain = io.StringIO()
    show_episode(Console(file=plain, width=120), episode)
    assert "Answer: B" in plain.getvalue()
    assert "[bold]a\N{REPLACEMENT CHARACTER}[31m cat" in plain.getvalue()
    assert "2 turns, 1 crop," in plain.getvalue()


def test_times_and_control_characters() -> None:
    assert [clock(s) for s in (0, 59.6, 61, 3725)] == ["0:00", "1:00", "1:01", "1:02:05"]
    assert (
        printable("a\x1b\x07b\n\u202e")
        == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b\n\N{REPLACEMENT CHARACTER}"
    )
