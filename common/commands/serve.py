"""`lopa serve`: answer requests over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from common.commands.options import OptionalCount, OptionalText, ProfileOption, RunArgument, SetOption, load_to_run


def serve(
    run: RunArgument,
    profile: ProfileOption,
    set: SetOption = None,
    host: Annotated[OptionalText, typer.Option("--host", help="The address to listen on.")] = None,
    port: Annotated[OptionalCount, typer.Option("--port", help="The port to listen on; 0 takes a free one.")] = None,
    api_key_file: Annotated[
        OptionalText, typer.Option("--api-key-file", help="A file with one API key a line; so has LOPA_API_KEYS.")
    ] = None,
) -> None:
    """Answer requests over HTTP, as OpenAI's API does, until SIGTERM or Ctrl-C.

    The model, what it is called and what requests have by default stand in the run file; its input and output are not
    used. For a profile of several processes use scripts/serve.sh, which starts them.
    """
    from common.serving import serve as serve_run

    device_profile, run_config = load_to_run(profile, run, [*(set or []), *_overrides(host, port, api_key_file)])

    def build() -> Any:
        # Here: probes are answered while torch is being loaded.
        from common.generate import build_generator

        return build_generator(device_profile, run_config)

    serve_run(device_profile, run_config, build)


def _overrides(host: str | None, port: int | None, api_key_file: str | None) -> list[str]:
    given = {"host": host, "port": port, "api_key_file": api_key_file}
    return [f"serve.{name}={value}" for name, value in given.items() if value is not None]
