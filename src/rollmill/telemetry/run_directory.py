"""The folder of one run: which files it holds, who may use it, and whether it fits the configuration.

    config.toml       resolved configuration, readable and usable as input
    config.json       identity: configuration and data set of each incarnation, with digests
    events.jsonl      what happened, one event per line
    metrics.jsonl     one line per optimizer step
    rollouts.jsonl    one line per rollout: text, reward, fate
    store.sqlite      samples and journal; the one truth
    checkpoints/      one folder per checkpoint
    weights/          manifests of published weights, and their tensors where shared memory is not used
    logs/             one file per process
    processes/        address and pid of each process
    live.json         what the live view shows now
    failure.json      first error of a run that failed
    summary.json      how the run ended; a stable interface, see `rollmill.telemetry.summary`

Decides whether a folder may be used for a run. It does not read or write samples, weights or checkpoints.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollmill import __version__
from rollmill.config.load import config_data, differing_keys, dump_config, parse_config
from rollmill.config.schema import RollmillConfig
from rollmill.errors import ConfigError, RunDirectoryError
from rollmill.telemetry.files import write_json_atomic, write_text_atomic

SCHEMA_VERSION = 1

RESUMABLE: frozenset[str] = frozenset(
    {
        # Where the folder lies is the user's business; it may have been moved.
        "run.name",
        "run.directory",
        # How long and how patiently.
        "run.steps",
        "run.stall_report_s",
        "run.stall_limit_s",
        "run.shutdown_grace_s",
        "run.on_generator_loss",
        "run.on_trainer_loss",
        "run.on_controller_loss",
        "run.restart_budget",
        "run.replica_deadline_s",
        "generator.request_deadline_s",
        "generator.load_deadline_s",
        "environment.scoring_deadline_s",
        "schedule.rollout_deadline_s",
        "schedule.group_deadline_s",
        "trainer.batch_deadline_s",
        "evaluation.deadline_s",
        # What is kept.
        "trainer.checkpoint_every_steps",
        "trainer.checkpoint_in_background",
        "trainer.checkpoint_deadline_s",
        "trainer.keep_checkpoints",
        "weights.transport",
        "weights.keep_versions",
        # How many hands.
        "environment.scoring_workers",
        "generator.replicas",
        "generator.fleet.address",
        "generator.fleet.job",
        "generator.fleet.adapter",
        "generator.fleet.slots",
        "generator.fleet.load_deadline_s",
        "generator.fleet.lost_deadline_s",
        "generator.fleet.token_file",
        "generator.fleet.tls",
        "generator.fleet.tls_ca",
        "generator.fleet.tls_cert",
        "generator.fleet.tls_key",
        "generator.fleet.tls_server_name",
        "generator.threads",
        "generator.borrowed_threads",
        "generator.kernels",
        "generator.max_num_seqs",
        "trainer.threads",
        "trainer.borrowed_threads",
        # What is measured.
        "evaluation.at_start",
        "evaluation.at_end",
        "evaluation.every_steps",
    }
)
"""Settings that may differ when a run is resumed: none of them changes what is learned from a sample."""

FIXED_IF_DETERMINISTIC: frozenset[str] = frozenset(
    {"generator.threads", "generator.kernels", "generator.max_num_seqs", "trainer.threads"}
)
"""Of those, the settings that change how arithmetic is rounded: fixed where bits must not change."""

FOLDERS = ("checkpoints", "weights", "logs", "processes")


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the run: the first, or a resume.

    Attributes:
        started_at_s: seconds since the Unix epoch.
        config: the resolved configuration as plain data.
        config_digest: sha256 of it.
        version: of Rollmill.
    """

    started_at_s: float
    config: dict[str, Any]
    config_digest: str
    version: str


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What `config.json` holds.

    Attributes:
        data_identity: digest of the data set; empty until the environment has been made.
        incarnations: oldest first; never empty.
    """

    schema_version: int
    data_identity: str
    incarnations: tuple[Incarnation, ...]


class RunDirectory:
    """Paths of one run, and the right to write there.

    Make one with `create`, `resume` or (for reading) `open`. The first two lock the folder until `close`, so that
    two runs never write into one.

    Attributes:
        root: the folder; `config_toml`, `identity_json`, `events`, `metrics`, `losses`, `rollouts`, `store`,
            `checkpoints`, `weights`, `logs`, `processes`, `live`, `failure` and `summary` are paths inside it.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.config_toml = self.root / "config.toml"
        self.identity_json = self.root / "config.json"
        self.events = self.root / "events.jsonl"
        self.metrics = self.root / "metrics.jsonl"
        self.losses = self.root / "losses.jsonl"
        self.rollouts = self.root / "rollouts.jsonl"
        self.store = self.root / "store.sqlite"
        self.checkpoints = self.root / "checkpoints"
        self.weights = self.root / "weights"
        self.logs = self.root / "logs"
        self.processes = self.root / "processes"
        self.live = self.root / "live.json"
        self.failure = self.root / "failure.json"
        self.summary = self.root / "summary.json"
        self._lock: int | None = None

    @classmethod
    def create(cls, root: str | Path, *, config: RollmillConfig, started_at_s: float) -> RunDirectory:
        """Make and lock the folder of a new run.

        Args:
            root: must not exist, or be empty.
            config: the resolved configuration; written as `config.toml`.
            started_at_s: seconds since the Unix epoch.

        Raises:
            RunDirectoryError: if the folder is occupied or cannot be written.
        """
        run = cls(root)
        run._refuse_occupied()
        run._make_folders()
        run._acquire()
        identity = Identity(
            schema_version=SCHEMA_VERSION, data_identity="", incarnations=(_incarnation(config, at_s=started_at_s),)
        )
        write_text_atomic(run.config_toml, dump_config(config))
        write_json_atomic(run.identity_json, identity)
        return run

    @classmethod
    def open(cls, root: str | Path) -> RunDirectory:
        """Return an existing run directory for reading; takes no lock.

        Raises:
            RunDirectoryError: if it is none.
        """
        run = cls(root)
        run.identity()
        return run

    @classmethod
    def resume(
        cls, root: str | Path, *, started_at_s: float, config: RollmillConfig | None = None
    ) -> tuple[RunDirectory, RollmillConfig]:
        """Lock an existing run directory and say with which configuration it goes on.

        Args:
            root: an existing run directory.
            started_at_s: seconds since the Unix epoch.
            config: settings to go on with; only keys in `RESUMABLE` may differ. `None` takes the last ones.

        Raises:
            RunDirectoryError: if it is no run directory, is in use, is of another configuration (every differing key
                is printed with both values), or cannot be written.
        """
        run = cls(root)
        last = run.configs()[-1]
        going_on = last if config is None else config
        run._refuse_other_config(last, going_on)
        run._make_folders()
        run._acquire()
        identity = run.identity()
        incarnations = (*identity.incarnations, _incarnation(going_on, at_s=started_at_s))
        write_text_atomic(run.config_toml, dump_config(going_on))
        write_json_atomic(run.identity_json, msgspec.structs.replace(identity, incarnations=incarnations))
        return run, going_on

    def identity(self) -> Identity:
        """Read `config.json`.

        Raises:
            RunDirectoryError: if there is none, or it is damaged or of a later version.
        """
        try:
            identity = msgspec.json.decode(self.identity_json.read_bytes(), type=Identity)
        except FileNotFoundError:
            raise RunDirectoryError(
                f"{self.root} is not a run directory: it has no config.json. Give the folder that `rollmill train` "
                "printed, for example runs/arithmetic."
            ) from None
        except (OSError, msgspec.DecodeError) as error:
            raise RunDirectoryError(
                f"{self.identity_json} cannot be read: {error}. Restore it from a copy, or start a new run."
            ) from error
        if identity.schema_version != SCHEMA_VERSION or not identity.incarnations:
            raise RunDirectoryError(
                f"{self.identity_json} has schema version {identity.schema_version}, this Rollmill reads "
                f"{SCHEMA_VERSION}. Resume it with the Rollmill that wrote it."
            )
        return identity

    def configs(self) -> tuple[RollmillConfig, ...]:
        """Return the configuration of every incarnation, oldest first; the journal was written under them in turn."""
        try:
            return tuple(parse_config(one.config) for one in self.identity().incarnations)
        except ConfigError as error:
            raise RunDirectoryError(
                f"{self.identity_json} was written by another version of Rollmill and does not fit this one: {error}"
            ) from error

    def check_data(self, data_identity: str) -> None:
        """Record the data set at the first start; refuse another one on resume.

        Args:
            data_identity: `Environment.identity()`.

        Raises:
            RunDirectoryError: if the run was started on another data set, with both digests.
        """
        identity = self.identity()
        if not identity.data_identity:
            write_json_atomic(self.identity_json, msgspec.structs.replace(identity, data_identity=data_identity))
        elif identity.data_identity != data_identity:
            raise RunDirectoryError(
                f"{self.root} was started on the data set {identity.data_identity}, this one is {data_identity}: "
                "samples and held-out problems would not belong together. The environment or its package has changed; "
                "restore it, or start a new run with another run.name."
            )

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _refuse_occupied(self) -> None:
        if not self.root.exists():
            return
        if not self.root.is_dir():
            raise RunDirectoryError(f"{self.root} is a file, not a folder. Choose another run.name or run.directory.")
        if any(self.root.iterdir()) and not self._half_made():
            raise RunDirectoryError(
                f"{self.root} is not empty{_last_word(self.summary)}. Go on with it: `rollmill train --resume "
                f"{self.root}`; or start beside it: `--set run.name=another`; or remove it."
            )

    def _half_made(self) -> bool:
        """Whether the folder holds only what a `create` that was cut short leaves: no run began there."""
        for path in self.root.iterdir():
            if path.name in FOLDERS:
                if any(path.iterdir()):
                    return False
            elif path.name not in ("lock", "config.toml") and not path.name.startswith(
                (".config.toml.", ".config.json.")
            ):
                return False
        return (self.root / "lock").exists()

    def _make_folders(self) -> None:
        try:
            for name in FOLDERS:
                (self.root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(
                f"{self.root} cannot be written: {error}. Check its permissions, or choose another run.directory."
            ) from error

    def _acquire(self) -> None:
        path = self.root / "lock"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunDirectoryError(
                f"{self.root} cannot be written: {error}. Check its permissions, or choose another run.directory."
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise RunDirectoryError(
                f"{self.root} is in use by process {holder}. Wait for it, stop it, or choose another run.name."
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        self._lock = handle

    def _refuse_other_config(self, old: RollmillConfig, new: RollmillConfig) -> None:
        changed = differing_keys(old, new)
        free = RESUMABLE - FIXED_IF_DETERMINISTIC if old.run.deterministic else RESUMABLE
        fixed = {key: pair for key, pair in changed.items() if key not in free}
        if fixed:
            rows = "\n".join(f"  {key}: {before!r} -> {after!r}" for key, (before, after) in fixed.items())
            raise RunDirectoryError(
                f"{self.root} was started with other settings:\n{rows}\nThese change what is learned and stay as they "
                f"were in a resumed run. Leave them out, or start a new run with another run.name. Free to change: "
                f"{', '.join(sorted(free))}."
            )


def digest_of(data: Mapping[str, Any]) -> str:
    """Return the sha256 of plain data, independent of the order of its keys."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _incarnation(config: RollmillConfig, *, at_s: float) -> Incarnation:
    data = config_data(config)
    return Incarnation(started_at_s=at_s, config=data, config_digest=digest_of(data), version=__version__)


def _last_word(summary: Path) -> str:
    try:
        document = msgspec.json.decode(summary.read_bytes())
        return f" (a run that ended with {document['reason']!r} after {document['steps']} steps)"
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return " (a run without a summary: still going, or killed)"
