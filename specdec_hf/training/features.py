"""Hidden states of the frozen target for training: computed in each step, or once and kept on disk.

Letters: B texts, T tokens, m taps, Dt hidden size of the target.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch.nn.utils.rnn import pad_sequence

from ..targets import TapRecorder, dense_mask, finished_logits, mask_windows, takes_ragged_masks
from .losses import text_starts
from .store import Sequence


class Features(NamedTuple):
    """Taps [B, T, m * Dt] and states after the final norm [B, T, Dt]."""

    taps: torch.Tensor
    last_hidden: torch.Tensor


@torch.no_grad()
def target_features(target: Any, layer_ids: list[int], input_ids: torch.Tensor, segments: torch.Tensor) -> Features:
    """One forward of the target's decoder; only the tapped layers' states are kept.

    Args:
        target: the causal language model.
        layer_ids: taps, as in the head's configuration.
        input_ids: [B, T], padded at the right.
        segments: [B, T], 0 for padding, 1 for the first text of a row, 2 for one packed behind it and so on. Every text
            gets what it would get alone: masks and positions where the family takes 4-D masks, else a row of its own.
    """
    segments = segments.to(target.device, torch.int64)
    packed = bool((segments > 1).any())
    if packed and not takes_ragged_masks(target):
        return _in_rows_of_their_own(target, layer_ids, input_ids, segments)
    inputs: dict[str, Any] = {"attention_mask": (segments > 0).long()}
    if packed:
        starts = text_starts(segments)
        places = torch.arange(segments.shape[1], device=target.device)
        gap = places[:, None] - places
        same = (gap >= 0) & (segments[:, :, None] == segments[:, None])
        masks = {
            sliding: (same if window is None else same & (gap < window))[:, None]
            for sliding, window in mask_windows(target).items()
        }
        inputs = {"attention_mask": dense_mask(target, masks), "position_ids": places - starts}
    with TapRecorder(target, layer_ids) as recorder:
        output = target.get_decoder()(
            input_ids=input_ids.to(target.device), use_cache=False, **inputs, **recorder.forward_kwargs
        )
        # Heads that read the last hidden state alone have no taps.
        taps = torch.cat([*recorder.collect(output), output.last_hidden_state[..., :0]], dim=-1)
    return Features(taps, output.last_hidden_state)


def _in_rows_of_their_own(
    target: Any, layer_ids: list[int], input_ids: torch.Tensor, segments: torch.Tensor
) -> Features:
    places = [
        (row, (segments[row] == number).nonzero()[:, 0])
        for row in range(len(segments))
        for number in range(1, int(segments[row].max()) + 1)
    ]
    ids = pad_sequence([input_ids.to(target.device)[row, where] for row, where in places], batch_first=True)
    real = pad_sequence([torch.ones_like(where) for _, where in places], batch_first=True)
    apart = target_features(target, layer_ids, ids, real)
    together = Features(*(states.new_zeros(*segments.shape, states.shape[-1]) for states in apart))
    for states, whole in zip(apart, together, strict=True):
        for text, (row, where) in enumerate(places):
            whole[row, where] = states[text, : len(where)]
    return together


@torch.no_grad()
def log_mass(target: Any, last_hidden: torch.Tensor, vocab_size: int, chunk: int = 1024) -> torch.Tensor:
    """Log-sum-exp [n] of the target's logits over its first ``vocab_size`` ids, in chunks of its states [n, Dt]."""
    module = target.get_output_embeddings()
    pieces = []
    for part in last_hidden.split(chunk):
        logits = finished_logits(target, module(part.to(module.weight.dtype)))[..., :vocab_size]
        pieces.append(logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1))
    return torch.cat(pieces) if pieces else last_hidden.new_zeros(0, dtype=torch.float32)


class FeatureCache:
    """Features of all texts of a data set, bfloat16, a file a text. Where the target costs more than the head, it pays.

    Args:
        path: directory, made by :meth:`fill`.
        sequences: the texts, in the order of the data set.
        layer_ids: taps.
        target: asked for its width.
        log_mass_of: V, to keep the log-sum-exp of the target's logits too (heads with a reduced vocabulary need it).
        bf16: compute in bfloat16 autocast, as training in it does.
    """

    def __init__(
        self,
        path: str | Path,
        sequences: list[Sequence],
        layer_ids: list[int],
        target: Any,
        log_mass_of: int | None = None,
        bf16: bool = False,
    ) -> None:
        self.path, self.sequences, self.layer_ids, self.target = Path(path), sequences, layer_ids, target
        self.log_mass_of, self.bf16 = log_mass_of, bf16

    def bytes_needed(self) -> int:
        """Size of the whole cache on disk, without the files' headers."""
        width = self.target.get_output_embeddings().weight.shape[-1]
        each = width * (len(self.layer_ids) + 1) * 2 + (0 if self.log_mass_of is None else 4)
        return sum(len(sequence.ids) for sequence in self.sequences) * each

    def made_of(self) -> dict[str, Any]:
        """What the features depend on; a cache of something else is refused."""
        digest = hashlib.sha256()
        for sequence in self.sequences:
            digest.update(sequence.ids.to(torch.int32).numpy().tobytes() + b"|")
            digest.update(sequence.mask.numpy().tobytes())
        config = self.target.config
        return {
            "texts": digest.hexdigest(),
            "layers": list(self.layer_ids),
            "log_mass_of": self.log_mass_of,
            "target": [type(self.target).__name__, config._name_or_path, config.get_text_config().vocab_size],
            **({"autocast": "bfloat16"} if self.bf16 else {}),
        }

    def fill(
        self, say: Callable[[str], None] = lambda line: None, part: int = 0, parts: int = 1, every: float = 60.0
    ) -> None:
        """Write what is missing. The size is told before anything is written.

        Args:
            say: called with a line at the start, and then now and then.
            part, parts: of several processes, this one's number and how many they are; each writes its share.
            every: seconds between two lines.

        Raises:
            OSError: the disk has too little room; nothing was written.
            ValueError: the directory holds features of other texts, layers or another target.
        """
        known = self.path / "features.json"
        if known.is_file() and json.loads(known.read_text(encoding="utf-8")) != self.made_of():
            raise ValueError(
                f"{self.path} holds features of other texts, taps or another target; remove it or name another place"
            )
        missing = [index for index in range(len(self.sequences)) if not self._file(index).is_file()]
        need = self.bytes_needed() * len(missing) // max(len(self.sequences), 1)
        place = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        free = shutil.disk_usage(place).free
        if free < need * 1.02:
            raise OSError(
                f"the feature cache needs {need / 1e9:.2f} GB and {self.path} has {free / 1e9:.2f} GB free; free some, "
                "use fewer texts, or leave the cache out (the hidden states are then computed in each step)"
            )
        if not missing:
            return
        say(f"features of {len(missing)} texts: {need / 1e9:.2f} GB in {self.path}, {free / 1e9:.2f} GB are free there")
        self.path.mkdir(parents=True, exist_ok=True)
        _write_whole(known, json.dumps(self.made_of()).encode())
        missing = [index for index in missing if index % parts == part]
        told = time.monotonic()
        cast = torch.bfloat16 if self.bf16 and self.target.device.type == "cpu" else None
        with _linear_weights(self.target, cast):
            for done, index in enumerate(missing, 1):
                self._write(index)
                if time.monotonic() - told > every:
                    say(f"features of {done} of {len(missing)} texts")
                    told = time.monotonic()

    def read(self, index: int) -> dict[str, torch.Tensor]:
        """``taps`` [T, m * Dt], ``last_hidden`` [T, Dt] and maybe ``target_log_mass`` [T] of one text.

        The mass is 0 where no answer's token is predicted.

        Raises:
            OSError: the file is absent or damaged.
        """
        try:
            return load_file(self._file(index))
        except (SafetensorError, FileNotFoundError) as error:
            raise OSError(f"{self._file(index)} cannot be read ({error}); remove it and start again") from error

    def _write(self, index: int) -> None:
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.bf16):
            self._write_features(index)

    def _write_features(self, index: int) -> None:
        ids = self.sequences[index].ids[None]
        features = target_features(self.target, self.layer_ids, ids, torch.ones_like(ids))
        tensors = {name: value[0].to(torch.bfloat16).contiguous() for name, value in features._asdict().items()}
        if self.log_mass_of is not None:
            # Of the rounded states, since the probabilities are computed from these too.
            last, mass = tensors["last_hidden"], torch.zeros(len(tensors["last_hidden"]))
            used = self.sequences[index].mask.roll(-1)
            used[-1:] = True
            mass[used] = log_mass(self.target, last[used.to(last.device)], self.log_mass_of).float().cpu()
            tensors["target_log_mass"] = mass
        _write_whole(self._file(index), save({name: tensor.cpu() for name, tensor in tensors.items()}))

    def _file(self, index: int) -> Path:
        return self.path / f"{index:07d}.safetensors"


@contextmanager
def _linear_weights(target: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """Copies of all linear layers' weights in ``dtype`` for a while: autocast casts frozen ones in each forward."""
    modules = [] if dtype is None else list(target.modules())
    linears = [m for m in modules if type(m) is torch.nn.Linear and type(m.weight) is torch.nn.Parameter]  # not shards
    kept = [module.weight for module in linears]
    try:
        for module in linears:
            module.weight = torch.nn.Parameter(module.weight.detach().to(dtype), requires_grad=False)
        yield
    finally:
        for module, weight in zip(linears, kept, strict=True):
            module.weight = weight


def _write_whole(path: Path, content: bytes) -> None:
    """A file is there whole or not at all, also where several processes write the same one."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_bytes(content)
    unfinished.replace(path)
