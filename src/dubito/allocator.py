"""The allocator setting that CPU convolutions need.

glibc hands blocks above 32 MB back to the system when they are freed, so that every large activation is mapped
and zeroed anew at each step: 40 % of the time of a convolutional network's evaluation. Keeping such blocks makes
evaluation in batches of 1,000 about twice as fast, at the price of memory that stays with the process. The same
can be had without calling anything, by the environment variables MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_
(both 4294967296) and MALLOC_TOP_PAD_ (268435456).
"""

import ctypes
import sys

# Numbers of mallopt(3); its values are ints, so 2 GiB is the most that can be asked for.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
LARGEST = 2**31 - 1


def keep_large_blocks() -> bool:
    """Let this process keep large freed blocks; returns whether its allocator took the setting.

    Call it before the first large tensor is made. Only glibc has the setting; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl and others
        return False
    settings = {MMAP_THRESHOLD: LARGEST, TRIM_THRESHOLD: LARGEST, TOP_PAD: 1 << 28}
    return all(mallopt(name, value) == 1 for name, value in settings.items())
