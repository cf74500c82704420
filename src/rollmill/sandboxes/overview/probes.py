"""Looks at this machine for every backend: what each needs, and for those of this machine, one sandbox of each.

| wait | ends after |
|---|---|
| for a sandbox of a backend, and for its end | `deadline_s` each; the backend is then reported as not known |
| for the daemon of containers | `_DAEMON_S` |

Hosted services are sent nothing: a call there may cost money. Decides nothing; `law` does.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from rollmill.errors import ConfigError, RollmillError
from rollmill.sandboxes.backends.daytona.driver import TOKEN_VARIABLE as DAYTONA_TOKEN
from rollmill.sandboxes.backends.docker.settings import DockerSettings
from rollmill.sandboxes.backends.e2b.settings import TOKEN_VARIABLE as E2B_TOKEN
from rollmill.sandboxes.backends.firecracker.hypervisor import FirecrackerHypervisor
from rollmill.sandboxes.backends.firecracker.settings import FirecrackerSettings
from rollmill.sandboxes.backends.gvisor.diagnose import diagnose_gvisor
from rollmill.sandboxes.backends.gvisor.presence import presence
from rollmill.sandboxes.backends.gvisor.settings import GvisorSettings
from rollmill.sandboxes.backends.http import VendorHttp
from rollmill.sandboxes.backends.kubernetes.settings import KubernetesSettings
from rollmill.sandboxes.backends.microvm import accelerators, kit
from rollmill.sandboxes.backends.namespaces import NamespaceSettings
from rollmill.sandboxes.backends.prime.driver import TOKEN_VARIABLE as PRIME_TOKEN
from rollmill.sandboxes.backends.qemu.diagnose import diagnose_qemu
from rollmill.sandboxes.backends.qemu.hypervisor import QemuHypervisor
from rollmill.sandboxes.backends.qemu.settings import QemuSettings
from rollmill.sandboxes.doctor import Diagnosis, diagnose
from rollmill.sandboxes.overview.law import Facts, Need, Overview, Trial, judge, summed_up

DEADLINE_S = 60.0
_DAEMON_S = 5.0
_API = (1, 41)
_NOBODY = 65_534
_PODMAN = ("/run/podman/podman.sock", "{runtime}/podman/podman.sock")
_NOT_SENT = "nothing is sent to a hosted service from here"
_MODAL_FILE = ".modal.toml"


async def look(directory: Path | None = None, *, deadline_s: float = DEADLINE_S) -> Overview:
    """Look at every backend.

    Args:
        directory: where records of sandboxes are; `None`: the user's runtime directory.
        deadline_s: for each.
    """
    found = await asyncio.gather(
        _as_root(directory, deadline_s),
        _as_plain_user(directory, deadline_s),
        _gvisor(directory, deadline_s),
        _qemu(directory, deadline_s, accelerator=accelerators.KVM),
        _qemu(directory, deadline_s, accelerator=accelerators.TCG),
        asyncio.to_thread(_firecracker),
        docker(),
    )
    return summed_up([judge(facts) for facts in (*found, *hosted(os.environ, home=Path.home()))])


async def tried(make: Callable[[], Awaitable[Diagnosis]], *, name: str, deadline_s: float) -> Trial:
    """Return how a diagnosis went, which is given up at its deadline."""
    try:
        async with asyncio.timeout(deadline_s):
            found = await make()
    except TimeoutError:
        return Trial(
            unknown=f"no sandbox had started, run a program and ended within {deadline_s:g} s; a loaded machine is "
            f"the likely cause: try again, or with a longer --deadline-s. Name it alone by --backend {name}"
        )
    except RollmillError as error:
        return Trial(problem=str(error))
    return trial_of(found)


def trial_of(found: Diagnosis) -> Trial:
    """Return what of a diagnosis counts."""
    return Trial(works=found.works, problem=found.problem, isolation=found.isolation, findings=found.findings)


# -- of this machine ---------------------------------------------------------------------------------------------------


async def _as_root(directory: Path | None, deadline_s: float) -> Facts:
    name = "namespaces-root"
    root = Need(what="the rights of root", here=os.geteuid() == 0, remedy="run as root, for caps of the whole sandbox")
    if not root.here:
        return Facts(name=name, needs=(root,))
    return Facts(name=name, needs=(root,), trial=await _namespaces(directory, deadline_s))


async def _namespaces(directory: Path | None, deadline_s: float) -> Trial:
    settings = NamespaceSettings(directory=directory)
    return await tried(lambda: diagnose(settings), name="namespaces", deadline_s=deadline_s)


async def _as_plain_user(directory: Path | None, deadline_s: float) -> Facts:
    name = "namespaces-user"
    if os.geteuid() != 0:
        return Facts(name=name, trial=await _namespaces(directory, deadline_s))
    with tempfile.TemporaryDirectory(prefix="rollmill-doctor-") as place:
        os.chown(place, _NOBODY, _NOBODY)
        return Facts(name=name, trial=await _by_another_user(Path(place), deadline_s))


async def _by_another_user(place: Path, deadline_s: float) -> Trial:
    """Let a process of a user without rights look, in a directory of its own."""
    command = [sys.executable, "-m", "rollmill.cli", "sandbox", "doctor", "--backend", "namespaces", "--json"]
    own = dict.fromkeys(("HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"), str(place))
    try:
        process = await asyncio.create_subprocess_exec(
            *command, "--directory", str(place / "records"),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            cwd="/", env={**os.environ, **own}, start_new_session=True,
            user=_NOBODY, group=_NOBODY, extra_groups=[],
        )  # fmt: skip
    except OSError as error:
        return Trial(unknown=f"{sys.executable} cannot be run by user {_NOBODY} ({error.strerror}); ask as that user")
    try:
        async with asyncio.timeout(deadline_s):
            out, complaint = await process.communicate()
    except TimeoutError:
        return Trial(unknown=f"a process of user {_NOBODY} did not answer within {deadline_s:g} s; was it slow?")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return answered(out, complaint)


def answered(out: bytes, complaint: bytes) -> Trial:
    """Return the trial that another user's process reports, or why it reports none."""
    try:
        return trial_of(msgspec.json.decode(out, type=Diagnosis))
    except msgspec.MsgspecError:
        last = (complaint or out).decode("utf-8", "replace").strip().splitlines()[-1:]
        said = f": {last[0][:300]}" if last else ""
        return Trial(unknown=f"rollmill cannot be run by user {_NOBODY} here{said}; log in as a plain user and ask")


async def _gvisor(directory: Path | None, deadline_s: float) -> Facts:
    settings = GvisorSettings(directory=directory)
    words = presence(settings)
    here = not words.startswith("is missing")
    need = Need(what=f"gVisor's runtime {words}", here=here, remedy="install runsc, or: rollmill sandbox build-runsc")
    if not here:
        return Facts(name="gvisor", needs=(need,))
    trial = await tried(lambda: diagnose_gvisor(settings), name="gvisor", deadline_s=deadline_s)
    return Facts(name="gvisor", needs=(need,), trial=trial)


async def _qemu(directory: Path | None, deadline_s: float, *, accelerator: str) -> Facts:
    name = "qemu-kvm" if accelerator == accelerators.KVM else "qemu-emulated"
    settings = QemuSettings(directory=directory, accelerator=accelerator)
    needs = await asyncio.to_thread(_machine_needs, accelerator)
    if not all(need.here for need in needs):
        return Facts(name=name, needs=needs)
    return Facts(
        name=name,
        needs=needs,
        trial=await tried(lambda: diagnose_qemu(settings), name="qemu", deadline_s=deadline_s),
    )


def _machine_needs(accelerator: str) -> tuple[Need, ...]:
    told = [*QemuHypervisor(QemuSettings(accelerator=accelerators.TCG)).missing(), *kit.missing(None)]
    needs = [_lacking(one) for one in told]
    if accelerator == accelerators.KVM:
        needs.append(_kvm())
    return tuple(needs)


def _kvm() -> Need:
    reason = accelerators.why_no_kvm()
    remedy = "a machine with virtualization of its processor (VT-x, AMD-V), or nested virtualization turned on"
    return Need(what=f"KVM ({reason})" if reason else "KVM", here=not reason, remedy=remedy)


def _lacking(words: str) -> Need:
    """Return a need of the words that name it and what installs it, as the backends give them."""
    what, _, remedy = words.partition(": ")
    return Need(what=what if remedy else words, here=False, remedy=remedy)


def _firecracker() -> Facts:
    program = FirecrackerSettings().program
    there = shutil.which(program) is not None
    told = FirecrackerHypervisor(FirecrackerSettings(kvm_device="")).missing()
    others = [one for one in told if not one.startswith((program, "Firecracker boots"))]
    return Facts(
        name="firecracker",
        needs=(
            Need(what=f"the program {program}", here=there, remedy="install Firecracker 1.8 or later"),
            _kvm(),
            *(_lacking(one) for one in (*others, *kit.missing(None))),
        ),
        untried="it boots an uncompressed kernel (vmlinux), which only its settings name",
    )


# -- containers --------------------------------------------------------------------------------------------------------


def _extra(package: str, extra: str) -> Need:
    return Need(
        what=f"the Python package {package}",
        here=importlib.util.find_spec(package) is not None,
        remedy=f"pip install 'rollmill[{extra}]'",
    )


async def docker(socket: str = "") -> Facts:
    """Ask Docker or Podman who it is.

    Args:
        socket: of its API; empty: the usual ones.
    """
    client = _extra("httpx2", "hosted")
    path, problem = (socket, "") if socket else _socket()
    found = Need(what=problem or f"the socket {path}", here=not problem, remedy="install and start Docker or Podman")
    if problem or not client.here:
        return Facts(name="docker", needs=(client, found))
    http = VendorHttp(product="the container daemon", base_url="http://docker", socket=path, call_s=_DAEMON_S)
    try:
        reply = await http.call("GET", "/version", what="its version")
        version = msgspec.json.decode(reply.content, type=dict)
    except (RollmillError, msgspec.MsgspecError) as error:
        words = f"{path}: {error}. Is the daemon running, and is this user in its group?"
        return Facts(name="docker", needs=(client, found), trial=Trial(problem=words))
    finally:
        await http.close()
    return _daemon(version, path=path, needs=(client, found))


def _daemon(version: Mapping[str, object], *, path: str, needs: tuple[Need, ...]) -> Facts:
    spoken, name = str(version.get("ApiVersion", "")), str(version.get("Version", "of unknown version"))
    wanted = ".".join(map(str, _API))
    numbers = tuple(int(one) if one.isdecimal() else 0 for one in spoken.split("."))
    api = Need(what=f"version {wanted} of its API ({path} speaks {spoken})", here=numbers >= _API, remedy="update it")
    words = f"the daemon {name} answers at {path}; no container was started, since that may pull an image"
    return Facts(name="docker", needs=(*needs, api), untried=words)


def _socket() -> tuple[str, str]:
    """Return the first socket of a daemon that is there, or why there is none."""
    try:
        asked = DockerSettings().socket_path()
    except ConfigError as error:
        return "", str(error)
    others = () if os.environ.get("DOCKER_HOST") else _PODMAN
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    candidates = [asked, *(one.format(runtime=runtime) for one in others)]
    for path in candidates:
        if _is_socket(path):
            return path, ""
    return "", f"a daemon of containers (no socket at {', '.join(candidates)})"


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


# -- elsewhere ---------------------------------------------------------------------------------------------------------


def hosted(environ: Mapping[str, str], *, home: Path) -> tuple[Facts, ...]:
    """Return what is known of the services: whether their client is installed and their credentials are set.

    Args:
        environ: where credentials are looked for; their values go nowhere.
        home: where Modal's own file with credentials may be.
    """
    client = _extra("httpx2", "hosted")
    by_token = (("e2b", E2B_TOKEN), ("daytona", DAYTONA_TOKEN), ("prime", PRIME_TOKEN))
    return (
        _kubernetes(client),
        *(Facts(name=name, needs=(client, _variable(environ, key)), untried=_NOT_SENT) for name, key in by_token),
        Facts(name="modal", needs=(_extra("modal", "modal"), _modal_account(environ, home)), untried=_NOT_SENT),
        Facts(name="swerex", needs=(client,), untried="addresses of its runtimes are given by whoever opens it"),
    )


def _variable(environ: Mapping[str, str], name: str) -> Need:
    return Need(what=f"the environment variable {name}", here=bool(environ.get(name)), remedy=f"export {name}=...")


def _modal_account(environ: Mapping[str, str], home: Path) -> Need:
    by_variables = bool(environ.get("MODAL_TOKEN_ID") and environ.get("MODAL_TOKEN_SECRET"))
    return Need(
        what=f"an account of Modal (MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or ~/{_MODAL_FILE})",
        here=by_variables or (home / _MODAL_FILE).is_file(),
        remedy="set both variables, or: modal token new",
    )


def _kubernetes(client: Need) -> Facts:
    try:
        address, problem = KubernetesSettings().address(), ""
    except ConfigError:
        address, problem = "", "an API server (this is no pod: KUBERNETES_SERVICE_HOST is not set)"
    server = Need(
        what=problem or f"the API server {address}",
        here=not problem,
        remedy="run it in a pod, or give `server` of KubernetesSettings, such as that of `kubectl proxy`",
    )
    untried = "whether the cluster has the agent-sandbox controller is seen at the first sandbox"
    return Facts(name="kubernetes", needs=(client, server), untried=untried)
