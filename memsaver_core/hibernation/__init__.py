"""Hibernation: give back what remains of the process on the device, its CUDA context included.

The driver checkpoints a process only on behalf of another one, so the calls come from a small helper process, started
at the first use. While the process is hibernated, each of its CUDA calls blocks; ``wake`` brings the context back as it
was: addresses, streams, modules and captured graphs. The host driver has no context; there, what the process still
holds of the device stops counting, and its allocations block.
"""

from memsaver_core.hibernation.hibernation import Hibernation

_this = Hibernation()
device_lock = _this.device_lock
fail = _this.fail
failure = _this.failure
helper_pid = _this.helper_pid
hibernate = _this.hibernate
is_away = _this.is_away
is_hibernated = _this.is_hibernated
obstacles = hibernation_obstacles = _this.obstacles
raise_if_lost = _this.raise_if_lost
read_memory = _this.read_memory
wake = _this.wake
