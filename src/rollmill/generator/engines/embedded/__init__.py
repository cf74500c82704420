"""Embedded inference engine: own scheduler and cache of blocks over unmodified transformers modules.

Use `rollmill.generator.engines.embedded.engine.EmbeddedEngine`; importing that module loads torch.
"""
