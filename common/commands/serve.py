"""`lopa serve`: answer requests over HTTP."""

from __future__ import annotations

import json
import logging
import os
from typing import Annotated, Any

import typer

from common.commands.arguments.found import load_both
from common.commands.arguments.options import (
    ModelArgument,
    OptionalText,
    ProfileOption,
    SaveRunOption,
    SetOption,
    make_ready,
    save_run_file,
)
from common.errors import ConfigError


def _port(text: str | None) -> str | None:
    """Raises ConfigError for what is no port."""
    if text is not None and not (text.isascii() and text.isdecimal() and int(text[:9]) <= 65535):
        raise ConfigError(f"--port: {text!r:.50} is no port; give a number from 0 to 65535, where 0 takes a free one")
    return text


def _not_empty(param: typer.CallbackParam, value: str | None) -> str | None:
    """Raises ConfigError: an empty variable of a script must not open the server to all, for one."""
    if value is not None and not value.strip():
        raise ConfigError(f"{param.opts[0]}: it is empty; name one, or leave the option out")
    return value


def serve(
    model: ModelArgument,
    profile: ProfileOption = None,
    set: SetOption = None,
    host: Annotated[OptionalText, typer.Option("--host", help="The address to listen on.", callback=_not_empty)] = None,
    port: Annotated[
        OptionalText,
        typer.Option("--port", metavar="PORT", help="The port to listen on; 0 takes a free one.", callback=_port),
    ] = None,
    api_key_file: Annotated[
        OptionalText,
        typer.Option(
            "--api-key-file",
            help="A file with one API key on each line, besides those in LOPA_API_KEYS.",
            callback=_not_empty,
        ),
    ] = None,
    otlp_traces_endpoint: Annotated[
        OptionalText,
        typer.Option(
            "--otlp-traces-endpoint",
            metavar="URL",
            help="Send OpenTelemetry traces to this collector.",
            callback=_not_empty,
        ),
    ] = None,
    save_run: SaveRunOption = None,
) -> None:
    """Answer requests over HTTP, as OpenAI's API does, until SIGTERM or Ctrl-C.

    The settings are the defaults of a request. A run file's input and output are not used. For a profile whose
    replicas have several processes, such as cuda_bp2 for two GPUs, use scripts/serve.sh PROFILE MODEL; with
    DRY_RUN=true in front it prints the commands and starts nothing.
    """
    from common.serving import REPLICA, starts_replicas
    from common.serving import serve as serve_run

    settings = [*(set or []), *_overrides(host, port, api_key_file, otlp_traces_endpoint)]
    replica = os.environ.get(REPLICA)
    who = "lopa" if replica is None else f"lopa: replica {replica}"
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {who}: %(message)s"))
    device_profile, run_config = load_both(profile, model, settings, takes_many=True)
    make_ready(device_profile, "scripts/serve.sh", starts_others=starts_replicas(device_profile, run_config))
    save_run_file(save_run, run_config)

    def build() -> Any:
        # Here: probes are answered while torch is being loaded.
        from common.generate import build_generator

        return build_generator(device_profile, run_config)

    serve_run(device_profile, run_config, build)


def _overrides(host: str | None, port: str | None, api_key_file: str | None, traces: str | None) -> list[str]:
    """Texts in quotes: a file may be called null."""
    number = None if port is None else int(port)
    given = {"host": host, "port": number, "api_key_file": api_key_file, "otlp_traces_endpoint": traces}
    return [f"serve.{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
