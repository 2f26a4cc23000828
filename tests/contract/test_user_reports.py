"""One test a kind of fault that users of this kind of software report, where it concerns generate() with DSpark.

Most kinds are tests elsewhere; ``WHERE`` says which, so that none is lost when files are renamed. The others are here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import STRATEGIES, assistant, compare, fresh_target, padded_prompt, prompt, shared_assistant, target

from specdec_hf import drafters, last_speculation

TESTS = Path(__file__).parent.parent
WHERE = {
    "end-of-sequence in mid-block": "contract/test_stops.py::test_end_of_sequence_at_any_place_of_a_block",
    "stop string in mid-block": "contract/test_stops.py::test_stop_strings",
    "stop string without a tokenizer": "contract/test_stops.py::test_stop_strings_without_a_tokenizer_are_refused",
    "more tokens than asked for": "contract/test_stops.py::test_never_more_than_the_budget",
    "no end-of-sequence id": "contract/test_stops.py::test_no_end_of_sequence_id_at_all",
    "end-of-sequence copied from the prompt": (
        "contract/test_stops.py::test_end_of_sequence_ids_inside_the_prompt_do_not_stop"
    ),
    "streamers get whole blocks": "contract/test_stops.py::test_streamers_get_what_plain_gives_them",
    "greedy text differs from plain": "contract/test_greedy_equality.py::test_tokens_equal_plain_generate",
    "processors see rejected tokens": "contract/test_stops.py::test_a_processor_with_state_sees_what_plain_shows_it",
    "tuples of another length": "contract/test_outputs.py::test_same_class_lengths_shapes_and_values",
    "beams ignored in silence": "contract/test_routes.py::test_other_ways_of_decoding_are_refused",
    "several answers a prompt": "contract/test_inputs.py::test_several_answers_a_prompt",
    "no acceptance rate": "contract/test_outputs.py::test_statistics_tell_what_happened",
    "rows of a batch disturb one another": "contract/test_greedy_equality.py::test_a_row_does_as_it_does_alone",
    "positions of padded rows": "contract/test_inputs.py::test_left_padding_and_holes",
    "unsupported call ends in silence": (
        "contract/test_caches.py::test_an_unknown_layer_means_plain_decoding_and_one_warning"
    ),
    "cache of an earlier turn": "contract/test_caches.py::test_three_turns_with_the_returned_cache",
    "draft context missing for a cached prefix": (
        "contract/test_caches.py::test_a_turn_drafts_what_it_would_without_the_cache"
    ),
    "prompt fed again on the next turn": "contract/test_caches.py::test_a_turn_feeds_only_what_is_new",
    "static caches": "contract/test_caches.py::test_each_kind_of_cache",
    "sliding windows": "contract/test_greedy_equality.py::test_each_family_far_beyond_its_window",
    "hybrid targets": "contract/test_recurrent.py::test_rejected_tokens_leave_no_trace",
    "two names of the cache": "contract/test_caches.py::test_both_names_of_the_argument",
    "head in another dtype": "contract/test_routes.py::test_a_head_in_another_dtype",
    "quantised target": "contract/test_routes.py::test_a_quantised_target",
    "adapter on the target": "contract/test_routes.py::test_a_target_under_an_adapter",
    "encoder-decoder models": "contract/test_routes.py::test_encoder_decoder_models_are_refused",
    "blocks cut after the target has run": (
        "contract/test_outputs.py::test_a_confidence_threshold_cuts_before_the_target_runs"
    ),
    "tap on the last layer": "test_hostile.py::test_tap_on_the_last_layer_or_beyond",
    "unreadable or unsafe weights": "test_hostile.py::test_unreadable_weights",
}


@pytest.mark.parametrize("kind", WHERE)
def test_each_kind_has_its_test(kind: str) -> None:
    file, name = WHERE[kind].split("::")
    assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8")


def test_each_strategy_is_under_the_contract() -> None:
    missing = sorted(set(drafters.available()) - set(STRATEGIES))
    if missing:
        pytest.skip(f"no make_<strategy> in harness.py for {', '.join(missing)}")
    assert "dspark" in STRATEGIES


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forward_passes_fall_with_acceptance(strategy: str) -> None:
    """Not one target forward more than rounds need: what speculation is for."""
    model, calls = fresh_target(), []
    handle = model.get_decoder().layers[-1].register_forward_hook(lambda *args: calls.append(1))  # the first may draft
    plain = model.generate(prompt(), do_sample=False, max_new_tokens=21)
    assert len(calls) == 21
    head = assistant(strategy, model)
    head.teach(plain, torch.arange(plain.shape[1])[None])
    calls.clear()
    model.generate(prompt(), do_sample=False, max_new_tokens=21, assistant_model=head)
    handle.remove()
    assert len(calls) == 1 + 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ids_never_leave_the_devices_and_dtypes_of_the_user(strategy: str) -> None:
    model = target()
    result = model.generate(prompt(), max_new_tokens=4, assistant_model=shared_assistant(strategy, model, "never"))
    assert result.dtype == torch.long
    assert result.device == model.device


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_settings_of_the_call_are_left_as_they_were(strategy: str) -> None:
    from transformers import GenerationConfig

    model = fresh_target()
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0, num_assistant_tokens=2)
    before, own = settings.to_dict(), model.generation_config.to_dict()
    inputs = padded_prompt(2)
    copies = {name: value.clone() for name, value in inputs.items()}
    model.generate(**inputs, generation_config=settings, assistant_model=assistant(strategy, model))
    assert settings.to_dict() == before
    assert model.generation_config.to_dict() == own
    assert all(torch.equal(inputs[name], copies[name]) for name in inputs)
    assert max(map(max, last_speculation(model).proposal_lengths)) == 2


@pytest.mark.skipif("dspark" not in STRATEGIES, reason="about DSpark's own options")
@pytest.mark.parametrize(
    "options",
    [
        {"draft_vocab_size": 40, "has_embed_tokens": True, "has_lm_head": True},
        {"draft_vocab_size": 40},
        {"sample_from_anchor": False, "block_size": 5},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
        {"markov_head_type": "none"},
        {"sliding_window": 3},
        {"enable_confidence_head": False},
        {"block_size": 1},
        {"block_size": 12},
        {"mask_token_id": 7},
        {"draft_top_k": 3},
        {"hidden_size": 16, "has_embed_tokens": True, "has_lm_head": True, "num_attention_heads": 2, "head_dim": 8},
        {"num_hidden_layers": 2, "target_layer_ids": [-1, 0]},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items())[:60],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_heads_of_every_make(options: dict[str, Any], batch: int) -> None:
    model, inputs = target("qwen3", seed=6), padded_prompt(batch, 10)
    head = assistant("dspark", model, "sometimes", **options)
    if head.config.has_reduced_vocab:
        head.set_draft_vocabulary(torch.arange(0, 80, 2))
    kwargs = {**inputs, "max_new_tokens": 15, "eos_token_id": [5, 6, 7], "repetition_penalty": 1.1}
    outcome = compare(model, lambda: dict(kwargs), "dspark", head=head)
    assert outcome.stats.drafted > 0


@pytest.mark.skipif("dspark" not in STRATEGIES, reason="about DSpark's own context")
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_a_padded_row_drafts_what_it_would_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft context of a padded row must hold the same tokens at the same positions."""
    from test_caches import recorded_drafts

    model, inputs = target(family, seed=6), padded_prompt(3, 10)
    head = assistant("dspark", model)  # not taught: what it drafts shows its whole context
    settings = {"max_new_tokens": 9, "do_sample": False, "assistant_model": head}
    with recorded_drafts("dspark", monkeypatch) as together:
        model.generate(**inputs, **settings)
    for row in range(3):
        with recorded_drafts("dspark", monkeypatch) as alone:
            text = inputs["input_ids"][row : row + 1, inputs["attention_mask"][row].bool()]
            model.generate(text, **settings)
        assert together[0][row] == alone[0][0]
