"""Recipes of supervised training."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from paravt.config.base import Positive, PretrainedModel, Strict, Threads, TinyModel, check_precision
from paravt.config.data import LabMixture, MessageFiles
from paravt.errors import RecipeError
from paravt.learner import LearnerConfig, LoRA
from paravt.loss import LossConfig
from paravt.optim import OptimizerConfig

Beta = Annotated[float, Field(ge=0, lt=1)]


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
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Of AdamW."""
    clip_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Bound on the norm of the whole gradient."""
    threads: Threads = 2
    """Of torch, on the CPU."""
    log_every: Positive = 20
    """Steps between two lines of metrics, in stages on the lab's traces; stages on files log every step."""
    lora: LoRA | None = None
    """Train adapters in place of the weights; stages on files only."""
    freeze_vision: bool = False
    """Leave the vision tower as it is; stages on files only."""
    token_budget: Positive = 8_192
    """Most tokens that go through the model at a time, in each process; a batch of more is accumulated."""
    packing: bool = True
    """Rows of a batch as one sequence; false: rows of similar length are padded. For devices whose attention is slow on
    packed rows (GPUs before Ampere, or weights of 32 bits on a GPU); stages on files only."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass (less memory, more time); stages on files only."""
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
        if "checkpoints" in names:  # a run that was stopped would take that directory for a finished stage
            raise ValueError("no stage can be named `checkpoints`: it is a directory of the run")
        on_files = any(isinstance(stage.data, MessageFiles) for stage in self.stages)
        if not on_files and (self.lora or self.freeze_vision or self.activation_checkpointing):
            raise ValueError("lora, freeze_vision and activation_checkpointing are for stages on files")
        if isinstance(self.model, PretrainedModel) and not all(isinstance(s.data, MessageFiles) for s in self.stages):
            # stages on the lab's traces train all weights, whatever the others do
            try:
                check_precision(self.model.dtype, adapters=False)
            except RecipeError as error:
                raise ValueError(str(error)) from error
        return self

    def optimizer_config(self, stage: Stage) -> OptimizerConfig:
        return OptimizerConfig(
            learning_rate=stage.learning_rate,
            schedule="cosine",
            warmup_steps=stage.warmup_steps,
            total_steps=stage.steps,
            final_lr_ratio=stage.final_lr_ratio,
            betas=self.betas,
            weight_decay=self.weight_decay,
            clip_grad_norm=self.clip_grad_norm,
        )

    def learner_config(self, stage: Stage) -> LearnerConfig:
        """Of a stage on files."""
        return LearnerConfig(
            loss=LossConfig(importance_cap=None),  # there is no sampler to be corrected for
            optimizer=self.optimizer_config(stage),
            token_budget=self.token_budget,
            packing=self.packing,
            activation_checkpointing=self.activation_checkpointing,
            lora=self.lora,
        )
