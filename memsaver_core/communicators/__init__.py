"""NCCL communicators: found, counted, suspended and resumed through the libnccl that the process has loaded.

Suspending is collective: every rank of a communicator enters it. A service asks all ranks first whether they can. A
trainer whose ranks run the same program calls this on all of them, between two steps::

    from memsaver_core import communicators

    communicators.suspend()  # device memory of every communicator is the driver's again
    ...
    communicators.resume()

CUDA graphs with NCCL calls replay as before, if NCCL_GRAPH_REGISTER=0 was set when they were captured. Needs NCCL
2.29.7; ``found`` reports for each communicator what it holds, and what prevents its suspension.
"""

from memsaver_core.communicators.communicators import TIMEOUT_S as TIMEOUT_S
from memsaver_core.communicators.communicators import Communicators
from memsaver_core.communicators.nccl import warn_of_registered_graphs as warn_of_registered_graphs

this_process = Communicators()
can_suspend = this_process.can_suspend
found = this_process.found
register = this_process.register
register_buffers = this_process.register_buffers
resume = this_process.resume
shared = this_process.shared
statuses = this_process.statuses
suspend = this_process.suspend
tag_status = this_process.tag_status
unregister = this_process.unregister
usable = this_process.usable
