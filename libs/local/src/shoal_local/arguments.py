"""What can be typed after `shoal`: one function a command, so that its options stand in one place."""

import argparse
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def parser() -> argparse.ArgumentParser:
    """Of the whole program; the chosen command's name is ``command``."""
    whole = argparse.ArgumentParser(prog="shoal", description="Shoal from the command line.")
    commands = whole.add_subparsers(dest="command", required=True)
    _add_up(commands)
    commands.add_parser("down", help="stop what `shoal up` started")
    _add_status(commands)
    _add_doctor(commands)
    _add_logs(commands)
    _add_chat(commands)
    _add_bench(commands)
    _add_store(commands)
    _add_explain(commands)
    return whole


def _add_up(commands: "Commands") -> None:
    up = commands.add_parser("up", help="start everything on this machine and stay until Ctrl-C")
    up.add_argument("--engine", choices=("vllm", "scripted"), help="scripted computes nothing: for tests")
    up.add_argument("-v", "--verbose", action="store_true", help="show every line of every process")


def _add_status(commands: "Commands") -> None:
    status = commands.add_parser("status", help="show what runs, again and again on a terminal")
    status.add_argument("--once", action="store_true", help="show it once and leave")
    status.add_argument("--every", type=positive, default=2.0, metavar="S", help="seconds between two looks (2)")
    _add_system(status)


def _add_doctor(commands: "Commands") -> None:
    doctor = commands.add_parser("doctor", help="say what is missing or wrong, and how to mend it")
    doctor.add_argument("--url", default="", help="of the gateway to send a request through; also SHOAL_URL")
    _add_system(doctor)


def _add_logs(commands: "Commands") -> None:
    logs = commands.add_parser("logs", help="show what the processes of `shoal up` wrote, merged by time")
    logs.add_argument("services", nargs="*", metavar="service", help="of these only: gateway, decode, nats, …")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what comes")
    logs.add_argument("--level", choices=("debug", "info", "warning", "error"), default="debug", help="this or graver")
    logs.add_argument("--request", default="", metavar="ID", help="lines of one request")


def _add_chat(commands: "Commands") -> None:
    chat = commands.add_parser("chat", help="talk to the model; see what was cached and how fast it was")
    _add_gateway(chat)
    chat.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    chat.add_argument("--max-tokens", type=positive_count, default=512, metavar="N", help="of an answer (512)")
    chat.add_argument("--temperature", type=not_negative, metavar="T", help="0 for the same answer each time")


def _add_bench(commands: "Commands") -> None:
    bench = commands.add_parser("bench", help="measure a running system by a short load")
    _add_gateway(bench)
    counts = (
        ("--requests", 8, "in all"),
        ("--concurrency", 2, "conversations side by side"),
        ("--turns", 2, "of a conversation; the first misses, the later ones hit"),
        ("--prompt-tokens", 300, "of a first turn, about"),
        ("--max-tokens", 16, "of an answer"),
    )
    for name, value, meaning in counts:
        bench.add_argument(name, type=positive_count, default=value, metavar="N", help=f"{meaning} ({value})")


def _add_gateway(talking: argparse.ArgumentParser) -> None:
    """Options of every command that sends requests."""
    talking.add_argument("--url", default="", help="of another gateway; also SHOAL_URL")
    talking.add_argument("--model", default="", metavar="NAME", help="if several are served")


def _add_store(commands: "Commands") -> None:
    store = commands.add_parser("store", help="show what is stored and what became of it")
    _add_system(store)


def _add_explain(commands: "Commands") -> None:
    explain = commands.add_parser("explain", help="say why a request did not hit more")
    explain.add_argument("request_id", help="the answer's header x-request-id, or its id chatcmpl-…")
    _add_system(explain)


def _add_system(asking: argparse.ArgumentParser) -> None:
    """Options of every command that asks a running system."""
    asking.add_argument("--nats", metavar="URL", help="of another system; also SHOAL_NATS_URL")
    asking.add_argument("--json", action="store_true", help="for programs")


def positive(text: str) -> float:
    """A number above 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def not_negative(text: str) -> float:
    """A number from 0 on."""
    number = float(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


def positive_count(text: str) -> int:
    """A whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number
