"""``specdec convert --check``: is a head read rightly? A wrong reading raises no error, it only drafts badly.

The accepted length is measured through the public ``generate()``, for the head as its file says and for the usual
misreadings; which one fits is said in words.
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..generation import enable_speculation, last_speculation
from ..heads.dspark import DSparkConfig, DSparkDraftModel
from .formats import Answers, detect, raw_config
from .reading import Checkpoint, read_head
from .target import Target

PROMPTS = (
    "Explain step by step how to solve 3x + 7 = 22.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarise what a heat pump does in three sentences.",
    "List five cities in France and one fact about each.",
)
CLEARLY_BETTER = 1.1
"""A reading is called better from this ratio of accepted lengths on."""
NOTHING = 1.15
"""Below this accepted length a head drafts next to nothing that the target takes."""


@dataclass(frozen=True)
class Reading:
    """One way to read the file, and what came of it.

    Args:
        name: in words.
        option: what to give to ``specdec convert`` to get it.
        accepted: drafted tokens accepted.
        rounds: in how many rounds.
        tokens: of all prompts, gained in rounds (bonus token counted).
    """

    name: str
    option: str
    accepted: int
    rounds: int
    tokens: int

    @property
    def accepted_length(self) -> float:
        """tau: tokens a round, bonus token counted."""
        return self.tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class CheckResult:
    """Readings, the first as the file says; see :meth:`report`."""

    readings: list[Reading]
    prompts: str

    @property
    def best(self) -> Reading:
        """The reading that fits: the file's own unless another is clearly better."""
        top = max(self.readings, key=lambda reading: reading.accepted_length)
        own = self.readings[0]
        if not own.rounds and self.readings[1].accepted_length * CLEARLY_BETTER > top.accepted_length:
            top = self.readings[1]
        return top if top.accepted_length >= CLEARLY_BETTER * own.accepted_length else own

    def report(self) -> str:
        """A table and a verdict."""
        own, best = self.readings[0], self.best
        lines = [f"accepted length (bonus token counted) on {self.prompts}:"]
        lines += [
            f"  {r.accepted_length:5.2f}  {r.accepted:4d} accepted in {r.rounds:4d} rounds  {r.name}"
            for r in self.readings
        ]
        if best is not own and best.accepted_length >= NOTHING:
            lines.append(
                f"{best.name} fits: {best.accepted_length:.2f} against {own.accepted_length:.2f} as the file says. "
                f"Convert again with {best.option}, and tell whoever published the head."
            )
        elif best.accepted_length < NOTHING:
            lines.append(
                "No reading fits: about one token a round whatever is tried. The head belongs to another target or "
                "another revision of it, its rotary base is wrong, it is not trained, or the prompts are nothing like "
                "its training texts."
            )
        else:
            lines.append("The file is read rightly: no usual misreading does clearly better.")
            if "random" in self.prompts:
                lines.append("But random prompts tell little: check it with ids of its own texts (--prompt-ids).")
        return "\n".join(lines)


def check_head(
    source: str,
    target: Any,
    answers: Answers | None = None,
    hub: dict[str, Any] | None = None,
    prompts: list[str] | list[list[int]] | list[torch.Tensor] | None = None,
    max_new_tokens: int = 48,
) -> CheckResult:
    """Measure a head as read and as usually misread.

    Args:
        source: directory or repository of a head in any known layout.
        target: name of its target, or the loaded model (then ``prompts`` must be token ids).
        answers, hub: see :func:`~specdec_hf.interop.reading.read_head`.
        prompts: texts, or token ids (lists, or int64 [1, L]); default: four short questions, or random ids where the
            target has no tokenizer.
        max_new_tokens: of each prompt.

    Raises:
        ValueError, OSError: the head or the target cannot be read, or they do not belong together.
    """
    found = Target(target) if isinstance(target, str) else None
    if found is None and (not prompts or isinstance(prompts[0], str)):
        raise ValueError("with a loaded target give prompts as token ids, int64 [1, L]")
    text = found.text if found is not None else target.config.get_text_config(decoder=True)
    answers = replace(answers or Answers(), vocab_size=text.vocab_size)
    head, refused = _read(source, answers, hub, text.num_hidden_layers)
    if found is not None:
        found.check(head.config)
    ids, described = _prompt_ids(found, prompts, text.vocab_size)
    model = enable_speculation(target if found is None else found.model)
    results = [Reading(f"as the file says, target_layer_ids {refused}: refused", "", 0, 0, 0)] if refused else []
    for name, option, config in _readings(head.config, text.num_hidden_layers, refused):
        results.append(_measure(head, config, model, ids, max_new_tokens, name, option))
    return CheckResult(results, described)


def _read(
    source: str, answers: Answers, hub: dict[str, Any] | None, layers: int
) -> tuple[Checkpoint, list[int] | None]:
    """The head; with ids one lower where the file's reach the target's last layer, which is never a tap."""
    fields = raw_config(source, hub or {})
    layout = detect(fields, source)
    ids = fields.get("aux_hidden_state_layer_ids" if layout == "speculators" else "target_layer_ids")
    ids = (fields.get("dflash_config") or {}).get("target_layer_ids") if layout == "zlab" else ids
    if answers.target_layer_ids is None and isinstance(ids, list) and ids and all(type(one) is int for one in ids):
        ids = [one - (layout == "speculators") for one in ids]
        if max(ids) == layers - 1 and min(ids) >= 0:
            return read_head(source, replace(answers, target_layer_ids=[one - 1 for one in ids]), hub), ids
    return read_head(source, answers, hub), None


def _readings(config: DSparkConfig, layers: int, refused: list[int] | None) -> list[tuple[str, str, DSparkConfig]]:
    ids, width = config.target_layer_ids, config.hidden_size
    found = [("as the file says", "", config)]
    if refused:
        option = "--target-layer-ids " + ",".join(map(str, ids))
        found = [(f"target_layer_ids {ids} instead of {refused}", option, config)]
    for step in () if refused else (1, -1):
        moved = [one + step for one in ids]
        if min(moved) >= -1 and max(moved) < layers - 1:
            option = "--target-layer-ids " + ",".join(map(str, moved))
            found.append(
                (f"target_layer_ids {moved} instead of {ids}", option, _changed(config, target_layer_ids=moved))
            )
    anchor = not config.sample_from_anchor
    if anchor or config.block_size > 1:
        slots = "the anchor's slot predicts too" if anchor else "only the mask slots predict"
        option = "--sample-from-anchor" if anchor else "--no-sample-from-anchor"
        found.append((slots, option, _changed(config, sample_from_anchor=anchor, confidence_temperatures=None)))
    for factor, what in ((math.sqrt(width), "times"), (1 / math.sqrt(width), "divided by")):
        scale = config.embedding_scale * factor
        name = f"embeddings {what} the root of the width"
        found.append((name, f"--embedding-scale {scale:.6g}", _changed(config, embedding_scale=scale)))
    return found


def _changed(config: DSparkConfig, **fields: Any) -> DSparkConfig:
    changed = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(changed, name, value)
    changed.num_target_layers = None if "target_layer_ids" in fields else changed.num_target_layers
    changed._check()
    return changed


def _measure(
    head: Checkpoint, config: DSparkConfig, model: Any, ids: list[torch.Tensor], new: int, name: str, option: str
) -> Reading:
    draft = DSparkDraftModel(copy.deepcopy(config)).eval()
    draft.load_state_dict(head.tensors)
    draft = draft.to(model.device, model.dtype)
    accepted = rounds = tokens = 0
    batches: dict[int, list[torch.Tensor]] = {}
    for prompt in ids:  # rows of a batch equal their single runs; equal lengths need no padding
        batches.setdefault(prompt.shape[1], []).append(prompt)
    for prompts in batches.values():
        prompt = torch.cat(prompts)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # padding and attention masks of bare ids
            model.generate(prompt.to(model.device), assistant_model=draft, do_sample=False, max_new_tokens=new)
        stats = last_speculation(model)
        assert stats is not None
        if stats.fallback:
            raise ValueError(
                f"the target cannot be decoded speculatively ({stats.fallback}), so nothing can be measured"
            )
        accepted, rounds = accepted + stats.accepted, rounds + stats.rounds
        tokens += sum(map(sum, stats.accepted_lengths))
    return Reading(name, option, accepted, rounds, tokens)


def _as_ids(prompt: Any, size: int) -> torch.Tensor:
    ids = prompt if isinstance(prompt, torch.Tensor) else torch.tensor([prompt])
    if ids.dim() != 2 or not ids.numel() or int(ids.min()) < 0 or int(ids.max()) >= size:
        raise ValueError(
            f"a prompt must be token ids from 0 to {size - 1}, at least one; got {ids.flatten()[:8].tolist()}"
        )
    return ids


def _prompt_ids(target: Target | None, prompts: Any, size: int) -> tuple[list[torch.Tensor], str]:
    if prompts and not isinstance(prompts[0], str):
        return [_as_ids(one, size) for one in prompts], f"{len(prompts)} prompts"
    assert target is not None
    tokenizer = target.tokenizer()
    if tokenizer is None:
        if prompts:
            raise ValueError(f"{target.name} has no tokenizer, so texts cannot be prompts; give --prompt-ids")
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(size, (1, 32), generator=generator) for _ in range(8)], "8 random prompts (no tokenizer)"
    texts = list(prompts or PROMPTS)
    ids = []
    for text in texts:
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            encoded = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            encoded = tokenizer(text, return_tensors="pt")
        ids.append(encoded["input_ids"])
    return ids, f"{len(texts)} prompts"
