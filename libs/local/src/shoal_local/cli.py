"""`shoal`: every command, chosen by its first word.

`up`, `down` and `logs` are about the embedded system of a home; the others take any system, and that of the home when
none is named. Exit codes: 0 done, 1 it could not be done (a sentence says why), 2 it was asked for in a way that
is not understood, 3 nothing runs that could be shown, 78 a setting is wrong, 130 ended by Ctrl-C or by force.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from shoal_local.arguments import parser
from shoal_local.bench import BenchOptions, bench
from shoal_local.chat import ChatOptions, chat
from shoal_local.doctor.checkup import Target as DoctorTarget
from shoal_local.doctor.report import show_doctor
from shoal_local.home import Home, HomeUnusable
from shoal_local.index_commands import show_explanation, show_store, without_prefix
from shoal_local.logs import LogFilter, show_logs
from shoal_local.settings import LocalSettings
from shoal_local.status import NOTHING_RUNS, Subject, show_status
from shoal_local.terminal import leave_quietly
from shoal_local.up_down import down, up


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the console program."""
    chosen = parser().parse_args(arguments)
    if chosen.command == "up" and chosen.engine is not None:
        os.environ["SHOAL_ENGINE_KIND"] = chosen.engine
    settings = LocalSettings.load("local")
    home = Home(settings.home)
    try:
        code = _run(settings, home, chosen)
        sys.stdout.flush()  # here, where a reader that left is no error
        return code
    except HomeUnusable as exc:
        print(exc)
        return 1
    except BrokenPipeError:
        leave_quietly()
        return 1
    except KeyboardInterrupt:
        return 130


def _run(settings: LocalSettings, home: Home, chosen: argparse.Namespace) -> int:
    match chosen.command:
        case "up":
            return up(settings, home, is_verbose=chosen.verbose)
        case "down":
            return down(settings, home)
        case "chat":
            return _chat(settings, home, chosen)
        case "bench":
            return _bench(settings, home, chosen)
        case "doctor":
            return _doctor(settings, home, chosen)
        case "logs":
            wanted = LogFilter(chosen.level.upper(), without_prefix(chosen.request))
            return show_logs(home, chosen.services, wanted, is_following=chosen.follow)
        case "store" | "explain":
            return _ask_index(settings, home, chosen)
        case _:
            return _status(settings, home, chosen)


def _chat(settings: LocalSettings, home: Home, chosen: argparse.Namespace) -> int:
    options = ChatOptions(
        url=_gateway_url(settings, home, chosen.url),
        model=chosen.model,
        system=chosen.system,
        max_tokens=chosen.max_tokens,
        temperature=chosen.temperature,
    )
    return chat(options)


def _bench(settings: LocalSettings, home: Home, chosen: argparse.Namespace) -> int:
    options = BenchOptions(
        url=_gateway_url(settings, home, chosen.url),
        model=chosen.model,
        requests=chosen.requests,
        concurrency=chosen.concurrency,
        prompt_tokens=chosen.prompt_tokens,
        max_tokens=chosen.max_tokens,
        turns=chosen.turns,
    )
    return bench(options)


def _doctor(settings: LocalSettings, home: Home, chosen: argparse.Namespace) -> int:
    target = DoctorTarget(settings, home, chosen.nats or settings.nats_url, without_path(chosen.url or settings.url))
    return show_doctor(target, is_json=chosen.json)


def _gateway_url(settings: LocalSettings, home: Home, given: str) -> str:
    """As told; else of what runs from the home; else where that would listen."""
    if told := given or settings.url:
        return without_path(told)
    record = home.read()
    return record.gateway_url if record and home.is_running(record) else settings.gateway_url


def without_path(gateway_url: str) -> str:
    """As OpenAI's clients are told it, the address ends with /v1; as people type it, it has no http:// before it."""
    whole = gateway_url if "://" in gateway_url or not gateway_url else f"http://{gateway_url}"
    return whole.rstrip("/").removesuffix("/v1")


def _status(settings: LocalSettings, home: Home, chosen: argparse.Namespace) -> int:
    is_once = chosen.once or chosen.json or not sys.stdout.isatty()
    subject = Subject(home, chosen.nats or settings.nats_url)
    return show_status(subject, is_json=chosen.json, every_s=None if is_once else chosen.every)


def _ask_index(settings: LocalSettings, home: Home, chosen: argparse.Namespace) -> int:
    nats_url = chosen.nats or settings.nats_url
    if not nats_url:
        record = home.read()
        if record is None or not home.is_running(record):
            print(f"Nothing runs from {home.folder}. For a system elsewhere give --nats URL, or set SHOAL_NATS_URL.")
            return NOTHING_RUNS
        nats_url = record.nats_url
    if chosen.command == "explain":
        return show_explanation(nats_url, chosen.request_id, is_json=chosen.json)
    return show_store(nats_url, is_json=chosen.json)
