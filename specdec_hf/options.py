"""From `generate()`'s keyword arguments and a head's defaults to one frozen `SpeculativeConfig`.

Everything a user can get wrong about *how* to speculate is refused here, before anything runs.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ._hf import global_default
from .policies import CONFIDENCE, SCHEDULES

#: generate() arguments that are ours alone; `SpeculativeConfig` says what they mean.
OWN_KWARGS = ("speculative", "assistant_strategy", "generator")
#: GenerationConfig fields that we read under their own names.
KNOBS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "max_matching_ngram_size",
    "assistant_early_exit",
)
#: Values of `SpeculativeConfig.coupling`.
COUPLINGS = ("residual", "gumbel")

_SHORT = {"schedule": "num_assistant_tokens_schedule", "threshold": "assistant_confidence_threshold"}
_COUNTS = (
    "num_assistant_tokens",
    "min_assistant_tokens",
    "max_assistant_tokens",
    "max_matching_ngram_size",
    "min_matching_ngram_size",
    "assistant_early_exit",
    "draft_top_k",
    "draft_tree_nodes",
)


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to speculate. Pass it as `generate(..., speculative=SpeculativeConfig(...))`, or a strategy's name alone.

    Args:
        strategy: name of the drafting strategy, e.g. `"dspark"`; None = the one that the head's configuration names.
        num_assistant_tokens: tokens drafted per round, of a tree its nodes; None = the drafter's default (DSpark: its
            block, Medusa: its head's `tree_nodes`, prompt_lookup 10, draft_model and
            early_exit 1 to 5: the dearer a drafted token is beside the target's step, the fewer).
        num_assistant_tokens_schedule: how that number changes from round to round, for each row: `"constant"` keeps it;
            `"heuristic"` adds 2 after a round whose tokens were all accepted and takes 1 away otherwise, and the next
            call goes on from there; `"heuristic_transient"` does the same in each call anew; `"adaptive"` moves by 1
            when the acceptance of the latest rounds leaves `acceptance_target` by more than 0.1; `"confidence"` keeps
            it and cuts blocks at `assistant_confidence_threshold`; `"throughput"` verifies as many drafted tokens of
            each row as make the batch commit the most tokens a second, by their confidence (or else by how often tokens
            at their place were accepted) and by what a forward costs here.
        assistant_confidence_threshold: drafted tokens from the first one on whose estimated survival is below this
            number in [0, 1] are cut before the target sees them; 0 = keep all; None = 0, and 0.4 with the schedule
            `"confidence"`.
        automatic_off: whether to decode plainly for a while when drafting costs more than it gains on this text, by the
            measured costs of this machine; None = with the schedule `"throughput"` only.
        min_assistant_tokens, max_assistant_tokens: limits of a number that changes; None = 1, and the most that the
            drafter can.
        acceptance_target: share of drafted tokens accepted that `"adaptive"` steers to, in (0, 1).
        max_matching_ngram_size, min_matching_ngram_size: for prompt_lookup, how many of the latest tokens must stand
            earlier in the text, at best and at least; None = 3 (or the minimum, if that is larger) and 2 (or the
            maximum).
        assistant_early_exit: for early_exit, after how many of the target's decoder layers the draft is read; None =
            the head's first exit, without a head a third of the layers.
        coupling: how sampled tokens are judged. `"residual"` keeps a drafted token with probability min(1,
            target/draft): most tokens are kept. `"gumbel"` gives each position its own noise, made from `seed`: fewer
            tokens are kept, and the text is the same with any drafter, any number of drafted tokens and any batch. Both
            are exact.
        seed: for `coupling="gumbel"`: an integer, or a list with one per row, with which a row's text is that of a call
            with that row and seed alone; None = drawn from torch's global stream.
        draft_top_k: compute the Markov bias on the k most likely base logits of each slot only, and draft from exactly
            those (saves time with large vocabularies); None = the head's own setting.
        draft_tree_nodes: for dspark, draft a tree of so many nodes instead of a chain: those of highest joint draft
            probability. `num_assistant_tokens` then counts nodes, up to this number, and a threshold is compared with
            the joint probability. Pays where more rows of a block cost the target little; None = a chain.
        generator: random numbers for sampling: a `torch.Generator`, or a list with one per row, which makes each row's
            text independent of its neighbours (unless rows must advance level, see decoding.py: then the distribution
            is exact, but where a row is cut depends on them); None = torch's global stream.

    Raises:
        ValueError, TypeError: a field out of its range.
    """

    strategy: str | None = None
    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: str | None = None
    assistant_confidence_threshold: float | None = None
    min_assistant_tokens: int | None = None
    max_assistant_tokens: int | None = None
    acceptance_target: float = 0.6
    automatic_off: bool | None = None
    max_matching_ngram_size: int | None = None
    min_matching_ngram_size: int | None = None
    assistant_early_exit: int | None = None
    coupling: str = "residual"
    seed: Any = None
    draft_top_k: int | None = None
    draft_tree_nodes: int | None = None
    generator: Any = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"{name}={value!r}: must be an integer of at least 1. Leave it out for the head's own default; to "
                    "decode without speculation, leave out the assistant."
                )
        if self.strategy is not None and not isinstance(self.strategy, str):
            raise TypeError(f"strategy={self.strategy!r} is a {type(self.strategy).__name__}: pass a strategy's name.")
        _check_generator(self.generator)
        threshold = self.assistant_confidence_threshold
        number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        if threshold is not None and not (number and 0.0 <= threshold <= 1.0):
            raise ValueError(
                f"assistant_confidence_threshold={threshold!r}: it is compared with a probability, so it must lie in "
                "[0, 1]. 0 verifies every drafted token."
            )
        if self.automatic_off not in (None, True, False):
            raise TypeError(f"automatic_off={self.automatic_off!r}: must be True, False or None.")
        schedule = self.num_assistant_tokens_schedule
        if schedule is not None and schedule not in SCHEDULES:
            raise ValueError(
                f"num_assistant_tokens_schedule={schedule!r} is not known{did_you_mean(schedule, SCHEDULES)}. "
                f"There are: {', '.join(SCHEDULES)}."
            )
        target = self.acceptance_target
        if not isinstance(target, (int, float)) or isinstance(target, bool) or not 0.0 < target < 1.0:
            raise ValueError(
                f"acceptance_target={target!r}: it is the share of drafted tokens that should be accepted, so it must "
                "lie between 0 and 1. Leave it out for 0.6."
            )
        for what in ("assistant_tokens", "matching_ngram_size"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if low is not None and high is not None and low > high:
                raise ValueError(f"min_{what}={low} is larger than max_{what}={high}: swap them, or leave one out.")
        self._check_coupling()

    @property
    def confidence_threshold(self) -> float:
        """The threshold that holds; 0 = no drafted token is cut."""
        if self.assistant_confidence_threshold is None:
            return CONFIDENCE if self.num_assistant_tokens_schedule == "confidence" else 0.0
        return self.assistant_confidence_threshold

    @property
    def switches_off(self) -> bool:
        """Whether drafting stops while it does not pay."""
        return self.num_assistant_tokens_schedule == "throughput" if self.automatic_off is None else self.automatic_off

    def _check_coupling(self) -> None:
        if self.coupling not in COUPLINGS:
            raise ValueError(
                f"coupling={self.coupling!r} is not known{did_you_mean(self.coupling, COUPLINGS)}. There are: "
                f"{', '.join(COUPLINGS)}."
            )
        seeds = self.seed if isinstance(self.seed, (list, tuple)) else () if self.seed is None else (self.seed,)
        if not all(isinstance(seed, int) and not isinstance(seed, bool) for seed in seeds):
            raise TypeError(f"seed={self.seed!r}: must be an integer, or a list with one integer per row.")
        if self.coupling == "residual" and self.seed is not None:
            raise ValueError(
                f"seed={self.seed!r} is for coupling='gumbel' and would do nothing here: pass that too, or seed "
                "residual sampling with generator=torch.Generator().manual_seed(seed)."
            )
        if self.coupling == "gumbel" and self.generator is not None:
            raise ValueError(
                "generator is for residual sampling and would do nothing with coupling='gumbel', whose random numbers "
                "depend on positions: pass seed= (an integer, or a list with one per row) instead."
            )


def _check_generator(generator: Any) -> None:
    for one in generator if isinstance(generator, (list, tuple)) else (generator,):
        if not (one is generator is None or isinstance(one, torch.Generator)):
            raise TypeError(
                f"generator={generator!r}: must be a torch.Generator, or a list with one per row. For a seed alone, "
                "pass torch.Generator().manual_seed(seed), or call torch.manual_seed(seed) before and leave it out."
            )


def did_you_mean(name: str, known: Any) -> str:
    """`" (did you mean 'x'?)"` if a known name is close, else an empty string."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def strategy_of(head: Any) -> str | None:
    """The strategy that a head's configuration names; None for anything that is not one of our heads."""
    return getattr(getattr(head, "config", None), "speculative_strategy", None)


def resolve(
    head: Any,
    speculative: Any,
    assistant_strategy: Any,
    generator: Any,
    knobs: dict[str, Any],
    defaults: dict[str, Any] | None = None,
) -> SpeculativeConfig:
    """Merge what the user said, in this order: call arguments, the `SpeculativeConfig`, stored defaults, the head.

    Args:
        head: the assistant, or None.
        speculative: `"name"`, a `SpeculativeConfig`, True (= the head's strategy), or None.
        assistant_strategy: exact alias of `speculative`.
        generator: see `SpeculativeConfig`.
        knobs: `KNOBS` given in the call itself.
        defaults: `KNOBS` from a GenerationConfig; they count where neither the call nor the config says anything.

    Raises:
        TypeError: `speculative` is of another type.
        ValueError: both names given and different, or no strategy known.
    """
    named = speculative.strategy if isinstance(speculative, SpeculativeConfig) else speculative
    if None not in (speculative, assistant_strategy) and named not in (None, assistant_strategy):
        raise ValueError(
            f"speculative={speculative!r} and assistant_strategy={assistant_strategy!r} are two names of one argument "
            "and differ: pass one of them."
        )
    wish = speculative if speculative is not None else assistant_strategy
    if wish is None or wish is True:
        config = SpeculativeConfig()
    elif isinstance(wish, str):
        config = SpeculativeConfig(strategy=wish)
    elif isinstance(wish, SpeculativeConfig):
        config = replace(wish, strategy=wish.strategy or assistant_strategy)
    else:
        raise TypeError(
            f"speculative={wish!r} is a {type(wish).__name__}: pass a strategy's name or a SpeculativeConfig."
        )
    updates = {name: value for name, value in (defaults or {}).items() if getattr(config, name) is None}
    updates |= {name: value for name, value in knobs.items() if value is not None}
    if generator is not None:
        updates["generator"] = generator
    strategy = config.strategy or strategy_of(head)
    if strategy is None:
        raise ValueError(
            f"no drafting strategy: assistant_model is a {type(head).__name__}, which names none. Pass a draft head, "
            "e.g. DSparkDraftModel.from_pretrained(...), or say which strategy, e.g. speculative='dspark'."
        )
    return replace(config, strategy=strategy, **updates)


def user_set(name: str, kwargs: dict[str, Any], configs: list[Any]) -> Any:
    """The value of a GenerationConfig field as the user (or the model's own configuration) set it, else None.

    Args:
        kwargs: the keyword arguments of generate().
        configs: GenerationConfig objects by falling priority. Unset fields are None there, or transformers' default
            where somebody has filled it in already (pipelines did before 5.20), which cannot be told from a user's own.
    """
    if kwargs.get(name) is not None:
        return kwargs[name]
    values = (getattr(config, name, None) for config in configs if config is not None)
    return next((value for value in values if value not in (None, global_default(name))), None)


def knobs_of_prepared(generation_config: Any) -> dict[str, Any]:
    """`KNOBS` from a configuration in which transformers has already filled its own defaults.

    A value equal to transformers' default (20 tokens, threshold 0.4) cannot be told from an unset one and counts as
    unset.
    """
    values = {name: getattr(generation_config, name, None) for name in KNOBS}
    return {name: None if value == global_default(name) else value for name, value in values.items()}


def parse_settings(strategy: str, settings: str) -> SpeculativeConfig:
    """`SpeculativeConfig` from a command line.

    Args:
        strategy: its name.
        settings: `NAME=VALUE,...`, fields of `SpeculativeConfig` (`schedule` and `threshold` are short for the longest
            two). A value is a number, true, false or a word.

    Raises:
        ValueError: no such field, or a value out of its range or of another type.
    """
    known = [name for name in field_names() if name not in ("strategy", "generator")]
    values: dict[str, Any] = {}
    for pair in filter(None, settings.split(",")):
        name, _, text = pair.partition("=")
        name = _SHORT.get(name, name)
        if name not in known:
            raise ValueError(f"{pair!r}: {name!r} is no setting{did_you_mean(name, known)}. There are: {known}.")
        try:
            values[name] = json.loads(text.lower())
        except json.JSONDecodeError:
            values[name] = text
    try:
        return SpeculativeConfig(strategy=strategy, **values)
    except TypeError as error:  # what was typed is a wrong value, whatever its type
        raise ValueError(str(error)) from None


def field_names() -> tuple[str, ...]:
    """The fields of `SpeculativeConfig`."""
    return tuple(field.name for field in fields(SpeculativeConfig))
