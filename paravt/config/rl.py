"""Recipes of reinforcement learning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from paravt.agent import EpisodeConfig
from paravt.algo import FRAME_BUDGETS, AnchorConfig
from paravt.config.base import EpisodeRecipe, Positive, PretrainedModel, Strict, Threads
from paravt.config.data import LabQuestions, QuestionFile, QuestionRows
from paravt.config.engine import LocalEngineRecipe, VLLMEngineRecipe
from paravt.learner import LearnerConfig, LoRA
from paravt.loss import LossConfig
from paravt.optim import OptimizerConfig
from paravt.rewards import RewardConfig
from paravt.rollout import RolloutConfig
from paravt.trackers import TrackerName
from paravt.watch import WatchConfig


class RolloutRecipe(Strict):
    prompts: Positive = 16
    """Prompts of a step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """G, episodes of a prompt."""
    temperature: Annotated[float, Field(gt=0)] = 0.7
    """Of all sampling, main agent and sub-agents."""
    max_concurrent: Positive = 64
    """Episodes at a time, in each process."""
    max_refills: Annotated[int, Field(ge=0)] = 0
    """Dynamic sampling: how often groups that teach nothing are replaced by new prompts, in a step."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """k: how many policy versions older than the learner's an episode that is learned from may be. 0 is on-policy; with
    more, k further steps are sampled while the learner works, by a copy of the model."""


class JudgeRecipe(Strict):
    """A model behind an OpenAI-compatible endpoint that grades open answers."""

    url: str
    """Of the server, with or without /v1."""
    model: str
    """Its name on that server."""


class RLRecipe(Strict):
    """PARA-GRPO and its ablations; the sections are the configurations of the modules they are named after."""

    model: PretrainedModel
    """What training starts from, and the reference of the KL term."""
    data: Annotated[LabQuestions | QuestionFile | QuestionRows, Field(discriminator="kind")] = LabQuestions()
    """The questions."""
    seed: int = 0
    """Of everything that is drawn."""
    steps: Positive = 50
    """Updates; each samples its own episodes."""
    rollout: RolloutRecipe = RolloutRecipe()
    """How many episodes, and how they are sampled."""
    engine: Annotated[LocalEngineRecipe | VLLMEngineRecipe, Field(discriminator="kind")] = LocalEngineRecipe()
    """What samples them."""
    episode: EpisodeRecipe = EpisodeRecipe()
    """What an episode is given."""
    gating: bool = False
    """nFrames gating: K is drawn anew for each prompt and visit."""
    frame_budgets: Annotated[tuple[Positive, ...], Field(min_length=1)] = FRAME_BUDGETS
    """What K is drawn from with gating."""
    budget_weights: tuple[Annotated[float, Field(gt=0)], ...] | Literal["pass_rate"] | None = None
    """Of `frame_budgets`: fixed, or those that `pass_rate_weights` gives for the recent accuracy at each K. None:
    uniform."""
    reward: RewardConfig = RewardConfig()
    """What is paid."""
    judge: JudgeRecipe | None = None
    """Grades open answers; null: token F1."""
    anchor: AnchorConfig = AnchorConfig(credit="off")
    """Selective anchoring."""
    std: bool = True
    """Divide advantages by the standard deviation of their group."""
    subagents: bool = True
    """Train the sub-agents' traces too."""
    subagent_weight: Annotated[float, Field(ge=0)] = 1.0
    """Of the sub-agents' loss beside the main agents'."""
    aggregation: Literal["token_mean", "seq_mean", "dr_grpo"] = "token_mean"
    """Main loss: the mean over all tokens, over rows of the mean over tokens, or the sum over a constant (Dr. GRPO)."""
    loss: LossConfig = LossConfig()
    """The policy loss."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    lora: LoRA | None = None
    """Train adapters instead of all weights; null: all weights."""
    token_budget: Positive = 16_384
    """Most tokens in one microbatch; more are accumulated over several."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    deterministic: bool = False
    """The same numbers in every run with as many processes: batches do not depend on timing."""
    threads: Threads | None = None
    """Of torch, on the CPU; null: as many as torch takes."""
    watch: WatchConfig = WatchConfig()
    """When to warn of a collapse."""
    trackers: tuple[TrackerName, ...] = ()
    """Beside the JSONL file, which is always written."""
    checkpoint_every: Positive = 10
    """Steps between two checkpoints."""
    keep_checkpoints: Positive = 2
    """Older ones are removed."""
    episodes_every: Positive = 10
    """How often all episodes of a step are written."""

    @model_validator(mode="after")
    def _possible(self) -> RLRecipe:
        if self.anchor.credit == "sequence" and not (self.reward.format_weight and self.reward.anchor_weight):
            raise ValueError("anchor.credit: sequence needs reward.format_weight and reward.anchor_weight")
        if self.anchor.credit != "sequence" and self.reward.anchor_weight:
            raise ValueError("reward.anchor_weight is paid with anchor.credit: sequence only")
        if isinstance(self.budget_weights, tuple) and len(self.budget_weights) != len(self.frame_budgets):
            raise ValueError(f"budget_weights: {len(self.budget_weights)} for {len(self.frame_budgets)} frame_budgets")
        if self.budget_weights is not None and not self.gating:
            raise ValueError("budget_weights need gating: true")
        if self.deterministic and self.episode.call_timeout is not None:
            raise ValueError("deterministic runs have no time-outs: unset episode.call_timeout")
        if self.deterministic and self.rollout.max_staleness:
            raise ValueError(
                "deterministic runs do not run ahead: set deterministic: false or rollout.max_staleness: 0"
            )
        if self.deterministic and self.engine.kind != "local":
            raise ValueError(
                "deterministic runs sample with the local engine: set deterministic: false or engine.kind: local"
            )
        if self.rollout.max_staleness and self.loss.importance_cap is None:
            raise ValueError("rollout.max_staleness needs loss.importance_cap: old tokens have to be weighed")
        return self

    def learner_config(self) -> LearnerConfig:
        return LearnerConfig(
            loss=self.loss,
            optimizer=self.optimizer,
            temperature=self.rollout.temperature,
            token_budget=self.token_budget,
            activation_checkpointing=self.activation_checkpointing,
            lora=self.lora,
        )

    def rollout_config(self) -> RolloutConfig:
        return RolloutConfig(
            group_size=self.rollout.group_size,
            episode=EpisodeConfig(**self.episode.model_dump(), temperature=self.rollout.temperature),
            reward=self.reward,
            run_seed=self.seed,
            frame_budgets=self.frame_budgets if self.gating else None,
            budget_weights=self.budget_weights if isinstance(self.budget_weights, tuple) else None,
            max_concurrent=self.rollout.max_concurrent,
        )
