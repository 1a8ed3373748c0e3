"""The routes, and what their bodies may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import Field, StrictBool, StrictStr

from common.decoding import TAGS, ForgetKV, ReleaseMemory, ResumeMemory, Tag
from common.serving.http.app import refusals
from common.serving.http.fields import Fields, Name
from common.serving.http.orders import refuse_unsupported
from common.serving.http.rollouts.asking import Rollouts
from common.serving.http.service import Service
from common.serving.messages import Continue, Pause


class PauseFields(Fields):
    mode: Literal["abort", "wait", "in_place"] = "abort"


class ContinueFields(Fields):
    """Nothing, in braces or not at all."""


class TagFields(Fields):
    tags: tuple[Tag, ...] = TAGS


class ReplaceFields(Fields):
    """model_path: of a folder on the server's machine. weight_version: null counts on."""

    model_path: Annotated[StrictStr, Field(min_length=1, max_length=4096)]
    load_format: Literal["auto", "safetensors"] = "auto"
    weight_version: Annotated[Name, Field(min_length=1)] | None = None
    abort_all_requests: StrictBool = False


_PAUSE, _CONTINUE, _ALL = PauseFields(), ContinueFields(), TagFields()
_DONE = {"success": True}


def add_rollouts(app: FastAPI, service: Service) -> None:
    """Add the routes to a server, whose API keys guard them as they do all others."""
    rollouts, refused = Rollouts(service.engine), refusals(400, 401, 403, 408, 409, 413, 503)

    @app.post("/pause_generation", responses=refused)
    async def pause(fields: PauseFields = _PAUSE) -> dict[str, bool]:
        refuse_unsupported(fields)
        await rollouts.ask(Pause(fields.mode))
        return _DONE

    @app.post("/continue_generation", responses=refused)
    async def go_on(fields: ContinueFields = _CONTINUE) -> dict[str, bool]:
        refuse_unsupported(fields)
        await rollouts.ask(Continue())
        return _DONE

    @app.get("/flush_cache", responses=refused)
    async def flush() -> dict[str, bool]:
        await rollouts.ask(ForgetKV())
        return _DONE

    @app.post("/flush_cache", responses=refused, include_in_schema=False)
    async def flush_too() -> dict[str, bool]:
        return await flush()

    @app.post("/update_weights_from_disk", responses=refused)
    async def update(fields: ReplaceFields) -> dict[str, Any]:
        refuse_unsupported(fields)
        version = await rollouts.replace(
            fields.model_path, fields.weight_version, is_aborting=fields.abort_all_requests
        )
        return {**_DONE, "message": f"the weights of {fields.model_path} are in force", "weight_version": version}

    @app.post("/release_memory_occupation", responses=refused)
    async def release(fields: TagFields = _ALL) -> dict[str, bool]:
        refuse_unsupported(fields)
        await rollouts.ask(ReleaseMemory(fields.tags))
        return _DONE

    @app.post("/resume_memory_occupation", responses=refused)
    async def resume(fields: TagFields = _ALL) -> dict[str, bool]:
        refuse_unsupported(fields)
        await rollouts.ask(ResumeMemory(fields.tags))
        return _DONE
