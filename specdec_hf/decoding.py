"""The decoding loop: the only one. Batch 1 and batch B, greedy and sampling, every drafter.

A round: the drafter proposes, the policy trims, the target runs each row's anchor and its drafted tokens in one
forward, the accept rule judges, stopping criteria see every committed token, the cache keeps what was committed, the
drafter observes. Knows `drafters.base`, never a concrete drafter.

Rows advance in one of two ways. *Ragged*: each row accepts what it can, ends on its own and leaves the batch; a whole
block is judged at once, with one wait for the device per round. *Level*: all rows advance by the same number of tokens,
and one position at a time is judged with the full batch, exactly as plain decoding would show it to processors and
criteria. Level is used where something of the call must see what plain decoding shows (`ProcessorStack.in_order`,
`StoppingRules.in_order`) or where the attention implementation cannot mask rows of different lengths. Cutting every row
to the shortest is lossless: whether position j is committed never depends on the token drawn there.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import _hf
from .cache import SpeculativeCache
from .coupling import CoupledNoise, noise_of_block
from .drafters.base import Drafter, DraftRequest, Observation, Prompt
from .early import EarlyLayers
from .forward import TargetRunner, must_stay_level, takes_trees
from .options import SpeculativeConfig
from .output import SpeculationStats, StepOutputs, Stopwatch
from .pace import Pace
from .processors import DraftSampler, ProcessorStack, UniformStream, accept_numbers
from .proposal import Proposal, Round
from .stopping import StoppingRules
from .targets import TapRecorder
from .tree import TokenTree
from .verify import verify_greedy, verify_node, verify_position, verify_sampled

_STATE = "_speculation_state"  # attribute of a returned cache: what the drafter knows of it


@dataclass(frozen=True)
class _Draws:
    """The random numbers of one round; both None in greedy decoding.

    Args:
        uniforms: float64, see `UniformStream.take`.
        noise: float32 [B, K + 1, V], see `CoupledNoise.block`: decoding is then greedy on noisy scores.
    """

    uniforms: Tensor | None = None
    noise: Tensor | None = None


@dataclass
class Call:
    """One prepared `generate()` call, as transformers hands it to a decoding method.

    Args:
        model: the target.
        input_ids: LongTensor [B, L].
        logits_processor, stopping_criteria, generation_config: prepared by `generate`.
        model_kwargs: inputs of the forward, among them the cache.
        streamer: gets committed tokens, one at a time, then `end()`; or None.
    """

    model: Any
    input_ids: Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    model_kwargs: dict[str, Any]
    streamer: Any = None


def decode(call: Call, drafter: Drafter, config: SpeculativeConfig) -> tuple[Any, SpeculationStats]:
    """Run one call to its end.

    Returns:
        What plain `generate` would return (token ids, or its output class), and the statistics.
    """
    batch = call.input_ids.shape[0]
    stats = SpeculationStats.of_rows(drafter.name, batch)
    with _hf.decode_context(call.model):
        pace = Pace(config, drafter, call.model, batch, stats)
    recorder = TapRecorder(call.model, drafter.target_layer_ids)
    with recorder, _hf.decode_context(call.model):
        decoder = _Decoder(call, drafter, config, recorder, pace, stats)
        with decoder.runner:
            decoder.run()
        if (complaint := drafter.complaint()) is not None:
            warnings.warn(f"speculative={drafter.name!r}: {complaint}", UserWarning, stacklevel=2)
        return decoder.output(), decoder.stats


class _Decoder:
    """The state of one call. Lists are indexed by the present row; `numbers` maps it to the call's row."""

    def __init__(
        self,
        call: Call,
        drafter: Drafter,
        config: SpeculativeConfig,
        recorder: TapRecorder,
        pace: Pace,
        stats: SpeculationStats,
    ) -> None:
        self.call, self.drafter, self.config, self.recorder = call, drafter, config, recorder
        batch, prompt = call.input_ids.shape
        device = call.input_ids.device
        settings = call.generation_config
        self.do_sample: bool = bool(settings.do_sample)
        self.pace, self.stats = pace, stats
        self.watch = Stopwatch(self.stats)
        self.stack = ProcessorStack(call.logits_processor)
        self.rules = StoppingRules(call.stopping_criteria, batch)
        # A streamer of several rows is given one token of each at a time, as plain decoding gives them.
        level_rows = batch > 1 and (call.streamer is not None or drafter.level_rows or must_stay_level(call.model))
        self.in_order = self.stack.in_order or self.rules.in_order or level_rows
        source = call.model_kwargs[_hf.CACHE_KEY]
        self.keeps_cache = _hf.outlives_call(source, settings)
        cached = int(source.get_seq_length()) if source.layers else 0
        reserve = min(self.rules.max_length - prompt, 2**20) + pace.block_size + 2
        embedded = call.model_kwargs.get("inputs_embeds")
        columns = max(prompt, 0 if embedded is None else embedded.shape[1]) + cached
        self.capacity = columns + reserve
        self.cache = SpeculativeCache(source, self.capacity)
        self.runner = TargetRunner(
            call.model,
            self.cache,
            dict(call.model_kwargs, **{_hf.CACHE_KEY: self.cache}),
            recorder,
            self.in_order,
            self.capacity,
        )
        self.stream = UniformStream(config.generator, batch, device)
        self.noise: CoupledNoise | None = None
        self.noise_starts: list[int] = []  # by the call's rows: position in the noise of the first generated token
        self.ids = torch.zeros(batch, prompt + reserve, dtype=torch.long, device=device)
        self.ids[:, :prompt] = call.input_ids
        self.lengths = [prompt] * batch
        self.numbers = list(range(batch))
        self.ended = [False] * batch  # rows that stopped but still stand in the batch
        self.done: dict[int, Tensor] = {}
        self.tree: TokenTree | None = None  # of the present round; None = a chain
        self.paths: list[list[int]] = []  # per row, the nodes of the tree that the present round accepted
        self.outputs = self._step_outputs(batch)
        # An attention map of a tree's node is not a part of the block's map; elsewhere the model takes no tree's mask.
        self.takes_trees = takes_trees(call.model) and "attentions" not in self.outputs.wanted
        self.vocab_size = 0
        self.shift = 0  # cached slots that input_ids does not name: embedded prompts, earlier turns

    def _step_outputs(self, batch: int) -> StepOutputs:
        settings = self.call.generation_config
        names = ("scores", "logits", "hidden_states", "attentions")
        wanted = {n for n in names if settings.return_dict_in_generate and getattr(settings, f"output_{n}")}
        return StepOutputs(batch, wanted, [])

    # -- the loop

    def run(self) -> None:
        self._prefill()
        while self._unfinished():
            limits = self.pace.limits(self.numbers, self._budgets(), self.ended)
            draws = self._draws(limits)
            proposal = self._propose(limits, draws)
            self.tree = None if proposal.parents is None else TokenTree.of(proposal.parents, self.ids.device)
            with self.watch.part("target"):
                outputs, positions, tokens = self.runner.block(self.ids, self.lengths, proposal.width, self.tree)
                self.stats.forward_passes += 1
            before, rows = list(self.lengths), len(self.numbers)
            live = [row for row, ended in enumerate(self.ended) if not ended]
            self._judge(outputs, proposal, draws, max(self.runner.filled) + proposal.width + 1)
            # The anchor was fed, so as many columns enter the cache as tokens were committed; a row that had
            # ended only gives its last token to the cache.
            gained = [max(now - then, 1) for now, then in zip(self.lengths, before, strict=True)]
            taps = self.recorder.collect(outputs)
            if self.tree is not None:
                taps, positions, tokens = self._keep_path(gained, taps, positions, tokens)
            with self.watch.part("target"):
                self.runner.commit(gained)
            with self.watch.part("draft"):
                self.drafter.observe(Observation(taps, positions, tokens, gained))
            self.pace.end_round(rows, max(limits), proposal.width, {self.numbers[row]: gained[row] for row in live})
            self._release_rows()
        if self.call.streamer is not None:
            self.call.streamer.end()
        self.pace.finish()
        self.watch.stop()

    def _keep_path(
        self, gained: list[int], taps: list[Tensor], positions: Tensor, tokens: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Of a tree's block, what a chain would have left: the committed path, in cache, taps, positions and tokens."""
        columns = [[0, *(node + 1 for node in path)][:count] for path, count in zip(self.paths, gained, strict=True)]
        self.runner.keep_path(columns)
        longest = max(gained)
        filled = [own + [0] * (longest - len(own)) for own in columns]
        index = torch.tensor(filled, device=tokens.device)
        rows = torch.arange(len(columns), device=tokens.device)[:, None]
        taps = [tap[rows.to(tap.device), index.to(tap.device)] for tap in taps]
        return taps, positions[rows, index], tokens[rows, index]

    def _unfinished(self) -> bool:
        if not all(self.ended):
            return True
        longest = self._longest()
        return any(self._owes_last_token(row) and self.lengths[row] < longest for row in range(len(self.numbers)))

    def _owes_last_token(self, row: int) -> bool:
        """Whether a cache that is handed back lacks this row's last token, which a longer row makes visible."""
        return self.keeps_cache and not self.in_order and self.runner.filled[row] < self.lengths[row] + self.shift

    def _longest(self) -> int:
        return max([*self.lengths, *(ids.shape[0] for ids in self.done.values())])

    def _prefill(self) -> None:
        call = self.call
        with self.watch.part("prefill"):
            outputs = self.runner.prefill(call.input_ids, call.generation_config)
            taps = self.recorder.collect(outputs)
        self.shift = self.runner.filled[0] - self.lengths[0]
        self.outputs._windows = [layer.window for layer in self.cache.buffered]
        self.outputs.prefill(outputs)
        outputs.logits = outputs.logits[:, -1:]
        self.vocab_size = outputs.logits.shape[-1]
        if self.do_sample and self.config.coupling == "gumbel":
            seed = int(torch.randint(2**62, ())) if self.config.seed is None else self.config.seed
            self.noise = CoupledNoise(seed, len(self.numbers), self.vocab_size, self.ids.device)
            self.noise_starts = self.runner.positions.tolist()
        if (layers := self.drafter.early_layers) is not None:
            every_layer = bool({"hidden_states", "attentions"} & self.outputs.wanted)
            self.runner.early = EarlyLayers(self.runner, layers, reuse=not every_layer)
        with self.watch.part("draft"):
            positions, valid, cached = self.runner.prompt_columns()
            kept, mask = self._kept_state(any(cached)), self.runner.prompt_mask()
            self.drafter.start(Prompt(call.input_ids, taps, positions, valid, cached, self.capacity, kept, mask))
        self.pace.prefilled()
        nothing = Proposal(call.input_ids[:, :0], [0] * len(self.numbers))
        self._judge(outputs, nothing, self._draws([0] * len(self.numbers)), None)
        self._release_rows()

    def _kept_state(self, cached: bool) -> Any:
        kept = getattr(self.call.model_kwargs[_hf.CACHE_KEY], _STATE, None)
        return kept[1] if cached and kept is not None and kept[0] == self.drafter.identity else None

    def _budgets(self) -> list[int]:
        """Tokens that may follow each row's text, less the one that the target adds."""
        return [max(self.rules.max_length - 1 - length, 0) for length in self.lengths]

    def _draws(self, limits: list[int]) -> _Draws:
        if not self.do_sample:
            return _Draws()
        if self.noise is None:
            return _Draws(uniforms=self.stream.take(self.numbers, limits, max(limits), self.drafter.draws))
        prompt = self.call.input_ids.shape[1]
        rows = zip(self.numbers, self.lengths, strict=True)
        starts = [self.noise_starts[number] + length - prompt for number, length in rows]
        positions = min(max(limits), self.drafter.max_depth or max(limits)) + 1
        return _Draws(noise=self.noise.block(self.numbers, starts, positions))

    def _propose(self, limits: list[int], draws: _Draws) -> Proposal:
        width = max(limits)
        starts = torch.tensor(self.lengths, device=self.ids.device)
        if width == 0:
            return Proposal(self.ids[:, :0], limits)
        rows = torch.arange(len(limits), device=self.ids.device)
        with self.watch.part("draft"):
            sampler = DraftSampler(
                self.stack, self.ids, self.lengths, starts, self.vocab_size, draws.uniforms, draws.noise
            )
            anchors, positions = self.ids[rows, starts - 1], self.runner.positions
            request = DraftRequest(
                anchors, positions, limits, width, sampler, self.ids, self.lengths, self.runner.early
            )
            proposal = self.drafter.propose(request)
            if proposal.parents is not None:
                proposal = proposal.no_deeper(self._budgets()) if self.takes_trees else proposal.first_path()
            proposal = self.pace.trimmed(proposal)
            sampler.enter(proposal.tokens)
            return proposal

    # -- judging

    def _judge(self, outputs: Any, proposal: Proposal, draws: _Draws, block_end: int | None) -> None:
        """Commit what the target accepts of a block. `block_end` is None for the prompt's last position."""
        logits = outputs.logits.to(self.ids.device, torch.float32, copy=True)
        if self.in_order:
            self._judge_in_order(outputs, logits, proposal, draws, block_end)
        else:
            self._judge_block(outputs, logits, proposal, draws, block_end)

    def _judge_block(
        self, outputs: Any, logits: Tensor, proposal: Proposal, draws: _Draws, block_end: int | None
    ) -> None:
        raw = logits.clone() if "logits" in self.outputs.wanted else logits
        width, tree = proposal.tokens.shape[1], self.tree
        scores = logits if self.stack.is_empty else self.stack.block(self.ids, self.lengths, logits, tree)
        if draws.uniforms is None:
            noisy = scores if draws.noise is None else scores + noise_of_block(draws.noise, width, tree)
            choices = noisy.argmax(dim=-1)
            verdict = verify_greedy(choices, proposal, tree)
            broken = scores.gather(2, choices[:, :, None]).isnan().squeeze(2)
        else:
            probs = scores.softmax(dim=-1)
            verdict = verify_sampled(probs, proposal, accept_numbers(draws.uniforms, width, self.drafter.draws), tree)
            broken = probs[:, :, 0].isnan()
        if verdict.path is not None:
            # The accepted path takes the place of the first nodes: from here on, a tree's block reads like a chain's.
            proposal, broken = self._straightened(proposal, verdict.path, broken)
        sound = (~broken).long().cumprod(dim=1).sum(dim=1)  # places before the first NaN; plain decoding may end there
        columns = (verdict.accepted[:, None], proposal.tokens, verdict.next_tokens[:, None], sound[:, None])
        host = torch.cat(columns, dim=1).tolist()  # the round's one wait for the device
        starts = torch.tensor(self.lengths, device=self.ids.device)
        rows = torch.arange(len(host), device=self.ids.device)
        self.ids[rows, starts + verdict.accepted] = verdict.next_tokens
        for row, (accepted, *drafted, following, sound_places) in enumerate(host):
            if self.ended[row]:
                continue
            new = [*drafted[:accepted], following]
            kept, self.ended[row] = self.rules.judge(self.ids, row, self.lengths[row], new)
            if kept > sound_places:
                raise ValueError(_nan_message(self.call.model, self.lengths[row] + sound_places))
            for place in range(kept):
                column = place if tree is None or not place else self.paths[row][place - 1] + 1
                self._keep_outputs(outputs, row, column, scores, raw, block_end)
            self._stream(new[:kept])
            if block_end is not None:
                depth = None if tree is None else tree.depth_of(row, proposal.lengths[row])
                self._record(row, Round(proposal.lengths[row], accepted, kept, depth))
            self.lengths[row] += kept

    def _straightened(self, proposal: Proposal, path: Tensor, broken: Tensor) -> tuple[Proposal, Tensor]:
        self.paths = [[node for node in nodes if node >= 0] for nodes in path.tolist()]
        nodes = path.clamp(min=0)
        tokens = proposal.tokens.gather(1, nodes)
        columns = torch.arange(path.shape[1], device=path.device)
        starts = torch.tensor(self.lengths, device=path.device)
        self.ids[torch.arange(path.shape[0], device=path.device)[:, None], starts[:, None] + columns] = tokens
        return replace(proposal, tokens=tokens), broken.gather(1, torch.nn.functional.pad(nodes + 1, (1, 0)))

    def _judge_in_order(
        self, outputs: Any, logits: Tensor, proposal: Proposal, draws: _Draws, block_end: int | None
    ) -> None:
        """The level way: place by place, for as long as every row keeps its drafted token."""
        width = proposal.tokens.shape[1]
        numbers = None if draws.uniforms is None else accept_numbers(draws.uniforms, width, self.drafter.draws)
        was_ended, start, committed = list(self.ended), self.lengths[0], 0
        pad, tree = _hf.pad_token(self.call.generation_config), self.tree
        rows = torch.arange(len(self.numbers), device=logits.device)
        at = torch.full_like(rows, -1)  # in a tree, the node that each row has come down to
        self.paths = [[] for _ in self.numbers]
        for place in range(logits.shape[1] if tree is None else tree.depth + 1):
            length = start + place
            raw = logits[:, place].clone() if tree is None else logits[rows, at + 1]
            scores = self.stack.one_position(self.ids[:, :length], raw)
            if bool(scores[[row for row, ended in enumerate(self.ended) if not ended]].isnan().any()):
                raise ValueError(_nan_message(self.call.model, length))
            noisy = scores if draws.noise is None else scores + draws.noise[:, place]
            if tree is None:
                pair = noisy if numbers is None else numbers[:, [min(place, width), -1]]
                kept, tokens = verify_position(noisy, proposal, place, pair, numbers is not None)
            else:
                kept, nodes, tokens = verify_node(noisy, proposal, tree, at, numbers)
            ended = torch.tensor(self.ended, device=tokens.device)
            if self.rules.pads_finished_rows:
                tokens = torch.where(ended, torch.full_like(tokens, pad or 0), tokens)
                kept = kept | ended
            self.ids[:, length] = tokens
            committed += 1
            columns = [place] * len(self.numbers) if tree is None else (at + 1).tolist()
            for row, column in enumerate(columns):
                self._keep_outputs(outputs, row, column, scores[:, None], raw[:, None], block_end, at=0)
            if self.call.streamer is not None:
                self.call.streamer.put(tokens.cpu())
            so_far = self.outputs.result("scores")
            stops = self.rules.criteria(self.ids[:, : length + 1], so_far)
            self.ended = (ended | stops.to(ended.device)).tolist()
            if all(self.ended) or not bool(kept.all()):
                break
            if tree is not None:
                at = nodes
                for path, node in zip(self.paths, nodes.tolist(), strict=True):
                    path.append(node)
        self.lengths = [start + committed] * len(self.lengths)
        if block_end is not None:
            for row, ended_before in enumerate(was_ended):
                if not ended_before:
                    depth = None if tree is None else tree.depth_of(row, proposal.lengths[row])
                    self._record(row, Round(proposal.lengths[row], committed - 1, committed, depth))

    def _keep_outputs(
        self,
        outputs: Any,
        row: int,
        place: int,
        scores: Tensor,
        raw: Tensor,
        block_end: int | None,
        at: int | None = None,
    ) -> None:
        if not self.outputs.wanted:
            return
        number = self.numbers[row]
        self.outputs.add(number, row, place if at is None else at, scores, raw)
        if block_end is not None:
            self.outputs.add_states(number, row, place, outputs, self.runner.filled[row] + place, block_end)

    def _record(self, row: int, round_: Round) -> None:
        self.stats.record(self.numbers[row], round_)
        self.pace.learn(self.numbers[row], round_)

    def _stream(self, tokens: list[int]) -> None:
        if self.call.streamer is not None:
            for token in tokens:
                self.call.streamer.put(torch.tensor([token]))

    # -- rows and the end

    def _release_rows(self) -> None:
        """Let rows that have ended leave the batch (level rows stay; the last rows stay for the end)."""
        leaving = [row for row, ended in enumerate(self.ended) if ended and not self._owes_last_token(row)]
        if self.in_order or not leaving or len(leaving) == len(self.numbers):
            return
        for row in leaving:
            self.done[self.numbers[row]] = self.ids[row, : self.lengths[row]].clone()
        if self.keeps_cache:
            self.cache.park({self.numbers[row]: (row, self.runner.filled[row]) for row in leaving})
            self.drafter.park({self.numbers[row]: row for row in leaving})
        gone = set(leaving)
        staying = [row for row in range(len(self.numbers)) if row not in gone]
        self.ids = self.ids[torch.tensor(staying, device=self.ids.device)]
        self.lengths = [self.lengths[row] for row in staying]
        self.numbers = [self.numbers[row] for row in staying]
        self.ended = [self.ended[row] for row in staying]
        self.stack.select_rows(staying)
        self.runner.select_rows(staying)
        self.drafter.select_rows(staying)

    def output(self) -> Any:
        """What plain `generate` returns for this call."""
        longest, batch = self._longest(), len(self.numbers) + len(self.done)
        pad = _hf.pad_token(self.call.generation_config)
        sequences = torch.full((batch, longest), pad or 0, dtype=torch.long, device=self.ids.device)
        for row, number in enumerate(self.numbers):
            sequences[number, : self.lengths[row]] = self.ids[row, : self.lengths[row]]
        for number, ids in self.done.items():
            sequences[number, : ids.shape[0]] = ids
        cache = None
        if self.keeps_cache:
            cache = self.cache.export(self.call.model_kwargs[_hf.CACHE_KEY], longest - 1 + self.shift, self.numbers)
            setattr(cache, _STATE, (self.drafter.identity, self.drafter.state(self.numbers)))
        if not self.call.generation_config.return_dict_in_generate:
            return sequences
        names = ("scores", "logits", "attentions", "hidden_states")
        collected = {name: self.outputs.result(name) for name in names}
        result = _hf.GenerateDecoderOnlyOutput(sequences=sequences, **collected, **{_hf.CACHE_KEY: cache})
        result.speculation = self.stats
        return result


def _nan_message(model: Any, length: int) -> str:
    return (
        f"the logits of {type(model).__name__} after {length} tokens contain NaN, so no next token exists. The model "
        "is broken in this dtype or on this input: try float32 or another attention implementation, or pass "
        "remove_invalid_values=True."
    )
