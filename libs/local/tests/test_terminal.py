"""Ends that are no errors: a reader that left."""

import subprocess
import sys

PROGRAM = """
import sys
from shoal_local.terminal import leave_quietly
print("first", flush=True)
sys.stdin.read()
try:
    print("nobody reads this", flush=True)
except BrokenPipeError:
    leave_quietly()
"""


def test_nothing_is_said_of_a_reader_that_left():
    pipe, argv = subprocess.PIPE, (sys.executable, "-c", PROGRAM)
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
