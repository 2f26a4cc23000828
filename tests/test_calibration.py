"""Calibration: the figures against naive versions, known biases removed, and `specdec calibrate` on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target, make_tokenizer
from typer.testing import CliRunner

from specdec_hf import DSparkConfig, DSparkDraftModel, cli, enable_speculation, last_speculation
from specdec_hf.answers import answer
from specdec_hf.calibration import (
    BINS,
    Rounds,
    area_under_curve,
    assess,
    calibrate,
    calibration_bins,
    calibration_error,
    confidence_logits,
    error_by_chance,
    fit_temperatures,
    record_rounds,
    run_calibration,
    save_temperatures,
    survival,
    table,
)
from specdec_hf.loading import Pair
from specdec_hf.prompts import Conversation, Turn

runner = CliRunner()
TRUE = (2.5, 0.5, 1.6, 0.8)


def synthetic(count: int, seed: int = 0, temperatures: tuple[float, ...] = TRUE) -> Rounds:
    """Rounds whose tokens survive with known probabilities, and a head that reports them with a known bias:
    the logit it gives is the true one times the place's temperature.
    """
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(count, len(temperatures), generator=generator, dtype=torch.float64) * 1.5 + 0.5
    alive = torch.rand(truth.shape, generator=generator, dtype=torch.float64) < torch.sigmoid(truth)
    return Rounds(truth * torch.tensor(temperatures, dtype=torch.float64), alive.long().cumprod(dim=1).sum(dim=1))


def tiny_pair(**head_fields: Any) -> Pair:
    target = make_target("llama", vocab_size=259, num_hidden_layers=2, eos_token_id=None)
    torch.manual_seed(0)
    fields = {"num_hidden_layers": 1, "block_size": 3, "markov_rank": 4, "target_layer_ids": [0], **head_fields}
    head = DSparkDraftModel(DSparkConfig.for_target(target.config, **fields)).eval()
    if head.confidence_head is not None:
        torch.nn.init.normal_(head.confidence_head.proj.weight)
    return Pair(target, make_tokenizer(), head, "tiny target", "tiny head", "", "float32")


def test_known_bias_goes_below_one_percent() -> None:
    """Over- and under-confident places: the temperatures are found, and the error vanishes on other rounds."""
    found = fit_temperatures(synthetic(60_000))
    assert found == pytest.approx(list(TRUE), rel=0.1)
    rest = synthetic(60_000, seed=1)
    before, after = assess(rest, [1.0] * len(TRUE)), assess(rest, found)
    assert max(one["ece"] for one in before) > 0.05
    assert max(one["ece"] for one in after) < 0.01
    assert all(one["ece"] < 3 * one["ece_by_chance"] + 0.003 for one in after)
    assert after[-1]["auc"] >= before[-1]["auc"]
    assert [one["observed"] for one in after] == pytest.approx([one["predicted"] for one in after], abs=0.01)


def test_a_calibrated_head_is_left_alone() -> None:
    assert fit_temperatures(synthetic(60_000, temperatures=(1.0, 1.0))) == pytest.approx([1.0, 1.0], rel=0.1)


def test_each_place_is_fitted_with_the_earlier_ones_fixed() -> None:
    rounds = synthetic(3_000)
    found = fit_temperatures(rounds)
    assert found[:2] == fit_temperatures(Rounds(rounds.logits[:, :2], rounds.accepted)), "later places change nothing"
    for other in (0.5, 1.0, 2.0):
        changed = [*found[:2], other]
        rows, survived = rounds.place(2)
        error = [calibration_error(survival(rounds.logits[:, :3], t)[rows, 2], survived) for t in (found[:3], changed)]
        assert error[0] <= error[1]


def test_error_and_bins_by_hand() -> None:
    predicted = torch.tensor([0.05, 0.08, 0.55, 1.0], dtype=torch.float64)
    survived = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    naive = (abs(0.5 - 0.065) * 2 + abs(1 - 0.55) + 0.0) / 4
    assert float(calibration_error(predicted, survived)) == pytest.approx(naive)
    both = calibration_error(torch.stack((predicted, predicted * 0)), survived)
    assert both.tolist() == pytest.approx([naive, 0.75])
    assert calibration_bins(predicted, survived) == [(pytest.approx(0.065), 0.5, 2), (0.55, 1.0, 1), (1.0, 1.0, 1)]
    assert BINS == 10


def test_error_by_chance_is_what_perfect_predictions_show() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted = torch.rand(500, generator=generator, dtype=torch.float64)
    shown = [
        float(calibration_error(predicted, (torch.rand(500, generator=generator) < predicted).double()))
        for _ in range(200)
    ]
    assert error_by_chance(predicted) == pytest.approx(sum(shown) / len(shown), rel=0.06)


def test_auc_is_the_share_of_pairs_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted = torch.randint(0, 6, (60,), generator=generator).double() / 5  # many ties
    survived = torch.randint(0, 2, (60,), generator=generator).double()
    pairs = [
        1.0 if good > bad else 0.5 if good == bad else 0.0
        for good in predicted[survived == 1].tolist()
        for bad in predicted[survived == 0].tolist()
    ]
    assert area_under_curve(predicted, survived) == pytest.approx(sum(pairs) / len(pairs))
    assert area_under_curve(predicted, torch.ones(60).double()) is None


def test_short_rounds_count_only_where_they_drafted() -> None:
    nan = float("nan")
    rounds = Rounds(torch.tensor([[0.0, 1.0], [2.0, nan]], dtype=torch.float64), torch.tensor([2, 1]))
    assert [place["rounds"] for place in assess(rounds, [1.0, 1.0])] == [2, 1]
    nobody = Rounds(torch.tensor([[0.0, nan], [2.0, nan]], dtype=torch.float64), torch.tensor([1, 0]))
    found = fit_temperatures(nobody)
    assert found[0] == found[1], "a place that no round reached keeps the one before"
    rounds = synthetic(2_000)
    never = Rounds(rounds.logits, rounds.accepted.clamp(max=1))
    found = fit_temperatures(never)
    assert found[0] != 1.0 and found[1:] == [found[0]] * 3, "so does one where no token survived"


def test_recorded_logits_are_those_that_cut_the_blocks() -> None:
    """What the hook notes, through the head's own confidence_probs, is what the threshold sees in generate()."""
    pair = tiny_pair()
    model = enable_speculation(pair.model)
    ids = torch.arange(5, 15)[None]
    with confidence_logits(pair.head) as noted:
        answer(model, pair.head, ids, 16)
    width = pair.head.max_draft_tokens
    first = torch.sigmoid(torch.tensor(noted[:width]))
    assert not pair.head.confidence_head._forward_hooks, "the hook is gone"
    for threshold in (0.3, 0.5, 0.7):
        answer(model, pair.head, ids, 16, assistant_confidence_threshold=threshold)
        expected = int((first >= threshold).long().cumprod(0).sum())
        assert last_speculation(model).proposal_lengths[0][0] == expected


def test_recording_follows_the_rounds() -> None:
    pair = tiny_pair()
    [rounds] = record_rounds(pair, [Conversation("x", [Turn([{"role": "user", "content": "Hi"}])])], (0.0, 1.0), 14)
    assert rounds.logits.shape == (rounds.accepted.shape[0], 3)
    drafted = (~rounds.logits.isnan()).sum(dim=1)
    assert bool((drafted >= rounds.accepted).all()) and int(drafted[0]) == 3
    with (
        pytest.raises(ValueError, match="nothing to calibrate"),
        confidence_logits(tiny_pair(enable_confidence_head=False).head),
    ):
        pass


def test_fit_and_assessment_use_different_prompts() -> None:
    biased, honest = synthetic(2_000), synthetic(2_000, seed=1, temperatures=(1.0,) * 4)
    result = calibrate([biased, honest, biased])
    assert result["rounds"] == {"fitted": 4_000, "assessed": 2_000}
    assert result["temperatures"] == fit_temperatures(biased)
    assert max(one["ece"] for one in result["before"]) < 0.05, "the honest prompt is the one that is assessed"
    assert "by chance" in table(result)
    again = calibrate([biased, biased], result["temperatures"])
    assert again["before"] == again["after"], "before is the head as it is"
    with pytest.raises(ValueError, match=r"2000 rounds to fit and 0 to assess: at least 40"):
        calibrate([biased])


def test_saving_copies_or_changes_in_place(tmp_path: Path) -> None:
    head = tiny_pair().head
    head.save_pretrained(tmp_path / "head")
    weights = (tmp_path / "head" / "model.safetensors").read_bytes()
    save_temperatures(str(tmp_path / "head"), tmp_path / "new", [1.5, 2.0, 0.5])
    loaded = DSparkDraftModel.from_pretrained(tmp_path / "new")
    assert loaded.config.confidence_temperatures == [1.5, 2.0, 0.5]
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == weights
    assert DSparkDraftModel.from_pretrained(tmp_path / "head").config.confidence_temperatures is None
    save_temperatures(str(tmp_path / "head"), tmp_path / "head", [1.0, 2.0, 3.0])
    assert DSparkDraftModel.from_pretrained(tmp_path / "head").config.confidence_temperatures == [1.0, 2.0, 3.0]
    assert not list((tmp_path / "head").glob(".*"))
    probs = loaded.confidence_probs(torch.tensor([[1.5, 2.0, 0.5]]))
    assert torch.allclose(probs, torch.sigmoid(torch.ones(1, 3))), "applied in generate()"


def test_generate_cuts_by_the_calibrated_confidence() -> None:
    """A huge temperature makes every confidence one half: all is drafted below that threshold and nothing above."""
    pair = tiny_pair()
    enable_speculation(pair.model)
    pair.head.config.confidence_temperatures = [1e9] * pair.head.max_draft_tokens
    ids, drafted, texts = torch.randint(3, 90, (1, 6)), [], []
    for threshold in (0.49, 0.51):
        out = pair.model.generate(
            ids, assistant_model=pair.head, speculative="dspark", assistant_confidence_threshold=threshold,
            num_assistant_tokens_schedule="constant", do_sample=False, max_new_tokens=8, eos_token_id=None,
            return_dict_in_generate=True,
        )  # fmt: skip
        drafted.append(out.speculation.drafted)
        texts.append(out.sequences)
    assert drafted[0] > 0 and drafted[1] == 0 and torch.equal(*texts)


def test_the_command_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pair = tiny_pair()
    pair.model.save_pretrained(tmp_path / "target")
    pair.tokenizer.save_pretrained(tmp_path / "target")
    pair.head.save_pretrained(tmp_path / "head")
    data = tmp_path / "p.jsonl"
    data.write_text("".join(json.dumps({"turns": [f"prompt {n}"]}) + "\n" for n in range(4)))
    common = ["calibrate", "--data", str(data), "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head")]
    common += ["--dtype", "float32", "--temperature", "1", "--max-new-tokens", "40"]
    done = runner.invoke(cli.app, [*common, "--output", str(tmp_path / "out"), "--save", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert "ECE" in done.output and "temperature" in done.output
    record = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert (tmp_path / "out" / "reliability.png").read_bytes()[:4] == b"\x89PNG"
    saved = DSparkDraftModel.from_pretrained(tmp_path / "new").config.confidence_temperatures
    assert saved == pytest.approx(record["temperatures"], abs=1e-6)
    assert record["provenance"]["temperatures"] == [1.0] and record["rounds"]["assessed"] >= 40
    with pytest.raises(ValueError, match="at least 40 each"):
        run_calibration(
            [data], str(tmp_path / "target"), str(tmp_path / "head"), "float32", save=tmp_path / "no", settings=_few()
        )
    assert not (tmp_path / "no").exists(), "nothing half-written"


def _few() -> Any:
    from specdec_hf.calibration import Settings

    return Settings(limit=2, max_new_tokens=8)
