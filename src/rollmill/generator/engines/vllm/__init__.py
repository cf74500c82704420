"""vLLM behind the engine protocol: a server process in an environment of its own, driven over HTTP.

Use `rollmill.generator.engines.vllm.start.start_vllm`. Nothing here imports vLLM; only the files of `server_side` run
in its environment, and they import nothing of Rollmill.
"""
