"""Credit: group advantages, gating, marks, rows and loss weights, on numbers that can be checked by hand.

Locked here: what is unscored takes no part; equal rewards (also up to float noise) give no advantage and never NaN;
groups don't mix; K is the same for a group and in every process; the rows of a group without a task signal are kept
where the anchor acts, and only those; sub-agents never change what main tokens weigh.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paravt.algo import (
    FRAME_BUDGETS,
    AnchorConfig,
    CreditConfig,
    LossCounts,
    batch_marks_mean,
    center_marks,
    draw_frame_budget,
    group_advantages,
    loss_counts,
    loss_weights,
    marks,
    marks_mean,
    rows_from_group,
    token_advantages,
    with_marks,
)
from paravt.types import Crop, Episode, Row, Sample, Segment, ToolCall, Trace, Window

# --- groups -----------------------------------------------------------------------------------------------------------


def test_advantages_are_trl_s():
    group = group_advantages([1.0, 0.0, 0.0, 1.0])
    std = math.sqrt(4 * 0.25 / 3)  # unbiased, as torch.std
    assert group.advantages == pytest.approx([sign * 0.5 / (std + 1e-4) for sign in (1, -1, -1, 1)])
    assert (group.equal, group.scored) == (False, 4)
    assert group_advantages([3.0, 1.0, 2.0], std=False).advantages == pytest.approx([1.0, -1.0, 0.0])


def test_unscored_members_take_no_part():
    group = group_advantages([2.0, None, 0.0, math.nan], std=False)
    assert (group.advantages, group.equal, group.scored) == ((1.0, 0.0, -1.0, 0.0), False, 2)


@pytest.mark.parametrize(
    "rewards",
    [[], [1.0], [None, 0.7], [None, None], [0.3] * 8, [0.1 + 0.2, 0.3, 0.3], [1e6, 1e6 + 0.5], [-0.15, -0.15 + 1e-9]],
)
def test_groups_that_say_nothing(rewards):
    group = group_advantages(rewards)
    assert group.equal
    assert group.advantages == (0.0,) * len(rewards)


def test_small_real_differences_count():
    assert not group_advantages([0.5, 0.501]).equal


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), max_size=9), st.booleans())
def test_advantages_are_finite_and_sum_to_zero(rewards, std):
    rewards = [r if r is None or not math.isfinite(r) else math.fmod(r, 1e6) for r in rewards]
    group = group_advantages(rewards, std=std)
    assert all(map(math.isfinite, group.advantages))
    assert sum(group.advantages) == pytest.approx(0.0, abs=1e-6 * (1 + sum(map(abs, group.advantages))))


# --- gating -----------------------------------------------------------------------------------------------------------


def test_frame_budgets_are_uniform_and_independent():
    draws = [draw_frame_budget(s, f"sample-{i}", v) for s in (0, 1) for i in range(2000) for v in range(2)]
    expected = len(draws) / 5
    chi2 = sum((n - expected) ** 2 / expected for n in Counter(draws).values())
    assert set(draws) == set(FRAME_BUDGETS)
    assert chi2 < 18.5  # p = 0.001 at 4 degrees of freedom
    for other in ((1, "sample-{}", 0), (0, "sample-{}", 1), (0, "other-{}", 0)):
        same = sum(
            draw_frame_budget(0, f"sample-{i}", 0) == draw_frame_budget(other[0], other[1].format(i), other[2])
            for i in range(2000)
        )
        assert abs(same - 400) < 60


def test_frame_budgets_are_the_same_in_every_process():
    code = "from paravt.algo import draw_frame_budget as d; print([d(3, f'é{i}', i % 2) for i in range(40)])"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    for seed in ("0", "77"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**env, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        assert json.loads(done.stdout) == [draw_frame_budget(3, f"é{i}", i % 2) for i in range(40)]


def test_other_choices():
    assert {draw_frame_budget(0, str(i), 0, (2, 3)) for i in range(50)} == {2, 3}


# --- marks ------------------------------------------------------------------------------------------------------------


def test_marks_and_their_centring():
    anchor = AnchorConfig(alpha=1.0, gamma=0.5)
    rows = [(1, 0, 1, -1), (0, 1)]
    assert marks(rows[0], anchor).tolist() == [1.0, 0.0, 1.0, -0.5]
    assert marks_mean(rows, anchor) == pytest.approx((1 + 1 - 0.5 + 1) / 4)
    one, two = center_marks(rows, anchor)
    assert one.tolist() == pytest.approx([0.375, 0.0, 0.375, -1.125])
    assert two.tolist() == pytest.approx([0.0, 0.375])
    assert center_marks(rows, anchor, center=0.0)[0].tolist() == [1.0, 0.0, 1.0, -0.5]


def test_marks_without_positions_or_without_breaks():
    assert marks_mean([(0, 0), ()], AnchorConfig()) == 0.0
    assert center_marks([(1, 1, 0)], AnchorConfig(alpha=0.1))[0].tolist() == [0.0, 0.0, 0.0]


def test_centring_leaves_gamma_as_a_scale():
    """Centred marks are (alpha + gamma) * (obeys - share that obeys): why gamma alone is studied without centring."""
    rows = [(1, -1, 1, 0), (1, 1, -1)]
    full, none = (center_marks(rows, AnchorConfig(gamma=gamma)) for gamma in (1.0, 0.0))
    for one, two in zip(full, none, strict=True):
        assert one.tolist() == pytest.approx((2 * two).tolist())


def test_token_advantages():
    mask = np.array([False, True, True, True])
    found = token_advantages(mask, -0.5, np.array([1.0, 1.0, 0.0, -1.0]), 0.5)
    assert found.tolist() == [0.0, 0.0, -0.5, -1.0]
    assert token_advantages(mask, 2.0, None, 0.5).tolist() == [0.0, 2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="marks for"):
        token_advantages(mask, 0.0, np.zeros(3), 0.5)


# --- rows -------------------------------------------------------------------------------------------------------------

END = "<|im_end|>"
GOOD = "a</think><answer>B</answer>" + END
BAD = "a<answer>B</answer>" + END
HEADER = "<|im_start|>assistant\n<think>\n"


def each_byte(ids):
    return [bytes([i]) for i in ids]


def segment(text: str, sampled: bool, version: int | None = 3) -> Segment:
    ids = tuple(text.encode())
    return Segment(ids, sampled, text, (-0.5,) * len(ids) if sampled else None, policy_version=version)


def episode(turn: str, reports: tuple[str, ...] = ()) -> Episode:
    main = Trace("main", "main", (segment(HEADER, False), segment(turn, True)), "stop")
    crops = tuple(
        Crop(0, n, "ran", ToolCall("crop_video", {}), Window(0, 1), text,
             Trace(f"crop/0/{n}", "crop", (segment("watch", False), segment(text, True, 2)), "stop"))
        for n, text in enumerate(reports)
    )  # fmt: skip
    return Episode(Sample("s", "v", "q"), 4, "parallel", main, (), crops, "B")


OFF = CreditConfig(anchor=AnchorConfig(credit="off"), std=False)


def test_the_rows_of_a_group():
    episodes = [episode(GOOD, ("a cat", "")), episode(BAD), episode(GOOD)]
    rows = rows_from_group(episodes, [1.0, 0.0, None], OFF, each_byte, group_id="g")
    # the report without sampled tokens and the unscored episode give none
    assert [(row.episode_id, row.role, row.policy_version) for row in rows] == [
        ("g/0", "main", 3),
        ("g/0", "crop", 2),
        ("g/1", "main", 3),
    ]
    assert [sorted(set(row.advantages[row.mask].tolist())) for row in rows] == [[0.5], [0.5], [-0.5]]
    for row, trace in zip(rows, [episodes[0].main, episodes[0].crops[0].trace, episodes[1].main], strict=True):
        assert tuple(row.ids) == trace.ids
        assert tuple(row.mask) == trace.loss_mask
        assert tuple(row.logprobs) == trace.logprobs
        assert not row.advantages[~row.mask].any()
        assert row.group_id == "g"


def test_marks_are_added_to_main_rows_only():
    config = CreditConfig(anchor=AnchorConfig(centred=False, gamma=2.0), std=False)
    rows = rows_from_group([episode(GOOD, ("a cat",)), episode(BAD)], [1.0, 0.0], config, each_byte, group_id="g")
    good, crop, bad = (row.advantages[row.mask] for row in rows)
    assert good.tolist() == [0.5] + [1.0] * len("</think><answer>") + [0.5] + [1.0] * len("</answer>" + END)
    assert crop.tolist() == [0.5] * 5
    assert bad.tolist() == [-0.5] + [-1.5] * len("<answer>") + [-0.5] + [-1.5] * len("</answer>" + END)


def test_a_group_of_equal_rewards_keeps_the_rows_that_carry_marks():
    episodes = [episode(GOOD, ("a cat",)), episode(BAD, ("a dog",))]
    assert rows_from_group(episodes, [1.0, 1.0], OFF, each_byte, group_id="g") == []
    rows = rows_from_group(episodes, [0.3, 0.1 + 0.2], CreditConfig(), each_byte, group_id="g")
    assert [(row.episode_id, row.role) for row in rows] == [("g/0", "main"), ("g/1", "main")]
    assert rows[0].advantages.max() > 0 > rows[1].advantages.min()
    # all tokens obey: centred, there is nothing to learn
    same = [episode(GOOD), episode(GOOD)]
    assert rows_from_group(same, [1.0, 1.0], CreditConfig(), each_byte, group_id="g") == []
    # ... unless others in the batch do worse
    center = batch_marks_mean(
        [(same, [1.0, 1.0]), ([episode(BAD), episode(BAD)], [0.0, None])], AnchorConfig(), each_byte
    )
    good, bad = len("</think><answer></answer>" + END), len("<answer></answer>" + END)
    assert center == pytest.approx((2 * good - bad) / (2 * good + bad))
    rows = rows_from_group(same, [1.0, 1.0], CreditConfig(), each_byte, group_id="g", center=center)
    assert [row.advantages.max() for row in rows] == pytest.approx([0.5 * (1 - center)] * 2)


def test_without_sub_agents_and_with_sequence_credit():
    episodes = [episode(GOOD, ("a cat",)), episode(BAD)]
    config = CreditConfig(anchor=AnchorConfig(credit="sequence"), subagents=False, std=False)
    rows = rows_from_group(episodes, [1.0, 0.0], config, each_byte, group_id="g")
    assert [row.role for row in rows] == ["main", "main"]
    assert set(rows[0].advantages[rows[0].mask].tolist()) == {0.5}


def test_the_same_marks_as_credit_of_the_sequence():
    anchor = AnchorConfig(credit="marks", weight=0.5, alpha=1.0, gamma=3.0)
    # 2 obey, 1 breaks: mean (1 + 1 - 3) / 3; 1 obeys: 1; nothing structural: 0; unscored stays so
    assert with_marks([1.0, 1.0, 1.0, None], [[1, 0, 1, -1], [0, 1], [0], [1]], anchor) == pytest.approx(
        [1 - 0.5 / 3, 1.5, 1.0, None]
    )
    # equal task rewards: what is left is the difference of the marks, on every token of the episode and its crops
    config = CreditConfig(anchor=AnchorConfig(credit="marks", weight=0.5), std=False)
    good, crop, bad = rows_from_group(
        [episode(GOOD, ("a cat",)), episode(BAD)], [1.0, 1.0], config, each_byte, group_id="g"
    )
    assert set(good.advantages[good.mask].tolist()) == {0.5}  # (1.5 - 0.5) / 2: all of BAD's tags break the template
    assert set(crop.advantages[crop.mask].tolist()) == {0.5}
    assert set(bad.advantages[bad.mask].tolist()) == {-0.5}


def test_what_cannot_be_trained_on():
    with pytest.raises(ValueError, match="1 rewards for 2"):
        rows_from_group([episode(GOOD)] * 2, [1.0], OFF, each_byte, group_id="g")
    bare = Trace("main", "main", (Segment((1,), True, "x", None, policy_version=0),), "stop")
    broken = Episode(Sample("s", "v", "q"), 4, "parallel", bare, (), (), "B")
    with pytest.raises(ValueError, match="without log-probabilities"):
        rows_from_group([broken, episode(GOOD)], [1.0, 0.0], OFF, each_byte, group_id="g")


# --- loss weights -----------------------------------------------------------------------------------------------------


def row(mask: str, episode_id: str, role: str = "main") -> Row:
    mask_T = np.array([char == "1" for char in mask])
    zeros = np.zeros(len(mask), dtype=np.float32)
    return Row(zeros.astype(np.int64), mask_T, zeros, zeros, (), "g", episode_id, role, 0)


ROWS = [
    row("0111", "a"),
    row("01", "b"),
    row("011", "a", "crop"),
    row("01111", "a", "crop"),
    row("000", "a", "crop"),
    row("0101", "b", "crop"),
    row("000", "c"),
]


def totals(weights):
    return [float(w.sum()) for w in weights]


def test_token_mean_with_sub_agents():
    weights = loss_weights(ROWS, 2.0)
    assert weights[0].tolist() == pytest.approx([0, 1 / 4, 1 / 4, 1 / 4])
    assert weights[1].tolist() == pytest.approx([0, 1 / 4])
    # w * 1/2 episodes * 1/2 crops * 1/tokens
    assert weights[2].tolist() == pytest.approx([0, 0.25, 0.25])
    assert weights[3].tolist() == pytest.approx([0, *[0.125] * 4])
    assert weights[5].tolist() == pytest.approx([0, 0.5, 0, 0.5])
    assert totals(weights) == pytest.approx([0.75, 0.25, 0.5, 0.5, 0, 1.0, 0])


def test_the_formula_of_the_design():
    """L = L_main + w * mean over episodes (mean over its crops (mean over tokens)), with a loss for each token."""
    rng = np.random.default_rng(0)
    losses = [rng.normal(size=len(r.ids)) for r in ROWS]
    mean = [loss[r.mask].mean() if r.mask.any() else None for loss, r in zip(losses, ROWS, strict=True)]
    main = np.concatenate([losses[0][ROWS[0].mask], losses[1][ROWS[1].mask]]).mean()
    crops = np.mean([np.mean([mean[2], mean[3]]), mean[5]])
    for aggregation, expected in (("token_mean", main), ("seq_mean", (mean[0] + mean[1]) / 2)):
        weights = loss_weights(ROWS, 0.7, aggregation)
        total = sum(float((w * loss).sum()) for w, loss in zip(weights, losses, strict=True))
        assert total == pytest.approx(expected + 0.7 * crops)


def test_the_other_aggregations():
    assert totals(loss_weights(ROWS, 0.0, "seq_mean")) == pytest.approx([0.5, 0.5, 0, 0, 0, 0, 0])
    assert totals(loss_weights(ROWS, 0.0, "dr_grpo", max_tokens=10)) == pytest.approx([3 / 20, 1 / 20, 0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="max_tokens"):
        loss_weights(ROWS, aggregation="dr_grpo")


def test_ranks_share_their_counts():
    parts = [ROWS[:3], ROWS[3:]]
    counts = sum(map(loss_counts, parts), LossCounts())
    assert counts == loss_counts(ROWS) == LossCounts(4, 2, {"a": 2, "b": 1})
    apart = [w for part in parts for w in loss_weights(part, 2.0, counts=counts)]
    for one, two in zip(apart, loss_weights(ROWS, 2.0), strict=True):
        assert one.tolist() == two.tolist()


def test_more_crops_of_an_episode_change_nothing_else():
    many = [*ROWS, *(row("011", "a", "crop") for _ in range(20))]
    for aggregation in ("token_mean", "seq_mean"):
        before, after = loss_weights(ROWS, 1.0, aggregation), loss_weights(many, 1.0, aggregation)
        for n, old in enumerate(ROWS):
            if old.episode_id != "a" or old.role == "main":
                assert before[n].tolist() == after[n].tolist()
        crops = [w.sum() for w, r in zip(after, many, strict=True) if r.role == "crop" and r.episode_id == "a"]
        assert sum(crops) == pytest.approx(0.5)


def test_no_rows_and_nothing_sampled():
    assert loss_weights([]) == []
    assert totals(loss_weights([row("00", "a"), row("0", "a", "crop")])) == [0, 0]
