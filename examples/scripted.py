"""An episode without a model: the engine replays a script, whatever the video shows. How tests and teachers work.

python examples/scripted.py VIDEO
"""

import asyncio
import sys

import paravt
from paravt.ask import shipped_model
from paravt.engines.scripted import ScriptedEngine
from paravt.models import load_model

if len(sys.argv) != 2:
    sys.exit(__doc__)
calls = "\n".join(paravt.render_call("crop_video", {"start_time": start, "end_time": start + 1}) for start in (0, 1, 2))
script = {
    "main": [f"<think>\nI look.\n</think>\n{calls}", "<think>\nSo.\n</think>\n<answer>a cat</answer>"],
    "crop/0/0": ["nothing"],
    "crop/0/1": ["a cat"],
    "crop/0/2": ["the cat's tail"],
}
engine = ScriptedEngine(load_model(shipped_model()).chat, script)
sample = paravt.Sample(id="example", video=sys.argv[1], question="Which animal?")
episode = asyncio.run(paravt.run_episode(sample, engine, paravt.EpisodeConfig(frame_budget=4)))
for error in episode.errors:
    print(error.where, error.message)
print(episode.main.text)
