"""Inference engines behind one protocol (`protocol.Engine`): `embedded` (torch), `fake` (no model)."""
