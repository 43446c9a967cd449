"""Hibernation: give back what remains of the process on the device, its CUDA context included.

The driver checkpoints a process only for another one, so a small helper process, started at the first use, makes the
calls. While the process is hibernated each of its CUDA calls blocks; ``wake`` brings the context back with addresses,
streams, modules and captured graphs. On the host driver what the process holds stops counting; its allocations block.
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
