"""Makes docs/images/*.svg from a system that runs: `shoal up` in one terminal, this in another one.

What is drawn is what the commands wrote to a terminal, byte for byte; nothing is arranged.
"""

import codecs
import fcntl
import io
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
SHOAL = (sys.executable, "-m", "shoal_local")
COLUMNS = 104
WAIT_S = 180.0
PROMPT = "› "
SHIPS = "Here is a log of ships.\n" + "\n".join(
    f"Day {day}: the ship of captain number {day} came in with {3 * day} barrels of salt and {day + 7} sacks of corn."
    for day in range(1, 13)
)
QUESTIONS = ("What did captain 3 bring?", "And captain 5?", "Thank you!")


def recorded(arguments: tuple[str, ...], typed: tuple[str, ...] = ()) -> str:
    """What a command shows on a terminal to a person who types each text when the prompt comes."""
    keyboard, screen = pty.openpty()
    # Wide, so that nothing is wrapped before the picture is.
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 400 if typed else COLUMNS, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen((*SHOAL, *arguments), env=environ, stdin=screen, stdout=screen, stderr=screen)
    os.close(screen)
    shown, waiting, decode = "", [*typed], codecs.getincrementaldecoder("utf-8")().decode
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if select.select([keyboard], [], [], 0.2)[0]:
            try:
                shown += decode(os.read(keyboard, 65536))
            except OSError:  # the command ended
                break
        elif waiting and shown.endswith(PROMPT):
            os.write(keyboard, waiting.pop(0).encode())
    process.wait(timeout=10)
    os.close(keyboard)
    return shown.replace("\r\n", "\n")


def draw(name: str, command: str, shown: str) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Text(f"$ {command}", "bold"))
    # The end of the input, and of the terminal's mode for pastes, draw nothing.
    console.print(Text.from_ansi(shown.rstrip().removesuffix(PROMPT.strip()).rstrip()))
    path = IMAGES / f"{name}.svg"
    console.save_svg(str(path), title="shoal")
    path.write_text(path.read_text(encoding="utf-8").rstrip() + "\n", encoding="utf-8")


def main() -> None:
    typed = tuple(f"{question}\r" for question in QUESTIONS)
    chat = recorded(("chat", "--temperature", "0", "--system", SHIPS), (*typed, "\004"))
    draw("chat", 'shoal chat --temperature 0 --system "$(cat ships.txt)"', chat)
    with subprocess.Popen((*SHOAL, "bench", "--concurrency", "3"), stdout=subprocess.DEVNULL) as load:
        time.sleep(6.0)
        draw("status", "shoal status --once", recorded(("status", "--once")))
        load.wait(timeout=WAIT_S)


if __name__ == "__main__":
    main()
