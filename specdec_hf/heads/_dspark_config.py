"""Configuration of a DSpark head: what it is made of and for which target. Nonsense is refused before allocation.

Knows shapes and names only. It loads no weights and sees no model.
"""

from __future__ import annotations

import difflib
from typing import Any

from transformers import PretrainedConfig

from ._config_sources import ROPE_TYPES, shape_of_target, spread_layers, translate_config, words_for_damage

LAYER_KINDS = ("llama", "gemma4")
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn", "none")
MAX_PARAMETERS = 20e9
"""A head describing more parameters than this is taken for a damaged config.json and refused before allocation."""

_HUGE = 1e18
_INTEGERS: dict[str, tuple[int, int]] = {
    "hidden_size": (1, 65_536),
    "intermediate_size": (1, 1_048_576),
    "num_hidden_layers": (1, 256),
    "num_attention_heads": (1, 4_096),
    "num_key_value_heads": (1, 4_096),
    "head_dim": (2, 4_096),
    "vocab_size": (2, 16_777_216),
    "draft_vocab_size": (1, 16_777_216),
    "block_size": (1, 1_024),
    "target_hidden_size": (1, 65_536),
    "num_target_layers": (1, 4_096),
    "markov_rank": (0, 16_384),
    "max_position_embeddings": (1, 1_073_741_824),
    "num_anchors": (1, 1_048_576),
    "sliding_window": (1, 1_073_741_824),
    "draft_top_k": (1, 16_777_216),
}
_OPTIONAL = ("num_target_layers", "sliding_window", "draft_top_k")
_BOOLEANS = (
    "attention_bias",
    "attention_k_eq_v",
    "qk_norm",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "sample_from_anchor",
    "has_embed_tokens",
    "has_lm_head",
    "window_per_slot",
    "embedding_norm",
)


class DSparkConfig(PretrainedConfig):
    """Configuration of :class:`~specdec_hf.heads.dspark.DSparkDraftModel`.

    Letters in the docstrings: D draft hidden size, Dt target hidden size, V target vocabulary, Vd draft vocabulary,
    K ``block_size``, r ``markov_rank``, m the number of taps.

    Args:
        vocab_size: V, the target's vocabulary. Ids that the head reads are the target's.
        draft_vocab_size: Vd, ids the head can propose; ``None`` means all V. A smaller one comes with a table ``d2t``.
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
            hidden_act, rms_norm_eps, attention_bias, max_position_embeddings, initializer_range: the draft's own
            layers, as in Llama.
        rope_parameters: ``{"rope_type": ..., "rope_theta": ...}``; rope types default, linear, llama3, yarn,
            proportional.
        layer_kind: ``llama`` (also Qwen3's: norms before attention and feed-forward) or ``gemma4`` (norms before and
            after both, values normed, attention not scaled, one factor a layer).
        attention_k_eq_v: values are the keys' projection (Gemma 4's full-attention layers); no ``v_proj`` then.
        qk_norm: RMS norm on queries and keys per attention head (Qwen3) or none (Llama).
        block_size: K, slots of a block, the anchor's included.
        mask_token_id: target id whose embedding fills the slots after the anchor. ``None``: a trained vector of the
            head's own (``mask_embedding`` in the file).
        target_layer_ids: taps, 0-based decoder layers of the target; the tap is the hidden state *after* that layer;
            -1 is the embedding output. ``None`` spreads five over the depth. The last layer is refused: transformers
            reports its state after the final norm, other engines before it.
        num_target_layers: decoder layers of the target; ``None`` if unknown (then not checked).
        target_hidden_size: Dt; ``None`` means D.
        markov_rank, markov_head_type: low-rank Markov head, ``vanilla``, ``gated``, ``rnn`` or ``none`` (rank 0).
        enable_confidence_head, confidence_head_with_markov: confidence head, and whether it also reads ``W1[x_{k-1}]``.
        sample_from_anchor: true (DSpark): slot k predicts the token after its own position, K proposals. False (z-lab's
            DFlash): each mask slot predicts the token at its own position, K - 1 proposals.
        sliding_window: a block sees only this many of the newest context tokens; ``None`` is all.
        window_per_slot: slot k sees context up to ``sliding_window`` before *itself* (transformers' DFlash); false: all
            slots see the ``sliding_window`` newest context tokens.
        layer_types: a ``full_attention`` or ``sliding_attention`` a layer, if only some layers have the window.
        has_embed_tokens, has_lm_head: the head's own, in its file; false: borrowed from the target by ``bind``.
        embedding_scale: factor on embeddings, own or borrowed, for targets that scale outside of the embedding module,
            and for own embeddings of Gemma (the square root of D).
        embedding_norm: false: borrowed embeddings are bare rows, without the norm that some targets' embedding modules
            apply (Muse Glimmer).
        final_logit_softcapping: ``cap * tanh(logits / cap)`` on the base logits (Gemma 2); ``None`` is off.
        confidence_temperatures: a positive float a slot that divides the confidence logits (calibration).
        num_anchors: anchors a sequence in training; kept because DeepSpec's loader needs it.
        draft_top_k: default number of best base logits a slot that get the Markov bias; the others become -inf.
        bos_token_id, eos_token_id, pad_token_id: the target's ids (``pipeline`` compares them).
        speculative_strategy: the strategy that ``generate`` takes for this head.
        target_name_or_path, target_revision: where the target comes from, for people and tools; ``bind`` warns of a
            target with another name or commit on the Hub.

    Raises:
        ValueError: any value out of its range or of a wrong type; the message names value, rule and fix.
    """

    model_type = "dspark"

    # Fields whose None is filled in below are never None afterwards, hence the ignores.
    vocab_size: int = 32_000
    draft_vocab_size: int = None  # type: ignore[assignment]
    hidden_size: int = 512
    intermediate_size: int = 1_376
    num_hidden_layers: int = 1
    num_attention_heads: int = 8
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    layer_kind: str = "llama"
    attention_k_eq_v: bool = False
    qk_norm: bool = True
    max_position_embeddings: int = 32_768
    initializer_range: float = 0.02
    rope_parameters: dict[str, Any] = None  # type: ignore[assignment]
    block_size: int = 7
    mask_token_id: int | None = None
    target_layer_ids: list[int] = None  # type: ignore[assignment]
    num_target_layers: int | None = 28
    target_hidden_size: int = None  # type: ignore[assignment]
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    sample_from_anchor: bool = True
    sliding_window: int | None = None
    window_per_slot: bool = False
    layer_types: list[str] | None = None
    has_embed_tokens: bool = True
    has_lm_head: bool = True
    embedding_scale: float = 1.0
    embedding_norm: bool = True
    final_logit_softcapping: float | None = None
    confidence_temperatures: list[float] | None = None
    num_anchors: int = 512
    draft_top_k: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    speculative_strategy: str = "dspark"
    target_name_or_path: str | None = None
    target_revision: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._fill_defaults(kwargs)
        super().__post_init__(**kwargs)
        self._check()

    @property
    def max_draft_tokens(self) -> int:
        """Proposals of one block: K, or K - 1 when the anchor slot predicts nothing (``sample_from_anchor`` false)."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def has_reduced_vocab(self) -> bool:
        """Whether the head proposes from fewer ids than the target has, through the table ``d2t``."""
        return self.draft_vocab_size != self.vocab_size

    def window_of_layer(self, layer: int) -> int | None:
        """Newest context tokens that layer ``layer`` sees, ``None`` for all."""
        if self.layer_types is not None and self.layer_types[layer] != "sliding_attention":
            return None
        return self.sliding_window

    def parameter_count(self) -> int:
        """Parameters of the head described, without what it borrows."""
        d, attn = self.hidden_size, self.head_dim * (2 * self.num_attention_heads + 2 * self.num_key_value_heads)
        norms = 4 if self.layer_kind == "gemma4" else 2
        layers = self.num_hidden_layers * (d * attn + 3 * d * self.intermediate_size + norms * d)
        own = d * (self.vocab_size * self.has_embed_tokens + self.draft_vocab_size * self.has_lm_head)
        markov = self.markov_rank * (self.vocab_size + self.draft_vocab_size + 3 * (d + 2 * self.markov_rank))
        return layers + own + markov + d * self.target_hidden_size * len(self.target_layer_ids)

    def note_owned(self, embed_tokens: bool, lm_head: bool) -> None:
        """Set what a file really has of its own. Gemma's embedding modules scale by themselves: borrowed ones need no
        factor. Raises ValueError where a borrowed part would not fit.
        """
        if self.layer_kind == "gemma4" and self.has_embed_tokens and not embed_tokens:
            self.embedding_scale = 1.0
        self.has_embed_tokens, self.has_lm_head = embed_tokens, lm_head
        self._check()

    # -- defaults and checks ------------------------------------------------------------------------------------------

    def _fill_defaults(self, legacy: dict[str, Any]) -> None:
        given: Any = self  # as it came from a file or a user: not yet of the declared types
        if given.draft_vocab_size is None:
            given.draft_vocab_size = given.vocab_size
        if given.num_key_value_heads is None:
            given.num_key_value_heads = given.num_attention_heads
        if given.head_dim is None and _is_int(given.hidden_size) and _is_int(given.num_attention_heads):
            given.head_dim = given.hidden_size // max(given.num_attention_heads, 1)
        if given.target_hidden_size is None:
            given.target_hidden_size = given.hidden_size
        if given.target_layer_ids is None:
            _check_int("num_target_layers", given.num_target_layers, 1, _INTEGERS["num_target_layers"][1])
            given.target_layer_ids = spread_layers(given.num_target_layers or 1)
        elif isinstance(given.target_layer_ids, tuple):
            given.target_layer_ids = list(given.target_layer_ids)
        if given.markov_head_type is None or given.markov_head_type == "none" or given.markov_rank == 0:
            # Rank 0 and "none" are the same thing in the wild; keep one spelling so that the rest has one case.
            _check_int("markov_rank", given.markov_rank, 0, _INTEGERS["markov_rank"][1])
            given.markov_head_type, given.markov_rank = "none", 0
            given.confidence_head_with_markov = False
        if given.rope_parameters is None:
            given.rope_parameters = {"rope_type": "default", "rope_theta": legacy.get("rope_theta") or 10_000.0}
        elif not isinstance(given.rope_parameters, dict):
            _fail("rope_parameters", given.rope_parameters, "must be a dict with rope_type and rope_theta", "pass one")
        else:
            given.rope_parameters = dict(given.rope_parameters)

    def _check(self) -> None:
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if not (value is None and name in _OPTIONAL):
                _check_int(name, value, low, high)
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                _fail(name, getattr(self, name), "must be true or false", "write a boolean")
        for name in ("rms_norm_eps", "embedding_scale"):
            _check_positive(name, getattr(self, name))
        _check_positive("initializer_range", self.initializer_range)
        if self.final_logit_softcapping is not None:
            _check_positive("final_logit_softcapping", self.final_logit_softcapping)
        self._check_layers()
        self._check_vocabulary()
        self._check_taps()
        self._check_heads()
        if self.parameter_count() > MAX_PARAMETERS:
            raise ValueError(
                f"this configuration describes {self.parameter_count() / 1e9:.0f} billion parameters; a draft head has "
                f"at most {MAX_PARAMETERS / 1e9:.0f}. config.json is probably damaged or written for another model."
            )

    def _check_layers(self) -> None:
        if self.layer_kind not in LAYER_KINDS:
            near = _nearest(self.layer_kind, LAYER_KINDS)
            _fail("layer_kind", self.layer_kind, f"must be one of {', '.join(LAYER_KINDS)}", near)
        if self.num_attention_heads % self.num_key_value_heads:
            _fail(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"must divide num_attention_heads={self.num_attention_heads}",
                "choose a divisor",
            )
        if self.head_dim % 2:
            _fail("head_dim", self.head_dim, "must be even for rotary positions", "choose an even one")
        from transformers.activations import ACT2FN

        if self.hidden_act not in ACT2FN:
            near = _nearest(self.hidden_act, ACT2FN)
            _fail("hidden_act", self.hidden_act, "must be an activation of transformers", near)
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            _fail("rope_type", rope_type, f"must be one of {', '.join(ROPE_TYPES)}", "train the head with one of these")
        _check_positive("rope_theta", self.rope_parameters.get("rope_theta"))
        if rope_type == "proportional":
            share = self.rope_parameters.get("partial_rotary_factor", 1.0)
            _check_positive("rope_parameters['partial_rotary_factor']", share)
            if share > 1.0:
                _fail("rope_parameters['partial_rotary_factor']", share, "must be at most 1", "correct it")
            _check_positive("rope_parameters['factor']", self.rope_parameters.get("factor", 1.0))
        elif rope_type != "default":
            _check_positive("rope_parameters['factor']", self.rope_parameters.get("factor"))
        if self.layer_types is not None:
            known = ("full_attention", "sliding_attention")
            if len(self.layer_types) != self.num_hidden_layers or any(kind not in known for kind in self.layer_types):
                _fail(
                    "layer_types",
                    self.layer_types,
                    f"must be a list of {self.num_hidden_layers} of {' / '.join(known)}",
                    "name one kind a layer, or leave it out",
                )
            if "sliding_attention" in self.layer_types and self.sliding_window is None:
                _fail("sliding_window", None, "must be set when layer_types has sliding_attention", "set it")

    def _check_vocabulary(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            _fail(
                "draft_vocab_size",
                self.draft_vocab_size,
                f"must not be larger than vocab_size={self.vocab_size}",
                "leave it out to propose from the whole vocabulary",
            )
        if self.draft_top_k is not None and self.draft_top_k > self.draft_vocab_size:
            _fail("draft_top_k", self.draft_top_k, f"must be at most {self.draft_vocab_size}", "lower it or use None")
        if self.mask_token_id is not None and not (
            _is_int(self.mask_token_id) and 0 <= self.mask_token_id < self.vocab_size
        ):
            _fail(
                "mask_token_id",
                self.mask_token_id,
                f"must be a target id, 0 to {self.vocab_size - 1}",
                "use None for a trained mask vector of the head's own",
            )

    def _check_taps(self) -> None:
        taps = self.target_layer_ids
        if not isinstance(taps, list) or not taps or not all(_is_int(tap) for tap in taps):
            _fail("target_layer_ids", taps, "must be a non-empty list of integers", "e.g. [1, 9, 17]")
        if len(set(taps)) != len(taps):
            _fail("target_layer_ids", taps, "must not repeat a layer", "name each layer once")
        if min(taps) < -1 or max(taps) > 4_095:
            _fail("target_layer_ids", taps, "must be -1 (embedding output) or 0-based layer ids", "count from 0")
        if self.num_target_layers is None:
            return
        last = self.num_target_layers - 1
        if last in taps:
            raise ValueError(
                f"target_layer_ids={taps} has the target's last layer ({last} of {self.num_target_layers}); that one "
                "is refused, because transformers reports it after the final norm and other engines before it. Use ids "
                f"up to {last - 1}."
            )
        if max(taps) > last:
            _fail(
                "target_layer_ids",
                taps,
                f"must be at most {last - 1} for a target of {self.num_target_layers} layers",
                "ids are 0-based; check that they were made for this target",
            )

    def _check_heads(self) -> None:
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            _fail(
                "markov_head_type",
                self.markov_head_type,
                f"must be one of {', '.join(MARKOV_HEAD_TYPES)}",
                _nearest(self.markov_head_type, MARKOV_HEAD_TYPES),
            )
        if self.max_draft_tokens < 1:
            _fail("block_size", self.block_size, "must be at least 2 if sample_from_anchor is false", "raise it")
        for name in ("has_embed_tokens", "has_lm_head"):
            if not getattr(self, name) and self.hidden_size != self.target_hidden_size:
                raise ValueError(
                    f"{name}=False borrows it from the target, whose width is {self.target_hidden_size}, but "
                    f"hidden_size={self.hidden_size}; both must agree. Set {name}=True, or "
                    f"hidden_size={self.target_hidden_size}."
                )
        temperatures = self.confidence_temperatures
        if temperatures is not None:
            if not isinstance(temperatures, (list, tuple)) or len(temperatures) != self.max_draft_tokens:
                _fail(
                    "confidence_temperatures",
                    temperatures,
                    f"must be a list of {self.max_draft_tokens} floats, one a proposal",
                    "calibrate this head again",
                )
            for value in temperatures:
                _check_positive("confidence_temperatures", value)
        if self.speculative_strategy != "dspark":
            _fail("speculative_strategy", self.speculative_strategy, 'must be "dspark" for this head', "leave it out")

    # -- from elsewhere -----------------------------------------------------------------------------------------------

    @classmethod
    def for_target(cls, target_config: PretrainedConfig, **overrides: Any) -> DSparkConfig:
        """A head's configuration for any decoder-only target.

        Args:
            target_config: the target's configuration (Llama, Qwen, Mistral, Gemma, Phi, GPT-2, mixtures of experts;
                a multimodal one with its text part inside).
            **overrides: fields of this class; they win over what is derived.

        Returns:
            A configuration whose layers have the target's width, head layout and rotary base (``num_hidden_layers``
            stays 1), whose taps are spread over the depth without the last layer, and which borrows embeddings and
            lm_head.

        Raises:
            ValueError: the target is an encoder-decoder, or an override is not a field (the nearest name is given).
        """
        if getattr(target_config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(target_config).__name__} is an encoder-decoder; a DSpark head needs a decoder-only target. "
                "Use generate() without speculation, or a draft model."
            )
        unknown = sorted(set(overrides) - set(cls._field_names()))
        if unknown:
            near = _nearest(unknown[0], cls._field_names())
            raise ValueError(f"{unknown[0]!r} is not a field of {cls.__name__}; {near}")
        text = target_config.get_text_config(decoder=True)
        fields = shape_of_target(text, overrides.get("layer_kind", "llama") == "gemma4")
        fields["target_name_or_path"] = getattr(target_config, "_name_or_path", None) or None
        fields["target_revision"] = getattr(target_config, "_commit_hash", None)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(text, name, None)
            fields[name] = value if value is not None else getattr(target_config, name, None)
        if overrides.get("hidden_size", fields["hidden_size"]) != fields["hidden_size"]:
            # A narrower draft cannot use the target's embeddings or head, nor its attention layout.
            fields.update(has_embed_tokens=True, has_lm_head=True)
            for name in ("head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
                fields.pop(name)
            width = overrides["hidden_size"]
            if _is_int(width) and width > 0:
                heads = next(count for count in (8, 4, 2, 1) if width % (2 * count) == 0 or count == 1)
                fields.update(num_attention_heads=heads, intermediate_size=-(-width * 8 // 3 // 16) * 16)
        if "num_target_layers" not in overrides and "target_layer_ids" not in overrides:
            fields["target_layer_ids"] = spread_layers(fields["num_target_layers"])
        return cls(**{**fields, **overrides})

    @classmethod
    def _field_names(cls) -> list[str]:
        return [name for klass in cls.__mro__ for name in getattr(klass, "__annotations__", {}) if name[0] != "_"]

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """As in transformers; a DeepSpec ``config.json`` comes back in this class's own fields."""
        source = str(pretrained_model_name_or_path)
        with words_for_damage(source):
            fields, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
            return translate_config(fields, source, cls.model_type, cls._field_names()), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; raises ValueError for values that are not of a field's type."""
        with words_for_damage(str(config_dict.get("_name_or_path") or "a configuration")):
            return super().from_dict(config_dict, **kwargs)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not _is_int(value) or not low <= value <= high:
        _fail(name, value, f"must be an integer from {low} to {high}", "correct it in config.json or in the call")


def _check_positive(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < _HUGE:  # not true of NaN and infinity either
        _fail(name, value, "must be a positive number, at most 1e18", "correct it in config.json or in the call")


def _nearest(name: Any, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(sorted(known))}"


def _fail(name: str, value: Any, rule: str, fix: str) -> None:
    raise ValueError(f"{name}={value!r}: it {rule}; {fix}")
