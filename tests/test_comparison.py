"""`specdec compare`: figures of known ways on a tiny target, and the whole command."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target, make_tokenizer
from typer.testing import CliRunner

from specdec_hf import DSparkConfig, DSparkDraftModel, cli, last_speculation
from specdec_hf.comparison import Result, Way, _rounds_until, batches, compare, make_ways, table

runner = CliRunner()


@pytest.fixture
def target() -> Any:
    return make_target("llama", vocab_size=259, num_hidden_layers=2, eos_token_id=None)


def test_a_copy_of_the_target_as_draft_accepts_all_and_plain_decoding_nothing(target: Any) -> None:
    twin = copy.deepcopy(target)
    prompts = [torch.arange(start, start + 9)[None] for start in (5, 40, 90)]
    ways = [
        Way("plain", {}, "plain"),
        Way("draft_model", {"assistant_model": twin, "speculative": "draft_model", "num_assistant_tokens": 3}, "own"),
        Way("transformers_assisted", {"assistant_model": twin, "num_assistant_tokens": 3}, "theirs"),
    ]
    plain, own, theirs = compare(target, ways, prompts, max_new_tokens=14)
    assert plain.accepted_length == 1.0 and plain.ratio(plain) == 1.0 and plain.parts == {}
    assert plain.tokens == own.tokens == theirs.tokens and own.same == theirs.same == [True] * 3
    # 13 tokens behind the prompt's: three rounds of four and one more, in forwards of the target alone
    assert own.forwards == [4, 4, 4] and own.accepted_length == pytest.approx(13 / 4)
    assert theirs.accepted_length > 2
    assert set(own.parts) == {"draft", "target", "other"} and min(own.parts.values()) > 0


def test_drafting_with_the_target_itself_is_no_forward(target: Any) -> None:
    own = Way("early_exit", {"speculative": "early_exit", "assistant_early_exit": 1}, "own")
    with pytest.warns(UserWarning, match="early"):
        plain, exits = compare(target, [Way("plain", {}, "plain"), own], [torch.arange(5, 14)[None]], max_new_tokens=14)
    assert exits.same == [True] and exits.tokens == plain.tokens
    assert exits.accepted_length >= 1.0 and exits.forwards == [len(last_speculation(target).accepted_lengths[0])]


def test_rounds_until_a_token() -> None:
    assert [_rounds_until(tokens, [3, 1, 2]) for tokens in range(1, 8)] == [0, 1, 1, 1, 2, 3, 3]


def test_the_ratio_is_a_median_over_prompts() -> None:
    plain = Result("plain", tokens=[10, 10, 10], seconds=[1.0, 2.0, 4.0], forwards=[9, 9, 9], same=[True] * 3)
    other = Result("other", tokens=[10, 10, 10], seconds=[0.5, 2.0, 1.0], forwards=[4, 5, 3], same=[True, False, True])
    assert other.ratio(plain) == 2.0 and other.accepted_length == 27 / 12 and other.speed == 30 / 3.5
    assert "2.00x" in table([plain, other]) and "2/3" in table([plain, other])


def test_an_unknown_way_names_what_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"'prompt_lokup' is no way.*did you mean 'prompt_lookup'.*transformers_lookup"
    ):
        make_ways(["prompt_lokup"], torch.float32, "cpu")


def test_the_command_from_names_to_json(target: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    head = DSparkDraftModel(
        DSparkConfig.for_target(target.config, num_hidden_layers=1, block_size=3, markov_rank=4, target_layer_ids=[0])
    )
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    head.save_pretrained(tmp_path / "head")
    (tmp_path / "p.jsonl").write_text('{"turns": ["abc abc"]}\n{"turns": ["xyz"]}\n', encoding="utf-8")
    arguments = ["compare", f"dspark={tmp_path / 'head'}", "prompt_lookup", "transformers_lookup"]
    options = {"data": "p.jsonl", "target": "target", "output": "out.json"}
    for name, value in options.items():
        arguments += [f"--{name}", str(tmp_path / value)]
    result = runner.invoke(cli.app, [*arguments, "--dtype", "float32", "--max-new-tokens", "12", "--threads", "1"])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    labels = [way["label"].split("=")[0] for way in written["ways"]]
    assert labels == ["plain", "dspark", "prompt_lookup", "transformers_lookup"]
    assert all(way["same"] == [True, True] for way in written["ways"])
    assert written["ways"][1]["parts"]["draft"] > 0 and "2 prompts, greedy" in result.output


def test_a_batch_counts_every_row_to_its_end(target: Any) -> None:
    twin = copy.deepcopy(target)
    prompts = [torch.arange(start, start + length)[None] for start, length in ((5, 9), (40, 4), (90, 7))]
    knobs = {"assistant_model": twin, "speculative": "draft_model", "num_assistant_tokens": 3}
    plain, own = compare(target, [Way("plain", {}, "plain"), Way("draft_model", knobs, "own")], prompts, 14, batch=2)
    assert plain.tokens == own.tokens == [28, 14] and own.same == [True, True]
    assert plain.accepted_length == pytest.approx(1.0) and own.accepted_length == pytest.approx(13 / 4)
    with pytest.raises(ValueError, match="one prompt at a time"):
        compare(target, [Way("plain", {}, "plain"), Way("transformers_lookup", {}, "theirs")], prompts, 14, batch=2)


def test_batches_are_padded_at_the_left() -> None:
    ids, mask = batches([torch.tensor([[1, 2, 3]]), torch.tensor([[4]])], 2, pad=9)[0]
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_settings_behind_a_colon() -> None:
    entry = "prompt_lookup:schedule=throughput,num_assistant_tokens=4,automatic_off=true"
    config = make_ways([entry], torch.float32, "cpu")[1].knobs["speculative"]
    assert (config.strategy, config.num_assistant_tokens_schedule) == ("prompt_lookup", "throughput")
    assert config.num_assistant_tokens == 4 and config.automatic_off is True
    with pytest.raises(ValueError, match="did you mean 'automatic_off'"):
        make_ways(["prompt_lookup:automatc_off=true"], torch.float32, "cpu")
    with pytest.raises(ValueError, match="takes no settings"):
        make_ways(["transformers_lookup:seed=1"], torch.float32, "cpu")


def test_random_prompts_need_no_file(target: Any, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    arguments = ["compare", "prompt_lookup:automatic_off=true", "--target", str(tmp_path / "target"), "--random", "3"]
    result = runner.invoke(cli.app, [*arguments, "--batch", "2", "--max-new-tokens", "12", "--dtype", "float32"])
    assert result.exit_code == 0 and "3 prompts in batches of 2" in result.output, result.output
    result = runner.invoke(cli.app, ["compare", "prompt_lookup", "--target", str(tmp_path / "target")])
    assert result.exit_code == 1 and "--random" in str(result.exception)
