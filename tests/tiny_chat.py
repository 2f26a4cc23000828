"""A tiny chat model that has learned a few sentences, so that it writes user turns and answers of a kind of its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from conftest import make_target, make_tokenizer

ANIMALS = ("cats", "dogs", "owls", "bears", "foxes", "hens")
PLACES = ("rome", "paris", "peru", "oslo", "kyoto")
NUMBERS = ("two", "nine", "forty", "six")


def sentences(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Questions and answers."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        animal, place, number = rng.choice(ANIMALS), rng.choice(PLACES), rng.choice(NUMBERS)
        found.append((f"how many {animal} live in {place}?", f"there are {number} {animal} in {place} today."))
    return found


def write_chat_target(place: Path, chat: bool = True, steps: int = 220) -> Any:
    """Train for some seconds and save with a tokenizer; ``chat=False``: without chat template, texts of answers."""
    tokenizer = make_tokenizer()
    target = make_target(
        "llama", vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=3, head_dim=16, spread=1.0
    )
    texts = []
    for question, answer in sentences(256):
        start = f"u:{question}\na:" if chat else ""
        ids = tokenizer(start + answer)["input_ids"] + [tokenizer.eos_token_id]
        texts.append(torch.tensor(ids if chat else [tokenizer.bos_token_id, *ids]))
    target.train()
    optimizer = torch.optim.AdamW(target.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20, (steps - step) / (0.4 * steps))
        rows = [texts[number] for number in torch.randint(len(texts), (12,), generator=generator)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        loss = target(ids.clamp(min=0), labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
    target.eval()
    target.save_pretrained(place)
    if not chat:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(place)
    return target
