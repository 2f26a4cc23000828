"""The commands of ``specdec`` about files of heads: convert, info, serve-command, push. Parsing only, as in ``cli``."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import typer


class Layout(str, enum.Enum):
    """Layouts that are written."""

    specdec = "specdec"
    deepspec = "deepspec"
    speculators = "speculators"
    zlab = "zlab"


class Engine(str, enum.Enum):
    """Engines whose command is known."""

    vllm = "vllm"
    sglang = "sglang"


_Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the head on the Hub.")]
_Subfolder = Annotated[str | None, typer.Option(help="Folder inside the repository.")]


def _hub(revision: str | None, subfolder: str | None) -> dict[str, Any]:
    given = {"revision": revision, "subfolder": subfolder}
    return {name: value for name, value in given.items() if value is not None}


def _integers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} {text}: it must be integers with commas, e.g. 1,9,17") from error


def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="Head: directory or Hub repository, any known layout.")],
    out: Annotated[str | None, typer.Argument(metavar="OUT", help="Directory to make.")] = None,
    to: Annotated[Layout, typer.Option(help="Layout to write.")] = Layout.specdec,
    target: Annotated[str | None, typer.Option(help="The head's target: directory or Hub repository.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Measure the accepted length; name a wrong reading.")] = False,
    prompt: Annotated[list[str] | None, typer.Option(help="A text to measure on; may be given several times.")] = None,
    prompt_ids: Annotated[
        list[str] | None,
        typer.Option(help="Token ids with commas, for a target without a tokenizer; may be given several times."),
    ] = None,
    target_layer_ids: Annotated[
        str | None, typer.Option(help="Taps as 0-based layers with commas, if the file is wrong or silent.")
    ] = None,
    sample_from_anchor: Annotated[
        bool | None, typer.Option("--sample-from-anchor/--no-sample-from-anchor", help="If the file does not say.")
    ] = None,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Mask token; on export of a head with its own mask vector, the row that gets it.")
    ] = None,
    embedding_scale: Annotated[float | None, typer.Option(help="Factor on embeddings.")] = None,
    revision: _Revision = None,
    subfolder: _Subfolder = None,
) -> None:
    """Convert a head between layouts (specdec, DeepSpec, speculators, z-lab), or check how it is read."""
    from .convert import run_convert
    from .formats import Answers

    given = _integers("--target-layer-ids", target_layer_ids)
    answers = Answers(given, sample_from_anchor, mask_token_id, embedding_scale)
    hub = _hub(revision, subfolder)
    ids = [_integers("--prompt-ids", one) or [] for one in prompt_ids or []]
    run_convert(source, out, to.value, target, answers, hub, check, prompt or ids, typer.echo)


def info(
    head: Annotated[str, typer.Argument(help="Head: directory or Hub repository, any known layout.")],
    target: Annotated[
        str | None, typer.Option(help="Its target, for files that do not say how large the vocabulary is.")
    ] = None,
    revision: _Revision = None,
    subfolder: _Subfolder = None,
) -> None:
    """Say what a head is: layout, shapes, target, parameters, calibration, warnings."""
    from .info import describe

    typer.echo(describe(head, _hub(revision, subfolder), target))


def serve_command(
    target: Annotated[str, typer.Option(help="Target: directory or Hub repository.")],
    head: Annotated[str, typer.Option(help="Head in DeepSpec's, speculators' or z-lab's layout.")],
    engine: Annotated[Engine, typer.Option(help="Which engine.")] = Engine.vllm,
) -> None:
    """Check a head and print the exact command that serves the target with it."""
    from .engines import serve_command as command

    line, notes = command(target, head, engine.value)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(line)


def push(
    directory: Annotated[str, typer.Argument(help="Head in this package's layout.")],
    repository: Annotated[str, typer.Argument(help="Repository on the Hub, e.g. org/head.")],
    target: Annotated[
        str | None, typer.Option(help="Its target, for the tokenizer. Default: the recorded one.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to.")] = None,
    licence: Annotated[str | None, typer.Option("--license", help="Licence identifier for the card.")] = None,
) -> None:
    """Upload a head with a card, its target's tokenizer and a custom_generate folder."""
    from .push import push_head

    typer.echo(push_head(directory, repository, target, private=private, revision=revision, licence=licence))


def add_commands(app: typer.Typer) -> None:
    """Give the commands of this file to the ``specdec`` command."""
    app.command()(convert)
    app.command()(info)
    app.command("serve-command")(serve_command)
    app.command()(push)
