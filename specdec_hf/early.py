"""The target's first layers as a model to draft with (early exit). Knows `forward`, and nothing of drafting.

The layers before the exit run once: while drafting, on the very cache that verification goes on with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .targets import decoder_layers, with_modules

if TYPE_CHECKING:
    from .forward import TargetRunner


class EarlyLayers:
    """The target's first layers as a model to draft with, on the very cache that verification uses.

    In a round, `begin`, then one `step` for each token that is read: keys and values stay in the cache and the states
    behind the last of these layers are kept, so that `TargetRunner.block` runs the other layers only. What it does not
    use (a round without a draft, `reuse` False, targets with recurrent layers) is read again, into the same slots.

    Args:
        runner: the target's, after its prefill.
        layers: how many, 1 to L - 1.
        reuse: False lets verification run all layers, for calls that want every layer's output.
    """

    def __init__(self, runner: TargetRunner, layers: int, reuse: bool) -> None:
        # A recurrent state cannot be cut, so what was read ahead is taken back and read again with the block.
        self._takes_back = bool(runner.cache.recurrent)
        self._runner, self._layers, self._reuse = runner, layers, reuse and not self._takes_back
        stack = decoder_layers(runner.model)
        self._last = _Kept(stack[layers - 1])
        first = nn.ModuleList([*list(stack)[: layers - 1], self._last])
        given = [_Given(layer, self._last) for layer in list(stack)[:layers]]
        self._with_logits = with_modules(runner.model, {stack: first})
        projection = runner.model.get_output_embeddings()
        self._without = with_modules(runner.model, {stack: first, projection: nn.Identity()})
        self._rest = with_modules(runner.model, {stack: nn.ModuleList([*given, *list(stack)[layers:]])})
        self._ahead: TargetRunner | None = None
        self._states: list[Tensor] = []
        self._ids: Tensor
        self._lengths: list[int] = []

    def begin(self, ids: Tensor, lengths: list[int]) -> None:
        """Start a round: `ids` [B, capacity] are read from each row's anchor `ids[b, lengths[b] - 1]` on."""
        if self._takes_back:
            self._runner.cache.save_states()
        cache = self._runner.cache.lend(self._layers, min(self._runner.filled))
        self._ahead = self._runner.ahead(self._without, cache)
        self._ids, self._lengths, self._states = ids, list(lengths), []

    def step(self, logits: bool = False) -> tuple[Tensor, Tensor | None]:
        """Read the next token of each row.

        Args:
            logits: whether to run the target's own final norm and lm_head on it.

        Returns:
            The states [B, D] behind the last of these layers, and logits [B, V] or None.
        """
        assert self._ahead is not None
        self._ahead.model = self._with_logits if logits else self._without
        outputs, _, _ = self._ahead.block(self._ids, self._lengths, 0)
        self._ahead.commit([1] * len(self._lengths))
        self._lengths = [length + 1 for length in self._lengths]
        self._states.append(self._last.states)
        return self._last.states[:, -1], outputs.logits[:, -1] if logits else None

    def rest_of_model(self, columns: int) -> Any:
        """The model to verify a block of `columns` tokens with. Ends the round."""
        if self._ahead is None:
            return self._runner.model
        while self._reuse and len(self._states) < columns:
            self.step()  # the last drafted token, whose successor is not drafted
        self._runner.cache.take_back(self._ahead.cache, max(self._runner.filled))
        if self._takes_back:
            self._runner.cache.restore_states()
        self._ahead = None
        if not self._reuse:
            return self._runner.model
        self._last.states = torch.cat(self._states[:columns], dim=1)
        return self._rest


class _StandIn(nn.Module):
    """In a layer's place, with that layer's attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = (layer,)  # in a tuple: not registered

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)


class _Kept(_StandIn):
    """Runs its layer and keeps the states [B, T, D] that come out."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.states: Tensor
        self.in_tuple = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._layer[0](*args, **kwargs)
        self.in_tuple = isinstance(output, tuple)
        self.states = output[0] if self.in_tuple else output
        return output


class _Given(_StandIn):
    """Computes nothing: out come the states that `source` holds."""

    def __init__(self, layer: nn.Module, source: _Kept) -> None:
        super().__init__(layer)
        self._source = (source,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        source = self._source[0]
        return (source.states,) if source.in_tuple else source.states
