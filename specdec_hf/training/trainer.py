"""Training a head: a configuration, the module that transformers' ``Trainer`` runs, and one function for all."""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..heads.dspark import DSparkConfig, DSparkDraftModel
from .features import FeatureCache, target_features
from .losses import LossWeights
from .medusa import objective_of
from .optim import MuonAdamW
from .store import Sequence, TokenStore, draft_vocabulary


@dataclass(frozen=True)
class TrainConfig:
    """All that a training run needs but the models; a YAML file has these names.

    Attributes:
        data: directory of a :class:`~specdec_hf.training.store.TokenStore`.
        output: directory for checkpoints; the head itself is written to ``output/head``.
        head: fields of :class:`DSparkConfig` that differ from what is derived from the target.
        loss: fields of :class:`LossWeights`.
        early_loss: the same for the first ``early_share`` of the steps (cross entropy moves an untrained head faster).
        max_steps, batch_size, gradient_accumulation, num_anchors: size of the run.
        muon_lr, lr, muon_every: see :class:`MuonAdamW`.
        warmup_steps, cooldown: steps of linear warm-up; the share of the run in which rates fall to zero.
        validation: texts held out.
        save_steps: steps between checkpoints and validations.
        feature_cache: directory; ``None`` computes the target's hidden states in each step.
        max_length: longer texts are cut.
        chunk: slots whose logits are alive at a time, ``None`` for all (faster, more memory).
        sample_slots: see :class:`DSparkObjective`.
        initial_norm_scale: the head's final norm begins as the target's times this. An untrained head with the target's
            full scale is very sure and always wrong.
        seed: of weights, order and anchors.
        bf16: train in bfloat16 autocast (accelerators).
    """

    data: str
    output: str
    head: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)
    early_loss: dict[str, float] = field(default_factory=lambda: {"ce": 1.0, "tv": 0.5})
    early_share: float = 0.0
    max_steps: int = 1000
    batch_size: int = 4
    gradient_accumulation: int = 1
    num_anchors: int = 48
    muon_lr: float = 0.05
    lr: float = 4e-3
    muon_every: int = 1
    warmup_steps: int = 20
    cooldown: float = 0.6
    validation: int = 32
    save_steps: int = 200
    feature_cache: str | None = None
    max_length: int = 4096
    chunk: int | None = 1024
    sample_slots: bool = False
    initial_norm_scale: float = 0.15
    seed: int = 0
    bf16: bool = False

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "gradient_accumulation", "num_anchors", "save_steps", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: it must be at least 1; raise it")
        for name in ("early_share", "cooldown"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: it is a share of the run, 0 to 1; correct it")
        LossWeights(**self.loss)
        LossWeights(**self.early_loss)

    @classmethod
    def from_yaml(cls, path: str | Path, **overrides: Any) -> TrainConfig:
        """Read a file of ``configs/``; its section ``train`` holds these fields.

        Raises:
            ValueError: not YAML, or an unknown name (the nearest one is given).
        """
        import yaml

        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path} cannot be read as YAML: {error}") from error
        values = {**(content.get("train", content) if isinstance(content, dict) else {}), **overrides}
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}"
                raise ValueError(f"{path}: {name!r} is not a field of the section train; {hint}")
        if missing := [name for name in ("data", "output") if name not in values]:
            raise ValueError(
                f"{path}: {' and '.join(missing)} not given; name the directories of the texts and of the head"
            )
        return cls(**values)


class TextDataset(torch.utils.data.Dataset):
    """Texts as dicts of tensors, with their features where a cache is given."""

    def __init__(
        self, sequences: list[Sequence], max_length: int, cache: FeatureCache | None, indices: list[int]
    ) -> None:
        self.sequences, self.max_length, self.cache, self.indices = sequences, max_length, cache, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        index = self.indices[item]
        sequence = self.sequences[index]
        row = {"input_ids": sequence.ids, "loss_mask": sequence.mask}
        if self.cache is not None:
            row.update(self.cache.read(index))
        return {name: value[: self.max_length] for name, value in row.items()}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows padded at the right with zeros; ``real`` [B, T] marks what is not padding."""
    batch = {name: nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True) for name in rows[0]}
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch["real"] = torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]
    return batch


class TrainingModule(nn.Module):
    """What ``Trainer`` calls: a batch in, ``{"loss": ...}`` out. The target is held, but is not part of it."""

    def __init__(self, head: DSparkDraftModel, target: nn.Module, config: TrainConfig) -> None:
        super().__init__()
        self.objective = objective_of(head)(
            head, target, LossWeights(**config.loss), config.num_anchors, config.chunk, config.sample_slots
        )
        self._target: tuple[Any] = (target,)

    @property
    def head(self) -> DSparkDraftModel:
        """The head that is trained."""
        return self.objective.head

    def forward(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        real: torch.Tensor,
        taps: torch.Tensor | None = None,
        last_hidden: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Losses of a batch [B, T]; ``taps`` and ``last_hidden`` are computed here where they are not given."""
        if taps is None or last_hidden is None:
            taps, last_hidden = target_features(self._target[0], self.head.config.target_layer_ids, input_ids, real)
        weight = next(self.head.parameters())
        device, dtype = weight.device, weight.dtype
        losses = self.objective(
            input_ids.to(device), loss_mask.to(device), taps.to(device, dtype), last_hidden.to(device, dtype)
        )
        return {
            "loss": losses.total,
            "ce": losses.ce,
            "tv": losses.tv,
            "confidence": losses.confidence,
            "acceptance": losses.acceptance,
        }


class HeadTrainer(Trainer):
    """``Trainer`` for a :class:`TrainingModule`: two-part optimizer, its schedule, and heads in the checkpoints."""

    def __init__(
        self, module: TrainingModule, config: TrainConfig, train: TextDataset, validation: TextDataset
    ) -> None:
        self.config = config
        arguments = TrainingArguments(
            output_dir=config.output, max_steps=config.max_steps, per_device_train_batch_size=config.batch_size,
            per_device_eval_batch_size=config.batch_size, gradient_accumulation_steps=config.gradient_accumulation,
            save_steps=config.save_steps, eval_strategy="steps" if len(validation) else "no",
            eval_steps=config.save_steps, logging_steps=10, seed=config.seed, bf16=config.bf16, max_grad_norm=1.0,
            remove_unused_columns=False, report_to=[], save_total_limit=2, label_names=["loss_mask"],
            dataloader_pin_memory=False, disable_tqdm=True, use_cpu=next(module.parameters()).device.type == "cpu",
        )  # fmt: skip
        super().__init__(
            model=module, args=arguments, train_dataset=train, eval_dataset=validation, data_collator=collate,
            callbacks=[_LossSchedule(module, config)],
        )  # fmt: skip

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Muon and AdamW, see :class:`MuonAdamW`."""
        optimizer: Any = getattr(self, "optimizer", None)
        if optimizer is None:
            head = self.accelerator.unwrap_model(self.model).head
            optimizer = MuonAdamW(head, self.config.muon_lr, self.config.lr, every=self.config.muon_every)
            self.optimizer = optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Linear warm-up, constant, then linear to zero."""
        scheduler: Any = getattr(self, "lr_scheduler", None)
        if scheduler is None:
            config = self.config
            scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer,
                lambda step: learning_rate_factor(step, num_training_steps, config.warmup_steps, config.cooldown),
            )
            self.lr_scheduler = scheduler
        return scheduler

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """The validation loss alone: logits of a batch would be large and nobody reads them."""
        with torch.no_grad():
            return model(**self._prepare_inputs(inputs))["loss"].detach(), None, None


def learning_rate_factor(step: int, total: int, warmup: int, cooldown: float) -> float:
    """Factor on the rates at a step: up to 1 in ``warmup`` steps, down to 0 over the last ``cooldown`` of the run."""
    falling = (total - step) / max(cooldown * total, 1.0)
    return max(0.0, min(1.0, (step + 1) / max(warmup, 1), falling))


class _LossSchedule(TrainerCallback):
    """Loss weights of the early steps and of the others, by the global step, so that a resumed run has the same."""

    def __init__(self, module: TrainingModule, config: TrainConfig) -> None:
        self.module, self.config = module, config

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        early = state.global_step < self.config.early_share * state.max_steps
        chosen = {**self.config.loss, **self.config.early_loss} if early else self.config.loss
        self.module.objective.weights = LossWeights(**chosen)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.module.head.save_pretrained(Path(args.output_dir) / f"checkpoint-{state.global_step}" / "head")


def new_head(target: Any, config: TrainConfig, sequences: list[Sequence]) -> tuple[DSparkDraftModel, float]:
    """An untrained head for a target, and the share of the answers' tokens that its vocabulary covers.

    Its final norm begins as a fraction of the target's and its mask vector as the mean embedding, so that the first
    logits are moderate. Works on the target's own modules only, so any family does.
    """
    torch.manual_seed(config.seed)
    head_config = DSparkConfig.for_target(target.config, **{"num_anchors": config.num_anchors, **config.head})
    head = DSparkDraftModel(head_config)
    coverage = 1.0
    if head_config.has_reduced_vocab:
        ids, coverage = draft_vocabulary(sequences, head_config.draft_vocab_size, head_config.vocab_size)
        head.set_draft_vocabulary(ids)
    with torch.no_grad():
        norm = getattr(target.get_decoder(), "norm", None)
        weight = getattr(norm, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.shape == head.norm.weight.shape:
            head.norm.weight.copy_(weight * config.initial_norm_scale)
        embeddings = getattr(target.get_input_embeddings(), "weight", None)
        if (
            head.mask_embedding is not None
            and embeddings is not None
            and embeddings.shape[-1] == head.norm.weight.shape[0]
        ):
            head.mask_embedding.copy_(embeddings.float().mean(0))
    return head, coverage


def train(
    target: Any, config: TrainConfig, head: DSparkDraftModel | None = None, resume: bool = False
) -> tuple[DSparkDraftModel, dict[str, float]]:
    """Train a head on a store's texts and write it to ``output/head``.

    Args:
        target: the frozen target.
        config: the run.
        head: an existing head to go on with (fine-tuning); ``None`` makes a new one.
        resume: go on from the last checkpoint in ``output``.

    Returns:
        The head, and figures: texts, answer tokens, vocabulary coverage, last losses.

    Raises:
        ValueError: no texts, or texts of another vocabulary.
    """
    sequences = [item for item in TokenStore(config.data).load() if int(item.mask[: config.max_length].sum()) > 1]
    highest = max((int(item.ids.max()) for item in sequences), default=-1)
    if highest < 0 or highest >= target.config.get_text_config().vocab_size:
        raise ValueError(
            f"{config.data} has {len(sequences)} texts of two or more answer tokens and ids up to {highest}, but the "
            f"target's vocabulary has {target.config.get_text_config().vocab_size}; write the texts with this target"
        )
    held_out = min(config.validation, len(sequences) // 5)
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(config.seed)).tolist()
    coverage = math.nan
    if head is None:
        head, coverage = new_head(target, config, [sequences[index] for index in order[held_out:]])
    cache = None
    if config.feature_cache is not None:
        cache = FeatureCache(config.feature_cache, sequences, head.config.target_layer_ids, target)
        cache.fill()
    module = TrainingModule(head.to(target.device).train(), target.eval(), config)
    pieces = [TextDataset(sequences, config.max_length, cache, part) for part in (order[held_out:], order[:held_out])]
    trainer = HeadTrainer(module, config, *pieces)
    result = trainer.train(resume_from_checkpoint=resume or None)
    head.eval().save_pretrained(Path(config.output) / "head")
    figures = {"texts": len(sequences), "answer_tokens": sum(int(item.mask.sum()) for item in sequences),
               "coverage": coverage, "train_loss": result.training_loss}  # fmt: skip
    if held_out:
        figures["validation_loss"] = trainer.evaluate()["eval_loss"]
    (Path(config.output) / "head" / "training.json").write_text(_json({"figures": figures, "config": asdict(config)}))
    return head, figures


def _json(value: Any) -> str:
    import json

    return json.dumps(value, indent=1, default=str) + "\n"
