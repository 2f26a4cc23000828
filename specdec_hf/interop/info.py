"""``specdec info``: what a head is, in words, read from its files; nothing is guessed."""

from __future__ import annotations

import math
import os
from typing import Any

from ..heads._loading import tensor_shapes, weight_files
from ..heads.dspark import DSparkConfig
from .formats import Answers, detect, raw_config
from .reading import Checkpoint, read_head
from .target import Target
from .writing import engine_warnings

_NAMES = {
    "specdec": "specdec_hf",
    "deepspec": "DeepSpec",
    "speculators": "speculators",
    "zlab": "z-lab DFlash",
    "transformers": "transformers' DFlash",
}


def describe(source: str, hub: dict[str, Any] | None = None, target: str | None = None) -> str:
    """Several lines about a head in any known layout; ``target`` is needed where the file has no vocabulary.

    Raises:
        ValueError, OSError: no head can be read there; the message says why.
    """
    hub = hub or {}
    layout = detect(raw_config(source, hub), source)
    files = weight_files(source, None, hub)
    answers = None if target is None else Answers(vocab_size=Target(target).text.vocab_size)
    head = read_head(source, answers, hub)
    stored = sum(math.prod(shape) for name, shape in tensor_shapes(files).items() if name not in ("d2t", "t2d"))
    size = sum(os.path.getsize(path) for path in files)
    lines = [
        f"{source}",
        *(f"  {name:<12} {text}" for name, text in _facts(head, layout)),
        f"  {'parameters':<12} {stored:,} in the file ({size / 1e6:.1f} MB), {describe_dtypes(head)}",
    ]
    notes = [*head.notes, *engine_warnings(head.config)]
    return "\n".join([*lines, *(f"  {'note':<12} {one}" for one in notes)])


def describe_dtypes(head: Checkpoint) -> str:
    """Number types of the file's tensors."""
    kinds = {str(one.dtype).removeprefix("torch.") for one in head.tensors.values() if one.is_floating_point()}
    return " and ".join(sorted(kinds))


def _facts(head: Checkpoint, layout: str) -> list[tuple[str, str]]:
    config = head.config
    return [
        ("layout", _NAMES[layout]),
        ("target", describe_target(config)),
        (
            "taps",
            f"layers {config.target_layer_ids} (0-based, the state after the layer), width {config.target_hidden_size}",
        ),
        ("draft", describe_draft(config)),
        ("proposals", describe_proposals(config)),
        ("embeddings", _owned(config)),
        ("calibration", describe_calibration(config)),
    ]


def describe_target(config: DSparkConfig) -> str:
    """The recorded target with its revision and depth."""
    name = config.target_name_or_path or "not recorded"
    revision = f" at {config.target_revision}" if config.target_revision else ""
    depth = f"{config.num_target_layers} layers" if config.num_target_layers else "depth not recorded"
    return f"{name}{revision}, {depth}, vocabulary {config.vocab_size}"


def describe_draft(config: DSparkConfig) -> str:
    """Layers, widths and rotary base of the draft."""
    rope = config.rope_parameters
    return (
        f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads of "
        f"{config.head_dim} ({config.num_key_value_heads} for keys), rope {rope.get('rope_type', 'default')} "
        f"{rope['rope_theta']:g}"
    )


def describe_proposals(config: DSparkConfig) -> str:
    """What a block proposes and with which heads."""
    markov = (
        f"Markov head {config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "no Markov head"
    )
    confidence = "confidence head" if config.enable_confidence_head else "no confidence head"
    reduced = f", from {config.draft_vocab_size} of {config.vocab_size} ids" if config.has_reduced_vocab else ""
    anchor = "" if config.sample_from_anchor else " (mask slots only)"
    return f"{config.max_draft_tokens} tokens a block{anchor}{reduced}; {markov}; {confidence}"


def _owned(config: DSparkConfig) -> str:
    words = {True: "its own", False: "the target's"}
    mask = "a vector of its own" if config.mask_token_id is None else f"token {config.mask_token_id}"
    return (
        f"embed_tokens {words[config.has_embed_tokens]}, lm_head {words[config.has_lm_head]}, mask {mask}"
        f"{f', scale {config.embedding_scale:g}' if config.embedding_scale != 1.0 else ''}"
    )


def describe_calibration(config: DSparkConfig) -> str:
    """Calibration temperatures of the confidence head."""
    if not config.enable_confidence_head:
        return "nothing to calibrate"
    if config.confidence_temperatures is None:
        return "none"
    return "temperatures " + ", ".join(f"{one:.3g}" for one in config.confidence_temperatures)
