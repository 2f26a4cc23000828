"""The commands of ``specdec`` about training: data and train. Parsing only, as in ``cli``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer


class Strategy(str, enum.Enum):
    """Kinds of heads that can be trained."""

    dspark = "dspark"
    medusa = "medusa"
    early_exit = "early_exit"


_Prompts = Annotated[
    list[Path] | None, typer.Option(help='JSONL with {"turns": [...]} or {"messages": [...]}; several allowed.')
]
_Exclude = Annotated[list[Path] | None, typer.Option(help="JSONL whose prompts must not be learned from.")]
_Dataset = Annotated[str | None, typer.Option(help="Data set on the Hub with prompts (extra data).")]
_Column = Annotated[str | None, typer.Option(help="Its column: texts, turns or messages. Default: looked for.")]
_Split = Annotated[str, typer.Option(help="Its split.")]
_MaxPrompts = Annotated[int | None, typer.Option(min=1, help="Most prompts of files and data set.")]
_SelfWritten = Annotated[
    int | None,
    typer.Option(
        min=1, help="So many user turns written by the target itself (of a base model: texts from their beginning)."
    ),
]
_System = Annotated[str | None, typer.Option(help="System prompt of chats that have none.")]
_Thinking = Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="enable_thinking of the template.")]
_Temperature = Annotated[float, typer.Option(help="Of the answers that are drawn.")]
_GreedyShare = Annotated[float, typer.Option(min=0, max=1, help="Share of the prompts that is answered greedily.")]
_NewTokens = Annotated[int | None, typer.Option(min=1, help="Answers end here. Default: 288.")]
_PromptTokens = Annotated[int | None, typer.Option(min=1, help="Longer prompts are left out. Default: 230.")]
_BatchSize = Annotated[int, typer.Option(min=1, help="Answers written at a time.")]
_Seed = Annotated[int, typer.Option(help="Of prompts, draws, weights and order.")]
_Endpoint = Annotated[str | None, typer.Option(help="OpenAI-compatible server that answers, e.g. http://host:8000.")]
_EndpointModel = Annotated[str | None, typer.Option(help="The server's name for the target. Default: its only one.")]
_Concurrency = Annotated[int, typer.Option(min=1, help="Requests at a time.")]
_KeyVariable = Annotated[str, typer.Option(help="Environment variable with the server's key.")]


_OF_TEXTS = (
    "prompts", "exclude", "dataset", "dataset_column", "dataset_split", "max_prompts", "self_written", "max_tokens",
    "system_prompt", "thinking", "temperature", "greedy_share", "max_new_tokens", "max_prompt_tokens", "batch_size",
    "endpoint", "endpoint_model", "concurrency", "api_key_variable",
)  # fmt: skip
"""Options about texts that are to be written."""


def _sampling(
    temperature: float, greedy_share: float, new: int | None, prompt: int | None, batch: int, seed: int
) -> dict[str, Any]:
    given = {
        "temperature": temperature, "greedy_share": greedy_share, "batch_size": batch, "seed": seed,
        "max_new_tokens": new, "max_prompt_tokens": prompt,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _print(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        typer.echo(f"{name}: {value}")


def data(
    target: Annotated[str, typer.Option(help="Model on the Hub or directory; default is SmolLM2-135M-Instruct.")],
    output: Annotated[Path, typer.Option(help="Directory for the texts. Goes on with what it holds.")],
    prompts: _Prompts = None,
    exclude: _Exclude = None,
    dataset: _Dataset = None,
    dataset_column: _Column = None,
    dataset_split: _Split = "train",
    max_prompts: _MaxPrompts = None,
    self_written: _SelfWritten = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Answer tokens in all. Default: all prompts.")] = None,
    system_prompt: _System = None,
    thinking: _Thinking = None,
    temperature: _Temperature = 0.7,
    greedy_share: _GreedyShare = 0.5,
    max_new_tokens: _NewTokens = None,
    max_prompt_tokens: _PromptTokens = None,
    batch_size: _BatchSize = 96,
    seed: _Seed = 0,
    endpoint: _Endpoint = None,
    endpoint_model: _EndpointModel = None,
    concurrency: _Concurrency = 16,
    api_key_variable: _KeyVariable = "OPENAI_API_KEY",
) -> None:
    """Let a target write texts to train on, to prompts of files, of a data set, or (with neither) of its own."""
    from .sources import TextSettings
    from .texts import OWN_PROMPTS, make_texts

    if not (prompts or dataset or self_written):
        self_written = OWN_PROMPTS
    settings = TextSettings(
        prompts=[str(one) for one in prompts or []], exclude=[str(one) for one in exclude or []], dataset=dataset,
        dataset_column=dataset_column, dataset_split=dataset_split, self_written=self_written or 0,
        max_prompts=max_prompts, max_tokens=max_tokens, system_prompt=system_prompt, thinking=thinking,
        endpoint=endpoint, endpoint_model=endpoint_model, api_key_variable=api_key_variable, concurrency=concurrency,
        sampling=_sampling(temperature, greedy_share, max_new_tokens, max_prompt_tokens, batch_size, seed),
    )  # fmt: skip
    _print(make_texts(target, output, settings, _say))


def train(
    context: typer.Context,
    recipe: Annotated[
        Path | None, typer.Argument(help="YAML file of a recipe, e.g. configs/smollm2-135m.yaml; or give --target.")
    ] = None,
    place: Annotated[
        Path | None,
        typer.Argument(metavar="OUTPUT", help="Directory for texts, checkpoints and the head. Resumes what it holds."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Without a recipe: model on the Hub or directory; one is made for it.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The directory OUTPUT, for --target.")] = None,
    strategy: Annotated[Strategy | None, typer.Option(help="Kind of head. Default: dspark.")] = None,
    init_head: Annotated[str | None, typer.Option(help="Head to go on with, of any kind.")] = None,
    head: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of the head's configuration; several allowed.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of the section train; several allowed.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Answer tokens to write. Default: 250000 on a CPU, else 2000000.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Updates. Default: a 150th of the tokens.")] = None,
    texts: Annotated[
        Path | None, typer.Option(help="Directory that specdec data wrote; no other texts are written then.")
    ] = None,
    prompts: _Prompts = None,
    exclude: _Exclude = None,
    dataset: _Dataset = None,
    dataset_column: _Column = None,
    dataset_split: _Split = "train",
    max_prompts: _MaxPrompts = None,
    self_written: _SelfWritten = None,
    system_prompt: _System = None,
    thinking: _Thinking = None,
    temperature: _Temperature = 0.7,
    greedy_share: _GreedyShare = 0.5,
    max_new_tokens: _NewTokens = None,
    max_prompt_tokens: _PromptTokens = None,
    batch_size: _BatchSize = 96,
    seed: _Seed = 0,
    endpoint: _Endpoint = None,
    endpoint_model: _EndpointModel = None,
    concurrency: _Concurrency = 16,
    api_key_variable: _KeyVariable = "OPENAI_API_KEY",
) -> None:
    """Train a head: from a recipe (RECIPE OUTPUT), or for any target from nothing (--target ORG/MODEL --output DIR)."""
    if target is None:
        directory = place or output
        if recipe is None or directory is None:
            raise ValueError(
                "nothing to train: give RECIPE OUTPUT, or --target ORG/MODEL --output DIR to train for any target"
            )
        own = {"recipe", "place", "output"}
        if extra := [name for name in context.params if name not in own and _was_given(context, name)]:
            raise ValueError(
                f"--{extra[0].replace('_', '-')} goes with --target; a recipe says this itself, so change it there"
            )
        from .recipe import run

        _print(run(recipe, directory, _say))
        return
    if recipe is not None or output is None:
        raise ValueError(
            f"target={target!r} goes with --output DIR and without RECIPE, which names a target itself; leave one out"
        )
    from .default_recipe import Request, train_target

    data = {
        "prompts": [str(one) for one in prompts or []], "exclude": [str(one) for one in exclude or []],
        "dataset": dataset, "dataset_column": dataset_column, "dataset_split": dataset_split if dataset else None,
        "max_prompts": max_prompts, "self_written": self_written, "system_prompt": system_prompt,
        "thinking": thinking, "endpoint": endpoint, "endpoint_model": endpoint_model,
        "sampling": _sampling(temperature, greedy_share, max_new_tokens, max_prompt_tokens, batch_size, seed),
    }  # fmt: skip
    if endpoint is not None:
        data |= {"concurrency": concurrency, "api_key_variable": api_key_variable}
    if texts is not None:
        if extra := [name for name in _OF_TEXTS if _was_given(context, name)]:
            raise ValueError(
                f"--{extra[0].replace('_', '-')} beside --texts {texts}: these are written already; leave one out"
            )
        data = {"texts": str(texts)}
    fields = {"seed": seed, **_pairs("--set", setting)}
    request = Request(
        target, None if strategy is None else strategy.value, init_head, max_tokens, steps, _pairs("--head", head),
        data, fields,
    )  # fmt: skip
    _print(train_target(request, output, _say))


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _pairs(option: str, given: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE with the value in YAML."""
    if not given:
        return {}
    import yaml

    pairs = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ValueError(f"{option} {text}: it must be NAME=VALUE, e.g. block_size=5")
        pairs[name] = yaml.safe_load(value)
    return pairs


def add_commands(app: typer.Typer) -> None:
    """Add ``data`` and ``train`` to a command line."""
    app.command()(data)
    app.command()(train)
