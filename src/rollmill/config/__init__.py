"""The typed configuration: reading, checking, explaining and planning. No torch here.

`explain`, `derive` and `plan` are functions of the modules of their names: `from rollmill.config.plan import plan`.
"""

from rollmill.config.checks import check, warnings_of
from rollmill.config.derive import Derived, ModelFacts, check_divisible
from rollmill.config.explain import Explained, render_explained
from rollmill.config.load import LoadedConfig, differing_keys, dump_config, load_config, parse_config
from rollmill.config.plan import Plan
from rollmill.config.schema import RollmillConfig

__all__ = [
    "Derived",
    "Explained",
    "LoadedConfig",
    "ModelFacts",
    "Plan",
    "RollmillConfig",
    "check",
    "check_divisible",
    "differing_keys",
    "dump_config",
    "load_config",
    "parse_config",
    "render_explained",
    "warnings_of",
]
