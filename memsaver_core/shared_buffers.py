"""Device memory that the processes of one engine share, and that can go away and come back at the same addresses.

Memory of CUDA IPC handles cannot be released, and a process that has used one cannot be checkpointed. These buffers are
virtual memory: a process makes one and hands a file descriptor of it to the others, for example by ``socket.send_fds``;
each maps it at its own address, which never changes. Before a hibernation every process drops what it imported, then
each owner releases its buffers; afterwards each owner restores and exports anew, then the others map again.
"""

from __future__ import annotations

import weakref

from memsaver_core import _native, process

_imported: weakref.WeakSet[ImportedBuffer] = weakref.WeakSet()


class SharedBuffer(_native.SharedBuffer):
    """A buffer of this process, for other processes to map: ``address`` is its device address here, which never
    changes, ``nbytes`` the size that importers name. Any method may raise DriverError, ContextLostError or
    ForkedProcessError; the buffer is then as it was, and the call can be repeated.

    ``export_fd()`` returns a new descriptor of the memory, for ``ImportedBuffer`` in another process; the caller closes
    it. Raises ConfigurationError while the buffer is released.

    ``release()`` copies the content to host memory and gives the device memory back; does nothing while released. The
    device gets it once no other process maps it and no exported descriptor is open. Raises OutOfHostMemoryError if
    there is no host memory for the content.

    ``restore()`` brings memory and content back; does nothing while resident. The memory is new and has to be exported
    again. Raises OutOfDeviceMemoryError if the device has too little free memory; the buffer stays released.
    """

    def __init__(self, device_index: int, nbytes: int) -> None:
        """Allocate ``nbytes`` zeros, rounded up to what a device maps at once (2 MiB on NVIDIA GPUs), on torch's device
        ``device_index``. Raises ConfigurationError if there is none, OutOfDeviceMemoryError if it has too little."""
        super().__init__(process.saver(), device_index, nbytes)


class ImportedBuffer(_native.ImportedBuffer):
    """A ``SharedBuffer`` of another process. ``address`` is its device address in this process, which never changes;
    nothing may use it unless ``mapped``. ``nbytes`` is the size. Any method may raise DriverError, ContextLostError or
    ForkedProcessError; the call can be repeated.

    ``drop()`` unmaps the memory and drops it; does nothing while dropped.

    ``map_again(fd)`` maps the memory of a descriptor, which remains the caller's, at the same address as before. Raises
    ConfigurationError if the buffer is mapped, or the descriptor is of another size.
    """

    def __init__(self, fd: int, nbytes: int, device_index: int) -> None:
        """Map the ``SharedBuffer`` of ``nbytes`` that exported ``fd``, which stays the caller's, who may close it now,
        for torch's device ``device_index``; the memory may lie on another one. Raises ConfigurationError if there is no
        such device, or the descriptor is of another size."""
        super().__init__(process.saver(), fd, nbytes, device_index)
        _imported.add(self)


def is_imported(address: int) -> bool:
    """Return whether a buffer of another process has this address, mapped or dropped."""
    return any(buffer.address == address for buffer in list(_imported))


def imported_bytes() -> int:
    """Return the bytes that this process maps of other processes' memory now."""
    return sum(buffer.nbytes for buffer in list(_imported) if buffer.mapped)
