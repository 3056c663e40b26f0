"""A run that is killed while it saves continues from a whole checkpoint, bit for bit. VLAFORGE_CRASH_KILLS=30 kills
it thirty times, over all formats in the foreground and the background (crash.py); three are cheap enough."""

import os
import subprocess
import sys
from pathlib import Path

KILLS = int(os.environ.get("VLAFORGE_CRASH_KILLS", "3"))
WAYS = 6


def test_killed_while_saving():
    script = Path(__file__).with_name("crash.py")
    command = [sys.executable, str(script), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300 + 60 * KILLS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": equal") == min(KILLS, WAYS)
