"""Training text written by the target itself: prompts, continuous batches, and a filter for loops.

Answers of anything but the target make visibly worse heads (DSpark paper), so all supervised tokens are the target's.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..prompts import encode, read_conversations
from .batching import ContinuousBatch
from .store import Sequence, TokenStore


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Attributes:
        temperature: of the sampled answers.
        greedy_share: this share of the prompts is answered greedily instead (a head is mostly used so).
        max_new_tokens: answers end here.
        max_prompt_tokens: longer prompts are left out.
        batch_size: answers written at a time.
        seed: of prompts, draws and shares.
    """

    temperature: float = 0.7
    greedy_share: float = 0.5
    max_new_tokens: int = 288
    max_prompt_tokens: int = 230
    batch_size: int = 96
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature={self.temperature!r}: it must be positive; greedy answers are greedy_share=1"
            )
        if not 0 <= self.greedy_share <= 1:
            raise ValueError(f"greedy_share={self.greedy_share!r}: it is a share, 0 to 1; correct it")
        for name in ("max_new_tokens", "max_prompt_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: it must be at least 1; raise it")


def normalised(text: str) -> str:
    """Letters and digits only, in lower case: two prompts that agree in this are the same."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def read_prompts(paths: Iterable[str | Path], exclude: Iterable[str | Path] = (), suffix: str = "") -> list[str]:
    """First user turns of JSONL files, each once, without any turn of the files ``exclude`` (evaluation sets).

    Args:
        paths: files with lines ``{"turns": [...]}`` or ``{"messages": [...]}``.
        exclude: files whose prompts must not be trained on.
        suffix: added to every prompt (an instruction on the form of the answer).

    Raises:
        ValueError: an unreadable line (file and line number), or nothing is left.
    """
    held_out = {
        normalised(message["content"])
        for path in exclude
        for conversation in read_conversations(path)
        for turn in conversation.turns
        for message in turn.messages
    }
    prompts: dict[str, str] = {}
    for path in paths:
        for conversation in read_conversations(path):
            text = conversation.turns[0].messages[-1]["content"] + suffix
            if normalised(text) not in held_out:
                prompts.setdefault(normalised(text), text)
    if not prompts:
        raise ValueError("no prompt is left: the files are empty, or all of their prompts are in the excluded files")
    return list(prompts.values())


def opening(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids before a user's turn in the target's chat template, and ids from its end to the beginning of the answer.

    Raises:
        ValueError: there is no chat template, or it changes what the user wrote.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the target has no chat template, so it cannot write user turns; give prompts (JSONL) instead")
    marker = "\u2980user turn\u2980"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], add_generation_prompt=True, tokenize=False
    )
    if text.count(marker) != 1:
        raise ValueError("the target's chat template changes what the user wrote; give prompts (JSONL) instead")
    before, after = text.split(marker)
    return tuple(tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))


def write_user_turns(target: Any, tokenizer: Any, count: int, sampling: Sampling, max_tokens: int = 120) -> list[str]:
    """User turns written by the target after its chat template's opening: different ones, without loops.

    Returns:
        At most ``count`` turns; fewer if five times as many tries gave not enough different ones.
    """
    before, after = opening(tokenizer)
    stop = {after[0], *_stop_ids(target)}
    batch = ContinuousBatch(target, sampling.batch_size, len(before) + max_tokens, sampling.seed)
    turns: dict[str, str] = {}
    jobs = ((number, before, 0.9, max_tokens) for number in range(5 * count))
    for done in batch.run(jobs, stop, loop_start):
        ids = done.ids[len(before) :]
        text = tokenizer.decode(ids[:-1] if done.stopped else ids, skip_special_tokens=True).strip()
        if done.stopped and len(normalised(text)) >= 12:
            turns.setdefault(normalised(text), text)
        if len(turns) >= count:
            break
    return list(turns.values())


def write_answers(
    target: Any,
    tokenizer: Any,
    prompts: list[str],
    store: TokenStore,
    sampling: Sampling,
    max_tokens: int | None = None,
    report: Callable[[int, int], None] = lambda tokens, prompts: None,
    part_size: int = 256,
) -> int:
    """Let the target answer prompts, and keep the answers. Prompts that the store has already are skipped.

    Args:
        target: a causal language model in float32 (on a CPU; bfloat16 is slower there) or half precision.
        tokenizer: its tokenizer, with a chat template or without.
        prompts: user turns.
        store: where texts go, a part for every ``part_size`` prompts.
        sampling: see there.
        max_tokens: stop after about this many answer tokens; ``None``: when all prompts are answered.
        report: called with answer tokens and prompts done after each part.

    Returns:
        Answer tokens written by this call.
    """
    order = list(range(len(prompts)))
    random.Random(sampling.seed).shuffle(order)

    def jobs() -> Iterable[tuple[int, list[int], float, int]]:
        for number in order:
            if number in store.done:
                continue
            ids = encode(tokenizer, [{"role": "user", "content": prompts[number]}])[0].tolist()
            if len(ids) > sampling.max_prompt_tokens:
                continue
            greedy = random.Random(f"{sampling.seed}/{number}").random() < sampling.greedy_share
            yield number, ids, 0.0 if greedy else sampling.temperature, sampling.max_new_tokens

    capacity = sampling.max_prompt_tokens + sampling.max_new_tokens
    batch = ContinuousBatch(target, sampling.batch_size, capacity, sampling.seed)
    waiting, finished, written = [], set(), 0
    for done in batch.run(jobs(), _stop_ids(target), loop_start):
        finished.add(done.number)
        answer = len(done.ids) - done.prompt_length
        if answer >= 8:
            mask = torch.arange(len(done.ids)) >= done.prompt_length
            waiting.append(Sequence(torch.tensor(done.ids), mask, done.number))
            written += answer
        full = max_tokens is not None and written >= max_tokens
        if full or len(finished) >= part_size:
            store.append(waiting, finished)
            report(written, len(store.done))
            waiting, finished = [], set()
        if full:
            break
    if finished:
        store.append(waiting, finished)
        report(written, len(store.done))
    return written


def provenance(target: Any, tokenizer: Any, sampling: Sampling, prompts: str) -> dict[str, Any]:
    """What a store's texts depend on, for ``provenance.json`` and the model card."""
    import transformers

    return {
        "target": getattr(target.config, "_name_or_path", "") or type(target).__name__,
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "chat_template": getattr(tokenizer, "chat_template", None) is not None,
        "prompts": prompts,
        **asdict(sampling),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def loop_start(answer: list[int]) -> int | None:
    """Tokens to keep of an answer whose end repeats itself, or ``None``; called after each new token.

    A repetition is the last 24 tokens standing earlier in the answer word for word, or a piece of up to 12 tokens that
    stands four times in a row. Repeated text is easy to predict and teaches nothing.
    """
    length = len(answer)
    if length < 16:
        return None
    for period in range(1, 13):
        run = max(3 * period, 12)
        if length >= run + period and answer[length - run :] == answer[length - run - period : length - period]:
            return length - run
    tail = answer[length - 24 :]
    for start in range(length - 25, -1, -1):
        if answer[start] == tail[0] and answer[start : start + 24] == tail:
            return length - 24
    return None


def _stop_ids(target: Any) -> set[int]:
    ids = target.generation_config.eos_token_id
    ids = ids if ids is not None else target.config.eos_token_id
    return set() if ids is None else set(ids) if isinstance(ids, (list, tuple)) else {ids}
