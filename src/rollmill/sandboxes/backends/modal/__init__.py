"""Modal."""

from rollmill.sandboxes.backends.modal.driver import ModalProvider, ModalSettings

__all__ = ["ModalProvider", "ModalSettings"]
