"""Who is named in a refusal has what was asked for."""

from __future__ import annotations

import pytest

from rollmill.sandboxes.backends.daytona.driver import DaytonaDriver
from rollmill.sandboxes.backends.docker.driver import DockerDriver
from rollmill.sandboxes.backends.docker.settings import DockerSettings
from rollmill.sandboxes.backends.e2b.driver import E2BDriver
from rollmill.sandboxes.backends.e2b.settings import E2BSettings
from rollmill.sandboxes.backends.http import Secret
from rollmill.sandboxes.backends.kubernetes.driver import KubernetesDriver
from rollmill.sandboxes.backends.kubernetes.settings import KubernetesSettings
from rollmill.sandboxes.backends.modal.driver import ModalDriver
from rollmill.sandboxes.backends.prime.driver import PrimeDriver
from rollmill.sandboxes.backends.swerex.driver import SweRexDriver
from rollmill.sandboxes.capable import BACKENDS, unsupported

OPENED = {
    "kubernetes": lambda: KubernetesDriver(KubernetesSettings(server="http://127.0.0.1:1")),
    "e2b": lambda: E2BDriver(E2BSettings(token=Secret("x" * 20))),
    "docker": lambda: DockerDriver(DockerSettings()),
}
HOSTED = {
    "daytona": DaytonaDriver,
    "modal": ModalDriver,
    "prime": PrimeDriver,
    "swerex": SweRexDriver,
}


@pytest.mark.parametrize("capability", BACKENDS)
@pytest.mark.parametrize("backend", [*OPENED, *HOSTED])
def test_a_hosted_backend_is_named_for_what_it_has_and_for_nothing_else(backend, capability):
    opened = OPENED[backend]() if backend in OPENED else HOSTED[backend]
    named = any(one.split()[0] == backend for one in BACKENDS[capability])
    assert getattr(opened.capabilities, capability) == named


def test_a_refusal_says_where_to_go():
    error = unsupported("this backend cannot pause", capability="pause_files")
    assert (str(error), error.capability) == (
        "this backend cannot pause; backends that have it: namespaces, gvisor",
        "pause_files",
    )
