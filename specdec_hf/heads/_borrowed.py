"""What a head takes from its target: checks when they are joined; embeddings and lm_head without owning them."""

from __future__ import annotations

import os
import re
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ..packing import is_packed, pack_linears


class BorrowedTarget:
    """Calls into a target's embedding and lm_head modules.

    It is no ``nn.Module`` and holds the target weakly, so the head neither saves, moves, counts nor keeps alive what is
    not its own. Modules are *called*, never read as weights: quantised layers and adapters stay in effect.
    """

    def __init__(self, target: nn.Module) -> None:
        self._target = weakref.ref(target)
        self._rows: tuple[Any, nn.Linear] | None = None

    def is_target(self, target: nn.Module) -> bool:
        """Whether this is the target bound already."""
        return self._target() is target

    def _module(self, getter: str) -> nn.Module:
        target = self._target()
        if target is None:
            raise ValueError("the target that this head was bound to has been deleted; call head.bind(target) again")
        module = getattr(target, getter)()
        if module is None:
            name = type(target).__name__
            raise ValueError(f"{name}.{getter}() is None; use a head with its own embed_tokens and lm_head")
        return module

    def embed(self, ids: torch.Tensor, norm: bool = True) -> torch.Tensor:
        """The target's embeddings [..., Dt] of ids [...], on the target's device and in its dtype.

        ``norm=False`` leaves out a norm that the module applies to the rows (its ``embed_norm``: Muse Glimmer).
        """
        module = self._module("get_input_embeddings")
        weight = getattr(module, "weight", None)
        if not norm and getattr(module, "embed_norm", None) is not None and weight is not None:
            return nn.functional.embedding(ids.to(weight.device), weight)
        return module(ids.to(weight.device) if weight is not None and weight.device.type != "meta" else ids)

    def logits(self, hidden: torch.Tensor, d2t: torch.Tensor | None) -> torch.Tensor:
        """The target's lm_head on hidden states [..., Dt]: all logits, or those of the ids ``i + d2t[i]`` (Vd of them).

        Of a plain weight the rows are gathered once, in the head's dtype and on its device, and kept (not saved); any
        other module (quantised, with an adapter, offloaded) computes all logits, and they are selected from.
        """
        module = self._module("get_output_embeddings")
        weight = getattr(module, "weight", None)
        dtype, device = getattr(self._target(), "dtype", hidden.dtype), hidden.device
        if isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.device.type != "meta":
            dtype, device = weight.dtype, weight.device
            plain = type(weight) is nn.Parameter and not hasattr(module, "_hf_hook")  # accelerate's hooks swap weights
            if d2t is not None and plain and isinstance(module, nn.Linear) and type(module) is nn.Linear:
                return self._gathered(module, weight, d2t, hidden)(hidden)
        logits = module(hidden.to(device, dtype))
        return logits if d2t is None else logits.index_select(-1, _draft_ids(d2t).to(logits.device))

    def _gathered(self, module: nn.Linear, weight: torch.Tensor, d2t: torch.Tensor, like: torch.Tensor) -> nn.Linear:
        parts = [tensor for tensor in (weight, module.bias, d2t) if tensor is not None]
        state = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in parts]
        key = (*state, like.dtype, like.device, is_packed(module))
        if self._rows is None or self._rows[0] != key:
            ids = _draft_ids(d2t).to(weight.device)
            taken = [part.detach().index_select(0, ids).to(like.device, like.dtype) for part in parts[:-1]]
            rows = nn.Linear(taken[0].shape[1], taken[0].shape[0], bias=len(taken) > 1, device="meta")
            for name, part in zip(("weight", "bias"), taken, strict=False):
                setattr(rows, name, nn.Parameter(part, requires_grad=False))
            if is_packed(module):
                pack_linears(rows)
            self._rows = (key, rows)
        return self._rows[1]


def _draft_ids(d2t: torch.Tensor) -> torch.Tensor:
    return d2t + torch.arange(len(d2t), device=d2t.device)


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The decoder's part of a configuration (multimodal targets keep it inside)."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def check_target(config: PretrainedConfig, target: Any) -> None:
    """Compare a head's configuration with a target model.

    Args:
        config: the head's, e.g. a :class:`DSparkConfig`.
        target: the target model, maybe under an adapter or compiled.

    Raises:
        TypeError: no model with a configuration and embeddings.
        ValueError: width, depth, taps or vocabulary do not belong together; the message names value, rule and fix.
    """
    if not hasattr(target, "config") or not hasattr(target, "get_input_embeddings"):
        raise TypeError(f"the target must be a transformers model, got {type(target).__name__}; pass the loaded model")
    text = text_config(target.config)
    name = type(target).__name__
    if getattr(target.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; a head needs a decoder-only target; generate without it.")
    _same(config, "target_hidden_size", text.hidden_size, f"{name}'s hidden size")
    layers = text.num_hidden_layers
    if config.num_target_layers is not None:
        _same(config, "num_target_layers", layers, f"the decoder layers of {name}")
    if max(config.target_layer_ids, default=-1) >= layers - 1:
        raise ValueError(
            f"target_layer_ids={config.target_layer_ids}: {name} has {layers} layers, so taps go up to {layers - 2} "
            "(0-based; the last layer is refused, its state is reported after the final norm). Use its own target."
        )
    _check_vocabulary(config, text, target, name)
    _warn_of_another(config, target.config)


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+\Z")


def hub_name(name: str | None) -> str | None:
    """``name`` if it can be a repository on the Hub and is no directory here, else ``None``."""
    fits = bool(name) and bool(_HUB_NAME.match(name)) and name[0] not in "./" and not os.path.isdir(name)  # type: ignore
    return name if fits else None


def _warn_of_another(config: PretrainedConfig, target: PretrainedConfig) -> None:
    """Warn when both sides name their origin on the Hub and differ; a directory's name says nothing."""
    ours, theirs = hub_name(config.target_name_or_path), hub_name(getattr(target, "_name_or_path", None))
    if ours is None or theirs is None:
        return
    revisions = config.target_revision, getattr(target, "_commit_hash", None)
    if ours.lower() != theirs.lower():
        what = f"for {ours}, and this is {theirs}"
    elif all(revisions) and revisions[0] != revisions[1]:
        what = f"with revision {revisions[0]} of {ours}, and this is {revisions[1]}"
    else:
        return
    warnings.warn(
        f"the head was trained {what}. The text stays right, but fewer drafted tokens may be accepted: look at "
        "mean_accepted_length, and use the recorded target if it is about 1.",
        UserWarning,
        stacklevel=4,
    )


def _same(config: PretrainedConfig, field: str, theirs: int, what: str) -> None:
    if (ours := getattr(config, field)) != theirs:
        raise ValueError(
            f"the head has {field}={ours}, but {what} is {theirs}; they must agree. Use the target that the head was "
            f"trained for, or train a head for this one ({type(config).__name__}.for_target)."
        )


def _check_vocabulary(config: PretrainedConfig, text: PretrainedConfig, target: Any, name: str) -> None:
    size = text.vocab_size
    module = target.get_output_embeddings() if hasattr(target, "get_output_embeddings") else None
    rows = getattr(module, "out_features", None)  # the true width after a resize or padding
    size = rows if isinstance(rows, int) else size
    if size == config.vocab_size:
        return
    padding = size - config.vocab_size
    ids = [(key, getattr(config, key), getattr(text, key, None)) for key in ("bos_token_id", "eos_token_id")]
    differing = [f"{key} {ours} against {theirs}" for key, ours, theirs in ids if not _agree(ours, theirs)]
    if padding < 0 or padding > max(64, config.vocab_size // 50) or differing:
        why = f" ({', '.join(differing)})" if differing else ""
        raise ValueError(
            f"the head has vocab_size={config.vocab_size}, but {name} has {size}{why}; they must be equal, or the "
            "target's may be larger by padding only, with the same token ids. Use the target the head was trained for."
        )


def _agree(ours: int | list[int] | None, theirs: int | list[int] | None) -> bool:
    if ours is None or theirs is None:
        return True
    as_set = [set(ids) if isinstance(ids, (list, tuple)) else {ids} for ids in (ours, theirs)]
    return bool(as_set[0] & as_set[1])
