"""A run that is killed while it saves continues from a whole checkpoint, bit for bit (see crash.py for thirty
kills)."""

import subprocess
import sys
from pathlib import Path


def test_killed_while_saving():
    script = Path(__file__).with_name("crash.py")
    done = subprocess.run([sys.executable, str(script), "3"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 3
