"""A module that is slow to import."""

import time

time.sleep(5.0)
VALUE = 1.0
