"""Hidden states of the frozen target for training: computed in each step, or once and kept on disk.

Letters: B texts, T tokens, m taps, Dt hidden size of the target.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from ..targets import TapRecorder
from .store import Sequence


class Features(NamedTuple):
    """Taps [B, T, m * Dt] and states after the final norm [B, T, Dt]."""

    taps: torch.Tensor
    last_hidden: torch.Tensor


@torch.no_grad()
def target_features(target: Any, layer_ids: list[int], input_ids: torch.Tensor, real: torch.Tensor) -> Features:
    """One forward of the target's decoder; only the tapped layers' states are kept.

    Args:
        target: the causal language model.
        layer_ids: taps, as in the head's configuration.
        input_ids: [B, T], padded at the right.
        real: [B, T] bool, false for padding.
    """
    device = target.device
    with TapRecorder(target, layer_ids) as recorder:
        output = target.get_decoder()(
            input_ids=input_ids.to(device),
            attention_mask=real.to(device, torch.int64),
            use_cache=False,
            **recorder.forward_kwargs,
        )
        # Heads that read the last hidden state alone have no taps.
        taps = torch.cat([*recorder.collect(output), output.last_hidden_state[..., :0]], dim=-1)
    return Features(taps, output.last_hidden_state)


class FeatureCache:
    """Features of all texts of a data set, bfloat16, a file a text. Where the target costs more than the head, it pays.

    Args:
        path: directory, made by :meth:`fill`.
        sequences: the texts, in the order of the data set.
        layer_ids: taps.
        target: asked for its width.
    """

    def __init__(self, path: str | Path, sequences: list[Sequence], layer_ids: list[int], target: Any) -> None:
        self.path, self.sequences, self.layer_ids, self.target = Path(path), sequences, layer_ids, target

    def bytes_needed(self) -> int:
        """Size of the whole cache on disk."""
        width = self.target.get_output_embeddings().weight.shape[-1]
        return sum(len(sequence.ids) for sequence in self.sequences) * width * (len(self.layer_ids) + 1) * 2

    def fill(self, report: Any = lambda done, total: None) -> None:
        """Write what is missing. The size is known before anything is written.

        Raises:
            OSError: the disk has too little room.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        missing = [index for index in range(len(self.sequences)) if not self._file(index).is_file()]
        need = self.bytes_needed() * len(missing) // max(len(self.sequences), 1)
        if (free := shutil.disk_usage(self.path).free) < need * 1.02:
            raise OSError(
                f"the feature cache needs {need / 1e9:.2f} GB and {self.path} has {free / 1e9:.2f} GB free; free some, "
                "use fewer texts, or leave the cache out (the hidden states are then computed in each step)"
            )
        for done, index in enumerate(missing):
            ids = self.sequences[index].ids[None]
            features = target_features(self.target, self.layer_ids, ids, torch.ones_like(ids, dtype=torch.bool))
            tensors = {
                name: value[0].to(torch.bfloat16).contiguous().cpu() for name, value in features._asdict().items()
            }
            save_file(tensors, self._file(index).with_suffix(".tmp"))
            self._file(index).with_suffix(".tmp").replace(self._file(index))
            report(done + 1, len(missing))

    def read(self, index: int) -> dict[str, torch.Tensor]:
        """``taps`` [T, m * Dt] and ``last_hidden`` [T, Dt] of one text."""
        return load_file(self._file(index))

    def _file(self, index: int) -> Path:
        return self.path / f"{index:07d}.safetensors"
