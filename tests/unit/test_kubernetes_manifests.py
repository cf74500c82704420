"""The manifests: valid for Kubernetes, and true to what the commands, ports, metrics and health service really are."""

from __future__ import annotations

import copy
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml

from rollmill.cli.app import cli
from rollmill.generator.metrics import ALIASES, METRICS
from rollmill.generator.proto import policy_inference_pb2

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
KUBERNETES = "1.31"
SERVICE = policy_inference_pb2.DESCRIPTOR.services_by_name["PolicyInference"].full_name
NOT_OF_KUBERNETES = ("kustomize.config.k8s.io/", "keda.sh/")


@functools.cache
def parsed(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def documents(path: Path) -> list[dict[str, Any]]:
    return copy.deepcopy(parsed(path))


def all_of(kind: str) -> Iterator[dict[str, Any]]:
    yield from (document for path in FILES for document in documents(path) if document["kind"] == kind)


def only(kind: str, name: str) -> dict[str, Any]:
    (found,) = [document for document in all_of(kind) if document["metadata"]["name"] == name]
    return found


WORKLOADS = [("StatefulSet", "rollmill-generator"), ("Deployment", "rollmill-router")]


def pod_of(kind: str, name: str) -> dict[str, Any]:
    return only(kind, name)["spec"]["template"]["spec"]


def options_of(container: dict[str, Any]) -> dict[str, str]:
    """Arguments of the form --name=value."""
    return dict(argument.removeprefix("--").split("=", 1) for argument in container["args"][1:])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_manifest_is_valid_and_has_no_field_that_kubernetes_does_not_know(path):
    for document in documents(path):
        if not document["apiVersion"].startswith(NOT_OF_KUBERNETES):
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_validation_would_find_a_misspelt_field():
    broken = only("StatefulSet", "rollmill-generator")
    broken["spec"]["podManagmentPolicy"] = broken["spec"].pop("podManagementPolicy")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_container_runs_a_command_that_takes_its_arguments(workload):
    for container in pod_of(*workload)["containers"]:
        name, *arguments = container["args"]
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        context = command.make_context(name, list(arguments))
        assert context.args == []


def test_every_setting_that_is_overridden_is_one():
    from rollmill.config.load import load_config

    (container,) = pod_of("StatefulSet", "rollmill-generator")["containers"]
    overrides = [argument.removeprefix("--set=") for argument in container["args"] if argument.startswith("--set=")]
    config = load_config(None, overrides=overrides).config
    assert config.generator.max_num_seqs == 64


@pytest.mark.parametrize("workload", WORKLOADS)
def test_probes_ports_and_the_command_line_agree(workload):
    (container,) = pod_of(*workload)["containers"]
    options = options_of(container)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": int(options["grpc-port"]), "http": int(options["http-port"])}
    for probe in ("startupProbe", "readinessProbe"):
        if probe in container:
            assert container[probe]["grpc"] == {"port": ports["grpc"], "service": SERVICE}
    assert "grpc" not in container["livenessProbe"], "a dirty replica would be killed before it can heal"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_pod_has_time_to_drain_before_it_is_killed(workload):
    pod = pod_of(*workload)
    (container,) = pod["containers"]
    sleep_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = float(options_of(container)["drain-s"])
    assert drain_s >= 120  # the default deadline of a request: all of them can finish
    assert pod["terminationGracePeriodSeconds"] >= sleep_s + drain_s + 10


@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_is_bound_beyond_loopback_asks_for_the_token_of_the_secret(workload):
    pod = pod_of(*workload)
    (container,) = pod["containers"]
    options = options_of(container)
    assert options["host"] == "0.0.0.0"
    secret = next(volume["secret"] for volume in pod["volumes"] if volume["name"] == "token")
    mount = next(mount for mount in container["volumeMounts"] if mount["name"] == "token")
    example = only("Secret", secret["secretName"])
    assert [f"{mount['mountPath']}/{key}" for key in example["stringData"]] == [options["token-file"]]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_mount_has_its_volume_and_nothing_else_can_be_written(workload):
    pod = pod_of(*workload)
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert pod["securityContext"]["runAsNonRoot"]


def test_services_find_their_pods_and_the_router_finds_the_replicas():
    for service, workload in (("rollmill-generator", WORKLOADS[0]), ("rollmill", WORKLOADS[1])):
        labels = only(*workload)["spec"]["template"]["metadata"]["labels"]
        spec = only("Service", service)["spec"]
        assert spec["selector"].items() <= labels.items()
        assert only(*workload)["spec"]["selector"]["matchLabels"].items() <= labels.items()
        (container,) = pod_of(*workload)["containers"]
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {port["targetPort"]: port["port"] for port in spec["ports"]} == named
    (router,) = pod_of(*WORKLOADS[1])["containers"]
    name, _, port = options_of(router)["replicas-dns"].partition(":")
    replicas = only("Service", name)["spec"]
    assert replicas["clusterIP"] == "None", "the router needs the address of every replica, not one for all"
    assert int(port) in [each["port"] for each in replicas["ports"]]
    assert only("StatefulSet", "rollmill-generator")["spec"]["serviceName"] == name


@pytest.mark.parametrize("kind", ["NetworkPolicy", "PodDisruptionBudget"])
def test_policies_select_pods_that_are_there(kind):
    labels = [only(*workload)["spec"]["template"]["metadata"]["labels"] for workload in WORKLOADS]
    found = list(all_of(kind))
    assert found
    for policy in found:
        selector = policy["spec"].get("podSelector") or policy["spec"]["selector"]
        assert any(selector["matchLabels"].items() <= each.items() for each in labels)


def test_every_metric_that_is_named_is_one_that_replicas_export():
    text = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    named = set(re.findall(r"\brollmill_[a-z_]+\b(?!\()", text)) - {"rollmill_"}
    assert {"rollmill_queue_depth", "rollmill_kv_cache_usage"} <= named
    assert named <= set(METRICS)
    assert set(re.findall(r"\bvllm:\w+", text)) <= set(ALIASES)


def test_the_adapter_serves_the_metrics_that_the_autoscaler_asks_for():
    asked = {
        metric["pods"]["metric"]["name"]
        for metric in only("HorizontalPodAutoscaler", "rollmill-generator")["spec"]["metrics"]
    }
    (rule,) = yaml.safe_load(only("ConfigMap", "rollmill-adapter-rules")["data"]["config.yaml"])["rules"]
    pattern = re.search(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    assert pattern is not None
    assert all(re.fullmatch(pattern.group(1), name) for name in asked)
    # Both labels of the rule are put on by the scrape.
    (job,) = yaml.safe_load(only("ConfigMap", "rollmill-scrape")["data"]["scrape.yaml"])["scrape_configs"]
    assert set(rule["resources"]["overrides"]) <= {one.get("target_label") for one in job["relabel_configs"]}
    assert job["authorization"]["credentials_file"]


def test_the_queue_target_is_under_what_a_router_lets_a_replica_queue():
    from rollmill.config.router import RouterSettings

    (container,) = pod_of("StatefulSet", "rollmill-generator")["containers"]
    seats = 64
    assert f"--set=generator.max_num_seqs={seats}" in container["args"]
    longest = (RouterSettings().overcommit - 1) * seats
    (target,) = [
        float(metric["pods"]["target"]["averageValue"])
        for metric in only("HorizontalPodAutoscaler", "rollmill-generator")["spec"]["metrics"]
        if metric["pods"]["metric"]["name"] == "rollmill_queue_depth"
    ]
    assert target <= longest / 2


# Fields of keda.sh/v1alpha1 ScaledObject as its CRD has them, and of the prometheus trigger as its scaler reads them.
_RULES = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "stabilizationWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
        "selectPolicy": {"enum": ["Max", "Min", "Disabled"]},
        "policies": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["type", "value", "periodSeconds"],
                "properties": {
                    "type": {"enum": ["Pods", "Percent"]},
                    "value": {"type": "integer", "minimum": 1},
                    "periodSeconds": {"type": "integer", "minimum": 1, "maximum": 1800},
                },
            },
        },
    },
}
_TRIGGER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["type", "metadata"],
    "properties": {
        "type": {"const": "prometheus"},
        "name": {"type": "string"},
        "metricType": {"enum": ["AverageValue", "Value"]},
        "useCachedMetrics": {"type": "boolean"},
        "authenticationRef": {"type": "object"},
        "metadata": {
            "type": "object",
            "additionalProperties": False,
            "required": ["serverAddress", "query", "threshold"],
            "properties": {
                name: {"type": "string"}
                for name in (
                    "serverAddress",
                    "query",
                    "queryParameters",
                    "threshold",
                    "activationThreshold",
                    "namespace",
                    "customHeaders",
                    "ignoreNullValues",
                    "unsafeSsl",
                    "timeout",
                    "authModes",
                )
            },
        },
    },
}
SCALED_OBJECT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "keda.sh/v1alpha1"},
        "kind": {"const": "ScaledObject"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["scaleTargetRef", "triggers"],
            "properties": {
                "scaleTargetRef": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["name"],
                    "properties": {
                        name: {"type": "string"} for name in ("apiVersion", "kind", "name", "envSourceContainerName")
                    },
                },
                "pollingInterval": {"type": "integer"},
                "cooldownPeriod": {"type": "integer"},
                "initialCooldownPeriod": {"type": "integer"},
                "idleReplicaCount": {"type": "integer"},
                "minReplicaCount": {"type": "integer", "minimum": 0},
                "maxReplicaCount": {"type": "integer", "minimum": 1},
                "fallback": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["failureThreshold", "replicas"],
                    "properties": {
                        "failureThreshold": {"type": "integer"},
                        "replicas": {"type": "integer"},
                        "behavior": {"type": "string"},
                    },
                },
                "advanced": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "restoreToOriginalReplicaCount": {"type": "boolean"},
                        "horizontalPodAutoscalerConfig": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "name": {"type": "string"},
                                "behavior": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "properties": {"scaleUp": _RULES, "scaleDown": _RULES},
                                },
                            },
                        },
                    },
                },
                "triggers": {"type": "array", "minItems": 1, "items": _TRIGGER},
            },
        },
    },
}


def test_the_object_of_keda_has_the_fields_that_its_definition_has():
    jsonschema.validate(only("ScaledObject", "rollmill-generator"), SCALED_OBJECT)


def test_keda_scales_as_the_plain_autoscaler_does():
    keda, plain = (
        only("ScaledObject", "rollmill-generator")["spec"],
        only("HorizontalPodAutoscaler", "rollmill-generator"),
    )
    assert keda["scaleTargetRef"] == plain["spec"]["scaleTargetRef"]
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == plain["spec"]["behavior"]
    bounds = plain["spec"]["minReplicas"], plain["spec"]["maxReplicas"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == bounds
    assert bounds[0] <= keda["fallback"]["replicas"] <= bounds[1]
    targets = {
        metric["pods"]["metric"]["name"]: metric["pods"]["target"]["averageValue"]
        for metric in plain["spec"]["metrics"]
    }
    for trigger in keda["triggers"]:
        (name,) = re.findall(r"rollmill_[a-z_]+", trigger["metadata"]["query"])
        wanted = targets.pop(name)
        number = float(wanted[:-1]) / 1000 if wanted.endswith("m") else float(wanted)
        assert float(trigger["metadata"]["threshold"]) == number
        assert trigger["metadata"]["ignoreNullValues"] == "false", "missing figures must not look like an empty queue"
    assert targets == {}


def test_the_kustomization_names_files_that_are_there_and_one_autoscaler():
    (kustomization,) = documents(FOLDER / "kustomization.yaml")
    files = [FOLDER / name for name in kustomization["resources"]]
    assert all(path in FILES for path in files)
    kinds = [document["kind"] for path in files for document in documents(path)]
    assert kinds.count("HorizontalPodAutoscaler") + kinds.count("ScaledObject") == 1
    assert "Secret" not in kinds
    images = {container["image"] for workload in WORKLOADS for container in pod_of(*workload)["containers"]}
    assert images == {image["name"] for image in kustomization["images"]}


def test_the_image_has_the_parts_that_the_containers_need():
    lines = (FOLDER / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [part for line in lines if line.startswith("COPY") for part in shlex.split(line)[1:-1]]
    assert all((FOLDER.parents[1] / part).exists() for part in copied)
    assert any("[torch,serve]" in line for line in lines)
    assert lines[-1] == 'ENTRYPOINT ["rollmill"]'
