"""Ask a question about a video.

python examples/ask.py VIDEO "QUESTION"
"""

import sys

import paravt

if len(sys.argv) != 3:
    sys.exit(__doc__)
episode = paravt.ask(sys.argv[1], sys.argv[2])
print(episode.answer)
for crop in episode.crops:
    print(crop.window, crop.status, crop.report)
for error in episode.errors:
    print(error.where, error.message)
