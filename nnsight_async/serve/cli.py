"""`nnsight-serve REPO`: a model for clients without a GPU."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nnsight_async.serve import access, frontend
from nnsight_async.serve.access import LOOPBACK, Keys
from nnsight_async.serve.policy import ServerLimits

PROGRAM = "nnsight-serve"
PORT = 6677

PYTHON = """\
run blocks of Python that clients send, for keys with the scope 'python'. Whoever may send one can do on this machine \
what the user can who has started the server"""

TAP = "where blocks may look, on an engine that replays CUDA graphs (docs/graphs.md); may be given several times"

OF_DATA = "a block that is data"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    from nnsight_async.vllm import VLLM

    frontend.check()
    parser = make_parser()
    args = parser.parse_args(list(sys.argv[1:] if arguments is None else arguments))
    defaults = parser.parse_args([])
    try:
        keys = check(args, defaults)
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    os.environ.pop("NNSIGHT_SERVE", None)  # the address of this very server, maybe
    repo = args.model_tag or args.model
    given = frontend.engine_args(args, defaults)
    args.model = repo
    args.disable_log_stats = given.get("disable_log_stats", True)
    ours = {"taps": args.tap, "max_save_bytes": args.max_save_bytes}
    with VLLM(repo, mode="async", dispatch=True, **ours, **given) as model:
        return serve(model, keys, args)


def serve(model: Any, keys: Keys, args: argparse.Namespace) -> int:
    """Serve until a signal comes, or the engine ends."""
    from nnsight_async.serve.server import Server

    server = Server(
        model,
        host=args.host,
        port=args.port,
        keys=keys,
        allow_python=args.allow_python,
        limits=limits_of(args),
        args=args,
        tls=tls_of(args),
    )

    asked: list[int] = []

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        server.stop()

    with server:
        gc.collect()
        gc.freeze()  # a full collection stops all streams for a third of a second, and most of what is there stays
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        print(f"{PROGRAM}: {model.repo} at {server.url}", flush=True)
        server.wait()
    if not asked:
        print(f"{PROGRAM}: the engine has ended", file=sys.stderr)
    return 0 if asked else 1


def make_parser() -> Any:
    """vLLM's options, and ours."""
    parser = frontend.parser(PROGRAM, "Serve traces, edits and vLLM's OpenAI API on one port, from one engine.")
    parser.set_defaults(host="127.0.0.1", port=PORT)
    ours, limits = parser.add_argument_group(PROGRAM), ServerLimits()
    ours.add_argument("--key-file", type=Path, help="a JSON file of keys with scopes (docs/serving.md)")
    ours.add_argument("--allow-python", action="store_true", help=PYTHON)
    ours.add_argument(
        "--without-key-off-loopback",
        action="store_true",
        help="serve whoever can reach this host, for everything, without a key",
    )
    ours.add_argument("--tap", action="append", default=[], help=TAP)
    ours.add_argument("--max-runs", type=int, default=limits.runs, help="runs of one key at a time")
    ours.add_argument("--max-run-seconds", type=float, default=limits.run_seconds, help="how long a run may take")
    ours.add_argument("--max-body-bytes", type=int, default=limits.body, help="bytes of a request")
    ours.add_argument("--max-save-bytes", type=int, default=1 << 28, help="bytes that a run may save")
    ours.add_argument(
        "--max-upload-bytes", type=int, default=limits.uploads, help="bytes of a key's requests and edits"
    )
    ours.add_argument("--max-block-bytes", type=int, default=limits.block_bytes, help=f"bytes that {OF_DATA} holds")
    ours.add_argument(
        "--max-all-block-bytes", type=int, default=limits.all_block_bytes, help="bytes that all of those hold"
    )
    return parser


def limits_of(args: argparse.Namespace) -> ServerLimits:
    return ServerLimits(
        body=args.max_body_bytes,
        runs=args.max_runs,
        run_seconds=args.max_run_seconds,
        uploads=args.max_upload_bytes,
        block_bytes=args.max_block_bytes,
        all_block_bytes=args.max_all_block_bytes,
    )


def check(args: argparse.Namespace, defaults: argparse.Namespace) -> Keys:
    """The keys; `ValueError` for options that do not go together, or that this server has not."""
    if not (args.model_tag or getattr(args, "model", None) != getattr(defaults, "model", None)):
        raise ValueError("which model? write `nnsight-serve REPO`")
    refused = frontend.refused(args, defaults)
    if refused is not None:
        raise ValueError(refused)
    frontend.validate(args)
    tls_of(args)
    keys = keys_of(args)
    if not keys and args.host not in LOOPBACK and not args.without_key_off_loopback:
        raise ValueError(
            f"--host {args.host} is not this machine alone, and there is no key: give --key-file, or a key as "
            "NNSIGHT_API_KEY; to serve whoever can reach this host, for everything, --without-key-off-loopback"
        )
    return keys


def keys_of(args: argparse.Namespace) -> Keys:
    """From `--key-file`, `--api-key`, or the environment."""
    given = [key for key in (args.api_key or [os.environ.get("NNSIGHT_API_KEY")]) if key]
    if args.key_file is not None:
        if args.api_key:
            raise ValueError("--key-file and --api-key: give one of them")
        return access.from_file(args.key_file)
    if len(given) > 1:
        raise ValueError("several keys go into a --key-file, with a name and scopes for each")
    return access.single(given[0]) if given else Keys([])


def tls_of(args: argparse.Namespace) -> dict[str, Any]:
    """uvicorn's options for TLS, as far as they are given; `ValueError` for what would be none."""
    names = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")
    given = {name: getattr(args, name, None) for name in names}
    if any(given.values()) and not given["ssl_certfile"]:
        raise ValueError("TLS needs a certificate: give --ssl-certfile with the other --ssl options")
    return {name: value for name, value in given.items() if value}


if __name__ == "__main__":
    sys.exit(main())
