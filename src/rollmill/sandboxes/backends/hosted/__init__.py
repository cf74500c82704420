"""What all backends share whose sandboxes are run by somebody else: ids, leases, ends, programs and their caps."""

from rollmill.sandboxes.backends.hosted.provider import HostedProvider
from rollmill.sandboxes.backends.hosted.sandbox import HostedSandbox
from rollmill.sandboxes.backends.hosted.settings import CLAIMS, HostedSettings

__all__ = ["CLAIMS", "HostedProvider", "HostedSandbox", "HostedSettings"]
