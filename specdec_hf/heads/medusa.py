"""The Medusa head: several small networks on the target's last hidden state, each guessing one token further ahead.

From the state at position t, whose own lm_head gives token t + 1, head k (0-based) guesses token t + 2 + k: residual
blocks ``x + silu(linear(x))``, then a projection, its own or the target's lm_head. Which guesses become candidates is
the drafter's matter; the accuracies that decide it are kept in the configuration.

Letters: B rows, K heads, D the target's hidden size, V target and Vd draft vocabulary, R ranks.
Source: Cai et al., "Medusa", arXiv 2401.10774, and the checkpoints published with it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers import initialization as init

from ._borrowed import BorrowedTarget, check_target
from ._config_sources import DamageInWords, shape_of_target
from ._loading import HUB_KEYWORDS, check_digests, check_values, compare_tensors, tensor_shapes, weight_files
from ._medusa_checkpoints import find_original, read_original
from ._vocabulary import DraftVocabulary

__all__ = ["MedusaConfig", "MedusaHead"]

_GUESSED = (0.55, 0.7, 0.35)  # of the first head's best guess; a head more; a rank more


class MedusaConfig(DamageInWords, PretrainedConfig):
    """Configuration of :class:`MedusaHead`.

    Args:
        vocab_size: V, the target's vocabulary.
        draft_vocab_size: Vd, ids the heads can guess; ``None`` means all V.
        hidden_size: D, the target's.
        medusa_num_heads: K.
        medusa_num_layers: residual blocks of each head.
        has_lm_head: each head has a projection of its own, in its file (K * Vd * D numbers); false: the target's
            lm_head is borrowed by ``bind``.
        rank_accuracies: K lists of R shares: how often the token was the head's guess of that rank. ``None``, before
            they were measured, is a guess that falls with head and rank.
        tree_nodes: candidates in a round, if the user says nothing.
        final_logit_softcapping: ``cap * tanh(logits / cap)`` on the logits (Gemma 2); ``None`` is off.
        initializer_range: standard deviation of new projections.
        bos_token_id, eos_token_id, pad_token_id: the target's ids (``pipeline`` compares them).
        speculative_strategy: the strategy that ``generate`` takes for this head.
        target_name_or_path, target_revision: where the target comes from.

    Raises:
        ValueError: a value out of its range; the message names value, rule and fix.
    """

    model_type = "specdec_medusa"

    vocab_size: int = 32_000
    draft_vocab_size: int = None  # type: ignore[assignment]
    hidden_size: int = 4_096
    medusa_num_heads: int = 4
    medusa_num_layers: int = 1
    has_lm_head: bool = False
    rank_accuracies: list[list[float]] | None = None
    tree_nodes: int = 12
    final_logit_softcapping: float | None = None
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    speculative_strategy: str = "medusa"
    target_name_or_path: str | None = None
    target_revision: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        given: Any = self  # as it came from a file or a user: not yet of the declared types
        if given.draft_vocab_size is None:
            given.draft_vocab_size = given.vocab_size
        super().__post_init__(**kwargs)
        limits = {"vocab_size": 2**24, "draft_vocab_size": self.vocab_size, "hidden_size": 65_536,
                  "medusa_num_heads": 64, "medusa_num_layers": 64, "tree_nodes": 1_024}  # fmt: skip
        for name, most in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name}={value!r}: it must be an integer from 1 to {most}; correct it in config.json")
        accuracies = self.rank_accuracies
        if accuracies is not None and not (
            len(accuracies) == self.medusa_num_heads
            and all(row and all(0 <= x <= 1 for x in row) for row in accuracies)
        ):
            raise ValueError(
                f"rank_accuracies={accuracies!r}: it must hold {self.medusa_num_heads} non-empty lists of shares, 0 to "
                "1; measure them again with specdec_hf.drafters.medusa.measure"
            )
        if self.speculative_strategy != "medusa":
            raise ValueError(
                f'speculative_strategy={self.speculative_strategy!r}: it must be "medusa" for this head; leave it out'
            )

    @property
    def has_reduced_vocab(self) -> bool:
        """Whether the heads guess from fewer ids than the target has, through the table ``d2t``."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def accuracies(self) -> list[list[float]]:
        """``rank_accuracies``, or the guess that stands for them."""
        if self.rank_accuracies is not None:
            return self.rank_accuracies
        best, head, rank = _GUESSED
        ranks = min(8, self.draft_vocab_size)
        return [[best * head**k * rank**r for r in range(ranks)] for k in range(self.medusa_num_heads)]

    # What `check_target` and training ask every head: nothing is tapped but the last hidden state.
    @property
    def target_hidden_size(self) -> int:
        """D: the heads have the target's width."""
        return self.hidden_size

    @property
    def num_target_layers(self) -> int | None:
        """Unknown, and of no matter."""
        return None

    @property
    def target_layer_ids(self) -> list[int]:
        """No decoder layer is tapped: the heads read the state behind the final norm."""
        return []

    @classmethod
    def for_target(cls, target_config: PretrainedConfig, **overrides: Any) -> MedusaConfig:
        """A configuration for any decoder-only target; ``overrides`` are fields of this class and win.

        Raises:
            ValueError: the target is an encoder-decoder, or an override is not a field.
        """
        if getattr(target_config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(target_config).__name__} is an encoder-decoder; Medusa heads need a decoder-only target. Use "
                "generate() without speculation."
            )
        known = set(cls.__annotations__)
        if unknown := sorted(set(overrides) - known):
            raise ValueError(f"{unknown[0]!r} is not a field of MedusaConfig; choose from {', '.join(sorted(known))}")
        text = target_config.get_text_config(decoder=True)
        fields = {name: value for name, value in shape_of_target(text).items() if name in known}
        fields["target_name_or_path"] = getattr(target_config, "_name_or_path", None) or None
        fields["target_revision"] = getattr(target_config, "_commit_hash", None)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(text, name, None)
            fields[name] = value if value is not None else getattr(target_config, name, None)
        fields.update(has_lm_head=False, initializer_range=0.02)
        return cls(**{**fields, **overrides})


class ResidualBlock(nn.Module):
    """``x + silu(linear(x))`` on [..., D]; begins as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] to [..., D]."""
        return hidden + nn.functional.silu(self.linear(hidden))


class MedusaHead(DraftVocabulary, PreTrainedModel):
    """K guessing heads for one target.

    ``from_pretrained`` reads this package's directories and the original Medusa's: a ``config.json`` with
    ``medusa_num_heads`` beside ``medusa_lm_head.safetensors``, or a pickle of that name, which is read with
    ``weights_only=True`` and a warning.
    """

    config_class = MedusaConfig
    base_model_prefix = "model"
    main_input_name = "hidden_states"

    config: MedusaConfig
    d2t: torch.Tensor

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        width, heads = config.hidden_size, range(config.medusa_num_heads)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width) for _ in range(config.medusa_num_layers))) for _ in heads
        )
        self.lm_heads = (
            nn.ModuleList(nn.Linear(width, config.draft_vocab_size, bias=False) for _ in heads)
            if config.has_lm_head
            else None
        )
        if config.has_reduced_vocab:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self._borrowed: BorrowedTarget | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ResidualBlock):
            init.zeros_(module.linear.weight)
            init.zeros_(module.linear.bias)
        elif module is self and self.config.has_reduced_vocab:
            init.zeros_(self.d2t)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_borrowed": None}  # copies and pickles are unbound: a weak reference cannot travel

    @property
    def generation_config(self) -> Any:
        """Not there: a head only drafts. A target without the speculative generate() asks for it."""
        raise ValueError(
            "MedusaHead was given as assistant_model to a model without speculation. Call "
            "specdec_hf.enable_speculation(model) once and repeat."
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """As :meth:`transformers.PreTrainedModel.from_pretrained`, for this layout or the original Medusa's.

        Raises:
            ValueError: not a Medusa head, or tensors that are not those of ``config.json``.
            OSError: nothing there, or not reachable.
        """
        if pretrained_model_name_or_path is None or kwargs.get("state_dict") is not None:
            return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        source = os.fspath(pretrained_model_name_or_path)
        hub = {name: kwargs[name] for name in HUB_KEYWORDS if kwargs.get(name) is not None}
        if (file := find_original(source, hub)) is not None:
            fields, tensors = read_original(source, file, hub)
            config = MedusaConfig(**fields)
            with torch.device("meta"):
                expected = _shapes(cls(config))
            compare_tensors(expected, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, file)
            head = cls(config).to(kwargs.get("dtype") or kwargs.get("torch_dtype") or torch.float32)
            head.load_state_dict(tensors)
        else:
            config = kwargs.get("config") or MedusaConfig.from_pretrained(source, **hub)
            with torch.device("meta"):
                expected = _shapes(cls(config))
            files = weight_files(source, kwargs.get("variant"), hub)
            check_digests(files)
            compare_tensors(expected, tensor_shapes(files), source)
            head = super().from_pretrained(source, *model_args, **{**kwargs, "use_safetensors": True})
        loaded = head[0] if isinstance(head, tuple) else head
        check_values(loaded, source)
        if loaded.config.has_reduced_vocab and loaded.d2t.device.type != "meta":
            loaded._check_draft_ids(loaded.draft_token_ids())
        return head.eval() if isinstance(head, nn.Module) else head

    def bind(self, target: nn.Module) -> MedusaHead:
        """Join the head to its target: check that they belong together, and borrow lm_head if the head has none.

        Raises:
            TypeError: not a model. ValueError: width or vocabulary do not fit; says what to use.
        """
        if self._borrowed is None or not self._borrowed.is_target(target):
            check_target(self.config, target)
            self._borrowed = BorrowedTarget(target)
        return self

    def forward(self, hidden_states: torch.Tensor, head: int | None = None) -> torch.Tensor:
        """Logits of the guesses.

        Args:
            hidden_states: [..., D], the target's last hidden states (behind its final norm).
            head: of one head only.

        Returns:
            [..., K, Vd] (without K for one head), in the dtype of the projection.
        """
        if head is not None:
            return self.project(self.blocks[head](hidden_states), head)
        states = [block(hidden_states) for block in self.blocks]
        if self.lm_heads is None:
            return self.project(torch.stack(states, dim=-2))
        return torch.stack([self.project(state, k) for k, state in enumerate(states)], dim=-2)

    def project(self, hidden: torch.Tensor, head: int = 0) -> torch.Tensor:
        """Logits [..., Vd] of one head's last states [..., D]; all heads share a borrowed lm_head."""
        if self.lm_heads is not None:
            logits = self.lm_heads[head](hidden)
        elif self._borrowed is None:
            raise ValueError("these heads have no lm_head of their own; call head.bind(target) first")
        else:
            d2t = self.d2t if self.config.has_reduced_vocab else None
            logits = self._borrowed.logits(hidden, d2t).to(hidden.device)[..., : self.config.draft_vocab_size]
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _shapes(head: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}


AutoConfig.register(MedusaConfig.model_type, MedusaConfig, exist_ok=True)
AutoModel.register(MedusaConfig, MedusaHead, exist_ok=True)
