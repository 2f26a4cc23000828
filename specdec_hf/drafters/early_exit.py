"""The target's own first layers draft token by token; verification runs the other layers only.

What the first layers compute for a drafted token (its keys and values in the target's cache, its state behind them) is
what verification needs of them, so nothing is computed twice. Source: LayerSkip (Elhoushi et al. 2024, arXiv
2404.16710), "self-speculative decoding". The drafter has no state of its own: all of it is in the target's cache.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from .._hf import text_config
from ..heads.early_exit import EarlyExitHead
from ..options import SpeculativeConfig
from ..policies import fitting_tokens
from ..proposal import Proposal
from ..targets import decoder_layers, shares_states_between_layers
from .base import Drafter, DraftRequest, Observation, Prompt, TokenConfidence

_MOST = 32
#: Without a head and without `assistant_early_exit`, this share of the layers drafts.
_SHARE = 3


class EarlyExitDrafter(Drafter):
    """Drafts with the target's first layers and an `EarlyExitHead`, or the target's own final norm and lm_head.

    Args:
        head: the head, bound to the target; None = the target's own.
        layers: decoder layers that draft, N.
        share: of the target's layers, in (0, 1): the price of a drafted token.
        target_vocab_size: V, the width of the target's logits.
        config: `num_assistant_tokens`, `max_assistant_tokens` and the confidence threshold are read. The confidence of
            a token is the probability of the draft's most likely token there, before logits processors.
    """

    name = "early_exit"
    target_layer_ids: list[int] = []
    early_layers: int

    def __init__(
        self,
        head: EarlyExitHead | None,
        layers: int,
        share: float,
        target_vocab_size: int,
        config: SpeculativeConfig,
    ) -> None:
        self.default_tokens = fitting_tokens(share)
        self._head, self.early_layers = head, layers
        self._threshold = config.confidence_threshold
        self.max_tokens = max(_MOST, config.num_assistant_tokens or 0, config.max_assistant_tokens or 0)
        narrower = head is not None and head.config.draft_vocab_size != target_vocab_size
        self._vocabulary = head.draft_token_ids() if head is not None and narrower else None
        self._latest_logits: Tensor | None = None  # for `complaint`

    @property
    def identity(self) -> tuple[Any, ...]:
        return (self.name, id(self._head), self.early_layers)

    @classmethod
    def create(cls, head: Any, target: Any, config: SpeculativeConfig) -> EarlyExitDrafter:
        if head is not None and not isinstance(head, EarlyExitHead):
            raise TypeError(
                f"speculative='early_exit' takes an EarlyExitHead as assistant_model, or none, not "
                f"{type(head).__name__}. Load one with EarlyExitHead.from_pretrained(...)."
            )
        if shares_states_between_layers(target):
            raise ValueError(
                f"{type(target).__name__} cannot be left early: its later layers use keys and values of earlier ones "
                "(num_kv_shared_layers). Use another strategy, e.g. speculative='prompt_lookup'."
            )
        count = len(decoder_layers(target))
        if head is not None:
            layers = head.bind(target).exit_of(config.assistant_early_exit)
        else:
            layers = config.assistant_early_exit or max(count // _SHARE, 1)
            if layers >= count:
                raise ValueError(
                    f"assistant_early_exit={layers}: it is the number of decoder layers that draft, and "
                    f"{type(target).__name__} has {count}, so it must be 1 to {count - 1}. Choose about a third."
                )
            _warn_of_no_head(target, layers)
        return cls(head, layers, layers / count, text_config(target).vocab_size, config)

    def start(self, prompt: Prompt) -> None:
        """Nothing: the prompt is in the target's cache."""

    def propose(self, request: DraftRequest) -> Proposal:
        early, sampler, head = request.early, request.sampler, self._head
        assert early is not None
        early.begin(request.ids, request.lengths)
        confidence = TokenConfidence(self._threshold)
        for _ in range(request.width):
            states, logits = early.step(logits=head is None)
            if head is not None:
                logits = head(states, self.early_layers)
            assert logits is not None
            sampler.sample(logits, self._vocabulary)
            if confidence.falls_short(logits, request.ids.device):
                break
        self._latest_logits = logits
        tokens, token_probs, probs, columns = sampler.drafted()
        lengths = [min(limit, tokens.shape[1]) for limit in request.limits]
        return Proposal(tokens, lengths, token_probs, probs, columns, confidence.scores)

    def observe(self, observation: Observation) -> None:
        """Nothing: what was committed is in the target's cache."""

    def select_rows(self, rows: list[int]) -> None:
        """Nothing is held per row."""

    def complaint(self) -> str | None:
        if self._latest_logits is None or not bool(self._latest_logits.isnan().any()):
            return None
        what = "the target's own lm_head there" if self._head is None else type(self._head).__name__
        return (
            f"after {self.early_layers} layers {what} returns NaN, so its drafted tokens are of no use. The text stays "
            "right but comes no faster: check the head's weights, or load it in float32 or bfloat16."
        )


_warned: set[tuple[str, int]] = set()


def _warn_of_no_head(target: Any, layers: int) -> None:
    """Once for a kind of target and an exit: a target that was trained to be left early needs no head."""
    key = (str(text_config(target)._name_or_path or type(target).__name__), layers)
    if key in _warned:
        return
    _warned.add(key)
    warnings.warn(
        f"speculative='early_exit' without a head: after {layers} layers the draft is read by the target's own final "
        "norm and lm_head. Only a target that was trained for it (LayerSkip) gains from that; for others pass a "
        "trained EarlyExitHead as assistant_model.",
        UserWarning,
        stacklevel=2,
    )
