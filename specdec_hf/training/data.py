"""Training text written by the target itself: prompts as ids, its own user turns, and what is kept of its answers.

Answers of anything but the target make visibly worse heads (DSpark paper), so all supervised tokens are the target's.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..prompts import encode
from .batching import Job, text_batch
from .progress import Progress
from .store import Sequence, TokenStore

Messages = list[dict[str, str]]
PART_SECONDS = 60.0
"""No more work than this is lost by a kill, but for answers that were not finished."""
MIN_ANSWER = 8
"""Shorter answers are left out: they hold hardly a block."""


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


class Written(Protocol):
    """A finished text: number of its prompt, ids with the prompt's, and how many are the prompt's."""

    number: int
    ids: list[int]
    prompt_length: int


def normalised(text: str) -> str:
    """Letters and digits only, in lower case: two prompts that agree in this are the same."""
    return re.sub(r"[\W_]+", " ", text.lower()).strip() or text.strip()


def is_readable(text: str) -> bool:
    """Whether a text may be a user's turn: no broken characters, and more letters, digits and spaces than signs."""
    plain = sum(one.isalnum() or one.isspace() for one in text)
    return len(normalised(text)) >= 8 and "\ufffd" not in text and plain >= 0.6 * len(text)


def check_chat(tokenizer: Any, system_prompt: str | None = None, thinking: bool | None = None) -> bool:
    """Whether a target has a chat template, and that it can do what is asked of it.

    Raises:
        ValueError: a system prompt or a mode of thinking for a target without a chat template, or for a template that
            does not know it.
    """
    asked = {"system_prompt": system_prompt, "thinking": thinking}
    if getattr(tokenizer, "chat_template", None) is None:
        for name, value in asked.items():
            if value is not None:
                raise ValueError(
                    f"{name}={value!r}, but the target has no chat template that could pass it on; leave it out, or "
                    "name the target's chat-tuned model"
                )
        return False
    user = [{"role": "user", "content": "a"}]
    if thinking is not None:
        modes = [
            tokenizer.apply_chat_template(user, add_generation_prompt=True, tokenize=False, enable_thinking=mode)
            for mode in (True, False)
        ]
        if modes[0] == modes[1]:
            raise ValueError(
                f"thinking={thinking!r}, but the target's chat template does not read enable_thinking; leave it out"
            )
    if system_prompt is not None:
        encode(tokenizer, [{"role": "system", "content": system_prompt}, *user])
    return True


def prompt_ids(
    tokenizer: Any, messages: Messages, system_prompt: str | None = None, thinking: bool | None = None
) -> list[int]:
    """Ids up to the answer. No messages: the token that a text begins with.

    Args:
        tokenizer: the target's.
        messages: the prompt.
        system_prompt: put in front of messages without a system message.
        thinking: the chat template's ``enable_thinking``.

    Raises:
        ValueError: the template refuses the messages, or a text is to begin and there is no such token.
    """
    if messages:
        if system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        return encode(tokenizer, messages, thinking)[0].tolist()
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise ValueError(
            "the target's tokenizer has neither a BOS nor an EOS token for a text to begin with; give prompts (JSONL)"
        )
    return [first]


def opening(tokenizer: Any, system_prompt: str | None = None) -> tuple[list[int], list[int]]:
    """Ids before a user's turn in the target's chat template, and ids from its end to the beginning of the answer.

    Raises:
        ValueError: there is no chat template, or it changes what the user wrote.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the target has no chat template, so it cannot write user turns; give prompts (JSONL) instead")
    marker = "\u2980user turn\u2980"
    messages = [{"role": "user", "content": marker}]
    if system_prompt is not None:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if text.count(marker) != 1:
        raise ValueError("the target's chat template changes what the user wrote; give prompts (JSONL) instead")
    before, after = text.split(marker)
    return tuple(tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))


def turn_end(tokenizer: Any) -> int | None:
    """The id that closes an answer in the target's chat template; ``None`` where nothing follows an answer."""
    marker = "\u2980answer\u2980"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}]
    after = tokenizer.apply_chat_template(messages, tokenize=False).partition(marker)[2].strip()
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
    return ids[0] if ids else None


def write_user_turns(
    target: Any,
    tokenizer: Any,
    count: int,
    sampling: Sampling,
    max_tokens: int = 120,
    system_prompt: str | None = None,
    place: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """User turns written by the target after its chat template's opening: different ones, readable, without loops.

    Args:
        target, tokenizer: the target.
        count: how many.
        sampling: for its batch size and seed; turns are drawn at temperature 0.9.
        max_tokens: turns that have not ended by then are left out.
        system_prompt: of the chat.
        place: file that keeps the turns written so far; an interrupted call goes on from there.
        say: called with a line now and then.

    Returns:
        At most ``count`` turns; fewer if five times as many tries gave not enough different ones.
    """
    before, after = opening(tokenizer, system_prompt)
    stop = {after[0], *_stop_ids(target)}
    batch = text_batch(target, sampling.batch_size, len(before) + max_tokens, sampling.seed)
    known = json.loads(place.read_text(encoding="utf-8")) if place is not None and place.is_file() else {}
    turns = {normalised(text): text for text in known.get("turns", [])}
    tried, size = known.get("tried", 0), sampling.batch_size
    while tried < 5 * count and len(turns) < count:
        # As many tries as will probably do, but no small batches and none that a kill would lose much of.
        step = min(max(3 * (count - len(turns)) // 2, size), 4 * size, 5 * count - tried)
        jobs = ((number, before, 0.9, max_tokens) for number in range(tried, tried + step))
        for done in sorted(batch.run(jobs, stop, loop_start), key=lambda row: row.number):
            text = tokenizer.decode(done.ids[len(before) : -1], skip_special_tokens=True).strip()
            if done.stopped and not done.looped and is_readable(text) and len(turns) < count:
                turns.setdefault(normalised(text), text)
        tried += step
        say(f"{len(turns):,} of {count:,} user turns")
        if place is not None:
            write_whole(place, json.dumps({"tried": tried, "turns": list(turns.values())}, ensure_ascii=False))
    return list(turns.values())


def write_whole(place: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.with_suffix(".tmp").write_text(text, encoding="utf-8")
    os.replace(place.with_suffix(".tmp"), place)


def answer_jobs(
    tokenizer: Any,
    prompts: list[Messages],
    sampling: Sampling,
    done: set[int],
    vocab_size: int,
    system_prompt: str | None = None,
    thinking: bool | None = None,
) -> Iterator[Job]:
    """Prompts that are still to be answered, in an order and with temperatures that follow from the seed.

    Texts from the very beginning (no messages) are never greedy: they would all be the same.

    Raises:
        ValueError: the tokenizer has ids that the target does not know.
    """
    order = list(range(len(prompts)))
    random.Random(sampling.seed).shuffle(order)
    for number in order:
        if number in done:
            continue
        ids = prompt_ids(tokenizer, prompts[number], system_prompt, thinking)
        if len(ids) > sampling.max_prompt_tokens or not ids:
            continue
        if max(ids) >= vocab_size:
            raise ValueError(
                f"the tokenizer gives the id {max(ids)}, but the target's vocabulary has {vocab_size}; name a target "
                "with its own tokenizer"
            )
        share = random.Random(f"{sampling.seed}/{number}").random()
        greedy = bool(prompts[number]) and share < sampling.greedy_share
        yield number, ids, 0.0 if greedy else sampling.temperature, sampling.max_new_tokens


def keep_answers(
    rows: Iterable[Written],
    store: TokenStore,
    max_tokens: int | None = None,
    progress: Progress | None = None,
    part_size: int = 256,
    first_part: int | None = None,
) -> int:
    """Put finished texts into a store, part by part: different ones that are long enough.

    Args:
        rows: as :class:`~specdec_hf.training.batching.ContinuousBatch` gives them.
        store: where they go.
        max_tokens: stop after about this many answer tokens; ``None``: when there are no more rows.
        progress: told of each part before it is written; may refuse the rest for want of room.
        part_size: texts of a part. first_part: of the first one, which an estimate is made from.

    Returns:
        Answer tokens written by this call.
    """
    known = {hash(tuple(item.ids.tolist())) for item in store}
    waiting: list[Sequence] = []
    finished: set[int] = set()
    written = unreported = 0
    size, last = first_part or part_size, time.monotonic()

    def flush() -> None:
        nonlocal waiting, finished, unreported, size, last
        if progress is not None:
            progress.part(len(finished), unreported, sum(len(item.ids) for item in waiting))
        store.append(waiting, finished)
        waiting, finished, unreported, size = [], set(), 0, part_size
        last = time.monotonic()

    source = iter(rows)
    while True:
        try:
            done = next(source)
        except StopIteration:
            break
        except BaseException:  # a server that is gone, or Ctrl-C: what is finished is kept
            store.append(waiting, finished)
            raise
        finished.add(done.number)
        answer, key = len(done.ids) - done.prompt_length, hash(tuple(done.ids))
        if answer >= MIN_ANSWER and key not in known:
            known.add(key)
            mask = torch.arange(len(done.ids)) >= done.prompt_length
            waiting.append(Sequence(torch.tensor(done.ids), mask, done.number))
            written += answer
            unreported += answer
        full = max_tokens is not None and written >= max_tokens
        late = size == part_size and time.monotonic() - last > PART_SECONDS
        if full or len(finished) >= size or late:
            flush()
        if full:
            break
    if finished:
        flush()
    return written


def write_answers(
    target: Any,
    tokenizer: Any,
    prompts: list[Messages],
    store: TokenStore,
    sampling: Sampling,
    max_tokens: int | None = None,
    progress: Progress | None = None,
    part_size: int = 256,
    system_prompt: str | None = None,
    thinking: bool | None = None,
) -> int:
    """Let the target answer prompts, and keep the answers. Prompts that the store has already are skipped.

    Args:
        target: a causal language model in float32 (on a CPU; bfloat16 is slower there) or half precision.
        tokenizer: its tokenizer, with a chat template or without.
        prompts: messages up to the answer; none for a text from its beginning.
        store: where texts go, a part for every ``part_size`` prompts.
        sampling: see there.
        max_tokens, progress, part_size: see :func:`keep_answers`.
        system_prompt, thinking: see :func:`prompt_ids`.

    Returns:
        Answer tokens written by this call.
    """
    vocab_size = target.config.get_text_config().vocab_size
    jobs = answer_jobs(tokenizer, prompts, sampling, store.done, vocab_size, system_prompt, thinking)
    capacity = sampling.max_prompt_tokens + sampling.max_new_tokens
    batch = text_batch(target, sampling.batch_size, capacity, sampling.seed)
    rows = batch.run(jobs, _stop_ids(target), loop_start)
    return keep_answers(rows, store, max_tokens, progress, part_size, min(part_size, sampling.batch_size))


def provenance(tokenizer: Any, target: str, dtype: str, about: dict[str, Any], sampling: Sampling) -> dict[str, Any]:
    """What a store's texts depend on, for ``provenance.json`` and the model card.

    Args:
        tokenizer: the target's. target: its name. dtype: what it computes in.
        about: where prompts come from, and how they are put.
        sampling: how answers are drawn.
    """
    import transformers

    return {
        "target": target,
        "target_dtype": dtype,
        "chat_template": getattr(tokenizer, "chat_template", None) is not None,
        **about,
        **asdict(sampling),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def first_loop(answer: list[int]) -> int | None:
    """What :func:`loop_start` says of the shortest beginning of a finished answer that repeats itself."""
    seen: set[tuple[int, ...]] = set()
    for length in range(1, len(answer) + 1):
        piece = tuple(answer[length - 24 : length]) if length >= 24 else None
        if (start := _period_start(answer, length)) is not None:
            return start
        if piece is not None:
            if piece in seen:
                return length - 24
            seen.add(piece)
    return None


def _period_start(answer: list[int], length: int) -> int | None:
    if length < 16:
        return None
    for period in range(1, 13):
        run = max(3 * period, 12)
        if length >= run + period and answer[length - run : length] == answer[length - run - period : length - period]:
            return length - run
    return None


def loop_start(answer: list[int]) -> int | None:
    """Tokens to keep of an answer whose end repeats itself, or ``None``; called after each new token.

    A repetition is the last 24 tokens standing earlier in the answer word for word, or a piece of up to 12 tokens that
    stands four times in a row. Repeated text is easy to predict and teaches nothing.
    """
    length = len(answer)
    if (start := _period_start(answer, length)) is not None:
        return start
    tail = answer[length - 24 :]
    for start in range(length - 25, -1, -1):
        if answer[start] == tail[0] and answer[start : start + 24] == tail:
            return length - 24
    return None


def _stop_ids(target: Any) -> set[int]:
    ids = target.generation_config.eos_token_id
    ids = ids if ids is not None else target.config.eos_token_id
    return set() if ids is None else set(ids) if isinstance(ids, (list, tuple)) else {ids}
