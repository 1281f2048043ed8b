"""A training script without torch that ends in its second attempt, and says what it is told."""

import os
import signal
import sys
import time


def told(*_: object) -> None:
    print("told", flush=True)


signal.signal(signal.SIGTERM, told)
print("at work", flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    sys.exit()
while True:
    time.sleep(0.05)
