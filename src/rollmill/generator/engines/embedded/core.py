"""The embedded engine without threads: admission, prefill, decode, preemption, abort and weight swap, step by step.

Decides which waiting requests enter the batch (first come first served; siblings of a group come along) and who gives
up its KV when blocks run short (the youngest; its tokens are kept and its KV is made again later). Requests join and
leave at every step. The requests of a wave (deterministic mode) are held until all have come, then run alone, and enter
only where their KV fits to the end. The caller owns the loop: nothing here waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
import torch

from rollmill.clock import Clock
from rollmill.errors import EngineError, RollmillError
from rollmill.generator.engines.embedded.blocks import Match
from rollmill.generator.engines.embedded.kv import KvCache
from rollmill.generator.engines.embedded.low_rank import ServedAdapter, groups_of
from rollmill.generator.engines.embedded.model import ServedModel
from rollmill.generator.engines.embedded.prefill import DecodeBatch, PrefillJob, PrefillPlanner, decode_batch
from rollmill.generator.engines.embedded.recall import Recall
from rollmill.generator.engines.embedded.rejection import verify
from rollmill.generator.engines.embedded.rewards import give_rewards
from rollmill.generator.engines.embedded.scoring import score_tokens
from rollmill.generator.engines.embedded.speculation import Guess, Guesser
from rollmill.generator.engines.embedded.staging import Staging, repeated_update
from rollmill.generator.engines.embedded.waves import WaveGate
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.protocol import KvPolicy, UpdateReport
from rollmill.generator.engines.sequence import Sequence
from rollmill.generator.engines.shelf import Shelf
from rollmill.types import StopReason

_Batches = list[tuple[PrefillJob, list[Sequence]]]


class EngineCore:
    """Scheduler and state of one embedded engine.

    Args:
        model: the model with its first weights.
        policy_version: publication number of those weights.
        digest: their digest.
        max_num_seqs: sequences decoded at once.
        max_model_len: longest prompt plus output, tokens.
        max_num_batched_tokens: most tokens of one pass, decoded ones and those of prompts; at least
            `max_num_seqs`.
        kv: where KV lies; holds at least one sequence of `max_model_len`.
        clock: stamps and deadlines.
        meter: where the seconds go.
        max_wait_s: how long an idle engine holds the first request for company.
        speculator: guesses tokens; `None` never does.
        max_loras: most adapters served at once beside the base.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        policy_version: int,
        digest: str,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        kv: KvCache,
        clock: Clock,
        meter: SecondsMeter,
        max_wait_s: float = 0.0,
        speculator: Guesser | None = None,
        max_loras: int = 0,
    ) -> None:
        self.model = model
        self.staging = Staging(model)
        self.kv, self.speculator = kv, speculator
        self.shelf = Shelf(max_loras)
        self.recall = None if kv.tier is None else Recall(kv, tier=kv.tier)
        self.policy_version, self.digest = policy_version, digest
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.gate = WaveGate()
        self.paused = False
        self.admission_open = True
        self.dirty_reason: str | None = None
        self.output_tokens = self.prefill_tokens = self.cached_tokens = self.decode_passes = self.preemptions = 0
        self._clock, self._meter = clock, meter
        self._max_wait_s = max_wait_s
        self._chunk: PrefillJob | None = None
        self._chunked: tuple[Sequence | None, int] = None, 0

    # -- what the caller reads

    @property
    def kv_used_tokens(self) -> int:
        """Tokens that fit into the blocks in use; may be read from another thread."""
        return self.kv.store.used * self.kv.store.size

    @property
    def busy(self) -> bool:
        """Whether any request has begun and is not over."""
        return bool(self.running) or self._head_has_begun()

    def _head_has_begun(self) -> bool:
        return bool(self.waiting) and self.waiting[0].count > 0

    def has_work(self) -> bool:
        """Return whether a step would do anything."""
        if self.paused or self.dirty_reason:
            return False
        if self.running or self._head_has_begun():
            return True
        return bool(self.waiting) and self.admission_open and self._hold_s() <= 0.0

    def _hold_s(self) -> float:
        """Return how much longer the first request of an idle engine is held for company."""
        if not self._max_wait_s or self.running or not self.waiting or len(self.waiting) >= self.max_num_seqs:
            return 0.0
        head = self.waiting[0]
        if head.count or head.request.wave is not None:  # a wave has all its company
            return 0.0
        return head.arrived_s + self._max_wait_s - self._clock.now_s()

    def seconds_to_wake(self) -> float | None:
        """Return the time to the next request deadline or end of a hold, or `None` without requests."""
        now_s = self._clock.now_s()
        times = [sequence.deadline_s - now_s for sequence in self.living()]
        if not self.paused and (hold_s := self._hold_s()) > 0.0:
            times.append(hold_s)
        return max(0.0, min(times)) if times else None

    # -- requests

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; it may enter the batch at the next step.

        Raises:
            EngineError: if the id is in use, the engine is dirty, or it serves an older version than asked for.
            ModelError: if its adapter is not loaded.
        """
        request = sequence.request
        self.refuse_if_dirty()
        self.shelf.ask(request.adapter)
        served = self._version_of(sequence)
        if request.min_policy_version > served:
            raise EngineError(
                f"request {request.request_id} wants policy version {request.min_policy_version} or newer, this engine "
                f"serves {served}; send it to another replica or wait for the next load"
            )
        if any(other.request.request_id == request.request_id for other in self.living()):
            raise EngineError(f"request id {request.request_id} is in use; ids must be unique while a request lives")
        self.gate.arrive(sequence)
        self._open_gate()

    def _adapter_of(self, sequence: Sequence) -> ServedAdapter | None:
        return self.shelf.served(sequence.request.adapter)

    def _version_of(self, sequence: Sequence) -> int:
        adapter = self._adapter_of(sequence)
        return self.policy_version if adapter is None else adapter.policy_version

    def living(self) -> list[Sequence]:
        """Return every request that has come and is not over."""
        return [*self.running, *self.waiting, *self.gate.held]

    def _open_gate(self) -> None:
        """Let in what may run next: requests of no wave at any time, a whole wave on an empty batch."""
        coming = self.gate.take(empty=not self.running and not self.waiting)
        if self.gate.wave_id is not None and coming:
            # What an earlier wave left cached would change which tokens are computed together.
            self.flush()
        self.waiting.extend(coming)

    def _fail_wave(self, wave_id: str, error: EngineError) -> None:
        mates = [s for s in self.living() if s.request.wave is not None and s.request.wave.wave_id == wave_id]
        self._take_out(mates)
        for sequence in mates:
            sequence.deliver(error)
        self._open_gate()

    def abort(self, request_id: str) -> bool:
        """End exactly this request with what it has; its KV is free when this returns."""
        for sequence in self.living():
            if sequence.request.request_id == request_id:
                self._remove([sequence], reason=StopReason.ABORT)
                return True
        return False

    def abort_one(self, sequence: Sequence) -> None:
        """End this sequence if it still lives."""
        if sequence in self.living():
            self._remove([sequence], reason=StopReason.ABORT)

    def abort_all(self) -> None:
        """End every request with what it has."""
        self._remove(self.living(), reason=StopReason.ABORT)

    def expire(self) -> None:
        """Abort requests whose deadline has passed."""
        now_s = self._clock.now_s()
        for wave_id, error in self.gate.overdue(now_s=now_s):
            self._fail_wave(wave_id, error)
        late = [sequence for sequence in self.living() if sequence.deadline_s <= now_s]
        if late:
            self._remove(late, reason=StopReason.ABORT)

    def fail_all(self, error: Exception) -> None:
        """Give every request this error."""
        for sequence in self.living():
            sequence.deliver(error)
        self.kv.forget()
        if self.speculator is not None:
            self.speculator.clear()
        self.running.clear()
        self.waiting.clear()
        self.gate.clear()

    # -- one step

    @torch.inference_mode()
    def step(self) -> None:
        """Give every running sequence one token, and in the same pass prefill and start what can be admitted."""
        self.expire()
        if not self.has_work():
            return
        started_s = self._clock.now_s()
        self._make_room()
        planner, batches = self._admit()
        guesses = self._guesses(beside=planner.computed)
        fed = [(one, (one.last_token, *guess.tokens)) for one, guess in zip(self.running, guesses, strict=True)]
        decode = decode_batch(fed, kv=self.kv, adapter_of=self._adapter_of) if fed else None
        decoded = 0 if decode is None else len(decode.token_ids)
        # A mixed pass is charged to what most of its tokens are for.
        self._meter.switch("prefill" if planner.computed > decoded else "decode")
        run_from_s = self._clock.now_s()
        logits = self._run(planner, decode=decode)
        if self.recall is not None:
            self.recall.see_prefill(planner.computed, beside=decoded, seconds=self._clock.now_s() - run_from_s)
        rows = [*range(decoded), *self._start(batches, started_s=started_s, first=decoded)]
        if not rows:  # a chunk of a long prompt, and nobody else
            return
        guesses += [Guess()] * (len(self.running) - len(guesses))
        before = self.output_tokens
        wanted = logits if len(rows) == len(logits) else logits[torch.tensor(rows)]
        try:
            if self.model.labels:
                give_rewards(wanted, self.running, policy_version=self.policy_version)
            else:
                self._sample(wanted, guesses=guesses)
        except EngineError as error:  # numbers that are not finite: nothing more may be sampled from these weights
            self.dirty_reason = str(error)
            self.fail_all(error)
        if self.speculator is not None and not planner.jobs:
            self.speculator.passed(
                sequences=len(guesses),
                rows=decoded,
                tokens=self.output_tokens - before,
                seconds=self._clock.now_s() - started_s,
            )
        self._retire()

    def _guesses(self, *, beside: int) -> list[Guess]:
        """Return what may follow the newest token of each running sequence; blocks are taken only where there are any.

        Args:
            beside: tokens of prompts in the same pass.
        """
        if self.speculator is None or not self.running:
            return [Guess()] * len(self.running)
        self._meter.switch("decode")  # passes of a draft model are part of it
        rows = len(self.running) + beside
        guesses = self.speculator.guess(self.running, rows=rows, most=self.max_num_batched_tokens - rows)
        return [
            guess if not guess.tokens or self.kv.grow(one, tokens=one.kv_tokens + 1 + len(guess.tokens)) else Guess()
            for one, guess in zip(self.running, guesses, strict=True)
        ]

    def _run(self, planner: PrefillPlanner, *, decode: DecodeBatch | None = None) -> torch.Tensor:
        """Run one pass; return the logits of the decode batch, then those of the jobs that want them."""
        work = planner.build(dtype=self.model.dtype, masks=self.model.needs_masks, decode=decode)
        self.prefill_tokens += planner.computed
        return self.model.forward(
            work.token_ids,
            positions=work.positions,
            plan=work.plan,
            pool=self.kv.pool,
            keep=work.keep,
            adapters=groups_of(work.owners),
        )

    def _sample(self, logits: torch.Tensor, *, guesses: list[Guess]) -> None:
        """Draw a token behind every token that was fed; keep those behind which nothing else was guessed.

        What a draft model guessed counts as its distribution and the model's say.
        """
        fed = [1 + len(guess.tokens) for guess in guesses]
        counters = np.concatenate([np.arange(s.count, s.count + n) for s, n in zip(self.running, fed, strict=True)])
        params = [s.request.sampling for s, n in zip(self.running, fed, strict=True) for _ in range(n)]
        drawn = verify(logits, params=params, counters=counters, guesses=guesses, kernels=self.model.kernels)
        for sequence, guess, tokens in zip(self.running, guesses, drawn, strict=True):
            self._keep(sequence, tokens, guess=guess)
        self.decode_passes += 1

    def _keep(self, sequence: Sequence, drawn: list[tuple[int, float]], *, guess: Guess) -> None:
        right, version = 0, self._version_of(sequence)
        for place, (token, logprob) in enumerate(drawn):
            sequence.append(token, logprob=logprob, policy_version=version)
            self.output_tokens += 1
            as_guessed = place < len(guess.tokens) and token == guess.tokens[place]
            right += as_guessed
            if not as_guessed or sequence.stop_reason() is not None:
                break
        if self.speculator is not None and guess.tokens:
            self.speculator.see(guess, right=right)

    def _retire(self) -> None:
        over = [(sequence, reason) for sequence in self.running if (reason := sequence.stop_reason()) is not None]
        for reason in (StopReason.STOP, StopReason.LENGTH):
            self._remove([sequence for sequence, why in over if why is reason], reason=reason)
        if len(self.shelf) > 0:  # rows of one adapter side by side need no gathering
            self.running.sort(key=lambda one: one.request.adapter)

    def _remove(self, sequences: list[Sequence], *, reason: StopReason) -> None:
        """Free KV and deliver the turns; a wave that loses a request fails whole."""
        now_s = self._clock.now_s()
        self._take_out(sequences)
        for sequence in sequences:
            sequence.deliver(sequence.turn(reason, now_s=now_s))
        if reason is StopReason.ABORT:
            for wave_id, error in self.gate.broken_by(sequences):
                self._fail_wave(wave_id, error)
        self._open_gate()

    def _take_out(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if self.speculator is not None:
                self.speculator.forget(sequence)
            if sequence in self.running:
                self.running.remove(sequence)
                self.kv.end(sequence)
            elif sequence in self.waiting:
                if sequence is self.waiting[0]:  # whose beginning may have been computed
                    self.kv.drop_chunk()
                self.waiting.remove(sequence)
            else:
                self.gate.held.remove(sequence)

    # -- room

    def _make_room(self) -> None:
        """Give every running sequence a block for its next token; if there is none, the youngest gives up its own."""
        for sequence in list(self.running):
            while sequence in self.running and not self.kv.grow(sequence, tokens=sequence.kv_tokens + 1):
                if not self.kv.drop_chunk():
                    self._preempt(max(self.running, key=lambda one: one.arrived_s))

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.kv.end(sequence, suspended=True)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _promised(self, sequence: Sequence, *, held: int) -> int:
        """Return how many blocks a sequence that holds so many must find later: the next one, in a wave all."""
        missing = self.kv.store.needed(len(sequence.prompt) + sequence.capacity - 1) - held
        return max(0, missing if sequence.request.wave is not None else min(1, missing))

    def _room(self, entering: _Batches) -> int | None:
        """Return the blocks that nobody was promised; `None` where nobody runs."""
        if not self.running and not entering:
            return None
        promised = sum(self._promised(one, held=len(self.kv.blocks_of(one))) for one in self.running)
        for job, mates in entering:
            held = len(job.tables[0].blocks)
            promised += sum(self._promised(mate, held=held) for mate in mates)
        return self.kv.store.available - promised

    # -- prefill

    def _admit(self) -> tuple[PrefillPlanner, _Batches]:
        """Plan the prompts of the next pass; return them with the siblings that start after each."""
        planner = PrefillPlanner(self.kv.store.size)
        batches: _Batches = []
        taken = len(self.running)
        while self.waiting and taken < self.max_num_seqs and (self.admission_open or self._head_has_begun()):
            mates = self._plan_prompt(planner, self._mates(limit=self.max_num_seqs - taken), entering=batches)
            if not mates:
                break
            for sequence in mates:
                self.waiting.remove(sequence)
            batches.append((planner.jobs[-1], mates))
            taken += len(mates)
        return planner, batches

    def _mates(self, *, limit: int) -> list[Sequence]:
        """Return the oldest waiting request and the waiting siblings that can share its prompt."""
        head = self.waiting[0]
        mates = [head]
        if head.request.group_key and not head.count:
            mates += [
                other
                for other in self.waiting
                if other is not head
                and not other.count
                and other.request.group_key == head.request.group_key
                and other.prompt_key == head.prompt_key
                and other.request.adapter == head.request.adapter
            ]
        return mates[:limit]

    def _plan_prompt(self, planner: PrefillPlanner, mates: list[Sequence], *, entering: _Batches) -> list[Sequence]:
        """Add the prompt of these siblings to the pass; return those that start after it.

        A prompt that exceeds what is left of the pass, or whose blocks are not there, waits for a later one; one that
        exceeds a whole pass is computed in chunks, each of which becomes the prefix that the next one starts from.
        """
        ids = mates[0].all_ids()
        adapter = self.shelf.served(mates[0].request.adapter)
        space = b"" if adapter is None else adapter.space
        # The last token is computed: its logits are needed.
        match = self.kv.store.match(ids, limit=len(ids) - 1, space=space)
        sibling, common = planner.best_sibling(ids, adapter=adapter)
        left = self.max_num_batched_tokens - len(self.running) - planner.computed
        promises = [self._promised(mate, held=self.kv.store.needed(len(ids))) for mate in mates]
        if self.recall is not None:
            match = self.recall.lengthen(
                mates[0],
                ids,
                match=match,
                common=common,
                room=lambda: self._room(entering),
                promised=promises[0],
                left=left if planner.jobs else None,
                space=space,
            )
        if common > match.tokens:
            match = planner.sibling_match(sibling, common=common)
        else:
            sibling, common = -1, 0
        fresh = len(ids) - max(match.tokens, common)
        if fresh > left:
            if not planner.jobs:
                self._plan_chunk(planner, mates[0], ids[: match.tokens + left], match=match)
            return []
        job = self._begin(ids, match=match, promises=promises, room=self._room(entering), adapter=adapter)
        if job is None:
            return []
        planner.add(job, sibling=sibling, common=common)
        self.kv.drop_chunk()
        return mates[: len(job.tables)]

    def _plan_chunk(self, planner: PrefillPlanner, head: Sequence, ids: np.ndarray, *, match: Match) -> None:
        adapter = self.shelf.served(head.request.adapter)
        job = self._begin(ids, match=match, promises=[0], room=self._room([]), adapter=adapter)
        if job is not None:
            job.wants_logits = False
            planner.add(job)
            self._chunk = job
            before = self._chunked[1] if self._chunked[0] is head else 0
            self._chunked = head, before + planner.computed

    def _begin(
        self,
        ids: np.ndarray,
        *,
        match: Match,
        promises: list[int],
        room: int | None,
        adapter: ServedAdapter | None,
    ) -> PrefillJob | None:
        """Return the job of a prompt with blocks for as many siblings as there is room for, or `None`."""
        space = b"" if adapter is None else adapter.space
        tables = self.kv.begin(match, tokens=len(ids), promises=promises, room=room, space=space)
        if not tables and room is None:
            # Nobody runs, so all blocks are to be had, except those that lie about for later.
            self.kv.drop_chunk()
            match = match.without_tail(self.kv.store.size)
            tables = self.kv.begin(match, tokens=len(ids), promises=promises, room=None, space=space)
        return PrefillJob(ids, tables, resident=match.tokens, adapter=adapter) if tables else None

    def _start(self, batches: _Batches, *, started_s: float, first: int) -> list[int]:
        """Put admitted sequences into the batch; return the row of logits that each samples its next token from."""
        rows: list[int] = []
        # A chunk of a long prompt is a job that nobody starts after, and always the only one of its pass.
        if self._chunk is not None:
            self.kv.hold_chunk(self._chunk.tables[0], self._chunk.ids)
            self._chunk = None
        for row, (job, mates) in enumerate(batches, start=first):
            rows += [row] * len(mates)
            self.kv.store.register(job.tables[0], job.ids, partial=True)
            for index, (sequence, table) in enumerate(zip(mates, job.tables, strict=True)):
                if index:
                    table.chain = list(job.tables[0].chain)
                self.kv.adopt(sequence, table)
                if self.recall is not None and index == 0:
                    self.recall.count(sequence)
                if not sequence.count:
                    self._stamp(sequence, cached=job.shared if index == 0 else len(job.ids), started_s=started_s)
                self.running.append(sequence)
        return rows

    def _stamp(self, sequence: Sequence, *, cached: int, started_s: float) -> None:
        now_s = self._clock.now_s()
        if self._chunked[0] is sequence:  # what it found there was made for itself
            cached = max(0, cached - self._chunked[1])
            self._chunked = None, 0
        sequence.cached_tokens = cached
        sequence.prefill_started_s, sequence.prefill_s = started_s, now_s - started_s
        sequence.first_token_s = now_s
        self.cached_tokens += cached

    # -- control

    def pause(self) -> None:
        """Stop producing tokens; requests keep their KV."""
        self.paused = True

    def resume(self) -> None:
        """Go on, with admission open."""
        self.paused, self.admission_open = False, True

    def flush(self) -> None:
        """No later request hits KV made before this call."""
        self.kv.flush()

    @torch.inference_mode()
    def update(
        self, tensors: Mapping[str, torch.Tensor], *, policy_version: int, digest: str, kv: KvPolicy
    ) -> UpdateReport:
        """Swap the weights, see the engine protocol."""
        if not self.paused:
            raise EngineError(f"update to policy version {policy_version} while running: pause the engine first")
        if policy_version == self.policy_version and self.dirty_reason is None:
            return repeated_update(policy_version, digest=digest, served=self.digest)
        if policy_version < self.policy_version:
            raise EngineError(
                f"update to policy version {policy_version}, but {self.policy_version} is served: versions only rise; "
                "to roll back, publish the old weights under a new version"
            )
        self.shelf.refuse_update(policy_version)
        started_s = self._clock.now_s()
        # An exchange of pointers, which cannot fail half way; what was not staged is written into the serving set.
        swapped = self.staging.swap(tensors, policy_version=policy_version)
        pairs = [] if swapped else self.model.check(tensors)
        self._meter.switch("weight_load")
        try:
            if not swapped:
                self.model.copy(pairs)
            if self.dirty_reason is not None:
                self.kv.clear()
            self.policy_version, self.digest, self.dirty_reason = policy_version, digest, None
            self.flush()
            if kv == "recompute":
                self.retract(list(self.running))
        except (RuntimeError, TypeError, ValueError, OSError, RollmillError) as error:
            self._spoil(policy_version, error=error)
            raise EngineError(self.dirty_reason) from error
        finally:
            self._meter.switch("paused")
        pause_s = self._clock.now_s() - started_s
        nbytes = self.model.weight_bytes
        return UpdateReport(policy_version=policy_version, nbytes=nbytes, pause_s=pause_s, changed=True)

    def _spoil(self, policy_version: int, *, error: Exception) -> None:
        """Weights are part old, part new: end what runs (its tokens are sound), refuse what waits, serve nothing."""
        self.dirty_reason = (
            f"the load of policy version {policy_version} failed after weights had been changed ({error}); nothing is "
            "served until a later version loads completely"
        )
        self.flush()
        self._remove([s for s in self.living() if s.count], reason=StopReason.ABORT)
        self.fail_all(EngineError(self.dirty_reason))

    def retract(self, sequences: list[Sequence]) -> None:
        """Put running sequences in front of the queue: their KV is made again under the weights served now."""
        self.kv.retract(sequences)
        self.running = [sequence for sequence in self.running if sequence not in sequences]
        self.waiting.extendleft(reversed(sequences))

    @torch.inference_mode()
    def score(self, token_ids: np.ndarray, *, adapter: ServedAdapter | None = None) -> np.ndarray:
        """Return float32 [n - 1] log-probs under temperature 1, see the engine protocol."""
        self.refuse_if_dirty()
        return score_tokens(self.model, token_ids, kv=self.kv, max_model_len=self.max_model_len, adapter=adapter)

    def refuse_if_dirty(self) -> None:
        """Refuse whatever computes while the weights are part old, part new.

        Raises:
            EngineError: with the reason.
        """
        if self.dirty_reason is not None:
            raise EngineError(f"the engine is dirty: {self.dirty_reason}")
