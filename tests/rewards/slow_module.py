"""A module that takes its time to be imported."""

import time

time.sleep(2.0)
VALUE = 1.0
