"""Reading the checkpoints published with Medusa: a small config.json and the heads' tensors in one file.

Layout (github.com/FasterDecoding/Medusa): ``config.json`` with ``medusa_num_heads``, ``medusa_num_layers`` and
``base_model_name_or_path``; tensors ``{head}.{block}.linear.weight``, ``.bias`` and ``{head}.{blocks}.weight``, the
projection, maybe under a prefix ``medusa_head.``.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.utils import cached_file

from ._loading import tensor_shapes

_FILES = ("medusa_lm_head.safetensors", "medusa_head.safetensors", "medusa_lm_head.pt", "medusa_head.pt")
_NAME = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)\Z")


def find_original(source: str, hub: dict[str, Any]) -> str | None:
    """Path of the original layout's file of tensors, safetensors first; ``None`` if there is none.

    Args:
        source: directory or repository id.
        hub: keywords of ``cached_file`` that the user gave.
    """
    for name in _FILES:
        if os.path.isdir(source):
            path = os.path.join(source, hub.get("subfolder") or "", name)
            found = path if os.path.isfile(path) else None
        else:
            found = cached_file(
                source, name, _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False, **hub,
            )  # fmt: skip
        if found:
            return found
    return None


def read_original(source: str, file: str, hub: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Fields of `MedusaConfig` and tensors under this package's names.

    Raises:
        ValueError: a config.json without ``medusa_num_heads``, a damaged file, or tensors of another layout.
    """
    path = os.path.join(os.path.dirname(file), "config.json")
    path = path if os.path.isfile(path) else cached_file(source, "config.json", **hub)
    try:
        with open(path, encoding="utf-8") as stream:
            config = json.load(stream)
        heads, layers = config.get("medusa_num_heads"), config.get("medusa_num_layers", 1)
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}); download the head again") from error
    if not isinstance(heads, int) or not isinstance(layers, int):
        raise ValueError(f"{path} has no medusa_num_heads; it is not the config.json of a Medusa checkpoint")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(file).items():
        match = _NAME.match(name)
        if match is None:
            raise ValueError(f"{file}: {name!r} is not a tensor of Medusa's layout ({{head}}.{{layer}}.linear.weight)")
        head, layer, kind = int(match[1]), int(match[2]), match[3]
        if head < heads:  # published configurations may use fewer heads than were trained
            own = f"lm_heads.{head}.weight" if kind == "weight" else f"blocks.{head}.{layer}.{kind}"
            tensors[own] = tensor
    if "lm_heads.0.weight" not in tensors:
        raise ValueError(f"{file} has no projection 0.{layers}.weight; it is not complete, download it again")
    vocabulary, width = tensors["lm_heads.0.weight"].shape
    base = config.get("base_model_name_or_path")
    fields = {"medusa_num_heads": heads, "medusa_num_layers": layers, "vocab_size": vocabulary, "hidden_size": width,
              "has_lm_head": True, "target_name_or_path": base}  # fmt: skip
    return fields, tensors


def _tensors(file: str) -> dict[str, torch.Tensor]:
    if file.endswith(".safetensors"):
        tensor_shapes([file])  # damage in words
        return load_file(file)
    warnings.warn(
        f"{os.path.basename(file)} is a pickle. It is read with weights_only=True, which runs no code from it; "
        "head.save_pretrained(directory) writes safetensors instead.",
        UserWarning,
        stacklevel=4,
    )
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{file} cannot be read as tensors alone ({type(error).__name__}): it is damaged, or holds other objects "
            "than tensors, which are refused. Download it again."
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise ValueError(f"{file} holds no table of tensors; it is not a Medusa checkpoint")
    return loaded
