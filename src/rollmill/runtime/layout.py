"""Names of the files through which the processes of a run find each other. Decides nothing."""

from __future__ import annotations

from pathlib import Path

CONTROLLER = "controller"
TRAINER = "trainer"
SUPERVISOR = "supervisor"
EVALUATOR = "evaluator"
NURSERY = "nursery"


def replica_name(index: int) -> str:
    """Return the name of a replica process."""
    return f"generator-{index}"


class ProcessLayout:
    """Paths under a run directory that only `runtime` uses."""

    def __init__(self, run_directory: Path) -> None:
        self.run_directory = run_directory
        self.processes = run_directory / "processes"
        self.logs = run_directory / "logs"
        self.store = run_directory / "store.sqlite"
        self.weights = run_directory / "weights"
        self.checkpoints = run_directory / "checkpoints"
        self.failure = run_directory / "failure.json"
        self.incarnation = self.processes / "incarnation.json"
        self.preflight = self.processes / "preflight.json"
        self.evaluating = self.processes / "evaluating.json"
        self.losses = run_directory / "losses.jsonl"
        self.lock = run_directory / "lock"

    def address(self, process: str) -> Path:
        """Return where a replica writes the address it listens on."""
        return self.processes / f"{process}.address.json"

    def process_failure(self, process: str, *, life: str) -> Path:
        """Return where a process writes why it failed."""
        return self.processes / f"{process}.{life}.failure.json"

    def seconds(self, process: str, *, life: str) -> Path:
        """Return where a process keeps its seconds ledger."""
        return self.processes / f"{process}.{life}.seconds.json"

    def asked_version(self, process: str) -> Path:
        """Return where the version stands that a replica shall start with, if an evaluation asks for one."""
        return self.processes / "evaluator.version.json" if process == EVALUATOR else self.evaluating

    def life(self, process: str, *, life: str) -> Path:
        """Return where the life of a process is kept that is no child of the supervisor."""
        return self.processes / f"{process}.{life}.life.json"

    def segment(self, incarnation: int) -> Path:
        """Return where the supervisor keeps what it measured."""
        return self.processes / f"segment.{incarnation}.json"

    def trainer_done(self, *, incarnation: int) -> Path:
        """Return the file that says the trainer ended cleanly."""
        return self.processes / f"trainer.{incarnation}.done.json"

    def log(self, process: str) -> Path:
        """Return the log of a process."""
        return self.logs / f"{process}.log"
