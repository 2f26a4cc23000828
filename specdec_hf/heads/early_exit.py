"""The early-exit head: what the target's first layers know, read by a small trained layer and the target's lm_head.

One layer for each exit: ``h' = norm_out(h + down(act(gate(n)) * up(n)))`` with ``n = norm(h)``, then the borrowed
lm_head. A target that was not trained to be left early says little there without it. Source of the idea: LayerSkip
(Elhoushi et al. 2024, arXiv 2404.16710), which trains the target itself; here the target stays as it is.

Letters: D the target's hidden size, L its layers, V its vocabulary, Vd ids that the head can propose.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN

from ._borrowed import BorrowedTarget, check_target, text_config
from ._config_sources import DamageInWords, shape_of_target
from ._layers import DSparkRMSNorm
from ._loading import HUB_KEYWORDS, check_digests, check_values, compare_tensors, tensor_shapes, weight_files
from ._vocabulary import DraftVocabulary

__all__ = ["EarlyExitConfig", "EarlyExitHead"]

_INTEGERS = {
    "vocab_size": 16_777_216,
    "draft_vocab_size": 16_777_216,
    "hidden_size": 65_536,
    "adapter_size": 1_048_576,
    "num_target_layers": 4_096,
}


class EarlyExitConfig(DamageInWords, PretrainedConfig):
    """Configuration of an :class:`EarlyExitHead`.

    Args:
        vocab_size: V. draft_vocab_size: Vd; ``None`` means V. A smaller one makes drafting cheaper (the lm_head is a
            good part of a few layers' cost) and comes with a table ``d2t``.
        hidden_size: D; the head has the target's width.
        num_target_layers: L.
        exit_layers: after how many decoder layers the target may be left, each 1 to L - 1, ascending; one trained layer
            for each. Counted as transformers' ``assistant_early_exit`` counts. ``None``: a third of L.
        adapter_size: inner width of an exit's layer; ``None`` means D.
        hidden_act, rms_norm_eps, initializer_range: as in Llama.
        final_logit_softcapping: ``cap * tanh(logits / cap)`` on the logits (Gemma 2); ``None`` is off.
        bos_token_id, eos_token_id, pad_token_id: the target's ids.
        speculative_strategy: the strategy that ``generate`` takes for this head.
        target_name_or_path, target_revision: where the target comes from; ``bind`` warns of another one on the Hub.

    Raises:
        ValueError: a value out of its range or of a wrong type; the message names value, rule and fix.
    """

    model_type = "early_exit"

    vocab_size: int = 32_000
    draft_vocab_size: int = None  # type: ignore[assignment]
    hidden_size: int = 512
    num_target_layers: int = 28
    exit_layers: list[int] = None  # type: ignore[assignment]
    adapter_size: int = None  # type: ignore[assignment]
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    final_logit_softcapping: float | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    speculative_strategy: str = "early_exit"
    target_name_or_path: str | None = None
    target_revision: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        given: Any = self
        if given.draft_vocab_size is None:
            given.draft_vocab_size = given.vocab_size
        if given.adapter_size is None:
            given.adapter_size = given.hidden_size
        for name, high in _INTEGERS.items():
            value = getattr(given, name)
            if not _is_int(value) or not 1 <= value <= high:
                raise ValueError(f"{name}={value!r}: it must be an integer from 1 to {high}; correct it")
        given.exit_layers = [max(given.num_target_layers // 3, 1)] if given.exit_layers is None else given.exit_layers
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        exits, last = self.exit_layers, self.num_target_layers - 1
        right = isinstance(exits, list) and exits and all(_is_int(exit) and 1 <= exit <= last for exit in exits)
        if not right or sorted(set(exits)) != exits:
            raise ValueError(
                f"exit_layers={exits!r}: it must be a list of ascending integers from 1 to {last}, numbers of the "
                f"target's {self.num_target_layers} layers that are run before an exit; name such, e.g. [1]"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size}: it must not be larger than vocab_size={self.vocab_size}; "
                "leave it out to propose from the whole vocabulary"
            )
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r}: it must be an activation of transformers, e.g. 'silu'")
        if self.speculative_strategy != "early_exit":
            raise ValueError(
                f'speculative_strategy={self.speculative_strategy!r}: it must be "early_exit" for this head; leave it '
                "out"
            )

    @property
    def target_hidden_size(self) -> int:
        """D: the states that the head reads are the target's."""
        return self.hidden_size

    @property
    def target_layer_ids(self) -> list[int]:
        """0-based decoder layers whose outputs the exits read, in the order of ``exit_layers``."""
        return [exit - 1 for exit in self.exit_layers]

    @property
    def has_reduced_vocab(self) -> bool:
        """Whether the head proposes from fewer ids than the target has, through the table ``d2t``."""
        return self.draft_vocab_size != self.vocab_size

    @classmethod
    def for_target(cls, target_config: PretrainedConfig, **overrides: Any) -> EarlyExitConfig:
        """A head's configuration for any decoder-only target.

        Args:
            target_config: the target's configuration.
            **overrides: fields of this class.

        Raises:
            ValueError: an encoder-decoder, or an override that is not a field.
        """
        if getattr(target_config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(target_config).__name__} is an encoder-decoder; an early exit needs a decoder-only target. Use "
                "generate() without speculation."
            )
        names = [name for name in cls.__annotations__ if name[0] != "_"]
        if unknown := sorted(set(overrides) - set(names)):
            raise ValueError(f"{unknown[0]!r} is not a field of {cls.__name__}; choose from {', '.join(names)}")
        text = text_config(target_config)
        fields = {name: value for name, value in shape_of_target(text).items() if name in names}
        fields["hidden_act"] = "silu"
        fields["target_name_or_path"] = getattr(target_config, "_name_or_path", None) or None
        fields["target_revision"] = getattr(target_config, "_commit_hash", None)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(text, name, None)
            fields[name] = value if value is not None else getattr(target_config, name, None)
        return cls(**{**fields, **overrides})


class EarlyExitLayer(nn.Module):
    """The trained part of one exit: hidden states [..., D] after some layer to normed ones that the lm_head reads."""

    def __init__(self, config: EarlyExitConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.adapter_size
        self.norm = DSparkRMSNorm(width, config.rms_norm_eps)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.out_norm = DSparkRMSNorm(width, config.rms_norm_eps)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        return self.out_norm(hidden + self.down_proj(self.act(self.gate_proj(normed)) * self.up_proj(normed)))


class EarlyExitHead(DraftVocabulary, PreTrainedModel):
    """Reads the states after the target's layers ``exit_layers``; see the module's docstring."""

    config_class = EarlyExitConfig
    base_model_prefix = "model"
    main_input_name = "hidden_states"
    _no_split_modules = ["EarlyExitLayer"]

    config: EarlyExitConfig

    def __init__(self, config: EarlyExitConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([EarlyExitLayer(config) for _ in config.exit_layers])
        if config.has_reduced_vocab:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self._borrowed: BorrowedTarget | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, EarlyExitLayer):
            init.zeros_(module.down_proj.weight)  # an untrained exit is a norm and the lm_head, not noise
        elif module is self and self.config.has_reduced_vocab:
            init.zeros_(self.d2t)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_borrowed": None}  # copies and pickles are unbound: a weak reference cannot travel

    @property
    def generation_config(self) -> Any:
        """Not there: a head only drafts. transformers' own assisted generation asks for it, which only happens when a
        target without the speculative generate() was given this head.
        """
        raise ValueError(
            f"{type(self).__name__} was given as assistant_model to a model without speculation. Call "
            "specdec_hf.enable_speculation(model) once and repeat, or pass "
            "custom_generate=specdec_hf.speculative_decoding(head) instead of assistant_model=head."
        )

    def get_input_embeddings(self) -> None:
        """``None``: the target's first layers read the tokens."""
        return None

    def get_output_embeddings(self) -> None:
        """``None``: the lm_head is the target's."""
        return None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """As :meth:`transformers.PreTrainedModel.from_pretrained`; safetensors only, with exactly the tensors that
        ``config.json`` describes.

        Raises:
            ValueError: a pickle, a truncated file, or other tensors. OSError: nothing there, or not reachable.
        """
        source = os.fspath(pretrained_model_name_or_path)
        hub = {name: kwargs[name] for name in HUB_KEYWORDS if kwargs.get(name) is not None}
        config = kwargs.pop("config", None)
        config = copy.deepcopy(config) if config is not None else EarlyExitConfig.from_pretrained(source, **hub)
        with torch.device("meta"):
            expected = {name: tuple(tensor.shape) for name, tensor in cls(config).state_dict().items()}
        files = weight_files(source, kwargs.get("variant"), hub)
        check_digests(files)
        compare_tensors(expected, tensor_shapes(files), source)
        kwargs["use_safetensors"] = True
        loaded = super().from_pretrained(source, *model_args, config=config, **kwargs)
        head = loaded[0] if isinstance(loaded, tuple) else loaded
        check_values(head, source)
        if config.has_reduced_vocab and head.d2t.device.type != "meta":
            head._check_draft_ids(head.draft_token_ids())
        return loaded

    def bind(self, target: nn.Module) -> EarlyExitHead:
        """Join the head to its target: check that they belong together, and borrow the lm_head (held weakly).

        Raises:
            TypeError: not a model. ValueError: sizes, layers or vocabulary do not fit; says what to use.
        """
        if self._borrowed is None or not self._borrowed.is_target(target):
            check_target(self.config, target)
            self._borrowed = BorrowedTarget(target)
        return self

    def exit_of(self, exit_layer: int | None) -> int:
        """The exit to use: ``exit_layer`` if this head was trained for it; ``None`` is the head's first.

        Raises:
            ValueError: not one of ``exit_layers``.
        """
        exits = self.config.exit_layers
        if exit_layer is not None and exit_layer not in exits:
            raise ValueError(
                f"assistant_early_exit={exit_layer}: this head has exits after {exits} layers; name one of them, or "
                "leave it out for the first"
            )
        return exits[0] if exit_layer is None else exit_layer

    def features(self, hidden_states: torch.Tensor, exit_layer: int) -> torch.Tensor:
        """What the lm_head reads, [..., D], of the target's states after ``exit_layer`` layers [..., D]."""
        layer: Any = self.layers[self.config.exit_layers.index(exit_layer)]
        weight = layer.norm.weight
        return layer(hidden_states.to(weight.device, weight.dtype))

    def project_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., Vd] of :meth:`features`."""
        if self._borrowed is None:
            raise ValueError("this head has no lm_head of its own; call head.bind(target) first to borrow the target's")
        logits = self._borrowed.logits(hidden, self.d2t if self.config.has_reduced_vocab else None).to(hidden.device)
        logits, cap = logits[..., : self.config.draft_vocab_size], self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def forward(self, hidden_states: torch.Tensor, exit_layer: int | None = None) -> torch.Tensor:
        """Draft logits [..., Vd] of the target's states [..., D] after ``exit_layer`` layers (default: the first exit).

        Raises:
            ValueError: an exit that the head has not, or a head that was not bound.
        """
        return self.project_logits(self.features(hidden_states, self.exit_of(exit_layer)))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


AutoConfig.register(EarlyExitConfig.model_type, EarlyExitConfig, exist_ok=True)
AutoModel.register(EarlyExitConfig, EarlyExitHead, exist_ok=True)
