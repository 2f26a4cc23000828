"""Recurrent layers (linear attention, Mamba, short convolutions) that a speculative round must be able to take back.

Such a layer keeps one state for all tokens that it has read, so nothing can be cut off it. Before a block the states
are copied; if not all of the block is committed, they are put back and the layer reads the committed tokens again. Only
the mixer itself reads again, from the inputs that it had in the block (in a causal model the tokens behind them do not
change those): no attention, no feed-forward layer, no vocabulary projection. Knows nothing of decoding.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from torch import Tensor, nn

from ._hf import LinearAttentionCacheLayerMixin, LinearAttentionLayer

_STATES = ("conv_states", "recurrent_states")
_FIELDS = (
    *_STATES,
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


def is_recurrent(layer: Any) -> bool:
    """Whether a cache layer holds a state that stands for all tokens (it may hold keys and values beside it)."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def copy_states(source: Any, destination: Any) -> None:
    """Give `destination` copies of the recurrent states that `source` holds; both are cache layers of transformers."""
    for name in _FIELDS:
        held = getattr(source, name)
        setattr(destination, name, {i: v.clone() if isinstance(v, Tensor) else v for i, v in held.items()})
    destination.device, destination.dtype = source.device, source.dtype


def new_layer(source: Any) -> LinearAttentionLayer:
    """A layer without keys and values that begins with the states of `source`."""
    layer = LinearAttentionLayer(number_of_states=source.number_of_states)
    copy_states(source, layer)
    return layer


def saved_states(layer: Any) -> list[dict[int, Tensor | None]]:
    """Copies of a layer's states, which a forward may change in place."""
    return [{i: None if s is None else s.clone() for i, s in getattr(layer, name).items()} for name in _STATES]


def put_back(layer: Any, states: list[dict[int, Tensor | None]]) -> None:
    """Undo what a forward did to a layer since `saved_states`."""
    for name, held in zip(_STATES, states, strict=True):
        setattr(layer, name, held)


def select_rows(layer: Any, index: Tensor) -> None:
    """Keep the rows `index` (LongTensor) of a layer's states, in that order."""
    for name in _STATES:
        held = getattr(layer, name)
        rows = {i: None if s is None else s.index_select(0, index.to(s.device)) for i, s in held.items()}
        setattr(layer, name, rows)


class MixerReplay:
    """Lets the mixers of recurrent layers read the beginning of their latest inputs again. A context manager.

    Which submodule owns a layer's state differs between families, so it is observed: of the modules with that layer's
    `layer_idx`, the one that is running when the cache is updated.

    Args:
        layers: the target's decoder layers.
        indices: those that keep a recurrent state.
    """

    def __init__(self, layers: nn.ModuleList, indices: list[int]) -> None:
        self._layers, self._indices = layers, indices
        self._handles: list[Any] = []
        self._running: dict[int, list[nn.Module]] = defaultdict(list)
        self._inputs: dict[nn.Module, tuple[Any, Any]] = {}
        self._owners: dict[int, nn.Module] = {}
        self._replaying = False
        self._thread = threading.get_ident()  # calls in several threads may share a model

    def __enter__(self) -> MixerReplay:
        for index in self._indices:
            for module in self._layers[index].modules():
                if getattr(module, "layer_idx", None) == index and module is not self._layers[index]:
                    self._handles.append(module.register_forward_pre_hook(self._before(index), with_kwargs=True))
                    self._handles.append(module.register_forward_hook(self._after(index), always_call=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._inputs.clear()

    def _before(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if threading.get_ident() != self._thread:
                return
            self._running[index].append(module)
            if not self._replaying:
                self._inputs[module] = args, kwargs

        return hook

    def _after(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == self._thread:
                self._running[index].pop()

        return hook

    def note_update(self, index: int) -> None:
        """Called when the state of layer `index` changes: the innermost running module is its owner."""
        if self._running[index]:
            self._owners[index] = self._running[index][-1]

    @property
    def is_complete(self) -> bool:
        """Whether the owner of each recurrent layer's state is known."""
        return len(self._owners) == len(self._indices)

    def run(self, width: int, count: int) -> None:
        """Let each owner read the first `count` of the `width` tokens of its latest input, which holds the cache."""
        self._replaying = True
        try:
            for index in self._indices:
                owner = self._owners[index]
                args, kwargs = self._inputs[owner]
                owner(*_first(args, width, count), **_first(kwargs, width, count))
        finally:
            self._replaying = False


def _first(value: Any, width: int, count: int) -> Any:
    """What is there per token in a mixer's arguments, for the first `count` of `width` tokens."""
    if isinstance(value, Tensor):
        axis = min(value.dim(), 2) - 1  # [S] or [B, S, ...]
        return value.narrow(axis, 0, count) if axis >= 0 and value.shape[axis] == width else value
    if isinstance(value, (list, tuple)):
        return type(value)(_first(entry, width, count) for entry in value)
    if type(value) is dict:
        return {name: _first(entry, width, count) for name, entry in value.items()}
    return value
