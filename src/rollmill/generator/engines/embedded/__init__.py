"""Embedded inference engine: own scheduler and slot cache over unmodified transformers modules.

Use `rollmill.generator.engines.embedded.engine.EmbeddedEngine`; importing that module loads torch.
"""
