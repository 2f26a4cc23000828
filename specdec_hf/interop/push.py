"""``specdec push``: a head on the Hub with everything that makes it usable in one line."""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from huggingface_hub import HfApi

from ..heads._borrowed import hub_name
from ..heads._card import EVALUATION_FILE, TRAINING_FILE, forget_local_target, read_record, render_card
from .formats import detect, raw_config
from .info import describe_dtypes
from .reading import read_head
from .target import Target

_GENERATE = '''"""Decode with this repository's head: model.generate(..., custom_generate="{repository}")."""

import re

REPOSITORY = "{repository}"
_HEADS = {{}}


def _revision():
    """The commit that this file came from, so that code and weights belong together; None if it cannot be told."""
    found = re.search(r"[/\\\\]([0-9a-f]{{40}})[/\\\\]custom_generate", __file__)
    return found.group(1) if found else None


def generate(model, **kwargs):
    from specdec_hf import DSparkDraftModel, speculative_decoding

    source = kwargs.pop("head", None) or REPOSITORY
    key = (source, str(model.device), model.dtype)
    if key not in _HEADS:
        hub = {{name: kwargs.pop(name) for name in ("token", "cache_dir") if kwargs.get(name) is not None}}
        revision = kwargs.pop("revision", None) or (_revision() if source == REPOSITORY else None)
        hub.update({{"revision": revision}} if revision else {{}})
        _HEADS[key] = DSparkDraftModel.from_pretrained(source, dtype=model.dtype, **hub).to(model.device).eval()
    for name in ("token", "cache_dir", "revision", "assistant_model"):
        kwargs.pop(name, None)
    config = kwargs.pop("speculative", None)
    method = speculative_decoding(
        _HEADS[key], config, tokenizer=kwargs.get("tokenizer"), streamer=kwargs.get("streamer")
    )
    return model.generate(custom_generate=method, **kwargs)
'''


def push_head(
    directory: str,
    repository: str,
    target: str | None = None,
    *,
    private: bool = False,
    revision: str | None = None,
    licence: str | None = None,
    token: str | None = None,
) -> str:
    """Upload a head with a model card, its target's tokenizer and a ``custom_generate`` folder.

    Args:
        directory: a head in this package's layout.
        repository: e.g. ``org/head``; made if it is not there.
        target: its target, for the tokenizer; default: the one in ``config.json``.
        private: whether a repository that is made now is private.
        revision: branch, made if it is not there.
        licence: identifier for the card.
        token: of the Hub; default: the stored one.

    Returns:
        The address of the commit.

    Raises:
        ValueError: not a head in this package's layout, no target known, or the target does not fit.
        OSError: no directory, no tokenizer, or the Hub says no.
    """
    if not Path(directory).is_dir():
        raise FileNotFoundError(f"{directory} is not a directory; give the one that save_pretrained made")
    layout = detect(raw_config(directory, {}), directory)
    if layout != "specdec":
        raise ValueError(f"{directory} is in the layout {layout}; convert it first: specdec convert {directory} OUT")
    with tempfile.TemporaryDirectory() as folder:
        build_repository(directory, repository, folder, target, licence)
        api = HfApi(token=token)
        repository = api.create_repo(repository, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository, folder_path=folder, revision=revision, commit_message="Upload draft head"
        )
    return str(done.commit_url)


def build_repository(
    directory: str, repository: str, folder: str, target: str | None = None, licence: str | None = None
) -> None:
    """Fill ``folder`` with what :func:`push_head` uploads. Raises as it does."""
    head = read_head(directory)
    name = target or head.config.target_name_or_path
    if name is None:
        raise ValueError(f"{directory} records no target; give it with --target, its tokenizer has to be uploaded too")
    chosen = Target(name)
    chosen.check(head.config)
    tokenizer = chosen.tokenizer()
    if tokenizer is None:
        raise OSError(f"{name} has no tokenizer files; give the target's directory or repository with --target")
    out = Path(folder)
    tokenizer.save_pretrained(folder)
    for path in Path(directory).iterdir():
        known = path.suffix == ".safetensors" or path.name in (TRAINING_FILE, EVALUATION_FILE)
        if path.is_file() and (known or path.name in ("config.json", "model.safetensors.index.json")):
            shutil.copyfile(path, out / path.name)
    fields = json.loads((out / "config.json").read_text(encoding="utf-8"))
    # transformers' pipeline looks the class of an assistant given as a string up among its own; AutoModel finds ours.
    fields["architectures"] = ["DSparkDraftModel", "AutoModel"]
    (out / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    forget_local_target(folder, name)
    head.config.target_name_or_path = hub_name(name) or hub_name(head.config.target_name_or_path)
    card = render_card(
        head.config,
        repository,
        describe_dtypes(head),
        read_record(directory, TRAINING_FILE),
        read_record(directory, EVALUATION_FILE),
        licence,
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    code = out / "custom_generate"
    code.mkdir()
    (code / "generate.py").write_text(_GENERATE.format(repository=repository), encoding="utf-8")
    (code / "requirements.txt").write_text(_requirements(), encoding="utf-8")


def _requirements() -> str:
    try:
        version = metadata.version("specdec_hf")
    except metadata.PackageNotFoundError:
        return "specdec_hf\n"
    return f"specdec_hf>={version}\n"
