"""SGLang behind the engine protocol: a server process in an environment of its own, driven over HTTP.

Use `rollmill.generator.engines.sglang.start.start_sglang`. Nothing here imports SGLang.
"""
