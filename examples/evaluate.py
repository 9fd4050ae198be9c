"""Questions of your own, scored: a .jsonl file with `video`, `question`, and maybe `options`, `answer`, `id`.

python examples/evaluate.py QUESTIONS.jsonl OUT [MODEL]
"""

import sys

import paravt

if len(sys.argv) not in (3, 4):
    sys.exit(__doc__)
questions, out, model = (*sys.argv[1:], None)[:3]
summary = paravt.evaluate(questions, out, mode="agentic", frames=16, model=model)
for bench in summary.benches:
    for block in bench.blocks:
        print(bench.title, block.type, block.accuracy, block.interval, block.counts)
