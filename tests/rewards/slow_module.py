"""A module that is slow to import."""

import time

time.sleep(2.0)
VALUE = 1.0
