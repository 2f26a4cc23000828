"""Training a head: a configuration, the module that transformers' ``Trainer`` runs, and one function for all."""

from __future__ import annotations

import difflib
import functools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from .._hf import check_trackers, train_on_one_device
from ..hardware import emulates_bfloat16
from ..heads.dspark import DSparkConfig, DSparkDraftModel
from ..targets import norm_scale
from .features import FeatureCache, target_features
from .kinds import load_head, objective_of
from .losses import LossWeights
from .optim import MuonAdamW
from .placement import place_target, process_state
from .rows import TextDataset, collate, load_texts, split_texts
from .store import Sequence, TokenStore, draft_vocabulary


@dataclass(frozen=True)
class TrainConfig:
    """All that a training run needs but the models; a YAML file has these names.

    Attributes:
        data: directory of a :class:`~specdec_hf.training.store.TokenStore`.
        output: directory for checkpoints; the head itself is written to ``output/head``.
        head: fields of :class:`DSparkConfig` that differ from what is derived from the target.
        init_head: directory or Hub name of a head to go on with (fine-tuning), of any kind, this package's or
            DeepSpec's; ``head`` must be empty then.
        loss: fields of :class:`LossWeights`.
        early_loss: the same for the first ``early_share`` of the steps (cross entropy moves an untrained head faster).
        max_steps, gradient_accumulation, num_anchors: size of the run.
        batch_size: texts of a batch *on each process*. An update sees
            ``batch_size * gradient_accumulation * processes`` texts; runs that agree in this product, the seed and the
            rest make the same updates.
        muon_lr, lr, muon_every: see :class:`MuonAdamW`.
        warmup_steps, cooldown: steps of linear warm-up; the share of the run in which rates fall to zero.
        validation: texts held out.
        save_steps, logging_steps: steps between checkpoints and validations; between logged losses.
        feature_cache: directory; ``None`` computes the target's hidden states in each step.
        max_length: longer texts are cut.
        packing: put a batch's short texts one behind another into rows as long as its longest; the same updates from
            less padding.
        chunk: slots whose logits are alive at a time, ``None`` for all.
        sample_slots: draw slots in proportion to their weight, see :meth:`DSparkObjective.supervise`.
        initial_norm_scale: the head's final norm begins as the target's times this. An untrained head with the target's
            full scale is very sure and always wrong.
        seed: of weights, order and anchors.
        bf16: train in bfloat16 autocast; losses and the head's own numbers stay float32. ``"auto"``: where the
            accelerator or processor computes in bfloat16.
        use_cpu: stay on the CPU where there is an accelerator.
        shard_target: split the target's layers over the processes (FSDP), for targets too large for one device.
        report_to: trackers, as transformers names them: ``[tensorboard]``, ``[wandb]``, ...
        push_to_hub: repository ``org/name`` to upload the finished head to, with its card.
    """

    data: str
    output: str
    head: dict[str, Any] = field(default_factory=dict)
    init_head: str | None = None
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
    logging_steps: int = 10
    feature_cache: str | None = None
    max_length: int = 4096
    packing: bool = False
    chunk: int | None = 256
    sample_slots: bool = False
    initial_norm_scale: float = 0.15
    seed: int = 0
    bf16: bool | str = False
    use_cpu: bool = False
    shard_target: bool = False
    report_to: list[str] = field(default_factory=list)
    push_to_hub: str | None = None

    def __post_init__(self) -> None:
        sizes = ("max_steps", "batch_size", "gradient_accumulation", "num_anchors", "save_steps", "logging_steps")
        for name in (*sizes, "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: it must be at least 1; raise it")
        for name in ("early_share", "cooldown"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: it is a share of the run, 0 to 1; correct it")
        if not isinstance(self.bf16, bool) and self.bf16 != "auto":
            raise ValueError(f'bf16={self.bf16!r}: it is true, false or "auto"; correct it')
        if self.init_head is not None and self.head:
            raise ValueError(
                f"head={self.head!r} beside init_head={self.init_head!r}: a given head keeps its shape; leave one out"
            )
        self.weights_at(0)
        self.weights_at(self.max_steps)

    def for_device(self, device: torch.device) -> TrainConfig:
        """With ``bf16`` decided where it is ``"auto"``."""
        if self.bf16 != "auto":
            return self
        fast = device.type == "cpu" and not emulates_bfloat16()
        return replace(self, bf16=fast or (device.type == "cuda" and torch.cuda.is_bf16_supported()))

    def weights_at(self, step: int) -> LossWeights:
        """Loss weights of the update after ``step`` others."""
        early = step < self.early_share * self.max_steps
        return LossWeights(**{**self.loss, **self.early_loss} if early else self.loss)

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


class TrainingModule(nn.Module):
    """What ``Trainer`` calls: a batch in, ``{"loss": ...}`` out. The target is held, but is not part of it."""

    def __init__(self, head: DSparkDraftModel, target: nn.Module, config: TrainConfig) -> None:
        super().__init__()
        self.objective = objective_of(head)(head, target, config.weights_at(0), config.num_anchors, config.chunk)
        self._target: tuple[Any] = (target,)

    @property
    def head(self) -> DSparkDraftModel:
        """The head that is trained."""
        return self.objective.head

    def forward(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        segments: torch.Tensor,
        anchors: torch.Tensor,
        dice: torch.Tensor | None = None,
        taps: torch.Tensor | None = None,
        last_hidden: torch.Tensor | None = None,
        target_log_mass: torch.Tensor | None = None,
        normaliser: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Losses of a batch of :func:`~specdec_hf.training.rows.collate`.

        ``taps`` and ``last_hidden`` are computed here where they are not given; for ``normaliser`` see
        :class:`DSparkObjective`.
        """
        if taps is None or last_hidden is None:
            taps, last_hidden = target_features(self._target[0], self.head.config.target_layer_ids, input_ids, segments)
        weight = next(self.head.parameters())
        device, dtype = weight.device, weight.dtype
        losses = self.objective(
            input_ids.to(device), loss_mask.to(device), taps.to(device, dtype), last_hidden.to(device, dtype),
            None if target_log_mass is None else target_log_mass.to(device), _known(anchors.to(device)),
            segments.to(device), None if dice is None else dice.to(device), normaliser,
        )  # fmt: skip
        return {
            "loss": losses.total,
            "ce": losses.ce,
            "tv": losses.tv,
            "confidence": losses.confidence,
            "acceptance": losses.acceptance,
        }

    @torch.no_grad()
    def weight(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum of the slot weights of a batch, a scalar: its share in the normaliser of an update."""
        known = _known(batch["anchors"])
        return self.objective.supervise(
            batch["input_ids"], batch["loss_mask"], *known, batch["segments"], batch.get("dice")
        )[1].sum()


def _known(anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return anchors.clamp(min=0), anchors >= 0


class HeadTrainer(Trainer):
    """``Trainer`` for a :class:`TrainingModule`: two-part optimizer, its schedule, and heads in the checkpoints.

    The loss of an update is a mean over its supervised slots on all processes and in all accumulated batches, so it
    does not matter how the texts are spread over them.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self, module: TrainingModule, config: TrainConfig, train: TextDataset, validation: TextDataset
    ) -> None:
        self.config, self.module, self.texts = config, module, len(train.indices)
        arguments = TrainingArguments(
            output_dir=config.output, max_steps=config.max_steps, per_device_train_batch_size=config.batch_size,
            per_device_eval_batch_size=config.batch_size, gradient_accumulation_steps=config.gradient_accumulation,
            save_steps=config.save_steps, eval_strategy="steps" if len(validation) else "no",
            eval_steps=config.save_steps, logging_steps=config.logging_steps, seed=config.seed, bf16=bool(config.bf16),
            max_grad_norm=1.0, remove_unused_columns=False, report_to=config.report_to, save_total_limit=2,
            label_names=["loss_mask"], dataloader_pin_memory=False, disable_tqdm=True, logging_nan_inf_filter=False,
            ddp_find_unused_parameters=False, use_cpu=next(module.parameters()).device.type == "cpu",
        )  # fmt: skip
        train_on_one_device(arguments)
        super().__init__(
            model=module, args=arguments, train_dataset=train, eval_dataset=validation,
            data_collator=functools.partial(collate, packing=config.packing), callbacks=[_HeadInCheckpoint(module)],
        )  # fmt: skip

    def get_train_dataloader(self) -> Any:
        """Texts in the order of the data set, which shuffles them itself, epoch by epoch."""
        loader = torch.utils.data.DataLoader(
            self.train_dataset, batch_size=self.config.batch_size, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of the next update, and the sum of their slot weights over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.module.objective.weights = self.config.weights_at(self.state.global_step)
        total = torch.stack([self.module.weight(batch) for batch in batches]).sum()
        return batches, self.accelerator.reduce(total.to(device), "sum").clamp(min=1e-9)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: torch.Tensor | None = None
    ) -> Any:
        """This batch's part of the update's loss, times the processes, over which the gradients are averaged."""
        outputs = model(**inputs, normaliser=num_items_in_batch)
        loss = outputs["loss"] * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any) -> None:
        """As in ``Trainer``; the epoch is counted in texts, since to ``Trainer`` the run is a single one."""
        config = self.config
        update = config.batch_size * config.gradient_accumulation * self.accelerator.num_processes
        self.state.epoch = self.state.global_step * update / self.texts
        super().log(logs, *args)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Muon and AdamW, see :class:`MuonAdamW`."""
        optimizer: Any = getattr(self, "optimizer", None)
        if optimizer is None:
            head = self.accelerator.unwrap_model(self.model).head
            dtype = torch.bfloat16 if self.config.bf16 else torch.float32
            optimizer = MuonAdamW(head, self.config.muon_lr, self.config.lr, every=self.config.muon_every, dtype=dtype)
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


class _HeadInCheckpoint(TrainerCallback):
    """Writes the head beside the checkpoint, last and whole: a checkpoint without it was interrupted."""

    def __init__(self, module: TrainingModule) -> None:
        self.module = module

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self.module.head.save_pretrained(folder / "head.tmp")
            shutil.rmtree(folder / "head", ignore_errors=True)  # of an earlier run
            (folder / "head.tmp").rename(folder / "head")


def last_checkpoint(output: str | Path) -> Path | None:
    """The newest checkpoint of a run that was written whole, or ``None``."""
    whole = [folder.parent for folder in Path(output).glob("checkpoint-*/head")]
    return max(whole, key=lambda folder: int(folder.name.split("-")[1]), default=None)


def new_head(target: Any, config: TrainConfig, sequences: list[Sequence]) -> tuple[DSparkDraftModel, float]:
    """An untrained head for a target, and the share of the answers' tokens that its vocabulary covers.

    Its final norm begins as a fraction of the target's and its mask vector as the mean embedding, so that the first
    logits are moderate. Works on the target's own modules only, so any family does.
    """
    # The same weights whatever was drawn before, on every process.
    torch.manual_seed(config.seed)
    head_config = DSparkConfig.for_target(target.config, **{"num_anchors": config.num_anchors, **config.head})
    head = DSparkDraftModel(head_config)
    coverage = 1.0
    if head_config.has_reduced_vocab:
        ids, coverage = draft_vocabulary(sequences, head_config.draft_vocab_size, head_config.vocab_size)
        head.set_draft_vocabulary(ids)
    with torch.no_grad():
        scale = norm_scale(getattr(target.get_decoder(), "norm", None))
        if scale is not None and scale.shape == head.norm.weight.shape:
            head.norm.weight.copy_(scale * config.initial_norm_scale)
        embeddings = getattr(target.get_input_embeddings(), "weight", None)
        if (
            head.mask_embedding is not None
            and embeddings is not None
            and embeddings.shape[-1] == head.norm.weight.shape[0]
        ):
            head.mask_embedding.copy_(embeddings.float().mean(0))
    return head, coverage


def freeze_copies(head: DSparkDraftModel, target: Any) -> None:
    """Freeze embeddings and lm_head that a head has of its own where they are the target's, as DeepSpec's are."""
    ids = head.draft_token_ids() if head.config.has_reduced_vocab else slice(0, head.config.vocab_size)
    own: Any
    pairs = [(getattr(head, "embed_tokens", None), target.get_input_embeddings(), slice(0, head.config.vocab_size)),
             (getattr(head, "lm_head", None), target.get_output_embeddings(), ids)]  # fmt: skip
    for own, module, rows in pairs:
        theirs = getattr(module, "weight", None)
        if own is None or not isinstance(theirs, torch.Tensor) or theirs.shape[-1] != own.weight.shape[-1]:
            continue
        copy = theirs.detach()[rows].to(own.weight)
        if copy.shape == own.weight.shape and torch.allclose(copy, own.weight, rtol=1e-2, atol=1e-3):
            own.weight.requires_grad_(False)


def check_mask_token(head: Any, texts: list[Sequence]) -> None:
    """Refuse texts that hold the head's mask token: a block could not tell it from a slot that is to be filled.

    Raises:
        ValueError: a text has it.
    """
    mask = getattr(head.config, "mask_token_id", None)
    count = 0 if mask is None else sum(int((item.ids == mask).sum()) for item in texts)
    if count:
        raise ValueError(
            f"mask_token_id={mask}: the texts have this token {count} times, so it cannot mean an empty slot; choose "
            "an id that the target never writes, or leave mask_token_id out for a trained vector of the head's own"
        )


def train(
    target: Any,
    config: TrainConfig,
    head: DSparkDraftModel | None = None,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[DSparkDraftModel, dict[str, float]]:
    """Train a head on a store's texts and write it to ``output/head``.

    Under ``accelerate launch`` every process calls this with the same arguments.

    Args:
        target: the frozen target. Moved to the process's accelerator, unless ``use_cpu`` or a device map speaks
            against it.
        config: the run.
        head: an existing head to go on with (fine-tuning); ``None`` loads ``init_head`` or makes a new one.
        resume: go on from the last whole checkpoint in ``output``, if there is one.
        say: called with a line now and then.

    Returns:
        The head, and figures: texts, answer tokens, vocabulary coverage, last losses.

    Raises:
        ValueError: no texts, texts of another vocabulary or with the head's mask token, or a head for another target.
        OSError: the feature cache does not fit on the disk.
    """
    check_trackers(config.report_to)
    state = process_state(config.use_cpu)
    config = config.for_device(state.device)
    texts = load_texts(config.data, config.max_length, target.config.get_text_config().vocab_size)
    learned, held_out = split_texts(texts, config.validation, config.seed)
    coverage = math.nan
    if head is None and config.init_head is not None:
        head = load_head(config.init_head)
    elif head is None:
        head, coverage = new_head(target, config, [texts[index] for index in learned])
    check_mask_token(head, texts)
    place_target(target.eval(), state.device, config.shard_target)
    head.bind(target).to(target.device, torch.float32).train()
    freeze_copies(head, target)
    cache = None
    if config.feature_cache is not None:
        mass_of = head.config.vocab_size if head.config.has_reduced_vocab else None
        cache = FeatureCache(
            config.feature_cache, texts, head.config.target_layer_ids, target, mass_of, bool(config.bf16)
        )
        cache.fill(say, state.process_index, state.num_processes)
        state.wait_for_everyone()
    items = config.max_steps * config.batch_size * config.gradient_accumulation * state.num_processes
    common = (config.num_anchors, config.seed, cache)
    module = TrainingModule(head, target, config)
    dice = module.objective.block_slots if config.sample_slots else None
    trainer = HeadTrainer(
        module, config,
        TextDataset(texts, learned, *common, items, dice), TextDataset(texts, held_out, *common),
    )  # fmt: skip
    checkpoint = last_checkpoint(config.output) if resume else None
    result = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    figures = {"texts": len(texts), "answer_tokens": sum(int(item.mask.sum()) for item in texts),
               "coverage": coverage, "train_loss": result.training_loss}  # fmt: skip
    if held_out:
        figures["validation_loss"] = trainer.evaluate()["eval_loss"]
    head.eval()
    if trainer.is_world_process_zero():
        head.save_pretrained(Path(config.output) / "head")
        about = TokenStore(config.data).provenance or {}
        record = {"data": about, "figures": figures, "config": asdict(config)}
        text = json.dumps(record, indent=1, default=str) + "\n"
        (Path(config.output) / "head" / "training.json").write_text(text, encoding="utf-8")
        if config.push_to_hub is not None:
            say(f"uploading to {config.push_to_hub}")
            head.push_to_hub(config.push_to_hub, training=record)
    state.wait_for_everyone()
    return head, figures
