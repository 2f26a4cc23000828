"""Generation stops exactly where plain generate() stops; processors, criteria, streamers see what plain shows them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import (
    STRATEGIES,
    VOCAB,
    Recorder,
    RowStop,
    compare,
    fresh_target,
    padded_prompt,
    prompt,
    shared_assistant,
    target,
)
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, TextIteratorStreamer, TextStreamer
from transformers.generation import stopping_criteria as hf_stopping

from specdec_hf import last_speculation, speculative_decoding

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES)
BYTES = 260  # vocabulary of targets that write text


def greedy(model: Any, inputs: dict[str, Any], count: int) -> list[list[int]]:
    """The new tokens of plain greedy decoding, without any stop."""
    sequences = model.generate(**inputs, do_sample=False, max_new_tokens=count)
    return sequences[:, inputs["input_ids"].shape[1] :].tolist()


# -- end-of-sequence ids and lengths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(12))
def test_end_of_sequence_at_any_place_of_a_block(strategy: str, place: int) -> None:
    model, inputs = target("qwen3", seed=3), {"input_ids": prompt(1, 8, 5)}
    text = greedy(model, inputs, 12)[0]
    eos = [VOCAB - 1, text[place]]
    outcome = compare(
        model,
        lambda: {**inputs, "max_new_tokens": 20, "eos_token_id": eos},
        strategy,
        expect_rounds=text.index(text[place]) > 0,
    )
    assert outcome.speculative.shape[1] == 8 + text.index(text[place]) + 1


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("batch", [1, 3])
def test_never_more_than_the_budget(strategy: str, budget: int, batch: int) -> None:
    model, inputs = target(), padded_prompt(batch, 8)
    outcome = compare(model, lambda: {**inputs, "max_new_tokens": budget}, strategy, expect_rounds=budget > 1)
    assert outcome.speculative.shape[1] == 8 + budget
    compare(model, lambda: {**inputs, "max_length": 8 + budget}, strategy, expect_rounds=budget > 1)


def test_no_end_of_sequence_id_at_all(strategy: str) -> None:
    model = fresh_target("llama", eos_token_id=None, pad_token_id=None)
    model.generation_config.pad_token_id = None
    outcome = compare(model, lambda: {"input_ids": prompt(), "max_new_tokens": 15}, strategy)
    assert outcome.speculative.shape[1] == 9 + 15


def test_end_of_sequence_ids_inside_the_prompt_do_not_stop(strategy: str) -> None:
    model, ids = target(), prompt(1, 10)
    eos = int(ids[0, 3])
    ids[0, 7] = eos
    outcome = compare(model, lambda: {"input_ids": ids, "max_new_tokens": 9, "eos_token_id": eos}, strategy)
    assert outcome.speculative.shape[1] > 11


# -- the clock ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_no_time_left_gives_one_token(strategy: str, batch: int) -> None:
    inputs = padded_prompt(batch)
    outcome = compare(
        target(), lambda: {**inputs, "max_new_tokens": 12, "max_time": 1e-9}, strategy, expect_rounds=False
    )
    assert outcome.speculative.shape[1] == inputs["input_ids"].shape[1] + 1


@pytest.mark.parametrize("batch", [1, 3])
def test_the_clock_is_read_at_every_token(strategy: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(hf_stopping, "time", SimpleNamespace(time=lambda: next(ticks)))
    inputs = padded_prompt(batch)
    outcome = compare(target(), lambda: {**inputs, "max_new_tokens": 20, "max_time": 7.5}, strategy)
    assert outcome.speculative.shape[1] == inputs["input_ids"].shape[1] + 8


# -- stop strings ------------------------------------------------------------------------------------------------------


def stop_string(text: list[int], place: int) -> str:
    """Two characters that end at a place of the text (bytes beyond ASCII would not decode one by one)."""
    return "".join(chr(token - 3) for token in text[place - 1 : place + 1])


def ascii_target(seed: int = 0, **overrides: Any) -> Any:
    """A target that writes printable ASCII only."""
    model = fresh_target("llama", seed=seed, vocab_size=BYTES, **overrides)
    model.generation_config.suppress_tokens = [i for i in range(BYTES) if not ord("!") + 3 <= i <= ord("~") + 3]
    return model


@pytest.mark.parametrize("given", ["argument", "generation_config", "model"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_eos", [False, True])
def test_stop_strings(strategy: str, given: str, batch: int, with_eos: bool, byte_tokenizer: Any) -> None:
    model, inputs = ascii_target(), padded_prompt(batch, seed=1)
    text = greedy(model, inputs, 12)
    stop = [stop_string(row, 4 + 2 * i) for i, row in enumerate(text)]
    settings = {"max_new_tokens": 24, "do_sample": False, **({"eos_token_id": [2, 200]} if with_eos else {})}
    if given == "generation_config":
        more = GenerationConfig(stop_strings=stop, pad_token_id=0, **settings)
        more.suppress_tokens = model.generation_config.suppress_tokens
        settings = {"generation_config": more}
    elif given == "argument":
        settings["stop_strings"] = stop
    else:
        model.generation_config.stop_strings = stop
    outcome = compare(model, lambda: {**inputs, **settings, "tokenizer": byte_tokenizer}, strategy)
    if batch == 1:
        assert outcome.speculative.shape[1] == inputs["input_ids"].shape[1] + 5
    if given == "model":
        assert model.generation_config.stop_strings == stop
    if given == "generation_config":
        assert more.stop_strings == stop


def test_stop_strings_without_a_tokenizer_are_refused(strategy: str) -> None:
    model = target()
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(
            prompt(), max_new_tokens=4, stop_strings="ab", assistant_model=shared_assistant(strategy, model, "always")
        )


def test_stop_strings_by_the_hook(strategy: str, byte_tokenizer: Any) -> None:
    model, inputs = ascii_target(seed=1), {"input_ids": prompt()}
    stop = stop_string(greedy(model, inputs, 12)[0], 6)
    kwargs = {**inputs, "max_new_tokens": 20, "do_sample": False, "stop_strings": stop, "tokenizer": byte_tokenizer}
    loop = speculative_decoding(shared_assistant(strategy, model, "always"), tokenizer=byte_tokenizer)
    plain = model.generate(**kwargs)
    assert model.generate(**kwargs, custom_generate=loop).tolist() == plain.tolist()
    assert plain.shape[1] == 9 + 7


# -- what a user's own processors and criteria see ---------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_eos", [False, True])
@pytest.mark.parametrize("agreement", ["always", "sometimes", "never"])
def test_a_processor_with_state_sees_what_plain_shows_it(
    strategy: str, batch: int, with_eos: bool, agreement: str
) -> None:
    model, inputs = target("qwen3", seed=1), padded_prompt(batch)
    seen: list[Recorder] = []

    def call() -> dict[str, Any]:
        seen.append(Recorder())
        eos = {"eos_token_id": list(range(60, 70))} if with_eos else {}
        return {**inputs, **eos, "max_new_tokens": 14, "logits_processor": LogitsProcessorList([seen[-1]])}

    outcome = compare(model, call, strategy, agreement)
    assert seen[0].calls == seen[1].calls
    assert len(seen[1].calls) == outcome.speculative.shape[1] - inputs["input_ids"].shape[1]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_eos", [False, True])
def test_a_criterion_is_judged_at_every_token(strategy: str, batch: int, with_eos: bool) -> None:
    model, inputs = target("qwen3", seed=2), padded_prompt(batch)
    text = greedy(model, inputs, 14)
    stops = [row[3 + 2 * i] for i, row in enumerate(text)]
    seen: list[RowStop] = []

    def call() -> dict[str, Any]:
        seen.append(RowStop(stops))
        eos = {"eos_token_id": [VOCAB - 1]} if with_eos else {}
        return {**inputs, **eos, "max_new_tokens": 16, "stopping_criteria": StoppingCriteriaList([seen[-1]])}

    outcome = compare(model, call, strategy)
    assert seen[0].calls == seen[1].calls
    assert outcome.speculative.shape[1] < inputs["input_ids"].shape[1] + 16


def test_a_criterion_sees_the_scores(strategy: str) -> None:
    model, seen = target(), []

    def criterion(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(None if scores is None else [round(float(step.max()), 3) for step in scores])
        return torch.zeros(1, dtype=torch.bool)

    kwargs = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 8}
    compare(model, lambda: {"input_ids": prompt(), **kwargs, "stopping_criteria": [criterion]}, strategy)
    assert len(seen) == 16
    assert seen[:8] == seen[8:]


# -- streamers ---------------------------------------------------------------------------------------------------------


class RecordingStreamer:
    """Keeps what it is given, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")


@pytest.mark.parametrize("agreement", ["always", "sometimes", "never"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("place", [None, 5])
def test_streamers_get_what_plain_gives_them(strategy: str, agreement: str, batch: int, place: int | None) -> None:
    model, inputs = target(), padded_prompt(batch)
    eos = {} if place is None else {"eos_token_id": [row[place] for row in greedy(model, inputs, 12)]}
    streamers: list[RecordingStreamer] = []

    def call() -> dict[str, Any]:
        streamers.append(RecordingStreamer())
        return {**inputs, **eos, "max_new_tokens": 13, "streamer": streamers[-1]}

    compare(model, call, strategy, agreement)
    assert streamers[0].events == streamers[1].events
    assert streamers[1].events.count("end") == 1
    assert all(len(tokens) == batch for tokens in streamers[1].events[1:-1])  # the prompt comes first, whole


def test_text_streamers(strategy: str, byte_tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, ids = ascii_target(), prompt()
    head = shared_assistant(strategy, model, "sometimes")
    new = model.generate(ids, max_new_tokens=10, do_sample=False)[0, 9:]
    streamer = TextStreamer(byte_tokenizer, skip_prompt=True)
    model.generate(ids, max_new_tokens=10, do_sample=False, assistant_model=head, streamer=streamer)
    assert capsys.readouterr().out.strip() == byte_tokenizer.decode(new).strip()
    iterator = TextIteratorStreamer(byte_tokenizer, skip_prompt=True)
    loop = speculative_decoding(head, streamer=iterator)
    model.generate(ids, max_new_tokens=10, do_sample=False, custom_generate=loop, streamer=iterator)
    assert "".join(iterator) == byte_tokenizer.decode(new)
    assert last_speculation(model).rounds > 0
