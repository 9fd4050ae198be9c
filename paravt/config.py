"""Recipes: what a run is made of, validated before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

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
    """Width of the text model."""
    layers: Positive = 3
    """Of the text model."""
    heads: Positive = 4
    """Of queries."""
    kv_heads: Positive = 2
    """Of keys and values."""
    feed_forward: Positive = 256
    """Width inside a layer's feed-forward part."""

    @model_validator(mode="after")
    def _divisible(self) -> TinyModel:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError("hidden must be a multiple of 2 x heads, and heads one of kv_heads")
        return self


class PretrainedModel(Strict):
    """A checkpoint directory or a hub id."""

    kind: Literal["pretrained"]
    path: str
    """The directory, or `owner/name` on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; auto: as they are saved."""
    device: str = "cpu"
    """cpu, cuda, cuda:1 ..."""


class LabMixture(Strict):
    """Traces of the lab's scripted teacher: shares of their kinds, and the frame budgets of their overviews."""

    kind: Literal["lab"] = "lab"
    kinds: dict[Literal["parallel", "sequential", "none", "crop"], Annotated[float, Field(ge=0)]]
    """Shares of the kinds of traces, relative to each other."""
    budgets: tuple[Positive, ...] = (4, 8, 16, 32, 64)
    """K is drawn from these."""
    lengths: tuple[Annotated[int, Field(ge=2, le=5)], ...] = (2, 3, 4, 5)
    """Cells that a question spans; each is watched by one crop."""
    crop_frames: tuple[Positive, ...] = (16,)
    """Frames of the windows in traces of kind crop."""

    @model_validator(mode="after")
    def _something(self) -> LabMixture:
        if sum(self.kinds.values()) <= 0 or not (self.budgets and self.lengths and self.crop_frames):
            raise ValueError("the shares of `kinds` must not all be 0, and none of the lists must be empty")
        return self


class LabQuestions(Strict):
    """Questions about generated videos, read from memory."""

    kind: Literal["lab"] = "lab"
    videos: Positive = 20_000
    """Different ones; each has one question."""


class QuestionFile(Strict):
    """A JSONL file of samples; see `paravt.data.read_samples`."""

    kind: Literal["jsonl"]
    path: str
    """The file."""


class QuestionRows(Strict):
    """Rows of published RL data, parquet or JSONL; see `paravt.data.read_question_rows`."""

    kind: Literal["rows"]
    files: Annotated[tuple[str, ...], Field(min_length=1)]
    root: str | None = None
    """Where relative paths of videos begin."""


class RolloutRecipe(Strict):
    prompts: Positive = 16
    """Prompts of a step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """G, episodes of a prompt."""
    temperature: Annotated[float, Field(gt=0)] = 0.7
    """Of all sampling, main agent and sub-agents."""
    max_concurrent: Positive = 64
    """Episodes at a time."""
    max_refills: Annotated[int, Field(ge=0)] = 0
    """Dynamic sampling: how often groups that teach nothing are replaced by new prompts, in a step."""


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
    """Seconds for the frames of a turn's calls, for each report, and for each turn; null waits for ever."""
    think_prefix: bool = False
    force_answer: bool = False


class JudgeRecipe(Strict):
    """A model behind an OpenAI-compatible endpoint that grades open answers."""

    url: str
    """Of the server, with or without /v1."""
    model: str
    """Its name on that server."""


class WeightedFiles(Strict):
    files: Annotated[tuple[str, ...], Field(min_length=1)]
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share of all rows that are drawn, as a ratio to the other weights."""


class Validation(Strict):
    """Rows that are not trained on; their loss is logged."""

    files: Annotated[tuple[str, ...], Field(min_length=1)]
    rows: Positive = 64
    every: Positive = 100
    """Steps."""


class SampledEpisodes(Strict):
    """Episodes that the model plays while it is trained: format, calls and accuracy are logged as in `paravt rl`."""

    questions: Annotated[QuestionFile | QuestionRows, Field(discriminator="kind")]
    count: Positive = 16
    """Of questions, from the first one on; an episode each."""
    every: Positive = 100
    """Steps."""
    temperature: Annotated[float, Field(ge=0)] = 0.7
    episode: EpisodeRecipe = EpisodeRecipe()


class MessageFiles(Strict):
    """Rows of published SFT data, parquet or JSONL; see `paravt.data.messages`. `data/*.parquet` is fine."""

    kind: Literal["messages"]
    files: tuple[str, ...] = ()
    """Read as one: every row once in a pass."""
    mixture: tuple[WeightedFiles, ...] = ()
    """Instead of `files`: each draw is from one of these, by weight."""
    root: str | None = None
    """Where relative paths of media begin (`longvt_source/...`)."""
    system: str | None = None
    """The system turn of rows that have none."""
    fps: Annotated[float, Field(gt=0)] = 1.0
    max_frames: Positive = 64
    max_pixels: Annotated[int, Field(ge=1024)] = 50_176
    max_tokens: Positive | None = None
    """Longer rows are skipped; unset: what the model can take."""
    workers: Positive = 2
    """Threads that read and decode."""
    prefetch: Positive = 2
    """Batches that are made ahead; they are in memory with all their frames."""
    validation: Validation | None = None
    episodes: SampledEpisodes | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> MessageFiles:
        if bool(self.files) == bool(self.mixture):
            raise ValueError("give `files` or `mixture`, one of the two")
        return self

    @property
    def sources(self) -> tuple[WeightedFiles, ...]:
        return self.mixture or (WeightedFiles(files=self.files),)


def _kind(data: Any) -> Any:
    return data.get("kind", "lab") if isinstance(data, dict) else getattr(data, "kind", None)


StageData = Annotated[
    Annotated[LabMixture, Tag("lab")] | Annotated[MessageFiles, Tag("messages")],
    Discriminator(
        _kind,
        custom_error_type="kind",
        custom_error_message="`kind` must be `messages` (files), or left out (the lab's traces)",
    ),
]


class Stage(Strict):
    """A stretch of training on one mixture, with its own warm-up and cosine decay."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """Of its directory in the run."""
    steps: Positive
    """Updates."""
    batch_size: Positive = 32
    """Traces of an update."""
    learning_rate: Annotated[float, Field(gt=0)]
    """The peak."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Linear, from 0."""
    final_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Of the learning rate at the last step to the peak."""
    data: StageData
    """What the traces are of."""


class SFTRecipe(Strict):
    """Supervised training on traces. The loss is the mean over sampled tokens."""

    model: Annotated[TinyModel | PretrainedModel, Field(discriminator="kind")] = TinyModel()
    """What the first stage starts from."""
    seed: int = 0
    """Of the data and of new weights."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Of AdamW."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Of AdamW."""
    clip_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Bound on the norm of the whole gradient."""
    threads: Positive = 2
    """Of torch, on the CPU."""
    log_every: Positive = 20
    """Steps between two lines of metrics, in stages on the lab's traces; stages on files log every step."""
    lora: LoRA | None = None
    """Train adapters in place of the weights; stages on files only."""
    freeze_vision: bool = False
    """Leave the vision tower as it is; stages on files only."""
    token_budget: Positive = 8_192
    """Most tokens that go through the model at a time; a batch of more is accumulated."""
    activation_checkpointing: bool = False
    checkpoint_every: Positive = 200
    """Steps within a stage. Stages on the lab's traces are short and are repeated instead."""
    keep_checkpoints: Positive = 2
    """The newest ones."""
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _possible(self) -> SFTRecipe:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError("stages need distinct names")
        on_files = any(isinstance(stage.data, MessageFiles) for stage in self.stages)
        if not on_files and (self.lora or self.freeze_vision or self.activation_checkpointing):
            raise ValueError("lora, freeze_vision and activation_checkpointing are for stages on files")
        return self

    def learner_config(self, stage: Stage) -> LearnerConfig:
        """Of a stage on files."""
        return LearnerConfig(
            loss=LossConfig(importance_cap=None),  # there is no sampler to be corrected for
            optimizer=OptimizerConfig(
                learning_rate=stage.learning_rate,
                schedule="cosine",
                warmup_steps=stage.warmup_steps,
                total_steps=stage.steps,
                final_lr_ratio=stage.final_lr_ratio,
                betas=self.betas,
                weight_decay=self.weight_decay,
                clip_grad_norm=self.clip_grad_norm,
            ),
            token_budget=self.token_budget,
            activation_checkpointing=self.activation_checkpointing,
            lora=self.lora,
        )


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
    """The same numbers in every run (one process, local engine): batches do not depend on timing."""
    threads: Positive | None = None
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
