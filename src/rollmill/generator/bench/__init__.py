"""A load on a served generator, and what came of it: tokens per second, waits, KV use, errors."""

from rollmill.generator.bench.cases import Load, Report, render
from rollmill.generator.bench.drive import measure
from rollmill.generator.bench.targets import GrpcTarget, HttpTarget, Target

__all__ = ["GrpcTarget", "HttpTarget", "Load", "Report", "Target", "measure", "render"]
