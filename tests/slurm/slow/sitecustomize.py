"""In front of an array task's path: every flush to disk takes a tenth of a second longer, so that
it can be met at work."""

import os
import time

fsync = os.fsync


def slow_fsync(descriptor: int) -> None:
    time.sleep(0.1)
    fsync(descriptor)


os.fsync = slow_fsync
