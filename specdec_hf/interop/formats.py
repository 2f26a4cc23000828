"""Which layout a head's ``config.json`` is in, and its fields in this package's own names.

A layout is told by its fields, never by the name of a class, a path or a repository. What a file does not say and
cannot be known is asked for by an error. Layouts as vLLM 0.32 and speculators 0.9 read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from ..heads._config_sources import translate_config, words_for_damage
from ..heads.dspark import DSparkConfig

FORMATS = ("specdec", "deepspec", "speculators", "zlab")
"""Layouts that are written; ``transformers`` (its own DFlash assistant) is only read."""
_SPECULATORS_LAYERS = {"qwen3": True, "llama": False}  # layer type: whether queries and keys have a norm
_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
)
_ZLAB_KNOWN = ("mask_token_id", "target_layer_ids", "block_size", "num_target_layers")


@dataclass(frozen=True)
class Answers:
    """What a user says about a head because its file does not, or says wrongly.

    Args:
        target_layer_ids: taps in this package's convention: 0-based decoder layers, -1 the embedding output.
        sample_from_anchor: whether the anchor's slot predicts too (DSpark) or only the mask slots do (z-lab's DFlash).
        mask_token_id: on reading, the id of the mask token; on writing, a spare row for a head's own mask vector.
        embedding_scale: factor on embeddings.
        num_target_layers: decoder layers of the target.
        vocab_size: of the target, for a file that has none.
    """

    target_layer_ids: list[int] | None = None
    sample_from_anchor: bool | None = None
    mask_token_id: int | None = None
    embedding_scale: float | None = None
    num_target_layers: int | None = None
    vocab_size: int | None = None


def detect(fields: dict[str, Any], where: str) -> str:
    """The layout of a ``config.json``: ``specdec``, ``deepspec``, ``speculators``, ``zlab`` or ``transformers``.

    Raises:
        ValueError: none of them; the message says what each has.
    """
    if "speculators_model_type" in fields or "speculators_config" in fields:
        return "speculators"
    if fields.get("model_type") == DSparkConfig.model_type:
        return "specdec"
    if "dflash_config" in fields:
        return "zlab"
    if all(name in fields for name in ("block_size", "target_layer_ids", "markov_rank")):
        return "deepspec"
    if (
        all(name in fields for name in ("block_size", "target_layer_ids", "mask_token_id"))
        and "vocab_size" not in fields
    ):
        return "transformers"
    raise ValueError(
        f"{where} is in no layout that is known: config.json has model_type={fields.get('model_type')!r}, but neither "
        "speculators_model_type (speculators), nor dflash_config (z-lab), nor block_size, target_layer_ids and "
        "markov_rank (DeepSpec) or mask_token_id (transformers' DFlash). Give the head's directory or repository, "
        "not the target's."
    )


def raw_config(source: str, hub: dict[str, Any]) -> dict[str, Any]:
    """What ``config.json`` of a directory or Hub repository holds. Raises OSError where there is none."""
    with words_for_damage(source):
        return dict(PretrainedConfig.get_config_dict(source, **hub)[0])


def own_fields(layout: str, fields: dict[str, Any], where: str, answers: Answers) -> dict[str, Any]:
    """Fields of :class:`DSparkConfig` from a ``config.json`` in a known layout, answers applied.

    Raises:
        ValueError: a field that cannot be known is missing, or says something that this package's head is not.
    """
    if layout in ("specdec", "deepspec"):
        names = DSparkConfig._field_names()
        ours = translate_config(dict(fields), where, DSparkConfig.model_type, names)
    elif layout == "speculators":
        ours = _from_speculators(fields, where, answers)
    elif layout == "transformers":
        ours = _from_transformers(fields, where, answers)
    else:
        ours = _from_zlab(fields, where, answers)
    for name in ("target_layer_ids", "sample_from_anchor", "embedding_scale", "num_target_layers"):
        if getattr(answers, name) is not None:
            ours[name] = getattr(answers, name)
    if layout != "specdec" and answers.mask_token_id is not None:
        ours["mask_token_id"] = answers.mask_token_id
    return ours


def _from_speculators(fields: dict[str, Any], where: str, answers: Answers) -> dict[str, Any]:
    kind = fields.get("speculators_model_type")
    if kind not in ("dspark", "dflash"):
        raise ValueError(f"{where}: speculators_model_type={kind!r}; only dspark and dflash heads can be converted")
    layer = fields.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"{where}: transformer_layer_config is missing; without it the head's shape is unknown")
    need(layer, _SHAPE, where, "transformer_layer_config")
    norms = _SPECULATORS_LAYERS.get(layer.get("model_type", ""))
    if norms is None:
        known = ", ".join(_SPECULATORS_LAYERS)
        raise ValueError(f"{where}: layers of type {layer.get('model_type')!r}; only {known} layers can be converted")
    _refuse_windows(layer, where)
    ids = fields.get("aux_hidden_state_layer_ids")
    if ids is None and answers.target_layer_ids is None:
        raise ValueError(
            f"{where}: aux_hidden_state_layer_ids is missing. Ask who trained the head, then give the 0-based layers "
            "with --target-layer-ids (one less than the ids of speculators)."
        )
    # Of a DFlash head all programs take a missing sample_from_anchor as false.
    anchor = (
        False if kind == "dflash" and fields.get("sample_from_anchor") is None else fields.get("sample_from_anchor")
    )
    if anchor is None and answers.sample_from_anchor is None:
        raise ValueError(
            f"{where} does not say sample_from_anchor, and programs differ in what they then take (the speculators "
            "library true, vLLM false). Give --sample-from-anchor or --no-sample-from-anchor; if you do not know, "
            "convert with either and look which one `specdec convert --check --target MODEL` finds better."
        )
    need(fields, ("block_size",), where, "config.json")
    if answers.mask_token_id is None:
        need(fields, ("mask_token_id",), where, "config.json")
    if kind == "dspark":
        need(fields, ("markov_rank", "enable_confidence_head"), where, "config.json")
    markov = int(fields.get("markov_rank") or 0)
    if markov:
        need(fields, ("markov_head_type",), where, "config.json")
    confidence = bool(fields.get("enable_confidence_head"))
    if confidence:
        need(fields, ("confidence_head_with_markov",), where, "config.json")
    verifier = (fields.get("speculators_config") or {}).get("verifier") or {}
    return {
        **_common(layer, fields, where, norms),
        "draft_vocab_size": fields.get("draft_vocab_size") or layer["vocab_size"],
        "block_size": fields["block_size"],
        "mask_token_id": fields.get("mask_token_id"),
        "target_layer_ids": [one - 1 for one in ids] if ids is not None else None,
        "num_target_layers": None,
        "target_hidden_size": fields.get("target_hidden_size") or layer["hidden_size"],
        "markov_rank": markov,
        "markov_head_type": fields.get("markov_head_type") if markov else "none",
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": bool(fields.get("confidence_head_with_markov")),
        "sample_from_anchor": anchor,
        "target_name_or_path": verifier.get("name_or_path"),
        **({"num_anchors": fields["num_anchors"]} if fields.get("num_anchors") else {}),
    }


def _from_zlab(fields: dict[str, Any], where: str, answers: Answers) -> dict[str, Any]:
    """z-lab's DFlash: the target's configuration copied; only mask slots predict; embeddings are the target's."""
    inner = fields.get("dflash_config")
    if not isinstance(inner, dict):
        raise ValueError(f"{where}: dflash_config={inner!r} must be a dict; download the head again")
    unknown = sorted(name for name, value in inner.items() if name not in _ZLAB_KNOWN and value)
    if unknown:
        raise ValueError(
            f"{where}: dflash_config has {', '.join(unknown)}, a variant of DFlash that is not known (known: "
            f"{', '.join(_ZLAB_KNOWN)}). It cannot be converted."
        )
    merged = {**fields, **{name: value for name, value in inner.items() if value is not None}}
    need(merged, (*_SHAPE, "block_size"), where, "config.json")
    for name, flag in (("target_layer_ids", "--target-layer-ids"), ("mask_token_id", "--mask-token-id")):
        if merged.get(name) is None and getattr(answers, name) is None:
            raise ValueError(f"{where}: {name} is missing in dflash_config; give it with {flag}")
    _refuse_windows(fields, where)
    return {
        **_common(fields, fields, where, fields.get("model_type") in ("qwen3", "qwen3_moe")),
        "block_size": merged["block_size"],
        "mask_token_id": merged.get("mask_token_id"),
        "target_layer_ids": merged.get("target_layer_ids"),
        "num_target_layers": merged.get("num_target_layers"),
        "target_hidden_size": fields.get("target_hidden_size") or fields["hidden_size"],
        "markov_rank": 0,
        "markov_head_type": "none",
        "enable_confidence_head": False,
        "sample_from_anchor": False,
    }


def _from_transformers(fields: dict[str, Any], where: str, answers: Answers) -> dict[str, Any]:
    """transformers' DFlash assistant (5.19 and newer): mask slots predict, embeddings and lm_head are the target's.

    Its file has no vocabulary: with ``vocab_size`` from the target the rest is complete.
    """
    if answers.vocab_size is None:
        raise ValueError(f"{where} does not say how large the target's vocabulary is; give the target with --target")
    merged = {**fields, "vocab_size": answers.vocab_size}
    need(merged, (*_SHAPE, "layer_types"), where, "config.json")
    kinds = fields["layer_types"]
    windowed = isinstance(kinds, list) and "sliding_attention" in kinds
    if windowed:
        need(fields, ("sliding_window",), where, "config.json")
    return {
        **_common(merged, fields, where, norms=True),
        "block_size": fields["block_size"],
        "mask_token_id": fields["mask_token_id"],
        "target_layer_ids": fields["target_layer_ids"],
        "num_target_layers": None,
        "target_hidden_size": fields["hidden_size"],
        "markov_rank": 0,
        "markov_head_type": "none",
        "enable_confidence_head": False,
        "sample_from_anchor": False,
        "layer_types": kinds,
        "sliding_window": fields.get("sliding_window") if windowed else None,
        "window_per_slot": windowed,
        "embedding_norm": False,
    }


def _common(shape: dict[str, Any], fields: dict[str, Any], where: str, norms: bool) -> dict[str, Any]:
    """What both nested and flat configurations say alike."""
    rope = shape.get("rope_parameters")
    if not rope:
        need(shape, ("rope_theta",), where, "its layer configuration (nor rope_parameters)")
        scaling = {("rope_type" if k == "type" else k): v for k, v in (shape.get("rope_scaling") or {}).items()}
        rope = {**scaling, "rope_theta": shape["rope_theta"]}
    ours = {name: shape[name] for name in _SHAPE}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "attention_bias", "initializer_range"):
        if shape.get(name) is not None:
            ours[name] = shape[name]
    dtype = fields.get("dtype") or fields.get("torch_dtype") or shape.get("dtype")
    return {
        **ours,
        "model_type": DSparkConfig.model_type,
        "rope_parameters": {"rope_type": "default", **rope},
        "qk_norm": norms,
        **({"dtype": dtype} if dtype else {}),
    }


def need(fields: dict[str, Any], names: tuple[str, ...], where: str, part: str) -> None:
    """Raise ValueError if one of ``names`` is missing or null."""
    missing = [name for name in names if fields.get(name) is None]
    if missing:
        raise ValueError(
            f"{where}: {part} has no {', '.join(missing)}. No default is right for every head, so none is taken: add "
            "the value that the head was trained with to config.json."
        )


def _refuse_windows(layer: dict[str, Any], where: str) -> None:
    if "sliding_attention" in (layer.get("layer_types") or ()) or layer.get("use_sliding_window"):
        raise ValueError(
            f"{where} has layers with a sliding window. Whether a block sees itself in both directions there differs "
            "between programs, so such a head is not converted."
        )
