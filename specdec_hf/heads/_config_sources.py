"""Where a head's configuration comes from when not from our own file: DeepSpec's ``config.json``, or a target's shape.

Plain dicts in, plain dicts out; the configuration class checks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PretrainedConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
_DEEPSPEC_FIELDS = ("block_size", "target_layer_ids", "markov_rank")
_QK_NORM_TYPES = ("qwen3", "qwen3_moe")
GEMMA4_TYPES = ("gemma4_text", "gemma4_unified_text")
"""Model types whose layers a head of ``layer_kind="gemma4"`` has."""


def spread_layers(num_layers: int, count: int = 5) -> list[int]:
    """Tap ids spread over the depth of a target, from the second layer to the third last one.

    Args:
        num_layers: decoder layers of the target (L).
        count: how many taps are wanted; fewer come back when the target is too shallow.

    Returns:
        Ascending 0-based layer ids, at most L - 2: the last layer is never one. ``[-1]`` (the embedding output) when L
        is 1. The same rule as DFlash and DeepSpec use (1, 9, 17, 25, 33 for 36 layers and five taps).
    """
    last = num_layers - 2
    if last < 0:
        return [-1]
    start, end = min(1, last), max(min(1, last), num_layers - 3)
    if count <= 1:
        return [(start + end) // 2]
    return sorted({round(start + i * (end - start) / (count - 1)) for i in range(count)})


@contextmanager
def words_for_damage(where: str) -> Iterator[None]:
    """Errors that come of a file whose values are of no expected type, as a ValueError in words."""
    try:
        yield
    except (TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"{where}: config.json is damaged ({what}); download the head again") from error


class DamageInWords:
    """Mixin before ``PretrainedConfig``: a ``config.json`` of junk is a ValueError in words, and names no code."""

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """As in transformers, without ``auto_map``: our classes need no foreign code."""
        with words_for_damage(str(pretrained_model_name_or_path)):
            fields, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)  # type: ignore[misc]
            if not isinstance(fields.get("model_type", ""), str):
                raise TypeError(f"model_type is {fields['model_type']!r}")
            return {name: value for name, value in fields.items() if name != "auto_map"}, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; raises ValueError for values that are not of a field's type."""
        with words_for_damage(str(config_dict.get("_name_or_path") or "a configuration")):
            return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]


def translate_config(fields: dict[str, Any], where: str, model_type: str, names: list[str]) -> dict[str, Any]:
    """Fields of a ``config.json`` in our names: ours as they are, DeepSpec's translated, anything else refused.

    The layout is told by its fields, never by the name of a class or a path.

    Args:
        fields: what ``config.json`` holds.
        where: directory or repository, for errors.
        model_type: of our own files.
        names: fields of our configuration class.

    Raises:
        ValueError: not a head that this class can read; the message says which layout it looks like and what to do.
    """
    if fields.get("model_type") == model_type or not fields:
        return {name: value for name, value in fields.items() if name != "auto_map"}  # our class needs no foreign code
    if "speculators_model_type" in fields or "speculators_config" in fields:
        raise ValueError(
            f"{where} is in the speculators layout, whose layer ids differ by one. Convert it first: "
            "specdec convert SOURCE DESTINATION."
        )
    if all(name in fields for name in _DEEPSPEC_FIELDS):
        return _translate_deepspec(fields, where, model_type, names)
    if "dflash_config" in fields:
        raise ValueError(f"{where} is in z-lab's DFlash layout. Convert it first: specdec convert SOURCE DESTINATION.")
    if all(name in fields for name in ("block_size", "target_layer_ids", "mask_token_id")):
        raise ValueError(
            f"{where} is in the layout of transformers' own DFlash assistant. Convert it first: specdec convert SOURCE "
            "DESTINATION --target MODEL."
        )
    missing = [name for name in _DEEPSPEC_FIELDS if name not in fields]
    raise ValueError(
        f"{where} is not a DSpark head: model_type={fields.get('model_type')!r} and config.json has no "
        f"{', '.join(missing)}. Give the head's directory or repository, not the target's."
    )


def _translate_deepspec(fields: dict[str, Any], where: str, model_type: str, names: list[str]) -> dict[str, Any]:
    """DeepSpec's ``config.json`` is the target's copied, plus DSpark's fields; its layers are the draft's."""
    if fields.get("model_type") in GEMMA4_TYPES:
        return _translate_gemma4(fields, where, model_type, names)
    if not fields.get("rope_parameters") and not fields.get("rope_theta"):
        raise ValueError(
            f"{where} has neither rope_parameters nor rope_theta; a guessed base drafts nonsense without an error. "
            "Add the target's rope_parameters to config.json."
        )
    ours = {name: fields[name] for name in names if name in fields}
    for name in ("transformers_version", "architectures", "layer_types"):
        ours.pop(name, None)
    rope = fields.get("rope_parameters") or {
        **{("rope_type" if key == "type" else key): value for key, value in (fields.get("rope_scaling") or {}).items()},
        "rope_theta": fields["rope_theta"],
    }
    kinds = fields.get("layer_types") or []
    windowed = "sliding_attention" in kinds
    ours.update(
        model_type=model_type,
        rope_parameters={"rope_type": "default", **rope},
        qk_norm=fields.get("qk_norm", fields.get("model_type") in _QK_NORM_TYPES),
        target_hidden_size=fields.get("target_hidden_size") or fields.get("hidden_size"),
        num_target_layers=fields.get("num_target_layers"),
        sliding_window=fields.get("sliding_window") if windowed else None,
        layer_types=kinds if windowed and len(set(kinds)) > 1 else None,
        sample_from_anchor=fields.get("sample_from_anchor", True),
        tie_word_embeddings=False,
    )
    if "torch_dtype" in fields:
        ours.setdefault("dtype", fields["torch_dtype"])
    return ours


def _translate_gemma4(fields: dict[str, Any], where: str, model_type: str, names: list[str]) -> dict[str, Any]:
    """DeepSpec's heads for Gemma 4: all draft layers are its full-attention ones, whose fields have names of their own.

    Embeddings in the file are unscaled, as Gemma's; a head without them borrows the target's module, which scales.
    """
    needed = ("global_head_dim", "attention_k_eq_v", "hidden_size", "hidden_activation", "rms_norm_eps")
    missing = [name for name in needed if fields.get(name) is None]
    if fields.get("attention_k_eq_v") and fields.get("num_global_key_value_heads") is None:
        missing.append("num_global_key_value_heads")
    ropes = fields.get("rope_parameters")
    rope = ropes.get("full_attention") if isinstance(ropes, dict) else None
    if not isinstance(rope, dict) or not rope.get("rope_theta"):
        missing.append("rope_parameters['full_attention']")
    if missing:
        raise ValueError(
            f"{where}: a head with Gemma 4's layers, but config.json has no {', '.join(missing)}; a guessed one drafts "
            "nonsense without an error. Add what the target's text_config has."
        )
    for name in ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers"):
        if fields.get(name):
            raise ValueError(
                f"{where}: {name}={fields[name]!r}; DeepSpec's Gemma 4 heads have neither experts, nor inputs per "
                "layer, nor layers that share keys. It cannot be loaded."
            )
    if set(fields.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise ValueError(
            f"{where}: layer_types={fields['layer_types']}; DeepSpec's Gemma 4 heads attend to all context"
        )
    heads = "num_global_key_value_heads" if fields["attention_k_eq_v"] else "num_key_value_heads"
    ours = {name: fields[name] for name in names if name in fields}
    for name in ("transformers_version", "architectures", "layer_types", "sliding_window"):
        ours.pop(name, None)
    ours.update(
        model_type=model_type,
        layer_kind="gemma4",
        head_dim=fields["global_head_dim"],
        num_key_value_heads=fields.get(heads),
        hidden_act=fields["hidden_activation"],
        rope_parameters={"rope_type": "default", **rope},  # type: ignore[dict-item]
        embedding_scale=float(fields["hidden_size"]) ** 0.5 if isinstance(fields["hidden_size"], int) else 1.0,
        qk_norm=True,
        target_hidden_size=fields.get("target_hidden_size") or fields.get("hidden_size"),
        num_target_layers=fields.get("num_target_layers"),
        sample_from_anchor=fields.get("sample_from_anchor", True),
        tie_word_embeddings=False,
    )
    return ours


def shape_of_target(text: PretrainedConfig, gemma4: bool = False) -> dict[str, Any]:
    """Shape of a target from its text configuration; GPT-2's older names are known through its ``attribute_map``.

    Args:
        gemma4: whether the head's layers are Gemma 4's, like the target's full-attention ones.
    """
    whole = text
    if getattr(text, "is_heterogeneous", False):  # some values differ by layer (Gemma 4)
        kinds = getattr(text, "layer_types", None) or []
        layer = kinds.index("full_attention") if gemma4 and "full_attention" in kinds else 0
        text = text.per_layer_config[layer]
    hidden, heads = text.hidden_size, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads  # rotary positions need an even one
    inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    if isinstance(inner, (list, tuple)):  # Gemma 3n: one value a layer
        inner = inner[0]
    act = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None) or "silu"
    return {
        "vocab_size": text.vocab_size,
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "intermediate_size": inner,
        "num_target_layers": text.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": head_dim + head_dim % 2,
        "hidden_act": act,
        "rms_norm_eps": getattr(text, "rms_norm_eps", None) or getattr(text, "layer_norm_epsilon", None) or 1e-6,
        "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 32_768,
        "rope_parameters": _rope_of(whole, gemma4),
        **_gemma4_fields(whole, gemma4),
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
        # Granite scales outside of the embedding module; Gemma's module does it itself.
        "embedding_scale": float(getattr(text, "embedding_multiplier", None) or 1.0),
        "has_embed_tokens": False,
        "has_lm_head": False,
    }


def _gemma4_fields(text: PretrainedConfig, gemma4: bool) -> dict[str, Any]:
    if not gemma4:
        return {}
    return {"layer_kind": "gemma4", "attention_k_eq_v": bool(getattr(text, "attention_k_eq_v", False))}


def _rope_of(text: PretrainedConfig, gemma4: bool) -> dict[str, Any]:
    rope = getattr(text, "rope_parameters", None) or {}
    if rope and all(
        isinstance(value, dict) or value is None for value in rope.values()
    ):  # Gemma 3: one dict a layer type
        rope = rope.get("full_attention") or next(value for value in rope.values() if value)
    theta = rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10_000.0
    kind = rope.get("rope_type", "default")
    if kind == "proportional":  # only Gemma's layers turn a part of each head
        return {**rope, "rope_theta": theta} if gemma4 else {"rope_type": "default", "rope_theta": theta}
    if kind in ROPE_TYPES[1:]:
        return {**{key: value for key, value in rope.items() if key != "partial_rotary_factor"}, "rope_theta": theta}
    return {"rope_type": "default", "rope_theta": theta}
