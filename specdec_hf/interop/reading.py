"""A head of any known layout as this package's configuration and tensors, bit for bit; compared before believed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open

from ..heads._config_sources import words_for_damage
from ..heads._loading import check_digests, compare_tensors, tensor_shapes, weight_files
from ..heads.dspark import DSparkConfig, DSparkDraftModel
from .formats import Answers, detect, own_fields, raw_config

_RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""Tensors that transformers' DFlash assistant names otherwise."""


@dataclass
class Checkpoint:
    """A head in this package's terms.

    Args:
        config: of the head; ``has_embed_tokens`` and ``has_lm_head`` are what the file has.
        tensors: by name, in the file's own dtypes.
        layout: where it came from: ``specdec``, ``deepspec``, ``speculators``, ``zlab`` or ``transformers``.
        notes: what was done that a user should know.
    """

    config: DSparkConfig
    tensors: dict[str, torch.Tensor]
    layout: str
    notes: list[str] = field(default_factory=list)


def read_config(
    source: str, answers: Answers | None = None, hub: dict[str, Any] | None = None
) -> tuple[DSparkConfig, str]:
    """Configuration and layout of a head; the weights are not looked at.

    Raises:
        ValueError: no head, or something that cannot be known is missing. OSError: nothing there.
    """
    fields = raw_config(source, hub or {})
    layout = detect(fields, source)
    with words_for_damage(source):
        ours = own_fields(layout, fields, source, answers or Answers())
        ours.pop("model_type", None)
        return DSparkConfig(**ours), layout


def read_head(source: str, answers: Answers | None = None, hub: dict[str, Any] | None = None) -> Checkpoint:
    """Read a head of any known layout.

    Args:
        source: directory or Hub repository.
        answers: what the file does not say.
        hub: ``revision``, ``token``, ``subfolder``, ... as in ``from_pretrained``.

    Raises:
        ValueError: not a head, something is missing in ``config.json``, or the tensors are not what it describes.
        OSError: nothing there.
    """
    hub = hub or {}
    config, layout = read_config(source, answers, hub)
    files = weight_files(source, None, hub)
    check_digests(files)
    renamed = _RENAMED if layout == "transformers" else {}
    shapes, notes = {renamed.get(name, name): shape for name, shape in tensor_shapes(files).items()}, []
    tied = bool(raw_config(source, hub).get("tie_word_embeddings"))
    copied = tied and "lm_head.weight" not in shapes and "embed_tokens.weight" in shapes
    if copied:
        shapes["lm_head.weight"] = shapes["embed_tokens.weight"]
        notes.append("lm_head was shared with embed_tokens (tie_word_embeddings); it is written as a copy.")
    config.tie_word_embeddings = False
    config.note_owned("embed_tokens.weight" in shapes, "lm_head.weight" in shapes)
    dropped = {"t2d"} if layout == "speculators" else set()
    if not config.has_reduced_vocab:
        dropped.add("d2t")
    kept = {name: shape for name, shape in shapes.items() if name not in dropped}
    compare_tensors(expected_shapes(config), kept, source)
    tensors = {renamed.get(name, name): tensor for name, tensor in _load(files).items()}
    if copied:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    _check_tables(tensors, config, source)
    tensors = {name: tensor for name, tensor in tensors.items() if name in kept}
    return Checkpoint(config, tensors, layout, notes)


def expected_shapes(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of the tensors of the head that a configuration describes; allocates nothing."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in DSparkDraftModel(config).state_dict().items()}


def _load(files: list[str]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                tensors[name] = file.get_tensor(name)
    return tensors


def _check_tables(tensors: dict[str, torch.Tensor], config: DSparkConfig, source: str) -> None:
    """Draft vocabulary: offsets that ascend, and speculators' mask ``t2d`` saying the same."""
    offsets, mask = tensors.get("d2t"), tensors.get("t2d")
    if offsets is None:
        return
    if offsets.dtype != torch.int64:
        raise ValueError(f"{source}: d2t is {offsets.dtype}; it must be int64 offsets (target id = draft id + d2t)")
    ids = offsets + torch.arange(len(offsets))
    if not config.has_reduced_vocab:
        if bool(offsets.any()):
            raise ValueError(f"{source}: d2t moves ids, but draft_vocab_size is the whole vocabulary; correct either")
        return
    if bool((ids < 0).any() | (ids >= config.vocab_size).any() | (ids.diff() <= 0).any()):
        raise ValueError(
            f"{source}: d2t must hold offsets (target id = draft id + d2t[draft id]) that give ascending ids below "
            f"{config.vocab_size}; absolute ids are a usual mistake. Save ids - arange instead."
        )
    if mask is not None and (mask.shape != (config.vocab_size,) or not torch.equal(mask.bool().nonzero()[:, 0], ids)):
        raise ValueError(f"{source}: t2d and d2t name different tokens; the file is damaged, get it again")
