"""Many texts at once with a small model: rows that finish are refilled, so that no step is spent on finished ones.

Plain ``generate()`` copies the whole cache each step and keeps finished rows until the longest is done. Here every row
has a slot of a preallocated cache; the model runs as it is, through an attention function registered with transformers.
Letters: B slots, C capacity, T tokens of one call, H query and Hkv key heads, hd their size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "specdec_slots"
REFILL = 12
"""Free slots that are waited for, and prompts read in one forward."""

Job = tuple[int, list[int], float, int]
"""Number, prompt ids, temperature (0 is greedy), most new tokens."""


@dataclass
class Row:
    """A text that is being written.

    Attributes:
        number: of its job.
        ids: prompt and what has been written.
        prompt_length: leading ids that are the prompt.
        stopped: whether it ended with a stop id.
        looped: whether it was cut because it repeated itself.
    """

    number: int
    ids: list[int]
    temperature: float
    limit: int
    prompt_length: int = field(init=False)
    stopped: bool = False
    looped: bool = False
    seed: int = 0
    dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.dice = random.Random(f"{self.seed}/{self.number}/dice")  # its draws are the same in any company
        self.ids = list(self.ids)  # the caller keeps its own
        self.prompt_length = len(self.ids)


class _Slots:
    """Keys and values [B, Hkv, C, hd] of each layer; ``attend`` is an attention function of transformers."""

    def __init__(self, count: int, capacity: int) -> None:
        self.count, self.capacity = count, capacity
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.rows = self.places = torch.zeros(0, dtype=torch.int64)
        self.longest, self.mask = 0, torch.zeros(0)

    def read_prompts(self, rows: torch.Tensor) -> None:
        """The next forward reads prompts into the slots ``rows``, from position 0."""
        self.rows, self.longest = rows, 0

    def step(self, places: torch.Tensor) -> None:
        """The next forward feeds one token a slot, at ``places`` [B]."""
        self.places, self.longest = places, int(places.max()) + 1
        self.mask = (torch.arange(self.longest, device=places.device) <= places[:, None])[:, None, None]

    def attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any) -> Any:
        if module.layer_idx not in self.layers:
            shape = (self.count, key.shape[1], self.capacity, key.shape[3])
            self.layers[module.layer_idx] = (key.new_zeros(shape), value.new_zeros(shape))
        keys, values = self.layers[module.layer_idx]
        if not self.longest:
            keys[self.rows, :, : key.shape[2]], values[self.rows, :, : key.shape[2]] = key, value
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
            return out.transpose(1, 2).contiguous(), None
        slots = torch.arange(self.count, device=key.device)
        keys[slots, :, self.places], values[slots, :, self.places] = key[:, :, 0], value[:, :, 0]
        # Query heads that share a key head become queries of it, so that keys are not repeated.
        folded = query.view(self.count, key.shape[1], -1, query.shape[-1])
        out = F.scaled_dot_product_attention(
            folded, keys[:, :, : self.longest], values[:, :, : self.longest], attn_mask=self.mask, scale=scaling
        )
        return out.reshape(self.count, 1, query.shape[1], query.shape[-1]), None


class ContinuousBatch:
    """Writes texts for jobs, B at a time.

    Args:
        target: a causal language model with full attention in all layers.
        slots: B.
        capacity: C, most tokens of a text with its prompt.
        seed: of the draws, which depend on it and on a job's number alone.

    Raises:
        ValueError: the model has sliding or other special attention; pass its texts as JSONL instead.
    """

    def __init__(self, target: Any, slots: int, capacity: int, seed: int = 0) -> None:
        kinds = set(getattr(target.config, "layer_types", None) or ["full_attention"])
        windowed = getattr(target.config, "sliding_window", None) and not getattr(target.config, "layer_types", None)
        if kinds != {"full_attention"} or windowed:
            raise ValueError(
                f"{type(target).__name__} has special attention ({', '.join(sorted(kinds))}); continuous "
                "batches need full attention in all layers. Write its texts elsewhere and pass them as JSONL."
            )
        self.target, self.slots, self.capacity, self.seed = target, slots, capacity, seed

    @torch.no_grad()
    def run(self, jobs: Iterable[Job], stop: set[int], loop: Callable[[list[int]], int | None]) -> Iterator[Row]:
        """Finished rows, in the order of finishing.

        Args:
            jobs: read as slots become free. Prompts that leave no room for an answer are a ``ValueError``.
            stop: ids that end a text (kept as its last token).
            loop: given an answer so far, how many of its tokens to keep because it repeats itself, or ``None``.
        """
        before = self.target.config._attn_implementation
        store = _Slots(self.slots, self.capacity)
        ALL_ATTENTION_FUNCTIONS.register(_NAME, store.attend)
        self.target.config._attn_implementation = _NAME
        try:
            yield from self._run(iter(jobs), stop, loop, store)
        finally:
            self.target.config._attn_implementation = before

    def _run(self, jobs: Iterator[Job], stop: set[int], loop: Any, store: _Slots) -> Iterator[Row]:
        rows: list[Row | None] = [None] * self.slots
        more = True
        while more or any(rows):
            free = [slot for slot, row in enumerate(rows) if row is None]
            if more and (len(free) >= REFILL or len(free) == self.slots):
                new = [Row(*job, seed=self.seed) for job in islice(jobs, len(free))]
                more = len(new) == len(free)
                self._read(new, free, rows, store)
            if not any(rows):
                break
            for slot, token in enumerate(self._step(rows, store)):
                row = rows[slot]
                if row is None:
                    continue
                row.ids.append(token)
                answer = row.ids[row.prompt_length :]
                keep = loop(answer)
                if keep is not None:
                    row.looped = True
                    del row.ids[row.prompt_length + keep :]
                row.stopped = token in stop
                if row.stopped or keep is not None or len(answer) >= row.limit or len(row.ids) >= self.capacity:
                    rows[slot] = None
                    yield row

    def _read(self, new: list[Row], free: list[int], rows: list[Row | None], store: _Slots) -> None:
        new.sort(key=lambda row: len(row.ids))
        for start in range(0, len(new), REFILL):
            group, slots = new[start : start + REFILL], free[start : start + REFILL]
            longest = max(len(row.ids) for row in group)
            if longest >= self.capacity:
                raise ValueError(f"a prompt of {longest} tokens leaves no room in {self.capacity}; leave it out")
            device = self.target.device
            ids = torch.tensor([row.ids + [0] * (longest - len(row.ids)) for row in group], device=device)
            store.read_prompts(torch.tensor(slots[: len(group)], device=device))
            self._forward(ids, torch.arange(longest, device=device).expand(len(group), -1))
            for slot, row in zip(slots, group, strict=False):
                rows[slot] = row

    def _step(self, rows: list[Row | None], store: _Slots) -> list[int]:
        """Next token of every slot. An empty slot feeds a dummy at position 0, which nothing reads."""
        device = self.target.device
        places = torch.tensor([len(row.ids) - 1 if row else 0 for row in rows], device=device)
        ids = torch.tensor([row.ids[-1] if row else 0 for row in rows], device=device)
        store.step(places)
        logits = self.target.get_output_embeddings()(self._forward(ids[:, None], places[:, None])[:, 0]).float()
        chosen = logits.argmax(-1)
        warm = torch.tensor([row.temperature if row else 0.0 for row in rows], device=device)
        drawn = (warm > 0).nonzero()[:, 0]
        if len(drawn):
            mass = (logits[drawn] / warm[drawn, None]).softmax(-1).cumsum(-1)
            numbers = [rows[slot].dice.random() for slot in drawn.tolist()]
            dice = torch.tensor(numbers, device=device)[:, None] * mass[:, -1:]
            chosen[drawn] = torch.searchsorted(mass, dice)[:, 0].clamp(max=logits.shape[-1] - 1)
        return chosen.tolist()

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.target.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state


class PlainBatch:
    """The same for any target that ``generate()`` works with: groups of B prompts, each as slow as its longest answer.

    Args:
        target: a causal language model.
        slots: B.
        capacity: as in :class:`ContinuousBatch`.
        seed: of the draws; those of a group depend on it and on the number of its first job.
    """

    def __init__(self, target: Any, slots: int, capacity: int, seed: int = 0) -> None:
        self.target, self.slots, self.capacity, self.seed = target, slots, capacity, seed

    @torch.no_grad()
    def run(self, jobs: Iterable[Job], stop: set[int], loop: Callable[[list[int]], int | None]) -> Iterator[Row]:
        """As :meth:`ContinuousBatch.run`; loops are cut from finished texts."""
        source = iter(jobs)
        while group := [Row(*job) for job in islice(source, self.slots)]:
            for temperature in sorted({row.temperature for row in group}):
                rows = [row for row in group if row.temperature == temperature]
                self._answer(rows, stop)
                for row in rows:
                    answer = row.ids[row.prompt_length :]
                    for length in range(1, len(answer) + 1):
                        if (keep := loop(answer[:length])) is not None:
                            row.looped, row.stopped = True, False
                            del row.ids[row.prompt_length + keep :]
                            break
                    yield row

    def _answer(self, rows: list[Row], stop: set[int]) -> None:
        longest = max(row.prompt_length for row in rows)
        limit = min(max(row.limit for row in rows), self.capacity - longest)
        if limit < 1:
            raise ValueError(f"a prompt of {longest} tokens leaves no room in {self.capacity}; leave it out")
        device, filler = self.target.device, min(stop, default=0)
        ids = torch.tensor([[filler] * (longest - row.prompt_length) + row.ids for row in rows], device=device)
        gaps = torch.tensor([longest - row.prompt_length for row in rows], device=device)
        mask = (torch.arange(longest, device=device) >= gaps[:, None]).long()
        warm = rows[0].temperature
        drawing = {"do_sample": True, "temperature": warm, "top_k": 0, "top_p": 1.0} if warm else {"do_sample": False}
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(random.Random(f"{self.seed}/{rows[0].number}").getrandbits(32))
            out = self.target.generate(
                ids, attention_mask=mask, max_new_tokens=limit, pad_token_id=filler,
                eos_token_id=sorted(stop) or None, **drawing,
            )  # fmt: skip
        for row, new in zip(rows, out[:, longest:].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(new) if token in stop), len(new))
            row.ids += new[: min(end, row.limit)]
            row.stopped = row.ids[-1] in stop and len(row.ids) > row.prompt_length


def text_batch(target: Any, slots: int, capacity: int, seed: int = 0) -> ContinuousBatch | PlainBatch:
    """A :class:`ContinuousBatch` if this target's first tokens come out right with it, else a :class:`PlainBatch`."""
    try:
        batch = ContinuousBatch(target, slots, capacity, seed)
    except ValueError:
        return PlainBatch(target, slots, capacity, seed)
    ids = list(range(3, 9))
    try:
        row = next(ContinuousBatch(target, 2, 16).run([(0, ids, 0.0, 4)], set(), lambda answer: None))
    except (TypeError, AttributeError, RuntimeError, IndexError, KeyError, ValueError):
        # Layers of a kind that the slots do not know fail in ways of their own; generate() knows them.
        return PlainBatch(target, slots, capacity, seed)
    with torch.no_grad():
        logits = target(torch.tensor([row.ids[:-1]], device=target.device)).logits[0, len(ids) - 1 :].float()
    chosen = torch.tensor(row.ids[len(ids) :], device=target.device)
    short = logits.max(-1).values - logits.gather(-1, chosen[:, None])[:, 0]
    return batch if bool((short <= 0.05 * logits.std(-1)).all()) else PlainBatch(target, slots, capacity, seed)
