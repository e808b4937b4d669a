"""Run a script, and end a moment later.

A process aborts if its interpreter ends while a thread of gloo waits for the GIL, to free tensors
of the last collective (pytorch/pytorch#190489).
"""

import runpy
import sys
import time

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
time.sleep(0.1)
