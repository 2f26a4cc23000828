"""Runs that must be equal: killed and resumed, on two processes, accumulated, packed; and what else a run can do."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import FAMILIES, make_target
from safetensors.torch import load_file
from test_trainer import HEAD, small, write_texts
from training_processes import LONG, SHORT, config

from specdec_hf.heads.dspark import DSparkDraftModel
from specdec_hf.targets import TapRecorder
from specdec_hf.training.features import FeatureCache, target_features
from specdec_hf.training.objective import DSparkObjective
from specdec_hf.training.placement import process_state
from specdec_hf.training.rows import TextDataset, collate, pack
from specdec_hf.training.store import Sequence, TokenStore
from specdec_hf.training.trainer import TrainConfig, TrainingModule, freeze_copies, last_checkpoint, new_head, train

CONFIGS = Path(__file__).parent.parent / "configs"
DEEPSPEC = Path(__file__).parent / "golden" / "deepspec"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """What ``training_processes.py`` made, and the same runs plainly: ``whole`` and ``one``."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    write_texts(folder / "data", make_target(), count=21, length=20)
    script = Path(__file__).parent / "training_processes.py"
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    train(make_target(), config(folder, "whole", **LONG))
    train(make_target(), config(folder, "one", **SHORT))
    return folder


def losses(folder: Path) -> dict[int, float]:
    """Training losses by step, from the newest checkpoint."""
    state = json.loads((last_checkpoint(folder) / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "head" / "model.safetensors")


def assert_same_weights(one: Path, other: Path, atol: float) -> None:
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_a_killed_run_goes_on_with_identical_losses(runs):
    assert not (runs / "killed" / "head").exists()  # it was killed before its end
    train(make_target(), config(runs, "killed", **LONG), resume=True)
    whole, resumed = losses(runs / "whole"), losses(runs / "killed")
    assert len(whole) == LONG["max_steps"] and resumed == whole
    assert_same_weights(runs / "killed", runs / "whole", 0.0)


def test_a_checkpoint_cut_short_is_not_resumed_from(tmp_path):
    for step in (7, 14):
        (tmp_path / f"checkpoint-{step}" / ("head" if step == 7 else "head.tmp")).mkdir(parents=True)
    assert last_checkpoint(tmp_path).name == "checkpoint-7"
    assert last_checkpoint(tmp_path / "none") is None


def test_two_processes_make_the_updates_of_one(runs):
    """Batch 1 x 2 accumulated x 2 processes against batch 4; the second pair keeps the target's layers in shares."""
    assert_same_weights(runs / "two", runs / "one", 1e-5)
    assert_same_weights(runs / "sharded", runs / "one", 1e-5)
    for step, loss in losses(runs / "one").items():
        assert losses(runs / "two")[step] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("cached", [False, True])
def test_accumulated_and_packed_runs_equal_plain_ones(tiny_target, tmp_path, cached):
    """Texts of different lengths, so that a mean of means would be another update."""
    target = tiny_target()
    write_uneven_texts(tmp_path / "data", target)
    cache = str(tmp_path / "cache") if cached else None
    plain = small(tmp_path, max_steps=4, batch_size=6, feature_cache=cache, save_steps=100)
    train(target, plain)
    changed = {"accumulated": {"batch_size": 2, "gradient_accumulation": 3}, "packed": {"packing": True}}
    for name, changes in changed.items():
        train(target, replace(plain, output=str(tmp_path / name), **changes))
        assert_same_weights(tmp_path / name, tmp_path / "out", 1e-5)


def write_uneven_texts(path: Path, target) -> list[Sequence]:
    lengths = [5, 18, 7, 11, 4, 9, 17, 6, 8, 12, 3, 10]
    texts = []
    for number, length in enumerate(lengths):
        mask = torch.arange(length) >= (number % 3)  # some are supervised from their first token on
        texts.append(Sequence(torch.randint(3, target.config.vocab_size, (length,)), mask, number))
    TokenStore(path, {"seed": 0}).append(texts, set(range(len(texts))))
    return texts


def test_packing_fills_rows():
    assert pack([5, 18, 7, 11]) == [[1], [3, 2], [0]]
    dataset = TextDataset([Sequence(torch.arange(n) + 1, torch.ones(n).bool(), 0) for n in (2, 6, 4)], [0, 1, 2], 9, 0)
    batch = collate([dataset[0], dataset[1], dataset[2]], packing=True)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 1, 2]]
    assert batch["segments"].tolist() == [[1] * 6, [1, 1, 1, 1, 2, 2]]
    assert batch["anchors"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 4, -1]]


@pytest.mark.parametrize("family", [*FAMILIES, "bloom", "gemma2 eager"])
def test_packed_losses_equal_unpacked_ones(monkeypatch, tmp_path, family):
    """Features of the target and losses of the head, with windows; Bloom takes no 4-D masks."""
    monkeypatch.setitem(FAMILIES, "bloom", {})
    family, _, attention = family.partition(" ")
    target = make_target(family, **({"sliding_window": 6} if "sliding_window" in FAMILIES[family] else {}))
    if attention:
        target.set_attn_implementation(attention)
    texts = write_uneven_texts(tmp_path / "data", target)
    dataset = TextDataset(texts, list(range(len(texts))), 4, seed=1)
    items = [dataset[index] for index in range(len(texts))]
    run = small(tmp_path, head={**HEAD, "sliding_window": 3})
    module = TrainingModule(new_head(target, run, texts)[0], target, run)
    outputs = []
    for packing in (False, True):
        batch = collate(items, packing)
        features = target_features(target, [0, 2], batch["input_ids"], batch["segments"])
        assert batch["input_ids"].shape[0] == (len(pack([len(item.ids) for item in texts])) if packing else len(texts))
        outputs.append((module(**batch), features, batch["segments"] > 0, module.weight(batch)))
    (plain, apart, real, weight), (packed, together, inside, same) = outputs
    assert float(weight) == pytest.approx(float(same))
    order = [number for row in pack([len(item.ids) for item in texts]) for number in row]
    for one, other in zip(apart, together, strict=True):
        expected = torch.cat([one[number][real[number]] for number in order])
        torch.testing.assert_close(other[inside], expected, atol=2e-5, rtol=1e-4)
    for name in ("loss", "ce", "tv", "confidence", "acceptance"):
        torch.testing.assert_close(plain[name], packed[name], atol=1e-5, rtol=1e-4, msg=name)


def test_many_blocks_are_computed_in_groups(tiny_target):
    """More blocks than a group holds, in any order: the same as each block alone."""
    target = tiny_target()
    head = DSparkDraftModel(new_head(target, TrainConfig("d", "o", head=HEAD), [])[0].config).bind(target)
    taps, ids, anchors = torch.randn(2, 200, 64), torch.randint(96, (2, 200)), torch.randint(200, (2, 150))
    whole = head.block_forward(taps, anchors, ids)
    for block in (0, 63, 64, 149):
        single = head.block_forward(taps, anchors[:, block : block + 1], ids)
        torch.testing.assert_close(whole[:, block : block + 1], single, atol=1e-5, rtol=1e-4)


def test_anchors_and_order_are_new_in_each_epoch_and_the_same_again():
    texts = [Sequence(torch.arange(40), torch.ones(40).bool(), 0) for _ in range(5)]
    first, again = (TextDataset(texts, [4, 2, 0], 3, seed=7, items=30, dice_slots=2) for _ in range(2))
    drawn = [tuple(first[item]["anchors"].tolist()) for item in range(30)]
    assert drawn == [tuple(again[item]["anchors"].tolist()) for item in reversed(range(30))][::-1]
    assert len(set(drawn)) > 25 and first[0]["dice"].shape == (3, 2)
    numbered = [Sequence(torch.full((4,), number), torch.ones(4).bool(), 0) for number in range(5)]
    dataset = TextDataset(numbered, [4, 2, 0], 3, seed=7, items=30)
    epochs = [tuple(int(dataset[epoch * 3 + place]["input_ids"][0]) for place in range(3)) for epoch in range(10)]
    assert all(sorted(epoch) == [0, 2, 4] for epoch in epochs) and len(set(epochs)) > 1
    assert [int(TextDataset(numbered, [4, 2], 3, 7)[item]["input_ids"][0]) for item in range(2)] == [4, 2]


def test_mixed_precision_keeps_losses_in_float32(tiny_target, tmp_path):
    target = tiny_target()
    texts = write_uneven_texts(tmp_path / "data", target)
    run = small(tmp_path, head={**HEAD, "draft_vocab_size": 50})
    module = TrainingModule(new_head(target, run, texts)[0], target, run)
    batch = collate([TextDataset(texts, [1, 3], 6, 0)[item] for item in range(2)])
    exact = module(**batch)
    seen = []
    project = module.objective.draft_logits
    module.objective.draft_logits = lambda *inputs: seen.append(project(*inputs)) or seen[-1]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = module(**batch)
    assert seen[0].dtype == torch.bfloat16 and all(value.dtype == torch.float32 for value in mixed.values())
    mixed["loss"].backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())
    torch.testing.assert_close(mixed["loss"], exact["loss"], atol=0.05, rtol=0.05)
    train(target, replace(run, bf16=True, max_steps=2, validation=0))
    assert weights(tmp_path / "out")["fc.weight"].dtype == torch.float32


def test_the_precision_follows_the_machine_where_it_may(monkeypatch, tmp_path):
    from specdec_hf.training import trainer

    auto, cpu = replace(small(tmp_path), bf16="auto"), torch.device("cpu")
    for emulates in (True, False):
        monkeypatch.setattr(trainer, "emulates_bfloat16", lambda emulates=emulates: emulates)
        assert auto.for_device(cpu).bf16 is not emulates
        assert replace(auto, bf16=True).for_device(cpu).bf16 is True
        assert replace(auto, bf16=False).for_device(cpu).bf16 is False
    with pytest.raises(ValueError, match="bf16='yes': it is true, false or"):
        replace(auto, bf16="yes")


def test_features_on_disk_are_those_of_the_precision_that_is_trained_in(tiny_target, tmp_path):
    target = tiny_target()
    texts = write_uneven_texts(tmp_path / "data", target)
    run = small(tmp_path, head={**HEAD, "draft_vocab_size": 50}, feature_cache=str(tmp_path / "features"), max_steps=1)
    train(target, replace(run, bf16=True))
    assert {weight.dtype for weight in target.parameters()} == {torch.float32}  # copies are used for a while only
    ids = texts[1].ids[None]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = target_features(target, HEAD["target_layer_ids"], ids, torch.ones_like(ids))
    exact = target_features(target, HEAD["target_layer_ids"], ids, torch.ones_like(ids))
    kept = FeatureCache(tmp_path / "features", texts, HEAD["target_layer_ids"], target, bf16=True).read(1)
    assert torch.equal(kept["taps"], mixed.taps[0].bfloat16()) and not torch.equal(
        kept["taps"], exact.taps[0].bfloat16()
    )
    with pytest.raises(ValueError, match="features of other texts"):  # and none of another precision are taken
        train(target, run)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_fine_tuning_a_deepspec_head(tmp_path, kind):
    """Its own copies of the target's embeddings stay bit for bit; the rest learns the new domain."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(DEEPSPEC / "target", dtype=torch.float32).eval()
    domain = torch.randint(3, 97, (1, 16)).expand(8, -1)
    store = TokenStore(tmp_path / "data", {})
    store.append([Sequence(row, torch.ones(16).bool(), n) for n, row in enumerate(domain)], set())
    run = TrainConfig(
        str(tmp_path / "data"), str(tmp_path / "out"), init_head=str(DEEPSPEC / kind), max_steps=12, num_anchors=6,
        validation=2, save_steps=4, loss={"ce": 1.0}, muon_lr=0.02, lr=0.004, warmup_steps=1,
    )  # fmt: skip
    _, figures = train(target, run)
    before, after = load_file(DEEPSPEC / kind / "model.safetensors"), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert {n for n in before if torch.equal(before[n], after[n])} == {"embed_tokens.weight", "lm_head.weight"}
    state = json.loads((last_checkpoint(tmp_path / "out") / "trainer_state.json").read_text())
    validation = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
    assert figures["validation_loss"] == pytest.approx(validation[-1]) and validation[-1] < validation[0] - 0.2
    DSparkDraftModel.from_pretrained(tmp_path / "out" / "head").bind(target)


def test_fine_tuning_refuses_what_cannot_be(tiny_target, tmp_path):
    with pytest.raises(ValueError, match="keeps its shape"):
        small(tmp_path, init_head="x")
    target = tiny_target()
    write_texts(tmp_path / "data", target, count=6, length=10)
    with pytest.raises(ValueError, match="target_hidden_size=64"):
        train(target, small(tmp_path, head={}, init_head=str(DEEPSPEC / "vanilla")))
    assert not (tmp_path / "out").exists()


def test_own_embeddings_that_are_not_the_targets_are_trained(tiny_target):
    target = tiny_target()
    for same in (True, False):
        config = TrainConfig("d", "o", head={**HEAD, "has_embed_tokens": True, "has_lm_head": True})
        head = new_head(target, config, [])[0]
        with torch.no_grad():
            for own, theirs in ((head.embed_tokens, target.model.embed_tokens), (head.lm_head, target.lm_head)):
                own.weight.copy_(theirs.weight if same else theirs.weight + 0.1)
        freeze_copies(head, target)
        assert head.lm_head.weight.requires_grad is not same and head.embed_tokens.weight.requires_grad is not same


def test_trackers_and_the_hub(tiny_target, tmp_path, monkeypatch):
    import transformers.integrations.integration_utils as trackers
    from transformers import TrainerCallback

    seen = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append((state.global_step, logs))

    monkeypatch.setitem(trackers.INTEGRATION_TO_CALLBACK, "tensorboard", Tracker)
    pushed = []
    monkeypatch.setattr(DSparkDraftModel, "push_to_hub", lambda self, name, training: pushed.append((name, training)))
    target = tiny_target()
    write_texts(tmp_path / "data", target, count=6, length=10)
    train(target, small(tmp_path, max_steps=2, logging_steps=1, report_to=["tensorboard"], push_to_hub="org/head"))
    assert [step for step, logs in seen if "loss" in logs] == [1, 2]
    assert seen[0][1]["epoch"] == pytest.approx(4 / 5)
    assert pushed[0][0] == "org/head" and pushed[0][1]["figures"]["texts"] == 6


def test_an_unknown_tracker_is_refused_before_anything_is_done(tiny_target, tmp_path):
    with pytest.raises(ValueError, match="nobody is not supported"):
        train(tiny_target(), small(tmp_path, report_to=["nobody"]))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_untrained_head_begins_with_the_targets_final_norm(family):
    target = make_target(family)
    with torch.no_grad():
        target.model.norm.weight.uniform_(0.5, 2.0)
    head, _ = new_head(target, TrainConfig("d", "o", head=HEAD, initial_norm_scale=0.1), [])
    stored = target.model.norm.weight + (1.0 if family == "gemma2" else 0.0)
    torch.testing.assert_close(head.norm.weight, 0.1 * stored, atol=1e-5, rtol=1e-5)


def test_cache_says_its_size_and_refuses_other_texts(tiny_target, tmp_path):
    target = tiny_target()
    texts = write_uneven_texts(tmp_path / "data", target)
    lines: list[str] = []
    cache = FeatureCache(tmp_path / "cache", texts, [0, 2], target, log_mass_of=96)
    cache.fill(lines.append, 0, 2)
    assert "features of 12 texts: 0.00 GB" in lines[0] and len(list((tmp_path / "cache").glob("*.safetensors"))) == 6
    FeatureCache(tmp_path / "cache", texts, [0, 2], target, log_mass_of=96).fill(lines.append, 1, 2)
    sizes = sum(file.stat().st_size for file in (tmp_path / "cache").glob("*.safetensors"))
    assert 0 < sizes - cache.bytes_needed() < 12 * 400  # the rest is headers
    exact = target(texts[2].ids[None]).logits.logsumexp(-1)[0]
    mass, predicts = cache.read(2)["target_log_mass"], torch.cat([texts[2].mask[1:], torch.tensor([True])])
    torch.testing.assert_close(mass[predicts], exact[predicts], atol=0.1, rtol=0.02)
    assert 1 < predicts.sum() < len(predicts) and mass[~predicts].eq(0).all()
    with pytest.raises(ValueError, match="other texts, taps"):
        FeatureCache(tmp_path / "cache", texts, [0, 1], target, log_mass_of=96).fill()
    with pytest.raises(ValueError, match="other texts, taps"):
        FeatureCache(tmp_path / "cache", texts[1:], [0, 2], target, log_mass_of=96).fill()
    learned = [replace(text, mask=torch.ones_like(text.mask)) for text in texts]  # needs more of the mass
    with pytest.raises(ValueError, match="other texts, taps"):
        FeatureCache(tmp_path / "cache", learned, [0, 2], target, log_mass_of=96).fill()
    (tmp_path / "cache" / "0000001.safetensors").write_bytes(b"cut")
    with pytest.raises(OSError, match="remove it"):
        cache.read(1)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt2", "granite", "cohere"])
def test_target_logits_equal_the_targets_own(monkeypatch, family):
    """Soft-capping, scales of logits and of embeddings: the objective computes what the model's forward gives."""
    monkeypatch.setitem(FAMILIES, "granite", {"logits_scaling": 3.0, "embedding_multiplier": 5.0})
    monkeypatch.setitem(FAMILIES, "cohere", {"logit_scale": 0.3})
    target = make_target(family)
    config = TrainConfig("d", "o", head={**HEAD, "draft_vocab_size": 40})
    head = new_head(target, config, [Sequence(torch.arange(96), torch.ones(96).bool(), 0)])[0]
    objective = DSparkObjective(head, target)
    ids = torch.randint(3, 96, (2, 7))
    logits = target(ids).logits
    last = target_features(target, [0, 2], ids, torch.ones_like(ids)).last_hidden
    expected = logits[..., head.draft_token_ids()]
    torch.testing.assert_close(objective.target_logits(last), expected, atol=1e-5, rtol=1e-4)
    with TapRecorder(target, [-1]) as recorder:
        embedded = recorder.collect(target.get_decoder()(ids))[0]
    if family != "gpt2":  # GPT-2 adds a learned position there
        torch.testing.assert_close(head._embed(ids), embedded, atol=1e-5, rtol=1e-4)


def test_accelerate_reads_the_config_for_several_devices():
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(CONFIGS / "accelerate-sharded-target.yaml"))
    assert loaded.distributed_type.value == "MULTI_GPU" and loaded.num_processes > 1
    assert loaded.mixed_precision == "bf16"


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started"):
        process_state(False)


def test_sharding_needs_several_processes(tiny_target, tmp_path):
    target = tiny_target()
    write_texts(tmp_path / "data", target, count=6, length=10)
    with pytest.raises(ValueError, match="spreads a plain target over the processes"):
        train(target, small(tmp_path, shard_target=True))
