"""Every private or version-dependent transformers name the package relies on, and nothing else.

Checked against transformers 5.19.0 and 5.24.0. When transformers moves one of these names, this file changes alone.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.generation import logits_process
from transformers.generation import stopping_criteria as stopping
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

try:  # layers that share the keys of another layer; absent before 5.20
    from transformers.cache_utils import DummyLayer
except ImportError:
    DummyLayer = None

__all__ = [
    "CACHE_KEY",
    "FIXED_PROCESSORS",
    "PREFIX_PROCESSORS",
    "Cache",
    "CacheLayerMixin",
    "DummyLayer",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "GenerateDecoderOnlyOutput",
    "GenerationConfig",
    "GenerationMixin",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionCacheLayerMixin",
    "LinearAttentionLayer",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "attention_implementation",
    "check_trackers",
    "decode_context",
    "global_default",
    "outlives_call",
    "pad_token",
    "plain_decoding",
    "prefill",
    "stopping",
    "text_config",
    "train_on_one_device",
]

#: `past_key_values` became `cache` (argument of forward, model kwarg and output field) after 5.19.
CACHE_KEY: str = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


def _processor_classes(names: str) -> frozenset[type]:
    return frozenset(getattr(logits_process, name) for name in names.split() if hasattr(logits_process, name))


#: Processors that look at the scores of one position only: never at the prefix, never at the row's number.
FIXED_PROCESSORS = _processor_classes(
    "TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper MinPLogitsWarper TopHLogitsWarper TypicalLogitsWarper "
    "EpsilonLogitsWarper EtaLogitsWarper SuppressTokensLogitsProcessor InfNanRemoveLogitsProcessor LogitNormalization"
)

#: Processors that are a pure function of the scores and of their own row's prefix.
PREFIX_PROCESSORS = _processor_classes(
    "RepetitionPenaltyLogitsProcessor NoRepeatNGramLogitsProcessor MinLengthLogitsProcessor "
    "MinNewTokensLengthLogitsProcessor NoBadWordsLogitsProcessor SequenceBiasLogitsProcessor "
    "ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor ExponentialDecayLengthPenalty "
    "SuppressTokensAtBeginLogitsProcessor"
)

_DEFAULTS = GenerationConfig._get_default_generation_params()


def global_default(name: str) -> Any:
    """The value transformers fills in for an unset GenerationConfig field, e.g. 20 for `num_assistant_tokens`."""
    return _DEFAULTS.get(name)


def prefill(model: Any, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """transformers' own prefill: slices cached tokens off, handles `inputs_embeds`, chunks and multimodal inputs."""
    return model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)


def plain_decoding(model: Any, input_ids: Any, **kwargs: Any) -> Any:
    """transformers' own token-by-token loop on arguments that `generate` has already prepared."""
    return type(model)._sample(model, input_ids, **kwargs)


def decode_context(model: Any) -> Any:
    """The context that transformers' loop enters to choose fast decode kernels, where the version has one."""
    optimise = getattr(model, "_optimize_model_for_decode", None)
    return optimise() if optimise is not None else contextlib.nullcontext()


def text_config(model: Any) -> Any:
    """The configuration of the text decoder; the model's own where there is only one."""
    return model.config.get_text_config(decoder=True)


def attention_implementation(model: Any) -> str:
    """`"sdpa"`, `"eager"`, `"flash_attention_2"`, ... as set on the text decoder."""
    return text_config(model)._attn_implementation


def pad_token(generation_config: Any) -> int | None:
    """The id that `generate` pads finished rows with (the first end-of-sequence id where none is set)."""
    tensor = getattr(generation_config, "_pad_token_tensor", None)
    return None if tensor is None else int(tensor)


def outlives_call(cache: Any, generation_config: Any) -> bool:
    """Whether somebody can see the cache when `generate` has returned."""
    return bool(generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False))


def check_trackers(names: list[str]) -> None:
    """`Trainer`'s own check of `report_to`, before anything long is begun: `ValueError` for an unknown tracker."""
    from transformers.integrations import get_reporting_integration_callbacks  # slow to import, and only training asks

    get_reporting_integration_callbacks(names)


def train_on_one_device(arguments: Any) -> None:
    """Keeps `Trainer` from spreading a batch over the devices of one process (`nn.DataParallel`)."""
    arguments.device  # noqa: B018 - counts the devices, once
    arguments._n_gpu = min(arguments._n_gpu, 1)
