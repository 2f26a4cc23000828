"""Training text on disk: token ids, which of them are supervised, and where they come from. It knows no model.

A store is a directory: ``part-00000.safetensors`` ... with ``ids`` [n] int32, ``mask`` [n] uint8 and ``offsets``
[s + 1] int64 (s sequences, one after another), and ``provenance.json``. Parts are written whole or not at all, so that
an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

PROVENANCE = "provenance.json"


@dataclass(frozen=True)
class Sequence:
    """One text.

    Attributes:
        ids: [T] int64 target ids, prompt and answer.
        mask: [T] bool, true where a token was written by the target as an answer (only these are learned from).
        source: index of the prompt it answers.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    source: int


class TokenStore:
    """A directory of texts; opening an existing one goes on with it.

    Args:
        path: the directory, made when something is written.
        provenance: what made the texts (target, sampling, seed, ...). An existing store must have the same.

    Raises:
        ValueError: the directory holds a store made in another way, or a part that cannot be read.
    """

    def __init__(self, path: str | Path, provenance: dict[str, Any] | None = None) -> None:
        self.path = Path(path)
        known = self._read_provenance()
        if known is not None and provenance is not None and known["made_by"] != provenance:
            differing = sorted(
                key for key in {*known["made_by"], *provenance} if known["made_by"].get(key) != provenance.get(key)
            )
            raise ValueError(
                f"{self.path} holds texts made in another way ({', '.join(differing)} differ); name another directory, "
                "or remove this one to start anew"
            )
        self.provenance = provenance if known is None else known["made_by"]
        # Prompts with a text are read from the parts: a part may be there without a note of it, or be taken away.
        self._without_text: set[int] = set() if known is None else set(known["done"])
        self.done: set[int] = self._without_text | self._answered()

    def parts(self) -> list[Path]:
        """Files of the store, in order of writing."""
        return sorted(self.path.glob("part-*.safetensors"))

    def begin(self) -> None:
        """Note what makes the texts, before there are any."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"made_by": self.provenance, "done": sorted(self._without_text)}, indent=1)
        (self.path / (PROVENANCE + ".tmp")).write_text(text, encoding="utf-8")
        os.replace(self.path / (PROVENANCE + ".tmp"), self.path / PROVENANCE)

    def append(self, sequences: list[Sequence], done: set[int]) -> None:
        """Write one part and note that the prompts ``done`` need no further answer.

        Raises:
            OSError: the disk has too little room; nothing is left half-written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if sequences:
            if not (self.path / PROVENANCE).is_file():
                self.begin()
            tensors = _pack(sequences)
            need = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + 65_536
            if (free := shutil.disk_usage(self.path).free) < need:
                raise OSError(f"{self.path} has {free:,} bytes free and the next part needs {need:,}; free some room")
            number = max((int(part.stem.split("-")[1]) for part in self.parts()), default=-1) + 1
            place = self.path / f"part-{number:05d}.safetensors"
            save_file(tensors, place.with_suffix(".tmp"))
            os.replace(place.with_suffix(".tmp"), place)
        self._without_text |= done - {item.source for item in sequences}
        self.done |= done
        self.begin()

    def _answered(self) -> set[int]:
        found: set[int] = set()
        for part in self.parts():
            try:
                with safe_open(part, "pt") as tensors:
                    found.update(tensors.get_tensor("sources").tolist())
            except SafetensorError as error:
                raise _unreadable(part, error) from error
        return found

    def __iter__(self) -> Iterator[Sequence]:
        for part in self.parts():
            try:
                tensors = load_file(part)
                offsets, sources = tensors["offsets"].tolist(), tensors["sources"].tolist()
            except (SafetensorError, KeyError) as error:
                raise _unreadable(part, error) from error
            for start, end, source in zip(offsets[:-1], offsets[1:], sources, strict=True):
                yield Sequence(tensors["ids"][start:end].long(), tensors["mask"][start:end].bool(), source)

    def load(self) -> list[Sequence]:
        """All texts.

        Raises:
            ValueError: there is none.
        """
        sequences = list(self)
        if not sequences:
            raise ValueError(f"{self.path} holds no texts; write some first: specdec data")
        return sequences

    def _read_provenance(self) -> dict[str, Any] | None:
        file = self.path / PROVENANCE
        if not file.is_file():
            return None
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            known["made_by"], known["done"]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{file} cannot be read ({error}); remove {self.path} to start anew") from error
        return known


def _unreadable(part: Path, error: Exception) -> ValueError:
    return ValueError(f"{part} cannot be read ({error}); remove it, and its texts are made again")


def _pack(sequences: list[Sequence]) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([0, *(len(sequence.ids) for sequence in sequences)])
    return {
        "ids": torch.cat([sequence.ids for sequence in sequences]).to(torch.int32),
        "mask": torch.cat([sequence.mask for sequence in sequences]).to(torch.uint8),
        "offsets": lengths.cumsum(0),
        "sources": torch.tensor([sequence.source for sequence in sequences]),
    }


def draft_vocabulary(sequences: list[Sequence], size: int, vocab_size: int) -> tuple[torch.Tensor, float]:
    """The ids that the target's own answers use most.

    Of words that the answers use once or never, a sample of some 100,000 tokens says little; there, ids of prompts
    count, and then low ids before high ones (a byte-pair vocabulary is numbered by frequency).

    Returns:
        Ascending ids [size] int64, and the share of supervised tokens that they cover.

    Raises:
        ValueError: ``size`` is not 1 to ``vocab_size``.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"draft_vocab_size={size}: it must be 1 to {vocab_size}, the target's vocabulary; choose less")
    answers, everything = torch.zeros(vocab_size), torch.zeros(vocab_size)
    for sequence in sequences:
        answers += torch.bincount(sequence.ids[sequence.mask], minlength=vocab_size)
        everything += torch.bincount(sequence.ids, minlength=vocab_size)
    rank = 1.0 / (torch.arange(vocab_size) + 300.0)
    score = answers + 0.1 * everything + 0.15 * answers.sum() * rank / rank.sum()
    ids = score.topk(size).indices.sort().values
    return ids, float(answers[ids].sum() / answers.sum().clamp(min=1.0))
