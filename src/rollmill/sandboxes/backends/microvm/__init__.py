"""What virtual machines have in common: the guest that boots in them, templates, clones, and the owner's side.

Inside a machine runs what runs beside a namespace sandbox, unchanged: the zygote and its agent. So limits, users,
files, sessions and programs are those of the namespace backend, behind a kernel of their own. How a machine is started,
stopped and copied is a `Hypervisor`'s affair.
"""

from rollmill.sandboxes.backends.microvm.provider import MicroVmProvider
from rollmill.sandboxes.backends.microvm.settings import MicroVmSettings

__all__ = ["MicroVmProvider", "MicroVmSettings"]
