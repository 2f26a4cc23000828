"""The kinds of heads that can be trained, by a recipe's ``strategy``: objective, first weights, last touch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from ..heads.dspark import DSparkDraftModel
from ..heads.early_exit import EarlyExitHead
from ..heads.medusa import MedusaHead
from .early_exit import EarlyExitObjective, new_exit_head
from .medusa import MedusaObjective, measure_held_out, new_medusa_head
from .objective import DSparkObjective
from .store import Sequence


class Kind(NamedTuple):
    """One kind of head.

    Attributes:
        objective: class of its objective.
        model: class of its head.
        new: makes an untrained head of a target, a ``TrainConfig`` and texts; ``None``: the trainer's own way (DSpark).
        finish: called with head, target and ``TrainConfig`` once the head is trained and written.
    """

    objective: type[DSparkObjective]
    model: Any
    new: Callable[[Any, Any, list[Sequence]], Any] | None = None
    finish: Callable[[Any, Any, Any], None] | None = None


def _exits(target: Any, config: Any, texts: list[Sequence]) -> EarlyExitHead:
    return new_exit_head(target, config.head, texts, config.initial_norm_scale, config.seed)


def _medusa(target: Any, config: Any, texts: list[Sequence]) -> MedusaHead:
    return new_medusa_head(target, config.head, texts, config.seed)


KINDS = {
    "dspark": Kind(DSparkObjective, DSparkDraftModel),
    "early_exit": Kind(EarlyExitObjective, EarlyExitHead, _exits),
    "medusa": Kind(MedusaObjective, MedusaHead, _medusa, measure_held_out),
}


def objective_of(head: nn.Module) -> type[DSparkObjective]:
    """The class of the objective that trains a head."""
    if isinstance(head, EarlyExitHead):
        return EarlyExitObjective
    return MedusaObjective if isinstance(head, MedusaHead) else DSparkObjective


def kind_of(source: str, wanted: str | None = None) -> str:
    """The kind of a head that was saved, by its configuration. What names no kind is DSpark's or DeepSpec's.

    Args:
        source: directory or Hub name.
        wanted: the kind that it must be of, if any.

    Raises:
        ValueError: it is of another kind.
        OSError: no configuration there.
    """
    fields = PretrainedConfig.get_config_dict(source)[0]
    found = "medusa" if "medusa_num_heads" in fields else "dspark"
    for name, kind in KINDS.items():
        if fields.get("model_type") == kind.model.config_class.model_type:
            found = name
    if wanted is not None and wanted != found:
        raise ValueError(
            f"strategy={wanted!r}, but init_head={source!r} is a head of the kind {found!r}; leave the strategy out, "
            "or name a head of that kind"
        )
    return found


def load_head(source: str) -> Any:
    """A saved head of any kind in float32, to train on. Raises as :func:`kind_of` and ``from_pretrained`` do."""
    return KINDS[kind_of(source)].model.from_pretrained(source, dtype=torch.float32)
