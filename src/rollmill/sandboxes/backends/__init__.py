"""Backends: what runs sandboxes. Each implements `rollmill.sandboxes.protocol.Provider`."""
