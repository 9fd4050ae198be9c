"""Ask a question about a video.

python examples/ask.py VIDEO "QUESTION"
"""

import sys

import paravt

episode = paravt.ask(sys.argv[1], sys.argv[2])
print(episode.answer)
for crop in episode.crops:
    print(crop.window, crop.status, crop.report)
