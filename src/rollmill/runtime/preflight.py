"""What is looked at before trainer and generator start: model, tokenizer, data, prompt lengths.

Finds what the user can fix; decides nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Protocol

from rollmill.config.schema import RollmillConfig
from rollmill.environments.cache import TaskCache
from rollmill.environments.load import load_environment
from rollmill.environments.protocol import Environment
from rollmill.environments.rendering import MessageRenderer, Renderer, check_lengths, prompts_key
from rollmill.errors import ModelError
from rollmill.runtime.incarnation import Preflight
from rollmill.runtime.threads import process_environment
from rollmill.weights.lean_import import without_collection
from rollmill.weights.prepare import find_ready

PREPARE_DEADLINE_S = 600.0


def check_first(config: RollmillConfig) -> tuple[Environment, Renderer, Preflight]:
    """Return the environment, the model's renderer, and what was found.

    Raises:
        ModelError: if the model cannot be prepared or its tokenizer does not fit.
        DataError: if the data set is empty, cannot be split, or a prompt is too long.
        ConfigError: if a task family, an option or the scorer does not exist.
    """
    model_path = prepare_model(config.model.source)
    with without_collection():
        renderer = Renderer(model_path)
    environment = load_environment(
        config.environment, run_seed=config.run.seed, system_prompt=config.model.system_prompt
    )
    longest = longest_prompt(config, environment=environment, renderer=renderer, cache=TaskCache())
    preflight = Preflight(
        model_path=model_path,
        data_identity=environment.identity(),
        training_size=environment.training_size(),
        heldout_size=len(environment.heldout()),
        longest_prompt_tokens=longest,
    )
    return environment, renderer, preflight


class IdentifiedRenderer(MessageRenderer, Protocol):
    """A renderer that says what its results depend on."""

    def identity(self) -> str:
        """Return a digest of everything that decides how messages become ids."""
        ...


def longest_prompt(
    config: RollmillConfig, *, environment: Environment, renderer: IdentifiedRenderer, cache: TaskCache
) -> int:
    """Return the longest prompt in tokens, measured once per data set and tokenizer.

    Raises:
        DataError: if a prompt leaves no room for a full reply.
    """
    room = config.generator.max_model_len - config.sampling.max_new_tokens
    key = prompts_key(environment, identity=renderer.identity())
    known = cache.get(key)
    # One that is too long is measured again, to say which.
    if known is not None and int(known) <= room:
        return int(known)
    longest = check_lengths(
        environment,
        renderer,
        max_model_len=config.generator.max_model_len,
        max_new_tokens=config.sampling.max_new_tokens,
    )
    cache.put(key, str(longest).encode())
    return longest


def prepare_model(source: str) -> str:
    """Return the prepared model's directory; what is not ready is prepared in a process of its own, which needs torch.

    Raises:
        ModelError: with the words of the preparation.
    """
    ready = find_ready(source)
    if ready is not None:
        return str(ready)
    command = [sys.executable, "-m", "rollmill.cli", "model", "prepare", source, "--json"]
    environment = process_environment(threads=1)
    if "HF_HUB_OFFLINE" not in os.environ:
        # The run itself never reaches for a hub; preparing a model is where a hub name may.
        del environment["HF_HUB_OFFLINE"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=PREPARE_DEADLINE_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"preparing the model {source!r} took longer than {PREPARE_DEADLINE_S:.0f} s. Prepare it beforehand with "
            f"`rollmill model prepare {source}`, and see there what it waits for."
        ) from None
    if result.returncode != 0:
        raise ModelError(_error_text(result.stdout) or result.stderr.strip()[-2000:])
    return json.loads(result.stdout)["path"]


def _error_text(output: str) -> str:
    try:
        return json.loads(output)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
