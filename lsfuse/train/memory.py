"""What the process holds of the host's memory."""

import ctypes


def release_freed_memory() -> None:
    """Hands memory that was freed back to the system, where the C library can (glibc's `malloc_trim`).

    XLA's compiler frees what it worked with, some 400 MB for a step of 8 blocks, and glibc keeps it in pieces too
    small for the step's buffers: resident, and of no use.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
