"""Where training runs: which process this is, and where the frozen target lives, here or spread over all processes."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..targets import decoder_layers


def process_state(use_cpu: bool) -> Any:
    """accelerate's ``PartialState``: this process's number, how many there are, and its device.

    Raises:
        ValueError: a launcher started several processes, and accelerate takes each for the only one.
        ImportError: accelerate is not installed.
    """
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ImportError("training needs accelerate; pip install 'specdec_hf[train]'") from error
    state = PartialState(cpu=use_cpu)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != state.num_processes:
        raise ValueError(
            f"{started} processes were started, but accelerate found no accelerator and takes each for the only one; "
            "set use_cpu: true to train on several processes without accelerators"
        )
    return state


def place_target(target: Any, device: torch.device, shard: bool) -> None:
    """Move a target to a device; with ``shard``, each process keeps a share of every decoder layer (FSDP).

    A sharded layer is gathered for its forward and dropped again, so a device needs room for the shares, one layer, and
    the embeddings and lm_head, which stay whole because the head uses them too.

    Args:
        target: the target; one with a device map or quantised weights stays where it is.
        device: of this process.
        shard: whether to spread the layers.

    Raises:
        ValueError: ``shard`` in a run of one process, or for a target with a device map.
    """
    fixed = getattr(target, "hf_device_map", None) is not None or getattr(target, "is_quantized", False)
    if not shard:
        if not fixed and target.device != device:
            target.to(device)
        return
    if fixed or not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        raise ValueError(
            "shard_target=True: it spreads a plain target over the processes of accelerate launch; start several, load "
            "the target without a device map or quantisation, or leave shard_target out"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    target.requires_grad_(False)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in decoder_layers(target):
        fully_shard(layer, mesh=mesh)
    for name, parameter in [*target.named_parameters(), *target.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        if not hasattr(parameter, "placements"):
            module = target.get_submodule(owner)
            moved = parameter.to(device)
            if isinstance(parameter, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, requires_grad=False)
            setattr(module, leaf, moved)
