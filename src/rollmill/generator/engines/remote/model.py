"""What a server's adapter needs to know of the model, from its `config.json` alone."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec

from rollmill.errors import ModelError
from rollmill.generator.engines.protocol import REWARD_SCORE, engines_with
from rollmill.generator.engines.settings import KvShape

_REWARD_HEAD = "ForSequenceClassification"


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's `config.json` says.

    Attributes:
        kv: `None` where it does not say.
    """

    name: str
    vocabulary_size: int
    max_positions: int
    kv: KvShape | None

    @classmethod
    def read(cls, path: str | Path) -> ServedModel:
        """Read it.

        Raises:
            ModelError: if the file is missing or says too little, or the model has a reward head.
        """
        file = Path(path) / "config.json"
        try:
            config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            vocabulary, positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{file} does not say the sizes of vocabulary and context ({error!r}); give a prepared model"
            ) from error
        head = (config.get("architectures") or [""])[0]
        if head.endswith(_REWARD_HEAD):
            raise ModelError(
                f"{Path(path).name} has a reward head ({head}), and the engines of servers are driven as generators "
                f"alone. Engines that serve one: {engines_with(REWARD_SCORE)}"
            )
        kv = None
        with contextlib.suppress(ModelError):  # then the server is told or decides
            kv = KvShape.of(config, where=str(file))
        return cls(name=Path(path).name, vocabulary_size=vocabulary, max_positions=positions, kv=kv)
