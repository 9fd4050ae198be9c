"""Several questions at once: one engine, one reader, as many episodes as you like.

    python examples/many_questions.py VIDEO "QUESTION" "QUESTION" ...

The engine batches whatever runs at the same time, and the reader decodes a stretch of video that several episodes look
at once.
"""

import asyncio
import sys

import paravt


async def main(video: str, questions: list[str]) -> None:
    engine, reader = paravt.open_engine(), paravt.FrameReader()
    config = paravt.EpisodeConfig(frame_budget=16)
    samples = [paravt.Sample(id=str(i), video=video, question=q) for i, q in enumerate(questions)]
    episodes = await asyncio.gather(*(paravt.run_episode(s, engine, config, reader=reader) for s in samples))
    for episode in episodes:
        print(f"{episode.sample.question}  ->  {episode.answer}  ({episode.tool_calls} crops)")
        for error in episode.errors:
            print(f"  {error.where}: {error.message}")
    await engine.close()


if len(sys.argv) < 3:
    sys.exit(__doc__)
asyncio.run(main(sys.argv[1], sys.argv[2:]))
