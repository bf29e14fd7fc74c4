"""Registration of host memory with CUDA, by the driver's own functions: what is registered, the device reads in place.

An error of the driver's functions is returned; one of the runtime's would stay, and fail torch's next call.
"""

from __future__ import annotations

import ctypes
import mmap

_READ_ONLY = 8
"""CU_MEMHOSTREGISTER_READ_ONLY: the pages may be of a mapping that nobody can write through."""
_READ_ONLY_SUPPORTED = 113
"""CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED."""


class HostRegistration:
    """Registrations with the context of the calling thread."""

    def __init__(self) -> None:
        """OSError without the driver."""
        self._driver = ctypes.CDLL("libcuda.so.1")

    def works(self, device: int) -> bool:
        """Checks whether the device, the calling thread's, can read memory that it must not write, and whether this
        process may pin any."""
        value = ctypes.c_int()
        code = self._driver.cuDeviceGetAttribute(ctypes.byref(value), _READ_ONLY_SUPPORTED, device)
        if code or value.value != 1:
            return False
        page = mmap.mmap(-1, mmap.PAGESIZE)  # shared, as a segment is
        page[0] = 1
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        if not self.register(address, mmap.PAGESIZE):
            return False
        self.unregister(address)
        return True

    def register(self, address: int, size_bytes: int) -> bool:
        """Pins whole pages for the device to read; False if the driver refuses."""
        return not self._driver.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_uint(_READ_ONLY)
        )

    def unregister(self, address: int) -> None:
        """Ends the registration that begins at the address. Nothing of the device reads it any more."""
        self._driver.cuMemHostUnregister(ctypes.c_void_p(address))
