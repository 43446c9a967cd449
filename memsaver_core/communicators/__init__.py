"""NCCL communicators: found, counted, suspended and resumed through the libnccl that the process has loaded.

Suspending is collective: every rank of a communicator enters it. A service asks all ranks first whether they can; a
trainer calls ``communicators.suspend()`` on all of them between two steps, and later ``communicators.resume()``. CUDA
graphs with NCCL calls replay as before if NCCL_GRAPH_REGISTER=0 was set when they were captured. Needs NCCL 2.29.7;
``found`` reports what each communicator holds and what prevents its suspension.
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
