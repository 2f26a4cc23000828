"""Muon for the matrices of a head's layers and AdamW for the rest, as one optimizer (so one scheduler, one checkpoint).

Muon: Jordan et al., 2024; the update is the momentum with all singular values near 1, by Newton-Schulz iteration.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def orthogonalised(matrix: torch.Tensor, steps: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``matrix`` with its singular values pushed to about 1, by the quintic Newton-Schulz iteration in ``dtype``."""
    wide = (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T).to(dtype)
    x = wide / (wide.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class MuonAdamW(torch.optim.Optimizer):
    """Muon on the groups with ``muon`` true, AdamW on the others.

    Args:
        head: the head; matrices of ``layers`` and ``fc`` go to Muon; embeddings, Markov matrices and vectors to AdamW.
        muon_lr: step of Muon (of a matrix whose singular values are 1).
        lr: step of AdamW.
        weight_decay: on Muon's matrices.
        iterations: of Newton-Schulz; 3 is enough and 5 is usual.
        every: each matrix takes a Muon step on every so many calls, in turn, with the momentum of all of them. 2 halves
            its cost, a large part of a small head's step on a CPU.
        dtype: of the Newton-Schulz iteration; bfloat16 is as good where the machine computes in it.
    """

    def __init__(
        self,
        head: nn.Module,
        muon_lr: float = 0.05,
        lr: float = 4e-3,
        weight_decay: float = 0.05,
        iterations: int = 3,
        every: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        for name, value in (("muon_lr", muon_lr), ("lr", lr), ("iterations", iterations), ("every", every)):
            if not value > 0:
                raise ValueError(f"{name}={value!r}: it must be positive; raise it")
        self.dtype = dtype  # not in the groups: a checkpoint goes on in another type
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in head.named_parameters():
            if parameter.requires_grad:
                inner = parameter.ndim == 2 and (".layers." in f".{name}" or name.endswith("fc.weight"))
                (matrices if inner else others).append(parameter)
        groups: list[dict[str, Any]] = [
            {"params": matrices, "muon": True, "lr": muon_lr, "weight_decay": weight_decay},
            {"params": others, "muon": False, "lr": lr, "weight_decay": 0.0},
        ]
        super().__init__([group for group in groups if group["params"]], {"iterations": iterations, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    (self._muon if group["muon"] else self._adamw)(parameter, group, index)
        return loss

    def _muon(self, parameter: torch.Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[parameter]
        if not state:
            state["step"], state["momentum"] = 0, torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["step"] += 1
        state["momentum"].lerp_(parameter.grad, 0.05)
        if (state["step"] + index) % group["every"]:
            return
        update = orthogonalised(parameter.grad.lerp(state["momentum"], 0.95), group["iterations"], self.dtype)
        factor = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * factor)

    def _adamw(self, parameter: torch.Tensor, group: dict[str, Any], index: int) -> None:
        state, first, second = self.state[parameter], 0.9, 0.98
        if not state:
            state["step"], state["mean"], state["square"] = 0, torch.zeros_like(parameter), torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["step"] += 1
        state["mean"].lerp_(parameter.grad, 1.0 - first)
        state["square"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1.0 - second)
        scale = (state["square"] / (1.0 - second ** state["step"])).sqrt_().add_(1e-8)
        parameter.addcdiv_(state["mean"], scale, value=-group["lr"] / (1.0 - first ** state["step"]))
