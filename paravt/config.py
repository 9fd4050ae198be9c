"""Recipes: what a run is made of, validated before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paravt.agent import EpisodeConfig
from paravt.algo import FRAME_BUDGETS, AnchorConfig
from paravt.errors import RecipeError
from paravt.learner import LearnerConfig, LoRA
from paravt.loss import LossConfig
from paravt.optim import OptimizerConfig
from paravt.rewards import RewardConfig
from paravt.rollout import RolloutConfig
from paravt.trackers import TrackerName
from paravt.watch import WatchConfig

Positive = Annotated[int, Field(gt=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TinyModel(Strict):
    """A freshly initialised tiny model; see `paravt.lab.tiny.TinyShape`."""

    kind: Literal["tiny"] = "tiny"
    hidden: Positive = 128
    layers: Positive = 3
    heads: Positive = 4
    kv_heads: Positive = 2
    feed_forward: Positive = 256

    @model_validator(mode="after")
    def _divisible(self) -> TinyModel:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError("hidden must be a multiple of 2 x heads, and heads one of kv_heads")
        return self


class PretrainedModel(Strict):
    """A checkpoint directory or a hub id."""

    kind: Literal["pretrained"]
    path: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"


class LabMixture(Strict):
    """Traces of the lab's scripted teacher: shares of their kinds, and the frame budgets of their overviews."""

    kinds: dict[Literal["parallel", "sequential", "none", "crop"], Annotated[float, Field(ge=0)]]
    budgets: tuple[Positive, ...] = (4, 8, 16, 32, 64)
    lengths: tuple[Annotated[int, Field(ge=2, le=5)], ...] = (2, 3, 4, 5)
    crop_frames: tuple[Positive, ...] = (16,)

    @model_validator(mode="after")
    def _something(self) -> LabMixture:
        if sum(self.kinds.values()) <= 0 or not (self.budgets and self.lengths and self.crop_frames):
            raise ValueError("the shares of `kinds` must not all be 0, and none of the lists must be empty")
        return self


class Stage(Strict):
    """A stretch of training on one mixture, with its own warm-up and cosine decay."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """Of its directory in the run."""
    steps: Positive
    batch_size: Positive = 32
    learning_rate: Annotated[float, Field(gt=0)]
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    final_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    data: LabMixture


class SFTRecipe(Strict):
    """Supervised training on traces. The loss is the mean over sampled tokens."""

    model: Annotated[TinyModel | PretrainedModel, Field(discriminator="kind")] = TinyModel()
    seed: int = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    threads: Positive = 2
    log_every: Positive = 20
    checkpoint_every: Positive = 200
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _distinct(self) -> SFTRecipe:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError("stages need distinct names")
        return self


class LabQuestions(Strict):
    """Questions about generated videos, read from memory."""

    kind: Literal["lab"] = "lab"
    videos: Positive = 20_000


class QuestionFile(Strict):
    """A JSONL file of samples; see `paravt.data.read_samples`."""

    kind: Literal["jsonl"]
    path: str


class RolloutRecipe(Strict):
    prompts: Positive = 16
    """Prompts of a step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """G, episodes of a prompt."""
    temperature: Annotated[float, Field(gt=0)] = 0.7
    max_concurrent: Positive = 64
    """Episodes at a time."""
    max_refills: Annotated[int, Field(ge=0)] = 0
    """Dynamic sampling: how often groups that teach nothing are replaced by new prompts, in a step."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """k: how many policy versions older than the learner's an episode that is learned from may be. 0 is on-policy; with
    more, k further steps are sampled while the learner works, by a copy of the model."""


class EpisodeRecipe(Strict):
    """See `paravt.agent.EpisodeConfig`. There is no forced answer and no time-out in training, unless one is set."""

    frame_budget: Positive = 64
    """K without gating."""
    dispatch: Literal["parallel", "sequential", "none"] = "parallel"
    evidence: Literal["report", "frames", "both"] = "report"
    max_turns: Positive = 4
    max_parallel: Positive = 8
    max_tokens: Positive = 1024
    max_report_tokens: Positive = 256
    max_context_tokens: Positive = 32_768
    max_frames: Positive = 1024
    call_timeout: Annotated[float, Field(gt=0)] | None = None
    think_prefix: bool = False
    force_answer: bool = False


class JudgeRecipe(Strict):
    """A model behind an OpenAI-compatible endpoint that grades open answers."""

    url: str
    model: str


class RLRecipe(Strict):
    """PARA-GRPO and its ablations; the sections are the configurations of the modules they are named after."""

    model: PretrainedModel
    data: Annotated[LabQuestions | QuestionFile, Field(discriminator="kind")] = LabQuestions()
    seed: int = 0
    steps: Positive = 50
    rollout: RolloutRecipe = RolloutRecipe()
    episode: EpisodeRecipe = EpisodeRecipe()
    gating: bool = False
    """nFrames gating: K is drawn anew for each prompt and visit."""
    frame_budgets: Annotated[tuple[Positive, ...], Field(min_length=1)] = FRAME_BUDGETS
    reward: RewardConfig = RewardConfig()
    judge: JudgeRecipe | None = None
    anchor: AnchorConfig = AnchorConfig(credit="off")
    std: bool = True
    """Divide advantages by the standard deviation of their group."""
    subagents: bool = True
    """Train the sub-agents' traces too."""
    subagent_weight: Annotated[float, Field(ge=0)] = 1.0
    aggregation: Literal["token_mean", "seq_mean", "dr_grpo"] = "token_mean"
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoRA | None = None
    token_budget: Positive = 16_384
    activation_checkpointing: bool = False
    deterministic: bool = False
    """The same numbers in every run with as many processes: batches do not depend on timing."""
    threads: Positive | None = None
    watch: WatchConfig = WatchConfig()
    trackers: tuple[TrackerName, ...] = ()
    """Beside the JSONL file, which is always written."""
    checkpoint_every: Positive = 10
    keep_checkpoints: Positive = 2
    episodes_every: Positive = 10
    """How often all episodes of a step are written."""

    @model_validator(mode="after")
    def _possible(self) -> RLRecipe:
        if self.anchor.credit == "sequence" and not (self.reward.format_weight and self.reward.anchor_weight):
            raise ValueError("anchor.credit: sequence needs reward.format_weight and reward.anchor_weight")
        if self.anchor.credit != "sequence" and self.reward.anchor_weight:
            raise ValueError("reward.anchor_weight is paid with anchor.credit: sequence only")
        if self.deterministic and self.episode.call_timeout is not None:
            raise ValueError("deterministic runs have no time-outs: unset episode.call_timeout")
        if self.deterministic and self.rollout.max_staleness:
            raise ValueError("deterministic runs do not run ahead: rollout.max_staleness must be 0")
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
            max_concurrent=self.rollout.max_concurrent,
        )


R = TypeVar("R", bound=BaseModel)


def load_recipe(kind: type[R], path: str | Path, overrides: Sequence[str] = ()) -> R:
    """Read a YAML recipe; `overrides` are `dotted.key=value` (list items by index: `stages.0.steps=10`).

    A recipe with `base: other.yaml` (relative to it) changes that one, mapping by mapping. Raises RecipeError, one
    line that names the file and the key.
    """
    tree = _read(Path(path))
    for override in overrides:
        _override(tree, override)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "recipe"
        message = "there is no such setting" if first["type"] == "extra_forbidden" else first["msg"]
        raise RecipeError(f"{path}: {where}: {message}") from error


def _read(path: Path, inner: frozenset[Path] = frozenset()) -> dict[str, Any]:
    try:
        if path.resolve() in inner:
            raise RecipeError(f"{path}: is its own base")
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys")
    base = tree.pop("base", None)
    return tree if base is None else _merge(_read(path.parent / str(base), inner | {path.resolve()}), tree)


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merge(base[key], value) for key, value in change.items()
            if isinstance(value, dict) and isinstance(base.get(key), dict)}  # fmt: skip
    return {**base, **change, **both}


def _override(tree: object, override: str) -> None:
    path, equals, text = override.partition("=")
    *parents, last = path.split(".")
    if not equals or not last:
        raise RecipeError(f"{override}: an override looks like key.key=value")
    node = tree
    try:
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})  # type: ignore[attr-defined]
        value = yaml.safe_load(text)
        if isinstance(node, list):
            node[int(last)] = value
        elif isinstance(node, dict):
            node[last] = value
        else:
            raise RecipeError(f"{override}: {'.'.join(parents)} has no keys")
    except (ValueError, IndexError, AttributeError, yaml.YAMLError) as error:
        raise RecipeError(f"{override}: {error}") from error
