"""The typed configuration tree.

Decides nothing. Every field says what it means (its docstring), its unit, and what raising and lowering it does;
`rollmill config explain` prints exactly that. Unknown keys are refused. Cross-field rules live in
`rollmill.config.checks`. No torch here.
"""

from __future__ import annotations

from typing import Any, Literal

from rollmill.config.fleet import FleetSettings
from rollmill.config.section import Section, knob
from rollmill.config.serving import LimitSettings, SglangSettings, VllmSettings


class RunSettings(Section):
    """The run as a whole."""

    name: str = knob("run")
    """Name of the run; the run directory is `directory/name`."""
    directory: str = knob("runs")
    """Folder that holds run directories."""
    seed: int = knob(0, ge=0)
    """Seed of task order, sampling and initialisation."""
    deterministic: bool = knob(False)
    """Two runs with one seed give bit-identical weights on the same CPU, and so does a run that was killed and resumed.
    Sampling goes in waves that nothing else joins, with no decision from rates or time; slower. Needs
    schedule.max_staleness 0, no oversampling, one replica, and generator.kernels other than auto."""
    steps: int = knob(40, unit="optimizer steps", raising="longer run, more learning", lowering="shorter run", ge=1)
    """Optimizer steps to train."""
    stall_report_s: float = knob(
        60.0, unit="s", raising="fewer reports on slow runs", lowering="earlier word of a stuck run", gt=0
    )
    """Print who waits for whom when nothing moved for this long."""
    stall_limit_s: float = knob(
        600.0, unit="s", raising="tolerates longer silence", lowering="a stuck run ends sooner", gt=0
    )
    """End the run with the stall report as its cause when nothing moved for this long."""
    shutdown_grace_s: float = knob(
        60.0, unit="s", raising="more time to finish a step and a checkpoint", lowering="faster forced stop", gt=0
    )
    """On Ctrl-C, time for the processes to stop cleanly before they are killed."""
    on_generator_loss: Literal["restart", "wait", "degrade", "stop"] = knob("restart")
    """A replica process died or serves nothing any more: `restart` it with the newest weights, `wait` for somebody to
    start it, `degrade` to the replicas that are left (without any, train what is buffered and end), or `stop`."""
    on_trainer_loss: Literal["restart", "stop"] = knob("stop")
    """The trainer died: `restart` it from the newest checkpoint while the generator lives on, or `stop` the run."""
    on_controller_loss: Literal["restart", "stop"] = knob("stop")
    """The controller died: `restart` it on its journal while trainer and generator live on, or `stop` the run."""
    restart_budget: int = knob(
        3, unit="restarts", raising="tolerates a flakier process", lowering="a broken process ends the run sooner", ge=0
    )
    """Restarts of one process without an optimizer step between them; a step further than ever gives them all back."""
    replica_deadline_s: float = knob(
        300.0, unit="s", raising="more time to start a replica by hand", lowering="the run ends sooner", gt=0
    )
    """With `on_generator_loss = "wait"`: how long the run waits for a lost replica to come back."""


class ModelSettings(Section):
    """Which model is trained."""

    source: str = knob("smollm2-135m-instruct")
    """A name from `rollmill model list`, a local Hugging Face directory, or (with a hub) a hub name."""
    system_prompt: str | None = knob(None)
    """System message put before each task; `None` keeps the chat template's own default."""


class TaskMix(Section):
    """One task family of a mixture."""

    name: str = knob(...)
    """Name of the family in its environment, for example `basic_arithmetic`."""
    weight: float = knob(1.0, raising="drawn more often", lowering="drawn less often", gt=0)
    """Share of draws relative to the other families."""
    options: dict[str, Any] = knob({})
    """Options of the family, as its own documentation names them."""


class EnvironmentSettings(Section):
    """Where tasks come from and how rollouts are scored."""

    kind: str = knob("reasoning_gym")
    """`reasoning_gym`, or an import path `package.module:Factory` of your own environment."""
    tasks: tuple[TaskMix, ...] = knob((), min_length=1)
    """The families that are mixed."""
    pool_size: int = knob(
        20_000, unit="problems", raising="more distinct problems, slower start", lowering="faster start", ge=1
    )
    """Problems generated before deduplication and the split."""
    draws: Literal["generated", "distinct"] = knob("generated")
    """How often a training problem comes in an epoch: as often as the generator drew it, so that weights and the
    family's own frequencies hold; or once. Held-out problems are distinct either way, and never in training."""
    heldout_size: int = knob(
        256, unit="problems", raising="narrower interval, longer evaluation", lowering="wider interval", ge=1
    )
    """Distinct held-out problems for evaluation."""
    heldout_fraction: float = knob(
        0.1, raising="fewer training problems", lowering="fewer held-out problems", gt=0, lt=1
    )
    """Share of problems that the content hash puts on the held-out side."""
    scorer: str = knob("last_integer")
    """`last_integer` (the last integer of the text counts), `dataset` (the environment's scorer), or an import path."""
    scoring_deadline_s: float = knob(
        10.0, unit="s", raising="tolerates slower scorers", lowering="hung scorers end sooner", gt=0
    )
    """A scorer that takes longer is killed and the rollout stays unscored."""
    scoring_workers: int = knob(1, unit="processes", raising="more scores at once", lowering="less memory", ge=1)
    """Scoring processes."""


class SamplingSettings(Section):
    """How the policy samples in training."""

    temperature: float = knob(1.0, raising="more varied rollouts", lowering="more alike rollouts, fewer signals", ge=0)
    """Sampling temperature; 0 is refused in training."""
    top_p: float = knob(1.0, raising="keeps more of the tail", lowering="cuts more of the tail", gt=0, le=1)
    """Nucleus; the trainer needs 1.0 unless the loss can mask, see `config explain sampling.top_p`."""
    top_k: int = knob(0, unit="tokens", raising="keeps more candidates", lowering="keeps fewer; 0 keeps all", ge=0)
    """Keep this many candidates; 0 keeps all."""
    max_new_tokens: int = knob(
        24, unit="tokens", raising="longer answers, slower rollouts", lowering="more cut answers", ge=1
    )
    """Cap on output tokens of a turn."""


class GeneratorSettings(Section):
    """The generator service."""

    engine: Literal["embedded", "vllm", "sglang", "fake"] = knob("embedded")
    """`embedded` (torch, transformers modules), `vllm` (a server in an environment of its own, made by
    `rollmill engine install vllm`), `sglang` (the same, in an environment that you name), or `fake` (deterministic, for
    tests)."""
    replicas: int = knob(
        1, unit="processes", raising="more rollouts at once, more memory", lowering="less memory", ge=1
    )
    """Replica processes."""
    loads_at_once: int = knob(
        1, unit="replicas", raising="all serve new weights sooner", lowering="more go on generating meanwhile", ge=1
    )
    """Replicas that load new weights at the same time."""
    threads: int = knob(
        1, unit="threads", raising="faster if cores are idle", lowering="leaves cores to the trainer", ge=1
    )
    """Torch threads of each replica."""
    borrowed_threads: int | None = knob(
        None, unit="threads", raising="faster steps while the trainer waits", lowering="leaves cores to others", ge=0
    )
    """Further threads that a replica of the embedded engine takes while nobody else uses their cores. `None`: as many
    as the trainer has, for it waits for data or computes; none in deterministic mode and in `rollmill serve`."""
    dtype: Literal["auto", "float32", "bfloat16"] = knob("auto")
    """Serving precision; `auto` takes bfloat16 only where the CPU multiplies it natively."""
    kernels: Literal["auto", "native", "torch"] = knob("auto")
    """What multiplies with the weights: `native` insists on the kernels that are compiled at the first use (x86-64 with
    AVX2 and a C compiler), `auto` takes them where they can be used, `torch` never."""
    quantization: Literal["none", "int8", "fp8"] = knob("none")
    """`int8` (embedded engine) keeps the weights of linear layers as integers of eight bits with a factor per 32
    inputs, rounded when they are published: 0.28 of their memory, and small batches are faster. Log-probs differ from
    the trainer's (with SmolLM2 by 0.05 nats on average), which the algorithm's importance correction takes into
    account. Needs the compiled kernels. `fp8` (vLLM on a GPU) has the server round them to eight bits each time it
    loads a version, with a factor per output; nothing rounded is published. It has not run yet."""
    max_num_seqs: int = knob(
        48, unit="sequences", raising="larger batches, more KV memory", lowering="less memory, lower throughput", ge=1
    )
    """Sequences decoded at once; other servers call it max_batch_size or max_running_requests."""
    max_model_len: int = knob(
        256, unit="tokens", raising="longer prompts and answers, more KV memory", lowering="less memory", ge=8
    )
    """Longest prompt plus output."""
    max_num_batched_tokens: int | None = knob(
        None,
        unit="tokens",
        raising="prompts are computed in fewer passes, running requests wait longer for each",
        lowering="steadier decoding, slower prefill",
        ge=16,
    )
    """Most tokens of one pass, prompts and decoded ones together; longer prompts are computed in chunks. `None` takes
    the engine's own choice."""
    max_wait_ms: float = knob(
        0.0, unit="ms", raising="fuller first batches", lowering="less latency of a lone request; 0 never waits", ge=0
    )
    """How long an idle engine holds the first request for company."""
    kv_cache_memory_bytes: int | None = knob(
        None, unit="bytes", raising="more sequences at once", lowering="more waiting and preemption", ge=1
    )
    """Memory for keys and values of a replica (of each of its devices). `None` takes what max_num_seqs sequences of
    max_model_len tokens need, on a GPU what gpu_memory_utilization leaves."""
    memory_limit_bytes: int | None = knob(
        None, unit="bytes", raising="more memory for keys and values", lowering="less memory, fewer sequences", ge=1
    )
    """Memory of the whole replica: keys and values get what weights and activations leave of it. `None` sets none."""
    gpu_memory_utilization: float = knob(
        0.9, raising="more memory for keys and values", lowering="room for others on the GPU", gt=0, le=1
    )
    """Share of a GPU's memory that a replica may take, weights included. Without a GPU it says nothing."""
    enable_prefix_caching: bool = knob(True)
    """Keep the KV of prompts so that equal beginnings are computed once; its keys hold the policy version."""
    host_kv_bytes: int | None = knob(
        None,
        unit="bytes",
        raising="more idle sessions are kept",
        lowering="less disk, more prompts computed anew",
        ge=1,
    )
    """Size of a file that takes the KV of idle sessions and of suspended sequences when its memory is needed, and gives
    it back where reading is measured to be cheaper than computing. `None` forgets that KV. Of each replica."""
    host_kv_directory: str | None = knob(None)
    """Folder of that file, on a disk: needed with `host_kv_bytes`. The file has no name and ends with its replica."""
    speculation: Literal["off", "ngram", "draft"] = knob("off")
    """`ngram` guesses that what followed the last tokens before, in the prompt, the answer or a sibling's, follows
    again, and checks the guess in the same pass: the tokens are those of `off`, to the last one. It guesses only where
    that is measured to pay, which is in small batches; never in deterministic mode. `draft` lets a small model guess
    (`draft_model`): the distribution is that of `off`, but not each seed's tokens; also where it is measured to pay."""
    draft_model: str | None = knob(None)
    """Small model that guesses with `speculation = "draft"`: a name of `rollmill model list` or a Hugging Face
    directory, with the tokens of the model that is served. Its weights and its keys and values take memory of the
    replica; it is never trained."""
    draft_tokens: int = knob(
        4, unit="tokens", raising="more gained where the draft is right", lowering="less lost where it is wrong",
        ge=1, le=15,
    )  # fmt: skip
    """Most tokens that the draft guesses ahead."""
    max_loras: int | None = knob(
        None, unit="adapters", raising="more jobs at once, more memory", lowering="less memory, more loading", ge=0
    )
    """Low-rank adapters that a replica of `rollmill serve --adapter` serves at once beside its base; the least
    recently asked for gives way to another. `None` takes as many as are named. A run has one policy and no place."""
    max_lora_rank: int = knob(
        32, raising="larger adapters are taken, more memory is set aside", lowering="less of both", ge=1
    )
    """Greatest rank of an adapter that is taken."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8"] = knob("auto")
    """Precision of keys and values; `auto` is that of the served weights."""
    tensor_parallel_size: int = knob(
        1, unit="devices", raising="larger models, lower latency", lowering="less communication", ge=1
    )
    """Devices that share each layer of a replica."""
    data_parallel_size: int = knob(
        1, unit="copies", raising="more throughput of one replica", lowering="fewer devices", ge=1
    )
    """Copies of the model inside a replica, behind its own balancer."""
    enable_expert_parallel: bool = knob(False)
    """Spread the experts of a mixture over the devices instead of slicing each."""
    kv_on_update: Literal["keep", "recompute", "drain"] = knob("keep")
    """What happens to requests in flight when weights change. `keep`: they go on over the KV they have. `recompute`:
    they go on over KV made anew under the new weights. `drain`: they finish under the old weights first, and nothing
    new begins meanwhile."""
    drain_on_update_s: float = knob(
        10.0, unit="s", raising="more requests finish under one version", lowering="less waits for long ones", gt=0
    )
    """Only with `kv_on_update = "drain"`: longest wait for requests in flight. What still runs then goes on under the
    new weights, as with `recompute`, with all its tokens. At most half of what is left of `load_deadline_s`."""
    stage_weights: bool = knob(True)
    """Write new weights into a second set of buffers while the old ones serve: generation then pauses only for the
    exchange of pointers and the proof. Costs one more copy of the served weights in memory; `false` writes in the
    pause."""
    request_deadline_s: float = knob(
        120.0, unit="s", raising="tolerates slower generation", lowering="stuck requests end sooner", gt=0
    )
    """A generation request that takes longer is aborted."""
    load_deadline_s: float = knob(
        60.0, unit="s", raising="tolerates slower loads", lowering="a stuck load ends sooner", gt=0
    )
    """A weight load that takes longer fails: before the swap began the old version goes on serving, after it the
    replica is dirty."""
    vllm: VllmSettings = VllmSettings()
    """Only with `engine = "vllm"`."""
    sglang: SglangSettings = SglangSettings()
    """Only with `engine = "sglang"`."""
    limits: LimitSettings = LimitSettings()
    """What one replica takes from its callers."""
    fleet: FleetSettings = FleetSettings()
    """Replicas that the run does not start, but finds at an address."""

    @property
    def own_replicas(self) -> int:
        """Replica processes that the run starts itself; none where it is served by a fleet."""
        return 0 if self.fleet.address else self.replicas


class TrainerSettings(Section):
    """The trainer process."""

    threads: int = knob(
        1, unit="threads", raising="faster if cores are idle", lowering="leaves cores to the generator", ge=1
    )
    """Torch threads."""
    borrowed_threads: int | None = knob(
        None, unit="threads", raising="faster steps while replicas wait", lowering="leaves cores to others", ge=0
    )
    """Further threads that the trainer takes for a micro-batch while nobody else uses their cores. `None`: as many as a
    replica has, for it waits or computes; none in deterministic mode, because sums of another order differ in the
    last bits."""
    dtype: Literal["auto", "float32", "bfloat16"] = knob("auto")
    """Compute precision (autocast); master weights stay float32. `auto` takes bfloat16 only where it is native."""
    learning_rate: float = knob(2e-5, raising="faster, less stable", lowering="slower, more stable", gt=0)
    """AdamW learning rate after warm-up."""
    lora_rank: int = knob(0, raising="more that can be learned, larger publications", lowering="less of both", ge=0)
    """Train low-rank differences of this rank (LoRA) instead of whole matrices, and publish those alone; 0 trains
    everything. A learning rate about ten times larger is usual."""
    lora_alpha: float = knob(32.0, raising="differences count more", lowering="differences count less", gt=0)
    """The differences count `lora_alpha / lora_rank` times."""
    lora_targets: tuple[str, ...] = knob(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Linear layers that get a difference, by the last part of their names."""
    warmup_steps: int = knob(2, unit="optimizer steps", raising="gentler start", lowering="faster start", ge=0)
    """Linear warm-up."""
    betas: tuple[float, float] = knob((0.9, 0.99))
    """AdamW momentum terms."""
    eps: float = knob(1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = knob(0.0, raising="stronger pull to zero", lowering="weaker pull", ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = knob(1.0, raising="larger updates pass", lowering="more clipping", gt=0)
    """Global gradient norm is clipped to this."""
    micro_batch_tokens: int = knob(
        2048, unit="tokens", raising="fewer passes, more memory", lowering="less memory, more passes", ge=16
    )
    """Packed tokens of one forward and backward pass."""
    checkpoint_every_steps: int = knob(
        20, unit="optimizer steps", raising="less time spent saving", lowering="less work lost in a crash", ge=1
    )
    """Steps between checkpoints; one is always written at the end and on Ctrl-C."""
    keep_checkpoints: int = knob(2, unit="checkpoints", raising="more disk", lowering="less disk", ge=1)
    """Newest checkpoints kept."""
    checkpoint_in_background: bool | None = knob(None)
    """Copy the state (weights and moments) and write it while the next steps train. `None` does so where the copy fits
    into free memory twice. The last checkpoint of a run is always waited for."""
    checkpoint_deadline_s: float = knob(
        600.0, unit="s", raising="tolerates a slower disk", lowering="a hanging disk ends the run sooner", gt=0
    )
    """Longest wait for a checkpoint that is written in the background."""
    batch_deadline_s: float = knob(
        600.0, unit="s", raising="tolerates slower generation", lowering="an empty wait ends sooner", gt=0
    )
    """Longest wait for a batch before the trainer reports the stall and stops."""


class AlgorithmSettings(Section):
    """What is optimised."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = knob("grpo")
    """Group baseline: GRPO (divided by the standard deviation), Dr. GRPO (not divided), RLOO (leave one out)."""
    advantage_eps: float = knob(1e-4, raising="damps groups with little spread", lowering="amplifies them", gt=0)
    """Added to the standard deviation in GRPO."""
    signal: Literal["raw_reward", "shaped_reward"] = knob("raw_reward")
    """Which rewards must differ inside a group for it to teach: the verifier's, or those with the length penalty, where
    a group that is all wrong still teaches to be short. Differs only with `schedule.overlong = "soft_penalty"`."""
    loss: Literal["ppo", "gspo", "dapo", "cispo"] = knob("ppo")
    """Surrogate: token-level PPO clip, sequence-level GSPO, DAPO clip-higher, or CISPO."""
    clip_low: float = knob(0.2, raising="larger steps down", lowering="smaller steps down", gt=0)
    """Lower clip range: ratios below 1 - clip_low are clipped. Acts with `correction = "none"` only: each batch gets
    one update, and before it the ratio that a correction leaves to the clip is 1."""
    clip_high: float = knob(0.2, raising="larger steps up", lowering="smaller steps up", gt=0)
    """Upper clip range: ratios above 1 + clip_high are clipped. Acts with `correction = "none"` only."""
    normalisation: Literal["token", "sequence", "constant"] = knob("token")
    """Denominator of the loss: all tokens of the step, sequences of equal weight, or a constant: rollouts of a full
    batch times max_new_tokens."""
    correction: Literal["none", "truncated_is", "masked_is", "clipped_is"] = knob("clipped_is")
    """Importance correction between behaviour and proximal policy: weights truncated at the cap, masked outside
    [1 / cap, cap], or truncated and masked only where the advantage would push the policy further beyond it."""
    correction_cap: float = knob(2.0, raising="less bias, more variance", lowering="more bias, less variance", gt=0)
    """Truncation cap, and upper edge of the mask (the lower edge is its inverse)."""
    kl_coefficient: float = knob(0.0, raising="stays closer to the reference", lowering="free to move", ge=0)
    """Weight of the KL to the initial policy; 0 keeps no reference in memory."""
    reward_shuffle: bool = knob(False)
    """Control experiment: permute rewards inside each batch of a group, so that nothing can be learned."""


class ScheduleSettings(Section):
    """Admission, groups, staleness, failures."""

    batch_groups: int = knob(
        4, unit="groups", raising="steadier gradient, slower step", lowering="noisier gradient, faster step", ge=1
    )
    """Groups (prompts) of one optimizer step."""
    group_size: int = knob(
        8, unit="rollouts", raising="better baseline, fewer prompts per second", lowering="noisier baseline", ge=2
    )
    """Rollouts that share a baseline."""
    max_staleness: int = knob(
        2,
        unit="optimizer steps",
        raising="trainer waits less, older samples",
        lowering="fresher samples; 0 is synchronous",
        ge=0,
    )
    """Hard bound on the age of a consumed sample."""
    window_groups: int = knob(
        8, unit="groups", raising="less head-of-line blocking", lowering="stricter first-in first-out", ge=1
    )
    """A batch is filled from the ready groups among this many oldest."""
    group_oversampling: float = knob(
        1.0, raising="less waiting for stragglers, more waste", lowering="less waste", ge=1
    )
    """Groups dispatched per group needed; the surplus stays in the buffer while fresh."""
    member_oversampling: int = knob(
        0, unit="rollouts", raising="groups close sooner, more waste", lowering="less waste", ge=0
    )
    """Extra siblings per group; the group closes with the first `group_size` that count."""
    reopen_groups: bool = knob(False)
    """Let a sibling that comes after the close join its group while the group is unassigned."""
    zero_advantage: Literal["replace", "shrink"] = knob("replace")
    """A group without signal is replaced by another, or the batch gets smaller."""
    rollout_deadline_s: float = knob(
        120.0, unit="s", raising="tolerates slower rollouts", lowering="lost rollouts are dispatched again sooner", gt=0
    )
    """A rollout that takes longer is aborted and dispatched again."""
    group_deadline_s: float = knob(
        300.0, unit="s", raising="tolerates slower groups", lowering="stuck groups are replaced sooner", gt=0
    )
    """A group that takes longer is dropped with a reason and replaced."""
    infra_attempts: int = knob(
        4, unit="attempts", raising="tolerates flakier infrastructure", lowering="fails sooner", ge=1
    )
    """Attempts of one rollout after infrastructure failures."""
    infra_failures_in_a_row: int = knob(
        16, unit="failures", raising="tolerates longer outages", lowering="an outage ends the run sooner", ge=1
    )
    """Infrastructure failures without a success between them that end the run."""
    data_retries: int = knob(
        2, unit="retries", raising="bad tasks cost more", lowering="bad tasks are dropped sooner", ge=0
    )
    """Further tries of a task that the data (or an unknown error) made fail; then the group is dropped."""
    data_failure_limit: int = knob(
        64, unit="groups", raising="tolerates dirtier data", lowering="bad data ends the run sooner", ge=1
    )
    """Groups dropped for their data in a row, with no success between, that end the run."""
    overlong: Literal["mask", "soft_penalty", "score"] = knob("score")
    """A rollout cut by the token cap: out of loss and baseline, penalised, or scored as it is."""
    overlong_buffer_tokens: int = knob(
        8, unit="tokens", raising="penalty starts earlier", lowering="penalty starts later", ge=1
    )
    """Length of the zone before the cap in which the soft penalty grows from 0 to its full value (DAPO, eq. 13)."""
    overlong_penalty: float = knob(1.0, raising="stronger penalty", lowering="weaker penalty", ge=0)
    """Full soft penalty at the cap."""
    prior_step_s: float = knob(5.0, unit="s", raising="smaller first stock", lowering="larger first stock", gt=0)
    """Expected time of one optimizer step before any was measured."""
    prior_group_s: float = knob(15.0, unit="s", raising="larger first stock", lowering="smaller first stock", gt=0)
    """Expected time of one group before any was measured."""
    prior_yield: float = knob(0.5, raising="smaller first stock", lowering="larger first stock", gt=0, le=1)
    """Expected share of groups with signal before any was measured."""
    data_epochs: int | None = knob(None, unit="epochs", raising="longer run", lowering="ends sooner")
    """Passes over the training problems; `None` never ends. The run also ends at `run.steps`."""


class EvaluationSettings(Section):
    """Held-out evaluation."""

    at_start: bool = knob(True)
    """Evaluate before the first step."""
    at_end: bool = knob(True)
    """Evaluate after the last step."""
    every_steps: int = knob(
        0, unit="optimizer steps", raising="fewer evaluations", lowering="more evaluations; 0 for none", ge=0
    )
    """Evaluate during the run."""
    replica: Literal["shared", "own"] = knob("shared")
    """Who answers while the run trains: `shared`, the replicas that serve the training, which keep one version
    meanwhile; or `own`, another process at low priority, so that training and weight loads go on. `own` takes the
    memory of one more replica. The evaluation at the end is always shared: nobody trains then."""
    temperature: float = knob(0.0, ge=0)
    """Sampling temperature in evaluation; 0 is greedy. Stored with the score."""
    max_new_tokens: int | None = knob(
        None, unit="tokens", raising="longer answers, slower evaluation", lowering="more answers are cut off", ge=1
    )
    """Cap in evaluation; `None` takes `sampling.max_new_tokens`."""
    deadline_s: float = knob(600.0, unit="s", raising="tolerates slower evaluation", lowering="ends sooner", gt=0)
    """An evaluation that takes longer fails, with what it had."""


class WeightSettings(Section):
    """The model repository."""

    transport: Literal["auto", "shm", "file"] = knob("auto")
    """Shared memory, or files in the run directory; `auto` takes shared memory where it has room."""
    keep_versions: int = knob(3, unit="versions", raising="more memory", lowering="less memory", ge=2)
    """Published versions kept beside those that somebody holds."""
    publish_deadline_s: float = knob(
        120.0, unit="s", raising="tolerates slower disks", lowering="a hung publication ends the run sooner", gt=0
    )
    """Longest wait of the trainer for a publication that is being digested and committed in the background."""
    canary_tolerance: float = knob(
        1e-3, unit="nats", raising="tolerates more numerical difference", lowering="stricter", gt=0
    )
    """Largest difference per token between trainer and engine on the canary, where both compute in float32."""
    canary_tolerance_mixed: float = knob(
        0.5, unit="nats", raising="tolerates more numerical difference", lowering="stricter", gt=0
    )
    """The same where either side computes in bfloat16, or the engine with weights of eight bits."""


class RollmillConfig(Section):
    """Everything a run needs."""

    run: RunSettings = RunSettings()
    """The run as a whole."""
    model: ModelSettings = ModelSettings()
    """Which model is trained."""
    environment: EnvironmentSettings = EnvironmentSettings(tasks=(TaskMix(name="basic_arithmetic"),))
    """Where tasks come from and how rollouts are scored."""
    sampling: SamplingSettings = SamplingSettings()
    """How the policy samples in training."""
    generator: GeneratorSettings = GeneratorSettings()
    """The generator service."""
    trainer: TrainerSettings = TrainerSettings()
    """The trainer process."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """What is optimised."""
    schedule: ScheduleSettings = ScheduleSettings()
    """Admission, groups, staleness, failures."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Held-out evaluation."""
    weights: WeightSettings = WeightSettings()
    """The model repository."""
