"""The four routes from `generate()` into the decoding loop.

All of them end in transformers' public hook for another decoding method, a callable `custom_generate`, which hands over
prepared inputs, processors and criteria (transformers 5.19 to 5.24). The hook drops `streamer` and `tokenizer`, so the
callable holds the former and builds the stop-string criterion with the latter itself.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from typing import Any

from transformers import AutoModelForCausalLM

from . import _hf, drafters
from .cache import cannot_roll_back
from .decoding import Call, decode
from .forward import cannot_replay
from .heads import dspark, early_exit, medusa  # noqa: F401 - registers them: a pipeline may load a head by its name
from .options import KNOBS, SpeculativeConfig, knobs_of_prepared, resolve, strategy_of, user_set
from .output import SpeculationStats
from .recurrent import is_recurrent

_LAST = "_last_speculation"
_DEFAULT = "_default_speculation"  # (assistant, speculative) of calls that name neither


class Unsupported(ValueError):
    """A call asks for a way of decoding that cannot be combined with speculation."""


def last_speculation(model: Any) -> SpeculationStats | None:
    """Statistics of the model's latest speculative `generate()`, None if there was none. Also behind a PEFT wrapper."""
    return getattr(_base(model), _LAST, None)


class SpeculativeDecoding:
    """A decoding method for `generate(custom_generate=...)`. Made by `speculative_decoding`.

    transformers reads the signature of `__call__`: names that its own loop does not have are handed over exactly as the
    user wrote them.
    """

    def __init__(
        self, head: Any, config: SpeculativeConfig | str | None = None, *, tokenizer: Any = None, streamer: Any = None
    ) -> None:
        self.head, self.config, self.tokenizer, self.streamer = head, config, tokenizer, streamer
        resolve(head, config, None, None, {})  # refuse a wrong configuration now, not in the first call

    def __call__(
        self,
        model: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        num_assistant_tokens: int | None = None,
        num_assistant_tokens_schedule: str | None = None,
        assistant_confidence_threshold: float | None = None,
        max_matching_ngram_size: int | None = None,
        assistant_early_exit: int | None = None,
        stop_strings: Any = None,
        generator: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decode one prepared call. Raises ValueError for what speculation does not support."""
        given = {
            "num_assistant_tokens": num_assistant_tokens,
            "num_assistant_tokens_schedule": num_assistant_tokens_schedule,
            "assistant_confidence_threshold": assistant_confidence_threshold,
            "max_matching_ngram_size": max_matching_ngram_size,
            "assistant_early_exit": assistant_early_exit,
        }
        config = resolve(self.head, self.config, None, generator, given, knobs_of_prepared(generation_config))
        call = Call(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, self.streamer
        )
        return self.decode(call, config, stop_strings)

    def decode(self, call: Call, config: SpeculativeConfig, stop_strings: Any = None, inherited: bool = False) -> Any:
        """Decode one prepared call as `config` says.

        Args:
            stop_strings: as in `generate`; None = none.
            inherited: the number of drafted tokens is a default of the model's own, so too large a one is no mistake of
                the caller's and is cut to what the drafter can.
        """
        model = call.model
        setattr(model, _LAST, None)  # a call that fails leaves no figures of the one before
        refuse_unsupported(model, call.generation_config, call.input_ids)
        if stop_strings is not None:
            call.stopping_criteria = self._with_stop_strings(call.stopping_criteria, stop_strings)
        drafter = drafters.resolve(config, self.head, model)
        tokens = config.num_assistant_tokens
        if tokens is not None and tokens > drafter.max_tokens and not inherited:
            raise ValueError(
                f"num_assistant_tokens={tokens} is more than this {config.strategy} assistant can draft in a round: "
                f"pass at most {drafter.max_tokens}, or leave it out for that many."
            )
        reason = plain_reason(model, call.model_kwargs)
        if reason is not None:
            return self._plain(call, config, reason)
        result, stats = decode(call, drafter, config)
        setattr(model, _LAST, stats)
        return result

    def _with_stop_strings(self, criteria: Any, stop_strings: Any) -> Any:
        if self.tokenizer is None:
            raise ValueError(
                f"stop_strings={stop_strings!r} need the target's tokenizer: pass tokenizer=... to generate() (with "
                "custom_generate, to speculative_decoding(head, tokenizer=...))."
            )
        rule = _hf.stopping.StopStringCriteria(stop_strings=stop_strings, tokenizer=self.tokenizer)
        return _hf.stopping.StoppingCriteriaList([*criteria, rule])

    def _plain(self, call: Call, config: SpeculativeConfig, reason: str) -> Any:
        warnings.warn(
            f"speculative={config.strategy!r} is not used: {reason}. Decoding goes on without speculation.",
            UserWarning,
            stacklevel=2,
        )
        stats = SpeculationStats("plain", [], [], [], fallback=reason)
        setattr(call.model, _LAST, stats)
        result = _hf.plain_decoding(
            call.model,
            call.input_ids,
            logits_processor=call.logits_processor,
            stopping_criteria=call.stopping_criteria,
            generation_config=call.generation_config,
            streamer=call.streamer,
            **call.model_kwargs,
        )
        if call.generation_config.return_dict_in_generate:
            result.speculation = stats
        return result


def speculative_decoding(
    head: Any, config: SpeculativeConfig | str | None = None, *, tokenizer: Any = None, streamer: Any = None
) -> SpeculativeDecoding:
    """A value for `model.generate(..., custom_generate=...)` that leaves the model untouched.

    Args:
        head: the assistant, e.g. a `DSparkDraftModel`.
        config: a strategy's name or a `SpeculativeConfig`; None = what the head's configuration names.
        tokenizer: the target's; needed for `stop_strings` only.
        streamer: the one given to `generate` too (generate puts the prompt there, the loop puts the rest).

    Raises:
        ValueError, TypeError: a configuration that cannot be.
    """
    return SpeculativeDecoding(head, config, tokenizer=tokenizer, streamer=streamer)


def refuse_unsupported(model: Any, generation_config: Any, input_ids: Any) -> None:
    """Raise for what speculation does not support and plain decoding would silently do differently."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise Unsupported(
            f"{name} is an encoder-decoder model; speculation supports decoder-only causal LMs. Call generate() "
            "without the speculative assistant."
        )
    for field, off, what in (
        ("num_beams", 1, "beam search"),
        ("penalty_alpha", None, "contrastive search"),
        ("dola_layers", None, "DoLa decoding"),
        ("constraints", None, "constrained beam search"),
        ("force_words_ids", None, "constrained beam search"),
        ("use_mtp", None, "multi-token prediction"),
        ("prompt_lookup_num_tokens", None, "transformers' own prompt lookup"),
        ("assistant_ensemble_weight", None, "lossy assisted decoding"),
    ):
        value = getattr(generation_config, field, None)
        if value not in (None, off, False):
            raise Unsupported(
                f"{field}={value!r} asks for {what}, which cannot be combined with speculative decoding (greedy and "
                f"sampling can). Leave out {field}, or leave out the assistant."
            )
    if input_ids.shape[0] == 0:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}: an empty batch; pass at least one prompt.")


def plain_reason(model: Any, model_kwargs: dict[str, Any]) -> str | None:
    """Why this call has to be decoded plainly, in words; None if it can speculate."""
    if not model_kwargs.get("use_cache", True):
        return "use_cache=False leaves no cache to verify blocks against"
    cache = model_kwargs.get(_hf.CACHE_KEY)
    if cache is None:
        return "the model manages its own state instead of a transformers Cache"
    reason = cannot_roll_back(cache)
    if reason is None and any(map(is_recurrent, cache.layers)):
        reason = cannot_replay(model)
    return None if reason is None else f"the cache ({type(cache).__name__}) cannot be used: {reason}"


class SpeculativeGenerationMixin(_hf.GenerationMixin):
    """`GenerationMixin` whose `generate` also takes `speculative=`, `assistant_strategy=` and `generator=`."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As `transformers.GenerationMixin.generate`, and with one of our heads as `assistant_model` speculatively.

        Args:
            assistant_model: a draft head, e.g. `DSparkDraftModel`, or what the strategy names (`"draft_model"`: a
                smaller causal LM; `"prompt_lookup"`: none; `"early_exit"`: an `EarlyExitHead` or none).
            speculative: a strategy's name or a `SpeculativeConfig`; None = what the head names.
            assistant_strategy: exact alias of `speculative`.
            generator: see `SpeculativeConfig`.
            num_assistant_tokens, num_assistant_tokens_schedule, assistant_confidence_threshold,
                max_matching_ngram_size, assistant_early_exit: as in GenerationConfig.

        Raises:
            ValueError, TypeError: what speculation does not support; the message says what to do instead.
        """
        return _route(self, super().generate, args, kwargs)


def _route(model: Any, plain_generate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Send one call of `generate` into the loop if it asks for speculation, else to transformers as it is."""
    kwargs = _named(args, kwargs)
    default = _default_of(model, kwargs)
    if default is not None:
        head, speculative = default
        try:
            return _route(model, plain_generate, (), {**kwargs, "assistant_model": head, "speculative": speculative})
        except Unsupported as refusal:  # the caller may not know that there is a default
            warnings.warn(f"Decoding goes on without speculation: {refusal}", UserWarning, stacklevel=3)
            return plain_generate(**kwargs)
    head = kwargs.get("assistant_model")
    wish = {name: kwargs.pop(name, None) for name in ("speculative", "assistant_strategy")}
    asked = any(value not in (None, False) for value in wish.values())
    if kwargs.get("custom_generate") is not None:
        if asked:
            raise ValueError(
                f"speculative={wish['speculative'] or wish['assistant_strategy']!r} and custom_generate are two ways "
                "to decode: pass one of them."
            )
        return plain_generate(**kwargs)
    if wish["speculative"] is False or not (asked or strategy_of(head) is not None):
        if strategy_of(head) is not None:
            kwargs.pop("assistant_model")  # speculative=False: one of our heads means nothing to transformers
        return plain_generate(**kwargs)
    _refuse_arguments(kwargs)
    for name in ("assistant_model", "assistant_tokenizer"):
        kwargs.pop(name, None)
    own, given = model.generation_config, kwargs.get("generation_config")
    stop_strings = user_set("stop_strings", kwargs, [given, own])
    knobs = {name: kwargs.pop(name, None) for name in KNOBS}
    defaults = {name: user_set(name, {}, [given, own]) for name in KNOBS}
    config = resolve(
        head, wish["speculative"], wish["assistant_strategy"], kwargs.pop("generator", None), knobs, defaults
    )
    said = resolve(head, wish["speculative"], wish["assistant_strategy"], None, knobs, {})
    inherited = said.num_assistant_tokens is None and user_set("num_assistant_tokens", {}, [given]) is None
    loop = SpeculativeDecoding(head, config, tokenizer=kwargs.pop("tokenizer", None), streamer=kwargs.get("streamer"))
    _take_out(kwargs, given, own)

    def method(
        model: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        call = Call(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, loop.streamer
        )
        return loop.decode(call, config, stop_strings, inherited)

    return plain_generate(custom_generate=method, **kwargs)


def _default_of(model: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The model's own (assistant, speculative), if the call says nothing of assistants or other ways to decode."""
    said = ("assistant_model", "speculative", "assistant_strategy", "custom_generate", "prompt_lookup_num_tokens")
    return None if any(kwargs.get(name) is not None for name in said) else getattr(model, _DEFAULT, None)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a `generate` call by name, so that none is overlooked for having come by position."""
    names = list(inspect.signature(_hf.GenerationMixin.generate).parameters)[1:]
    given = dict(zip(names, args, strict=False))
    if len(args) > len(names) or given.keys() & kwargs.keys():
        raise TypeError(
            f"generate() got {len(args)} arguments by position, {sorted(given.keys() & kwargs.keys())} twice: name "
            "them."
        )
    return {**given, **kwargs}


def _take_out(kwargs: dict[str, Any], given: Any, own: Any) -> None:
    """Take out of the arguments what the loop has and transformers must not see.

    Stop strings: the hook drops the tokenizer that they need. `assistant_early_exit`: transformers would take the call
    for its own assisted generation, and refuse several answers. An argument None is applied last of all and unsets
    what the model's own configuration says, which stays untouched.
    """
    for name in ("stop_strings", "assistant_early_exit"):
        kwargs.pop(name, None)
        if given is not None and getattr(given, name) is not None:
            kwargs["generation_config"] = given = copy.copy(given)
            setattr(given, name, None)
        if getattr(own, name) is not None:
            kwargs[name] = None


def _refuse_arguments(kwargs: dict[str, Any]) -> None:
    if kwargs.get("synced_gpus"):
        raise Unsupported(
            "synced_gpus=True cannot be combined with speculative decoding: ranks accept different numbers of tokens, "
            "so their forwards would not match. Leave out synced_gpus (no ZeRO-3 / FSDP sharded generation) or the "
            "assistant."
        )
    if kwargs.get("cache_implementation") == "paged":
        raise Unsupported(
            "cache_implementation='paged' switches transformers to continuous batching, which does not speculate. "
            "Leave it out (batches are handled by the loop), or leave out the assistant."
        )


_CLASSES: dict[type, type] = {}


def enable_speculation(
    model: Any, assistant_model: Any = None, speculative: SpeculativeConfig | str | None = None
) -> Any:
    """Give a loaded model the mixin, in place; returns the model. Harmless when called twice.

    The class keeps its name, module and bases, so saving, `isinstance` and hidden-state capture work as before. A
    PEFT-wrapped model keeps its wrapper: the base model gets the mixin.

    Args:
        model: the target.
        assistant_model, speculative: what its `generate` uses when a call says neither, for code that cannot be edited.
            Such a call that speculation does not support (beams, say) is decoded plainly, with a warning. Both None
            leaves an earlier default as it is.

    Raises:
        TypeError: not a model that can generate.
    """
    base = _base(model)
    cls = type(base)
    if not isinstance(base, _hf.GenerationMixin):
        raise TypeError(
            f"{cls.__name__} has no generate(): enable_speculation takes a causal LM, e.g. one from "
            "AutoModelForCausalLM.from_pretrained(...)."
        )
    if assistant_model is not None or speculative is not None:
        config = resolve(assistant_model, speculative, None, None, {})
        drafters.drafter_class(str(config.strategy))  # refuse a wrong name now, not in the first call
        setattr(base, _DEFAULT, (assistant_model, speculative))
    if not isinstance(base, SpeculativeGenerationMixin):
        base.__class__ = _with_mixin(cls)
    return model


def _with_mixin(cls: type) -> type:
    """A model class with the mixin in front, under the same name; one for each class."""
    if cls not in _CLASSES:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        more = {"_speculation_base": cls, "__reduce_ex__": _reduce}
        _CLASSES[cls] = type(cls.__name__, (SpeculativeGenerationMixin, cls), {**names, **more})
    return _CLASSES[cls]


def _reduce(model: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle by the original class: the one made here has its name, but cannot be imported."""
    original = type(model)._speculation_base
    _, _, *state = original.__reduce_ex__(model, protocol)
    return (_blank, (original,), *state)


def _blank(original: type) -> Any:
    cls = _with_mixin(original)
    return object.__new__(cls)


def disable_speculation(model: Any) -> Any:
    """Take the mixin away again, in place; returns the model. Harmless on a model that never had it."""
    base = _base(model)
    base.__dict__.pop(_DEFAULT, None)
    original = getattr(type(base), "_speculation_base", None)
    if original is not None:
        base.__class__ = original
    return model


def _base(model: Any) -> Any:
    """The model behind a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class SpeculativeModelForCausalLM:
    """Loads a causal LM and enables speculation on it."""

    def __init__(self) -> None:
        raise TypeError("SpeculativeModelForCausalLM has no instances: use from_pretrained(...) or from_config(...).")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """`AutoModelForCausalLM.from_pretrained`, then `enable_speculation`; same arguments and errors."""
        return enable_speculation(AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **kwargs))

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """`AutoModelForCausalLM.from_config`, then `enable_speculation`."""
        return enable_speculation(AutoModelForCausalLM.from_config(config, **kwargs))


_INSTALLED: list[Any] = []


class _Installation:
    """What `install()` returns: a context manager that uninstalls at its end."""

    def __enter__(self) -> _Installation:
        return self

    def __exit__(self, *exception: object) -> None:
        uninstall()


def install() -> _Installation:
    """Patch `GenerationMixin.generate` for the whole process, for code that cannot be edited.

    Every model then takes the speculative arguments. Never done on import. Calls nest: as many `uninstall()` undo it.
    Also a context manager: `with install(): ...`.
    """
    original = _hf.GenerationMixin.generate
    _INSTALLED.append(original)
    if len(_INSTALLED) == 1:

        @functools.wraps(original)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, SpeculativeGenerationMixin):
                return original(self, *args, **kwargs)  # came through the mixin's own generate
            return _route(self, functools.partial(original, self), args, kwargs)

        _hf.GenerationMixin.generate = generate
    return _Installation()


def uninstall() -> None:
    """Undo the latest `install()`; harmless without one."""
    if not _INSTALLED:
        return
    original = _INSTALLED.pop()
    if not _INSTALLED:
        _hf.GenerationMixin.generate = original
