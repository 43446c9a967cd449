"""Hibernation: give back what remains of the process on the device, its CUDA context included.

The driver checkpoints a process only on behalf of another one, so the calls come from a small helper process, started
at the first use. While the process is hibernated, each of its CUDA calls blocks; ``wake`` brings the context back as it
was: addresses, streams, modules and captured graphs. The host driver has no context; there, what the process still
holds of the device stops counting, and its allocations block.
"""

from memsaver_core.hibernation.hibernation import Hibernation

this_process = Hibernation()
checkpoint = this_process.checkpoint
device_lock = this_process.device_lock
failure = this_process.failure
helper_pid = this_process.helper_pid
hibernate = this_process.hibernate
is_away = this_process.is_away
is_hibernated = this_process.is_hibernated
lock = this_process.lock
obstacles = hibernation_obstacles = this_process.obstacles
prepare = this_process.prepare
raise_if_lost = this_process.raise_if_lost
read_memory = this_process.read_memory
restore = this_process.restore
unlock = this_process.unlock
wake = this_process.wake
