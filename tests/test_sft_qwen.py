"""Supervised rows as the published models see them: the real vocabulary of Qwen, the released chat templates, and the
recipe of Qwen2.5-VL on a tiny checkpoint in the published layout.

Locked here: what is learned is what an assistant said and the end of its turn, to the byte, also where a byte-pair
tokenizer would merge it with what stands before or after; everything else is the template's own rendering.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from qwen_vocabulary import qwen3_tokenizer
from rich.console import Console
from rows import CALL, agent_row, frames_row, good_rows, text, turn, two_videos_row, write_lines, write_media
from test_models import build
from test_qwen25 import publish
from test_sft_rows import metrics
from transformers import PreTrainedTokenizerFast

from paravt.chat import TokenChat
from paravt.config import SFTRecipe, load_recipe
from paravt.data.traces import RowConfig, TraceBuilder
from paravt.lab.factory import train_sft
from paravt.lab.tiny import TinyShape, build_processor, build_qwen25_processor
from paravt.models import load_model
from paravt.types import Trace
from paravt.video import FrameReader


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return qwen3_tokenizer()


def released(name: str) -> str:
    """A template as it was released; trl keeps copies."""
    (folder,) = importlib.util.find_spec("trl").submodule_search_locations  # type: ignore[union-attr,misc]
    return (Path(folder) / "chat_templates" / f"{name}.jinja").read_text()


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def builder(
    request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> TraceBuilder:
    root = tmp_path_factory.mktemp("media")
    write_media(root)
    make = build_processor if request.param == "qwen3_vl" else build_qwen25_processor
    processor = make(tokenizer, TinyShape(frame_side=448))
    processor.chat_template = released(request.param)
    # the template of Qwen2.5-VL writes a system turn if there is none
    config = RowConfig(root, system="You are a helpful assistant.")
    return TraceBuilder(TokenChat(processor), FrameReader(workers=1), config)


MERGING = {
    "messages": [
        turn("user", "2+2?"),
        # "\n\n" and ">.\n" are tokens of their own, and so would be the newline of the header with those that follow
        turn("assistant", text("\n\n<think>\nFour.</think>\n<answer>4</answer>.\n")),
        turn("user", text("\n\nAre you sure?\n")),
        turn("assistant", text(f"<think>é🎬</think>\n{CALL}\n{CALL}")),
        turn("user", text("<tool_response>\nan apple\n</tool_response>")),
        turn("assistant", text(" <answer>an apple</answer>")),
    ]
}
ROWS = [agent_row(), frames_row(), two_videos_row(), MERGING]


def said(row: dict[str, Any]) -> list[str]:
    return ["".join(part["text"] for part in t["content"]) for t in row["messages"] if t["role"] == "assistant"]


def runs(trace: Trace) -> list[tuple[bool, list[int]]]:
    """Stretches of tokens that are learned, or not."""
    out: list[tuple[bool, list[int]]] = []
    for token, learned in zip(trace.ids, trace.loss_mask, strict=True):
        if not out or out[-1][0] != learned:
            out.append((learned, []))
        out[-1][1].append(token)
    return out


def test_the_vocabulary_is_qwens(tokenizer: PreTrainedTokenizerFast) -> None:
    named = {"<|im_end|>": 151_645, "<|image_pad|>": 151_655, "<tool_call>": 151_657, "</think>": 151_668}
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in named} == named
    assert len(tokenizer) == 151_669


@pytest.mark.parametrize("row", ROWS, ids=["agent", "frames", "videos", "merging"])
def test_what_is_learned_is_what_was_said(builder: TraceBuilder, row: dict[str, Any]) -> None:
    trace, tokenizer = builder.build(row), builder.chat.tokenizer
    found = runs(trace)
    assert [learned for learned, _ in found] == [False, True] * len(said(row))
    learned = [tokenizer.decode(ids) for yes, ids in found if yes]
    assert learned == [f"{words}<|im_end|>" for words in said(row)]
    for yes, ids in found:
        assert not yes or ids == [*tokenizer.encode(tokenizer.decode(ids[:-1])), builder.chat.end_id]
    for yes, ids in found[2:]:
        assert yes or tokenizer.decode(ids).startswith("\n<|im_start|>user\n"), (
            "the newline after a turn is not learned"
        )


@pytest.mark.parametrize("row", ROWS, ids=["agent", "frames", "videos", "merging"])
def test_the_text_is_the_released_templates(builder: TraceBuilder, row: dict[str, Any]) -> None:
    """All of the conversation at once, up to the end of the last turn; images are one placeholder each there."""
    loaded = builder.load(row)
    messages = []
    for message in loaded.messages:
        parts = [{"type": "text", "text": p.text} if hasattr(p, "text") else {"type": "image"} for p in message.content]
        messages.append({"role": message.role, "content": parts})
    tokenizer = builder.chat.tokenizer
    for template in {released("qwen3_vl"), builder.chat.template}:
        whole = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        assert builder.render(loaded).text == whole.removesuffix("\n")


def test_tokens_are_those_of_the_whole_text_but_where_turns_begin(builder: TraceBuilder) -> None:
    """A turn that begins with a newline is cut from that of the header, as it is sampled after the header's token. All
    others are what the tokenizer makes of the whole."""
    tokenizer = builder.chat.tokenizer
    for row in (agent_row(), {"messages": MERGING["messages"][2:]}):
        trace = builder.build(row)
        image, ids = builder.chat.image_id, []
        for token in trace.ids:
            if token != image or ids[-1] != image:
                ids.append(token)
        assert ids == tokenizer.encode(trace.text)
    trace = builder.build({"messages": MERGING["messages"][:2]})
    whole = tokenizer.encode(trace.text)
    assert tokenizer.decode(whole) == tokenizer.decode(trace.ids) == trace.text
    newline, two, three = (tokenizer.encode(text) for text in ("\n", "\n\n", "\n\n\n"))
    assert len(newline) == len(two) == len(three) == 1
    assert three[0] in whole
    assert three[0] not in trace.ids
    first = trace.loss_mask.index(True)
    assert [*trace.ids[first - 1 : first + 1]] == [*newline, *two]


def test_the_recipe_of_qwen25(tmp_path: Path) -> None:
    """The same code as that of Qwen3-VL, from a checkpoint as it is published to one that loads."""
    write_media(tmp_path)
    write_lines(tmp_path / "rows.jsonl", good_rows())
    publish(build("qwen2_5_vl", tied=False), tmp_path / "published")
    path = Path(__file__).parents[1] / "recipes" / "qwen25vl-7b" / "sft.yaml"
    plain = load_recipe(SFTRecipe, path)
    assert plain.model.path == "Qwen/Qwen2.5-VL-7B-Instruct"  # type: ignore[union-attr]
    assert plain.stages == load_recipe(SFTRecipe, path.parents[1] / "qwen3vl-8b" / "sft.yaml").stages
    changes = [f"model.path={tmp_path / 'published'}", "model.device=cpu", "model.dtype=float32", "threads=1",
               "stages.0.steps=6", "stages.0.batch_size=4", "stages.0.warmup_steps=1", "stages.0.learning_rate=3.0e-3",
               f"stages.0.data.files=['{tmp_path}/rows.jsonl']", f"stages.0.data.root={tmp_path}",
               "stages.0.data.workers=1"]  # fmt: skip
    train_sft(load_recipe(SFTRecipe, path, changes), tmp_path / "run", Console(quiet=True))
    rows = metrics(tmp_path / "run", "model")
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    before, after = (load_model(tmp_path / at).module.state_dict() for at in ("published", "run/model"))
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before if ".visual." in name)
