"""The embedded engine without threads: admission, prefill, decode, abort and weight swap, one step at a time.

Decides which waiting requests enter the batch (first come first served; siblings of a group come along) and what KV is
shared. Requests join and leave at every step; running sequences occupy slots 0..n-1 without holes. The requests of a
wave (deterministic mode) are held until all have come, then run alone. The caller owns the loop: nothing here waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
import torch

from rollmill.clock import Clock
from rollmill.errors import DataError, EngineError, RollmillError, WeightMismatch
from rollmill.generator.engines.embedded.attention import decode_mask
from rollmill.generator.engines.embedded.model import ServedModel
from rollmill.generator.engines.embedded.prefill import (
    DecodeBatch,
    PrefillJob,
    PrefillPlanner,
    PrefixStore,
    common_prefix,
)
from rollmill.generator.engines.embedded.sampling import sample
from rollmill.generator.engines.embedded.staging import Staging
from rollmill.generator.engines.embedded.waves import WaveGate
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.protocol import KvPolicy, UpdateReport
from rollmill.generator.engines.sequence import Sequence
from rollmill.types import StopReason

_LENGTH_BUCKET = 16
"""Attention length is rounded up to this, so that shapes repeat."""
_PREFIX_ENTRIES = 8
_SCORE_ROWS = 64
"""Rows of logits held at once while scoring."""


class EngineCore:
    """Scheduler and state of one embedded engine.

    Args:
        model: the model with its first weights.
        policy_version: publication number of those weights.
        digest: their digest.
        max_num_seqs: sequences decoded at once.
        max_model_len: longest prompt plus output, tokens.
        prefill_tokens: most prompt tokens computed in one pass.
        clock: stamps and deadlines.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        policy_version: int,
        digest: str,
        max_num_seqs: int,
        max_model_len: int,
        prefill_tokens: int,
        clock: Clock,
        meter: SecondsMeter,
    ) -> None:
        self.model = model
        self.staging = Staging(model)
        self.policy_version, self.digest = policy_version, digest
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.gate = WaveGate()
        self.paused = False
        self.admission_open = True
        self.dirty_reason: str | None = None
        self.output_tokens = self.prefill_tokens = self.cached_tokens = self.decode_passes = 0
        self._clock, self._meter = clock, meter
        self._prefill_limit = prefill_tokens
        self._pool = model.new_pool(slots=max_num_seqs + 1, max_len=max_model_len)
        self._scratch = max_num_seqs
        self._prefixes = PrefixStore(entries=_PREFIX_ENTRIES)
        self._chunks = PrefixStore(entries=1)

    # -- what the caller reads

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV when every slot is full."""
        return self._pool.nbytes

    @property
    def kv_used_tokens(self) -> int:
        """Tokens whose KV lies in a slot; may be read from another thread."""
        return sum(sequence.kv_tokens for sequence in list(self.running))

    def has_work(self) -> bool:
        """Return whether a step would do anything."""
        if self.paused or self.dirty_reason:
            return False
        return bool(self.running or (self.waiting and self.admission_open))

    def seconds_to_deadline(self) -> float | None:
        """Return the time to the next request deadline, or `None` without requests."""
        deadlines = [sequence.deadline_s for sequence in self._living()]
        return max(0.0, min(deadlines) - self._clock.now_s()) if deadlines else None

    # -- requests

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; it may enter the batch at the next step.

        Raises:
            EngineError: if the id is in use, the engine is dirty, or it serves an older version than asked for.
        """
        request = sequence.request
        self._refuse_if_dirty()
        if request.min_policy_version > self.policy_version:
            raise EngineError(
                f"request {request.request_id} wants policy version {request.min_policy_version} or newer, this engine "
                f"serves {self.policy_version}; send it to another replica or wait for the next load"
            )
        if any(other.request.request_id == request.request_id for other in self._living()):
            raise EngineError(f"request id {request.request_id} is in use; ids must be unique while a request lives")
        self.gate.arrive(sequence)
        self._open_gate()

    def _living(self) -> list[Sequence]:
        return [*self.running, *self.waiting, *self.gate.held]

    def _open_gate(self) -> None:
        """Let in what may run next: requests of no wave at any time, a whole wave on an empty batch."""
        coming = self.gate.take(empty=not self.running and not self.waiting)
        if self.gate.wave_id is not None and coming:
            # What an earlier wave left cached would change which tokens are computed together.
            self.flush()
        self.waiting.extend(coming)

    def _fail_wave(self, wave_id: str, error: EngineError) -> None:
        mates = [s for s in self._living() if s.request.wave is not None and s.request.wave.wave_id == wave_id]
        self._take_out(mates)
        for sequence in mates:
            sequence.deliver(error)
        self._open_gate()

    def abort(self, request_id: str) -> bool:
        """End exactly this request with what it has; its slot is free when this returns."""
        for sequence in self._living():
            if sequence.request.request_id == request_id:
                self._remove([sequence], reason=StopReason.ABORT)
                return True
        return False

    def abort_one(self, sequence: Sequence) -> None:
        """End this sequence if it still lives."""
        if sequence in self._living():
            self._remove([sequence], reason=StopReason.ABORT)

    def abort_all(self) -> None:
        """End every request with what it has."""
        self._remove(self._living(), reason=StopReason.ABORT)

    def expire(self) -> None:
        """Abort requests whose deadline has passed."""
        now_s = self._clock.now_s()
        for wave_id, error in self.gate.overdue(now_s=now_s):
            self._fail_wave(wave_id, error)
        late = [sequence for sequence in self._living() if sequence.deadline_s <= now_s]
        if late:
            self._remove(late, reason=StopReason.ABORT)

    def fail_all(self, error: Exception) -> None:
        """Give every request this error."""
        for sequence in self._living():
            sequence.deliver(error)
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
        planner, batches = self._admit()
        running = len(self.running)
        # A mixed pass is charged to what most of its tokens are for.
        self._meter.switch("prefill" if planner.computed > running else "decode")
        logits = self._run(planner, decode=self._decode_batch() if running else None)
        rows = [*range(running), *self._start(planner, batches, started_s=started_s)]
        if not rows:  # a chunk of a long prompt, and nobody else
            return
        try:
            self._sample(logits if len(rows) == len(logits) else logits[torch.tensor(rows)], self.running)
        except EngineError as error:  # numbers that are not finite: nothing more may be sampled from these weights
            self.dirty_reason = str(error)
            self.fail_all(error)
        self._retire()

    def _decode_batch(self) -> DecodeBatch:
        positions = np.array([sequence.kv_tokens for sequence in self.running], dtype=np.int64)
        length = min(self.max_model_len, -(-(int(positions.max()) + 1) // _LENGTH_BUCKET) * _LENGTH_BUCKET)
        at = torch.from_numpy(positions)
        return DecodeBatch(
            token_ids=torch.tensor([sequence.last_token for sequence in self.running]),
            positions=at,
            counts=at + 1,
            mask=decode_mask(at, length=length, dtype=self.model.dtype) if self.model.needs_masks else None,
        )

    def _run(self, planner: PrefillPlanner, *, decode: DecodeBatch | None = None) -> torch.Tensor:
        """Run one pass; return the logits of the decode batch, then those of the jobs that want them."""
        if decode is not None and not planner.jobs:
            work = decode.alone()
        else:
            work = planner.build(dtype=self.model.dtype, decode=decode)
        self.prefill_tokens += planner.computed
        logits = self.model.forward(
            work.token_ids, positions=work.positions, plan=work.plan, pool=self._pool, keep=work.keep
        )
        for job in planner.jobs:
            if job.slots == (self._scratch,):
                self._chunks.put(job.ids, self._pool.read(self._scratch, tokens=len(job.ids)))
        return logits

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        counters = np.array([sequence.count for sequence in sequences], dtype=np.int64)
        tokens, logprobs = sample(logits, params=[s.request.sampling for s in sequences], counters=counters)
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.append(token, logprob=logprob, policy_version=self.policy_version)
        self.output_tokens += len(sequences)
        self.decode_passes += 1

    def _retire(self) -> None:
        over = [(sequence, reason) for sequence in self.running if (reason := sequence.stop_reason()) is not None]
        for reason in (StopReason.STOP, StopReason.LENGTH):
            self._remove([sequence for sequence, why in over if why is reason], reason=reason)

    def _remove(self, sequences: list[Sequence], *, reason: StopReason) -> None:
        """Free slots, keep them without holes, and deliver the turns; a wave that loses a request fails whole."""
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
            if sequence in self.running:
                hole, last = self.running.index(sequence), len(self.running) - 1
                moved = self.running.pop()
                if hole != last:
                    self._pool.copy(last, hole, tokens=moved.kv_tokens)
                    self.running[hole] = moved
            elif sequence in self.waiting:
                self.waiting.remove(sequence)
            else:
                self.gate.held.remove(sequence)

    # -- prefill

    def _admit(self) -> tuple[PrefillPlanner, list[list[Sequence]]]:
        """Plan the prompts of the next pass; return them with the siblings that start after each."""
        planner = PrefillPlanner(self._pool)
        batches: list[list[Sequence]] = []
        taken = len(self.running)
        while self.admission_open and self.waiting and taken < self.max_num_seqs:
            mates = self._mates(limit=self.max_num_seqs - taken)
            if not self._plan_prompt(planner, mates, first_slot=taken):
                break
            for sequence in mates:
                self.waiting.remove(sequence)
            batches.append(mates)
            taken += len(mates)
        return planner, batches

    def _mates(self, *, limit: int) -> list[Sequence]:
        """Return the oldest waiting request and the waiting siblings that can share its prompt."""
        head = self.waiting[0]
        mates = [head]
        if head.request.group_key:
            mates += [
                other
                for other in self.waiting
                if other is not head
                and other.request.group_key == head.request.group_key
                and other.prompt_key == head.prompt_key
            ]
        return mates[:limit]

    def _plan_prompt(self, planner: PrefillPlanner, mates: list[Sequence], *, first_slot: int) -> bool:
        """Add the prompt of these siblings to the pass; return whether they can start after it.

        A prompt that exceeds what is left of the pass waits for the next one; one that exceeds a whole pass is
        computed in chunks, each of which becomes the prefix that the next one starts from.
        """
        ids = mates[0].prompt
        resident, source = self._resident(ids)
        sibling, common = planner.best_sibling(ids)
        fresh = len(ids) - max(resident, common)
        left = self._prefill_limit - planner.computed
        if fresh > left:
            if not planner.jobs:
                end = resident + left
                self._place(source, slots=(self._scratch,), tokens=resident)
                planner.add(PrefillJob(ids[:end], (self._scratch,), wants_logits=False, resident=resident))
            return False
        slots = tuple(range(first_slot, first_slot + len(mates)))
        if common > resident:
            planner.add(PrefillJob(ids, slots), sibling=sibling, common=common)
        else:
            self._place(source, slots=slots, tokens=resident)
            planner.add(PrefillJob(ids, slots, resident=resident))
        return True

    def _resident(self, ids: np.ndarray) -> tuple[int, int | torch.Tensor | None]:
        """Return (tokens, slot or KV) of the longest usable prefix: same ids, made with the weights served now."""
        limit = len(ids) - 1  # the last token is always computed: its logits are needed
        best: tuple[int, int | torch.Tensor | None] = (0, None)
        seen: set[bytes] = set()
        for slot, sequence in enumerate(self.running):
            if sequence.kv_version != self.policy_version or sequence.prompt_key in seen:
                continue
            seen.add(sequence.prompt_key)
            common = min(common_prefix(sequence.prompt, ids), limit)
            if common > best[0]:
                best = (common, slot)
        for store in (self._chunks, self._prefixes):
            common, kv = store.longest(ids)
            if min(common, limit) > best[0]:
                best = (min(common, limit), kv)
        return best

    def _place(self, source: int | torch.Tensor | None, *, slots: tuple[int, ...], tokens: int) -> None:
        for slot in slots:
            if isinstance(source, torch.Tensor):
                self._pool.write(source, slot, tokens=tokens)
            elif source is not None:
                self._pool.copy(source, slot, tokens=tokens)

    def _start(self, planner: PrefillPlanner, batches: list[list[Sequence]], *, started_s: float) -> list[int]:
        """Put admitted sequences into the batch; return the row of logits that each samples its first token from."""
        now_s, rows = self._clock.now_s(), []
        first = len(self.running)
        # A chunk of a long prompt is a job that nobody starts after, and always the only one of its pass.
        for row, (job, mates) in enumerate(zip(planner.jobs, batches, strict=False), start=first):
            rows += [row] * len(mates)
            if self._prefixes.longest(job.ids)[0] < len(job.ids):
                self._prefixes.put(job.ids, self._pool.read(job.slots[0], tokens=len(job.ids)))
            for index, sequence in enumerate(mates):
                sequence.cached_tokens = job.shared if index == 0 else len(job.ids)
                sequence.prefill_started_s, sequence.prefill_s = started_s, now_s - started_s
                sequence.first_token_s = now_s
                sequence.kv_version = self.policy_version
                self.cached_tokens += sequence.cached_tokens
                self.running.append(sequence)
        if batches:
            self._chunks.flush()
        return rows

    # -- control

    def pause(self) -> None:
        """Stop producing tokens; requests keep their KV."""
        self.paused = True

    def resume(self) -> None:
        """Go on, with admission open."""
        self.paused, self.admission_open = False, True

    def flush(self) -> None:
        """No later request hits KV made before this call."""
        self._prefixes.flush()
        self._chunks.flush()
        for sequence in self.running:
            sequence.kv_version = -1

    @torch.inference_mode()
    def update(
        self, tensors: Mapping[str, torch.Tensor], *, policy_version: int, digest: str, kv: KvPolicy
    ) -> UpdateReport:
        """Swap the weights, see the engine protocol."""
        if not self.paused:
            raise EngineError(f"update to policy version {policy_version} while running: pause the engine first")
        if policy_version == self.policy_version and self.dirty_reason is None:
            return self._repeated(policy_version, digest=digest)
        if policy_version < self.policy_version:
            raise EngineError(
                f"update to policy version {policy_version}, but {self.policy_version} is served: versions only rise; "
                "to roll back, publish the old weights under a new version"
            )
        started_s = self._clock.now_s()
        # An exchange of pointers, which cannot fail half way; what was not staged is written into the serving set.
        swapped = self.staging.swap(tensors, policy_version=policy_version)
        pairs = [] if swapped else self.model.check(tensors)
        self._meter.switch("weight_load")
        try:
            if not swapped:
                self.model.copy(pairs)
            if self.dirty_reason is not None:
                self._pool.clear()
            self.policy_version, self.digest, self.dirty_reason = policy_version, digest, None
            self.flush()
            if kv == "recompute":
                self._recompute()
        except (RuntimeError, TypeError, ValueError, OSError, RollmillError) as error:
            self._spoil(policy_version, error=error)
            raise EngineError(self.dirty_reason) from error
        finally:
            self._meter.switch("paused")
        pause_s = self._clock.now_s() - started_s
        nbytes = self.model.weight_bytes
        return UpdateReport(policy_version=policy_version, nbytes=nbytes, pause_s=pause_s, changed=True)

    def _repeated(self, policy_version: int, *, digest: str) -> UpdateReport:
        if digest != self.digest:
            raise WeightMismatch(
                f"policy version {policy_version} is served with digest {self.digest}, the repeated update says "
                f"{digest}: two publications share a number; clear the repository",
                published=digest,
                served=self.digest,
            )
        return UpdateReport(policy_version=policy_version, nbytes=0, pause_s=0.0, changed=False)

    def _spoil(self, policy_version: int, *, error: Exception) -> None:
        """Weights are part old, part new: end what runs (its tokens are sound), refuse what waits, serve nothing."""
        self.dirty_reason = (
            f"the load of policy version {policy_version} failed after weights had been changed ({error}); nothing is "
            "served until a later version loads completely"
        )
        self.flush()
        self._remove(list(self.running), reason=StopReason.ABORT)
        self.fail_all(EngineError(self.dirty_reason))

    def _recompute(self) -> None:
        """Make the KV of running sequences again under the weights served now."""
        done: list[tuple[int, Sequence]] = []
        planner = PrefillPlanner(self._pool)
        for slot, sequence in enumerate(self.running):
            ids = sequence.kv_ids()
            while True:
                resident, source = self._resident(ids)
                sibling, common = planner.best_sibling(ids)
                left = self._prefill_limit - planner.computed
                if len(ids) - max(resident, common) <= left:
                    break
                if planner.jobs:
                    planner = self._flush_recompute(planner, done)
                    continue
                end = resident + left
                self._place(source, slots=(self._scratch,), tokens=resident)
                planner.add(PrefillJob(ids[:end], (self._scratch,), wants_logits=False, resident=resident))
                self._run(planner)
                planner = PrefillPlanner(self._pool)
            job = PrefillJob(ids, (slot,), wants_logits=False)
            if common > resident:
                planner.add(job, sibling=sibling, common=common)
            else:
                self._place(source, slots=(slot,), tokens=resident)
                job.resident = resident
                planner.add(job)
            done.append((slot, sequence))
        self._flush_recompute(planner, done)
        self._chunks.flush()

    def _flush_recompute(self, planner: PrefillPlanner, done: list[tuple[int, Sequence]]) -> PrefillPlanner:
        if planner.jobs:
            self._run(planner)
        for _, sequence in done:
            sequence.kv_version = self.policy_version
        done.clear()
        return PrefillPlanner(self._pool)

    @torch.inference_mode()
    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 [n - 1] log-probs under temperature 1, see the engine protocol."""
        self._refuse_if_dirty()
        ids = np.ascontiguousarray(token_ids, dtype=np.int64)
        if not 2 <= len(ids) <= self.max_model_len or ids.min() < 0 or ids.max() >= self.model.vocabulary_size:
            raise DataError(
                f"cannot score {len(ids)} token ids: 2 to {self.max_model_len} of a vocabulary of "
                f"{self.model.vocabulary_size} are accepted"
            )
        out = np.empty(len(ids) - 1, dtype=np.float32)
        for start in range(0, len(ids) - 1, _SCORE_ROWS):
            stop = min(start + _SCORE_ROWS, len(ids) - 1)
            planner = PrefillPlanner(self._pool)
            planner.add(PrefillJob(ids[:stop], (self._scratch,), resident=start))
            work = planner.build(dtype=self.model.dtype)
            logits = self.model.forward(
                work.token_ids, positions=work.positions, plan=work.plan, pool=self._pool, keep=None
            ).float()
            targets = torch.from_numpy(ids[start + 1 : stop + 1])[:, None]
            out[start:stop] = (logits.gather(1, targets)[:, 0] - logits.logsumexp(-1)).numpy()
        return out

    def _refuse_if_dirty(self) -> None:
        if self.dirty_reason is not None:
            raise EngineError(f"the engine is dirty: {self.dirty_reason}")
