"""Every error that Rollmill raises on purpose.

Two branches. The user can fix a `UserError`; a `Fault` is something that failed. Each class has a stable
`code`; each message says what happened with the numbers, the likely cause, and the next action.

    RollmillError
    |-- UserError                      the user can fix it
    |   |-- ConfigError                a setting is unknown, mistyped or impossible
    |   |-- ModelError                 model missing, unsupported architecture, wrong tokenizer
    |   |-- DataError                  data set empty, overlapping, or a prompt longer than the context
    |   |-- Unauthenticated            a call came without the token that the service asks for
    |   |-- RunDirectoryError          run directory unwritable, occupied, or of another run
    |   |-- CheckpointError            checkpoint missing or damaged
    |   |-- MissingExtraError          an optional package is not installed
    |   `-- IsolationError             this machine isolates sandboxes less than the configuration demands
    `-- Fault                          something failed
        |-- EngineError                the inference engine could not serve
        |   |-- EngineDead             the engine or its process is gone
        |   |-- NotServing             the replica takes no requests now; another one may
        |   |-- Overloaded             more requests than the replica or the router takes at once
        |   |-- RequestAborted         the request was aborted, with what it had produced
        |   |-- RequestIdInUse         another request with this id lives
        |   `-- SlowReader             the caller does not read the tokens it asked for
        |-- EnvironmentFault           the environment or its sandbox failed
        |-- SandboxError               a sandbox or its provider failed
        |   |-- SandboxRetryable       the provider has no room now; try again later
        |   |   `-- SandboxNotAdmitted  no sandbox became free or ready before the deadline
        |   |-- CreateUnknown          a creation was cut off: the sandbox may exist, to be looked up by its id
        |   |-- ImageError             the image is unknown, broken or too large
        |   |-- SandboxDead            the sandbox has ended, with the reason
        |   |-- SandboxUnsupported     this backend cannot do it
        |   |-- SandboxFileError       a path inside is missing, refused or not a file
        |   |-- SandboxBusy            programs run, or another call has it; it must be still for this
        |   |-- SandboxExhausted       the sandbox is out of processes, memory, space or descriptors
        |   |-- SandboxIdInUse         another sandbox has this id
        |   `-- SandboxLeaseLost       another owner has the rollout's sandbox now, or its lease ended
        |-- ScoringFault               the scorer raised, hung or died; never a reward
        |-- LengthMismatch             parallel arrays of a record disagree
        |-- StoreError                 the sample store refused or lost something
        |   `-- LeaseLost              a lease ended before its owner finished
        |-- WeightError                publication, load or retention failed
        |   `-- WeightMismatch         weights served are not the weights published
        |-- StalenessViolation         a sample older than the budget reached the trainer
        |-- NumericalFault             NaN or infinity in a loss or gradient
        |-- ProducersGone              nobody is left who could fill the batch
        |-- DeadlineExceeded           a wait ended without its event
        |-- ProcessDied                a process of the run ended before its time
        `-- InvariantViolation         our own bug: books that do not balance
"""

from __future__ import annotations

from collections.abc import Sequence


class RollmillError(Exception):
    """Root of the tree."""

    code = "rollmill"


class UserError(RollmillError):
    """Something the user can fix."""

    code = "user"


class ConfigError(UserError):
    """A setting is unknown, mistyped or impossible."""

    code = "config"


class ModelError(UserError):
    """The model is missing, unsupported, or its tokenizer does not fit."""

    code = "model"


class DataError(UserError):
    """The data set cannot be used."""

    code = "data"


class Unauthenticated(UserError):
    """A call came without the token that the service asks for, or with another one."""

    code = "unauthenticated"


class RunDirectoryError(UserError):
    """The run directory cannot be used."""

    code = "run_directory"


class CheckpointError(UserError):
    """A checkpoint is missing or damaged."""

    code = "checkpoint"


class MissingExtraError(UserError):
    """An optional package is not installed."""

    code = "missing_extra"

    def __init__(self, *, package: str, purpose: str, extra: str = "", command: str = "") -> None:
        command = command or f"pip install 'rollmill[{extra}]'"
        super().__init__(f"{purpose} needs the package {package!r}, which is not installed. Install it with: {command}")
        self.package = package
        self.command = command


class IsolationError(UserError):
    """This machine isolates sandboxes less than the configuration demands; nothing was started."""

    code = "isolation"


class Fault(RollmillError):
    """Something failed."""

    code = "fault"


class EngineError(Fault):
    """The inference engine could not serve a request."""

    code = "engine"


class EngineDead(EngineError):
    """The engine or its process is gone."""

    code = "engine_dead"


class NotServing(EngineError):
    """The replica takes no requests now (starting, dirty, draining); another one may."""

    code = "not_serving"


class Overloaded(EngineError):
    """More requests than are taken at once; nothing was begun.

    Attributes:
        retry_after_s: when a place is likely to be free.
    """

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestAborted(EngineError):
    """The request was aborted before it finished."""

    code = "request_aborted"


class RequestIdInUse(EngineError):
    """Another request with this id lives; ids are unique while a request lives."""

    code = "request_id_in_use"


class SlowReader(EngineError):
    """The caller does not read the tokens of its stream; the request was aborted to keep memory bounded."""

    code = "slow_reader"


class EnvironmentFault(Fault):
    """The environment or its sandbox failed; never a reward."""

    code = "environment"


class SandboxError(Fault):
    """A sandbox or its provider failed."""

    code = "sandbox"


class SandboxRetryable(SandboxError):
    """The provider has no room or answers too slowly now; nothing of this call is left behind.

    Attributes:
        after_s: when another try makes sense.
    """

    code = "sandbox_retryable"

    def __init__(self, message: str, *, after_s: float) -> None:
        super().__init__(message)
        self.after_s = after_s


class SandboxNotAdmitted(SandboxRetryable):
    """A pool had no sandbox for this caller before its deadline, or could see that it would not.

    Attributes:
        waiting_for: what it waited for last, as `Waiting` of `rollmill.sandboxes.admission` spells it.
        position: its place among those who waited, 0 if its sandbox was being made.
    """

    code = "sandbox_not_admitted"

    def __init__(self, message: str, *, after_s: float, waiting_for: str, position: int = 0) -> None:
        super().__init__(message, after_s=after_s)
        self.waiting_for = waiting_for
        self.position = position


class CreateUnknown(SandboxError):
    """A creation was cut off and its sandbox may exist: look it up by its id, then adopt or kill it.

    Attributes:
        sandbox_id: the id that was asked for.
    """

    code = "sandbox_create_unknown"

    def __init__(self, message: str, *, sandbox_id: str) -> None:
        super().__init__(message)
        self.sandbox_id = sandbox_id


class ImageError(SandboxError):
    """The image is unknown, broken or too large.

    Attributes:
        reason: what is wrong with it, as `rollmill.sandboxes.images.Refusal` spells it; empty where nobody said more.
    """

    code = "sandbox_image"

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class SandboxDead(SandboxError):
    """The sandbox has ended.

    Attributes:
        reason: why, as `DeathReason` spells it.
        fault: whose fault it is, as `Culprit` spells it: what `rollout` did is scored, what `infrastructure` did is
            not.
    """

    code = "sandbox_dead"

    def __init__(self, message: str, *, reason: str, fault: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.fault = fault


class SandboxUnsupported(SandboxError):
    """This backend, or this machine, cannot do what was asked.

    Attributes:
        capability: the name of what is missing.
    """

    code = "sandbox_unsupported"

    def __init__(self, message: str, *, capability: str) -> None:
        super().__init__(message)
        self.capability = capability


class SandboxFileError(SandboxError):
    """A path inside a sandbox is missing, refused, or not a file."""

    code = "sandbox_file"


class SandboxBusy(SandboxError):
    """Programs run in the sandbox, or another call has it to itself; for what was asked it must be still."""

    code = "sandbox_busy"


class SandboxExhausted(SandboxError):
    """The sandbox is out of processes, memory, disk space, inodes or descriptors; it lives on."""

    code = "sandbox_exhausted"


class SandboxIdInUse(SandboxError):
    """Another sandbox has this id; an id names one sandbox for good."""

    code = "sandbox_id_in_use"


class SandboxLeaseLost(SandboxError):
    """Another owner has this rollout's sandbox now, or its lease ended; the older owner must stop using it.

    Attributes:
        generation: the newest that is known, 0 if the rollout has no sandbox.
    """

    code = "sandbox_lease_lost"

    def __init__(self, message: str, *, generation: int) -> None:
        super().__init__(message)
        self.generation = generation


class ScoringFault(Fault):
    """The scorer raised, hung or died; never a reward.

    Attributes:
        kind: `timeout`, `raised`, `died` or `bad_value`.
    """

    code = "scoring"

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class LengthMismatch(Fault):
    """Parallel arrays of one record have different lengths."""

    code = "length_mismatch"

    def __init__(self, *, what: str, expected: int, got: int) -> None:
        super().__init__(
            f"{what}: expected {expected} entries, got {got}. The record was refused at the border; "
            "the sender dropped or repeated tokens."
        )
        self.expected = expected
        self.got = got


class StoreError(Fault):
    """The sample store refused an operation."""

    code = "store"


class LeaseLost(StoreError):
    """A lease ended before its owner finished."""

    code = "lease_lost"


class WeightError(Fault):
    """Publication, load or retention of weights failed."""

    code = "weights"


class WeightMismatch(WeightError):
    """The weights that are served are not the weights that were published."""

    code = "weight_mismatch"

    def __init__(self, message: str, *, published: str, served: str) -> None:
        super().__init__(message)
        self.published = published
        self.served = served


class StalenessViolation(Fault):
    """A sample older than `max_staleness` reached the trainer."""

    code = "staleness"


class NumericalFault(Fault):
    """A loss or a gradient is NaN or infinite."""

    code = "numerical"

    def __init__(self, message: str, *, rollout_ids: Sequence[str]) -> None:
        super().__init__(message)
        self.rollout_ids = tuple(rollout_ids)


class ProducersGone(Fault):
    """Nobody is left who could fill the batch."""

    code = "producers_gone"

    def __init__(self, *, alive: int, buffered: int) -> None:
        super().__init__(
            f"no producer is left to fill the batch: {alive} replicas alive, {buffered} groups buffered. "
            "The first error above says why they ended; restart the generator or lower the batch."
        )
        self.alive = alive
        self.buffered = buffered


class DeadlineExceeded(Fault):
    """A wait ended without the event it waited for."""

    code = "deadline"


class ProcessDied(Fault):
    """A process of the run ended before its time."""

    code = "process_died"


class InvariantViolation(Fault):
    """Our own bug: books that do not balance, or a state that cannot be."""

    code = "invariant"
