"""Heads on the Hub, over real HTTP: the huggingface_hub client against the small server of ``hub_server``."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from hub_server import Hub, running_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoTokenizer, pipeline

from specdec_hf import (
    DSparkConfig,
    DSparkDraftModel,
    SpeculativeConfig,
    __version__,
    cli,
    enable_speculation,
    last_speculation,
)
from specdec_hf.interop.convert import convert
from specdec_hf.interop.info import describe
from specdec_hf.interop.push import push_head
from specdec_hf.training.store import Sequence, TokenStore
from specdec_hf.training.trainer import TrainConfig, train

REPOSITORY = "org/tiny-head"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A running server that the client of this process talks to, with an empty cache and a token."""
    with running_hub() as served:
        for name, value in {
            "ENDPOINT": served.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": served.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_ETAG_TIMEOUT": 5,
            "HF_HUB_DOWNLOAD_TIMEOUT": 5,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", served.url)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # transformers keeps its client
        monkeypatch.setenv("HF_TOKEN", served.token)
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        huggingface_hub.close_session()
        yield served
    huggingface_hub.close_session()


@pytest.fixture
def target(tiny_target: Any) -> Any:
    return tiny_target("llama", vocab_size=259)


@pytest.fixture
def saved(target: Any, byte_tokenizer: Any, tmp_path: Path) -> Path:
    """The target's directory, with a tokenizer."""
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def make_head(target: Any, **overrides: Any) -> Any:
    torch.manual_seed(3)
    fields: dict[str, Any] = {"num_hidden_layers": 1, "block_size": 4, "markov_rank": 8, **overrides}
    return DSparkDraftModel(DSparkConfig.for_target(target.config, **fields)).eval()


def same_weights(left: Any, right: Any) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_push_and_pull_with_revisions(hub: Hub, target: Any) -> None:
    head = make_head(target)
    first = head.push_to_hub(REPOSITORY)
    card = hub.repositories[REPOSITORY].commits[first.oid]["README.md"].decode()
    assert "- speculative-decoding\n- dspark" in card
    assert "More Information Needed" not in card
    same_weights(head, DSparkDraftModel.from_pretrained(REPOSITORY))
    other = make_head(target, block_size=5)
    other.push_to_hub(REPOSITORY, revision="longer")
    assert DSparkDraftModel.from_pretrained(REPOSITORY, revision="longer").config.block_size == 5
    assert DSparkDraftModel.from_pretrained(REPOSITORY, revision=first.oid).config.block_size == 4
    assert DSparkDraftModel.from_pretrained(REPOSITORY).config.block_size == 4
    uploads = [path for method, path, _ in hub.log if method == "PUT"]
    assert len(uploads) == 1, "weights go through LFS, the same ones only once"
    with pytest.raises(OSError, match="nowhere"):
        DSparkDraftModel.from_pretrained(REPOSITORY, revision="nowhere")


def test_a_card_that_is_there_stays(hub: Hub, target: Any) -> None:
    head = make_head(target)
    head.push_to_hub(REPOSITORY)
    huggingface_hub.upload_file(path_or_fileobj=b"mine", path_in_repo="README.md", repo_id=REPOSITORY)
    again = head.push_to_hub(REPOSITORY)
    assert hub.repositories[REPOSITORY].commits[again.oid]["README.md"] == b"mine"


def test_subfolder(hub: Hub, target: Any, tmp_path: Path) -> None:
    head = make_head(target)
    head.save_pretrained(tmp_path / "all" / "heads" / "a")
    huggingface_hub.create_repo(REPOSITORY)
    huggingface_hub.upload_folder(repo_id=REPOSITORY, folder_path=tmp_path / "all")
    same_weights(head, DSparkDraftModel.from_pretrained(REPOSITORY, subfolder="heads/a"))
    assert "4 tokens a block" in describe(REPOSITORY, {"subfolder": "heads/a"})


def test_absent_private_and_gated(hub: Hub, target: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_head(target).push_to_hub(REPOSITORY)
    with pytest.raises(OSError, match="org/absent"):
        DSparkDraftModel.from_pretrained("org/absent")
    hub.repositories[REPOSITORY].access = "gated"
    with pytest.raises(OSError, match="gated"):
        DSparkDraftModel.from_pretrained(REPOSITORY)
    hub.repositories[REPOSITORY].access = "private"
    assert DSparkDraftModel.from_pretrained(REPOSITORY, token=hub.token).config.block_size == 4
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(OSError, match="token"):
        DSparkDraftModel.from_pretrained(REPOSITORY, cache_dir=tmp_path / "other")
    with pytest.raises(HfHubHTTPError, match="401"):
        make_head(target).push_to_hub("org/another")


def test_only_pickles_are_refused(hub: Hub, target: Any) -> None:
    make_head(target).push_to_hub(REPOSITORY)
    repository = hub.repositories[REPOSITORY]
    repository.commit("main", {"model.safetensors": None, "pytorch_model.bin": b"\x80\x02"})
    with pytest.raises(OSError, match="never pickles"):
        DSparkDraftModel.from_pretrained(REPOSITORY)
    assert not [path for _, path, _ in hub.log if path.endswith(".bin") and "resolve" in path]


def test_a_dropped_connection_resumes(hub: Hub, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1_000)  # what has arrived is kept in pieces of this size
    head = make_head(target)
    head.push_to_hub(REPOSITORY)
    DSparkConfig.from_pretrained(REPOSITORY)  # now only the weights are left to download
    hub.drop_after = 5_000
    same_weights(head, DSparkDraftModel.from_pretrained(REPOSITORY))
    ranges = [asked for method, path, asked in hub.log if method == "GET" and path.endswith("model.safetensors")]
    assert "bytes=5000-" in ranges, ranges


def test_offline_from_the_cache(hub: Hub, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(target)
    head.push_to_hub(REPOSITORY)
    DSparkDraftModel.from_pretrained(REPOSITORY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    seen = len(hub.log)
    same_weights(head, DSparkDraftModel.from_pretrained(REPOSITORY))
    with pytest.raises(OSError, match=r"offline|cached|connect"):
        DSparkDraftModel.from_pretrained("org/never-seen")
    assert len(hub.log) == seen


def test_a_damaged_blob_is_noticed(hub: Hub, target: Any) -> None:
    """A flipped byte of the header does not parse; one in the weights only shows if it makes a number infinite."""
    head = make_head(target)
    head.push_to_hub(REPOSITORY)
    repository = hub.repositories[REPOSITORY]
    whole = repository.commits[repository.branches["main"]]["model.safetensors"]
    repository.commit("main", {"model.safetensors": whole[: len(whole) // 2]})
    with pytest.raises(ValueError, match="truncated"):
        DSparkDraftModel.from_pretrained(REPOSITORY)
    repository.commit("main", {"model.safetensors": whole[:8] + b"\xff" + whole[9:]})
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        DSparkDraftModel.from_pretrained(REPOSITORY)


def test_a_flipped_bit_is_found(hub: Hub, target: Any, tmp_path: Path) -> None:
    """The client compares sizes only; one wrong number would just draft badly."""
    make_head(target).push_to_hub(REPOSITORY)
    assert "layout" in describe(REPOSITORY)
    hub.corrupt = "model.safetensors"
    elsewhere = {"cache_dir": str(tmp_path / "other")}
    with pytest.raises(ValueError, match="SHA-256"):
        DSparkDraftModel.from_pretrained(REPOSITORY, **elsewhere)
    with pytest.raises(ValueError, match="SHA-256"):
        convert(REPOSITORY, str(tmp_path / "out"), hub=elsewhere)
    with pytest.raises(ValueError, match="SHA-256"):
        describe(REPOSITORY, elsewhere)


def test_an_upload_is_the_hubs_protocol(hub: Hub, target: Any) -> None:
    """Create, then ask how to upload, then the weights by LFS, then one commit that names them."""
    make_head(target).push_to_hub(REPOSITORY)
    steps = ("/repos/create", "/preupload/", "/objects/batch", "/lfs/", "/commit/")
    asked = [path for method, path, _ in hub.log if method in ("POST", "PUT")]
    found = [next(i for i, path in enumerate(asked) if step in path) for step in steps]
    assert found == sorted(found), asked
    assert sum("/commit/" in path for path in asked) == 1
    weights = hub.repositories[REPOSITORY].commits[hub.repositories[REPOSITORY].branches["main"]]["model.safetensors"]
    assert weights in hub.blobs.values()


def test_convert_reads_a_revision_of_a_repository(hub: Hub, target: Any, tmp_path: Path) -> None:
    first = make_head(target).push_to_hub(REPOSITORY)
    make_head(target, block_size=5).push_to_hub(REPOSITORY)
    convert(REPOSITORY, str(tmp_path / "out"), hub={"revision": first.oid})
    assert DSparkConfig.from_pretrained(tmp_path / "out").block_size == 4
    with pytest.raises(OSError, match="nowhere"):
        convert(REPOSITORY, str(tmp_path / "no"), hub={"revision": "nowhere"})
    assert not (tmp_path / "no").exists()


def test_no_path_of_this_machine_is_uploaded(hub: Hub, target: Any, saved: Path, tmp_path: Path) -> None:
    head = make_head(target, target_name_or_path=str(saved))
    head.save_pretrained(tmp_path / "head")
    push_head(str(tmp_path / "head"), "org/pushed")
    head.push_to_hub(REPOSITORY)
    for repository in hub.repositories.values():
        for files in repository.commits.values():
            for name, data in files.items():
                assert str(tmp_path).encode() not in data, name


def test_training_uploads_the_head_with_its_figures(hub: Hub, target: Any, tmp_path: Path) -> None:
    texts = [Sequence(torch.randint(3, 259, (12,)), torch.ones(12).bool(), number) for number in range(6)]
    TokenStore(tmp_path / "texts", {}).append(texts, set())
    shape = {"block_size": 3, "markov_rank": 4, "target_layer_ids": [0]}
    config = TrainConfig(
        str(tmp_path / "texts"), str(tmp_path / "out"), shape, max_steps=2, validation=0, push_to_hub=REPOSITORY
    )
    head, figures = train(target, config)
    same_weights(head, DSparkDraftModel.from_pretrained(REPOSITORY))
    files = hub.repositories[REPOSITORY].commits[hub.repositories[REPOSITORY].branches["main"]]
    assert f"| train_loss | {figures['train_loss']:.4g} |" in files["README.md"].decode()
    assert all(str(tmp_path).encode() not in data for data in files.values())


def test_push_makes_everything_usable(hub: Hub, target: Any, saved: Path, tmp_path: Path) -> None:
    head = make_head(target, target_name_or_path=str(saved))
    head.save_pretrained(tmp_path / "head")
    assert "/commit/" in push_head(str(tmp_path / "head"), REPOSITORY, str(saved), licence="apache-2.0")
    files = set(hub.repositories[REPOSITORY].commits[hub.repositories[REPOSITORY].branches["main"]])
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json", "tokenizer_config.json"} <= files
    assert {"custom_generate/generate.py", "custom_generate/requirements.txt"} <= files
    assert AutoTokenizer.from_pretrained(REPOSITORY)("ab")["input_ids"]

    tokenizer = AutoTokenizer.from_pretrained(saved)
    # A plain string as assistant: transformers loads head and tokenizer by itself.
    speculating = pipeline(
        "text-generation", model=enable_speculation(target), tokenizer=tokenizer, assistant_model=REPOSITORY
    )
    text = speculating("Hello", max_new_tokens=8, do_sample=False)
    stats = last_speculation(target)
    assert stats is not None
    assert stats.strategy == "dspark"
    assert stats.rounds > 0
    assert stats.drafted > 0
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    assert plain("Hello", max_new_tokens=8, do_sample=False) == text


def test_custom_generate_in_plain_transformers(
    hub: Hub, target: Any, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_head(target).save_pretrained(tmp_path / "head")
    push_head(str(tmp_path / "head"), REPOSITORY, str(saved))
    modules = str(tmp_path / "modules")
    for place in (transformers.dynamic_module_utils, transformers.utils.hub):
        monkeypatch.setattr(place, "HF_MODULES_CACHE", modules, raising=False)
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: __version__ if name == "specdec_hf" else version(name)
    )  # requirements.txt is checked against what is installed; a checkout on the path is not
    inputs = {"input_ids": torch.tensor([[1, 40, 41, 42]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    want = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    with pytest.raises(ValueError, match="trust_remote_code"):
        target.generate(**inputs, custom_generate=REPOSITORY, trust_remote_code=False, max_new_tokens=12)
    got = target.generate(
        **inputs,
        custom_generate=REPOSITORY,
        trust_remote_code=True,
        max_new_tokens=12,
        do_sample=False,
        speculative=SpeculativeConfig(num_assistant_tokens=2),
    )
    assert torch.equal(got, want)
    stats = last_speculation(target)
    assert stats is not None
    assert stats.rounds > 0
    assert stats.drafted > 0
    assert max(length for row in stats.proposal_lengths for length in row) <= 2


def test_push_command_and_what_it_refuses(hub: Hub, target: Any, saved: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    make_head(target, target_name_or_path=None).save_pretrained(tmp_path / "head")
    words = ["push", str(tmp_path / "head"), REPOSITORY]
    done = CliRunner().invoke(cli.app, [*words, "--target", str(saved), "--license", "mit"])
    assert done.exit_code == 0, done.exception
    assert "/commit/" in done.output
    with pytest.raises(FileNotFoundError, match="not a directory"):
        push_head(str(tmp_path / "none"), REPOSITORY)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps({**config, "target_name_or_path": None}))
    with pytest.raises(ValueError, match="--target"):
        push_head(str(tmp_path / "head"), REPOSITORY)
    bare = tmp_path / "bare"
    target.save_pretrained(bare)
    with pytest.raises(OSError, match="no tokenizer"):
        push_head(str(tmp_path / "head"), REPOSITORY, str(bare))
