"""What a split of prefill and decode turns into: one command per server, checked for ranks, memory and ports. Pure.

The commands are those of a replica's own server, by the same function, so that such a server takes weights in the same
way and answers the same token interface: only where it listens differs, and that it exchanges KV. The rules are those
that vLLM's NixlConnector checks when two servers first meet, plus arithmetic of memory and ports, so that a split fails
here in a second instead of there after minutes of loading.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Literal

import msgspec

from rollmill.config.disaggregation import DTYPE_BYTES, RoleSettings, SplitSettings
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import ConfigError
from rollmill.generator.engines.settings import SCORING_SEATS, vllm_arguments, vllm_environment

GB = 1e9
MODULE = "vllm.entrypoints.openai.api_server"
"""Not the command `vllm`: the CPU build is another distribution, and the command asks for the one called vllm."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
Role = Literal["prefill", "decode"]


class SplitModel(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a model that a split is checked against."""

    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM server of a split.

    Attributes:
        gpus: indices on its host.
        environment: variables to set.
        command: arguments, the program first.
        kv_capacity_tokens: tokens whose KV fits, over all its data-parallel ranks.
    """

    role: Role
    index: int
    host: str
    gpus: tuple[int, ...]
    http_port: int
    side_channel_ports: tuple[int, ...]
    environment: dict[str, str]
    command: tuple[str, ...]
    kv_capacity_tokens: int


class SplitPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A split that can work.

    Attributes:
        router: command of the router in front of both sides, and the host that it belongs on.
        notes: what works but wastes something, and what to keep in mind.
    """

    servers: tuple[Server, ...]
    router_host: str
    router: tuple[str, ...]
    notes: tuple[str, ...]


def plan_split(settings: SplitSettings, *, model: SplitModel) -> SplitPlan:
    """Return the commands of a split.

    Args:
        model: facts of `settings.model`.

    Raises:
        ConfigError: naming every rule that the split breaks, with its numbers.
    """
    problems = [*_rank_problems(settings, model=model), *_memory_problems(settings, model=model)]
    if problems:
        raise _refused(problems)
    servers = (*_lay(settings, "prefill", model=model), *_lay(settings, "decode", model=model))
    problems = [*_gpu_problems(settings, servers), *_port_problems(settings, servers)]
    if problems:
        raise _refused(problems)
    return SplitPlan(
        servers=servers,
        router_host=settings.decode.hosts[0],
        router=_router(settings, servers),
        notes=tuple(_notes(settings, servers)),
    )


def kv_bytes_per_token(settings: SplitSettings, *, model: SplitModel, tensor_parallel_size: int) -> int:
    """Return the bytes of keys and values that one token keeps on each GPU of a server.

    Example:
        8 kv heads of 128, 32 layers, bfloat16: 2 * 32 * 8 * 128 * 2 = 131,072 bytes on one GPU, 16,384 on each of 8;
        on 16 GPUs each head is kept twice, so it stays at 16,384.
    """
    precision = settings.dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    heads = max(1, model.kv_heads // tensor_parallel_size)
    return 2 * model.layers * heads * model.head_dim * DTYPE_BYTES[precision]


def kv_capacity_tokens(settings: SplitSettings, role: RoleSettings, *, model: SplitModel) -> int:
    """Return the tokens whose KV fits one data-parallel rank of a server; negative if the weights do not fit."""
    weights = model.parameters * DTYPE_BYTES[settings.dtype] / role.tensor_parallel_size
    room = settings.gpu_memory_gb * GB * role.gpu_memory_utilization - weights - settings.activation_gb * GB
    per_token = kv_bytes_per_token(settings, model=model, tensor_parallel_size=role.tensor_parallel_size)
    return int(room // (per_token * role.block_size)) * role.block_size


def _refused(problems: list[str]) -> ConfigError:
    return ConfigError("this split of prefill and decode cannot work:\n- " + "\n- ".join(problems))


# -- what makes a split impossible


def _rank_problems(settings: SplitSettings, *, model: SplitModel) -> Iterator[str]:
    prefill, decode = settings.prefill, settings.decode
    ranks = prefill.tensor_parallel_size, decode.tensor_parallel_size
    if settings.device == "cpu":
        yield (
            "device is cpu: vLLM moves KV between servers with NIXL, whose wheels need CUDA. Serve without a split "
            "on a CPU (rollmill serve --engine vllm); a split is generated and checked here, and runs on GPUs"
        )
    if max(ranks) % min(ranks):
        yield (
            f"tensor_parallel_size is {ranks[0]} for prefill and {ranks[1]} for decode: each rank of one side must "
            "exchange KV with whole ranks of the other, so one must divide the other"
        )
    if ranks[0] > ranks[1] and ranks[0] > model.kv_heads:
        yield (
            f"prefill has {ranks[0]} ranks for {model.kv_heads} kv heads, so heads are kept twice, and decode has "
            f"fewer ranks ({ranks[1]}): vLLM cannot merge those. Lower prefill.tensor_parallel_size to "
            f"{model.kv_heads} or less, or raise decode's to {ranks[0]}"
        )
    if decode.block_size % prefill.block_size:
        yield (
            f"block_size is {prefill.block_size} for prefill and {decode.block_size} for decode: a decode block must "
            "be made of whole prefill blocks"
        )
    for name, role in (("prefill", prefill), ("decode", decode)):
        size = role.tensor_parallel_size
        if model.heads % size:
            yield f"{name}.tensor_parallel_size {size} does not divide the model's {model.heads} attention heads"
        if model.kv_heads % size and size % model.kv_heads:
            yield (
                f"{name}.tensor_parallel_size {size} neither divides the model's {model.kv_heads} kv heads nor is a "
                "multiple of them"
            )
        if role.max_num_batched_tokens < role.max_num_seqs + SCORING_SEATS:
            yield (
                f"{name}.max_num_batched_tokens {role.max_num_batched_tokens} is less than one token for each of its "
                f"max_num_seqs {role.max_num_seqs} and for {SCORING_SEATS} score"
            )
    if settings.max_model_len > model.max_positions:
        yield f"max_model_len {settings.max_model_len} is longer than the model's {model.max_positions} positions"


def _memory_problems(settings: SplitSettings, *, model: SplitModel) -> Iterator[str]:
    for name, role in (("prefill", settings.prefill), ("decode", settings.decode)):
        capacity = kv_capacity_tokens(settings, role, model=model)
        weights_gb = model.parameters * DTYPE_BYTES[settings.dtype] / role.tensor_parallel_size / GB
        room_gb = settings.gpu_memory_gb * role.gpu_memory_utilization
        if capacity < settings.max_model_len:
            yield (
                f"{name}: of {room_gb:.1f} GB per GPU ({role.gpu_memory_utilization:g} of {settings.gpu_memory_gb:g}) "
                f"weights take {weights_gb:.1f} and activations {settings.activation_gb:g}; the KV of "
                f"{max(capacity, 0)} tokens fits, less than one sequence of max_model_len {settings.max_model_len}. "
                f"Raise {name}.tensor_parallel_size or gpu_memory_utilization, or lower max_model_len"
            )


def _gpu_problems(settings: SplitSettings, servers: tuple[Server, ...]) -> Iterator[str]:
    for name, role in (("prefill", settings.prefill), ("decode", settings.decode)):
        needed = _gpus_of(role)
        if needed > settings.gpus_per_host:
            yield (
                f"a {name} server needs {needed} GPUs (tensor_parallel_size {role.tensor_parallel_size} x "
                f"data_parallel_size {role.data_parallel_size}), a host has {settings.gpus_per_host}; servers that "
                "span hosts are not generated"
            )
    for host, used in _gpus_in_use(servers).items():
        if used > settings.gpus_per_host:
            yield (
                f"host {host} would need {used} GPUs and has {settings.gpus_per_host}: name more hosts, or ask for "
                "fewer servers"
            )


def _port_problems(settings: SplitSettings, servers: tuple[Server, ...]) -> Iterator[str]:
    taken = Counter((server.host, port) for server in servers for port in _ports(server))
    taken[settings.decode.hosts[0], settings.ports.router] += 1
    for (host, port), count in sorted(taken.items()):
        if count > 1:
            yield f"port {port} on {host} would be used {count} times: move one of the first ports apart"
        if port > 65535:
            yield f"port {port} on {host} is beyond 65535: lower the first port"


def _ports(server: Server) -> tuple[int, ...]:
    return (server.http_port, *server.side_channel_ports)


# -- servers on hosts


def _gpus_of(role: RoleSettings) -> int:
    return role.tensor_parallel_size * role.data_parallel_size


def _gpus_in_use(servers: tuple[Server, ...]) -> dict[str, int]:
    return {
        host: 1 + max(gpu for server in servers if server.host == host for gpu in server.gpus)
        for host in dict.fromkeys(server.host for server in servers)
    }


def _lay(settings: SplitSettings, role: Role, *, model: SplitModel) -> Iterator[Server]:
    """Yield the servers of one side, host by host; where both sides share a host, decode takes the upper GPUs."""
    own = settings.prefill if role == "prefill" else settings.decode
    per_host = max(1, _room_on(settings, role) // _gpus_of(own))
    for index in range(own.servers):
        place = min(index // per_host, len(own.hosts) - 1)
        host, at = own.hosts[place], index - place * per_host
        yield _server(settings, role, own, index=index, host=host, at=at, model=model)


def _room_on(settings: SplitSettings, role: Role) -> int:
    return settings.gpus_per_host - _offset(settings, role)


def _offset(settings: SplitSettings, role: Role) -> int:
    """Return the GPUs of a host that the other side takes first, where both share hosts."""
    prefill, decode = settings.prefill, settings.decode
    if role == "prefill" or not set(prefill.hosts) & set(decode.hosts):
        return 0
    on_each = -(-prefill.servers // len(prefill.hosts))
    return on_each * _gpus_of(prefill)


def _server(
    settings: SplitSettings, role: Role, own: RoleSettings, *, index: int, host: str, at: int, model: SplitModel
) -> Server:
    ports, gpus = settings.ports, _gpus_of(own)
    http = (ports.prefill_http if role == "prefill" else ports.decode_http) + at
    first = ports.prefill_side_channel if role == "prefill" else ports.decode_side_channel
    side = tuple(first + at * own.data_parallel_size + rank for rank in range(own.data_parallel_size))
    start = _offset(settings, role) + at * gpus
    devices = tuple(range(start, start + gpus))
    return Server(
        role=role,
        index=index,
        host=host,
        gpus=devices,
        http_port=http,
        side_channel_ports=side,
        environment=_environment(settings, own, devices=devices, host=host, side_channel=side[0]),
        command=_command(settings, role, own, host=host, http_port=http),
        kv_capacity_tokens=own.data_parallel_size * kv_capacity_tokens(settings, own, model=model),
    )


def _environment(
    settings: SplitSettings, own: RoleSettings, *, devices: tuple[int, ...], host: str, side_channel: int
) -> dict[str, str]:
    environment = {
        **vllm_environment(_as_replica(settings, own), base={}, plugin=settings.plugin_folder),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        # vLLM adds the data-parallel rank.
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
    }
    if settings.prefill.tensor_parallel_size != settings.decode.tensor_parallel_size:
        # Ranks of different width exchange heads, which must then lie together in memory on both sides.
        environment["VLLM_KV_CACHE_LAYOUT"] = "HND"
    return environment


def _command(settings: SplitSettings, role: Role, own: RoleSettings, *, host: str, http_port: int) -> tuple[str, ...]:
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_load_failure_policy": settings.kv_load_failure_policy,
        "kv_connector_extra_config": {"kv_lease_duration": settings.kv_lease_s},
    }
    arguments = vllm_arguments(
        _as_replica(settings, own),
        model=settings.model,
        listen={"--host": host, "--port": http_port},
        device="cuda",
        kv=None,
        more={"--block-size": own.block_size, "--kv-transfer-config": json.dumps(transfer)},
    )
    return (settings.python, "-m", MODULE, *arguments)


def _as_replica(settings: SplitSettings, own: RoleSettings) -> GeneratorSettings:
    """Return the settings of a replica whose server has this side's numbers."""
    return GeneratorSettings(
        engine="vllm",
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=own.max_num_seqs,
        max_num_batched_tokens=own.max_num_batched_tokens,
        tensor_parallel_size=own.tensor_parallel_size,
        data_parallel_size=own.data_parallel_size,
        gpu_memory_utilization=own.gpu_memory_utilization,
    )


def _router(settings: SplitSettings, servers: tuple[Server, ...]) -> tuple[str, ...]:
    sides = [part for s in servers for part in (f"--{s.role}", f"http://{s.host}:{s.http_port}")]
    return ("vllm-router", "--vllm-pd-disaggregation", "--port", str(settings.ports.router), *sides)


# -- what to keep in mind


def _notes(settings: SplitSettings, servers: tuple[Server, ...]) -> Iterator[str]:
    for name, role in (("prefill", settings.prefill), ("decode", settings.decode)):
        capacity = next(server.kv_capacity_tokens for server in servers if server.role == name)
        full = capacity // settings.max_model_len
        if full < role.max_num_seqs * role.data_parallel_size:
            yield (
                f"a {name} server holds the KV of {capacity} tokens: {full} sequences of max_model_len "
                f"{settings.max_model_len}, while max_num_seqs is {role.max_num_seqs}. Longer ones will be preempted"
            )
    yield (
        f"every host needs Rollmill's transport for weights in {settings.plugin_folder}: `rollmill engine plugin "
        f"{settings.plugin_folder}` writes it. The servers start without weights, and serve once the first were loaded "
        "from a file that each of them can read under the same path"
    )
    yield (
        "before weights are updated, pause the prefill servers, then the decode servers, update all, and resume in the "
        "opposite order: a prompt that was computed before and fetched after would mix two versions"
    )
    if any(server.host not in LOOPBACK for server in servers):
        yield (
            "vLLM's servers, the routes that change their weights, and their side channels ask for no token: keep "
            "their ports inside a network that only the router and the generator reach"
        )
    yield "control calls (pause, update, abort) go to every server directly: the router passes them to one in turn"
