"""Random calls of the public API, both ways: whatever plain ``generate()`` gives for a call, speculation must give.

A case is a function of its number alone. ``PYTHONPATH=.:tests python tests/contract/fuzzing.py --seconds 300`` runs
many and prints those that differ; ``test_fuzz.py`` runs a few of them.
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
import warnings
from typing import Any

import harness
import torch
from harness import PAD, VOCAB, Favour, Recorder, RowStop, padded_prompt, prompt, sequences_of, shared_assistant, target
from transformers import DynamicCache, GenerationConfig, StaticCache

from specdec_hf import SpeculativeConfig, install, last_speculation, speculative_decoding
from specdec_hf._hf import CACHE_KEY

RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
harness.FURTHER.update(RECURRENT)
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "opt", "bloom", "mixtral", *RECURRENT)
STRATEGIES = ("dspark", "draft_model", "prompt_lookup")
SCHEDULES = ("constant", "heuristic", "heuristic_transient", "adaptive")
LENGTHENED = 5


class Listener:
    """A streamer that remembers what it was given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def processors_of(rng: random.Random, text: list[int]) -> dict[str, Any]:
    """Some processors of GenerationConfig; `text` is what plain decoding says, so that they bite."""
    known: dict[str, Any] = {
        "repetition_penalty": rng.choice([0.7, 1.3]),
        "no_repeat_ngram_size": rng.choice([1, 2, 3]),
        "min_new_tokens": rng.choice([1, 4, 9]),
        "min_length": rng.choice([3, 15]),
        "bad_words_ids": [[text[0]], text[1:3] or [7]],
        "suppress_tokens": [rng.choice(text), 9],
        "begin_suppress_tokens": [text[0]],
        "forced_eos_token_id": rng.choice(text),
        "sequence_bias": [[[rng.choice(text)], -3.0], [[11, 12], 9.0]],
        "exponential_decay_length_penalty": (3, 1.2),
        "remove_invalid_values": True,
        "renormalize_logits": True,
    }
    chosen = rng.sample(sorted(known), rng.choice([0, 0, 1, 1, 2, 3]))
    return {name: known[name] for name in chosen}


def case(number: int) -> dict[str, Any]:
    """Everything about a case: target, assistant, arguments that both ways get, and how speculation is asked for."""
    rng = random.Random(number)
    family = rng.choice(FAMILIES)
    batch = rng.choice([1, 1, 2, 3, 5])
    length = rng.choice([1, 2, 5, 9, 13])
    shape = rng.choice(["ids", "ids", "padded", "holes", "embeds"]) if length > 5 else "ids"
    return {
        "number": number,
        "rng": rng,
        "family": family,
        "attention": rng.choice(["sdpa", "eager"]),
        "strategy": rng.choice(STRATEGIES),
        "agreement": rng.choice(harness.AGREEMENTS),
        "batch": batch,
        "length": length,
        "shape": shape,
        "cache": rng.choice(["none", "none", "dynamic", "config", "static", "static object", "turn"]),
        "answers": rng.choice([1, 1, 1, 2]),
        "route": rng.choice(["enabled", "enabled", "hook", "install", "strategy", "config"]),
    }


def arguments(c: dict[str, Any], model: Any) -> tuple[Any, dict[str, Any]]:
    """(a function that makes the arguments of one call anew, those that only speculation gets)."""
    rng, batch, length = c["rng"], c["batch"], c["length"]
    inputs: dict[str, Any]
    inputs = {"input_ids": prompt(batch, length, c["number"])}
    if c["shape"] in ("padded", "holes"):
        inputs = padded_prompt(batch, length, c["number"] % 7, holes=c["shape"] == "holes")
    text = model.generate(**inputs, max_new_tokens=24, do_sample=False)[:, length:]
    words = text.flatten().tolist()
    if c["shape"] == "embeds":
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"]).detach()
        if rng.random() < 0.5:
            del inputs["input_ids"]
    settings: dict[str, Any] = processors_of(rng, words)
    settings["do_sample"] = c["answers"] > 1 or rng.random() < 0.25
    if settings["do_sample"]:
        settings |= {"top_k": 1, "num_return_sequences": c["answers"]}
    budget = rng.choice([1, 2, 3, 7, 12, 22])
    if rng.random() < 0.8 or "input_ids" not in inputs:
        settings["max_new_tokens"] = budget
    else:
        settings["max_length"] = length + budget
    settings["eos_token_id"] = rng.choice([None, words[-1], rng.sample(words, min(4, len(words))), [3]])
    settings["pad_token_id"] = PAD
    wanted = [n for n in ("scores", "logits", "hidden_states", "attentions") if rng.random() < 0.3]
    settings["return_dict_in_generate"] = rng.random() < 0.5
    for name in wanted if c["attention"] == "eager" or "attentions" not in wanted else wanted[:-1]:
        settings[f"output_{name}"] = True
    if rng.random() < 0.15:
        settings["prefill_chunk_size"] = rng.choice([1, 3, 50])
    if rng.random() < 0.1 and c["cache"] == "none":
        settings["max_time"] = 1000.0
    own = rng.choice(["", "", "", "pure", "stateful"])
    stop = rng.choice(["", "", "", "user"])
    ids = rng.sample(words, min(3, len(words)))
    streams = rng.random() < 0.3 and not (batch * c["answers"] > 1 and rng.random() < 0.7)
    packed = rng.random() < 0.2
    first = None
    if c["cache"] == "turn" and "input_ids" in inputs and c["shape"] == "ids" and c["answers"] == 1:
        first = model.generate(inputs["input_ids"], max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        ids_after = torch.cat((first.sequences, prompt(batch, LENGTHENED, c["number"] + 1)), dim=1)
        inputs = {"input_ids": ids_after}
        settings.pop("prefill_chunk_size", None)
        if "max_length" in settings:
            settings["max_length"] += 6 + LENGTHENED

    def make() -> dict[str, Any]:
        import copy

        made: dict[str, Any] = {**inputs, **settings}
        if packed:
            made = {**inputs, "generation_config": GenerationConfig(**settings)}
        if own:
            made["logits_processor"] = [Favour() if own == "pure" else Recorder()]
        if stop:
            made["stopping_criteria"] = [RowStop(ids)]
        if streams:
            made["streamer"] = Listener()
        if first is not None:
            made[CACHE_KEY] = copy.deepcopy(first[CACHE_KEY])
        elif c["cache"] == "dynamic":
            made[CACHE_KEY] = DynamicCache()
        elif c["cache"] == "config":
            made[CACHE_KEY] = DynamicCache(config=model.config)
        elif c["cache"] == "static":
            made["cache_implementation"] = "static"
        elif c["cache"] == "static object":
            made[CACHE_KEY] = StaticCache(config=model.config, max_cache_len=64)
        if packed:
            made.pop("cache_implementation", None)
        return made

    knobs: dict[str, Any] = {}
    if rng.random() < 0.5:
        knobs["num_assistant_tokens"] = rng.choice([1, 2, 3, 4])
    if rng.random() < 0.4:
        knobs["num_assistant_tokens_schedule"] = rng.choice(
            ["heuristic", "heuristic_transient", "adaptive", "constant"]
        )
    if rng.random() < 0.3 and c["strategy"] != "prompt_lookup":
        knobs["assistant_confidence_threshold"] = rng.choice([0.2, 0.6, 0.95])
    if settings["do_sample"] and rng.random() < 0.4:
        knobs["coupling"] = "gumbel"
    return make, knobs


def differences(number: int) -> tuple[list[str], dict[str, Any]]:
    """What differs between the two ways of a case (empty: nothing), and the case."""
    c = case(number)
    model = target(c["family"], c["attention"], num_hidden_layers=2)
    head = shared_assistant(c["strategy"], model, c["agreement"])
    make, knobs = arguments(c, model)
    described = {name: value for name, value in c.items() if name != "rng"}
    kwargs = make()
    described |= {"knobs": knobs, "arguments": {k: said(v) for k, v in kwargs.items() if not torch.is_tensor(v)}}
    try:
        plain = model.generate(**kwargs)
    except (ValueError, RuntimeError):
        return [], described  # a few families cannot do it at all, e.g. Bloom with a static cache: nothing to compare
    ours = make()
    model._last_speculation, hooks = None, hooks_of(model)
    if "input_ids" in ours:
        head.teach(sequences_of(plain), harness._positions(ours, sequences_of(plain)))
    try:
        result = speculate(c, model, head, dict(ours), knobs)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return [f"raised {type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"], described
    found = compared(plain, result, kwargs, ours, model)
    return found + ["hooks were left behind"] * (hooks_of(model) != hooks), described


def hooks_of(model: Any) -> int:
    """How many hooks a model has; transformers leaves some of its own."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def said(value: Any) -> Any:
    return value.to_diff_dict() if isinstance(value, GenerationConfig) else value


def speculate(c: dict[str, Any], model: Any, head: Any, kwargs: dict[str, Any], knobs: dict[str, Any]) -> Any:
    config = SpeculativeConfig(strategy=c["strategy"], **knobs)
    if c["route"] == "hook":
        loop = speculative_decoding(head, config, streamer=kwargs.get("streamer"))
        return model.generate(**kwargs, custom_generate=loop)
    if c["route"] == "install":
        with install():
            return model.generate(**kwargs, assistant_model=head, speculative=config)
    if c["route"] == "strategy" and "coupling" not in knobs:
        return model.generate(**kwargs, assistant_model=head, assistant_strategy=c["strategy"], **knobs)
    return model.generate(**kwargs, assistant_model=head, speculative=config)


def compared(plain: Any, result: Any, kwargs: dict[str, Any], ours: dict[str, Any], model: Any) -> list[str]:
    found = []
    static = "static" in str(kwargs.get("cache_implementation", kwargs.get(CACHE_KEY, ""))).lower()
    if sequences_of(plain).tolist() != sequences_of(result).tolist():
        return [f"tokens differ:\n  {sequences_of(plain).tolist()}\n  {sequences_of(result).tolist()}"]
    if "streamer" in kwargs:
        a, b = kwargs["streamer"], ours["streamer"]
        if (a.tokens, a.ended) != (b.tokens, b.ended):
            found.append(f"streams differ:\n  {a.tokens} {a.ended}\n  {b.tokens} {b.ended}")
    for name in ("scores", "logits"):
        one, other = getattr(plain, name, None), getattr(result, name, None)
        if (one is None) != (other is None):
            found.append(f"{name}: only one has them")
        elif one is not None:
            if len(one) != len(other):
                found.append(f"{len(one)} and {len(other)} {name}")
            elif not torch.allclose(*(torch.stack(it)[running(plain, kwargs)] for it in (one, other)), 1e-3, 2e-3):
                found.append(f"{name} differ")
    for name in ("hidden_states", "attentions"):
        one, other = getattr(plain, name, None), getattr(result, name, None)
        last = -1 if name == "attentions" and static else None  # plain generate() counts a static cache's empty slots
        shapes = [it and [[tuple(t.shape)[:last] for t in step] for step in it] for it in (one, other)]
        if shapes[0] != shapes[1]:
            found.append(f"{name} have shapes\n  {shapes[0]}\n  {shapes[1]}")
    caches = [getattr(it, CACHE_KEY, None) for it in (plain, result)]
    if caches[0] is not None and caches[0].get_seq_length() != caches[1].get_seq_length():
        found.append(f"cache lengths {[int(cache.get_seq_length()) for cache in caches]}")
    stats = last_speculation(model)
    if stats is None:
        found.append("no statistics")
    elif stats.fallback is not None:
        found.append(f"fell back: {stats.fallback}")
    return found


def running(plain: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """bool [steps, B]: whether a row had not ended yet. What is said of ended rows differs: they are padding."""
    config = kwargs.get("generation_config")
    ends = kwargs.get("eos_token_id") if config is None else config.eos_token_id
    ends = torch.tensor([] if ends is None else ends).view(-1)
    new = plain.sequences[:, -len(plain.scores or plain.logits) :]
    stop = torch.isin(new, ends)
    rules = [rule for rule in kwargs.get("stopping_criteria", []) if isinstance(rule, RowStop)]
    for rule in rules:
        stop |= torch.isin(new, torch.tensor(sorted(rule.ids)))
    return (stop.long().cumsum(1) - stop.long() == 0).T


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", type=int, default=None)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    end, number, failed = time.monotonic() + options.seconds, options.first, 0
    while time.monotonic() < end:
        found, described = differences(options.only if options.only is not None else number)
        if found:
            failed += 1
            print(f"-- case {described['number']}: {described}", *found, sep="\n   ", flush=True)
        number += 1
        if options.only is not None:
            break
    print(f"{number - options.first} cases, {failed} differ (vocabulary {VOCAB})")


if __name__ == "__main__":
    main()
