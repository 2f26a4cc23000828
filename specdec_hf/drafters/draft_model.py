"""A smaller causal LM with the same token ids drafts token by token.

Source: speculative sampling (Leviathan et al. 2023, arXiv 2211.17192). The draft keeps a cache of its own, run by the
same code as the target's. After a round that cache is cut to what was committed; tokens that the draft has not read yet
(the anchor, and the last drafted token when all were accepted) are read together in its next forward.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _hf
from ..cache import SpeculativeCache, cannot_roll_back
from ..forward import TargetRunner, must_stay_level
from ..options import SpeculativeConfig, strategy_of
from ..policies import fitting_tokens
from ..proposal import Proposal
from ..recurrent import is_recurrent
from ..targets import TapRecorder, accepts_argument
from .base import Drafter, DraftRequest, Observation, Prompt, TokenConfidence

_MOST = 32
#: Vocabularies of one tokenizer differ by padding to a round number; by more than this they are two tokenizers'.
_PADDING = 1024


def _weight(model: Any) -> int:
    """Bytes that a step reads: all weights but an embedding table of its own, of which it reads a row a token."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(head, "weight", None) is table.weight
    return sum(part.nbytes for part in model.parameters() if tied or part is not table.weight)


@dataclass
class _Kept:
    """What a later turn goes on from: the draft's cache, and how many of its slots are right in each row."""

    cache: SpeculativeCache
    filled: list[int]


class DraftModelDrafter(Drafter):
    """Drives a causal LM as the draft.

    Args:
        model: the draft, on any device and in any dtype.
        target: the model that it drafts for.
        config: `num_assistant_tokens`, `max_assistant_tokens` and the confidence threshold are read. The confidence of
            a token is the probability of the draft's most likely token there, before logits processors.
    """

    name = "draft_model"
    target_layer_ids: list[int] = []

    def __init__(self, model: Any, target: Any, config: SpeculativeConfig) -> None:
        self._model = model
        self.default_tokens = fitting_tokens(_weight(model) / max(_weight(target), 1))
        target_vocab_size = _hf.text_config(target).vocab_size
        self._threshold = config.confidence_threshold
        self.max_tokens = max(_MOST, config.num_assistant_tokens or 0, config.max_assistant_tokens or 0)
        self.level_rows = must_stay_level(model)
        self._vocab_size = min(target_vocab_size, _hf.text_config(model).vocab_size)
        self._narrower = self._vocab_size < target_vocab_size
        self._runner: TargetRunner | None = None  # None where it cannot read the prompt and therefore never drafts
        self._committed: list[int] = []  # cache slots of each row's committed tokens, the anchor's not counted
        self._offset = 0  # cache slots that the request's ids do not name: earlier turns that were not passed again
        self._parked: dict[int, int] = {}

    @property
    def identity(self) -> tuple[Any, ...]:
        return (self.name, id(self._model))

    @classmethod
    def create(cls, head: Any, target: Any, config: SpeculativeConfig) -> DraftModelDrafter:
        if head is None:
            raise ValueError(
                "speculative='draft_model' needs a draft: pass assistant_model=..., a smaller causal LM with the "
                "target's tokenizer, or use speculative='prompt_lookup', which needs none."
            )
        if strategy_of(head) not in (None, cls.name):
            raise TypeError(
                f"speculative='draft_model' needs a causal LM as assistant_model, and {type(head).__name__} is a draft "
                f"head: say speculative={strategy_of(head)!r}."
            )
        model = head.get_base_model() if hasattr(head, "get_base_model") else head
        if not isinstance(model, _hf.GenerationMixin) or model.config.is_encoder_decoder:
            raise TypeError(
                f"speculative='draft_model' needs a decoder-only causal LM as assistant_model, not "
                f"{type(model).__name__}. Load one with AutoModelForCausalLM.from_pretrained(...)."
            )
        empty = _hf.DynamicCache(config=_hf.text_config(model))
        reason = cannot_roll_back(empty)
        if reason is None and (getattr(model, "_is_stateful", False) or any(map(is_recurrent, empty.layers))):
            reason = "it keeps a state that cannot take back rejected tokens"
        if reason is not None:
            raise ValueError(
                f"{type(model).__name__} cannot draft: {reason}. Pass a draft with plain attention layers."
            )
        _check_vocabulary(model, target)
        return cls(model, target, config)

    # -- prompt --------------------------------------------------------------------------------------------------------

    def start(self, prompt: Prompt) -> None:
        length = prompt.ids.shape[1]
        if length == 0:
            warnings.warn(
                "the prompt is inputs_embeds alone, which a draft model with other embeddings cannot read, so nothing "
                "is drafted in this call and the text comes no faster. Pass input_ids too, or use another strategy.",
                UserWarning,
                stacklevel=2,
            )
            return
        new = prompt.positions.shape[1]
        columns = new + prompt.cached[0] if prompt.mask is None else prompt.mask.shape[1]
        self._offset = columns - length
        cache, held = self._continued(prompt, columns - new)
        if cache is None:
            cache, held = SpeculativeCache(_hf.DynamicCache(config=_hf.text_config(self._model)), prompt.capacity), 0
            if self._offset > 0:
                self._warn_of_missing_turns()
            self._offset = 0
        self._committed = [length + self._offset] * prompt.ids.shape[0]
        mask = None if prompt.mask is None else prompt.mask[:, prompt.mask.shape[1] - self._committed[0] :]
        kwargs = self._forward_kwargs(cache, mask, prompt.positions)
        recorder = TapRecorder(self._model, [])
        self._runner = TargetRunner(self._model, cache, kwargs, recorder, self.level_rows, prompt.capacity)
        ids = self._readable(prompt.ids)[:, held - self._offset :]
        self._runner.prefill(ids, self._model.generation_config)

    def _continued(self, prompt: Prompt, cached: int) -> tuple[SpeculativeCache | None, int]:
        """The cache of earlier turns and the slots to go on from, if it came with the target's cache."""
        kept = prompt.state
        if kept is None or len(kept.filled) != prompt.ids.shape[0]:
            return None, 0
        # What the target's cache holds is what the text begins with; at least one token is left to read.
        held = min(cached, *kept.filled, self._offset + prompt.ids.shape[1] - 1)
        if held < max(self._offset, 1) or not kept.cache.can_return_to(held):
            return None, 0
        kept.cache.return_to(held)
        return kept.cache, held

    def _warn_of_missing_turns(self) -> None:
        warnings.warn(
            f"input_ids leave out {self._offset} tokens of the cache passed in, and this draft model has not read "
            "them. The text stays right, but fewer drafted tokens will be accepted. For full speed pass the whole "
            "conversation as input_ids, or a cache that generate(..., return_dict_in_generate=True) returned with "
            "this draft.",
            UserWarning,
            stacklevel=2,
        )

    def _forward_kwargs(self, cache: SpeculativeCache, mask: Tensor | None, positions: Tensor) -> dict[str, Any]:
        """What `generate` would have prepared for the draft's forwards.

        Args:
            mask: bool [B, C], or None without padding.
            positions: LongTensor [B, T] of the last T columns, as the target has them; those before are counted.
        """
        device = self._model.device
        kwargs: dict[str, Any] = {"use_cache": True, _hf.CACHE_KEY: cache}
        if mask is not None:
            kwargs["attention_mask"] = mask.to(device, torch.long)
        if accepts_argument(self._model, "position_ids"):
            counted = torch.arange(self._committed[0], device=device).repeat(positions.shape[0], 1)
            if mask is not None:
                counted = (kwargs["attention_mask"].cumsum(-1) - 1).clamp_(min=0)
            new = min(counted.shape[1], positions.shape[1])
            counted[:, counted.shape[1] - new :] = positions[:, positions.shape[1] - new :].to(device)
            kwargs["position_ids"] = counted
        if accepts_argument(self._model, "logits_to_keep"):
            kwargs["logits_to_keep"] = 1
        return kwargs

    def _readable(self, ids: Tensor) -> Tensor:
        """Token ids on the draft's device; ids that only the target's padded vocabulary has become the last."""
        ids = ids.to(self._model.device)
        return ids.clamp(max=self._vocab_size - 1) if self._narrower else ids

    # -- rounds --------------------------------------------------------------------------------------------------------

    def propose(self, request: DraftRequest) -> Proposal:
        runner, sampler = self._runner, request.sampler
        if runner is None:
            return Proposal(request.ids[:, :0], [0] * len(request.limits))
        vocabulary = torch.arange(self._vocab_size, device=request.ids.device) if self._narrower else None
        unread = [own + 1 - held for own, held in zip(self._committed, runner.filled, strict=True)]
        confidence = TokenConfidence(self._threshold)
        for _ in range(request.width):
            logits = self._read(runner, request.ids, unread)
            sampler.sample(logits, vocabulary)
            unread = [1] * len(unread)
            if confidence.falls_short(logits, request.ids.device):
                break
        tokens, token_probs, probs, columns = sampler.drafted()
        lengths = [min(limit, tokens.shape[1]) for limit in request.limits]
        return Proposal(tokens, lengths, token_probs, probs, columns, confidence.scores)

    def _read(self, runner: TargetRunner, ids: Tensor, counts: list[int]) -> Tensor:
        """Run the next `counts[b]` tokens of each row through the draft; logits [B, at most V] behind the last."""
        starts = [held + 1 - self._offset for held in runner.filled]
        outputs, _, _ = runner.block(self._readable(ids), starts, max(counts) - 1)
        runner.commit(counts)
        logits = outputs.logits[..., : self._vocab_size]
        if min(counts) == max(counts):
            return logits[:, -1]
        last = torch.tensor(counts, device=logits.device) - 1
        return logits[torch.arange(len(counts), device=logits.device), last]

    def observe(self, observation: Observation) -> None:
        if self._runner is None:
            return
        self._committed = [own + new for own, new in zip(self._committed, observation.counts, strict=True)]
        # Accepted tokens are in the cache as they were drafted; what follows them there was rejected.
        surplus = [min(own - held, 0) for own, held in zip(self._committed, self._runner.filled, strict=True)]
        if any(surplus):
            self._runner.commit(surplus)

    # -- rows and turns ------------------------------------------------------------------------------------------------

    def select_rows(self, rows: list[int]) -> None:
        if self._runner is None:
            return
        self._committed = [self._committed[row] for row in rows]
        self._runner.select_rows(rows)

    def park(self, rows: dict[int, int]) -> None:
        if self._runner is None:
            return
        filled = self._runner.filled
        self._runner.cache.park({number: (row, filled[row]) for number, row in rows.items()})
        self._parked.update({number: filled[row] for number, row in rows.items()})

    def state(self, numbers: list[int]) -> Any:
        runner = self._runner
        if runner is None:
            return None
        if not self._parked:
            return _Kept(runner.cache, list(runner.filled))
        held = {**self._parked, **dict(zip(numbers, runner.filled, strict=True))}
        whole = _hf.DynamicCache(config=_hf.text_config(self._model))
        longest = max(held.values())
        cache = SpeculativeCache(runner.cache.export(whole, longest, numbers), longest)
        return _Kept(cache, [held[number] for number in range(len(held))])


def _check_vocabulary(model: Any, target: Any) -> None:
    """Refuse a draft of another tokenizer where its configuration shows it; warn where it only may be."""
    own, wanted = (_hf.text_config(one) for one in (model, target))
    if abs(own.vocab_size - wanted.vocab_size) > _PADDING:
        raise ValueError(
            f"the draft model {type(model).__name__} has {own.vocab_size} token ids and the target "
            f"{wanted.vocab_size}: that is another tokenizer (padding explains up to {_PADDING}). Pass a draft with "
            "the target's tokenizer; for two tokenizers use transformers' own assisted generation (leave out "
            "speculative=)."
        )
    for name in ("bos_token_id", "eos_token_id"):
        mine, theirs = (_ids(getattr(config, name, None)) for config in (own, wanted))
        if mine and theirs and not mine & theirs:
            warnings.warn(
                f"the draft model has {name}={sorted(mine)} and the target {sorted(theirs)}. If their tokenizers "
                "differ, next to no drafted token will be accepted (the text stays right): pass a draft with the "
                "target's tokenizer. If they are the same, set the draft's config to the target's id.",
                UserWarning,
                stacklevel=2,
            )


def _ids(value: Any) -> set[int]:
    return set() if value is None else set(value) if isinstance(value, (list, tuple)) else {value}
