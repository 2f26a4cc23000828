"""``specdec demo``: the same prompts through plain ``generate()`` and through DSpark, side by side, then a table.

Uses the package as a user would: ``enable_speculation`` and ``generate(assistant_model=...)``. Prints; measures with a
clock around each call, prompt included, both ways in turn. Importing this file does not import torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .hardware import block_cost, processor_name
from .loading import Pair, check_names, load_pair

if TYPE_CHECKING:
    import torch

    from .options import SpeculativeConfig
    from .output import SpeculationStats

CHECK_TOKENS = 32
"""New tokens a prompt in the float32 comparison: long enough to tell, short enough not to be waited for."""
CHECK_MAX_PARAMETERS = 1_000_000_000
"""A target larger than this is not loaded a second time in float32."""

TREE_NODES, CHEAP = 12, 2.0
"""Nodes of a tree, and what a block of them may cost in single tokens for a tree to be drafted."""

PROMPTS = (
    "A baker fills 18 trays with 12 rolls each. She sells 150 rolls in the morning and half of the rest in the "
    "afternoon. How many rolls are left in the evening?",
    "Write a Python function that takes a list of words and returns the longest one. Show how to call it.",
    "What should I think about before I bring home a dog from a shelter?",
)


@dataclass(frozen=True)
class Run:
    """One prompt, both ways.

    Attributes:
        plain_tokens, draft_tokens: new token ids of plain ``generate()`` and of the speculative call.
        plain_seconds, draft_seconds: wall time of each call, prompt included.
        stats: what the speculative call did.
    """

    plain_tokens: list[int]
    draft_tokens: list[int]
    plain_seconds: float
    draft_seconds: float
    stats: SpeculationStats

    @property
    def plain_speed(self) -> float:
        """New tokens per second of plain ``generate()``."""
        return len(self.plain_tokens) / self.plain_seconds

    @property
    def draft_speed(self) -> float:
        """New tokens per second of the speculative call."""
        return len(self.draft_tokens) / self.draft_seconds


def run_demo(
    prompts: Sequence[str] = PROMPTS,
    target: str | None = None,
    draft: str | None = None,
    dtype: str = "auto",
    max_new_tokens: int = 128,
    threads: int | None = None,
    settings: str | None = None,
) -> list[Run]:
    """Answer ``prompts`` with plain ``generate()`` and with DSpark, stream both, print what it gained.

    Args:
        prompts: user messages; a target without a chat template gets them as they are.
        target: model name or directory; None is SmolLM2-135M-Instruct (see ``default_target``).
        draft: DSpark head for it; None is the bundled one, which fits the default target only.
        dtype: one of ``loading.DTYPES``, for both models.
        max_new_tokens: budget a prompt, at least 1.
        threads: CPU threads; None leaves torch's choice.
        settings: how to draft, ``NAME=VALUE,...`` (see ``options.parse_settings``); None is a tree where this CPU
            verifies its nodes for next to nothing (bfloat16, if it computes in that type), else a chain.

    Returns:
        A ``Run`` a prompt, as printed.

    Raises:
        ValueError: a value out of its range, or ``target`` without ``draft``.
        FileNotFoundError: no default target, or no bundled head.
    """
    _check(prompts, target, draft, dtype, max_new_tokens, threads)
    with _step("importing torch and transformers"):
        import torch
        import transformers

        from .generation import enable_speculation
        from .options import parse_settings

    if threads is not None:
        torch.set_num_threads(threads)
    how = parse_settings("dspark", settings or "")
    pair = load_pair(target, draft, dtype, _say)
    if settings is None and _rows_are_cheap(pair):
        how = replace(how, draft_tree_nodes=TREE_NODES)
    model, tokenizer, head = enable_speculation(pair.model), pair.tokenizer, pair.head
    exact = _check_in_float32(pair, target, draft, prompts, min(CHECK_TOKENS, max_new_tokens), how)
    _say(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {pair.dtype} on {model.device}, "
        f"{torch.get_num_threads()} CPU threads, {processor_name()}"
    )
    _say(f"target: {pair.target}, {model.num_parameters() / 1e6:.0f} M parameters")
    drafted = f"draft_tree_nodes={how.draft_tree_nodes}" if how.draft_tree_nodes else "a chain"
    _say(f"draft:  {pair.draft}, {head.num_parameters() / 1e6:.1f} M parameters, {drafted}")

    with _step("warming up"):
        for speculative in (False, True):
            _generate(model, head if speculative else None, _encode(tokenizer, prompts[0], model.device), 8, how)
    runs = []
    for number, prompt in enumerate(prompts):
        print(f"\n[{number + 1}/{len(prompts)}] {prompt}")
        runs.append(_run(model, head, tokenizer, prompt, max_new_tokens, how, draft_first=number % 2 == 1))
    print("\n" + report(runs, exact, pair.dtype))
    return runs


def report(runs: Sequence[Run], exact: str, dtype: str) -> str:
    """The table under the texts.

    Args:
        runs: at least one.
        exact: result of the float32 comparison, a sentence.
        dtype: the type that ``runs`` used, for the remark about near ties.

    Returns:
        Lines of plain text, no newline at the end.
    """
    lines = [
        f"{'prompt':>6}  {'tokens':>6}  {'plain tok/s':>11}  {'DSpark tok/s':>12}  {'speed-up':>8}  "
        f"{'accepted length':>15}  same tokens"
    ]
    for number, run in enumerate(runs, 1):
        lines.append(
            f"{number:>6}  {len(run.draft_tokens):>6}  {run.plain_speed:>11.1f}  {run.draft_speed:>12.1f}  "
            f"{run.draft_speed / run.plain_speed:>7.2f}x  {run.stats.mean_accepted_length:>15.2f}  {_same(run)}"
        )
    plain = sum(len(run.plain_tokens) for run in runs) / sum(run.plain_seconds for run in runs)
    draft = sum(len(run.draft_tokens) for run in runs) / sum(run.draft_seconds for run in runs)
    rounds = [length for run in runs for row in run.stats.accepted_lengths for length in row]
    lines.append(
        f"{'all':>6}  {sum(len(run.draft_tokens) for run in runs):>6}  {plain:>11.1f}  {draft:>12.1f}  "
        f"{draft / plain:>7.2f}x  {sum(rounds) / max(len(rounds), 1):>15.2f}"
    )
    seconds = {part: sum(run.stats.seconds[part] for run in runs) for part in ("target", "draft", "other")}
    whole = sum(seconds.values()) or 1.0
    lines.append("")
    lines.append(
        "accepted length: tokens that one forward of the target yields, its own bonus token counted; plain is 1"
    )
    lines.append("time of DSpark: " + ", ".join(f"{part} {100 * s / whole:.0f} %" for part, s in seconds.items()))
    lines.append(exact)
    if dtype != "float32" and any(run.plain_tokens != run.draft_tokens for run in runs):
        lines.append(
            f"In {dtype} the two can part where the target's two best tokens are nearly level: a forward of several "
            "tokens rounds differently from one of a single token. --dtype float32 shows the whole texts without it."
        )
    return "\n".join(lines)


def _check(
    prompts: Sequence[str], target: str | None, draft: str | None, dtype: str, max_new_tokens: int, threads: int | None
) -> None:
    if not prompts or not all(isinstance(prompt, str) and prompt.strip() for prompt in prompts):
        raise ValueError(f"prompts is {list(prompts)!r}: it needs at least one text, none of them empty")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: at least 1 token is needed to show anything")
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}: it must be at least 1; leave it out for torch's own choice")
    check_names(target, draft, dtype)


def _rows_are_cheap(pair: Pair) -> bool:
    """Whether this CPU reads a whole tree in little more time than one token, as it must for a tree to pay."""
    return pair.model.device.type == "cpu" and block_cost(pair.dtype, TREE_NODES + 1) < CHEAP


def _check_in_float32(
    pair: Pair, target: str | None, draft: str | None, prompts: Sequence[str], tokens: int, how: SpeculativeConfig
) -> str:
    """Compare both ways token for token where rounding plays no part; a sentence for the report."""
    from tqdm import tqdm

    from .generation import enable_speculation

    if pair.dtype != "float32":
        if pair.model.num_parameters() > CHECK_MAX_PARAMETERS:
            return "float32 check: left out, the target is too large to load twice."
        pair = load_pair(target, draft, "float32", _say)
    model, tokenizer, head = enable_speculation(pair.model), pair.tokenizer, pair.head
    equal = 0
    for prompt in tqdm(prompts, desc="comparing in float32", unit="prompt", leave=False):
        inputs = _encode(tokenizer, prompt, model.device)
        equal += _generate(model, None, inputs, tokens, how)[0] == _generate(model, head, inputs, tokens, how)[0]
    if equal == len(prompts):
        return f"float32 check: the same tokens as plain generate() on all {equal} prompts, {tokens} new tokens each."
    return (
        f"float32 check: FAILED, the tokens differ on {len(prompts) - equal} of {len(prompts)} prompts. That is a bug: "
        "please report it with the prompt and these versions."
    )


def _encode(tokenizer: Any, prompt: str, device: torch.device) -> dict[str, torch.Tensor]:
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt").to(device)
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(device)


def _generate(
    model: Any,
    head: Any | None,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int,
    how: SpeculativeConfig,
    streamer: Any | None = None,
) -> tuple[list[int], float]:
    """One greedy call, speculative with a ``head``; new token ids and seconds."""
    assisted = {} if head is None else {"assistant_model": head, "speculative": how}
    start = time.perf_counter()
    out = model.generate(**inputs, **assisted, do_sample=False, max_new_tokens=max_new_tokens, streamer=streamer)
    tokens = out[0, inputs["input_ids"].shape[1] :].tolist()  # to the CPU: the clock stops when the work is done
    return tokens, time.perf_counter() - start


def _run(
    model: Any, head: Any, tokenizer: Any, prompt: str, max_new_tokens: int, how: SpeculativeConfig, draft_first: bool
) -> Run:
    """Both ways on one prompt. They take turns in going first, so that neither always meets the warmer machine."""
    from transformers import TextStreamer

    from .generation import last_speculation

    inputs = _encode(tokenizer, prompt, model.device)
    results, stats = {}, None
    for speculative in (True, False) if draft_first else (False, True):
        print(f"\n--- {'DSpark' if speculative else 'plain generate()'}")
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        results[speculative] = _generate(model, head if speculative else None, inputs, max_new_tokens, how, streamer)
        if speculative:
            stats = last_speculation(model)
    assert stats is not None
    return Run(results[False][0], results[True][0], results[False][1], results[True][1], stats)


def _same(run: Run) -> str:
    if run.plain_tokens == run.draft_tokens:
        return "yes"
    pairs = zip(run.plain_tokens, run.draft_tokens, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(run.plain_tokens), len(run.draft_tokens)))
    return f"the first {first}"


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@contextmanager
def _step(what: str) -> Iterator[None]:
    """Announce a wait and say how long it took; transformers draws its own bars in between."""
    _say(f"{what} ...")
    start = time.perf_counter()
    yield
    _say(f"{what}: {time.perf_counter() - start:.1f} s")
