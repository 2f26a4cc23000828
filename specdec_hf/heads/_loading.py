"""Reading a head's files: safetensors only, whole, and with exactly the tensors that its configuration describes.

A head with a missing or foreign tensor drafts nonsense without any error, so everything is compared before loading.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import cached_file

logger = logging.getLogger(__name__)

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_CONVERT = "convert it to safetensors where you trust it (load_state_dict there, then save_pretrained)"
HUB_KEYWORDS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")


def weight_files(source: str, variant: str | None, hub: dict[str, Any]) -> list[str]:
    """Local paths of a head's safetensors files, downloaded first if ``source`` is a Hub repository.

    Args:
        source: directory or repository id.
        variant: as in ``from_pretrained``: ``model.<variant>.safetensors``.
        hub: the keywords of ``HUB_KEYWORDS`` that the user gave.

    Raises:
        ValueError: only pickle files are there.
        OSError: no weights at all, or the repository cannot be reached.
    """
    suffix = f".{variant}" if variant else ""
    single, index = f"model{suffix}.safetensors", f"model.safetensors.index{suffix}.json"
    folder = os.path.join(source, hub.get("subfolder") or "")
    if os.path.isfile(source):
        raise ValueError(f"{source} is a file; give the head's directory, which holds config.json and {single}")
    for name in (single, index):
        if os.path.isdir(source):
            path = os.path.join(folder, name)
            found = path if os.path.isfile(path) else None
        else:
            found = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub)
        if found:
            return [found] if name == single else _shards(found, source, hub)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise ValueError(f"{source} has only {pickles[0]}, a pickle file, which can run code when read; {_CONVERT}")
    raise OSError(f"{source} has no {single} (nor {index}); only safetensors files are read, never pickles")


def _shards(index: str, source: str, hub: dict[str, Any]) -> list[str]:
    try:
        with open(index, encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} is not a safetensors index ({error}); download it again") from error
    for name in names:
        if (
            not isinstance(name, str)
            or "\0" in name
            or os.path.basename(name) != name
            or not name.endswith(".safetensors")
        ):
            raise ValueError(f"{index} names the shard {name!r}; shards must be safetensors files beside it")
    if os.path.isdir(source):
        return [os.path.join(os.path.dirname(index), name) for name in names]
    return [cached_file(source, name, **hub) for name in names]


def check_digests(files: list[str]) -> None:
    """Compare files of the Hub's cache with their SHA-256, which is the name that the cache keeps them by.

    The client compares sizes only. Files elsewhere have no digest to compare with.

    Raises:
        ValueError: a file is damaged.
    """
    for path in files:
        digest = os.path.basename(os.path.realpath(path))
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            continue
        found = hashlib.sha256()
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                found.update(piece)
        if found.hexdigest() != digest:
            raise ValueError(f"{path} is damaged: its SHA-256 is not the Hub's. Delete it and download it again.")


def tensor_shapes(files: list[str]) -> dict[str, tuple[int, ...]]:
    """Name to shape of all tensors in safetensors files; reads the headers only.

    Raises:
        ValueError: a file is truncated, is not safetensors, or is absent; the message names it.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}. {_advice(path)}") from error
    return shapes


def _advice(path: str) -> str:
    try:
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError:
        return "The file is absent or not readable; download it again."
    if start.startswith(b"version "):
        return "It is a Git LFS pointer: run `git lfs pull`."
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"\x80\x05")):
        return f"It is a pickle under another name, and is not read; {_CONVERT}."
    return "It is probably truncated: compare its size with the source's and download it again."


def compare_tensors(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], source: str) -> None:
    """Refuse files whose tensors are not exactly the ones that the configuration describes.

    Raises:
        ValueError: names missing, unexpected and wrongly shaped tensors, and what to do.
    """
    missing = sorted(set(expected) - set(found))
    extra = sorted(set(found) - set(expected))
    wrong = sorted(name for name in set(expected) & set(found) if expected[name] != found[name])
    problems = []
    if missing:
        problems.append(f"missing: {_some(missing)}")
    if extra:
        problems.append(f"unexpected: {_some(extra)}")
    if wrong:
        shapes = [f"{name} is {list(found[name])}, config.json says {list(expected[name])}" for name in wrong]
        problems.append(f"wrong shape: {_some(shapes)}")
    if not problems:
        return
    hint = "config.json is not of these weights (check qk_norm, markov_head_type, sizes), or the file is incomplete"
    if extra and len(extra) == len(found) and len({name.split(".")[0] for name in extra}) == 1:
        hint = f"the names have the prefix {extra[0].split('.')[0]!r}: save them without it"
    raise ValueError(f"{source}: the tensors are not those of the head in config.json; {'; '.join(problems)}. {hint}.")


def _some(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def check_values(model: nn.Module, source: str) -> None:
    """Refuse NaN and infinity among the weights, and warn of matrices whose values are all the same.

    Raises:
        ValueError: names the tensors.
    """
    broken, constant = [], []
    for name, parameter in model.named_parameters():
        data = parameter.detach()
        if data.device.type == "meta" or not data.numel() or not data.is_floating_point():
            continue
        # The sum is one cheap pass that NaN and infinity spoil; only then are all values looked at.
        if not bool(data.sum(dtype=torch.float32).isfinite()) and not bool(data.isfinite().all()):
            broken.append(name)
        elif data.dim() > 1 and data.numel() > 1 and _is_constant(data):
            constant.append(name)
    if broken:
        raise ValueError(f"{source}: {_some(broken)} hold NaN or infinity; download or train the head again")
    if constant:
        logger.warning(
            "%s: all values of %s are the same. The file is incomplete or the head untrained; it will hardly draft an "
            "accepted token. Compare it with its source.",
            source,
            _some(constant),
        )


def _is_constant(data: torch.Tensor) -> bool:
    first = data.view(-1)[0]
    return bool((data.view(-1)[:64] == first).all()) and bool((data == first).all())
