"""The kinds of heads that can be trained, by a recipe's ``strategy``: objective, first weights, last touch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

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
        new: makes an untrained head of a target, a ``TrainConfig`` and texts; ``None``: the trainer's own way (DSpark).
        finish: called with head, target and ``TrainConfig`` once the head is trained and written.
    """

    objective: type[DSparkObjective]
    new: Callable[[Any, Any, list[Sequence]], Any] | None = None
    finish: Callable[[Any, Any, Any], None] | None = None


def _exits(target: Any, config: Any, texts: list[Sequence]) -> EarlyExitHead:
    return new_exit_head(target, config.head, texts, config.initial_norm_scale, config.seed)


def _medusa(target: Any, config: Any, texts: list[Sequence]) -> MedusaHead:
    return new_medusa_head(target, config.head, texts, config.seed)


KINDS = {
    "dspark": Kind(DSparkObjective),
    "early_exit": Kind(EarlyExitObjective, _exits),
    "medusa": Kind(MedusaObjective, _medusa, measure_held_out),
}


def objective_of(head: nn.Module) -> type[DSparkObjective]:
    """The class of the objective that trains a head."""
    if isinstance(head, EarlyExitHead):
        return EarlyExitObjective
    return MedusaObjective if isinstance(head, MedusaHead) else DSparkObjective
