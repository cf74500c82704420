"""Kubernetes: one `Sandbox` of the agent-sandbox controller for each, or a claim on a warm pool, by the API server.

Follows `agents.x-k8s.io/v1beta1` of agent-sandbox 1.0, and `exec` over WebSockets as Kubernetes 1.30 and later have it.
The id and the spec's digest are labels; what is too long or too free for a label is an annotation.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import math
import time
from collections.abc import Mapping
from typing import Any

from rollmill.errors import ImageError, SandboxError, SandboxIdInUse
from rollmill.sandboxes.backends.hosted import marks as marking
from rollmill.sandboxes.backends.hosted.driver import Found, Gone, gone_if_unknown, ref_of
from rollmill.sandboxes.backends.hosted.provider import HostedProvider
from rollmill.sandboxes.backends.hosted.settings import ClaimedIsolation
from rollmill.sandboxes.backends.http import Refused, VendorHttp, understood
from rollmill.sandboxes.backends.kubernetes import claims
from rollmill.sandboxes.backends.kubernetes.guest import PodGuest
from rollmill.sandboxes.backends.kubernetes.settings import KubernetesSettings
from rollmill.sandboxes.lifecycle import death
from rollmill.sandboxes.records import (
    Capabilities,
    Death,
    DeathReason,
    Image,
    NamedImage,
    SandboxSpec,
    SandboxState,
)

_GROUP = "agents.x-k8s.io/v1beta1"
_MARKS = "rollmill.io/marks"
_KEY = "rollmill.io/id"
_OURS = "rollmill.io/sandbox"
_POD_ANNOTATION = "agents.x-k8s.io/pod-name"
_LOOK_S = 0.2
_PAGE = 500
_WAIT = 'trap "exit 0" TERM; while :; do sleep 3600 & wait $!; done'
_BAD_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")


def key_of(sandbox_id: str) -> str:
    """Return a label's value, and a name, for an id: ids have letters and a length that neither takes.

    Example:
        >>> key_of("Rollout_1")
        'e190a08ce77661243335'
    """
    return hashlib.sha256(sandbox_id.encode()).hexdigest()[:20]


_LIMITS = ("cpu_s", "wall_s", "exec_s", "output_bytes", "open_files")
_OWN_LIMITS = ("memory_bytes", "disk_bytes", "cpus")
"""Of a pod that is made for its spec; those of a pool's pods stand in its template."""


def manifest(
    spec: SandboxSpec, *, id: str, marks: Mapping[str, str], ends_wall_s: float, settings: KubernetesSettings
) -> dict[str, Any]:
    """Return the resource that makes a sandbox."""
    limits = spec.limits
    amounts = {
        "memory": str(limits.memory_bytes),
        "cpu": f"{math.ceil(limits.cpus * 1000)}m",
        "ephemeral-storage": str(limits.disk_bytes),
    }
    container = {
        "name": settings.container,
        "image": spec.image.name if isinstance(spec.image, NamedImage) else settings.image,
        "command": ["/bin/sh", "-c", _WAIT],
        "resources": {"limits": amounts, "requests": amounts},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    pod: dict[str, Any] = {
        "containers": [container],
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostUsers": False,
        "terminationGracePeriodSeconds": 1,
    }
    if settings.runtime_class:
        pod["runtimeClassName"] = settings.runtime_class
    labels = _labels(id)
    return {
        "apiVersion": _GROUP,
        "kind": "Sandbox",
        "metadata": {"name": _name(id), "labels": labels, "annotations": _annotations(marks)},
        "spec": {
            "podTemplate": {"metadata": {"labels": labels}, "spec": pod},
            "shutdownTime": _moment(ends_wall_s),
            "shutdownPolicy": "Delete",
            "operatingMode": "Running",
        },
    }


def _name(id: str) -> str:
    return f"rollmill-{key_of(id)}"


def _labels(id: str) -> dict[str, str]:
    return {_OURS: "true", _KEY: key_of(id)}


def _annotations(marks: Mapping[str, str]) -> dict[str, str]:
    return {_MARKS: json.dumps(dict(marks), separators=(",", ":"))}


def _moment(wall_s: float) -> str:
    moment = datetime.datetime.fromtimestamp(math.ceil(wall_s), tz=datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class KubernetesDriver(ClaimedIsolation):
    """The adapter.

    Args:
        settings: how sandboxes are made.
    """

    product = "Kubernetes"

    def __init__(self, settings: KubernetesSettings) -> None:
        super().__init__(settings.isolation)
        self._settings = settings
        token = settings.bearer()
        self._headers = {} if token is None else {"Authorization": f"Bearer {token.reveal()}"}
        self._server = settings.address()
        self._trust = settings.trust()
        self._http = VendorHttp(
            product=self.product,
            base_url=self._server,
            headers=self._headers,
            call_s=settings.call_s,
            secrets=() if token is None else (token.reveal(),),
            trust=self._trust,
        )
        self._sandboxes = f"/apis/{_GROUP}/namespaces/{settings.namespace}/sandboxes"
        self._claims = f"/apis/{claims.GROUP}/namespaces/{settings.namespace}/sandboxclaims"
        self._base = self._claims if settings.warm_pool else self._sandboxes

    @property
    def capabilities(self) -> Capabilities:
        """Return what it can do here."""
        return Capabilities(
            extend_ttl=True,
            labels=True,
            idempotent_create=True,
            egress_policy=False,
            limits=_LIMITS if self._settings.warm_pool else (*_OWN_LIMITS, *_LIMITS),
        )

    def check(self, image: Image) -> None:
        """Accept every reference: whether it can be pulled shows when a pod starts."""

    async def prepare(self, image: Image) -> None:
        """Do nothing: nodes pull an image for the first pod of it."""

    async def create(self, spec: SandboxSpec, *, id: str, marks: Mapping[str, str], ttl_s: float) -> Found:
        """Make a sandbox; its name is its id's, so that the same one is never made twice."""
        body = self._resource(spec, id=id, marks=marks, ends_wall_s=time.time() + ttl_s)
        try:
            reply = await self._http.call("POST", self._base, what="a sandbox", body=body, deadline_s=math.inf)
        except Refused as error:
            if error.status == 409:
                return await self._again(id, marks, error)
            if error.status == 404:
                raise SandboxError(
                    f"the cluster has no {body['apiVersion']}, or no namespace {self._settings.namespace!r}: "
                    f"{error.words}. "
                    "Install the agent-sandbox controller"
                ) from error
            raise
        with understood("a sandbox"):
            return self._found(reply.json())

    def _resource(self, spec: SandboxSpec, *, id: str, marks: Mapping[str, str], ends_wall_s: float) -> dict[str, Any]:
        pool = self._settings.warm_pool
        if not pool:
            return manifest(spec, id=id, marks=marks, ends_wall_s=ends_wall_s, settings=self._settings)
        pool = spec.image.name if isinstance(spec.image, NamedImage) else pool
        body = claims.manifest(name=_name(id), pool=pool, labels=_labels(id), annotations=_annotations(marks))
        body["spec"]["lifecycle"] = claims.lifecycle(_moment(ends_wall_s))
        return body

    async def _again(self, id: str, marks: Mapping[str, str], error: Refused) -> Found:
        """Return the one that has this name, if it is of the same spec."""
        for found in await self.find({marking.ID: id}):
            if found.marks.get(marking.SPEC) == marks.get(marking.SPEC):
                return found
        raise SandboxIdInUse(f"Kubernetes has another sandbox for {id}: {error.words}") from error

    def _found(self, shown: Mapping[str, Any]) -> Found:
        metadata = shown.get("metadata") or {}
        try:
            marks = json.loads((metadata.get("annotations") or {}).get(_MARKS, "{}"))
        except ValueError:
            marks = {}
        return Found(
            ref=ref_of(metadata["name"]),
            marks={str(name): str(value) for name, value in marks.items()},
            state=self._state(shown),
            access={"pod": claims.sandbox_of(shown) if self._settings.warm_pool else _pod(metadata)},
        )

    def _state(self, shown: Mapping[str, Any]) -> SandboxState:
        ready = _condition(shown, "Ready")
        if self._settings.warm_pool:
            return claims.state_of(shown, ready)
        if _condition(shown, "Finished").get("status") == "True":
            return SandboxState.DEAD
        return SandboxState.READY if ready.get("status") == "True" else SandboxState.STARTING

    async def _show(self, found: Found) -> Mapping[str, Any]:
        with gone_if_unknown(found.ref, product=self.product):
            reply = await self._http.call("GET", f"{self._base}/{found.ref}", what=f"a look at {found.ref}")
        return reply.json()

    async def enter(self, found: Found, spec: SandboxSpec) -> PodGuest:
        """Wait until the controller says that it is ready."""
        while True:
            shown = await self._show(found)
            seen = self._found(shown)
            if seen.state is SandboxState.READY:
                break
            if seen.state is SandboxState.DEAD:
                raise SandboxError(f"the pod ended before it was ready: {_condition(shown, 'Finished')}")
            if self._settings.warm_pool and (problem := claims.problem(_condition(shown, "Ready"))) is not None:
                raise problem
            await self._check_image(seen)
            await asyncio.sleep(_LOOK_S)
        namespace = self._settings.namespace
        return PodGuest(
            address=f"{self._server}/api/v1/namespaces/{namespace}/pods/{await self._pod_of(seen)}/exec",
            headers=self._headers,
            trust=self._trust,
            container=self._settings.container,
            limit_s=self._settings.call_s,
        )

    async def _pod_of(self, found: Found) -> str:
        """Return the name of a sandbox's pod; a claim names the sandbox alone."""
        name = found.access["pod"]
        if not self._settings.warm_pool:
            return name
        with gone_if_unknown(name, product=self.product):
            shown = (await self._http.call("GET", f"{self._sandboxes}/{name}", what=f"a look at {name}")).json()
        return _pod(shown.get("metadata") or {"name": name})

    async def _check_image(self, found: Found) -> None:
        """Raise if the pod waits for an image that will not come."""
        if not found.access["pod"]:
            return  # no sandbox was given yet
        path = f"/api/v1/namespaces/{self._settings.namespace}/pods/{found.access['pod']}"
        try:
            shown = (await self._http.call("GET", path, what="a look at a pod")).json()
        except Refused as error:
            if error.status == 404:
                return  # not made yet
            raise
        for one in (shown.get("status") or {}).get("containerStatuses") or []:
            waiting = (one.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") in _BAD_IMAGE:
                raise ImageError(f"the image cannot be used ({waiting['reason']}): {waiting.get('message', '')}")

    async def find(self, marks: Mapping[str, str]) -> list[Found]:
        """Return those in the namespace with these marks, page by page."""
        selector = f"{_OURS}=true"
        if marking.ID in marks:
            selector += f",{_KEY}={key_of(marks[marking.ID])}"
        parameters: dict[str, Any] = {"labelSelector": selector, "limit": _PAGE}
        found: list[Found] = []
        while True:
            reply = await self._http.call("GET", self._base, what="the list of sandboxes", parameters=parameters)
            shown = reply.json() or {}
            found += [self._found(one) for one in shown.get("items") or []]
            more = (shown.get("metadata") or {}).get("continue")
            if not more:
                return [one for one in found if marking.carries(one.marks, marks)]
            parameters["continue"] = more

    async def explain(self, found: Found) -> Death | None:
        """Return how it ended: its pod's last state tells whether memory ran out."""
        try:
            shown = await self._show(found)
        except Gone as error:
            return death(DeathReason.PROVIDER_LOST, detail=str(error))
        if self._found(shown).state is not SandboxState.DEAD:
            return None
        path = f"/api/v1/namespaces/{self._settings.namespace}/pods/{self._found(shown).access['pod']}"
        try:
            pod = (await self._http.call("GET", path, what="a look at a pod")).json()
        except Refused:
            pod = {}
        for one in (pod.get("status") or {}).get("containerStatuses") or []:
            ended = (one.get("state") or {}).get("terminated") or {}
            if ended.get("reason") == "OOMKilled":
                return death(DeathReason.OUT_OF_MEMORY, detail="the container's memory limit was reached")
        status = pod.get("status") or {}
        words = f"{status.get('reason') or _condition(shown, 'Finished').get('reason')}: {status.get('message') or ''}"
        if status.get("reason") == "Evicted" and "ephemeral" in words:
            return death(DeathReason.POLICY_BYTES, detail=words)
        return death(DeathReason.PROVIDER_LOST, detail=f"its pod ended: {words}")

    async def kill(self, found: Found) -> None:
        """Delete it, and wait until it is gone."""
        path = f"{self._base}/{found.ref}"
        try:
            await self._http.call(
                "DELETE", path, what=f"the end of {found.ref}", parameters={"propagationPolicy": "Foreground"}
            )
            while True:
                await self._show(found)
                await asyncio.sleep(_LOOK_S)
        except Gone:
            return
        except Refused as error:
            if error.status != 404:
                raise

    async def set_ttl(self, found: Found, ttl_s: float) -> None:
        """Move its end."""
        ends = _moment(time.time() + ttl_s)
        change = {"lifecycle": claims.lifecycle(ends)} if self._settings.warm_pool else {"shutdownTime": ends}
        with gone_if_unknown(found.ref, product=self.product):
            await self._http.call(
                "PATCH",
                f"{self._base}/{found.ref}",
                what=f"a longer life of {found.ref}",
                content=json.dumps({"spec": change}).encode(),
                headers={"Content-Type": "application/merge-patch+json"},
            )

    async def pause(self, found: Found) -> None:
        """Never called: suspending ends the pod."""

    async def resume(self, found: Found, *, ttl_s: float) -> PodGuest | None:
        """Never called."""
        return None

    async def close(self) -> None:
        """Let go of all connections."""
        await self._http.close()


def _pod(metadata: Mapping[str, Any]) -> str:
    return str((metadata.get("annotations") or {}).get(_POD_ANNOTATION) or metadata["name"])


def _condition(shown: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    for one in (shown.get("status") or {}).get("conditions") or []:
        if one.get("type") == kind:
            return one
    return {}


class KubernetesProvider(HostedProvider[KubernetesDriver]):
    """Sandboxes in a cluster.

    Args:
        settings: how they are made.
    """

    def __init__(self, settings: KubernetesSettings | None = None) -> None:
        settings = KubernetesSettings() if settings is None else settings
        super().__init__(KubernetesDriver(settings), settings)
