"""A tiny engine for tests of the holder: speaks the control wire and misbehaves as told.

`python scripted.py --instance-dir DIR [--ignore-term] [--child] [--delay-ms N] [--noise BYTES]`
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from worker.engines.messages import ControlCommand, Drain, Park, Shutdown, State
from worker.engines.wire import BrokenStream, decoder, receive, send


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--instance-dir", type=Path, required=True)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--delay-ms", type=int, default=0)
    parser.add_argument("--noise", type=int, default=0)
    options = parser.parse_args()
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (options.instance_dir / "child").write_text(str(child.pid))
    print("x" * options.noise, flush=True)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(options.instance_dir / "control.sock"))
    commands = decoder(ControlCommand)
    try:
        while True:
            command = receive(sock, commands)
            if isinstance(command, Drain):
                time.sleep(options.delay_ms / 1000)
            send(sock, State(attached=None, awake=False, running=0, bytes_mapped=0, bytes_kv=0, bytes_private=os.getpid()))
            if isinstance(command, Shutdown):
                return
            if isinstance(command, Park):
                sock.close()
                signal.pause()
    except BrokenStream:
        return


if __name__ == "__main__":
    main()
