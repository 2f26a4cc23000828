"""What differs between target families: where the layers are, which masks they take, how a forward is called.

To add a family: nothing, if its decoder layers stand in one `ModuleList` and it takes 4-D masks; else one row in a
table here. No modelling code is copied.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn

from ._hf import attention_implementation, text_config

#: Families whose attention needs the 2-D mask itself (ALiBi biases are made from it), so rows must stay level.
NEEDS_2D_MASK = frozenset({"bloom", "mpt", "falcon"})
_DENSE_ATTENTION = frozenset({"sdpa", "eager"})
_MASKED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
#: Per-token inputs that text continues with their last value (`token_type_ids`) or with zeros.
_TOKEN_TYPES = {"token_type_ids": True, "mm_token_type_ids": False, "moe_mm_token_type_ids": False}


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal LM, in order.

    Raises:
        ValueError: no `ModuleList` as long as the configuration's `num_hidden_layers` is found.
    """
    count = text_config(model).num_hidden_layers
    decoder: Any = getattr(model, "get_decoder", lambda: model)()
    for root in (decoder, model):
        for module in root.modules() if isinstance(root, nn.Module) else ():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
    raise ValueError(
        f"{type(model).__name__} has no ModuleList of {count} decoder layers (config.num_hidden_layers), so its hidden "
        "states cannot be tapped. Draft with a strategy that needs no taps, or report the model family."
    )


def shares_states_between_layers(model: Any) -> bool:
    """Whether later layers use what earlier ones computed beyond their output (keys and values: Gemma 3n, Gemma 4)."""
    return bool(getattr(text_config(model), "num_kv_shared_layers", 0))


def with_modules(model: Any, replacements: dict[nn.Module, nn.Module]) -> Any:
    """A model that differs from `model` in some modules; all others are shared, and `model` itself stays as it is.

    Modules above a replaced one are shallow twins: same class, same attributes, another table of children. So calls of
    `model` in other threads see nothing.

    Raises:
        ValueError: a module above has had its forward replaced (by its bound method, a twin would run the original).
    """
    known: dict[nn.Module, nn.Module] = dict(replacements)

    def rebuilt(module: nn.Module) -> nn.Module:
        if module not in known:
            children = {name: child and rebuilt(child) for name, child in _children(module)}
            same = all(children[name] is child for name, child in _children(module))
            known[module] = module if same else _twin(module, children)
        return known[module]

    return rebuilt(model)


def _children(module: nn.Module) -> Any:
    return module._modules.items()


def _twin(module: nn.Module, children: dict[str, Any]) -> nn.Module:
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, _modules=children, _compiled_call_impl=None)
    if (own := twin.__dict__.pop("forward", None)) is not None:
        # accelerate's hooks and torch.compile leave the class's own forward behind a wrapper: the twin goes without.
        for wrapped in (getattr(module, "_old_forward", None), getattr(own, "_torchdynamo_orig_callable", None)):
            if getattr(wrapped, "__func__", None) is type(module).forward:
                return twin
        raise ValueError(
            f"{type(module).__name__}.forward has been replaced on this model, so its first layers cannot be run "
            "alone: speculative='early_exit' needs the class's own. Use another strategy."
        )
    return twin


def takes_ragged_masks(model: Any) -> bool:
    """Whether rows of different lengths can share a forward through a dense 4-D mask per layer type."""
    config = text_config(model)
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        attention_implementation(model) in _DENSE_ATTENTION
        and config.model_type not in NEEDS_2D_MASK
        and not getattr(config, "alibi", False)
        and layer_types <= _MASKED_LAYER_TYPES
    )


def mask_windows(model: Any) -> dict[bool, int | None]:
    """The kinds of attention that the model's layers have: by `is_sliding`, the window in slots (None = full)."""
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    # as transformers' DynamicCache reads a configuration: without layer types, a window means all layers
    kinds = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()] or [window is not None]
    return {is_sliding: window if is_sliding else None for is_sliding in kinds}


def dense_mask(model: Any, masks: dict[bool, Tensor]) -> Any:
    """Boolean masks by `is_sliding` as the model's forward wants them: float for eager, a dict for mixed layers."""
    if attention_implementation(model) == "eager":
        lowest = torch.finfo(model.dtype).min
        masks = {
            sliding: torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill_(~mask, lowest)
            for sliding, mask in masks.items()
        }
    if len(masks) == 1:
        return next(iter(masks.values()))
    return {"sliding_attention" if sliding else "full_attention": mask for sliding, mask in masks.items()}


def finished_logits(model: Any, logits: Tensor) -> Tensor:
    """What the model's forward makes of its lm_head's result [..., V]: scaled and soft-capped by its configuration.

    Gemma 2's `final_logit_softcapping` (`cap * tanh(logits / cap)`), Cohere's `logit_scale` (a factor), Granite's
    `logits_scaling` (a divisor). Scales of embeddings need nothing here: heads call the target's embedding module,
    and Gemma's scales inside of it.
    """
    config = text_config(model)
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * factor
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def norm_scale(norm: Any) -> Tensor | None:
    """The factors [Dt] that a norm multiplies with, or `None` for what is no norm. Gemma's store them less 1."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or isinstance(norm, nn.LayerNorm):
        return weight if isinstance(weight, Tensor) else None
    return norm(torch.ones_like(weight))  # the root mean square of ones is 1


def is_compiled(model: nn.Module) -> bool:
    """Whether some module's call was compiled: hooks added afterwards would not be seen there."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


class TapRecorder:
    """Collects the hidden states after chosen decoder layers while it is open (a context manager).

    Forward hooks on those layers alone: no other layer's states are kept, in any transformers version, and a prefill in
    chunks is covered. A compiled model would not run hooks that came after its compilation, so there the forward is
    asked for its hidden states instead (`forward_kwargs`).

    Args:
        model: the target.
        layer_ids: 0-based decoder layers; -1 = the embedding output that enters layer 0; the number of layers = the
            decoder's last hidden state, behind its final norm, which is what lm_head reads.
    """

    def __init__(self, model: nn.Module, layer_ids: list[int]) -> None:
        self._model, self._ids = model, list(layer_ids)
        self._states: dict[int, list[Tensor]] = {i: [] for i in self._ids}
        self._handles: list[Any] = []
        self._thread = threading.get_ident()  # calls in several threads may share a model
        self._by_output = bool(self._ids) and is_compiled(model)

    @property
    def prefill_kwargs(self) -> dict[str, Any]:
        """What the prefill must be called with on top.

        Layers that share an earlier layer's keys (Gemma 4 E2B) run in a prefill only for the positions whose logits are
        wanted, where their number is an integer. A tap there needs all positions, so it is asked for by index.
        """
        shared = getattr(text_config(self._model), "num_kv_shared_layers", 0) or 0
        first = text_config(self._model).num_hidden_layers - shared
        if not shared or max(self._ids, default=-1) < first or not accepts_argument(self._model, "logits_to_keep"):
            return self.forward_kwargs
        return {**self.forward_kwargs, "logits_to_keep": torch.tensor([-1])}

    @property
    def forward_kwargs(self) -> dict[str, Any]:
        """What the target's forward must be called with on top."""
        return {"output_hidden_states": True} if self._by_output else {}

    def __enter__(self) -> TapRecorder:
        if self._ids and not self._by_output:
            layers = decoder_layers(self._model)
            for i in self._ids:
                if i == len(layers):
                    decoder: Any = getattr(self._model, "get_decoder", lambda: self._model)()
                    self._handles.append(decoder.register_forward_hook(self._after(i)))
                elif i < 0:
                    self._handles.append(layers[0].register_forward_pre_hook(self._before(i), with_kwargs=True))
                else:
                    self._handles.append(layers[i].register_forward_hook(self._after(i)))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _after(self, i: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() != self._thread:
                return  # another call of the same model
            states = getattr(output, "last_hidden_state", output)  # of a whole decoder
            self._states[i].append(states[0] if isinstance(states, tuple) else states)

        return hook

    def _before(self, i: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if threading.get_ident() != self._thread:
                return
            self._states[i].append(args[0] if args else kwargs["hidden_states"])

        return hook

    def collect(self, outputs: Any) -> list[Tensor]:
        """The states [B, T, Dt] of each tap since the last call, in the order of the ids; empty without taps."""
        if self._by_output:
            return [outputs.hidden_states[min(i + 1, len(outputs.hidden_states) - 1)] for i in self._ids]
        taken = []
        for i in self._ids:
            states = self._states[i]
            if not states:
                raise RuntimeError(
                    f"the hook on decoder layer {i} of {type(self._model).__name__} did not run during the forward. "
                    "If the model was compiled or replicated, compile it with model.compile() before generate()."
                )
            taken.append(states[0] if len(states) == 1 else torch.cat(states, dim=1))
            self._states[i] = []
        return taken


def token_types(model_kwargs: dict[str, Any], added: int) -> dict[str, Tensor]:
    """Per-token type inputs for `added` text tokens that follow the prompt, where the model takes such inputs."""
    result = {}
    for name, repeats_last in _TOKEN_TYPES.items():
        if (types := model_kwargs.get(name)) is not None:
            last = types[:, -1:] if repeats_last else torch.zeros_like(types[:, -1:])
            result[name] = last.expand(-1, added)
    return result


def accepts_argument(model: Any, name: str) -> bool:
    """Whether the model's forward has a parameter of that name."""
    return name in inspect.signature(model.forward).parameters
