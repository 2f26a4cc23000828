"""Texts as batches: which text comes when, where its anchors are, and how several texts share a row.

Everything here is a function of the seed, the epoch and the text alone. So a run on several processes, with gradient
accumulation, resumed or packed sees the same texts with the same anchors as a plain one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from .features import FeatureCache
from .losses import anchor_places, draw_anchors
from .store import Sequence, TokenStore

_PRIME = 2_654_435_761


def load_texts(path: str | Path, max_length: int, vocab_size: int) -> list[Sequence]:
    """The texts of a store, cut to a length, without those that have nothing to learn from.

    Raises:
        ValueError: none is left, or they have ids that the target does not know.
    """
    texts = [Sequence(item.ids[:max_length], item.mask[:max_length], item.source) for item in TokenStore(path).load()]
    texts = [item for item in texts if bool(anchor_places(item.mask).any())]
    highest = max((int(item.ids.max()) for item in texts), default=-1)
    if highest < 0 or highest >= vocab_size:
        raise ValueError(
            f"{path} has {len(texts)} texts of two or more answer tokens and ids up to {highest}, but the "
            f"target's vocabulary has {vocab_size}; write the texts with this target"
        )
    return texts


def split_texts(texts: list[Sequence], validation: int, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the texts to learn from, and of those held out: ``validation`` of them, but at most a fifth."""
    held_out = min(validation, len(texts) // 5)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    return order[held_out:], order[:held_out]


class TextDataset(torch.utils.data.Dataset):
    """Texts as dicts of tensors, with anchors drawn afresh in each epoch, and features where a cache is given.

    Item i belongs to epoch ``i // len(indices)``, whose order is a permutation of its own; so an epoch's last texts may
    share a batch with the next one's first, and no batch is short.

    Args:
        sequences: the texts.
        indices: those that belong to this set.
        num_anchors: most anchors a text.
        seed: of orders, anchors and dice.
        cache: features of ``sequences``.
        items: length of the run in texts; ``None``: each text once, in the given order (validation).
        dice_slots: block size, to draw a number for each slot of a block too (``sample_slots``).
    """

    def __init__(
        self,
        sequences: list[Sequence],
        indices: list[int],
        num_anchors: int,
        seed: int,
        cache: FeatureCache | None = None,
        items: int | None = None,
        dice_slots: int | None = None,
    ) -> None:
        self.sequences, self.indices, self.num_anchors, self.seed = sequences, indices, num_anchors, seed
        self.cache, self.items, self.dice_slots = cache, items, dice_slots
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self.indices) if self.items is None else self.items

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        epoch, place = divmod(item, len(self.indices))
        index = self.indices[place if self.items is None else self._order_of(epoch)[place]]
        sequence = self.sequences[index]
        dice = self._generator(epoch, index + 1)
        anchors, keep = draw_anchors(sequence.mask[None], self.num_anchors, dice)
        row = {"input_ids": sequence.ids, "loss_mask": sequence.mask, "anchors": anchors[keep]}
        if self.dice_slots is not None:
            row["dice"] = torch.rand(len(row["anchors"]), self.dice_slots, generator=dice)
        if self.cache is not None:
            row.update(self.cache.read(index))
        return row

    def _generator(self, epoch: int, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(((self.seed * _PRIME + epoch) * _PRIME + number) % 2**32)

    def _order_of(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            self._order = epoch, torch.randperm(len(self.indices), generator=self._generator(epoch, 0)).tolist()
        return self._order[1]


def pack(lengths: list[int]) -> list[list[int]]:
    """Texts by number, grouped so that each group is at most as long as the longest text: first fit, longest first."""
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        place = next((row for row, left in enumerate(room) if left >= lengths[number]), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(max(lengths))
        rows[place].append(number)
        room[place] -= lengths[number]
    return rows


def collate(texts: list[dict[str, torch.Tensor]], packing: bool = False) -> dict[str, torch.Tensor]:
    """A batch of texts, padded at the right with zeros.

    Args:
        texts: of :class:`TextDataset`.
        packing: put short texts one behind another into rows as long as the longest text.

    Returns:
        ``input_ids``, ``loss_mask`` and ``segments`` [B, T] (texts of a row numbered from 1, 0 is padding), ``anchors``
        [B, A] (places in the row, -1 for none), and what else the texts have.
    """
    rows = pack([len(text["input_ids"]) for text in texts]) if packing else [[number] for number in range(len(texts))]
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in (*texts[0], "segments")}
    for row in rows:
        lengths = torch.tensor([len(texts[number]["input_ids"]) for number in row])
        for name in texts[0]:
            pieces = [texts[number][name] for number in row]
            if name == "anchors":
                pieces = [piece + start for piece, start in zip(pieces, lengths.cumsum(0) - lengths, strict=True)]
            parts[name].append(torch.cat(pieces))
        parts["segments"].append(torch.arange(1, len(row) + 1).repeat_interleave(lengths))
    return {
        name: pad_sequence(pieces, batch_first=True, padding_value=-1 if name == "anchors" else 0)
        for name, pieces in parts.items()
    }
